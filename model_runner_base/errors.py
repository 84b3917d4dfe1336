"""Errors for configurations and requests that this library does not serve."""

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError


class UnsupportedConfigError(ValueError):
    """Error of an engine config that asks for a feature that model_runner_base does not have."""


class CheckpointError(ValueError):
    """Error of a checkpoint that cannot be loaded into the model that its config describes."""


class WeightUpdateError(ValueError):
    """Error of a call that does not fit the state of a weight update."""

    def __init__(self, message: str) -> None:
        super().__init__(f"weight update refused: {message}")


class RequestError(VLLMValidationError, ValueError):
    """Error of a request that cannot be served as it is; vLLM's API server answers with status 400.

    Some releases answer any other error with status 500.
    """


def first_line(error: Exception) -> str:
    """First line of an error's message; its repr if there is no message, as an assertion may have none."""
    return str(error).partition("\n")[0] or repr(error)


def refuse(refusals: Mapping[str, Any]) -> None:
    """Raises UnsupportedConfigError with the first message whose setting is asked for."""
    for message, is_asked in refusals.items():
        if is_asked:
            raise UnsupportedConfigError(message)
