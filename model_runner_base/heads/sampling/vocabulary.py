"""Rows of logits as a rank has them: whole, or cut over the ranks that share the vocabulary.

Noise is a hash of seed, position and token, so a rank draws for its own tokens the noise that they have in a whole row.
If nothing else needs whole rows, the ranks exchange only their best tokens and the values that the cut-offs need of
whole rows. That is a few numbers a row instead of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from model_runner_base.heads.sampling.likeliest import likeliest
from model_runner_base.heads.sampling.params import SamplingMode
from model_runner_base.step.device_rows import NO_TOKEN
from model_runner_base.step.graph_policy import SortLimits, StepFunction, WrapFunction

_LOW_BITS = 12


class Vocabulary:
    """The whole vocabulary on every rank: a step returns whole rows."""

    start = 0
    """Token that the first column of the rows belongs to."""

    def modes(self, sort_limits: SortLimits) -> tuple[SamplingMode, ...]:
        """Sampling modes that work on parts of rows."""
        return ()

    def gatherer(self, wrap: WrapFunction) -> StepFunction:
        """Returns ``whole`` as a function to call between graphs."""
        return self.whole

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        """Makes this rank's rows from the logits that its model computed; float32, as all values here."""
        return logits

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Makes whole rows [S, V], the same on every rank."""
        return own

    # ---- For rows that ``own`` made, or values of their shape ----

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest value of each row, [S, 1]."""
        return values.amax(dim=-1, keepdim=True)

    def largest(self, values: torch.Tensor, count: int, max_width: int | None) -> torch.Tensor:
        """The ``count`` largest values of each row, or all if it has fewer, largest first (see ``likeliest``)."""
        return likeliest(values, min(count, values.shape[-1]), max_width)[0]

    def argmax(self, values: torch.Tensor) -> torch.Tensor:
        """The token of the largest value of each row, the first one if several are equal, [S] int32.

        NO_TOKEN if all values are -inf or one is NaN.
        """
        tokens = values.argmax(dim=-1, keepdim=True)
        return _unless_forbidden(tokens, values.gather(-1, tokens))


@dataclass(frozen=True)
class CutVocabulary(Vocabulary):
    """The rank's ``width`` tokens from ``start`` on, of ``size`` in all; the last ranks' parts may end in padding."""

    start: int = field()
    width: int
    num_ranks: int
    size: int
    all_gather: Callable[[torch.Tensor], torch.Tensor]
    """[S, n] to [S, num_ranks * n]: the ranks' values next to one another, in the order of their tokens."""

    def modes(self, sort_limits: SortLimits) -> tuple[SamplingMode, ...]:
        """Sampling modes that work on parts of rows.

        A sort needs whole rows, unless candidates are capped: then each rank has few of them to exchange.
        """
        return tuple(mode for mode in SamplingMode if mode != SamplingMode.SORTED or sort_limits.max_candidates)

    def gatherer(self, wrap: WrapFunction) -> StepFunction:
        return wrap(self.whole, [])

    def own(self, logits: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(self.width, dtype=torch.int32, device=logits.device) + self.start
        return torch.where(tokens < self.size, logits, float("-inf"))

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        return self.all_gather(own)[:, : self.size]

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return super().maximum(self.all_gather(super().maximum(values)))

    def largest(self, values: torch.Tensor, count: int, max_width: int | None) -> torch.Tensor:
        found = self.all_gather(super().largest(values, count, max_width))
        return super().largest(found, min(count, self.size), max_width)

    def argmax(self, values: torch.Tensor) -> torch.Tensor:
        # Tokens are sent in two halves: each is exact in float32, in vocabularies of any size.
        tokens = values.argmax(dim=-1).to(torch.int32) + self.start
        halves = tokens >> _LOW_BITS, tokens & ((1 << _LOW_BITS) - 1)
        best = torch.stack((values.amax(dim=-1), *(half.to(torch.float32) for half in halves)), dim=-1)
        every = self.all_gather(best).view(-1, self.num_ranks, 3)
        winner = every[..., 0].argmax(dim=-1, keepdim=True)
        value = every[..., 0].gather(-1, winner)
        high, low = (every[..., part].gather(-1, winner).squeeze(-1).to(torch.int32) for part in (1, 2))
        return _unless_forbidden((high * (1 << _LOW_BITS) + low).unsqueeze(-1), value)


def _unless_forbidden(tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[S] int32 from ``tokens`` [S, 1]: NO_TOKEN where the token's value in ``values`` [S, 1] is -inf or NaN."""
    return torch.where(values > float("-inf"), tokens, NO_TOKEN).squeeze(-1).to(torch.int32)


WHOLE = Vocabulary()
