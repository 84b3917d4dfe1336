"""Kernels of vLLM's second runner, computed on the host for steps that are checked.

Each function is named after the kernel that it stands for, and takes the launch grid before the kernel's own arguments.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Grid = tuple[int, ...]


def apply_write(
    grid: Grid,
    out: torch.Tensor,
    stride: int,
    rows: torch.Tensor,
    starts: torch.Tensor,
    contents: torch.Tensor,
    ends: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Writes one run of ``contents`` into each of ``rows``, from the row's ``starts`` on; ``ends`` of the runs."""
    flat, begin = out.view(-1), 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        at = row * stride + start
        flat[at : at + end - begin] = contents[begin:end]
        begin = end


def prepare_prefill_inputs(
    grid: Grid,
    token_ids: torch.Tensor,
    next_tokens: torch.Tensor,
    stride: int,
    num_lookahead: int,
    rows: torch.Tensor,
    starts: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_stride: int,
    prefill_lens: torch.Tensor,
    num_computed: torch.Tensor,
    **_: Any,
) -> None:
    """Fills the tokens of prompts into ``token_ids`` [T], and those after them into ``next_tokens`` [K, R]."""
    for row, start, end in zip(rows.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        first, prefill_len = int(num_computed[row]), int(prefill_lens[row])
        if first < prefill_len:
            token_ids[start:end] = all_token_ids[row, first : first + end - start]
            later = all_token_ids[row, first + end - start : prefill_len][:num_lookahead]
            next_tokens[:num_lookahead, row] = 0
            next_tokens[: len(later), row] = later.to(next_tokens.dtype)


def prepare_pos_seq_lens(
    grid: Grid,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    num_computed: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Fills the positions of all tokens, and the length of each request, 0 where there is none."""
    first, num_new = num_computed[rows].long(), (starts[1:] - starts[:-1]).long()
    seq_lens.zero_()
    seq_lens[: len(rows)] = first + num_new
    num_tokens = int(starts[-1])
    positions[:num_tokens] = torch.repeat_interleave(first - starts[:-1], num_new) + torch.arange(num_tokens)


def combine_sampled_and_draft_tokens(
    grid: Grid,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    last_sampled: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_lens: torch.Tensor,
    drafts: torch.Tensor,
    drafts_stride: int,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
    **_: Any,
) -> None:
    """Fills the index of each request's last token, and the last sampled token of those that decode. No drafts."""
    logits_indices[:] = starts[1 : 1 + len(rows)] - 1
    decodes = seq_lens[: len(rows)] > prefill_lens[rows]
    token_ids[logits_indices[decodes]] = last_sampled[rows[decodes], 0].to(token_ids.dtype)


def post_update(
    grid: Grid,
    rows: torch.Tensor,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
    counts: torch.Tensor | None,
    counts_stride: int,
    sampled: torch.Tensor,
    sampled_stride: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    starts: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_stride: int,
    total_lens: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Moves requests on by the tokens that were computed and the one that was sampled, where there is one."""
    yields = num_sampled > 0
    moved, tokens = rows[yields], sampled[yields, 0]
    last_sampled[moved, 0] = tokens
    all_token_ids[moved, total_lens[moved].long()] = tokens.to(all_token_ids.dtype)
    total_lens[moved] += 1
    num_computed[rows] += starts[1 : 1 + len(rows)] - starts[: len(rows)] - num_rejected


def gather_block_tables(
    grid: Grid,
    rows: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    strides: torch.Tensor,
    num_blocks: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    *_: Any,
    **__: Any,
) -> None:
    """Copies the block tables of a step's requests, which lie anywhere, to the first rows of the step's table."""
    for group in range(grid[0]):
        source = _table(sources[group], strides[group], 1 + int(rows.max()))
        target = _table(targets[group], strides[group], grid[1])
        for index, row in enumerate(rows.tolist()):
            count = int(num_blocks[group, row])
            target[index, :count] = source[row, :count]
        target[num_reqs:] = 0


def compute_slot_mappings(
    grid: Grid,
    max_num_tokens: int,
    rows: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    strides: torch.Tensor,
    block_sizes: torch.Tensor,
    is_enabled: torch.Tensor,
    is_sharded: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Fills the cache slot of each token, -1 behind the last."""
    num_tokens = int(starts[-1])
    at, of = positions[:num_tokens].numpy(), torch.repeat_interleave(rows, (starts[1:] - starts[:-1]).long()).numpy()
    for group in range(grid[0]):
        size = int(block_sizes[group])
        blocks = _table(tables[group], strides[group], 1 + int(rows.max()))[of, at // size].astype(np.int64)
        slots[group, :num_tokens] = torch.from_numpy(blocks * size + at % size)
        slots[group, num_tokens:] = -1


def _table(address: torch.Tensor, width: torch.Tensor, num_rows: int) -> np.ndarray:
    """The block table [num_rows, width] that lies at an address."""
    numbers = (ctypes.c_int32 * (num_rows * int(width))).from_address(int(address))
    return np.ctypeslib.as_array(numbers).reshape(num_rows, int(width))


KERNELS: dict[str, Callable[..., None]] = {
    f"_{function.__name__}_kernel": function
    for function in (
        apply_write,
        prepare_prefill_inputs,
        prepare_pos_seq_lens,
        combine_sampled_and_draft_tokens,
        post_update,
        gather_block_tables,
        compute_slot_mappings,
    )
}
"""Functions by the names that vLLM gives the kernels."""
