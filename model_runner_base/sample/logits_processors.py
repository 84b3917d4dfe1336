"""vLLM's pluggable logits processors, those that users and plugins bring along.

They are Python over tensors whose shapes they choose, so they run tensor by tensor: on the device if it can do that,
else on the host, to which the logits are copied. vLLM's built-in ones are stages or parts of the sampler instead.
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
from model_runner_base.request_states import RequestInfo
from model_runner_base.sample.history import OutputHistory
from model_runner_base.sample.params import GREEDY_TEMPERATURE
from model_runner_base.sample.stage import LogitsStage, SampleInputs


def load_processors(vllm_config: VllmConfig, device: torch.device) -> list[LogitsProcessor]:
    """Those of ``logits_processors`` and of installed plugins; raises what vLLM raises if one cannot be loaded.

    Where one of them acts between temperature and top-k, vLLM's min-p, which comes before it, is among them too.
    """
    custom = vllm_config.model_config.logits_processors or ()
    every = list(build_logitsprocs(vllm_config, device, False, False, custom).all)
    own = [processor for processor in every if type(processor) not in BUILTIN_LOGITS_PROCESSORS]
    if any(processor.is_argmax_invariant() for processor in own):
        own = [*(processor for processor in every if isinstance(processor, MinPLogitsProcessor)), *own]
    return own


class LogitsProcessors(LogitsStage):
    """Every request asks for it where there are processors: only they know whom they serve.

    Processors that keep the most likely token act on logits divided by the temperature; the sampler divides again, so
    they are multiplied back.
    """

    def __init__(self, processors: list[LogitsProcessor], history: OutputHistory, device_ops: DeviceOps) -> None:
        self._processors = processors
        self._history = history
        self._device_ops = device_ops
        self._infos: dict[int, RequestInfo] = {}
        self.applies_min_p = any(isinstance(processor, MinPLogitsProcessor) for processor in processors)
        self._batch: list[RequestInfo] = []
        """The requests as the processors know them, by index in the batch."""

    def asked_by(self, params: SamplingParams) -> bool:
        return bool(self._processors)

    def looks_back(self, params: SamplingParams) -> bool:
        return True

    def set(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._infos[row] = info

    def apply(self, inputs: SampleInputs, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        self._history.catch_up()
        infos = [self._infos[row] for row in inputs.batch.rows.tolist()]
        update = batch_update(self._batch, infos)
        self._batch = infos
        for processor in self._processors:
            processor.update_state(update)
        # An adapter knows the requests it serves: without any, the logits need not move.
        serving = [p for p in self._processors if not isinstance(p, AdapterLogitsProcessor) or p.req_info]
        if not serving:
            return logits
        batch_logits = logits.to(self._device_ops.eager_device, copy=True).float()[: len(infos)]
        batch_logits = self._run(serving, batch_logits, infos)
        padded = np.zeros(tuple(logits.shape), np.float32)
        padded[: len(infos)] = batch_logits.cpu().numpy()
        return self._device_ops.to_device(padded)

    def _run(self, serving: list[LogitsProcessor], logits: torch.Tensor, infos: list[RequestInfo]) -> torch.Tensor:
        for processor in serving:
            if not processor.is_argmax_invariant():
                logits = processor.apply(logits)
        invariant = [processor for processor in serving if processor.is_argmax_invariant()]
        temperatures = torch.tensor([info.sampling_params.temperature for info in infos], device=logits.device)
        is_greedy = temperatures < GREEDY_TEMPERATURE
        if invariant and not is_greedy.all():
            temperatures = torch.where(is_greedy, 1.0, temperatures).unsqueeze(1)
            logits = logits / temperatures
            for processor in invariant:
                logits = processor.apply(logits)
            logits = logits * temperatures
        return logits


def batch_update(before: list[RequestInfo], after: list[RequestInfo]) -> BatchUpdate | None:
    """How a batch became another in vLLM's terms, or None if it did not change.

    Requests are told apart by identity. Newcomers take the places of those that left, first to last, and only a place
    left over counts as removed; what stands behind the new end moves into such places; swaps bring all into order.
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
        added.append((index, info.sampling_params, info.prompt_token_ids, info.output_token_ids))
        newcomers[index] = info
    places |= newcomers
    removed = [index for index in range(len(before)) if index not in places]
    moved = list(_moves(places, wanted, len(after)))
    return BatchUpdate(batch_size=len(after), removed=removed, added=added, moved=moved)


def _moves(places: dict[int, RequestInfo], wanted: dict[int, int], size: int) -> Iterator[MovedRequest]:
    """The moves that bring every request to the index it is wanted at; changes ``places``."""
    holes = [index for index in range(size) if index not in places]
    for hole, last in zip(holes, sorted((i for i in places if i >= size), reverse=True), strict=True):
        places[hole] = places.pop(last)
        yield last, hole, MoveDirectionality.UNIDIRECTIONAL
    for index in range(size):
        while (target := wanted[id(places[index])]) != index:
            places[index], places[target] = places[target], places[index]
            yield index, target, MoveDirectionality.SWAP
