"""KV connectors that are served, and the refusal of those that would read or write cache blocks wrongly here.

A connector gets each layer's cache as rows, one for each of the scheduler's blocks. The order of heads and tokens in a
row is not vLLM's, so a connector that cuts blocks or heads would move wrong numbers in silence. A class says by two
attributes what cannot be seen from outside:

- ``moves_whole_blocks = True``: it reads and writes whole rows, and gives them to the same rank alone of an engine with
  the same model and settings.
- ``loads_between_steps = True``: ``get_num_new_matched_tokens`` answers True for all tokens that it loads.
"""

from typing import Any

from vllm.config import VllmConfig

from model_runner_base.errors import UnsupportedConfigError, refuse
from model_runner_base.vllm_compat.probes.config import setting
from model_runner_base.vllm_compat.probes.multimodal import takes_items
from model_runner_base.vllm_compat.types.kv_connector import HAS_TRANSFER_RESULTS, connector_class
from model_runner_base.vllm_compat.types.recurrent import has_states

OFFLOADING = "OffloadingConnector"
"""vLLM's connector that keeps blocks on the host."""
HOST_SPEC = {"spec_name": "HostOffloadingSpec", "spec_module_path": "model_runner_base.caches.host_offload"}
"""The base's copies between device and host, as vLLM's offloading connector takes them."""

CUTS = "it cuts blocks by heads or tokens of vLLM's own layout"
UNTRIED = "it was not tried on this library's caches"
OF_VLLM = {
    "DecodeBenchConnector": "it fills the cache with made-up numbers",
    "ExampleConnector": "it reads slots of vLLM's own layout, and answers wrong tokens on another",
    "ExampleHiddenStatesConnector": "it reads hidden states from a cache that is not made here",
    "FlexKVConnectorV1": UNTRIED,
    "HF3FSKVConnector": CUTS,
    "HiSparseConnector": "caches of sparse attention are not kept on the host",
    "LMCacheConnectorV1": CUTS,
    "LMCacheMPConnector": CUTS,
    "MoRIIOConnector": CUTS,
    "MooncakeConnector": CUTS,
    "MooncakeStoreConnector": CUTS,
    "MultiConnector": "its connectors are not looked at",
    "NixlConnector": CUTS,
    "NixlPullConnector": CUTS,
    "NixlPushConnector": CUTS,
    "P2pNcclConnector": CUTS,
    "SharedStorageConnector": "it reads slots of vLLM's own layout, and answers wrong tokens on another",
    "SimpleCPUOffloadConnector": "its copies are those of another device: leave out VLLM_USE_SIMPLE_KV_OFFLOAD",
}
"""vLLM's connectors that are refused, by name, with the reason."""


def offload_by_the_base(vllm_config: Any) -> None:
    """Has vLLM's offloading connector copy blocks as the base does, unless the user named another spec.

    vLLM sets ``kv_transfer_config`` for ``kv_offloading_size`` later, and keeps what is there.
    """
    from vllm.config import KVTransferConfig

    transfer = vllm_config.kv_transfer_config
    if vllm_config.cache_config.kv_offloading_size is None and getattr(transfer, "kv_connector", "") != OFFLOADING:
        return
    if transfer is None:
        transfer = vllm_config.kv_transfer_config = KVTransferConfig()
    if "spec_name" not in transfer.kv_connector_extra_config:
        transfer.kv_connector_extra_config |= HOST_SPEC


def check_connector(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedConfigError for a KV connector, or a model with one, that is not served."""
    transfer, cache, model = vllm_config.kv_transfer_config, vllm_config.cache_config, vllm_config.model_config
    if cache.kv_offloading_size is not None and cache.kv_offloading_size <= 0:
        raise UnsupportedConfigError(
            f"kv_offloading_size={cache.kv_offloading_size} keeps no block on the host: give a size in GiB above 0, or "
            "leave out kv_offloading_size"
        )
    if transfer is None or model is None:
        return
    # vLLM sets the name for kv_offloading_size after the platform has checked the config.
    name = transfer.kv_connector or (OFFLOADING if cache.kv_offloading_size else None)
    if name is None:
        return
    # So is a class of the user's with a name of vLLM's, since some releases take vLLM's then.
    reason = OF_VLLM.get(name)
    refusals = {
        f"the KV connector {name} is not supported: {reason}. Use {OFFLOADING} (kv_offloading_size), or a connector of"
        " your own that moves whole blocks": reason,
        f"KV connectors are not supported with the recurrent layers of {model.architecture} yet, whose states lie in no"
        " block: leave out kv_transfer_config and kv_offloading_size": has_states(vllm_config),
        "KV connectors are not supported with encoder-decoder models: leave out kv_transfer_config and"
        " kv_offloading_size": model.is_encoder_decoder,
        "KV connectors are not supported with pooling models yet: leave out kv_transfer_config and"
        " kv_offloading_size": model.runner_type == "pooling",
        "KV connectors are not supported yet where tokens of an image see each other, since a prefix may end inside of"
        " one: leave out kv_transfer_config and kv_offloading_size": model.is_mm_prefix_lm and takes_items(model),
        "KV connectors are not supported with attention in chunks yet: leave out kv_transfer_config and"
        " kv_offloading_size": getattr(model, "attention_chunk_size", None) is not None,
        "KV connectors are not supported in an engine that sleeps yet: leave out enable_sleep_mode, or"
        " kv_transfer_config and kv_offloading_size": model.enable_sleep_mode,
    }
    refuse(refusals)
    (_check_offloading if name == OFFLOADING else _check_class)(vllm_config)


def _check_offloading(vllm_config: VllmConfig) -> None:
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    assert transfer is not None
    extra = transfer.kv_connector_extra_config
    refusals = {
        f"the offloading spec {extra.get('spec_name')} is not supported: leave spec_name out of"
        " kv_connector_extra_config": extra.get("spec_module_path") != HOST_SPEC["spec_module_path"],
        "canonical_layout is not supported, since it cuts blocks by heads: leave it out of kv_connector_extra_config": (
            extra.get("canonical_layout")
        ),
        "eviction_policy=arc is not supported with this vLLM, whose manager may end the engine: use lru or vLLM 0.33": (
            extra.get("eviction_policy") == "arc" and not HAS_TRANSFER_RESULTS
        ),
        "latent attention (MLA) is not offloaded by this vLLM, which looks for other layers: leave out"
        " kv_offloading_size, or use vLLM 0.33": setting(model, "use_mla", False) and not HAS_TRANSFER_RESULTS,
    }
    refuse(refusals)


def _check_class(vllm_config: VllmConfig) -> None:
    """Checks what the class of a connector of another's says about itself."""
    transfer: Any = vllm_config.kv_transfer_config
    cls = connector_class(transfer)
    refusals = {
        f"the KV connector {cls.__qualname__} does not say that it moves whole blocks: set moves_whole_blocks = True in"
        " its class if it cuts neither blocks nor heads, or leave out kv_transfer_config": not getattr(
            cls, "moves_whole_blocks", False
        ),
        f"{cls.__qualname__} may load inside of a step, and with asynchronous scheduling vLLM cannot compute again what"
        ' fails there: set kv_load_failure_policy="fail" or async_scheduling=False, or loads_between_steps = True in'
        " its class if it never does": (
            transfer.kv_load_failure_policy == "recompute"
            and vllm_config.scheduler_config.async_scheduling
            and not getattr(cls, "loads_between_steps", False)
        ),
    }
    refuse(refusals)
