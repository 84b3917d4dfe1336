"""Prompts given as embeddings, in whole or in part: the graph reads them from a pool on the device.

A token's ``embed_source`` is its row of the pool, or -1 if its embedding is looked up by its id. A step without given
embeddings uploads none. Any other step uploads those of its own tokens, padded to one of a few static lengths.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import ModelConfig

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.pool import EmbeddingPool
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import ModelCall
from model_runner_base.step.components import SectionUpdater, StepComponent
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.packing import PackedStep, Section
from model_runner_base.step.request_states import DeviceRows, RequestInfo, RequestStates
from model_runner_base.step.sizes import StepSize
from model_runner_base.vllm_compat.probes.config import rotary_dims
from model_runner_base.vllm_compat.probes.multimodal import takes_items
from model_runner_base.vllm_compat.types.mixed_prompts import given_rows

SECTION = "embed_source"
LOOKED_UP = -1


class EmbeddingInputs(StepComponent):
    """Gives the model prompts of embeddings. The pool's rows, float32, are those of the step's own tokens, in order."""

    reads = ("token_ids",)

    def __init__(
        self,
        requests: RequestStates,
        max_num_tokens: int,
        hidden_size: int,
        model: Any,
        wrap: WrapFunction,
        device_ops: DeviceOps,
    ) -> None:
        self._requests = requests
        self._model = model
        self._pool = EmbeddingPool(max_num_tokens, hidden_size, torch.float32, max_num_tokens, wrap, device_ops)
        self._num_embeds = np.zeros(requests.max_num_reqs, np.int64)

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._num_embeds[row] = 0 if info.prompt_embeds is None else len(info.prompt_embeds)

    def sections(self, size: StepSize) -> list[Section]:
        return [Section(SECTION, (size.num_tokens,))]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        source, row = views[SECTION], 0
        source[:] = LOOKED_UP
        for tokens, embeds in self._chunks(batch):
            source[tokens] = np.arange(row, row + len(tokens))
            row += len(embeds)

    def fill_padding(self, size: StepSize, views: dict[str, np.ndarray]) -> None:
        views[SECTION][:] = LOOKED_UP

    def repeat(self, batch: InputBatch, step: PackedStep) -> Sequence[SectionUpdater]:
        return [_LookedUp(step.views[SECTION])]

    def prepare(self, batch: InputBatch | None, step: PackedStep, rows: DeviceRows) -> None:
        """Uploads the embeddings of the step's tokens."""
        if batch is None or batch.is_repeat:
            return
        chunks = [embeds for tokens, embeds in self._chunks(batch) if len(tokens)]
        if chunks:
            embeds = torch.cat(chunks)
            self._pool.write(np.arange(len(embeds), dtype=np.int32), embeds)

    def warm_up(self) -> None:
        self._pool.warm_up()

    def _chunks(self, batch: InputBatch) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Yields the embeddings [N, H] in scheduled parts of prompts, and the N indices of their tokens in the step."""
        # The output tokens after a prompt have ids.
        indices = np.flatnonzero(self._num_embeds[batch.rows] > batch.num_computed)
        for index, info in zip(indices, self._requests.infos_of(batch.rows[indices]), strict=True):
            assert info.prompt_embeds is not None
            begin = batch.num_computed[index]
            chunk = info.prompt_embeds[begin : begin + batch.query_len[index]]
            given = given_rows(chunk)
            yield batch.query_start[index] + given, chunk[given].float()

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return tuple(self._pool.tensors)

    def bind(self, call: ModelCall) -> None:
        (pool,), source = call.tensors, call.arrays[SECTION]
        looked_up = self._model.embed_input_ids(call.token_ids)
        given = pool[source.clamp(min=0)].to(looked_up.dtype)
        call.kwargs["input_ids"] = None
        call.kwargs["inputs_embeds"] = torch.where((source >= 0).unsqueeze(1), given, looked_up)


class _LookedUp:
    """Marks all tokens of a repeated step as looked up, since they are outputs, which have ids."""

    def __init__(self, source: np.ndarray) -> None:
        self._source = source

    def begin(self, positions: np.ndarray) -> None:
        self._source[:] = LOOKED_UP

    def advance(self, positions: np.ndarray) -> bool:
        return True


def make_embedding_inputs(
    model_config: ModelConfig,
    requests: RequestStates,
    max_num_tokens: int,
    model: Any,
    wrap: WrapFunction,
    device_ops: DeviceOps,
) -> list[StepComponent]:
    """Makes the component that ``enable_prompt_embeds`` asks for; by default none."""
    if not model_config.enable_prompt_embeds:
        return []
    hidden_size = model_config.get_inputs_embeds_size()
    return [EmbeddingInputs(requests, max_num_tokens, hidden_size, model, wrap, device_ops)]


def embeddings_memory(model_config: ModelConfig, max_num_tokens: int) -> int:
    """Bytes of the pool, and of a piece that is copied to it; 0 without ``enable_prompt_embeds``."""
    if not model_config.enable_prompt_embeds:
        return 0
    return 4 * (2 * max_num_tokens + 1) * model_config.get_inputs_embeds_size()


def profile_inputs(
    model_config: ModelConfig, model: Any, token_ids: torch.Tensor, received: Any = None
) -> dict[str, Any]:
    """Makes the model's arguments for tokens before there are requests; they have the same names as in every step.

    ``received`` are the tensors that a pipeline's stage before hands on, if there is one; tokens are not embedded then.
    """
    num_dims = rotary_dims(model_config) if takes_items(model_config) else 1
    positions = token_ids.expand(num_dims, -1) if num_dims > 1 else token_ids
    inputs = {"positions": positions, "input_ids": token_ids, "inputs_embeds": None, "intermediate_tensors": received}
    takes_embeds = takes_items(model_config) and not model_config.is_encoder_decoder
    if received is None and (model_config.enable_prompt_embeds or takes_embeds):
        return inputs | {"input_ids": None, "inputs_embeds": model.embed_input_ids(token_ids)}
    return inputs
