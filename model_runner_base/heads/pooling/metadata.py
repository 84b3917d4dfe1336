"""Makes vLLM's ``PoolingMetadata`` for its poolers, from whole requests on the host; and reads pairs of texts."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from vllm.pooling_params import PoolingParams
from vllm.v1.pool.metadata import PoolingCursor, PoolingMetadata, PoolingStates

HAS_IDS_ON_HOST = "prompt_token_ids_cpu" in {field.name for field in fields(PoolingMetadata)}
CURSOR = {field.name for field in fields(PoolingCursor)}


def pooling_metadata(
    params: Sequence[PoolingParams], prompts: Sequence[Sequence[int]], num_states: Sequence[int], has_ids: bool
) -> PoolingMetadata:
    """Metadata of R requests, each of which is whole and has ``num_states`` hidden states, one after another.

    A request of which only one token is read has one. ``prompts`` are token ids, which poolers get if ``has_ids``.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = torch.tensor(num_states).cumsum(0)
    ids = _padded(prompts) if has_ids else None
    cursor = {
        "index": list(range(len(params))),
        "first_token_indices_gpu": ends - torch.tensor(num_states),
        "last_token_indices_gpu": ends - 1,
        "prompt_lens_cpu": lengths,
        "seq_lens_cpu": lengths,
        "num_scheduled_tokens_cpu": lengths,
        "partial_prefill": False,
        "finished_mask": [True] * len(params),
    }
    return PoolingMetadata(
        prompt_lens=lengths,
        prompt_token_ids=ids,
        **({"prompt_token_ids_cpu": ids} if HAS_IDS_ON_HOST else {}),  # type: ignore[arg-type]
        pooling_params=list(params),
        pooling_states=[PoolingStates() for _ in params],
        pooling_cursor=PoolingCursor(**{name: value for name, value in cursor.items() if name in CURSOR}),  # type: ignore[arg-type]
    )


def second_text_of(params: PoolingParams, num_tokens: int) -> tuple[int, int] | None:
    """Position of the first token of a prompt's second text, and of the first token after it; None if the request names
    no second text. Some releases send the first number only, since that text ends with the prompt."""
    given = (params.extra_kwargs or {}).get("compressed_token_type_ids")
    if given is None:
        return None
    start, stop = (given, num_tokens) if isinstance(given, int) else given
    return start, stop


def _padded(prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[R, longest] int64 token ids, zeros after each prompt."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
