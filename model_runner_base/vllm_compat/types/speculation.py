"""vLLM's ``SpeculativeConfig`` as the base reads it."""

from dataclasses import dataclass

from vllm.config import SpeculativeConfig, VllmConfig

CHAIN_METHODS = ("eagle", "eagle3", "mtp", "draft_model")
"""A model with a KV cache drafts one token after another."""
HOST_METHODS = ("ngram", "suffix")
"""Nothing is loaded."""


@dataclass(frozen=True)
class SuffixOptions:
    """``suffix_decoding_*`` of vLLM's config."""

    max_tree_depth: int
    max_cached_requests: int
    max_spec_factor: float
    min_token_prob: float


@dataclass(frozen=True)
class Speculation:
    """What drafts, and how many tokens."""

    method: str = ""
    num_drafts: int = 0
    """Most tokens that are drafted for a request at a time, k."""
    mask_token: int | None = None
    """What stands where a parallel pass drafts; None: one token is drafted after another."""
    has_cache: bool = False
    """Whether drafting writes keys, which lie behind those of the step."""
    lookup: tuple[int, int] = (0, 0)
    """Fewest and most tokens that prompt lookup matches."""
    suffix: SuffixOptions | None = None
    max_length: int = 0
    """Positions that the draft model knows."""
    is_async: bool = False
    """Whether steps are scheduled before the last one's tokens are read."""

    @property
    def unread(self) -> int:
        """Tokens by which the scheduler may overstate a request's progress: the drafts of the step before."""
        return self.num_drafts if self.is_async else 0

    @property
    def pass_tokens(self) -> int:
        """The most tokens that verifying or drafting takes of a row at a time."""
        return 1 + (self.num_drafts if self.mask_token is None else 2 * self.num_drafts)

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
        mask_token=_read_mask_token(config) if config.parallel_drafting else None,
        has_cache=config.method in CHAIN_METHODS,
        lookup=(config.prompt_lookup_min or 0, config.prompt_lookup_max or 0),
        suffix=_read_suffix(config) if config.method == "suffix" else None,
        max_length=0 if config.method in HOST_METHODS else config.draft_model_config.max_model_len,
        is_async=bool(vllm_config.scheduler_config.async_scheduling),
    )


def max_step_tokens(vllm_config: VllmConfig) -> int:
    """The most tokens of a step, those counted that its decode rows have room for, and of a pass that drafts."""
    scheduler, tokens = vllm_config.scheduler_config, read_speculation(vllm_config).pass_tokens
    return scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (tokens - 1)


def _read_suffix(config: SpeculativeConfig) -> SuffixOptions:
    return SuffixOptions(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )


def _read_mask_token(config: SpeculativeConfig) -> int:
    """Where vLLM looks for it (``v1/spec_decode/eagle.py``). Raises ValueError if the draft's config has none."""
    draft = config.draft_model_config.hf_config
    for name in ("pard_token", "ptd_token_id"):
        if (token := getattr(draft, name, None)) is not None:
            return token
    raise ValueError(
        "For parallel drafting, the draft model config must have `pard_token` or `ptd_token_id` specified in its "
        "config.json."
    )
