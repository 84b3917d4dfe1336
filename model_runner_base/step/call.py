"""One call of the model inside a step's graph: what the rooms work out of the packed buffer, and hand to the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from model_runner_base.requests.device_rows import known_or
from model_runner_base.step.packing import Section, unpack
from model_runner_base.step.sizes import StepSize


@dataclass
class ModelCall:
    """Filled in this order: the tokens by ``unpack``, where they are by the cache groups, the arguments by the inputs.

    All tensors are on the device and padded: T tokens, L rows of logits.
    """

    size: StepSize
    arrays: dict[str, torch.Tensor]
    """The sections of the packed buffer, int32."""
    tokens: torch.Tensor
    """[rows + 1, K] of ``DeviceRows``."""
    computed: torch.Tensor
    """[rows + 1] of ``DeviceRows``."""
    token_ids: torch.Tensor
    """[T] int32"""
    positions: torch.Tensor = field(init=False)
    """[T] int32"""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What each attention layer reads, by its name."""
    slot_mapping: dict[str, torch.Tensor] = field(default_factory=dict)
    """[T] int64 cache slots by layer name, for layers that write the cache apart from attention."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What the model is called with."""

    @classmethod
    def unpack(
        cls,
        size: StepSize,
        packed: torch.Tensor,
        sections: Sequence[Section],
        tokens: torch.Tensor,
        computed: torch.Tensor,
    ) -> "ModelCall":
        arrays = unpack(packed, sections)
        return cls(size, arrays, tokens, computed, known_or(arrays["token_ids"], tokens[:, 0]))

    @property
    def sample_slots(self) -> torch.Tensor:
        """[2, L] int32: the row that each row of logits is recorded in, and the position its token will have."""
        return torch.stack((self.arrays["sample_rows"], self.positions[self.arrays["logits_indices"]] + 1))
