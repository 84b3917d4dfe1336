"""Requests, caches and samplers as each of vLLM's releases wants them."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.request import Request
from vllm.v1.sample.ops import penalties
from vllm.v1.worker import block_table


def one_cache(layers: Sequence[str], spec: FullAttentionSpec, num_blocks: int) -> KVCacheConfig:
    """Config of a cache in which all layers share one tensor of ``num_blocks`` blocks, since no layer runs."""
    page, names = spec.page_size_bytes, list(layers)
    strides: dict[str, Any] = {}
    if "layer_stride" in signature(KVCacheTensor).parameters:
        strides = {"layer_stride": 0, "block_stride": page}
    return KVCacheConfig(
        num_blocks, [KVCacheTensor(num_blocks * page, names, **strides)], [KVCacheGroupSpec(names, spec)]
    )


def new_request(
    req_id: str, prompt: list[int], params: SamplingParams, eos: int | None = None, **options: Any
) -> Request:
    """A request to a model with this end-of-sequence token, or with none."""
    if "eos_token_id" in signature(Request).parameters:
        options["eos_token_id"] = eos
    else:
        params.update_from_generation_config({}, eos)
    return Request(req_id, prompt, params, None, **options)


def penalised_tokens(token_ids: list[list[int]], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Tensor of all output tokens, which vLLM's sampler makes on the host for penalties."""
    return penalties._convert_to_tensors(token_ids, vocab_size, device)


def find_slots_by(wrap: Callable[..., Any]) -> None:
    """Replaces the Triton kernel that finds cache slots in newer releases, for the rest of the process, since it is
    work of the device: of the last one whose ``wrap`` was given. Older releases find them on the host."""
    kernel: Any = getattr(block_table, "_COMPUTE_SLOT_MAPPING_KERNEL", None)
    if kernel is not None:
        type(kernel).__call__ = staticmethod(wrap(_find_slots))


def _find_slots(
    num_reqs: int,
    num_tokens: int,
    max_num_tokens: int,
    starts: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    stride: int,
    slots: torch.Tensor,
    block_size: int,
    *_: int,
) -> None:
    """Fills ``slots`` [max_num_tokens] by the ``positions`` [num_tokens] of tokens and the ``blocks`` of requests
    [max_num_reqs, max_num_blocks]; ``starts`` [1 + num_reqs] are the requests' first tokens."""
    counts = starts[1 : num_reqs + 1] - starts[:num_reqs]
    rows = torch.repeat_interleave(torch.arange(num_reqs), counts)
    at = positions[: len(rows)]
    slots[: len(rows)] = blocks[rows, at // block_size].long() * block_size + at % block_size
