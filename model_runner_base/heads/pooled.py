"""Results of pooling: what each request of a step gets, once the step's hidden states are on the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Value = torch.Tensor | None
"""Result for one request: a vector, a row for each of its tokens, or None while its prompt is not whole."""


@dataclass
class PooledStep:
    """Results of a step that a pooling head has answered."""

    finish: Callable[[], tuple[Sequence[Value], dict[str, str | None]]]
    """Waits for the step and pools; returns the value of each request of the batch, and the reasons of those that
    failed, by request."""
    errors: dict[str, str | None] = field(default_factory=dict)
    """Requests that failed before the step ran, with the reason."""
