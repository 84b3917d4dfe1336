"""Errors of what this library does not do."""

from vllm.exceptions import VLLMValidationError


class UnsupportedConfigError(ValueError):
    """The engine config asks for a feature that model_runner_base does not have."""


class RequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as it is asked for; vLLM's API server answers it with status 400.

    Of any other error some releases make status 500.
    """
