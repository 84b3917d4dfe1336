"""KV connectors that are served, and the refusal of those that would read or write cache blocks wrongly here.

A connector gets each layer's cache as rows, one for each of the scheduler's blocks. The order of heads and tokens in a
row is not vLLM's, so a connector that cuts blocks or heads would move wrong numbers in silence. A class says by two
attributes what cannot be seen from outside:

- ``moves_whole_blocks = True``: it reads and writes whole rows, and gives them to the same rank alone of an engine with
  the same model and settings.
- ``loads_between_steps = True``: ``get_num_new_matched_tokens`` answers True for all tokens that it loads.

``MultiConnector`` is served with connectors that are served alone, if all of them load between steps: the others save
the blocks of a step, and do not hear which of these were not loaded.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from model_runner_base.errors import UnsupportedConfigError, refuse
from model_runner_base.vllm_compat.probes.config import setting
from model_runner_base.vllm_compat.probes.multimodal import takes_items
from model_runner_base.vllm_compat.types.kv_connector import (
    HAS_TRANSFER_RESULTS,
    OFFLOADING,
    SEVERAL,
    connector_class,
    connector_configs,
    connector_for_size,
    ends_by_groups_alone,
    reports_events,
    reports_figures,
    shakes_hands,
)
from model_runner_base.vllm_compat.types.recurrent import has_states

HOST_SPEC = {"spec_name": "HostOffloadingSpec", "spec_module_path": "model_runner_base.caches.host_offload"}
"""The base's copies between device and host, as vLLM's offloading connector takes them."""

CUTS = "it cuts blocks by heads or tokens of vLLM's own layout"
OF_NIXL = "it cuts blocks by heads of vLLM's own layout, and calls methods of vLLM's own platforms"
OTHERS = "its copies are made for other devices"
SLOTS = "it reads slots of vLLM's own layout, and answers wrong tokens on another"
OF_VLLM = {
    "DecodeBenchConnector": "it fills the cache with made-up numbers",
    "ExampleConnector": SLOTS,
    "ExampleHiddenStatesConnector": "it reads hidden states from a cache that is not made here",
    "FlexKVConnectorV1": "it was not tried on this library's caches: FlexKV is built from its source",
    "HF3FSKVConnector": OTHERS,
    "HiSparseConnector": "caches of sparse attention are not kept on the host",
    "LMCacheConnectorV1": f"{CUTS}, and stores nothing on devices that LMCache does not support",
    "LMCacheMPConnector": CUTS,
    "MoRIIOConnector": "its copies are made by MORI, for other devices",
    "MooncakeConnector": CUTS,
    "MooncakeStoreConnector": CUTS,
    "NixlConnector": OF_NIXL,
    "NixlPullConnector": OF_NIXL,
    "NixlPushConnector": OF_NIXL,
    "P2pNcclConnector": "it sends by NCCL",
    "SharedStorageConnector": SLOTS,
    "SimpleCPUOffloadConnector": f"{OTHERS}: leave out VLLM_USE_SIMPLE_KV_OFFLOAD",
    "UMBPStoreConnector": "its copies are made by MORI, for other devices",
}
"""vLLM's connectors that are refused, by name, with the reason."""


def offload_by_the_base(vllm_config: Any) -> None:
    """Has vLLM's offloading connector copy blocks as the base does, unless the user named another spec.

    vLLM sets ``kv_transfer_config`` for ``kv_offloading_size`` later, and keeps what is there.
    """
    from vllm.config import KVTransferConfig

    transfer, offloads = vllm_config.kv_transfer_config, vllm_config.cache_config.kv_offloading_size is not None
    if transfer is None:
        if not offloads:
            return
        transfer = vllm_config.kv_transfer_config = KVTransferConfig()
    extra, extras = transfer.kv_connector_extra_config, []
    if offloads or transfer.kv_connector == OFFLOADING:
        extras = [extra]
    elif transfer.kv_connector == SEVERAL:
        listed = [options for options in extra.get("connectors") or () if options.get("kv_connector") == OFFLOADING]
        extras = [options.setdefault("kv_connector_extra_config", {}) for options in listed]
    for extra in extras:
        if "spec_name" not in extra:
            extra |= HOST_SPEC


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
    name = connector_for_size(cache) if cache.kv_offloading_size else transfer.kv_connector
    if name is None:
        return
    refusals = {
        f"kv_offloading_size takes the place of the KV connector {transfer.kv_connector}: leave it out, and list"
        f" {OFFLOADING} and your connector in MultiConnector if you want the two": (
            transfer.kv_connector not in (None, name)
        ),
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
    if name != SEVERAL:
        _check_one(vllm_config, transfer, name)
        return
    listed, policy = transfer.kv_connector_extra_config.get("connectors") or (), transfer.kv_load_failure_policy
    refusals = {
        "kv_load_failure_policy is one for all connectors of MultiConnector: give it beside kv_connector": any(
            options.get("kv_load_failure_policy", policy) != policy for options in listed
        ),
        "engine_id is one for all connectors of MultiConnector: give it beside kv_connector": any(
            "engine_id" in options for options in listed
        ),
    }
    refuse(refusals)
    configs = connector_configs(transfer)
    names = [config.kv_connector for config in configs]
    refusals = {
        "MultiConnector lists no connector: list some in kv_connector_extra_config, as connectors": (
            not all(names) or not names
        ),
        "MultiConnector inside of MultiConnector is not supported: list all connectors in one": SEVERAL in names,
        f"{OFFLOADING} is listed more than once: list it once, with all the memory": names.count(OFFLOADING) > 1,
    }
    refuse(refusals)
    for config in configs:
        _check_one(vllm_config, config, config.kv_connector, is_listed=True)
    shaking = [config.kv_connector for config in configs if shakes_hands(config)]
    refusals = {
        f"MultiConnector hands the metadata of {shaking[:1]} to all of its connectors: use it alone, or leave out "
        "get_handshake_metadata": bool(shaking) and len(configs) > 1,
    }
    refuse(refusals)


def _check_one(vllm_config: VllmConfig, transfer: Any, name: str, is_listed: bool = False) -> None:
    """Checks a connector of this name and config; ``is_listed``: whether it is one of several."""
    # A class of the user's with a name of vLLM's is refused, too, since some releases take vLLM's then.
    reason = OF_VLLM.get(name)
    refusals = {
        f"the KV connector {name} is not supported: {reason}. Use {OFFLOADING} (kv_offloading_size), or a connector of"
        " your own that moves whole blocks": reason,
    }
    refuse(refusals)
    if name == OFFLOADING:
        _check_offloading(vllm_config, transfer.kv_connector_extra_config)
    else:
        _check_class(vllm_config, connector_class(transfer), is_listed)


def _check_offloading(vllm_config: VllmConfig, extra: Mapping[str, Any]) -> None:
    model = vllm_config.model_config
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


def _check_class(vllm_config: VllmConfig, cls: type, is_listed: bool) -> None:
    """Checks what the class of a connector of another's says about itself."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy  # type: ignore[union-attr]
    loads_between_steps = getattr(cls, "loads_between_steps", False)
    refusals = {
        f"the KV connector {cls.__qualname__} does not say that it moves whole blocks: set moves_whole_blocks = True in"
        " its class if it cuts neither blocks nor heads, or leave out kv_transfer_config": not getattr(
            cls, "moves_whole_blocks", False
        ),
        f"{cls.__qualname__} may load inside of a step, and the other connectors of MultiConnector would save what a"
        " failed load leaves: use it alone, or set loads_between_steps = True in its class if it never does": (
            is_listed and not loads_between_steps
        ),
        f"{cls.__qualname__} reports figures, which vLLM cannot read from a connector of your own in MultiConnector:"
        " use it alone, or leave out get_kv_connector_stats": is_listed and reports_figures(cls),
        f"{cls.__qualname__} reports events, which MultiConnector does not hand on: use it alone, or leave out"
        " get_kv_connector_kv_cache_events": is_listed and reports_events(cls),
        f"MultiConnector ends requests by request_finished, which {cls.__qualname__} does not have: add it, or use the"
        " class alone": is_listed and ends_by_groups_alone(cls),
        f"{cls.__qualname__} may load inside of a step, and with asynchronous scheduling vLLM cannot compute again what"
        ' fails there: set kv_load_failure_policy="fail" or async_scheduling=False, or loads_between_steps = True in'
        " its class if it never does": (
            policy == "recompute" and vllm_config.scheduler_config.async_scheduling and not loads_between_steps
        ),
    }
    refuse(refusals)
