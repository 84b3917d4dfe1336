"""Custom logits processors for vLLM's second model runner, which do what those of ``processors.py`` do.

Importable only where vLLM has that interface.
"""

from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState


class _BySlot(LogitsProcessor):
    """Keeps the argument of each request that asks for the processor, at the request's slot."""

    name: str

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.states = req_states
        self.arguments: list[int | None] = [None] * req_states.max_num_reqs
        self._staged: list[tuple[int, int | None]] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get(cls.name, 0), int):
            raise ValueError(f"{cls.name} takes an integer")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        argument = (sampling_params.extra_args or {}).get(self.name)
        self._staged.append((req_idx, argument))
        return argument is not None

    def apply_staged_writes(self) -> None:
        for slot, argument in self._staged:
            self.arguments[slot] = argument
        self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping.tolist()
        assert set(slots) == set(ctx.idx_mapping_np.tolist()) == set(ctx.idx_mapping.tolist())
        for row, slot in enumerate(slots):
            argument = self.arguments[slot]
            if argument is not None:
                self.change(logits[row], argument, self.tokens_before(row, slot, ctx), slot)
        return logits

    def tokens_before(self, row: int, slot: int, ctx: LogitsContext) -> list[int]:
        """The request's tokens up to the row's: those that are committed, then this step's drafts before the row."""
        place = int(ctx.expanded_local_pos[row])
        total = int(self.states.total_len.gpu[slot])
        committed: list[int] = self.states.all_token_ids.gpu[slot, :total].tolist()
        tokens = committed + ctx.input_ids[row - place + 1 : row + 1].tolist()
        assert tokens[-1] == int(ctx.input_ids[row])
        assert len(tokens) == int(ctx.pos[row]) + 1
        return tokens

    def change(self, logits: torch.Tensor, argument: int, tokens: list[int], slot: int) -> None:
        """Changes one logits row [V] in place."""
        raise NotImplementedError


class Favour(_BySlot):
    """Adds 6 to one token's logit."""

    name = "favour"

    def change(self, logits: torch.Tensor, argument: int, tokens: list[int], slot: int) -> None:
        logits[argument] += 6.0


class KeepTop(_BySlot):
    """Excludes all but the few most likely tokens."""

    name = "keep_top"

    def change(self, logits: torch.Tensor, argument: int, tokens: list[int], slot: int) -> None:
        floor = logits.topk(argument).values[-1]
        logits[logits < floor] = float("-inf")


class NeverAgain(_BySlot):
    """Forbids the tokens of the prompt and the last few output tokens."""

    name = "never_again"

    def change(self, logits: torch.Tensor, argument: int, tokens: list[int], slot: int) -> None:
        num_prompt_tokens = int(np.asarray(self.states.prompt_len.np)[slot])
        outputs = tokens[num_prompt_tokens:]
        logits[[*tokens[:num_prompt_tokens], *outputs[-argument:]]] = float("-inf")


SLOT_PROCESSORS: list[str | type[LogitsProcessor]] = [Favour, KeepTop, f"{__name__}:NeverAgain"]
"""Value of the engine option ``logits_processors``: classes, and a name that vLLM is to import."""
