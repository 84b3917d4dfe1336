"""Sizes that are made while steps are served: their order, and that a size is offered once all of it is compiled."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner_base.runner import background
from model_runner_base.runner.background import BackgroundCompiler
from model_runner_base.step.graph_policy import BucketPolicy, Wait
from model_runner_base.step.guard import StepGuard
from model_runner_base.step.sizes import Dim, StepKind, StepLimits, StepSize, Tiling

LIMITS = StepLimits(99, 9, 99, Tiling(1, 64), Tiling(64, 64), (Dim("tokens", (1.0,) * 3), Dim("rows", (1.0,) * 3)))


def decode(tokens: int, rows: int) -> StepSize:
    return StepSize(StepKind.DECODE, (tokens, rows))


def bucket_policy(sizes: list[StepSize]) -> BucketPolicy:
    policy = BucketPolicy()
    policy.configure(LIMITS)
    policy.set_sizes(sizes)
    return policy


class Compiling(BucketPolicy):
    """Policy whose compilations end when ``end`` is called with what they are of."""

    num_at_a_time = 2

    def __init__(self) -> None:
        self.configure(LIMITS)
        self.begun: list[str] = []
        self._ended: dict[str, threading.Event] = {}
        self._errors: dict[str, Exception] = {}
        self.changed = threading.Event()

    def compile_in_background(self, run: Callable[[], None]) -> Wait:
        run()
        what = self.begun[-1]
        self._ended[what] = threading.Event()

        def wait() -> None:
            self._ended[what].wait(20)
            if what in self._errors:
                raise self._errors[what]

        self.changed.set()
        return wait

    def offer(self, size: StepSize) -> None:
        super().offer(size)
        self.changed.set()

    def end(self, what: str, error: Exception | None = None) -> None:
        self.until(lambda: what in self._ended)
        if error is not None:
            self._errors[what] = error
        self._ended[what].set()

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            assert condition() or self.changed.wait(20)


class Runner:
    """Stand-in for a runner whose sizes are being made; a part takes ``seconds`` to be traced."""

    def __init__(self, policy: Compiling, guard: StepGuard, seconds: float) -> None:
        self.graph_policy, self.guard, self.seconds = policy, guard, seconds
        self.vllm_config: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.pending: Any = None
        self.parts = SimpleNamespace(repeat=self)
        self.num_stops = 0
        self.is_tracing = threading.Event()

    def stop(self) -> None:
        assert self.guard.lock.locked()
        self.num_stops += 1

    def trace(self, what: str) -> None:
        assert self.guard.lock.locked(), "a step may run while this is traced"
        assert self.pending is None
        self.is_tracing.set()
        sleep(self.seconds)
        self.graph_policy.begun.append(what)


def runs_of(runner: Runner, size: StepSize) -> Iterator[tuple[object, Callable[[], None]]]:
    """Runs of a size: its model, and what sizes with as many rows share."""
    tokens, rows = size.dims
    yield size, lambda: runner.trace(f"model {tokens}")
    yield ("rows", rows), lambda: runner.trace(f"rows {rows}")


class Served:
    """Sizes of 8, 4 and 2 tokens, of which the first is made."""

    def __init__(self, seconds: float = 0) -> None:
        sizes = [decode(8, 2), decode(4, 2), decode(2, 1)]
        self.policy, self.guard = Compiling(), StepGuard(0)
        self.policy.set_sizes(sizes)
        self.runner, self.compiler = Runner(self.policy, self.guard, seconds), BackgroundCompiler(self.guard)
        assert self.policy.largest_sizes(sizes) == sizes[:1]
        self.policy.offer_only(sizes[:1])
        self.compiler.queue(sizes[1:], sizes[:1], runs_of, self.runner)


def test_a_size_is_offered_when_all_its_parts_are_compiled() -> None:
    served = Served()
    policy = served.policy
    served.compiler.start()
    policy.end("model 4")
    policy.until(lambda: len(policy.begun) == 4)
    assert policy.dispatch(decode(1, 1)) == decode(8, 2)
    policy.end("rows 2")
    policy.until(lambda: decode(4, 2) in policy.offered)
    assert policy.dispatch(decode(1, 1)) == decode(4, 2)
    assert policy.dispatch(decode(5, 1)) == decode(8, 2)
    policy.end("rows 1")
    policy.end("model 2")
    served.compiler.wait()
    assert policy.dispatch(decode(1, 1)) == decode(2, 1)
    assert sorted(policy.begun) == ["model 2", "model 4", "rows 1", "rows 2"]
    assert served.runner.num_stops == 2


def test_where_steps_are_slow_sizes_wait_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made while steps go on that no size makes half as dear; then the sizes are made."""
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.2)
    served = Served()
    served.policy.is_slow = True
    served.policy.dispatch(decode(1, 1))
    for count in range(30):
        with served.guard:
            sleep(0.01)
        if count == 0:
            served.compiler.start()
    assert not served.policy.begun
    for what in ("model 4", "rows 2", "model 2", "rows 1"):
        served.policy.end(what)
    served.compiler.wait()
    assert len(served.policy.offered) == 3


def test_where_compiling_blocks_steps_each_part_waits_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the size that steps want most is not begun while they go on; nor is the rest of a size that is begun."""
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.2)
    served = Served(seconds=0.1)
    served.policy.compiles_in_pauses = True
    served.policy.dispatch(decode(1, 1))

    def serve() -> None:
        for _ in range(30):
            with served.guard:
                sleep(0.01)

    with served.guard:
        served.compiler.start()
    serve()
    assert not served.policy.begun
    assert served.runner.is_tracing.wait(20)
    serve()  # The first of these steps waits for the part that is being made.
    assert len(served.policy.begun) == 1
    for what in ("model 4", "rows 2", "model 2", "rows 1"):
        served.policy.end(what)
    served.compiler.wait()
    assert len(served.policy.offered) == 3


def test_a_caller_who_waits_for_all_sizes_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.2)
    served, is_over = Served(), threading.Event()
    served.policy.is_slow = True
    served.policy.dispatch(decode(1, 1))

    def step() -> None:
        while not is_over.is_set():
            with served.guard:
                sleep(0.005)
            sleep(0.005)

    def end_all() -> None:
        for what in ("model 4", "rows 2", "model 2", "rows 1"):
            served.policy.end(what)

    threads = [threading.Thread(target=run) for run in (step, end_all)]
    with served.guard:
        pass
    for thread in threads:
        thread.start()
    served.compiler.start()
    try:
        served.compiler.wait()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(served.policy.offered) == 3


def test_sizes_that_make_slow_steps_half_as_dear_are_worth_it() -> None:
    """Whether a size is worth it depends on the last steps; reading the weights costs as much as sixteen tokens."""
    small, medium, large = decode(20, 1), decode(600, 2), decode(800, 2)
    policy = bucket_policy([small, medium, large])
    policy.offer_only([large])
    policy.dispatch(decode(20, 1))
    assert policy.is_worth_it(medium)
    policy.is_slow = True
    assert policy.is_worth_it(small) and not policy.is_worth_it(medium)
    for _ in range(9):
        policy.dispatch(large)
    assert not policy.is_worth_it(small)
    tiny = bucket_policy([decode(1, 1), decode(12, 1)])
    tiny.offer_only([decode(12, 1)])
    tiny.is_slow = True
    tiny.dispatch(decode(1, 1))
    assert not tiny.is_worth_it(decode(1, 1))


def test_nothing_is_traced_within_a_step() -> None:
    served = Served()
    with served.guard:
        served.compiler.start()
        sleep(0.05)
        assert not served.policy.begun
    for what in ("model 4", "rows 2", "model 2", "rows 1"):
        served.policy.end(what)
    served.compiler.wait()


def test_a_step_waits_for_one_part_at_most() -> None:
    served, counts = Served(seconds=0.05), [0]
    served.compiler.start()
    while len(served.policy.begun) < 4:
        with served.guard:
            counts.append(len(served.policy.begun))
    for what in ("model 4", "rows 2", "model 2", "rows 1"):
        served.policy.end(what)
    served.compiler.wait()
    assert max(after - before for before, after in pairwise(counts)) == 1


def test_nothing_is_traced_between_the_halves_of_a_step() -> None:
    served = Served()
    served.runner.pending = "a step that is not sampled"
    served.compiler.start()
    sleep(0.05)
    assert not served.policy.begun
    served.runner.pending = None
    for what in ("model 4", "rows 2", "model 2", "rows 1"):
        served.policy.end(what)
    served.compiler.wait()


def test_an_engine_that_is_dropped_makes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is dropped makes no more sizes, and the next engine does not wait for those that were left."""
    served = Served()
    policy, background_compiler = served.policy, served.compiler
    policy.num_at_a_time = 1
    background_compiler.start()
    policy.until(lambda: len(policy.begun) == 2)
    runner = weakref.ref(served.runner)
    del served
    gc.collect()
    assert runner() is None, "the engine is kept alive for sizes that are of no use"
    for what in list(policy.begun):
        policy.end(what)
    BackgroundCompiler(StepGuard(0))
    assert not background_compiler.is_making and len(policy.begun) == 2


def test_an_engine_does_not_wait_for_one_that_sleeps() -> None:
    served = Served()
    served.compiler.is_held = True
    served.compiler.start()
    other = threading.Thread(target=BackgroundCompiler, args=(StepGuard(0),), daemon=True)
    other.start()
    other.join(10)
    has_waited = other.is_alive()
    assert served.compiler.is_making and not served.policy.begun
    served.compiler.stop()
    served.compiler.wait()
    assert not has_waited


def test_several_workers_leave_nothing() -> None:
    served = Served()
    served.runner.vllm_config.parallel_config.world_size = 2
    with pytest.raises(ValueError, match="several workers have to make all sizes first"):
        served.compiler.queue([decode(4, 2)], [], runs_of, served.runner)


def test_a_failure_keeps_out_what_needs_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    served, warnings = Served(), list[str]()
    monkeypatch.setattr(background.logger, "warning", lambda text, *values: warnings.append(text % values))
    served.compiler.start()
    served.policy.end("rows 2", MemoryError("too large\nin many lines"))
    for what in ("model 4", "model 2", "rows 1"):
        served.policy.end(what)
    with pytest.raises(MemoryError, match="too large"):
        served.compiler.wait()
    assert served.policy.offered == [decode(2, 1), decode(8, 2)]
    (warning,) = warnings
    assert warning.endswith("failed to compile: too large")


def test_a_stopped_engine_begins_no_other_size() -> None:
    served = Served()
    served.policy.num_at_a_time = 1
    served.compiler.start()
    served.policy.until(lambda: len(served.policy.begun) == 2)
    served.compiler.stop()
    for what in list(served.policy.begun):
        served.policy.end(what)
    served.compiler.wait()
    assert len(served.policy.begun) == 2 and len(served.policy.offered) == 2


SIZES = st.lists(
    st.builds(StepSize, st.sampled_from(list(StepKind)), st.tuples(st.integers(1, 6), st.integers(1, 6))),
    min_size=1,
    max_size=12,
    unique=True,
)


@given(SIZES, st.data())
@settings(deadline=None)
def test_the_first_sizes_hold_every_step(sizes: list[StepSize], data: st.DataObject) -> None:
    """A step runs at the cheapest size that is compiled. Once all are, the choice is as if they always had been."""
    everything, policy = bucket_policy(sizes), bucket_policy(sizes)
    first = policy.largest_sizes(policy.sizes)
    policy.offer_only(first)
    standing = set(first)
    left = [size for size in policy.sizes if size not in standing]
    assert not any(a.holds(b) for a in first for b in first if a != b)
    while True:
        for need in sizes:
            found = policy.dispatch(need)
            assert found in standing and found.holds(need)
            assert policy.cost(found) == min(policy.cost(size) for size in standing if size.holds(need))
        if not left:
            break
        size = data.draw(st.sampled_from(left))
        left.remove(size)
        standing.add(size)
        policy.offer(size)
    assert [policy.dispatch(need) for need in sizes] == [everything.dispatch(need) for need in sizes]


def test_what_steps_ask_for_is_made_first() -> None:
    """The size that saves most over all sizes is made first; once steps came, the size that they would run at."""
    sizes = [decode(tokens, 1) for tokens in (64, 32, 16, 8, 4, 2)]
    policy = bucket_policy([*sizes, StepSize(StepKind.MIXED, (65, 1)), StepSize(StepKind.MIXED, (64, 1))])
    policy.offer_only([decode(64, 1), StepSize(StepKind.MIXED, (65, 1))])
    left = [size for size in policy.sizes if size not in policy.offered]
    # 16 makes itself and three smaller ones four times cheaper; 8 makes three sizes eight times cheaper.
    assert policy.most_wanted(left) in (decode(16, 1), decode(8, 1))
    for _ in range(5):
        policy.dispatch(decode(27, 1))
    policy.dispatch(decode(3, 1))
    assert policy.most_wanted(left) == decode(32, 1)
    policy.offer(decode(32, 1))
    assert policy.most_wanted([size for size in left if size != decode(32, 1)]) == decode(4, 1)
