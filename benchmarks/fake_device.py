"""A device that takes no time: what runs on it is computed once a shape, and its time is taken out of the step's.

Checked steps are live: the model hands on a hash of every token's id and position, so that each token depends on all
that the runner prepared. Measured steps replay the first results of the same shapes, as a captured graph would be
launched again.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from model_runner_base import BucketPolicy, GraphSize, ModelRunnerBase
from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.graph_policy import StepFunction, StepLimits, geometric
from model_runner_base.input_batch import unpack

VOCAB_SIZE = 512


def _clock_ns() -> int:
    """What reading the clock once costs: it is a system call."""
    count = 10_000
    start = time.thread_time_ns()
    for _ in range(count):
        time.thread_time_ns()
    return (time.thread_time_ns() - start) // count


CLOCK_NS = _clock_ns()


class FakeDevice:
    """Runs device work, live or replayed, and keeps the thread time that went into it."""

    def __init__(self) -> None:
        self.is_live = True
        self.attends = False
        """Whether live steps show the mean of what each token sees of the cache: attention without scores."""
        self.taken_ns = 0
        self._results: dict[tuple[Any, ...], Any] = {}

    def replay(self) -> None:
        """Results are remembered from now on."""
        self.is_live = False
        self._results.clear()

    def wrap(self, function: StepFunction) -> StepFunction:
        def call(*args: Any) -> Any:
            before, start = self.taken_ns, time.thread_time_ns()
            key = (call, *(getattr(arg, "shape", arg) for arg in args))
            if self.is_live:
                result = function(*args)
            else:
                result = self._results.get(key)
                if result is None:
                    result = self._results[key] = function(*args)
            # Wrapped calls inside this one are part of it.
            self.taken_ns = before + time.thread_time_ns() - start + CLOCK_NS
            return result

        return call


class FakeModel(nn.Module):
    """Hidden states [T, 2]: the token that comes next, a hash of id and position, and the index in the step."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.seen: dict[str, torch.Tensor] = {}
        """What the last live step handed over."""
        self.look: Callable[[torch.Tensor], dict[str, torch.Tensor]] = lambda values: {}
        """What else a live step shows, given a value for each token [T, 1] that a layer would cache."""
        self._device = device
        self._hidden_states = device.wrap(self._run)
        self.compute_logits = device.wrap(self._run_head)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: None) -> torch.Tensor:
        return self._hidden_states(input_ids, positions)

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hashed = (token_ids.long() * 31 + positions * 17 + 7) % VOCAB_SIZE
        if self._device.is_live:
            seen = {"token_ids": token_ids.clone(), "positions": positions.clone()}
            self.seen = seen | self.look(hashed.unsqueeze(-1) / VOCAB_SIZE)
        return torch.stack((hashed, torch.arange(len(token_ids))), dim=-1).float()

    def _run_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits so far apart that no penalty or noise changes the token."""
        if self._device.is_live:
            self.seen["sampled_from"] = hidden_states[:, 1].int()
        return nn.functional.one_hot(hidden_states[:, 0].long(), VOCAB_SIZE).float() * 1e4


class FakePolicy(BucketPolicy):
    """Sizes as a device with graphs would have them; every wrapped function is a graph on the fake device.

    Decode: requests in powers of two, mean context in whole KV tiles. Mixed steps: tokens in steps of 256, attention
    pairs growing by half.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.packed: tuple[GraphSize, torch.Tensor] | None = None
        """Size and packed inputs of the last live step."""

    def configure(self, limits: StepLimits) -> None:
        sizes = [
            GraphSize(1, reqs, reqs, reqs, reqs * kv_tiles + 1)
            for reqs in geometric(1, limits.max_num_reqs)
            for kv_tiles in range(1, limits.max_kv_tiles + 1)
        ]
        for tokens in range(256, limits.max_num_tokens + 1, 256):
            tiles, reqs = limits.num_tiles(tokens), min(tokens, limits.max_num_reqs)
            pairs, most = tokens // limits.query_tile, tiles * limits.max_kv_tiles
            while pairs < most:
                sizes.append(GraphSize(limits.query_tile, tokens, reqs, tiles, pairs + 1))
                pairs += pairs // 2
            sizes.append(GraphSize(limits.query_tile, tokens, reqs, tiles, most + 1))
        self.set_sizes(sizes)

    def wrap(self, function: StepFunction, state: list[torch.Tensor]) -> StepFunction:
        wrapped = self._device.wrap(function)

        def call(*args: Any) -> Any:
            if self._device.is_live and isinstance(args[0], GraphSize):
                self.packed = args[0], args[1].clone()
            return wrapped(*args)

        return call


class FakeDeviceRunner(ModelRunnerBase):
    """Our runner with plain DeviceOps."""

    def _cache_device_properties(self) -> None:
        self.fake_device = FakeDevice()
        self.graph_policy: FakePolicy = FakePolicy(self.fake_device)

    def load_model(self) -> None:
        self.model = FakeModel(self.fake_device)
        self.model.look = self._look

    def profile_run(self) -> int:
        return 0

    def capture_model(self) -> None:
        """Sizes are captured when they are first met, outside the time that counts."""

    def make_buffers(self, num_tokens: int) -> None:
        """The packed buffers of steps of so many tokens, as an engine's warm-up leaves them."""
        sizes = [size for size in self.graph_policy.sizes if size.num_tokens >= num_tokens]
        least = min(size.num_tokens for size in sizes)
        for size in sizes:
            if size.num_tokens == least:
                self._inputs.at(size)

    def _look(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cache slots [T] and sequence lengths [R] of the running step, padded, from its packed inputs."""
        assert self.graph_policy.packed is not None
        size, packed = self.graph_policy.packed
        arrays = unpack(packed, self._sections(size))
        block_size = self.vllm_config.cache_config.block_size
        slots = arrays["slot_blocks.0"] * block_size + arrays["positions"] % block_size
        seen = {"slots": slots, "seq_lens": arrays["sample_positions"]}
        if self.fake_device.attends:
            context: Any = get_forward_context()
            metadata = next(iter(context.attn_metadata.values()))
            attention = PagedAttentionImpl(num_heads=1, head_size=1, scale=1.0)
            query = torch.zeros_like(values)
            seen["attended"] = attention.forward(None, query, values, values, self.kv_caches[0], metadata)[:, 0]  # type: ignore[arg-type]
        return seen
