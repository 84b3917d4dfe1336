"""Requests that fail while a step is prepared."""

from typing import Any

import pytest
from vllm import LLM

from model_runner_base.testing.engine import runner_of

SEED = 13
"""Seed of the requests that fail."""


def fail_admission(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the runner raise IndexError once a request with ``SEED`` has taken a row."""
    head = runner_of(llm).parts.head
    admit = head.admit

    def fails(row: int, info: Any, token_ids: list[int]) -> None:
        admit(row, info, token_ids)
        if info.params.seed == SEED:
            raise IndexError(f"nothing at {SEED}")

    monkeypatch.setattr(head, "admit", fails)
