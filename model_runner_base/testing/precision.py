"""Dtype that the kit runs in, and how its checks compare where that dtype rounds.

In float32 tokens are compared exactly. In a dtype of 16 bits, sums of the same numbers in another order are rounded
otherwise, so no two programs agree. A token is then compared only where HF transformers prefers it by more than
rounding moves. ``TinyModel.tolerances`` measures that at each place, by transformers in the dtype and in float32: some
places, such as those where two keys have like scores, move five times as much as others.
"""

from dataclasses import dataclass
from typing import Any

import torch

FACTOR = 10.0
"""Largest difference of two logits, or of a log probability, by the root mean square of the reference's differences at
the place. That of transformers in eager attention, which rounds more often, is 9.9 times at most over 1,300 places of
each of four tiny models, and 5.8 times at 99 of 100 places."""


class NotLooked(Exception):
    """Error of a check that cannot look at what it is for; the words say why. It is neither kept nor broken."""


@dataclass
class Precision:
    """The kit's dtype, and the number of tokens that the check in progress has compared in it."""

    dtype: torch.dtype = torch.float32
    num_counted: int = 0
    """Tokens that rounding explains no other of: those whose margin in the reference exceeds what it moves, and those
    whose log probability is compared."""
    num_compared: int = 0

    @property
    def name(self) -> str:
        """vLLM's name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_exact(self) -> bool:
        """Whether tokens are compared exactly."""
        return self.dtype is torch.float32

    def note(self, num_counted: int, num_compared: int) -> None:
        """Counts tokens that were compared; in float32 all count, and none are shown."""
        if self.is_exact:
            return
        self.num_counted += num_counted
        self.num_compared += num_compared

    def begin(self) -> None:
        """Begins to count anew, for the next check."""
        self.num_counted = self.num_compared = 0

    def require_exact(self, what: str) -> None:
        """Raises NotLooked if the dtype rounds; ``what`` is compared, in words."""
        if not self.is_exact:
            raise NotLooked(f"{what} are compared in float32 alone, and this run is in {self.name}")

    def choose(self, asked: str | None, engine_options: dict[str, Any], supported: list[torch.dtype]) -> None:
        """Chooses the dtype: the one that is asked for, else float32, or the platform's first if it has no float32."""
        named = asked or engine_options.get("dtype")
        if named is not None and named != "auto":
            self.dtype = getattr(torch, {"half": "float16", "float": "float32"}.get(named, named))
        elif supported and torch.float32 not in supported:
            self.dtype = supported[0]

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Nearest numbers that the dtype has, in the tensor's own dtype: those of a checkpoint, so that a reference in
        float32 computes with the device's weights."""
        return tensor if self.is_exact or not tensor.is_floating_point() else tensor.to(self.dtype).to(tensor.dtype)


PRECISION = Precision()
"""The one of this process."""
