"""The conformance kit catches deliberate faults: each is put into the base of one process, which the kit must fail."""

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from devices import MODULES
from fault import BASE, FaultyModule
from forks import WITHOUT_SEARCH, Run, run_kit
from lane import HAS_OPENXLA
from mutation import REPEAT, Mutation
from mutations import MUTATIONS

ROOT = BASE.parent
HERE = [mutation for mutation in MUTATIONS if mutation.is_later is not HAS_OPENXLA]
"""Faults that this lane runs the kit with."""


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Run]]]:
    """The kit's runs on every mutation that is tested and on the base as it is, two at a time."""
    directory = tmp_path_factory.mktemp("mutations")
    for name, text in MODULES.items():
        (directory / f"{name}.py").write_text(text)
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    tests = [item for item in tests if item.originalname == "test_the_kit_catches"]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        control = Mutation("control", "__init__.py", "", "", f"{REPEAT} or test_min_tokens")
        runs = [control, *(test.callspec.params["mutation"] for test in tests)]  # type: ignore[attr-defined]
        yield {mutation.name: pool.submit(run_with, mutation, directory) for mutation in runs}
        pool.shutdown(wait=False, cancel_futures=True)


def run_with(mutation: Mutation, directory: Path) -> Run:
    """Runs the kit on the example device, or a variant of it, over a base with the fault."""
    device = [f"{mutation.device}.PlainWorker", "--platform", f"{mutation.device}.PlainPlatform"]
    options = ["-x", "--no-shrinking", "--assert=plain", *WITHOUT_SEARCH, "-k", mutation.selection]
    environment = {"VLLM_PLUGINS": "", "COLUMNS": "200"}
    # The host's loops as plain Python: what is kept of them, compiled, goes by the files, and not by the faults.
    as_plain_python = {"compiles_loops": False, "timeout_s": 600}
    return run_kit([*device, *options], directory, FaultyModule(mutation), **as_plain_python, **environment)


@pytest.mark.once
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_replaces_one_place(mutation: Mutation) -> None:
    assert (BASE / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new


@pytest.mark.once
def test_the_base_as_it_is_passes(verdicts: dict[str, Future[Run]]) -> None:
    run = verdicts["control"].result()
    assert run.status == 0, run.printed[-3000:]
    assert len(re.findall(r" passes ", run.printed)) >= 2


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("mutation", HERE, ids=lambda mutation: mutation.name)
def test_the_kit_catches(mutation: Mutation, verdicts: dict[str, Future[Run]]) -> None:
    """A deliberate fault fails a row of the kit's table, which says what is wrong."""
    run = verdicts[mutation.name].result()
    assert run.status == 1, f"{run.status}: {run.printed[-3000:]}"
    assert re.search(r" FAILS ", run.printed), run.printed[-3000:]


@pytest.mark.once
def test_the_list_in_the_documentation_is_this_one() -> None:
    """docs/tables/faults.md shows every mutation and what catches it."""
    text = (ROOT / "docs" / "tables" / "faults.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \|$", text, re.MULTILINE)
    assert rows == [(mutation.name, mutation.file, mutation.selection) for mutation in MUTATIONS]
