"""The product with transposed weights: right at every number of rows, from one capture."""

import torch
import torch_xla

from model_runner_base.step.sizes import StepKind, StepSize
from neuron_runner.compilation import CompiledFunction
from neuron_runner.weights import UNPACKED_ROWS, matmul


def test_matmul_splits_rows_without_another_capture() -> None:
    weight = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    on_device = weight.to(torch_xla.device())
    compiled = CompiledFunction(lambda size, x: matmul(x, on_device) + size.dims[0], [])
    with torch.no_grad():
        for count in (2, 1, 8, UNPACKED_ROWS, UNPACKED_ROWS + 1, 32, 33, 64):
            x = torch.randn(count, 48, generator=torch.Generator().manual_seed(count))
            got = compiled(StepSize(StepKind.DECODE, (count,)), x.to(torch_xla.device())).cpu()
            torch.testing.assert_close(got.double(), x.double() @ weight.double() + count, rtol=1e-5, atol=1e-5)
    assert sum(map(len, compiled._captures.values())) == 1
