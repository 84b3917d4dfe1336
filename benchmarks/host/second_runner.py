"""vLLM's second GPUModelRunner (``v1/worker/gpu``) on torch's CPU, with everything that the host does.

Besides the stand-ins of stock_runner.py: memory that host and device share is memory of the host, a copy to the device
is a copy to a staging tensor and one from there, and the launch of a Triton kernel is a call that counts itself. That
costs less than Triton's own launch, some 10 us and more. Steps that are checked run the kernels (second_kernels.py),
whose time is taken out. The sampler is a fake, as the other runners' are, so its launches are not counted.

CUDA graphs are off: a step of decode does not pay for their dispatch, but for a forward context, which a whole graph
would spare.
"""

import sys
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.triton_utils import triton

if not hasattr(triton, "next_power_of_2"):  # vLLM's placeholder, without a GPU, lacks it.
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()

from vllm.v1.worker.gpu import buffer_utils, model_runner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from benchmarks.harness.fake_device import FakeDevice
from benchmarks.harness.runners import layered_config
from benchmarks.host.second_kernels import KERNELS, combine_sampled_and_draft_tokens
from benchmarks.host.stock_runner import StockBackend, WatchedModel, stand_in_for_cuda


class SecondConfig(VllmConfig):
    """Config that asks for the second runner, whatever the process's environment says."""

    use_v2_model_runner = True  # type: ignore[assignment]


def second_config(is_async: bool) -> VllmConfig:
    with mock.patch.object(VllmConfig, "use_v2_model_runner", True):
        config = layered_config(is_async, StockBackend)
    config.__class__ = SecondConfig
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return config


class Kernel:
    """Stand-in for a Triton kernel."""

    device: FakeDevice
    """Device of the runner that was made last."""
    num_launches = 0
    """Launches of all kernels."""

    def __init__(self, name: str) -> None:
        self._name = name
        # The index of each request's last token is read by torch, so replayed steps need it, too.
        self._is_always_run = KERNELS.get(name) is combine_sampled_and_draft_tokens

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        Kernel.num_launches += 1
        if Kernel.device.is_live or self._is_always_run:
            Kernel.device.run(KERNELS[self._name], *args, **kwargs)


class Copies:
    """Stand-in for ``async_tensor_h2d``, which counts its calls."""

    count = 0

    @staticmethod
    def copy(data: Any, device: Any = None, dtype: Any = None, out: torch.Tensor | None = None) -> torch.Tensor:
        Copies.count += 1
        if isinstance(data, np.ndarray):
            data = torch.from_numpy(data)
        if dtype is None:
            dtype = data.dtype if out is None else out.dtype
        if isinstance(data, torch.Tensor):
            staged = torch.empty(data.shape, dtype=dtype).copy_(data)
        else:
            staged = torch.tensor(data, dtype=dtype)
        return staged.clone() if out is None else out.copy_(staged)


class SharedBuffer:
    """Stand-in for memory that host and device share, vLLM's ``UvaBuffer``."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, count: int | None = None) -> torch.Tensor:
        """The first ``count`` numbers, or all, as the device sees them."""
        return self.cpu if count is None else self.cpu[:count]


class _Unmeasured:
    """Stand-in for the profiler of the device's memory."""

    consumed_memory = 0

    def __enter__(self) -> "_Unmeasured":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def stand_in_for_triton() -> None:
    """Replaces the second runner's kernels, copies and shared memory, for the rest of the process."""
    kernels: dict[str, Kernel] = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.v1.worker.gpu.")]:
        for name in [*vars(module)]:
            if name == "async_tensor_h2d":
                setattr(module, name, Copies.copy)
            elif name.endswith("_kernel"):
                setattr(module, name, kernels.setdefault(name, Kernel(name)))
    buffer_utils.UvaBuffer = SharedBuffer  # type: ignore[misc, assignment]
    buffer_utils.is_uva_available = lambda: True  # type: ignore[assignment]
    model_runner.DeviceMemoryProfiler = _Unmeasured  # type: ignore[misc, assignment]
    model_runner.init_kv_cache = lambda *_, **__: {}  # No tensors, since no layer runs.


class SecondSampler(Sampler):
    """Sampler that counts as device work: one greedy token of each request whose prompt is computed."""

    req_states: Any

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:  # type: ignore[override]
        self._input_batch = input_batch
        return self._sample(logits)

    def count_as_device_work(self, device: FakeDevice) -> None:
        self._sample = device.wrap(self._run)

    def _run(self, logits: torch.Tensor) -> SamplerOutput:
        batch = self._input_batch
        prefill_lens = self.req_states.prefill_len.gpu[batch.idx_mapping]
        num_sampled = (batch.seq_lens[: batch.num_reqs] >= prefill_lens).int()
        return SamplerOutput(
            sampled_token_ids=logits.argmax(-1, keepdim=True),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=torch.zeros_like(num_sampled),  # type: ignore[call-arg]
        )


class SecondRunner(model_runner.GPUModelRunner):
    """The second runner without the parts that talk to CUDA."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        stand_in_for_cuda()
        stand_in_for_triton()
        self.fake_device = Kernel.device = FakeDevice()
        super().__init__(vllm_config, torch.device("cpu"))
        self.load_model(model=WatchedModel(self))  # type: ignore[arg-type]
        assert type(self.sampler) is Sampler
        self.sampler.__class__ = SecondSampler
        self.sampler.count_as_device_work(self.fake_device)  # type: ignore[attr-defined]

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        self.input_batch = super().prepare_inputs(*args, **kwargs)  # Read where steps are watched.
        return self.input_batch

    def launched(self) -> dict[str, int]:
        """Launches of Triton kernels, and copies to the device, since the process began."""
        return {"triton_launches": Kernel.num_launches, "copies": Copies.count}
