"""Custom logits processors of vLLM's first model runner (``vllm/v1/sample/logits_processor``).

They keep their state by places in the batch, and are told how a batch became another.
"""

from collections.abc import Iterator

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MinPLogitsProcessor,
    MoveDirectionality,
    build_logitsprocs,
)
from vllm.v1.sample.logits_processor.interface import AddedRequest, MovedRequest

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logits_stage import CustomProcessors, CustomStages, LogitsStage, OutputHistory
from model_runner_base.heads.sampling.sampler import GREEDY_TEMPERATURE
from model_runner_base.step.call import Forward
from model_runner_base.step.request_states import RequestInfo, RequestStates


class BatchProcessors(CustomProcessors):
    """Loads the processors of ``logits_processors`` and of installed plugins.

    vLLM's min-p comes before any processor that acts between temperature and top-k. If there is one, min-p is run here,
    too, in front. Raises what vLLM raises if a processor cannot be loaded.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        custom = vllm_config.model_config.logits_processors or ()
        every = list(build_logitsprocs(vllm_config, device, False, False, custom).all)
        own = [processor for processor in every if type(processor) not in BUILTIN_LOGITS_PROCESSORS]
        self._invariant = [processor for processor in own if processor.is_argmax_invariant()]
        self._others = [processor for processor in own if not processor.is_argmax_invariant()]
        self._min_p = [processor for processor in every if isinstance(processor, MinPLogitsProcessor)]

    def stages(self, requests: RequestStates, history: OutputHistory, device_ops: DeviceOps) -> CustomStages:
        parts = requests, history, device_ops
        late = [*self._min_p, *self._invariant]
        return CustomStages(
            before_penalties=[LogitsProcessors(self._others, *parts)] if self._others else (),
            after_penalties=[InvariantLogitsProcessors(late, *parts)] if self._invariant else (),
            has_min_p=bool(self._invariant and self._min_p),
        )


class LogitsProcessors(LogitsStage):
    """Runs the processors that may change which token is likeliest.

    Every request asks for the stage, because only the processors know which requests they change.
    """

    def __init__(
        self,
        processors: list[LogitsProcessor],
        requests: RequestStates,
        history: OutputHistory,
        device_ops: DeviceOps,
    ) -> None:
        self._processors = processors
        self._requests = requests
        self._history = history
        self._device_ops = device_ops
        # update_state of vLLM's adapters and of min-p reads no output tokens.
        self._update_looks_back = not all(
            isinstance(p, AdapterLogitsProcessor | MinPLogitsProcessor) for p in processors
        )
        self._batch: list[RequestInfo] = []
        """Requests of the batch that the processors were last updated to, by index."""

    def asked_by(self, params: SamplingParams) -> bool:
        return True

    def looks_back(self, params: SamplingParams) -> bool:
        return True

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        if self._update_looks_back:
            self._history.catch_up()
        infos = self._requests.infos_of(forward.batch.rows)
        update = batch_update(self._batch, infos)
        self._batch = infos
        for processor in self._processors:
            processor.update_state(update)
        serving = [processor for processor in self._processors if _serves(processor)]
        if not serving:
            return logits
        self._history.catch_up()
        padded = np.zeros(tuple(logits.shape), np.float32)
        batch_logits = logits.to(self._device_ops.eager_device, copy=True)[: len(infos)]
        padded[: len(infos)] = self._run(serving, batch_logits, infos).cpu().numpy()
        return self._device_ops.to_device(padded)

    def _run(self, serving: list[LogitsProcessor], logits: torch.Tensor, infos: list[RequestInfo]) -> torch.Tensor:
        for processor in serving:
            logits = processor.apply(logits)
        return logits


class InvariantLogitsProcessors(LogitsProcessors):
    """Runs the processors that keep the likeliest token.

    They act on logits divided by the temperature, and not on greedy requests. The sampler divides by the temperature
    again, so their results are multiplied by it.
    """

    def _run(self, serving: list[LogitsProcessor], logits: torch.Tensor, infos: list[RequestInfo]) -> torch.Tensor:
        temperatures = torch.tensor([[info.params.temperature] for info in infos], device=logits.device)
        is_greedy = temperatures < GREEDY_TEMPERATURE
        temperatures = torch.where(is_greedy, 1.0, temperatures)
        return torch.where(is_greedy, logits, super()._run(serving, logits / temperatures, infos) * temperatures)


def _serves(processor: LogitsProcessor) -> bool:
    """Whether a processor may change anything in this batch. If none does, the logits need not be copied."""
    if isinstance(processor, AdapterLogitsProcessor):
        return bool(processor.req_info)
    return not isinstance(processor, MinPLogitsProcessor) or processor.min_p_count > 0


def batch_update(before: list[RequestInfo], after: list[RequestInfo]) -> BatchUpdate | None:
    """Describes, in vLLM's terms, how a batch became another; None if it did not change.

    Requests are told apart by identity. New requests take the places of those that left, first to last. Only a place
    that stays empty counts as removed. Requests beyond the new end move into empty places, and swaps restore the order.
    """
    if len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)):
        return None
    wanted = {id(info): index for index, info in enumerate(after)}
    places: dict[int, RequestInfo] = {i: info for i, info in enumerate(before) if id(info) in wanted}
    stayed = {id(info) for info in places.values()}
    free = (index for index in range(len(before) + len(after)) if index not in places)
    added: list[AddedRequest] = []
    newcomers: dict[int, RequestInfo] = {}
    for info, index in zip((info for info in after if id(info) not in stayed), free, strict=False):
        added.append((index, info.params, info.prompt_token_ids, info.output_token_ids))
        newcomers[index] = info
    places |= newcomers
    removed = [index for index in range(len(before)) if index not in places]
    moved = list(_moves(places, wanted, len(after)))
    return BatchUpdate(batch_size=len(after), removed=removed, added=added, moved=moved)


def _moves(places: dict[int, RequestInfo], wanted: dict[int, int], size: int) -> Iterator[MovedRequest]:
    """Yields the moves that bring every request to its index in ``wanted``; changes ``places``."""
    holes = [index for index in range(size) if index not in places]
    for hole, last in zip(holes, sorted((i for i in places if i >= size), reverse=True), strict=True):
        places[hole] = places.pop(last)
        yield last, hole, MoveDirectionality.UNIDIRECTIONAL
    for index in range(size):
        while (target := wanted[id(places[index])]) != index:
            places[index], places[target] = places[target], places[index]
            yield index, target, MoveDirectionality.SWAP
