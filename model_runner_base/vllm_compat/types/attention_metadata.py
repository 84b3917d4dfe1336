"""Data of a step for vLLM's metadata builders: ``CommonAttentionMetadata``, which changes between releases."""

from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


class StepOnDevice(NamedTuple):
    """A step's requests as kernels read them, at fixed addresses; R requests, padding included, and T tokens."""

    query_start_loc: torch.Tensor
    """[R + 1] int32"""
    seq_lens: torch.Tensor
    """[R] int32"""
    block_table: torch.Tensor
    """[R, blocks] int32"""
    slot_mapping: torch.Tensor
    """[T] int64"""


class StepBounds(NamedTuple):
    """The same requests on the host, where lengths may be upper bounds."""

    query_start_loc: torch.Tensor
    """[R + 1] int32"""
    seq_lens: torch.Tensor
    """[R] int32, upper bounds; those of chunks are exact."""
    is_exact: bool
    """Whether the lengths of decode rows are exact, too."""
    max_query_len: int
    max_seq_len: int


def common_metadata(step: StepOnDevice, bounds: StepBounds) -> CommonAttentionMetadata:
    """Makes the metadata of one KV-cache group."""
    return CommonAttentionMetadata(
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=bounds.query_start_loc,
        seq_lens=step.seq_lens,
        num_reqs=len(step.seq_lens),
        num_actual_tokens=len(step.slot_mapping),
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
        block_table_tensor=step.block_table,
        slot_mapping=step.slot_mapping,
        **_lengths_on_host(bounds),
    )


def call_all_decodes(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Has builders take every request of one token for a decode, as a captured graph does.

    Some releases tell a prompt's first token from a decode otherwise, since its state is yet to be cleared.
    """
    if "is_prefilling" not in CommonAttentionMetadata.__dataclass_fields__:
        return common
    changed: dict[str, Any] = {"is_prefilling": torch.zeros(common.num_reqs, dtype=torch.bool)}
    return common.replace(**changed)


def _lengths_on_host(bounds: StepBounds) -> dict[str, Any]:
    """Lengths on the host: in one field for a bound, or, in other releases, in two fields that must be exact.

    If they are not exact the two are left out, and a builder that reads them waits for the device.
    """
    seq_lens = bounds.seq_lens
    if "seq_lens_cpu_upper_bound" in CommonAttentionMetadata.__dataclass_fields__:
        return {"seq_lens_cpu_upper_bound": seq_lens}
    if not bounds.is_exact:
        return {}
    return {"_seq_lens_cpu": seq_lens, "_num_computed_tokens_cpu": seq_lens - bounds.query_start_loc.diff()}
