"""XLA's While, the loop of graphs that are traced lazily."""

import numpy as np
import pytest
import torch
import torch_xla

from neuron_runner.executable import Executable
from neuron_runner.loops import while_loop


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_loop_has_as_many_rounds_as_a_tensor_says(rounds: int) -> None:
    """The body reads tensors of the loop, a weight from outside, and a number; a state of two tensors changes."""
    device, rng = torch_xla.device(), np.random.default_rng(0)
    table, weight, start = rng.normal(size=(5, 4)), rng.normal(size=4), rng.normal(size=4)
    outside = torch.tensor(weight).float().to(device)
    torch_xla.sync()

    def body(
        piece: torch.Tensor, state: tuple[torch.Tensor, ...], reads: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        total, largest = state
        row = reads[0][piece.view(1).long()][0]
        return total + row * outside * 2.5, torch.maximum(largest, row)

    given = [torch.tensor(rounds, dtype=torch.int32), *(torch.tensor(x).float() for x in (start, start, table))]
    given = [x.to(device) for x in given]
    torch_xla.sync()
    executable = Executable(
        lambda count, total, largest, rows: list(while_loop(count, 5, body, (total, largest), (rows,))),
        given,
        {index: index for index in range(4)},
    )
    executable.compile()
    total, largest = (x.cpu().numpy() for x in executable.run(given))
    np.testing.assert_allclose(total, start + (table[:rounds] * weight * 2.5).sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(largest, np.concatenate([start[None], table[:rounds]]).max(axis=0), rtol=1e-6)
