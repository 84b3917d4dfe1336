"""Errors for configurations and requests that this library does not serve."""

from vllm.exceptions import VLLMValidationError


class UnsupportedConfigError(ValueError):
    """Error of an engine config that asks for a feature that model_runner_base does not have."""


class RequestError(VLLMValidationError, ValueError):
    """Error of a request that cannot be served as it is; vLLM's API server answers with status 400.

    Some releases answer any other error with status 500.
    """
