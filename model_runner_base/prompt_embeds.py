"""Prompts given as embeddings: what an engine with ``enable_prompt_embeds`` adds to a step.

Every step's graph then takes one more tensor, the embeddings [T, H], and one more section of the packed buffer, which
says for each token whether its embedding is taken from there or looked up by its id. Without the setting the defaults
of ``TokenInputs`` stand, and the step is as it would be without this file.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from vllm.config import ModelConfig

from model_runner_base.device_ops import DeviceOps
from model_runner_base.graph_policy import GraphSize
from model_runner_base.input_batch import InputBatch, Section
from model_runner_base.request_states import RequestInfo, RequestStates

SECTION = "embeds_used"


class TokenInputs:
    """Token ids are all there is."""

    def set(self, row: int, info: RequestInfo) -> None:
        """A request took a row."""

    def sections(self, size: GraphSize) -> list[Section]:
        return []

    def pack(self, batch: InputBatch, views: dict[str, np.ndarray]) -> None:
        """Fills this room's section."""

    def tensors(self, batch: InputBatch, size: GraphSize) -> Sequence[torch.Tensor]:
        """What the graph takes beside the packed buffer."""
        return ()

    def padding(self, size: GraphSize) -> Sequence[torch.Tensor]:
        """What the graph takes on a run of nothing but padding."""
        return ()

    def model_inputs(
        self, model: Any, token_ids: torch.Tensor, arrays: dict[str, torch.Tensor], embeds: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor | None]:
        """Part of the graph: what the model is called with for its tokens."""
        return {"input_ids": token_ids, "inputs_embeds": None}


class EmbedInputs(TokenInputs):
    """Embeddings wait on the host; a step without any sends zeros that lie on the device already."""

    def __init__(self, requests: RequestStates, hidden_size: int, device_ops: DeviceOps) -> None:
        self._requests = requests
        self._hidden_size = hidden_size
        self._device_ops = device_ops
        self._num_embeds = np.zeros(requests.max_num_reqs, np.int64)
        self._zeros = lru_cache(maxsize=64)(self._make_zeros)

    def set(self, row: int, info: RequestInfo) -> None:
        self._num_embeds[row] = 0 if info.prompt_embeds is None else len(info.prompt_embeds)

    def sections(self, size: GraphSize) -> list[Section]:
        return [Section(SECTION, (size[1],))]

    def pack(self, batch: InputBatch, views: dict[str, np.ndarray]) -> None:
        used = views[SECTION]
        used[:] = 0
        for start, chunk in self._chunks(batch):
            used[start : start + len(chunk)] = 1

    def tensors(self, batch: InputBatch, size: GraphSize) -> Sequence[torch.Tensor]:
        chunks = self._chunks(batch)
        if not chunks:
            return self._zeros(size.num_tokens)
        embeds = np.zeros((size.num_tokens, self._hidden_size), np.float32)
        for start, chunk in chunks:
            embeds[start : start + len(chunk)] = chunk
        return (self._device_ops.to_device(embeds),)

    def _chunks(self, batch: InputBatch) -> list[tuple[int, np.ndarray]]:
        """The scheduled parts of prompts of embeddings, and where in the batch each begins."""
        chunks = []
        # Behind a prompt come output tokens, which have ids.
        indices = np.flatnonzero(self._num_embeds[batch.rows] > batch.num_computed)
        for index, info in zip(indices, self._requests.infos_of(batch.rows[indices]), strict=True):
            assert info.prompt_embeds is not None
            begin = batch.num_computed[index]
            chunk = info.prompt_embeds[begin : begin + batch.query_len[index]].float().numpy()
            chunks.append((batch.query_start[index], chunk))
        return chunks

    def padding(self, size: GraphSize) -> Sequence[torch.Tensor]:
        return self._zeros(size.num_tokens)

    def _make_zeros(self, num_tokens: int) -> Sequence[torch.Tensor]:
        return (self._device_ops.to_device(np.zeros((num_tokens, self._hidden_size), np.float32)),)

    def model_inputs(
        self, model: Any, token_ids: torch.Tensor, arrays: dict[str, torch.Tensor], embeds: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor | None]:
        looked_up = model.embed_input_ids(token_ids)
        (given,) = embeds
        used = arrays[SECTION].unsqueeze(1) != 0
        return {"input_ids": None, "inputs_embeds": torch.where(used, given.to(looked_up.dtype), looked_up)}


def make_prompt_embeds(model_config: ModelConfig, requests: RequestStates, device_ops: DeviceOps) -> TokenInputs:
    """What ``enable_prompt_embeds`` asks for; by default nothing beside token ids."""
    if not model_config.enable_prompt_embeds:
        return TokenInputs()
    return EmbedInputs(requests, model_config.get_inputs_embeds_size(), device_ops)


def profile_inputs(model_config: ModelConfig, model: Any, token_ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """What a model is called with for its tokens before there are requests: the same arguments as in every step."""
    if model_config.enable_prompt_embeds:
        return {"input_ids": None, "inputs_embeds": model.embed_input_ids(token_ids)}
    return {"input_ids": token_ids, "inputs_embeds": None}


def check_embeds(embeds: torch.Tensor, hidden_size: int, wants_prompt_logprobs: bool) -> None:
    """Raises ValueError for embeddings [P, H] that the model cannot take; [1, P, H] was made [P, H] by vLLM."""
    if not embeds.is_floating_point():
        raise ValueError(f"prompt_embeds must be floating-point numbers, got {embeds.dtype}")
    if not len(embeds) or embeds.shape[1] != hidden_size:
        raise ValueError(f"prompt_embeds must be [tokens, {hidden_size}] with a token at least, got {[*embeds.shape]}")
    if not embeds.isfinite().all():
        raise ValueError("prompt_embeds must be finite")
    if wants_prompt_logprobs:
        raise ValueError("prompt_logprobs need token ids, which prompt_embeds do not have: leave one of them out")
