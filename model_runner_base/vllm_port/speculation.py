"""vLLM's ``SpeculativeConfig`` as the house reads it."""

from dataclasses import dataclass

from vllm.config import VllmConfig

CHAIN_METHODS = ("eagle", "eagle3", "mtp", "draft_model")
"""A model with a KV cache drafts one token after another."""


@dataclass(frozen=True)
class Speculation:
    """What drafts, and how many tokens."""

    method: str = ""
    num_drafts: int = 0
    """Most tokens that are drafted for a request at a time, k."""
    has_cache: bool = False
    """Whether drafting writes keys, which lie behind those of the step."""
    lookup: tuple[int, int] = (0, 0)
    """Fewest and most tokens that prompt lookup matches."""
    max_length: int = 0
    """Positions that the draft model knows."""
    is_async: bool = False
    """Whether steps are scheduled before the last one's tokens are read."""

    @property
    def unread(self) -> int:
        """Tokens by which the scheduler may overstate a request's progress: the drafts of the step before."""
        return self.num_drafts if self.is_async else 0

    @property
    def ahead(self) -> int:
        """Positions behind a step's tokens that drafting reaches."""
        return self.num_drafts if self.has_cache else 0


def read_speculation(vllm_config: VllmConfig) -> Speculation:
    config = vllm_config.speculative_config
    if config is None:
        return Speculation()
    assert config.method is not None
    return Speculation(
        method=config.method,
        num_drafts=config.num_speculative_tokens,
        has_cache=config.method in CHAIN_METHODS,
        lookup=(config.prompt_lookup_min or 0, config.prompt_lookup_max or 0),
        max_length=config.draft_model_config.max_model_len,
        is_async=bool(vllm_config.scheduler_config.async_scheduling),
    )
