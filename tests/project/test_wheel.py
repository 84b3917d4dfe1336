"""The wheel in a vendor's environment: nothing there changes, the vendor's platform goes first, and the kit runs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = ("model_runner_base", "__editable__")
"""Beginnings of names in site-packages that an environment without this distribution does not have."""

INSTALLED = (
    "import importlib.metadata as m; print(*sorted(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the vLLM of this lane, which another Python wrote nothing into."""

    folder: Path

    @property
    def packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def run(self, *arguments: str | Path) -> str:
        """Runs its Python outside of this repository, and returns what was printed."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM", "PYTHON"))}
        ran = subprocess.run(
            [self.folder / "bin" / "python", *arguments],
            cwd=self.folder,
            env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        return ran.stdout

    def install(self, wheel: Path) -> None:
        """Installs by pip without an index, so that a missing or wrong dependency is an error."""
        self.run("-m", "pip", "install", "--quiet", "--no-index", wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the files that a checkout has."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("model_runner_base", "gpu_runner", "neuron_runner"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return build(source, folder)


def build(source: Path, folder: Path) -> Path:
    command = [Path(sys.executable).parent / "uv", "build", "--quiet", "--wheel", "--out-dir", folder, source]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def vendors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """An environment with the packages of this lane but for this distribution: links to the same files."""
    environment = Environment(tmp_path_factory.mktemp("vendor") / "environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment.folder], check=True)
    environment.packages.rmdir()
    ignore = shutil.ignore_patterns(*(f"{name}*" for name in OWN))
    shutil.copytree(sysconfig.get_path("purelib"), environment.packages, ignore=ignore, copy_function=link)
    yield environment
    shutil.rmtree(environment.folder)


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # Another file system.
        os.symlink(source, target)


def test_what_the_wheel_has(wheel: Path) -> None:
    """Modules, marks of typed packages, data of the kit, and the licence; no tests, examples or caches."""
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = ("model_runner_base", "gpu_runner", "neuron_runner")
    ours = {str(path.relative_to(ROOT)) for name in packages for path in (ROOT / name).rglob("*") if path.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == {name for name in ours if "__pycache__" not in name}
    assert {f"{name}/py.typed" for name in packages} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.newest
def test_a_vendors_environment_is_left_as_it_is(wheel: Path, vendors: Environment, tmp_path: Path) -> None:
    """One distribution is added. The vendor's package then finds it, gets its platform, and passes the kit's start."""
    before = vendors.run("-c", INSTALLED).split()
    vendors.install(wheel)
    after = vendors.run("-c", INSTALLED).split()
    assert set(after) - set(before) == {"model-runner-base==0.1.0"} and set(before) <= set(after)

    shutil.copytree(ROOT / "examples" / "acme_device", tmp_path / "source", ignore=shutil.ignore_patterns("*.egg-info"))
    vendors.install(build(tmp_path / "source", tmp_path / "wheel"))
    ask = "from vllm.platforms import current_platform; print(type(current_platform).__name__)"
    assert vendors.run("-c", ask).split()[-1] == "AcmePlatform"
    kit = ["-m", "model_runner_base.testing", "acme_device.worker.AcmeWorker", "-p", "no:cacheprovider"]
    table = vendors.run(*kit, "-k", "test_one_request and llama")
    assert " passes " in table and "FAILS" not in table, table
