"""Cut of recurrent layers over the ranks of tensor parallelism: which models vLLM's layers can cut.

A rank has its part of the heads, or of the channels of Mamba and of short convolutions, with their states. Groups of
Mamba 2 are cut like heads, but a single group is on every rank.
"""

from typing import Any

from model_runner_base.errors import UnsupportedConfigError

HEADS = ("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
OF_WHOLE_MODELS = {
    "mamba": "intermediate_size",
    "falcon_mamba": "intermediate_size",
    "mamba2": "num_heads",
    "lfm2": "hidden_size",
    "lfm2_moe": "hidden_size",
}
"""Fields of heads or channels, by type of model, that mean something else in other models."""


def check_ranks(config: Any, ranks: int) -> None:
    """Raises UnsupportedConfigError for a model, given its config, whose recurrent layers ``ranks`` cannot share."""
    shared = [*HEADS, *filter(None, [OF_WHOLE_MODELS.get(config.model_type)])]
    counts = {name: getattr(config, name, None) for name in [*shared, *GROUPS]}
    if config.model_type == "kimi_linear":
        counts["linear_attn_config.num_heads"] = (config.linear_attn_config or {}).get("num_heads")
    for name, count in counts.items():
        is_on_every_rank = name in GROUPS and count == 1
        if count and count % ranks and not is_on_every_rank:
            raise UnsupportedConfigError(
                f"recurrent layers with {name}={count} are not cut over {ranks} ranks: use a tensor_parallel_size that "
                "divides it"
            )
