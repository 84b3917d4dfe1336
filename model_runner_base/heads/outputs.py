"""Makes vLLM's ``ModelRunnerOutput`` from a step's results."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    LogprobsLists,
    ModelRunnerOutput,
)

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.head import HandedOn, PooledStep, SampledStep
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import StepResults, joined_fields
from model_runner_base.step.request_states import NO_TOKEN

__all__ = [
    "EMPTY_MODEL_RUNNER_OUTPUT",
    "AsyncModelRunnerOutput",
    "DraftTokenIds",
    "FailedOutput",
    "ModelRunnerOutput",
    "PooledOutput",
    "StepOutput",
    "make_output",
    "with_fields",
]


@dataclass
class FailedOutput(ModelRunnerOutput):
    """Output of a step in which some requests failed; the scheduler ends those (``RequestFailures``).

    Raises RuntimeError if the scheduler does not read errors: it would wait for their tokens for ever.
    """

    errors: dict[str, str | None] = field(default_factory=dict)
    """Reason by request; None if the request's rules allow no token."""
    unread_by: ClassVar[str | None] = None
    """Name of a scheduler that does not read ``errors``, if the newest engine has one."""

    def __post_init__(self) -> None:
        if self.unread_by is not None:
            raise RuntimeError(f"{self.unread_by} cannot end single requests, and these failed: {self.errors}")


def with_fields(output: ModelRunnerOutput, fields: Mapping[str, Any]) -> ModelRunnerOutput:
    """``output`` with the fields that components report (``StepComponent.end_step``); ``errors`` make it a
    ``FailedOutput``."""
    if "errors" in fields:
        return FailedOutput(**{**vars(output), **fields})
    return replace(output, **fields) if fields else output


class StepOutput(AsyncModelRunnerOutput):
    """Results of a step, still on the device; reading them waits for the step."""

    def __init__(self, batch: InputBatch, sampled: SampledStep, device_ops: DeviceOps) -> None:
        # A batch serves all repeats of a step: its lists are shared by their outputs, so they must not change.
        self._req_ids = batch.req_ids
        self._req_id_to_index = batch.req_id_to_index
        self._unsampled = batch.unsampled
        self._num_decodes, self._decode_query_len = batch.num_decodes, batch.decode_query_len
        self._sampled = sampled
        self._tokens = device_ops.begin_to_host(sampled.tokens)
        logprobs, num_nans = sampled.logprobs, sampled.num_nans
        self._num_logits = batch.num_decode_tokens + batch.num_reqs - batch.num_decodes
        self._logprobs = None if logprobs is None else logprobs.begin_to_host(self._num_logits, device_ops)
        self._num_nans = None if num_nans is None else device_ops.begin_to_host(num_nans)
        if logprobs is not None or num_nans is not None:
            self._logits_start = batch.logits_start(np.arange(batch.num_reqs))
        self._device_ops = device_ops

    def get_kv_connector_output(self) -> Any:
        """Report of a KV connector on the step, which some releases of vLLM ask for if ``get_output`` fails."""
        return self._sampled.fields.get("kv_connector_output")

    def get_output(self) -> ModelRunnerOutput:
        sampled, num_reqs = self._sampled, len(self._req_ids)
        values = self._tokens()[: self._num_logits]
        tokens = values[:num_reqs, None].tolist() if self._decode_query_len == 1 else self._yielded(values)
        for index in self._unsampled:
            tokens[index] = []
        fields = sampled.fields
        if values[values.argmin()] == NO_TOKEN:  # Takes a third of the time of ``values.min()``.
            fields = joined_fields(fields, {"errors": self._without_token(tokens)})
        output = ModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index=self._req_id_to_index,
            sampled_token_ids=tokens,
        )
        if self._logprobs is not None:
            output.logprobs = (
                self._logprobs() if self._decode_query_len == 1 else self._of_yielded(self._logprobs(), tokens)
            )
        for chunk in sampled.prompt_chunks:
            chunk.store(self._device_ops)
            if chunk.is_last:
                output.prompt_logprobs_dict[chunk.req_id] = chunk.whole
        if self._num_nans is not None:
            counts = self._count_nans(self._num_nans(), tokens).tolist()
            output.num_nans_in_logits = dict(zip(self._req_ids, counts, strict=True))
        return with_fields(output, fields)

    def _without_token(self, tokens: list[list[int]]) -> dict[str, str | None]:
        """Finds the requests whose rules allow no token, and removes their tokens of this step."""
        failed = [index for index, each in enumerate(tokens) if NO_TOKEN in each]
        for index in failed:
            tokens[index].clear()
        return dict.fromkeys(self._req_ids[index] for index in failed)

    # ---- Where drafts are verified: several tokens a request, as many as were right and one more ----

    def _yielded(self, tokens: np.ndarray) -> list[list[int]]:
        """Lists the yielded tokens of each request; ``tokens`` [S] are by logits row, -1 after those that count."""
        num_decode_tokens = self._num_decodes * self._decode_query_len
        decodes = tokens[:num_decode_tokens].reshape(-1, self._decode_query_len)
        yielded = decodes.tolist()
        (partly,) = (decodes[:, -1] == -1).nonzero()
        for request, count in zip(partly.tolist(), (decodes[partly] != -1).sum(axis=1).tolist(), strict=True):
            del yielded[request][count:]
        chunks = tokens[num_decode_tokens : num_decode_tokens + len(self._req_ids) - self._num_decodes, None]
        return yielded + chunks.tolist()

    def _of_yielded(self, every: LogprobsLists, tokens: list[list[int]]) -> LogprobsLists:
        """Picks the log probabilities of the yielded tokens, one request after another."""
        owner, place = self._places(tokens)
        index = self._logits_start[owner] + place
        ids, values, ranks = every.logprob_token_ids, every.logprobs, every.sampled_token_ranks
        first = np.searchsorted(owner, np.arange(len(tokens)))
        return LogprobsLists(ids[index], values[index], ranks[index], first.tolist())

    def _places(self, tokens: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Request of each token, and number of its tokens that come before, [N] each; one request after another."""
        counts = np.array([len(each) for each in tokens])
        owner = np.repeat(np.arange(len(tokens)), counts)
        return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]

    def _count_nans(self, num_nans: np.ndarray, tokens: list[list[int]]) -> np.ndarray:
        """Counts NaNs in the logits of each request's yielded tokens: [R], from ``num_nans`` [S].

        The first logits row counts even if its request yields no token.
        """
        counts = num_nans[self._logits_start]
        owner, place = self._places(tokens)
        owner, place = owner[place > 0], place[place > 0]
        np.add.at(counts, owner, num_nans[self._logits_start[owner] + place])
        return counts


class PooledOutput(AsyncModelRunnerOutput):
    """Results of a step of a pooling model; reading them pools, and waits for the step if a prompt is whole in it."""

    def __init__(self, batch: InputBatch, pooled: PooledStep, device_ops: DeviceOps) -> None:
        self._req_ids, self._req_id_to_index = batch.req_ids, batch.req_id_to_index
        self._pooled = pooled

    def get_kv_connector_output(self) -> Any:
        return self._pooled.fields.get("kv_connector_output")

    def get_output(self) -> ModelRunnerOutput:
        values, late = self._pooled.finish()
        output, fields = ModelRunnerOutput(self._req_ids, self._req_id_to_index), self._pooled.fields
        output.pooler_output = list(values)
        if late:
            fields = joined_fields(fields, {"errors": late})
        return with_fields(output, fields)


class HandedOnOutput(AsyncModelRunnerOutput):
    """Output of a stage that is not the last of its pipeline; vLLM reads that of the last one."""

    def __init__(self, batch: InputBatch, results: HandedOn, device_ops: DeviceOps) -> None:
        self._results = results

    def get_kv_connector_output(self) -> None:
        """Returns None, since admission/limits.py refuses KV connectors with stages."""

    def get_output(self) -> ModelRunnerOutput:
        return with_fields(EMPTY_MODEL_RUNNER_OUTPUT, self._results.fields)


OUTPUTS: dict[type, Any] = {SampledStep: StepOutput, PooledStep: PooledOutput, HandedOn: HandedOnOutput}
"""Output by the type of a head's results."""


def make_output(batch: InputBatch, results: StepResults, device_ops: DeviceOps) -> AsyncModelRunnerOutput:
    """Makes the output of a step from what its head returned."""
    return OUTPUTS[type(results)](batch, results, device_ops)
