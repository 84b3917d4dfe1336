"""A sampler on the host, since the device multiplies no integers, from which the noise of sampling is made."""

from typing import Any

import torch
from torch.utils._pytree import tree_map


def on_host(sample: Any) -> Any:
    """``sample``, one of the base's samplers, with all of its tensors on the host."""

    def run(*tensors: torch.Tensor) -> Any:
        logits, slots, floats, ints, *rows = (tensor.cpu() for tensor in tensors)
        results = sample(logits, slots, floats, ints, *rows)
        for row, copy in zip(tensors[4:], rows, strict=True):
            row.copy_(copy)  # what the device knows of each request, such as its last token
        return tree_map(lambda result: result.to(tensors[0].device), results)

    run.is_on_host = True
    return run
