"""Reads vLLM's ``SpeculativeConfig`` into a ``Speculation``."""

from dataclasses import dataclass

from vllm.config import SpeculativeConfig, VllmConfig

CHAIN_METHODS = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods in which a model with a KV cache drafts one token after another."""
HOST_METHODS = ("ngram", "suffix")
"""Methods on the host, for which no model is loaded."""


@dataclass(frozen=True)
class SuffixOptions:
    """Settings ``suffix_decoding_*`` of vLLM's config."""

    max_tree_depth: int
    max_cached_requests: int
    max_spec_factor: float
    min_token_prob: float


@dataclass(frozen=True)
class Speculation:
    """Method of drafting, with its settings."""

    method: str = ""
    num_drafts: int = 0
    """Largest number of tokens that are drafted for a request at a time, k."""
    mask_token: int | None = None
    """Token id that a parallel pass takes in place of each token to be drafted; None: tokens are drafted one by one."""
    has_cache: bool = False
    """Whether drafting writes keys, at positions after those of the step."""
    lookup: tuple[int, int] = (0, 0)
    """Smallest and largest number of tokens that prompt lookup matches."""
    suffix: SuffixOptions | None = None
    max_length: int = 0
    """Number of positions that the draft model knows."""
    is_async: bool = False
    """Whether steps are scheduled before the last one's tokens are read."""

    @property
    def unread(self) -> int:
        """Number of tokens by which the scheduler may overstate a request's progress: the drafts of the step before."""
        return self.num_drafts if self.is_async else 0

    @property
    def pass_tokens(self) -> int:
        """Largest number of tokens a row in one pass of verifying or drafting."""
        return 1 + (self.num_drafts if self.mask_token is None else 2 * self.num_drafts)

    @property
    def ahead(self) -> int:
        """Number of positions after a step's tokens that drafting reaches."""
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
    """Largest number of tokens of a step, or of a pass that drafts; all places of decode rows count."""
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
    """Reads the mask token as vLLM does (``v1/spec_decode/eagle.py``).

    Raises ValueError if the draft's config has none.
    """
    draft = config.draft_model_config.hf_config
    for name in ("pard_token", "ptd_token_id"):
        if (token := getattr(draft, name, None)) is not None:
            return token
    raise ValueError(
        "For parallel drafting, the draft model config must have `pard_token` or `ptd_token_id` specified in its "
        "config.json."
    )
