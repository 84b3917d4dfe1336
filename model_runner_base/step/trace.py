"""Trace of a step, which says for each request what the model is given: the one way to look into a step.

The conformance kit, the benchmarks and the tests compare ``StepTrace``s with what they expect, so they need to know
nothing of buffers, sections or attention metadata. A step that is not watched pays nothing for it.

Example: request "a" is in decode at position 7, "b" has the first 3 tokens of its prompt. With blocks of 4 tokens, of
which "a" has blocks 5 and 2 and "b" block 9, a layer without a window is given

    requests["a"]: token_ids [17], positions [7], slots[layer] [2 * 4 + 3]
                   seen[layer][0].positions 0..7, in the slots of blocks 5 and 2
    requests["b"]: token_ids [3, 1, 4], positions [0, 1, 2], slots[layer] [36, 37, 38]
                   seen[layer][2].positions 0..2
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.sizes import StepSize


class SeenKeys(NamedTuple):
    """Keys that one token attends to, by position; a key is repeated as often as it is counted. K keys."""

    positions: np.ndarray
    """[K] position of each key."""
    slots: np.ndarray
    """[K] cache slot: block id times block size plus offset, in blocks of the cache tensors."""


class LayerTrace(NamedTuple):
    """Cache slots and seen keys of a step's T padded tokens, as an attention layer is told of them."""

    slots: np.ndarray
    """[T] cache slot that each token's key and value go to."""
    seen: list[SeenKeys]
    """[T] keys that each token sees, or fewer, from the first token on; empty for a backend whose metadata only it can
    read."""


class SampledPlace(NamedTuple):
    """Place where a request is sampled; where drafts are verified, the one after the first of its tokens."""

    token: int
    """Index among the request's tokens in this step."""
    row: int
    """Row that the sampled token is recorded in; the padding row, which is never read, if the request yields none."""
    position: int
    """Position that the sampled token will have."""


@dataclass(frozen=True)
class RequestTrace:
    """Trace of one request's Q tokens in a step."""

    token_ids: list[int]
    positions: list[int]
    sampled: SampledPlace
    slots: dict[str, np.ndarray]
    """[Q] by layer name, as ``LayerTrace.slots``."""
    seen: dict[str, list[SeenKeys]]
    """[Q] by layer name, as ``LayerTrace.seen``."""


@dataclass(frozen=True)
class StepTrace:
    """Trace of one step."""

    size: StepSize
    """Size that the step runs at, padding included."""
    requests: dict[str, RequestTrace]
    """Traces by request id, in the order of the batch."""
    padding_slots: dict[str, np.ndarray]
    """Cache slots that the keys and values of padding tokens go to, by layer name."""
    padding_rows: np.ndarray
    """Rows that the tokens sampled for padding are recorded in."""
    num_sent: int
    """How many numbers of the packed buffer were sent: all, or only the changes where a step repeats the last one."""


@contextmanager
def watch_steps(runner: Any) -> Iterator[list[StepTrace]]:
    """Yields a growing list of traces of the steps that ``runner``, a ``ModelRunnerBase``, runs inside the block.

    Traces are worked out on the host from the buffers on the device. What the device's own arithmetic makes of these
    shows only in the tokens that it samples.
    """
    graph = runner.parts.graph
    run = graph.run
    steps: list[StepTrace] = []

    def watched(batch: InputBatch | None, step: PackedStep) -> Any:
        if batch is not None:
            for kind in runner.parts.caches:
                kind.prepare(batch, step, runner.parts.rows)
            steps.append(_step_trace(runner, batch, step))
        return run(batch, step)

    graph.run = watched
    try:
        yield steps
    finally:
        graph.run = run  # It may be one that others watch.


def _step_trace(runner: Any, batch: InputBatch, step: PackedStep) -> StepTrace:
    parts = runner.parts

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(runner.device_ops.to_host(tensor).copy())

    packed, entries = on_host(step.on_device), on_host(step.entries_on_device)
    packed[entries[0].long()] = entries[1]
    call = ModelCall.unpack(step.size, packed, step.sections, *map(on_host, parts.rows.tensors[:2]))
    parts.layout.bind(call)
    layers = {name: layer for kind in parts.caches for name, layer in kind.trace(call, batch).items()}
    token_ids, positions = call.token_ids.numpy(), call.positions.numpy()
    indices = call.arrays["logits_indices"].tolist()
    rows, sample_positions, *_ = call.sample_slots.tolist()
    *logits, num_logits = batch.logits_start(np.arange(batch.num_reqs + 1)).tolist()
    requests = {}
    is_padding = np.ones(len(token_ids), np.bool_)
    for index, (req_id, logit) in enumerate(zip(batch.req_ids, logits, strict=True)):
        start = int(batch.query_start[index])
        tokens = slice(start, start + int(batch.query_len[index]))
        is_padding[tokens] = False
        # Layers with the same metadata share the arrays.
        shares = {id(layer): (layer.slots[tokens], layer.seen[tokens]) for layer in layers.values()}
        requests[req_id] = RequestTrace(
            token_ids=token_ids[tokens].tolist(),
            positions=positions[tokens].tolist(),
            sampled=SampledPlace(indices[logit] - start, rows[logit], sample_positions[logit]),
            slots={name: shares[id(layer)][0] for name, layer in layers.items()},
            seen={name: shares[id(layer)][1] for name, layer in layers.items() if layer.seen},
        )
    return StepTrace(
        size=step.size,
        requests=requests,
        padding_slots={name: layer.slots[is_padding] for name, layer in layers.items()},
        padding_rows=np.array(rows[num_logits:], np.int64),
        num_sent=packed.numel() if step.is_whole else int(step.entries.count[0]),
    )
