"""Custom logits processors of vLLM's second model runner (``vllm/v1/worker/gpu/sample/logits_processor``).

They keep their state by slots of requests, and read tokens of requests from tensors that the runner keeps. Here a
request's slot is its row in ``RequestStates``. They come after the penalties and before the temperature.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.logits_stage import CustomProcessors, CustomStages, LogitsStage, OutputHistory
from model_runner_base.step.call import Forward
from model_runner_base.step.request_states import RequestInfo, RequestStates


class SlotTensor:
    """Numbers on the host, with a copy on another device; attributes as those of vLLM's buffers.

    ``cpu`` and ``np`` are the numbers on the host, ``gpu`` the ones that processors read. On the host all are one.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.cpu = torch.zeros(shape, dtype=torch.int32)
        self.np = self.cpu.numpy()
        self.gpu = self.cpu if device == torch.device("cpu") else self.cpu.to(device, copy=True)

    def send(self, *places: np.ndarray) -> None:
        """Copies the numbers at some places to the device; ``places`` has an array [N] for each dimension."""
        if self.gpu is not self.cpu:
            device = self.gpu.device
            values = torch.from_numpy(self.np[places]).to(device)
            self.gpu[tuple(torch.from_numpy(each).to(device) for each in places)] = values


class SlotStates:
    """Tokens of the requests in all slots; attributes as those of vLLM's ``LogitsProcRequestState``."""

    def __init__(self, max_num_reqs: int, max_model_len: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        self.all_token_ids = SlotTensor((max_num_reqs, max_model_len), device)
        self.prompt_len = SlotTensor((max_num_reqs,), device)
        self.prefill_len = SlotTensor((max_num_reqs,), device)
        self.total_len = SlotTensor((max_num_reqs,), device)

    def admit(self, row: int, num_prompt_tokens: int, token_ids: list[int]) -> None:
        """Notes a request that takes a slot; ``token_ids`` are its prompt and its output so far."""
        self.prompt_len.np[row] = num_prompt_tokens
        self.prefill_len.np[row] = self.total_len.np[row] = len(token_ids)
        self.all_token_ids.np[row, : len(token_ids)] = token_ids
        for each in (self.prompt_len, self.prefill_len, self.total_len):
            each.send(np.array([row]))
        self.all_token_ids.send(np.full(len(token_ids), row), np.arange(len(token_ids)))

    def catch_up(self, rows: np.ndarray, infos: list[RequestInfo]) -> None:
        """Appends output tokens that are new to requests in these slots."""
        total, before = self.total_len.np, self.total_len.np[rows]
        for row, info in zip(rows.tolist(), infos, strict=True):
            begin, tokens = total[row], self.all_token_ids.np[row]
            # A step that was launched before its request ended may have drawn a token too many.
            new = info.output_token_ids[begin - self.prompt_len.np[row] :][: len(tokens) - begin]
            tokens[begin : begin + len(new)] = new
            total[row] += len(new)
        counts = total[rows] - before
        places = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        self.all_token_ids.send(np.repeat(rows, counts), np.repeat(before, counts) + places)
        self.total_len.send(rows)


class SlotProcessors(CustomProcessors):
    """Loads the processors of ``logits_processors`` and of installed plugins.

    Raises what vLLM raises if a processor cannot be loaded, or has the interface of the first model runner.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        model_config = vllm_config.model_config
        self._processors: list[Any] = []
        if model_config.runner_type == "pooling":
            return
        from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors

        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        vocab_size = model_config.get_vocab_size()
        self._states = SlotStates(max_num_reqs, model_config.max_model_len, vocab_size, device)
        custom = model_config.logits_processors or ()
        self._processors = build_custom_logits_processors(vllm_config, self._states, False, custom)

    def stages(self, requests: RequestStates, history: OutputHistory, device_ops: DeviceOps) -> CustomStages:
        if not self._processors:
            return CustomStages()
        return CustomStages(
            after_penalties=[SlotStage(self._processors, self._states, requests, history, device_ops)],
        )


class SlotStage(LogitsStage):
    """Runs the processors once for the whole batch, if a request is in it that one of them changes.

    Every request asks for the stage, because a processor says only when the request has its slot whether it is changed.
    """

    def __init__(
        self,
        processors: list[Any],
        states: SlotStates,
        requests: RequestStates,
        history: OutputHistory,
        device_ops: DeviceOps,
    ) -> None:
        self._processors = processors
        self._states = states
        self._requests = requests
        self._history = history
        self._device_ops = device_ops
        self._is_changed = np.zeros(states.max_num_reqs, bool)
        """[rows] whether a processor changes the request's logits."""

    def asked_by(self, params: Any) -> bool:
        return True

    def looks_back(self, params: Any) -> bool:
        return True

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._states.admit(row, info.num_prompt_tokens, token_ids)
        # Every processor has to know of the request, not only the first that changes it.
        self._is_changed[row] = any([each.add_request(row, info.params) for each in self._processors])

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        rows = forward.batch.rows[asking]
        if not self._is_changed[rows].any():
            return logits
        self._history.catch_up()
        self._states.catch_up(rows, self._requests.infos_of(rows))
        for processor in self._processors:
            processor.apply_staged_writes()
        places, context = self._context(forward, asking)
        whole = logits.to(self._device_ops.eager_device, copy=True)
        changed = whole[places]
        for processor in self._processors:
            changed = processor.apply(changed, context)
        whole[places] = changed
        return self._device_ops.to_device(whole.cpu().numpy())

    def _context(self, forward: Forward, asking: np.ndarray) -> tuple[torch.Tensor, Any]:
        """The requests' rows among the logits rows, and what vLLM tells of them (``LogitsContext``)."""
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        batch, device = forward.batch, self._states.device
        indices, owner, place = batch.logits_rows(asking)
        slots, total = batch.rows[asking], self._states.total_len.np
        tokens = self._states.all_token_ids.np[slots, total[slots] - 1][owner]
        if batch.decode_query_len > 1:
            drafts = self._device_ops.to_host(forward.sample_slots)[2]
            tokens = np.where(place > 0, drafts[indices - 1], tokens)
        position = total[slots][owner] - 1 + place

        def there(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(values).to(device, dtype)

        context = LogitsContext(
            expanded_idx_mapping=there(slots[owner], torch.int32),
            idx_mapping=there(slots, torch.int32),
            idx_mapping_np=slots,
            expanded_local_pos=there(place, torch.int32),
            input_ids=there(tokens, torch.int32),
            pos=there(position, torch.int64),
            seq_lens_upper_bound_np=total[slots] + batch.num_logits(asking) - 1,
        )
        return there(indices, torch.int64), context
