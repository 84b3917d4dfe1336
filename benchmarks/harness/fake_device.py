"""A device that takes no time: it computes once a shape, and its time is taken out of the step's.

Checked steps are live: the model hands on a hash of every token's id and position, so that each token depends on all
that the runner prepared. Measured steps replay the first results of the same shapes, as a captured graph would be
launched again.
"""

import time
from collections.abc import MutableSequence
from functools import partial
from typing import Any

import torch
from torch import nn

from model_runner_base import BucketPolicy, ModelRunnerBase, StepKind, StepLimits, StepSize
from model_runner_base.step.graph_policy import StepFunction
from model_runner_base.step.sizes import geometric

VOCAB_SIZE = 512


def _clock_ns() -> int:
    """Cost of reading the clock once, which is a system call."""
    count = 10_000
    start = time.thread_time_ns()
    for _ in range(count):
        time.thread_time_ns()
    return (time.thread_time_ns() - start) // count


CLOCK_NS = _clock_ns()


class FakeDevice:
    """Device that runs work live or replayed, and counts the thread time that went into it."""

    def __init__(self) -> None:
        self.is_live = True
        self.taken_ns = 0
        self._results: dict[tuple[Any, ...], Any] = {}

    def replay(self) -> None:
        """Remembers results from now on, and repeats them."""
        self.is_live = False
        self._results.clear()

    def run(self, function: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Runs work of the device, and takes its time out."""
        before, start = self.taken_ns, time.thread_time_ns()
        result = function(*args, **kwargs)
        # Calls of this method inside this one are part of it.
        self.taken_ns = before + time.thread_time_ns() - start + CLOCK_NS
        return result

    def wrap(self, function: StepFunction) -> StepFunction:
        def replayed(*args: Any) -> Any:
            key = (replayed, *(getattr(arg, "shape", arg) for arg in args))
            if self.is_live:
                result = function(*args)
            else:
                result = self._results.get(key)
                if result is None:
                    result = self._results[key] = function(*args)
            return result

        return partial(self.run, replayed)


class FakeModel(nn.Module):
    """Model with hidden states [T, 2]: the next token, which is a hash of id and position, and the index in the
    step."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._hidden_states = device.wrap(self._run)
        self.compute_logits = device.wrap(self._run_head)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: None) -> torch.Tensor:
        return self._hidden_states(input_ids, positions)

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hashed = (token_ids.long() * 31 + positions * 17 + 7) % VOCAB_SIZE
        return torch.stack((hashed, torch.arange(len(token_ids))), dim=-1).float()

    def _run_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits so far apart that no penalty or noise changes the token."""
        return nn.functional.one_hot(hidden_states[:, 0].long(), VOCAB_SIZE).float() * 1e4


class FakePolicy(BucketPolicy):
    """Sizes as a device with graphs would have them; every wrapped function is a graph on the fake device.

    Decode rows in powers of two. Decode alone: mean context in whole KV tiles. Mixed steps: tokens of chunks in steps
    of 256, of any number of requests; attention pairs growing by half.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def configure(self, limits: StepLimits) -> None:
        super().configure(limits)
        self._limits = limits
        contexts, context = [], 1
        while context < limits.max_kv_tiles:
            contexts.append(context)
            context += -(-context // 2)
        sizes = []
        for rows in geometric(1, limits.max_num_reqs):
            sizes += [limits.decode_size(rows, rows * context) for context in range(1, limits.max_kv_tiles + 1)]
            for tokens in range(256, limits.max_num_tokens + 256, 256):
                tiles = limits.num_tiles(tokens, limits.max_num_reqs)
                mixed = [(rows * context, tokens // limits.chunk.query * context) for context in contexts]
                mixed.append((rows * limits.max_kv_tiles, tiles * limits.max_chunk_kv_tiles))
                sizes += [limits.mixed_size(rows, own, tokens, limits.max_num_reqs, chunks) for own, chunks in mixed]
        self.set_sizes(sizes)

    def sizes_for(self, num_decodes: int, num_chunk_tokens: int) -> list[StepSize]:
        """Sizes at which steps of these numbers of decodes and chunk tokens may run, whatever their contexts."""
        kind = StepKind.MIXED if num_chunk_tokens else StepKind.DECODE
        fit = []
        for size in self.sizes:
            dims = self._limits.named(size)
            capacity = dims["decode_rows"], dims["chunk_tokens"]
            if size.kind == kind and capacity[0] >= num_decodes and capacity[1] >= num_chunk_tokens:
                fit.append((capacity, size))
        least = min(capacity for capacity, _ in fit)
        return [size for capacity, size in fit if capacity == least]

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        return self._device.wrap(function)


class FakeDeviceRunner(ModelRunnerBase):
    """Our runner with plain DeviceOps."""

    def _cache_device_properties(self) -> None:
        self.fake_device = FakeDevice()
        self.graph_policy: FakePolicy = FakePolicy(self.fake_device)

    def load_model(self) -> None:
        self.model = FakeModel(self.fake_device)

    def profile_run(self) -> int:
        return 0

    def capture_model(self) -> None:
        """Captures nothing: sizes are captured when they are first met, outside the time that counts."""

    def make_buffers(self, num_decodes: int, num_chunk_tokens: int) -> None:
        """Makes the packed buffers of such steps, as an engine's warm-up does."""
        for size in self.graph_policy.sizes_for(num_decodes, num_chunk_tokens):
            self.parts.graph.pad(size)


class FakeHead(nn.Module):
    """EAGLE head whose hidden states are those of the fake model one position further, so that it is always right."""

    def __init__(self, target: FakeModel) -> None:
        super().__init__()
        self._target = [target]
        self.compute_logits = target.compute_logits

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._target[0](input_ids, positions + 1)
        return hidden, hidden


class DraftingRunner(FakeDeviceRunner):
    """Our runner with a drafter."""

    def load_model(self) -> None:
        super().load_model()
        self.model.draft_model = FakeHead(self.model)
