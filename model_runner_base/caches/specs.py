"""Specs of the KV caches that a model's layers keep, as vLLM plans them."""

from vllm.config import VllmConfig

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.types.kv_cache import (
    KVCacheSpec,
    attention_layers,
    is_of_attention,
    keeps_window_blocks,
    sees_whole_context,
    shared_caches,
)
from model_runner_base.vllm_compat.types.speculation import read_speculation


def collect_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Collects the KV-cache spec of every layer that keeps a cache, by layer name.

    Raises UnsupportedConfigError for a layer whose cache is not one of attention, or that has a window while drafts are
    verified under an asynchronous scheduler that would free its blocks too early.
    """
    specs: dict[str, KVCacheSpec] = {}
    sharing = shared_caches(vllm_config)
    for name, layer in attention_layers(vllm_config).items():
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None or name in sharing:
            continue
        if not is_of_attention(spec):
            raise UnsupportedConfigError(
                f"layer {name} keeps a {type(spec).__name__}; such layers are not supported yet"
            )
        forgets = read_speculation(vllm_config).unread and not sees_whole_context(spec)
        if forgets and not keeps_window_blocks(vllm_config):
            raise UnsupportedConfigError(
                f"layer {name} forgets keys before its window, and this scheduler would free their blocks before "
                "drafts are verified: leave out scheduler_cls, or set async_scheduling=False"
            )
        specs[name] = spec
    return specs
