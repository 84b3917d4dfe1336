"""The conformance kit catches deliberate faults: each is put into a copy of the base, which the kit must fail."""

import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from devices import MODULES
from mutation import REPEAT, Mutation
from mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
BASE = "model_runner_base"
TIMEOUT_S = 600

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.image_processing_auto",
        "transformers.models.llama.modeling_llama",
        "torch._inductor.compile_fx",
        "torch.utils.cpp_extension",
        "mistral_common.protocol.instruct.normalize",
        "gguf",
        "ray",
        "scipy.signal",
        "openai.types.responses",
        "fastapi",
        "scipy.stats",
        "hypothesis.stateful",
        "pytest",
    ]
)
"""Each fault has a process of its own, forked from one that has imported what is large, and nothing of the base;
nor numba, whose compiler ``kit`` turns off."""


class Run(NamedTuple):
    status: int | None
    """None after the timeout."""
    printed: str


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Run]]]:
    """The kit's runs on every mutation that is tested and on the base as it is, two at a time."""
    directory = tmp_path_factory.mktemp("mutations")
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == "test_the_kit_catches"]
    with ThreadPoolExecutor(2) as pool:
        control = Mutation("control", "__init__.py", "", "", f"{REPEAT} or test_min_tokens")
        runs = [control, *(test.callspec.params["mutation"] for test in tests)]  # type: ignore[attr-defined]
        yield {
            mutation.name: pool.submit(run_kit, mutation, directory / str(number))
            for number, mutation in enumerate(runs)
        }
        pool.shutdown(wait=False, cancel_futures=True)


def run_kit(mutation: Mutation, directory: Path) -> Run:
    """Runs the kit on the example device, or a variant of it, over a mutated copy of the base."""
    # Compiled files too, which go by their sources' times, but not what another process is writing.
    shutil.copytree(ROOT / BASE, directory / BASE, ignore=shutil.ignore_patterns("*.pyc.*"))
    (directory / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "plain_device.py", directory / "examples")
    for name, text in MODULES.items():
        (directory / f"{name}.py").write_text(text)
    path = directory / BASE / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new, 1) if mutation.old else text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    process = FORKS.Process(target=kit, args=(directory, mutation.device, mutation.selection))
    process.start()
    process.join(TIMEOUT_S)
    status = process.exitcode
    process.kill()
    return Run(status, (directory / "printed").read_text())


def kit(directory: Path, device: str, selection: str) -> None:
    """The kit's command, in a process of its own."""
    printed = os.open(directory / "printed", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    # The host's loops as plain Python: every copy would have to compile its own.
    os.environ |= {"VLLM_PLUGINS": "", "COLUMNS": "200", "NUMBA_DISABLE_JIT": "1"}
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    from model_runner_base.testing import __main__ as command

    assert Path(command.__file__).is_relative_to(directory)
    classes = [f"{device}.PlainWorker", "--platform", f"{device}.PlainPlatform"]
    sys.exit(command.main([*classes, "-x", "--no-shrinking", "--assert=plain", "-k", selection]))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_replaces_one_place(mutation: Mutation) -> None:
    assert (ROOT / BASE / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new


def test_the_base_as_it_is_passes(verdicts: dict[str, Future[Run]]) -> None:
    run = verdicts["control"].result()
    assert run.status == 0, run.printed[-3000:]
    assert len(re.findall(r" passes ", run.printed)) >= 2


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_kit_catches(mutation: Mutation, verdicts: dict[str, Future[Run]]) -> None:
    """By a row of its table, which says what is wrong."""
    run = verdicts[mutation.name].result()
    assert run.status == 1, f"{run.status}: {run.printed[-3000:]}"
    assert re.search(r" FAILS ", run.printed), run.printed[-3000:]


def test_the_list_in_the_documentation_is_this_one() -> None:
    """docs/conformance.md shows every mutation and what catches it."""
    text = (ROOT / "docs" / "conformance.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \|$", text, re.MULTILINE)
    assert rows == [(mutation.name, mutation.file, mutation.selection) for mutation in MUTATIONS]
