"""Rerun of a case: its steps, and after each step the keys and values of every request, compared with the reference's.

A cache is read through its layer's ``CacheFormat``, so a device's own layout is read, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache
from vllm import LLM
from vllm.model_executor.models.utils import extract_layer_index

from model_runner_base.step.trace import StepTrace, watch_steps
from model_runner_base.testing.cache_layout import CacheLayer, cache_layers
from model_runner_base.testing.engine import core_of, runner_of
from model_runner_base.testing.models import TinyModel, reference_model
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.step_log import describe_step

TOLERANCE = 1e-3
"""Largest difference of keys and values from the reference's; those of the tiny models are of the order of 1."""
ROUNDED_TOLERANCE = 0.1
"""The same in a dtype of 16 bits; most elements of a wrong key differ by more."""


class Held(NamedTuple):
    """Contents of the cache of one layer, for one request, after a step: N positions, K heads of size D."""

    positions: np.ndarray
    """[N] positions whose blocks the request still has."""
    blocks: np.ndarray
    """[N] block of each position, as the scheduler gave it."""
    offsets: np.ndarray
    """[N] slot of each position in its block."""
    block_size: int
    keys: np.ndarray
    """[N, K, D]"""
    values: np.ndarray
    """[N, K, D]"""


@dataclass
class WatchedStep:
    """One step of a rerun."""

    number: int
    """Number of the step, from 1."""
    trace: StepTrace
    prompts: dict[str, tuple[int, ...]]
    """Prompts of the step's requests, by request id."""
    held: dict[str, dict[str, Held]] = field(default_factory=dict)
    """Contents of the cache after the step, by request id and layer name."""

    def __str__(self) -> str:
        requests = self.trace.requests.values()
        return describe_step(self.number, self.trace.size, len(requests), sum(len(each.positions) for each in requests))


class WrongSlot(NamedTuple):
    """First cache slot whose contents differ from the reference's."""

    step: int
    """Number of the step after which it differs."""
    what: str
    """Keys or values."""
    layer: int
    position: int
    block: int
    offset: int
    told: tuple[int, int] | None
    """Block and slot that the step was told to write to, if they are others."""

    def __str__(self) -> str:
        place = f"position {self.position} (block {self.block}, slot {self.offset})"
        told = f", and were to be written to block {self.told[0]}, slot {self.told[1]}" if self.told else ""
        return f"{self.what} of layer {self.layer} at {place} differ after step {self.step}{told}"


@contextmanager
def watch_case(llm: LLM) -> Iterator[list[WatchedStep]]:
    """Yields a growing list of the steps that the engine runs inside the block."""
    runner, scheduler = runner_of(llm), core_of(llm).scheduler
    layers = cache_layers(llm)
    steps: list[WatchedStep] = []
    with watch_steps(runner) as traces:
        graph = runner.parts.graph
        run = graph.run

        def watched(batch: Any, step: Any) -> Any:
            results = run(batch, step)
            if batch is not None:
                requests = {name: scheduler.requests[name] for name in batch.req_ids if name in scheduler.requests}
                prompts = {name: tuple(request.prompt_token_ids or ()) for name, request in requests.items()}
                seen = WatchedStep(len(steps) + 1, traces[-1], prompts)
                runner.parts.bind_kv_caches()
                for name in requests:
                    seen.held[name] = _held(runner, scheduler, layers, name, seen.trace)
                steps.append(seen)
            return results

        graph.run = watched
        try:
            yield steps
        finally:
            graph.run = run


def _held(
    runner: Any, scheduler: Any, layers: dict[str, CacheLayer], request: str, trace: StepTrace
) -> dict[str, Held]:
    """Contents of a request's caches by layer; without those of 8 bits, and those that cannot be read."""
    block_ids = scheduler.kv_cache_manager.get_block_ids(request)
    found = {}
    for name, layer in layers.items():
        if layer.cache.dtype is not runner.model_config.dtype:
            continue
        size = layer.block_size
        positions = np.arange(trace.requests[request].positions[-1] + 1)
        blocks = np.array(block_ids[layer.group])[positions // size]
        positions, blocks = positions[blocks != 0], blocks[blocks != 0]  # The null block: given back.
        offsets = positions % size
        # A device's format may be unable to read outside of a step; then the sentence names the step alone.
        with suppress(Exception):
            keys, values = layer.read(blocks * size + offsets)
            found[name] = Held(positions, blocks, offsets, size, keys, values)
    return found


@torch.no_grad()
def reference_cache(model: TinyModel, tokens: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of tokens by layer, each [T, K, D], as HF transformers keeps them."""
    cache = DynamicCache()
    reference_model(model.path)(torch.tensor([tokens]), past_key_values=cache, use_cache=True)

    def rows(tensor: Any) -> np.ndarray:
        return tensor[0].transpose(0, 1).float().numpy()

    return [(rows(layer.keys), rows(layer.values)) for layer in cache.layers]


def describe_cache(
    steps: list[WatchedStep], request: str, wanted: list[tuple[np.ndarray, np.ndarray]]
) -> WrongSlot | str:
    """The first wrong slot by step, layer and position, keys before values; or a text that there is none.

    The text is empty if the caches cannot be compared: none was read, or not one slot of the first layer is like the
    reference's.
    """
    first: WrongSlot | None = None
    is_comparable = False
    tolerance = TOLERANCE if PRECISION.is_exact else ROUNDED_TOLERANCE
    for step in steps:
        layers = step.held.get(request, {})
        for name, held in sorted(layers.items(), key=lambda item: extract_layer_index(item[0])):
            layer = extract_layer_index(name)
            if layer >= len(wanted):
                continue
            for what, got, want in zip(("keys", "values"), (held.keys, held.values), wanted[layer], strict=True):
                if want.shape[1:] != got.shape[1:] or len(want) <= held.positions.max(initial=0):
                    continue
                want = want[held.positions]
                # Written so that NaN counts as different.
                is_wrong = ~(np.abs(got - want) <= tolerance * (1 + np.abs(want))).all(axis=(1, 2))
                is_comparable |= layer == 0 and not is_wrong.all()
                if first is None and is_wrong.any():
                    at = int(is_wrong.argmax())
                    place = int(held.positions[at]), int(held.blocks[at]), int(held.offsets[at])
                    before = steps[: steps.index(step) + 1]
                    told = _told(before, request, name, place, held.block_size)
                    first = WrongSlot(step.number, what, layer, *place, told)
    if not is_comparable:
        return ""
    return first or "all keys and values in its cache are right"


def _told(
    steps: list[WatchedStep], request: str, layer: str, place: tuple[int, int, int], block_size: int
) -> tuple[int, int] | None:
    """Block and slot that the last step with a position was told to write it to; None if they are those of
    ``place``."""
    position, *right = place
    for step in reversed(steps):
        own = step.trace.requests[request]
        if position in own.positions and layer in own.slots:
            told = divmod(int(own.slots[layer][own.positions.index(position)]), block_size)
            return None if told == tuple(right) else told
    return None
