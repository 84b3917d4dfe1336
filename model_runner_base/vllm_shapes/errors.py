"""What vLLM's API server answers with status 400."""

from vllm.exceptions import VLLMValidationError


class RequestError(VLLMValidationError, ValueError):
    """A request that cannot be served as it is asked for; of any other error some releases make status 500."""
