"""Settings that README says are refused, one by one; test_errors.py has some of them as a user meets them."""

from contextlib import nullcontext
from copy import deepcopy
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm import SamplingParams
from vllm.model_executor.layers.linear import QKVParallelLinear

from model_runner_base.admission import decode_context_limits, limits
from model_runner_base.admission.limits import NEWER_PARAMS, check_config, check_request
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.loader import load_checkpoint
from model_runner_base.vllm_compat.probes.config import HAS_SLOT_PROCESSORS
from model_runner_base.vllm_compat.probes.models import CHOOSES_BACKENDS

MODEL = {
    "is_multimodal_model": False,
    "convert_type": "none",
    "architecture": "LlavaForConditionalGeneration",
    "multimodal_config": SimpleNamespace(
        skip_mm_profiling=False,
        is_multimodal_pruning_enabled=lambda: False,
        get_limit_per_prompt=lambda modality: 1,
        enable_mm_embeds=False,
    ),
    "enable_prompt_embeds": False,
    "enable_sleep_mode": False,
    "runner_type": "generate",
    "attn_type": "decoder",
    "is_encoder_decoder": False,
    "is_moe": False,
    "use_mla": False,
    "is_attention_free": False,
    "is_hybrid": False,
    "max_model_len": 128,
    "enable_return_routed_experts": False,
    "hf_text_config": SimpleNamespace(
        layer_types=["full_attention", "sliding_attention"], sliding_window=24, model_type="llama"
    ),
    "hf_config": SimpleNamespace(mm_tokens_per_image=16),
    "is_mm_prefix_lm": False,
    "quantization": None,
}
PARALLEL = {
    "use_ubatching": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "distributed_executor_backend": "mp",
    "nnodes": 1,
    "data_parallel_size": 1,
    "data_parallel_size_local": 2,
    "data_parallel_external_lb": False,
    "data_parallel_hybrid_lb": False,
    "data_parallel_backend": "mp",
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "enable_expert_parallel": False,
    "enable_eplb": False,
    "all2all_backend": "allgather_reducescatter",
}
SERVED = SimpleNamespace(
    model_config=SimpleNamespace(**MODEL),
    parallel_config=SimpleNamespace(**PARALLEL),
    cache_config=SimpleNamespace(
        kv_offloading_size=None, kv_sharing_fast_prefill=False, enable_prefix_caching=True, mamba_cache_dtype="auto"
    ),
    compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
    scheduler_config=SimpleNamespace(
        get_scheduler_cls=lambda: object,
        policy="fcfs",
        long_prefill_token_threshold=0,
        async_scheduling=False,
        scheduler_cls=None,
    ),
    lora_config=None,
    speculative_config=None,
    kv_transfer_config=None,
    ec_transfer_config=None,
)


def draft(**options: Any) -> SimpleNamespace:
    """A speculative config of two drafts."""
    config = {
        "method": "eagle",
        "num_speculative_tokens": 2,
        "parallel_drafting": False,
        "speculative_token_tree": None,
        "draft_parallel_config": SimpleNamespace(tensor_parallel_size=2),
        "target_parallel_config": SimpleNamespace(tensor_parallel_size=2),
    }
    return SimpleNamespace(**(config | options))


HEAD = {
    "prompt_lookup_min": 0,
    "prompt_lookup_max": 0,
    "draft_model_config": SimpleNamespace(max_model_len=64),
}


def check_refused(config: Any, setting: str, value: Any, message: str) -> None:
    """Checks that ``config`` is served, and refused with this value."""
    check_config(config)
    *path, name = setting.split(".")
    setattr(reduce(getattr, path, config), name, value)
    with pytest.raises(UnsupportedConfigError, match=message):
        check_config(config)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "speculative_config",
            draft(method="mlp_speculator"),
            "speculative method mlp_speculator is not supported yet: use one of ngram",
        ),
        ("speculative_config", draft(parallel_drafting=True), "with method eagle: use draft_model or eagle3"),
        (
            "speculative_config",
            draft(draft_parallel_config=SimpleNamespace(tensor_parallel_size=1)),
            "draft_tensor_parallel_size=1 is not supported",
        ),
        ("speculative_config", draft(speculative_token_tree="[(0,), (1,)]"), "leave speculative_token_tree out"),
        (
            "speculative_config",
            draft(
                method="eagle3",
                parallel_drafting=True,
                draft_model_config=SimpleNamespace(hf_config=SimpleNamespace()),
            ),
            "pard_token",
        ),
        ("ec_transfer_config", object(), "encoder-cache transfer is not supported yet: leave out ec_transfer_config"),
        ("cache_config.kv_offloading_size", 0.0, "give a size in GiB above 0, or leave out kv_offloading_size"),
        ("cache_config.kv_sharing_fast_prefill", True, "leave out kv_sharing_fast_prefill"),
        ("parallel_config.use_ubatching", True, "leave out enable_dbo and ubatch_size"),
        ("parallel_config.prefill_context_parallel_size", 2, "use prefill_context_parallel_size=1"),
        ("parallel_config.enable_eplb", True, "leave out enable_eplb and eplb_config"),
        ("compilation_config.pass_config.enable_sp", True, "leave enable_sp and fuse_gemm_comms out of pass_config"),
        ("model_config.is_attention_free", True, "a model of attention layers"),
        ("model_config.is_hybrid", True, "a model of attention layers"),
        ("model_config.enable_return_routed_experts", True, "leave out enable_return_routed_experts"),
        ("aux_output_config", SimpleNamespace(enable_return_routed_experts=True), "enable_return_routed_experts"),
        ("watermark_config", object(), "leave out watermark_config"),
        ("diffusion_config", object(), "leave out diffusion_config"),
        ("engram_config", object(), "leave out engram_config"),
        ("attention_config", SimpleNamespace(hisparse_config=object()), "leave out hisparse_config"),
        ("cache_config.prefix_match_unit", 16, "leave out prefix_match_unit"),
        ("model_config.return_sampling_mask", True, "leave out return_sampling_mask"),
        ("model_config.enable_trace_replay", True, "leave out enable_trace_replay"),
        ("model_config.use_fp64_gumbel", True, "leave out use_fp64_gumbel"),
        ("parallel_config.enable_batch_sharded_sampling", True, "leave out enable_batch_sharded_sampling"),
        ("parallel_config.enable_elastic_ep", True, "leave out enable_elastic_ep and enable_fault_tolerance"),
        ("parallel_config.enable_fault_tolerance", True, "leave out enable_elastic_ep and enable_fault_tolerance"),
        (
            "speculative_config",
            draft(num_speculative_tokens_per_batch_size=[(1, 4, 2)]),
            "leave out num_speculative_tokens_per_batch_size",
        ),
        ("speculative_config", draft(use_heterogeneous_vocab=True), "leave out use_heterogeneous_vocab"),
        ("speculative_config", draft(draft_lm_head_quantization="fp8"), "leave out draft_lm_head_quantization"),
        ("speculative_config", draft(rejection_sample_method="block"), "rejection_sample_method=block is not"),
    ],
)
def test_what_would_come_out_wrong_is_refused(setting: str, value: Any, message: str) -> None:
    config: Any = deepcopy(SERVED)
    check_refused(config, setting, value, message)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "model_config.architecture",
            "PaliGemmaForConditionalGeneration",
            "PaliGemma.*model, or one of LlavaForCondit",
        ),
        (
            "model_config.architecture",
            "Molmo2ForConditionalGeneration",
            "Molmo2.* its text alone .limit_mm_per_prompt=",
        ),
        ("lora_config", SimpleNamespace(enable_tower_connector_lora=True), "leave out enable_tower_connector_lora"),
        ("model_config.enable_prompt_embeds", True, "leave out enable_prompt_embeds"),
        ("scheduler_config.policy", "priority", "leave out scheduler_cls, or scheduling_policy"),
        ("compilation_config.compile_mm_encoder", True, "leave out compile_mm_encoder"),
        ("speculative_config", draft(**HEAD, method="mtp"), "drafts by mtp are not .* eagle"),
        ("model_config.multimodal_config.is_multimodal_pruning_enabled", lambda: True, "video_pruning_rate"),
        # Models in which tokens of an image see each other.
        ("scheduler_config.long_prefill_token_threshold", 16, "leave out long_prefill_token_threshold"),
        ("model_config.hf_text_config.sliding_window", 15, "set enable_prefix_caching=False"),
    ],
)
def test_what_models_that_see_are_not_served_with_yet(setting: str, value: Any, message: str) -> None:
    config: Any = deepcopy(SERVED)
    config.model_config.is_multimodal_model = config.model_config.is_mm_prefix_lm = True
    check_refused(config, setting, value, message)


def test_towers_that_were_not_tried_over_ranks() -> None:
    config: Any = deepcopy(SERVED)
    config.model_config.is_multimodal_model = True
    config.model_config.architecture = "Qwen2AudioForConditionalGeneration"
    message = "Qwen2Audio.* was not tried over ranks .* use tensor_parallel_size=1, its text alone .*, or one of Llava"
    check_refused(config, "parallel_config.tensor_parallel_size", 2, message)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("parallel_config.distributed_executor_backend", "ray", "not started by ray on this release: set .* to mp"),
        ("parallel_config.nnodes", 2, "one host alone: use nnodes=1"),
        ("speculative_config", draft(), "leave out speculative_config"),
        ("weight_transfer_config", SimpleNamespace(backend="gloo"), "leave out weight_transfer_config"),
        ("load_config", SimpleNamespace(load_format="sharded_state"), "leave out load_format=sharded_state"),
        ("model_config.runner_type", "pooling", "LlavaFor.* pools in layers of its own, which was not tried with pipe"),
        ("parallel_config.enable_expert_parallel", True, "leave out enable_expert_parallel"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder models are not .* use pipeline_parallel_size=1"),
        ("model_config.enable_prompt_embeds", True, "leave out enable_prompt_embeds"),
        ("model_config.enable_sleep_mode", True, "leave out enable_sleep_mode"),
    ],
)
def test_what_pipeline_stages_are_not_served_with_yet(
    setting: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "current_platform", SimpleNamespace(serves_stages=True))
    monkeypatch.setattr(limits, "counts_running_adapters", lambda: True)
    monkeypatch.setattr(limits, "RAY_CALLS_WORKERS", False)
    config: Any = deepcopy(SERVED)
    config.parallel_config.pipeline_parallel_size = 2
    check_refused(config, setting, value, message)


@pytest.mark.parametrize(
    ("model", "counts", "message"),
    [
        ({}, False, "serve neither adapters, pooling, .*: use vLLM 0.33, or pipeline_parallel_size=1"),
        ({"is_hybrid": True}, True, "adapters were not tried with recurrent layers and pipeline stages: leave out"),
        (
            {"is_multimodal_model": True, "architecture": "Qwen3VLForConditionalGeneration"},
            True,
            "adapters were not tried with images and pipeline stages: leave out",
        ),
        (
            {"runner_type": "pooling", "convert_type": "embed"},
            True,
            "adapters of pooling models are not supported with pipeline stages yet: leave out enable_lora",
        ),
        (
            {"runner_type": "pooling", "convert_type": "embed", "attn_type": "encoder_only"},
            True,
            "attention in both directions, .* is not cut into pipeline stages yet: use pipeline_parallel_size=1",
        ),
        (
            {"is_multimodal_model": True, "architecture": "InternVLForConditionalGeneration"},
            True,
            "items of InternVL.* were not tried with pipeline stages: use .*, or one of Qwen3VLFor",
        ),
    ],
)
def test_what_pipeline_stages_are_not_served_with_together(
    model: dict[str, Any], counts: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "current_platform", SimpleNamespace(serves_stages=True))
    monkeypatch.setattr(limits, "counts_running_adapters", lambda: counts)
    config: Any = deepcopy(SERVED)
    config.parallel_config.pipeline_parallel_size, config.lora_config = 2, object()
    vars(config.model_config).update(model)
    with pytest.raises(UnsupportedConfigError, match=message):
        check_config(config)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("parallel_config.data_parallel_size_local", 1, "a replica on another host: start a server on each host, with"),
        ("parallel_config.data_parallel_backend", "ray", "leave out .* data_parallel_backend"),
        ("cache_config.kv_offloading_size", 0.1, "KV connectors are not supported with replicas .* kv_offloading_size"),
        ("parallel_config.pipeline_parallel_size", 2, "pipelines are not replicated yet"),
    ],
)
def test_what_replicas_are_not_served_with_yet(
    setting: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "current_platform", SimpleNamespace(serves_stages=True, serves_replicas=True))
    config: Any = deepcopy(SERVED)
    config.parallel_config.data_parallel_size = 2
    check_refused(config, setting, value, message)


def test_experts_are_shared_under_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(serves_replicas=True, serves_expert_replicas=True)
    monkeypatch.setattr(limits, "current_platform", platform)
    config: Any = deepcopy(SERVED)
    config.parallel_config.data_parallel_size, config.model_config.is_moe = 2, True
    for name, value in (("data_parallel_external_lb", True), ("data_parallel_size_local", 1)):
        balanced = deepcopy(config)
        setattr(balanced.parallel_config, name, value)
        with pytest.raises(UnsupportedConfigError, match="has experts, which replicas share under one server: leave"):
            check_config(balanced)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("parallel_config.pipeline_parallel_size", 2, "pipeline stages .*: use pipeline_parallel_size=1 or decode_"),
        ("parallel_config.data_parallel_size", 2, "replicas .*: use data_parallel_size=1 or decode_"),
        ("speculative_config", draft(), "speculative decoding .*: leave out speculative_config"),
        ("lora_config", object(), "adapters .*: leave out enable_lora"),
        ("kv_transfer_config", object(), "KV connectors .*: leave out kv_transfer_config and kv_offloading_size"),
        ("cache_config.kv_offloading_size", 0.1, "KV connectors .*: leave out kv_transfer_config and kv_offloading_"),
        ("parallel_config.dcp_comm_backend", "a2a", "dcp_comm_backend=a2a is not supported: leave it out"),
        ("parallel_config.dcp_q_replicate", True, "leave out dcp_q_replicate"),
        ("model_config.is_hybrid", True, "recurrent layers are not cut over positions yet"),
        ("model_config.use_mla", True, r"latent attention \(MLA\) is not cut over positions yet"),
        ("model_config.hf_text_config.sliding_window", 24, "layers with a window, .* are not cut over positions yet"),
        ("model_config.hf_text_config.attention_chunk_size", 9, "with attention in chunks, are not cut over positions"),
        ("model_config.runner_type", "pooling", "pooling models are not supported with decode context parallelism"),
        ("model_config.is_multimodal_model", True, "images and other items are not supported with decode context"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder models are not supported with decode context"),
        *(
            [("model_config.architecture", "MiMoV2ForCausalLM", "keys and values of unequal heads are not cut over")]
            if CHOOSES_BACKENDS
            else []
        ),
        ("model_config.get_total_num_kv_heads", lambda: 2, "on 1 ranks, .* no groups of 2: use a decode_context_.* 1$"),
    ],
)
def test_what_parts_of_each_request_are_not_served_with_yet(
    setting: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(serves_decode_context=True)
    monkeypatch.setattr(decode_context_limits, "current_platform", platform)
    config: Any = deepcopy(SERVED)
    config.parallel_config.tensor_parallel_size = config.parallel_config.decode_context_parallel_size = 2
    config.model_config.hf_text_config = SimpleNamespace(sliding_window=None, model_type="llama", v_head_dim=8)
    config.model_config.get_total_num_kv_heads = lambda: 1
    check_refused(config, setting, value, message)
    platform.serves_decode_context = False
    with pytest.raises(UnsupportedConfigError, match="context parallelism does not run on this device yet"):
        check_config(config)


@pytest.mark.parametrize(("size", "copies", "is_served"), [(2, [2, 4], True), (2, [2, 1], False), (1, [1], True)])
def test_ranks_of_a_group_have_one_kv_head(size: int, copies: list[int], is_served: bool) -> None:
    """A layer may have more KV heads than the model's config says."""
    model = nn.Module()
    for index, number in enumerate(copies):
        layer = QKVParallelLinear.__new__(QKVParallelLinear)
        nn.Module.__init__(layer)
        layer.num_kv_head_replicas = number
        model.add_module(str(index), layer)
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=size))
    with nullcontext() if is_served else pytest.raises(UnsupportedConfigError, match=r"on 1 ranks, .* groups of 2"):
        decode_context_limits.check_copies(model, config)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pipeline_parallel_size", "do not run on this device yet: use .* and more tensor_parallel_size"),
        ("data_parallel_size", "do not run on this device yet: use data_parallel_size=1"),
    ],
)
def test_a_device_says_what_it_serves(setting: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "current_platform", SimpleNamespace())
    check_refused(deepcopy(SERVED), f"parallel_config.{setting}", 2, message)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model_config.architecture", "NemotronParseForConditionalGeneration", "NemotronParse.* or one of Whisper"),
        ("cache_config.enable_prefix_caching", True, "leave out enable_prefix_caching"),
        ("lora_config", SimpleNamespace(enable_tower_connector_lora=False), "leave out enable_lora"),
        ("speculative_config", draft(), "leave out speculative_config"),
    ],
)
def test_what_encoder_decoders_are_not_served_with_yet(setting: str, value: Any, message: str) -> None:
    config: Any = deepcopy(SERVED)
    config.model_config.is_encoder_decoder, config.cache_config.enable_prefix_caching = True, False
    config.model_config.architecture = "WhisperForConditionalGeneration"
    check_refused(config, setting, value, message)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "model_config.hf_text_config.index_topk",
            2048,
            r"sparse attention \(DSA\) of LlavaForConditionalGeneration is not supported yet",
        ),
        (
            "model_config.architecture",
            "LongcatFlashNgramForCausalLM",
            "LongcatFlash.* some of its experts return",
        ),
        ("speculative_config", draft(), "drafts by eagle are not .* ngram, suffix, mtp, or leave out"),
    ],
)
def test_what_latent_attention_is_not_served_with_yet(setting: str, value: Any, message: str) -> None:
    config: Any = deepcopy(SERVED)
    config.model_config.use_mla = True
    check_refused(config, setting, value, message)


def test_layers_that_the_transformers_backend_takes_for_full_attention() -> None:
    """Layers that see a part of the keys are refused where vLLM would have them see all."""
    config: Any = deepcopy(SERVED)
    config.model_config.architectures = ["AnyForCausalLM"]
    config.model_config.using_transformers_backend = lambda: True
    message = "layers of type chunked_attention are not supported by vLLM's Transformers .* full_attention and sliding"
    types = ["full_attention", "chunked_attention"]
    check_refused(config, "model_config.hf_text_config.layer_types", types, message)
    config.model_config.using_transformers_backend = lambda: False
    check_config(config)


def test_sharded_adapters_of_latent_attention_are_refused() -> None:
    """Sharding is refused where there is more than one rank."""
    config: Any = deepcopy(SERVED)
    config.model_config.use_mla = True
    config.lora_config = SimpleNamespace(fully_sharded_loras=True, enable_tower_connector_lora=False)
    check_refused(config, "parallel_config.tensor_parallel_size", 2, "fully_sharded_loras are .* leave them out")


def with_indexer(**options: Any) -> Any:
    """A config of DeepSeek V3.2 whose ``index_topk`` is 2,048."""
    config: Any = deepcopy(SERVED)
    own = {"use_mla": True, "architecture": "DeepseekV32ForCausalLM"}
    vars(config.model_config).update(own | options)
    vars(config.model_config.hf_text_config).update(index_topk=2048, num_hidden_layers=4)
    config.cache_config.cache_dtype, config.parallel_config.world_size = "auto", 1
    return config


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model_config.use_mla", False, "leave out VLLM_MLA_DISABLE"),
        ("parallel_config.world_size", 2, "not cut over ranks .* or set max_model_len=2048 or less"),
        ("lora_config", SimpleNamespace(fully_sharded_loras=False), "leave out enable_lora, or set max_model_len=2048"),
        ("cache_config.cache_dtype", "fp8_e4m3", "leave out kv_cache_dtype, or set max_model_len=2048"),
        ("attention_config", SimpleNamespace(indexer_kv_dtype="fp8"), "leave out indexer_kv_dtype"),
        ("kv_transfer_config", SimpleNamespace(kv_connector=None), "kv_transfer_config"),
        ("speculative_config", draft(), "drafts by eagle are not .* ngram, suffix, mtp, or leave out"),
        ("model_config.hf_text_config.indexer_rope_interleave", True, "indexer_rope_interleave, .* has as False"),
        ("model_config.hf_text_config.index_topk_pattern", "SFFF", "first layer|need vLLM 0.33"),
        ("model_config.hf_text_config.indexer_types", ["full", "shared"] * 2, "indexer_types says otherwise"),
    ],
)
def test_what_an_indexer_is_not_served_with_yet(setting: str, value: Any, message: str) -> None:
    """Settings that are refused where an indexer hides keys."""
    check_refused(with_indexer(max_model_len=2049), setting, value, message)


def test_an_indexer_that_hides_no_key_needs_nothing() -> None:
    """Settings of rotary numbers, and of shared choices, are those of an indexer that does not run. The format of 8
    bits that one vLLM puts in place of any other is refused."""
    config = with_indexer(max_model_len=2048)
    config.model_config.hf_text_config.index_topk_freq = 2
    config.model_config.hf_text_config.indexer_rope_interleave = True
    check_refused(
        config, "cache_config.cache_dtype", "fp8_ds_mla", "of any length on this vLLM: leave out kv_cache_dtype$"
    )


@pytest.mark.parametrize(
    ("of_model", "of_draft", "message"),
    [
        ({}, {"index_topk": 1024}, "index_topk of the model is 2048, .* its draft is 1024, .* correct config.json"),
        ({"index_topk": 4096}, {}, "index_topk of the model is 4096, .* its draft is 2048, .* correct config.json"),
        ({}, {"indexer_rope_interleave": True}, "the draft rotates .* has as False, .* correct config.json"),
        ({}, {"max_model_len": 2048}, "leave out max_model_len of speculative_config"),
    ],
)
def test_drafts_whose_indexer_is_not_the_models(
    of_model: dict[str, Any], of_draft: dict[str, Any], message: str
) -> None:
    """A draft by mtp has the fields of config.json, where the model has those of ``hf_overrides``."""
    config = with_indexer(max_model_len=2049)
    drafting = SimpleNamespace(
        architecture="DeepSeekMTPModel", max_model_len=2049, hf_text_config=SimpleNamespace(index_topk=2048)
    )
    config.speculative_config = draft(**HEAD | {"draft_model_config": drafting}, method="mtp")
    check_config(config)
    vars(config.model_config.hf_text_config).update(of_model)
    for name, value in of_draft.items():
        setattr(drafting if name == "max_model_len" else drafting.hf_text_config, name, value)
    with pytest.raises(UnsupportedConfigError, match=message):
        check_config(config)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model_config.architecture", "JinaForRanking", "JinaForRanking .* use one without a pooler of its own"),
        ("model_config.architecture", "GteNewModel", "GteNewModel, whose tokens see all .* or one of BertModel"),
        (
            "model_config.is_multimodal_model",
            True,
            "BertModel pools no images yet: use a model of text, or vectors of Qwen3VL",
        ),
        ("model_config.enable_prompt_embeds", True, "leave out enable_prompt_embeds"),
        ("model_config.pooler_config.enable_chunked_processing", True, "out of pooler_config"),
        ("cache_config.cache_dtype", "fp8", "BertModel keeps no KV cache: leave out kv_cache_dtype"),
        ("cache_config.enable_prefix_caching", True, "leave out enable_prefix_caching"),
        ("scheduler_config.enable_chunked_prefill", True, "leave out enable_chunked_prefill"),
        ("parallel_config.tensor_parallel_size", 2, "BertModel, .* is not cut over ranks yet: use tensor_parallel"),
        ("lora_config", SimpleNamespace(), "see all of their text, are not supported yet: leave out enable_lora"),
    ],
)
def test_what_pooling_models_are_not_served_with_yet(setting: str, value: Any, message: str) -> None:
    config: Any = deepcopy(SERVED)
    model = {
        "runner_type": "pooling",
        "architecture": "BertModel",
        "attn_type": "encoder_only",
        "pooler_config": SimpleNamespace(enable_chunked_processing=None),
        "is_chunked_prefill_supported": False,
        "is_prefix_caching_supported": False,
    }
    vars(config.model_config).update(model)
    vars(config.cache_config).update(enable_prefix_caching=False, cache_dtype="auto")
    config.scheduler_config.enable_chunked_prefill = False
    check_refused(config, setting, value, message)


def test_latent_attention_needs_plain_torch() -> None:
    """A device whose layers keep vLLM's kernels is refused before anything is loaded."""
    config: Any = deepcopy(SERVED)
    config.model_config.use_mla = True
    with pytest.raises(UnsupportedConfigError, match="this device does not use: set VLLM_MLA_DISABLE=1"):
        load_checkpoint(config, use_plain_layers=False)
    config.model_config.hf_text_config.index_topk = 2048
    with pytest.raises(UnsupportedConfigError, match="this device does not use: use another model"):
        load_checkpoint(config, use_plain_layers=False)


@pytest.mark.skipif(not HAS_SLOT_PROCESSORS, reason="this vLLM has one interface")
def test_processors_of_the_first_interface() -> None:
    """Processors are refused with vLLM's second runner before they are loaded, and the message says what to set."""
    config: Any = deepcopy(SERVED)
    config.use_v2_model_runner = True
    name = "model_runner_base.testing.processors:Favour"
    check_refused(config, "model_config.logits_processors", [name], "Favour: .* set VLLM_USE_V2_MODEL_RUNNER=0")


def test_text_alone() -> None:
    """A family that was not tried is served with text alone, unless its text sees the tokens after it."""
    config: Any = deepcopy(SERVED)
    config.model_config.is_multimodal_model = True
    config.model_config.multimodal_config.get_limit_per_prompt = lambda modality: 0
    config.model_config.architecture = "Blip2ForConditionalGeneration"
    check_config(config)
    check_refused(deepcopy(config), "model_config.enable_prompt_embeds", True, "leave out enable_prompt_embeds")
    check_refused(config, "model_config.architecture", "PaliGemmaForConditionalGeneration", "also without an image")


@pytest.mark.parametrize("name", [name for name in NEWER_PARAMS if name in SamplingParams.__struct_fields__])
def test_newer_sampling_parameters_are_refused(name: str) -> None:
    params = SamplingParams()
    check_request(params, [5], 10)
    setattr(params, name, [1])
    with pytest.raises(ValueError, match=f"{name} is not supported yet: leave it out"):
        check_request(params, [5], 10)
