"""Request states: what lasts of a request from step to step, a row for each request; rows never move.

A request has its row from the step that first schedules it until it finishes or is preempted. The data that a preempted
request needs to come back is kept apart, so ``max_num_reqs`` rows serve any number of preempted requests. Rows have:

- ``RequestStates``: tokens and progress on the host, as a struct of arrays.
- ``BlockTable``: the blocks of one KV-cache group.
- ``DeviceRows``: the last tokens and the exact progress, which the device knows before the host does.

The host plans with the scheduler's numbers, which are bounds. A step's graph reads the exact ones in ``DeviceRows``, so
the host never waits for a token before it launches the next step. A packed number that only the device may know is
replaced by a negative one: ``-(row + 1)`` means "the device's number for that row".
"""

import math
from collections.abc import Collection, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec

from model_runner_base.device_ops import DeviceOps
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.host_loops import compiled, int_array, put_ints


@dataclass(slots=True, weakref_slot=True)
class RequestInfo:
    """Data of a request that survives a preemption."""

    params: Any
    """Parameters that the head reads: vLLM's ``SamplingParams`` or ``PoolingParams``."""
    seed: int
    """The request's own seed, or one drawn for it; 0 where nothing is drawn."""
    prompt_token_ids: list[int]
    """Token ids of the prompt; zeros for embeddings."""
    prompt_embeds: torch.Tensor | None = None
    """[prompt, hidden] embeddings on the host, in place of ids; a row of NaN is a token."""
    adapter: LoRARequest | None = None
    """Low-rank adapter that the request runs with."""
    items: Sequence[MultiModalFeatureSpec] = ()
    """Images and other items of the prompt, with their positions."""
    output_token_ids: list[int] = field(default_factory=list)
    """Output so far, kept up to date only if a sampling rule reads it (heads/sampling/logits_stage.py); always the same
    list."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class RequestStates:
    """Tokens and progress of every request that holds a row.

    Tokens sampled on the device are not copied back into ``token_ids``: the device keeps each row's last token, and the
    scheduler sends all tokens of a request when it resumes. So ``num_known`` stays as it was when the row was filled.
    Two comparisons say the rest: a row is sampled once ``seq_len >= num_known``, and its last input token is on the
    device once ``seq_len > num_known``.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int) -> None:
        self.max_num_reqs = max_num_reqs
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.num_known = np.zeros(max_num_reqs, np.int64)
        self.num_computed = np.zeros(max_num_reqs, np.int64)
        self.rows: dict[str, int] = {}
        self.infos: dict[str, RequestInfo] = {}
        self.by_row: list[RequestInfo | None] = [None] * max_num_reqs
        self._free = list(range(max_num_reqs - 1, -1, -1))
        self._last_step = np.zeros(max_num_reqs, np.int64)
        """Number of the last step that was built with each row; repeated steps do not count."""
        self._num_steps = 0

    def rows_of(self, req_ids: Sequence[str]) -> np.ndarray:
        """[R] int64 rows of requests; there is at least one request, and each holds a row."""
        rows = itemgetter(*req_ids)(self.rows)  # Takes half the time of a loop.
        return int_array(rows if len(req_ids) > 1 else (rows,))

    def infos_of(self, rows: np.ndarray) -> list[RequestInfo]:
        """Infos of the requests in ``rows``, all of which are in use."""
        return [info for row in rows.tolist() if (info := self.by_row[row]) is not None]

    def admit(self, req_id: str, info: RequestInfo, token_ids: list[int], num_computed: int) -> int:
        """Gives a request a row, or refills the one it has, and returns it."""
        self.infos[req_id] = info
        row = self.rows.get(req_id)
        if row is None:
            row = self.rows[req_id] = self._free.pop()
        self.by_row[row] = info
        put_ints(token_ids, self.token_ids[row])
        self.num_known[row] = len(token_ids)
        self.num_computed[row] = num_computed
        return row

    def free_rows_for(self, arriving: Collection[str], scheduled: Collection[str]) -> None:
        """Frees rows, so that each request of ``arriving``, which are among the scheduled ones, can have one.

        The scheduler may set a request aside without telling the runner: a streaming session that waits for input, or a
        forced preemption. Such a request comes back with all its tokens and blocks, so its row can be freed. But a
        running request may miss a step, too, and is not sent anew when it comes back. So rows that were in no step for
        the longest time are freed first.
        """
        if len(arriving) <= len(self._free):
            return
        count = sum(req_id not in self.rows for req_id in arriving)
        idle = sorted(self.rows.keys() - set(scheduled), key=lambda req_id: self._last_step[self.rows[req_id]])
        for req_id in idle[: max(0, count - len(self._free))]:
            self.release(req_id)

    def note_step(self, rows: np.ndarray) -> None:
        """Notes that a step is built with the requests in ``rows``."""
        self._num_steps += 1
        self._last_step[rows] = self._num_steps

    def release(self, req_id: str) -> None:
        """Frees the row of a preempted request; does nothing if it holds none."""
        row = self.rows.pop(req_id, None)
        if row is not None:
            self.by_row[row] = None
            self._free.append(row)

    def forget(self, req_id: str) -> None:
        """Forgets a finished request; ignores an unknown one, which was aborted before it ran."""
        self.release(req_id)
        self.infos.pop(req_id, None)

    @property
    def num_reqs(self) -> int:
        return len(self.rows)


class BlockTable:
    """Block ids of every row of one KV-cache group.

    ``table`` is [max_num_reqs, max_blocks] int32. Entries after a row's ``num_blocks`` are leftovers; code that reads
    them must mask the result. Blocks are those of the cache tensors, of ``block_size`` tokens. Each of the scheduler's
    blocks is stored as ``blocks_per_kv_block`` consecutive ones.
    """

    def __init__(
        self, max_num_reqs: int, max_model_len: int, block_size: int, blocks_per_tile: int, blocks_per_kv_block: int = 1
    ) -> None:
        self.block_size = block_size
        self.blocks_per_kv_block = blocks_per_kv_block
        max_blocks = -(-max_model_len // block_size)
        # A row holds whole KV tiles, so that a tile's block ids are one slice, and whole blocks of the scheduler's.
        whole = math.lcm(blocks_per_tile, blocks_per_kv_block)
        self.max_blocks = -(-max_blocks // whole) * whole
        self.table = np.zeros((max_num_reqs, self.max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_reqs, np.int32)
        self.has_changed = np.zeros(max_num_reqs, np.bool_)
        """[rows] whether each row has changed; code that keeps a copy of the table clears it."""

    def assign(self, row: int, block_ids: list[int]) -> None:
        """Sets all blocks of a row."""
        block_ids = self._stored(block_ids)
        put_ints(block_ids, self.table[row])
        self.num_blocks[row] = len(block_ids)
        self.has_changed[row] = True

    def append(self, rows: Sequence[int], block_ids: Sequence[list[int]]) -> None:
        """Adds blocks at the end of each of ``rows`` [R], which are distinct.

        Raises IndexError for a row that cannot hold them, because the scheduler has exceeded the model's length.
        """
        numbers = int_array([*rows, *map(len, block_ids), *chain.from_iterable(block_ids)])
        append_blocks(self.table, self.num_blocks, self.has_changed, numbers, len(rows), self.blocks_per_kv_block)

    def _stored(self, block_ids: list[int]) -> list[int]:
        """Blocks of the cache tensors that hold the scheduler's ``block_ids``."""
        count = self.blocks_per_kv_block
        if count == 1:
            return block_ids
        return [block_id * count + index for block_id in block_ids for index in range(count)]


@compiled
def append_blocks(
    table: np.ndarray,
    num_blocks: np.ndarray,
    has_changed: np.ndarray,
    numbers: np.ndarray,
    num_rows: int,
    blocks_per_kv_block: int,
) -> None:
    """Appends blocks to rows. ``numbers`` are the rows, the number of the scheduler's blocks for each, and these
    blocks."""
    rows, counts, block_ids = numbers[:num_rows], numbers[num_rows : 2 * num_rows], numbers[2 * num_rows :]
    first = 0
    for index in range(num_rows):
        row = rows[index]
        end = num_blocks[row]
        if end + counts[index] * blocks_per_kv_block > table.shape[1]:
            raise IndexError("a request has more blocks than its row of the block table can hold")
        for block in range(first, first + counts[index]):
            for index_in_block in range(blocks_per_kv_block):
                table[row, end] = block_ids[block] * blocks_per_kv_block + index_in_block
                end += 1
        first += counts[index]
        num_blocks[row] = end
        has_changed[row] = True


NO_TOKEN = -2
"""Sampled token of a row for which the rules allow no token. Its request ends with an error. (-1 is a token that does
not count.)"""


class DeviceRows:
    """Tensors with a row for each request row, and a last one for padding.

    ``tokens`` [rows + 1, K] int32: the token that was sampled last, and the K - 1 drafts after it (K = 1: none), -1
    where none was made.
    ``computed`` [rows + 1] int32: position of that token, which is the number of tokens in the cache before it.
    ``recent`` [rows + 1, K + 1] int32, where there are drafts: the tokens that the last step yielded, and -1 after
    them; the last column has the last token before that step.

    A graph that updates the tensors may replace them, so they are read through ``tensors`` only.
    """

    def __init__(self, max_num_reqs: int, device_ops: DeviceOps, num_tokens: int = 1) -> None:
        self.num_tokens = num_tokens
        """K, the last token and its drafts."""
        self.tensors: MutableSequence[torch.Tensor] = [
            device_ops.zeros((max_num_reqs + 1, num_tokens), torch.int32),
            device_ops.zeros((max_num_reqs + 1,), torch.int32),
        ]
        if num_tokens > 1:
            self.tensors = [*self.tensors, device_ops.zeros((max_num_reqs + 1, num_tokens + 1), torch.int32)]

    @property
    def yielded(self) -> torch.Tensor:
        """[rows + 1, ...] int32; the first K columns are the tokens that each row's last step yielded, and -1 after
        them."""
        return self.tensors[0 if self.num_tokens == 1 else 2]


def known_or(values: torch.Tensor, on_device: torch.Tensor) -> torch.Tensor:
    """``values`` [N] int32, where each negative value ``-(i + 1)`` is replaced by ``on_device[i]``. Traceable."""
    return torch.where(values < 0, on_device[(-values - 1).clamp(min=0)], values)


def commit(rows: Sequence[torch.Tensor], sample_slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Records sampled tokens in place; returns those that count, [S] int32, and -1 for others. Traceable.

    Args:
        rows: the tensors of ``DeviceRows``.
        sample_slots: [2, S] or, where drafts are verified, [3, S] int32 (``ModelCall.sample_slots``): the row of each
            token (the padding row where nothing is to be recorded), its position, the draft for that position or -1.
        tokens: [S] int32. For NO_TOKEN the row records token 0, so that a step that is launched already can run.
    """
    if sample_slots.shape[0] == 3:
        return _verify(rows, sample_slots, tokens)
    last, computed = rows
    last.index_put_((sample_slots[0], torch.zeros_like(sample_slots[0])), tokens.clamp(min=0))
    computed.index_put_((sample_slots[0],), sample_slots[1])
    return tokens


class ReceivedTokens:
    """Recorder of tokens that were sampled elsewhere, such as on the last stage of a pipeline.

    A row's progress does not depend on where its token was drawn: the rows are as if this rank had sampled it.
    """

    def __init__(self, rows: DeviceRows, wrap: WrapFunction, device_ops: DeviceOps) -> None:
        self._rows = rows
        self._record = wrap(_record, rows.tensors)
        self._device_ops = device_ops

    def record(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Records ``tokens`` [S] int32 in ``rows`` [S], the padding row for tokens that do not count; ``positions`` [S]
        are those that the tokens have."""
        sample_slots = np.stack((rows, positions)).astype(np.int32)
        self._record(*map(self._device_ops.to_device, (sample_slots, tokens)), *self._rows.tensors)


def _record(sample_slots: torch.Tensor, tokens: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    return commit(rows, sample_slots, tokens)


def _verify(rows: Sequence[torch.Tensor], sample_slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Records a request's tokens up to the first one that differs from its draft.

    Later tokens were sampled after a wrong draft, so they do not count.

    Example: drafts 5, 9, 4 of a row; 5, 9, 7, 2 are sampled. 5, 9, 7 count, and 7 is the row's last token.
    """
    last, computed, recent = rows
    row, position, draft = sample_slots
    padding_row, num_tokens = last.shape[0] - 1, last.shape[1]
    is_right = tokens == draft
    is_first = torch.cat((row[:1] == row[:1], row[1:] != row[:-1]))
    counts, place = is_first, torch.zeros_like(row)
    for _ in range(num_tokens - 1):
        follows = _shifted(counts & is_right)
        place = torch.where(follows & ~is_first, _shifted(place) + 1, 0)
        counts = is_first | follows
    counts = counts & (row != padding_row)
    # Each row's ``recent`` is written anew: first no tokens and the last one before the step, then what the step
    # yielded.
    begins = torch.where(is_first, row, padding_row)
    nothing = torch.full((1, num_tokens), -1, dtype=torch.int32, device=row.device).expand(row.shape[0], -1)
    recent.index_put_((begins,), torch.cat((nothing, last[begins, :1]), dim=1))
    known = tokens.clamp(min=0)
    recent.index_put_((torch.where(counts, row, padding_row), place), known)
    # The last token that counts, and its position; drafts come later.
    ends = torch.where(counts & ~is_right, row, padding_row)
    last.index_put_((ends,), torch.cat((known.unsqueeze(1), nothing[:, 1:]), dim=1))
    computed.index_put_((ends,), position)
    return torch.where(counts, tokens, -1)


def _shifted(values: torch.Tensor) -> torch.Tensor:
    """``values`` moved by one place to the back, with a zero in front."""
    return torch.cat((torch.zeros_like(values[:1]), values[:-1]))
