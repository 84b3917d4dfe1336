"""The conformance kit catches deliberate faults: each is put into a copy of the base, which the kit must fail."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from mutations import MUTATIONS, STEADY, Mutation

ROOT = Path(__file__).parents[1]
BASE = "model_runner_base"
TIMEOUT_S = 600

Kit = Callable[[Mutation], Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """The kit's runs on every mutation and on the base as it is, two at a time."""
    directory = tmp_path_factory.mktemp("mutations")
    with ThreadPoolExecutor(2) as pool:
        control = Mutation("control", "__init__.py", "", "", f"{STEADY} or test_min_tokens")
        runs = [control, *MUTATIONS]
        yield {
            mutation.name: pool.submit(run_kit, mutation, directory / str(number))
            for number, mutation in enumerate(runs)
        }
        pool.shutdown(wait=False, cancel_futures=True)


def run_kit(mutation: Mutation, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs the kit's command on the example device over a mutated copy of the base."""
    shutil.copytree(ROOT / BASE, directory / BASE, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "plain_device.py", directory / "examples")
    path = directory / BASE / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new, 1) if mutation.old else text)
    device = ["examples.plain_device.PlainWorker", "--platform", "examples.plain_device.PlainPlatform"]
    return subprocess.run(
        [sys.executable, "-m", f"{BASE}.testing", *device, "-x", "--no-shrinking", "-k", mutation.selection],
        # The host's loops as plain Python: every copy would have to compile its own.
        env={
            **os.environ,
            "PYTHONPATH": str(directory),
            "VLLM_PLUGINS": "",
            "COLUMNS": "200",
            "NUMBA_DISABLE_JIT": "1",
        },
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_replaces_one_place(mutation: Mutation) -> None:
    assert (ROOT / BASE / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new


def test_the_base_as_it_is_passes(verdicts: dict[str, Future]) -> None:
    run = verdicts["control"].result()
    assert run.returncode == 0, run.stdout[-3000:]
    assert len(re.findall(r" passes ", run.stdout)) >= 2


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_kit_catches(mutation: Mutation, verdicts: dict[str, Future]) -> None:
    """By a row of its table, which says what is wrong."""
    run = verdicts[mutation.name].result()
    assert run.returncode == 1, f"{run.returncode}: {run.stdout[-3000:]}{run.stderr[-3000:]}"
    assert re.search(r" FAILS ", run.stdout), run.stdout[-3000:]


def test_the_list_in_the_documentation_is_this_one() -> None:
    """docs/conformance.md shows every mutation and what catches it."""
    text = (ROOT / "docs" / "conformance.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \|$", text, re.MULTILINE)
    assert rows == [(mutation.name, mutation.file, mutation.selection) for mutation in MUTATIONS]
