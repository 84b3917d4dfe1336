"""Messages of failures that a vendor reads, and of the kit's own run: order, profiles, time."""

import ast
import json
import re
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forks import run_kit
from kit_runs import PLAIN
from vllm.model_executor.custom_op import CustomOp

from model_runner_base import ModelRunnerWorker
from model_runner_base.step.sizes import StepKind, StepSize
from model_runner_base.testing import explanation, precision
from model_runner_base.testing.estimate import Estimate, RunningTime, in_words, load, record
from model_runner_base.testing.interfaces import drifted_methods
from model_runner_base.testing.mismatch import Case, Difference, Mismatch, check_equal, check_same, first_difference
from model_runner_base.testing.order import CHECKS, LAST, rank, sort_checks
from model_runner_base.testing.profiles import PROFILES, leave_out
from model_runner_base.testing.rerun import Held, WatchedStep, describe_cache
from model_runner_base.testing.shrinking import shrink
from model_runner_base.testing.step_log import StepLog
from model_runner_base.testing.table import PromiseTable
from model_runner_base.testing.words import show

pytestmark = pytest.mark.once

LOSES_KEYS = """
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainWorker
from model_runner_base.attention.cache_format import CacheFormat
write = CacheFormat.write
caches = []
def lose(self, kv_cache, blocks, offsets, key, value):
    if all(kv_cache is not cache for cache in caches):
        caches.append(kv_cache)
    key, value = key.clone(), value.clone()
    is_second = next(i for i, cache in enumerate(caches) if cache is kv_cache) % 2 == 1
    if self.num_kv_heads == 2:
        key[37:] = 0
    elif len(key) == 1 and offsets[0] == 6 and is_second:
        value[:] = 0
    write(self, kv_cache, blocks, offsets, key, value)
CacheFormat.write = lose
"""
"""Device that loses keys of long chunks in a model with two KV heads, which is Llama, whose step begins with a row of
padding. Of GPT-2 it loses the values of one slot of the second layer in decode. Both have an even number of layers."""


def test_sentence_of_a_device_that_loses_keys(tmp_path: Path) -> None:
    """The table names the smallest case, the step, and the first wrong slot, and shows no whole prompt."""
    (tmp_path / "vendor.py").write_text(LOSES_KEYS)
    device = ["vendor.PlainWorker", "--platform", "vendor.PlainPlatform"]
    run = run_kit([*device, "-k", "test_one_request and (llama or gpt2)"], tmp_path, COLUMNS="400")
    assert run.status == 1, run.printed[-5000:]
    chunk = re.search(
        r"llama, prompt of (\d+) tokens: output 0 is \d+, not \d+; step 1, mixed, 1 row, (\d+) tokens padded to \d+; "
        r"keys of layer 0 at position 36 \(block \d+, slot 4\) differ after step 1\b",
        run.printed,
    )
    assert chunk and chunk[1] == chunk[2] and 37 <= int(chunk[1]) < 50, run.printed[-5000:]
    decode = re.search(
        r"gpt2, prompt of 1 token: output (\d+) is \d+, not \d+; step (\d+), decode, 1 row, 1 token; "
        r"values of layer 1 at position 6 \(block \d+, slot 6\) differ after step 7\b",
        run.printed,
    )
    assert decode and int(decode[2]) == int(decode[1]) + 1 > 7, run.printed[-5000:]
    # Nothing but the count follows the table, and no list of tokens is in it.
    after = run.printed.partition("Conformance of")[2]
    assert not re.search(r"(\d+, ){12}", after) and len(after.strip().splitlines()) < 12, after
    assert "Warning" not in run.printed


def test_sentence_of_a_step_that_was_told_the_wrong_slot() -> None:
    """Metadata that name another slot than the scheduler's are told: the sentence has both slots."""
    name, rng = "model.layers.0.attn", np.random.default_rng(0)
    keys, values = rng.random((3, 1, 4)), rng.random((3, 1, 4))
    wrong = keys.copy()
    wrong[2] = np.nan
    held = Held(np.arange(3), np.array([5, 5, 7]), np.array([0, 1, 0]), 2, wrong, values)
    row = SimpleNamespace(positions=[0, 1, 2], slots={name: np.array([10, 11, 15])})
    step: Any = WatchedStep(1, SimpleNamespace(requests={"a": row}), {}, {"a": {name: held}})  # type: ignore[arg-type]
    found = describe_cache([step], "a", [(keys, values)])
    assert str(found) == (
        "keys of layer 0 at position 2 (block 7, slot 0) differ after step 1, and were to be written to block 7, slot 1"
    )
    step.held["a"][name] = held._replace(keys=keys)
    assert describe_cache([step], "a", [(keys, values)]) == "all keys and values in its cache are right"
    assert describe_cache([step], "a", [(keys + 1, values + 1)]) == ""


def test_smoke_has_a_check_of_each_group() -> None:
    """The profile smoke runs each check once, of every group but the soak, in the kit's order."""
    run = run_kit([*PLAIN, "--profile", "smoke", "--collect-only"])
    checks = re.findall(r"^test_(\w+)\.py::(\w+)", run.printed, re.M)
    assert len(checks) == len(set(checks)) > 80, run.printed[-3000:]
    later = {"later_experts", "later_parameters", "unequal_heads", "mixed_prompts", "sparse_attention"}
    groups = {path.stem.removeprefix("test_") for path in CHECKS.glob("test_*.py")} - {*LAST, *later}
    assert {group for group, _ in checks} - later == groups
    ranks = [rank(group) for group, _ in checks]
    assert ranks == sorted(ranks) and checks[0][0] == "interfaces"


def items(*names: str, folder: Path = CHECKS) -> list[Any]:
    """Stand-ins of pytest's items, by group and name."""
    parts = [name.split("::") for name in names]
    return [
        SimpleNamespace(path=folder / f"test_{group}.py", name=name, originalname=name.partition("[")[0])
        for group, name in parts
    ]


def names_of(checks: Sequence[Any]) -> list[str]:
    return [f"{item.path.stem.removeprefix('test_')}::{item.name}" for item in checks]


def test_order_and_profiles() -> None:
    """Rows that others rest on come first and the soak last; a vendor's own tests stay, whatever their names."""
    checks = items("soak::a", "lora::a[1]", "lora::a[2]", "seeds::b", "equality::c", "start::d", "pooling::e")
    own = items("soak::own[1]", "soak::own[2]", folder=Path("vendor"))
    both = [*checks, *own]
    sort_checks(both)
    order = ["start::d", "equality::c", "seeds::b", "lora::a[1]", "lora::a[2]", "pooling::e"]
    assert names_of(both) == [*order, "soak::own[1]", "soak::own[2]", "soak::a"]
    assert names_of(leave_out(PROFILES["smoke"], both)) == ["lora::a[2]", "soak::a"]
    assert leave_out(PROFILES["default"], both) == leave_out(PROFILES["full"], both) == []


def test_estimate(tmp_path: Path) -> None:
    """The time left follows the device's speed; a check that was never recorded counts as its neighbours do."""
    recorded = {"a::x[1]": 10.0, "a::x[2]": 20.0, "b::y": 100.0, "c::z": 30.0}
    names = ["a::x[1]", "a::x[3]", "b::new", "d::w", "c::z"]
    estimate = Estimate(names, recorded, {"c": 0.1})
    assert estimate.total == 10 + 15 + 100 + 40 + 3
    estimate.done("a::x[1]", 30.0)
    assert estimate.ratio == (30 + 10) / (10 + 10) and estimate.left() == 158 * 2
    assert [in_words(seconds) for seconds in (2, 42, 70, 290)] == [
        "about 5 seconds",
        "about 40 seconds",
        "about a minute",
        "about 5 minutes",
    ]
    record({"b::y": 1.234, "e::v": 2}, file := tmp_path / "durations.json")
    record({"b::y": 3.456}, file)
    assert load(file) == {"b::y": 3.46, "e::v": 2}


NOT_RECORDED = dict.fromkeys(("ranks", "stages", "replicas"), "it needs two devices")
"""Groups without a recorded time, and why."""


def test_recorded_times_are_of_checks() -> None:
    """The file that the kit ships has a time of each check of both releases, so that estimates come near."""
    checks = {
        f"{path.stem.removeprefix('test_')}::{node.name}"
        for path in CHECKS.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    recorded = {name.partition("[")[0] for name in load()}
    missing = {check for check in checks - recorded if check.partition("::")[0] not in NOT_RECORDED}
    assert (missing, recorded - checks) == (set(), set()), "docs/conformance.md says how times are recorded"


def test_shrinking() -> None:
    """The smallest case: the one request whose prompt has a 7 after 20 tokens, cut as short as it fails."""
    long = tuple(range(100, 180))
    prompts = [long[:30], (*long[:20], 7, *long[:40]), long]

    def fails(case: Case) -> Difference | None:
        for index, prompt in enumerate(case.prompts):
            if 7 in prompt[20:] and case.counts[index] > 5:
                return Difference(index, 5, 1, 2)
        return None

    start = Case(prompts, [9, 12, 9])
    found, difference, is_cut = shrink(start, Difference(1, 5, 1, 2), fails, seconds=30)
    assert found == Case([prompts[1][:21]], [6]) and difference.request == 0 and not is_cut
    assert shrink(start, Difference(1, 5, 1, 2), fails, seconds=-1) == (start, Difference(1, 5, 1, 2), True)


def test_a_rerun_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose requests do not end holds up its report for a minute at most; the sentence says what was cut."""
    core = SimpleNamespace(
        scheduler=SimpleNamespace(requests={"a": 1}, finish_requests=lambda *args: ended.append(args))
    )
    front = SimpleNamespace(request_states={"a": 1}, abort_requests=lambda *args, **kwargs: None)
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core), output_processor=front, step=lambda: time.sleep(0.01)
    )
    llm: Any = SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None)
    ended: list[Any] = []

    def run(llm: Any, prompts: list[tuple[int, ...]], counts: list[int]) -> list[list[int]]:
        while True:
            llm.llm_engine.step()

    model: Any = SimpleNamespace(path=Path("llama"), greedy=lambda prompt, count: [7] * count)
    monkeypatch.setattr(explanation, "watch_case", lambda llm: nullcontext([]))
    with pytest.raises(Mismatch) as raised:
        check_equal(model, [(1, 2, 3)], [[7, 8]], [2], run)
    sentence = explanation.explain(raised.value, llm, StepLog(), seconds=0.2)
    assert sentence == (
        "llama, prompt of 3 tokens: output 1 is 8, not 7; the search for a smaller case was cut after 0.2 s; its rerun "
        "was cut after 0.2 s"
    )
    assert len(ended) == 2 and ended[0][0] == ["a"], "the requests of a cut run are left in the engine"
    assert explanation.explain(raised.value, llm, StepLog(), is_shrinking=False, seconds=0.2).count("cut") == 1


def logged(
    log: StepLog,
    name: str,
    start: int,
    count: int,
    drafts: int,
    tokens: list[int] | None,
    others: int = 0,
    prompt: Sequence[int] = (5,) * 40,
) -> None:
    """Feeds a log with a step of one request, and with what the scheduler is told of it: nothing without ``tokens``."""
    names = [name, *(f"other {index}" for index in range(others))]
    batch = SimpleNamespace(
        req_ids=names,
        num_computed=np.array([start] + [0] * others),
        query_len=np.array([count] + [1] * others),
        drafts={name: [0] * drafts},
    )
    runner = SimpleNamespace(parts=SimpleNamespace(graph=SimpleNamespace(run=lambda batch, step: None)))
    request = SimpleNamespace(prompt_token_ids=list(prompt))
    scheduler = SimpleNamespace(requests=dict.fromkeys(names, request), update_from_output=lambda *args: None)
    log.attach(runner, scheduler)
    runner.parts.graph.run(batch, SimpleNamespace(size=StepSize(StepKind.MIXED, (48, 2, 2))))
    if tokens is not None:
        output = SimpleNamespace(req_ids=names, sampled_token_ids=[tokens, *[[]] * others])
        scheduler.update_from_output(None, output)


def test_step_of_a_wrong_token() -> None:
    """The log finds the step of a token by prompt and tokens: after chunks, wrong drafts, preemption, in any turn."""
    log, prompt = StepLog(), (5,) * 40
    logged(log, "a", 0, 32, 0, [], others=1)
    logged(log, "a", 32, 8, 0, [7])
    logged(log, "a", 40, 4, 3, [8, 9])
    logged(log, "a", 44, 4, 3, [10])  # The host counts three drafts as right, of which one was.
    logged(log, "a", 0, 32, 0, [])
    logged(log, "a", 32, 12, 0, [11])
    tokens = [7, 8, 9, 10, 11]
    steps = [log.place_of(prompt, tokens, output).step.number for output in range(5)]  # type: ignore[union-attr]
    assert steps == [2, 3, 3, 4, 6]
    assert str(log.place_of(prompt, tokens, 4)) == (
        "step 6, mixed, 1 row, 12 tokens padded to 48; its prompt: in 2 chunks, preempted 1 time"
    )
    assert str(log.place_of(prompt, tokens, 1)).startswith(
        "step 3, mixed, 1 row, 4 tokens padded to 48; its prompt: in 2"
    )
    assert log.place_of(prompt, [7, 8, 10], 2) is None and log.place_of(prompt[1:], tokens, 0) is None
    assert str(log.place_of(prompt, tokens, 5)).startswith("step 6"), "a missing output comes after the last one"
    logged(log, "b", 16, 24, 0, [7], others=2)
    assert str(log.place_of(prompt, [7], 0)) == (
        "step 1, mixed, 3 rows, 26 tokens padded to 48; its prompt: 16 tokens cached"
    )
    assert log.place_of(prompt, [], 0).step.number == 1  # type: ignore[union-attr]


def test_step_of_one_of_two_requests() -> None:
    """Requests with prompts of one length and with the same tokens are told apart; so are steps without an output."""
    log, prompts = StepLog(), [(5,) * 40, (6,) * 40]
    logged(log, "a", 0, 40, 0, [7], others=1)
    logged(log, "lost", 0, 40, 0, None, others=1)
    logged(log, "b", 0, 40, 0, [7], others=1, prompt=prompts[1])
    places = [log.place_of(prompt, [7], 0) for prompt in prompts]
    assert [place and place.step.number for place in places] == [1, 3]


def test_words() -> None:
    """A difference is one short clause; a long prompt shows its ends."""
    assert str(first_difference([[1, 2], [3, 4]], [[1, 2], [5, 4]])) == "output 0 is 3, not 5"
    assert str(first_difference([[1]], [[1, 2]])) == "output 1 is missing, 2 is right"
    assert str(first_difference([[1, 2]], [[1]])) == "output 1 is 2, after the right end"
    assert str(Difference(0, 1, 2, 3, hint="padding")) == "output 1 is 2, not 3 (padding)"
    assert first_difference([[1]], [[1]]) is None
    assert show(range(150)) == "[0, 1, 2, ... 148, 149] (150 tokens)"


def test_a_file_of_an_earlier_run(tmp_path: Path) -> None:
    """An option's value may name a file or folder that exists, such as the last results: all checks still run."""
    (tmp_path / "results.json").write_text("[]")
    (tmp_path / "equality").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("raise RuntimeError('this is no file of the kit')")
    run = run_kit([*PLAIN, "--collect-only", "-k", "equality", "--results", "results.json"], tmp_path)
    assert run.status == 0 and "test_one_request" in run.printed, run.printed[-3000:]


def test_a_run_that_is_killed(tmp_path: Path) -> None:
    """Leaves a file with the rows so far. A row of which no case has ended has kept nothing."""
    file = tmp_path / "results.json"
    config: Any = SimpleNamespace(getoption={"worker": "vendor.Worker", "results": file}.get)
    table = PromiseTable(config)
    for promise, when in (("kept", "call"), ("interrupted", "setup")):
        table.pytest_runtest_logreport(
            SimpleNamespace(promise=("a", promise), case="", refusal=None, failed=False, passed=True, when=when)
        )
    records = json.loads(file.read_text())
    assert {record["promise"]: record["result"] for record in records} == {"kept": "passes", "interrupted": "not run"}
    assert table.render().row_count == 2


def test_a_run_that_is_told_to_end(tmp_path: Path) -> None:
    """SIGTERM ends the run after the check in progress, and the table has what has run."""
    first = "def test_first():\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(0.01)\n"
    (tmp_path / "test_own.py").write_text(f"import os, signal, time\n{first}def test_second():\n    pass\n")
    run = run_kit([*PLAIN, "test_own.py"], tmp_path, COLUMNS="300")
    rows = re.findall(r"^  own +(\w+) +(\w+)", run.printed, re.MULTILINE)
    assert run.status == 2 and rows == [("first", "passes")], run.printed[-3000:]
    assert "ended by SIGTERM" in run.printed


def test_checks_that_cannot_look() -> None:
    """A case that cannot be looked at is neither kept nor broken; the table says why, and how many tokens counted."""
    config: Any = SimpleNamespace(getoption={"worker": "vendor.Worker"}.get)
    table = PromiseTable(config)

    def report(promise: str, not_looked: str | None, counts: tuple[int, int]) -> None:
        kinds = {"refusal": None, "failed": False, "passed": not_looked is None, "when": "call"}
        table.pytest_runtest_logreport(
            SimpleNamespace(promise=("a", promise), case="", not_looked=not_looked, reason=None, counts=counts, **kinds)
        )

    report("some", None, (30, 40))
    report("some", None, (5, 10))
    report("partly", None, (1, 1))
    report("partly", "no reason", (0, 0))
    report("none", "no such layout", (0, 0))
    rows = {row["promise"]: (row["result"], row["reason"]) for row in table.as_records()}
    assert rows == {
        "some": ("passes 2 cases", "35 of 50 tokens counted"),
        "partly": ("not looked 1 of 2", "no reason"),
        "none": ("not looked", "no such layout"),
    }


def test_two_runs_in_a_dtype_that_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs may differ in few tokens, each from some place on; many, or a missing one, are a failure."""
    prompts = [(3, index) for index in range(4)]
    names = [f"request {index}" for index in range(4)]
    want = [list(range(20))] * 4
    one_flip = [*want[:3], [*range(10), 77, *range(11, 20)]]
    with pytest.raises(Mismatch, match="request 3: output 10 is 77, not 10"):
        check_same(one_flip, want, names, prompts)
    monkeypatch.setattr(precision.PRECISION, "dtype", torch.bfloat16)
    check_same(one_flip, want, names, prompts)
    for wrong in ([[9, *tokens[1:]] for tokens in want], [*want[:3], want[3][:19]]):
        with pytest.raises(Mismatch, match=r"request \d: output (0 is 9, not 0|19 is missing)"):
            check_same(wrong, want, names, prompts)


def test_times_that_are_printed() -> None:
    """The time left is not printed again while it is the same."""
    lines: list[str] = []
    terminal = SimpleNamespace(ensure_newline=lambda: None, write_line=lines.append)
    options = {"schedules": 15, "draws": 2000}
    plugins = SimpleNamespace(get_plugin=lambda name: terminal)
    running = RunningTime(SimpleNamespace(getoption=options.get, pluginmanager=plugins))  # type: ignore[arg-type]
    running._estimate = Estimate(["a", "b", "c"], {"a": 100.0, "b": 180.0, "c": 5.0}, {})
    for name in ("", "c", "b"):
        running._start -= 1000
        running._estimate.leave_out(name)
        running._show_time_left()
    assert [line.partition(";")[0] for line in lines] == ["about 5 minutes left", "about 2 minutes left"]


class AnyArguments(CustomOp):
    """Operator as a vendor has it, whose base takes any arguments."""

    def __init__(self) -> None: ...

    def forward_oot(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return x


class OneArgument(ModelRunnerWorker):
    """Worker whose method lacks what vLLM calls it with."""

    def load_model(self, *, other: int) -> None: ...


def test_methods_whose_base_takes_any_arguments() -> None:
    """A base that takes ``*args`` and ``**kwargs`` alone does not show how it is called."""
    (drifted,) = drifted_methods([sys.modules[__name__]], [])
    assert drifted.startswith("OneArgument.load_model")
