"""Platform that vLLM activates where another vendor's plugin is installed next to this distribution's."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACME = ROOT / "tests" / "plugin" / "acme"

ASK = "from vllm.platforms import current_platform; print('PLATFORM', type(current_platform).__name__)"
ON_NEURON = "import neuron_runner.environment; neuron_runner.environment._driver_shows_device = lambda: True\n"
"""A stand-in for the device files of Neuron's driver."""
ASK_EACH = """
import json, os, sys
import vllm.platforms  # The platform is resolved when it is asked for, in a fork for each environment.
for variables in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        os.environ |= variables
        print("PLATFORM", type(vllm.platforms.current_platform).__name__, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""

ONLY_ONE = "Only one platform plugin can be activated"


def install(folder: Path, name: str, target: str) -> None:
    """Writes the files that an installer leaves of a distribution with this entry point."""
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{name} = {target}\n")


def ask(folder: Path, code: str = ASK, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Starts a process that resolves vLLM's platform."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{ACME}:{ROOT}", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def platforms_in(environments: list[dict[str, str]], folder: Path, before: str = "") -> list[str]:
    """Platforms that vLLM takes in each of several environments, after the code ``before``."""
    out = ask(folder, before + ASK_EACH, json.dumps(environments))
    platforms = re.findall(r"^PLATFORM (\w+)$", out.stdout, re.MULTILINE)
    assert len(platforms) == len(environments), out.stdout[-3000:] + out.stderr[-3000:]
    return platforms


WITH_ACME = [
    ("answers", {}, "AcmePlatform"),
    ("silent", {}, "NeuronPlatform"),
    ("raises", {}, "NeuronPlatform"),
    ("answers", {"VLLM_NEURON_RUNNER": "0"}, "AcmePlatform"),
    ("silent", {"VLLM_NEURON_RUNNER": "0"}, "UnspecifiedPlatform"),
    ("silent", {"VLLM_NEURON_RUNNER": "1"}, "NeuronPlatform"),
    ("answers", {"VLLM_PLUGINS": "neuron"}, "NeuronPlatform"),
    ("answers", {"VLLM_PLUGINS": "neuron,acme"}, "AcmePlatform"),
    ("answers", {"VLLM_PLUGINS": "acme"}, "AcmePlatform"),
]
"""Behaviour of the other plugin, variables, and the platform that vLLM then takes."""


def test_another_vendors_plugin_goes_first(tmp_path: Path) -> None:
    install(tmp_path, "acme", "acme_plugin:register")
    environments = [{"ACME": acme} | variables for acme, variables, _ in WITH_ACME]
    assert platforms_in(environments, tmp_path) == [platform for *_, platform in WITH_ACME]


def test_a_plugin_that_cannot_be_imported_does_not_count(tmp_path: Path) -> None:
    install(tmp_path, "acme", "no_such_module:register")
    out = ask(tmp_path)
    assert out.stdout.endswith("PLATFORM NeuronPlatform\n"), out.stderr[-3000:]


def test_asked_for_beside_a_plugin_that_answers_vllm_says_so(tmp_path: Path) -> None:
    install(tmp_path, "acme", "acme_plugin:register")
    out = ask(tmp_path, ACME="answers", VLLM_NEURON_RUNNER="1")
    assert out.returncode != 0 and ONLY_ONE in out.stderr


def test_on_a_neuron_device_a_warning_says_how_to_choose(tmp_path: Path) -> None:
    install(tmp_path, "acme", "acme_plugin:register")
    out = ask(tmp_path, ON_NEURON + ASK, ACME="answers")
    assert out.returncode != 0 and ONLY_ONE in out.stderr
    assert "the platform plugin acme answers too: set VLLM_PLUGINS" in out.stdout + out.stderr
    environments = [
        {"VLLM_PLUGINS": "neuron"},
        {"VLLM_NEURON_RUNNER": "0"},
        # The device is there for others: torch_xla runs on the host.
        {"PJRT_DEVICE": "CPU"},
    ]
    platforms = platforms_in([{"ACME": "answers"} | each for each in environments], tmp_path, ON_NEURON)
    assert platforms == ["NeuronPlatform", "AcmePlatform", "AcmePlatform"]


@pytest.mark.parametrize("name", ["acme", "zeta"])
def test_a_plugin_that_asks_others_in_turn_ends(name: str, tmp_path: Path) -> None:
    """One of the two plugins answers; which one depends on their names alone."""
    install(tmp_path, name, "acme_plugin:register")
    out = ask(tmp_path, ACME="yields")
    platform = "AcmePlatform" if name < "neuron" else "NeuronPlatform"
    assert out.stdout.endswith(f"PLATFORM {platform}\n"), out.stderr[-3000:]


@pytest.mark.parametrize("name", ["acme", "zeta"])
def test_a_plugin_with_the_same_rule_ends(name: str, tmp_path: Path) -> None:
    """The rule of this distribution is copied to another one, and one of the two answers."""
    twin = tmp_path / "twin_runner"
    twin.mkdir()
    for file in ("__init__.py", "environment.py", "plugins.py"):
        text = (ROOT / "neuron_runner" / file).read_text().replace("neuron_runner", "twin_runner")
        (twin / file).write_text(text.replace('OWN_NAME = "neuron"', f'OWN_NAME = "{name}"'))
    (twin / "platform.py").write_text("from acme_plugin import AcmePlatform as NeuronPlatform\n")
    install(tmp_path, name, "twin_runner:register")
    out = ask(tmp_path)
    platform = "AcmePlatform" if name < "neuron" else "NeuronPlatform"
    assert out.stdout.endswith(f"PLATFORM {platform}\n"), out.stderr[-3000:]
