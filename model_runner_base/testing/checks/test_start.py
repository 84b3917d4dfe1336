"""An engine starts; if none does, every other check would fail with the same error."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.end import end_checks
from model_runner_base.testing.table import refusal


def test_starts(text_engine: Callable[..., LLM], request: pytest.FixtureRequest) -> None:
    """An engine starts; if it does not, no other check is run."""
    try:
        text_engine(is_new=True, stays_new=True)
    except Exception as error:
        what = "the device refuses this engine" if refusal(error) else "no engine starts"
        end_checks(
            request.config,
            f"{what}, so no further check is run: change its options by --engine-options, or leave this check out, "
            '-k "not test_starts"',
        )
        raise
