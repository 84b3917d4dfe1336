"""Checks of an engine's requests, made in its front end before a request is queued."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from model_runner_base.admission import limits
from model_runner_base.admission.item_checks import check_items, item_width
from model_runner_base.errors import RequestError
from model_runner_base.vllm_compat.probes.multimodal import decoder_of
from model_runner_base.vllm_compat.types.mixed_prompts import ids_of_tokens


@dataclass(frozen=True)
class RequestChecks:
    """Sizes of a model that requests are checked against."""

    vocab_size: int
    hidden_size: int
    item_width: int | None
    """Width of the embeddings of an image, a video or a sound; None where the model takes none."""
    vector_size: int | None = None
    """Length of the vectors of a pooling model."""

    @classmethod
    def of(cls, model: ModelConfig) -> "RequestChecks":
        vector_size = model.embedding_size if model.runner_type == "pooling" else None
        return cls(model.get_vocab_size(), model.get_inputs_embeds_size(), item_width(model), vector_size)

    def check(self, processed_inputs: Any, params: SamplingParams | PoolingParams) -> None:
        """Raises ValueError for a request whose output would be wrong; takes arguments of
        ``Platform.validate_request``."""
        decoded = decoder_of(processed_inputs)
        embeds, is_token = processed_inputs.get("prompt_embeds"), processed_inputs.get("is_token_ids")
        token_ids = decoded.get("prompt_token_ids") or []
        if is_token is not None:
            check_mixed(embeds, token_ids, is_token, getattr(params, "repetition_penalty", 1.0))
            embeds, token_ids = embeds[~torch.tensor(is_token, dtype=torch.bool)], ids_of_tokens(token_ids, is_token)
        limits.check_request(params, token_ids, self.vocab_size)
        if self.vector_size and (dimensions := getattr(params, "dimensions", None) or 0) > self.vector_size:
            raise RequestError(f"dimensions={dimensions} is more than the {self.vector_size} that vectors have here")
        if decoded is not processed_inputs and not decoded.get("mm_placeholders"):
            raise RequestError("this model has nothing to hear: give a sound in the multi_modal_data of encoder_prompt")
        if items := decoded.get("mm_kwargs"):
            check_items(items, decoded["mm_placeholders"], self.item_width)
        if embeds is not None:
            check_embeds(embeds, self.hidden_size, getattr(params, "prompt_logprobs", None) is not None)


def check_embeds(embeds: torch.Tensor, hidden_size: int, wants_prompt_logprobs: bool) -> None:
    """Raises RequestError for embeddings [P, H] that the model cannot take; [1, P, H] was made [P, H] by vLLM."""
    if not embeds.is_floating_point():
        raise RequestError(f"prompt_embeds must be floating-point numbers, got {embeds.dtype}")
    if not len(embeds) or embeds.shape[1] != hidden_size:
        raise RequestError(
            f"prompt_embeds must be [tokens, {hidden_size}] with a token at least, got {[*embeds.shape]}"
        )
    if not embeds.isfinite().all():
        raise RequestError("prompt_embeds must be finite")
    if wants_prompt_logprobs:
        raise RequestError("prompt_logprobs need token ids, which prompt_embeds do not have: leave one of them out")


def check_mixed(
    embeds: torch.Tensor, token_ids: Sequence[int], is_token: Sequence[bool], repetition_penalty: float
) -> None:
    """Raises RequestError for a prompt of tokens and embeddings whose parts do not fit together.

    ``is_token`` says which rows of ``embeds`` [P, H] are tokens; their ids are in ``token_ids``.
    """
    if not len(embeds) == len(token_ids) == len(is_token):
        raise RequestError(
            "prompt_embeds, prompt_token_ids and prompt_is_token_ids must have one length, got "
            f"{len(embeds)}, {len(token_ids)} and {len(is_token)}"
        )
    if all(is_token):
        raise RequestError("prompt_is_token_ids names no embedding: give prompt_token_ids alone")
    if repetition_penalty != 1:
        raise RequestError(
            "repetition_penalty counts the tokens of a prompt, which embeddings hide in part: set repetition_penalty=1 "
            "(the model's generation_config.json may set another), or start with --generation-config vllm"
        )
