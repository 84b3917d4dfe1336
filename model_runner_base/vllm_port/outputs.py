"""A step's results as vLLM's ``ModelRunnerOutput``."""

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampled import SampledStep
from model_runner_base.step.batch import InputBatch

__all__ = ["EMPTY_MODEL_RUNNER_OUTPUT", "AsyncModelRunnerOutput", "DraftTokenIds", "ModelRunnerOutput", "StepOutput"]


class StepOutput(AsyncModelRunnerOutput):
    """A step's results, still on the device; reading them waits for the step."""

    def __init__(self, batch: InputBatch, sampled: SampledStep, device_ops: DeviceOps) -> None:
        # A batch serves all repeats of a step: its lists are shared by their outputs, and nobody changes them.
        self._req_ids = batch.req_ids
        self._req_id_to_index = batch.req_id_to_index
        self._unsampled = batch.unsampled
        self._sampled = sampled
        self._tokens = device_ops.begin_to_host(sampled.tokens)
        logprobs, num_nans = sampled.logprobs, sampled.num_nans
        self._logprobs = None if logprobs is None else logprobs.begin_to_host(batch.num_reqs, device_ops)
        self._num_nans = None if num_nans is None else device_ops.begin_to_host(num_nans)
        self._device_ops = device_ops

    def get_output(self) -> ModelRunnerOutput:
        sampled, num_reqs = self._sampled, len(self._req_ids)
        tokens = self._tokens()[:num_reqs, None].tolist()
        for index in self._unsampled:
            tokens[index] = []
        output = ModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index=self._req_id_to_index,
            sampled_token_ids=tokens,
        )
        if self._logprobs is not None:
            output.logprobs = self._logprobs()
        for chunk in sampled.prompt_chunks:
            chunk.store(self._device_ops)
            if chunk.is_last:
                output.prompt_logprobs_dict[chunk.req_id] = chunk.whole
        if self._num_nans is not None:
            counts = self._num_nans()[:num_reqs].tolist()
            output.num_nans_in_logits = dict(zip(self._req_ids, counts, strict=True))
        return output
