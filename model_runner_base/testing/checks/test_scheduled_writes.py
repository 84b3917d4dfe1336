"""Steps write the cache slots of their own tokens, and nothing else; what lay in the cache before changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm import LLM

from model_runner_base.step.trace import StepTrace
from model_runner_base.testing.cache_layout import backend_of, cache_layers, numbers_by_shape
from model_runner_base.testing.checks.test_schedules import OPTIONS, Bench, Run, bench_of
from model_runner_base.testing.engine import core_of, runner_of, wait_for_sizes
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.precision import NotLooked
from model_runner_base.testing.schedules import NULL_BLOCK, Share

Start = Callable[..., LLM]
Checkpoint = Callable[[str], TinyModel]
SENTINEL = 7.0


class Caches:
    """The KV caches of an engine, read and overwritten whole between steps."""

    def __init__(self, llm: LLM) -> None:
        """Raises NotLooked where the device keeps its caches elsewhere than the runner, or where nothing tells which
        numbers a slot has."""
        self._runner: Any = runner_of(llm)
        if not self._runner.parts.kv_caches:
            raise NotLooked("the device keeps its caches outside of the runner, whose kv_caches is empty")
        self._ops = self._runner.device_ops
        self.num_blocks: int = core_of(llm).scheduler.kv_cache_config.num_blocks
        self.block_size: int = llm.llm_engine.vllm_config.cache_config.block_size
        self._runner.parts.bind_kv_caches()
        layers, known = [*cache_layers(llm).values()], dict[Any, np.ndarray]()
        self._numbers: list[np.ndarray] = []
        """Indices [slots, numbers of a slot] into each flattened cache."""
        for cache in self._runner.parts.kv_caches:
            layer = next((each for each in layers if each.cache is cache), None)
            layer = layer or next((each for each in layers if self._is_same(each.cache, cache)), None)
            form = layer.form if layer else backend_of(cache, self._runner, self._is_same)
            key = (form, tuple(cache.shape), cache.dtype)
            if key not in known:
                known[key] = (
                    layer.numbers_of_slots()
                    if layer
                    else numbers_by_shape(cache.shape, self.num_blocks, self.block_size, form)
                )
            self._numbers.append(known[key])

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        address: int = self._ops.buffer_address(one)
        return address == self._ops.buffer_address(other)

    def fill(self, value: float) -> None:
        for cache in self._runner.parts.kv_caches:
            self._ops.overwrite(cache, self._ops.upload(torch.full(cache.shape, value, dtype=cache.dtype)))
        self._ops.synchronize()

    def read(self) -> list[np.ndarray]:
        """Contents of each cache by slot, [slots, numbers of a slot] float32."""
        caches = zip(self._runner.parts.kv_caches, self._numbers, strict=True)
        return [self._contents(cache)[numbers] for cache, numbers in caches]

    def _contents(self, cache: torch.Tensor) -> np.ndarray:
        contents: np.ndarray = self._ops.to_host(cache if cache.dtype == torch.float32 else cache.float())
        return contents.reshape(-1)


def slot_name(slot: int, caches: Caches) -> str:
    block, offset = divmod(slot, caches.block_size)
    words = f"slot {offset} of block {block}"
    if slot == caches.num_blocks * caches.block_size - 1:
        words += ", the last slot of the last block: does padding write slot -1?"
    return words


def test_after_warm_up(engine: Start, tiny_model: Checkpoint) -> None:
    """Warm-up leaves finite numbers in the null block, and zeros in all others."""
    llm = engine(tiny_model("llama").path, is_new=True, **OPTIONS)
    wait_for_sizes(llm)
    caches = Caches(llm)
    for index, contents in enumerate(caches.read()):
        null, others = contents[: caches.block_size], contents[caches.block_size :]
        assert np.isfinite(null).all(), f"cache {index}: the null block, block {NULL_BLOCK}, has NaN after warm-up"
        slots = np.flatnonzero((others != 0).any(axis=1)) + caches.block_size  # NaN is not 0.
        assert not len(slots), f"cache {index}: warm-up has written {slot_name(int(slots[0]), caches)}"


@contextmanager
def filled(llm: LLM, model: TinyModel, value: float) -> Iterator[tuple[Bench, Caches]]:
    """Caches full of a value while no request runs; full of zeros afterwards."""
    caches = Caches(llm)
    with bench_of(llm, model) as bench:
        caches.fill(value)
        try:
            yield bench, caches
        finally:
            caches.fill(0.0)


class Watched(Run):
    """Requests whose every step is compared with what it changed in the caches."""

    caches: Caches
    before: list[np.ndarray]
    number = 0

    def step(self, wanted: dict[str, int]) -> None:
        self._own: set[int] = set()
        super().step(wanted)
        self.number += 1
        self._compare(self._own, f"step {self.number}, of {len(wanted)} requests")

    def note_fed(self, shares: list[Share], seen: StepTrace) -> None:
        super().note_fed(shares, seen)
        size = self.caches.block_size
        for share in shares:
            places = (divmod(position, size) for position in range(share.start, share.start + share.count))
            self._own.update(share.blocks[0][block] * size + offset for block, offset in places)

    def _compare(self, own: set[int], step: str) -> None:
        after = self.caches.read()
        for index, (old, new) in enumerate(zip(self.before, after, strict=True)):
            changed = set(np.flatnonzero((old != new).any(axis=1)).tolist())
            for slot in sorted(changed - own):
                assert slot < self.caches.block_size, (  # Padding may write the null block.
                    f"{step}: it writes {slot_name(slot, self.caches)}, which is of none of its tokens (cache {index})"
                )
            for slot in sorted(own - changed):
                raise AssertionError(f"{step}: it does not write {slot_name(slot, self.caches)} (cache {index})")
        self.before = after


def run_requests(run: Run) -> None:
    """Steps that become smaller: four requests, in chunks and in decode, then one; then a new one with it."""
    for name, length in {"a": 40, "b": 17, "c": 30, "d": 5}.items():
        prompt = np.random.default_rng(length).integers(3, 200, length).tolist()
        run.scheduler.add(name, prompt, run.bench.params(0, 30 if name == "d" else 6))
    for chunk in (8, 16, 3):
        run.step(dict.fromkeys("abcd", chunk))
    while len(run.requests) > 1:
        run.step({request.name: 8 for request in run.requests})
    run.decode(3)
    run.scheduler.add("e", [5, 6, 7], run.bench.params(0, 4))
    run.step({"e": 3, "d": 1})
    run.scheduler.preempt(run.scheduler.requests["d"], silently=False)
    run.step({"e": 1})
    while run.requests:
        run.step({request.name: 32 for request in run.requests})
    run.end()


def test_slots_that_are_written(engine: Start, tiny_model: Checkpoint) -> None:
    """A step writes the slots of its own tokens, after larger steps too, and else at most the null block."""
    model = tiny_model("llama")
    with filled(engine(model.path, **OPTIONS), model, SENTINEL) as (bench, caches):
        run = Watched(bench, seed=0, is_async=False)
        run.caches, run.before = caches, caches.read()
        run_requests(run)


def test_old_contents(engine: Start, tiny_model: Checkpoint) -> None:
    """Tokens are right in a cache that is full of NaN, as others' requests or padding may leave it."""
    model = tiny_model("llama")
    with filled(engine(model.path, **OPTIONS), model, float("nan")) as (bench, _):
        try:
            run_requests(Run(bench, seed=1, is_async=True))
        except AssertionError as error:
            raise AssertionError(f"a slot that no token sees has NaN, which reached a result: {error}") from error
