"""What a step hands back to the engine."""

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from model_runner_base.device_ops import DeviceOps
from model_runner_base.input_batch import InputBatch


class StepOutput(AsyncModelRunnerOutput):
    """Sampled tokens that are still on the device; reading them waits for the step."""

    def __init__(self, batch: InputBatch, tokens: torch.Tensor, device_ops: DeviceOps) -> None:
        self._req_ids = batch.req_ids
        self._is_sampled = batch.is_sampled
        self._tokens = tokens
        self._device_ops = device_ops

    def get_output(self) -> ModelRunnerOutput:
        tokens = self._device_ops.to_host(self._tokens)[: len(self._req_ids), None].tolist()
        for index in np.flatnonzero(~self._is_sampled):
            tokens[index] = []
        return ModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(self._req_ids)},
            sampled_token_ids=tokens,
        )
