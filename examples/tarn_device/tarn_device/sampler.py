"""A sampler on the host, since the device's compiler has no sort."""

from typing import Any

import torch
from torch.utils._pytree import tree_map


def on_host(sample: Any) -> Any:
    """``sample``, one of the base's samplers, with all of its tensors on the host."""

    def run(*tensors: torch.Tensor) -> Any:
        copies = [tensor.cpu() for tensor in tensors]
        results = sample(*copies)
        for tensor, copy in zip(tensors[4:], copies[4:], strict=True):
            tensor.copy_(copy)  # what the device knows of each request, such as its last token
        return tree_map(lambda result: result.to(tensors[0].device), results)

    run.is_on_host = True
    return run
