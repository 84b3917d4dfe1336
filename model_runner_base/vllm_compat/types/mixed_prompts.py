"""Prompts of tokens and embeddings mixed, which later releases of vLLM have, as prompts of embeddings.

A row of NaN is a token, which has an id. No row that a user may give is like it, so vLLM's prefix cache, which knows
blocks by ids and embeddings, does not take a token for an embedding at its place.
"""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.engine import EngineCoreRequest

HAS_MIXED_PROMPTS = "prompt_is_token_ids" in EngineCoreRequest.__struct_fields__
"""Whether a prompt may have tokens and embeddings."""


def mark_tokens(embeds: torch.Tensor, is_token: Sequence[bool]) -> torch.Tensor:
    """Copies ``embeds`` [P, H], with NaN in the rows of tokens."""
    return embeds.masked_fill(torch.tensor(is_token, dtype=torch.bool).unsqueeze(1), torch.nan)


def given_rows(embeds: torch.Tensor) -> np.ndarray:
    """Indices of the rows of ``embeds`` [P, H] that are no tokens."""
    return np.flatnonzero(~embeds[:, 0].isnan().numpy())


def ids_of_tokens(token_ids: Sequence[int], is_token: Sequence[bool]) -> list[int]:
    """Ids with 0 in place of those of placeholders, which may lie outside the vocabulary."""
    return [token if is_id else 0 for token, is_id in zip(token_ids, is_token, strict=True)]
