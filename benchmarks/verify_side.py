"""Our runner with or without drafts, under a scheduler of vLLM's, for ``verify_step``."""

from collections import deque
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.fake_device import VOCAB_SIZE, FakeDevice, FakeDeviceRunner
from benchmarks.host_engine import (
    MAX_NUM_TOKENS,
    Side,
    cache_config,
    make_config,
    make_request,
    make_scheduler,
)
from model_runner_base.attention.paged import PagedAttentionBackend
from model_runner_base.step.trace import watch_steps

NUM_BLOCKS = 1 + 256 * 256
PROMPT = 100


class FakeHead(nn.Module):
    """EAGLE head whose hidden states are those of the fake model one position further, so that it is always right."""

    def __init__(self, target: Any, device: FakeDevice) -> None:
        super().__init__()
        self._target = [target]
        self.compute_logits = target.compute_logits

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._target[0](input_ids, positions + 1)
        return hidden, hidden


class DraftingRunner(FakeDeviceRunner):
    def load_model(self) -> None:
        super().load_model()
        self.model.draft_model = FakeHead(self.model, self.fake_device)


class VerifySide:
    """Our runner in steps as an engine makes them, one at a time."""

    def __init__(self, is_async: bool, speculative_config: dict[str, Any] | None) -> None:
        self.config = make_config(is_async, PagedAttentionBackend, speculative_config=speculative_config)
        with set_current_vllm_config(self.config):
            runner = DraftingRunner(self.config, torch.device("cpu"))
            runner.load_model()
            runner.initialize_kv_cache(cache_config(NUM_BLOCKS))
        scheduler_cls = AsyncScheduler if is_async else Scheduler
        self._side = Side(runner, watch_steps, scheduler_cls)
        self._scheduler = make_scheduler(scheduler_cls, self.config, NUM_BLOCKS, MAX_NUM_TOKENS)
        self._is_async, self._drafts = is_async, speculative_config is not None
        self._in_flight: deque[Any] = deque()
        self._num_requests = 0

    def start(self, count: int) -> None:
        """Brings ``count`` requests to decode; from then on the device replays its results."""
        self._side.device.is_live = True
        for number in range(count):
            prompt = [(number * 7 + index) % VOCAB_SIZE for index in range(PROMPT)]
            self._scheduler.add_request(make_request(f"{self._num_requests}.{number}", prompt, 3000))
        self._num_requests += 1
        while any(request.num_output_tokens < 12 for request in self._scheduler.requests.values()):
            self.step()
        self._side.device.replay()

    def step(self) -> float:
        """Runs one step; returns microseconds of host time."""
        self._side.step_ns = 0
        scheduler_output = self._scheduler.schedule()
        self._side.launch(scheduler_output)
        self._in_flight.append(scheduler_output)
        if len(self._in_flight) > int(self._is_async):
            self._scheduler.update_from_output(self._in_flight.popleft(), self._side.read())
        time = self._side.step_ns / 1000
        if self._drafts and not self._is_async:
            drafts = self._side.runner.take_draft_token_ids()
            self._scheduler.update_draft_token_ids(drafts)
        return time

    def finish(self) -> None:
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(list(self._scheduler.requests), RequestStatus.FINISHED_ABORTED)
        self.step()
        while self._in_flight:
            self._scheduler.update_from_output(self._in_flight.popleft(), self._side.read())
