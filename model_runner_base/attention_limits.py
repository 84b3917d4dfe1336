"""Limits of attention by other rows than keys and values of equal heads: what is refused before the engine is up."""

from vllm.config import VllmConfig

from model_runner_base.errors import refuse
from model_runner_base.vllm_compat.probes.unequal_heads import has_unequal_heads
from model_runner_base.vllm_compat.types.speculation import HOST_METHODS

WITH_LATENTS = (*HOST_METHODS, "mtp")
"""Speculative methods that are supported with latent attention."""


def check_attention(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for what a model's kind of attention is not served with."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    if model.use_mla:
        _check_latent(vllm_config)
    if has_unequal_heads(model.architecture, model.hf_text_config):
        refusals = {
            f"drafts by mtp are not supported with {model.architecture} yet: use one of {', '.join(HOST_METHODS)}, or "
            "leave out speculative_config": drafts and drafts.method == "mtp",
        }
        refuse(refusals)


def _check_latent(vllm_config: VllmConfig) -> None:
    """Refuses what latent attention (MLA) does not have yet."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    top_k = getattr(model.hf_text_config, "index_topk", None)
    refusals = {
        f"sparse attention (DSA) is not supported yet: {model.architecture} has an indexer, which leaves a token "
        f"{top_k} keys (index_topk), so beyond {top_k} tokens dense attention would differ: use a model of dense "
        "latent attention": top_k is not None,
        f"{model.architecture} is not supported yet, since some of its experts return their input (zero experts): use "
        "a model of other experts": model.architecture.startswith("LongcatFlash"),
        "adapters are not supported with latent attention (MLA) yet: leave out enable_lora, or set"
        " VLLM_MLA_DISABLE=1": vllm_config.lora_config,
        f"drafts by {drafts and drafts.method} are not supported with latent attention (MLA) yet: use one of "
        f"{', '.join(WITH_LATENTS)}, or leave out speculative_config": drafts and drafts.method not in WITH_LATENTS,
    }
    refuse(refusals)
