"""The lane that the tests run in, told by what is installed. To be imported before anything of vLLM."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
HAS_OPENXLA = find_spec("torch_xla") is not None
WITH_PLAIN_PLATFORM = {
    "VLLM_NEURON_RUNNER": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "plugin"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
}
"""Environment of a process in which vLLM finds the example device's platform installed, and no other."""
if not HAS_OPENXLA:
    # A lane without torch_xla: the example device is the one of this machine, in processes that tests start, too.
    os.environ |= WITH_PLAIN_PLATFORM
    sys.path[:0] = WITH_PLAIN_PLATFORM["PYTHONPATH"].split(os.pathsep)[:2]

NEWEST = [
    "kit/test_conformance.py",
    "kit/test_device_faults.py",
    "kit/test_mutations.py",
    "kit/test_plain_device.py",
    "kit/test_right_devices.py",
    "kit/test_upstream.py",
    "base/test_audio.py",
    "base/test_config_fields.py",
    "base/test_engine_contracts.py",
    "base/test_engine_ends.py",
    "base/test_expert_ranks.py",
    "base/test_slot_processors.py",
    "base/test_hostile_engine.py",
    "base/test_gemma4.py",
    "base/test_hunyuan.py",
    "base/test_image_families.py",
    "base/test_image_ranks.py",
    "base/test_kimi_linear.py",
    "base/test_kv_connectors.py",
    "base/test_later_architectures.py",
    "base/test_latent_attention.py",
    "base/test_limits.py",
    "base/test_logprob_token_ids.py",
    "base/test_lora.py",
    "base/test_lora_refusals.py",
    "base/test_mistral_files.py",
    "base/test_mistral_large.py",
    "base/test_no_reference.py",
    "base/test_orphans.py",
    "base/test_padding.py",
    "base/test_pooling.py",
    "base/test_pooling_images.py",
    "base/test_pooling_lora.py",
    "base/test_pooling_plugins.py",
    "base/test_prompt_embeds.py",
    "base/test_dequantise.py",
    "base/test_gguf.py",
    "base/test_half_precision.py",
    "base/test_quantised_models.py",
    "base/test_recurrent_adapters.py",
    "base/test_recurrent_models.py",
    "base/test_recurrent_ranks.py",
    "base/test_recurrent_speculation.py",
    "base/test_refused_embeddings.py",
    "base/test_misfits.py",
    "base/test_reload.py",
    "base/test_replaced_experts.py",
    "base/test_reload_images.py",
    "base/test_replicas.py",
    "base/test_request_errors.py",
    "base/test_scales_by_family.py",
    "base/test_request_ranges.py",
    "base/test_profile.py",
    "base/test_right_drafts_beside_windows.py",
    "base/test_preempted_steps.py",
    "base/test_prefill_and_decode.py",
    "base/test_scheduling.py",
    "base/test_session_turns.py",
    "base/test_sleeping.py",
    "base/test_sparse_attention.py",
    "base/test_small_caches.py",
    "base/test_stages.py",
    "base/test_state_prefixes.py",
    "base/test_streaming_input.py",
    "base/test_text_alone.py",
    "base/test_sweep.py",
    "base/test_thinking_budget.py",
    "base/test_trainer_weights.py",
    "base/test_transcription.py",
    "base/test_unequal_heads.py",
    "base/test_untried_families.py",
    "base/test_vllm_types.py",
    "base/test_weight_stream.py",
    "base/test_whole_images.py",
    "base/test_written_references.py",
    "gpu/test_cuda_graphs.py",
    "gpu/test_gpu_device_ops.py",
    "gpu/test_gpu_hooks.py",
    "gpu/test_gpu_lora.py",
    "gpu/test_gpu_memory.py",
    "gpu/test_gpu_metadata.py",
    "gpu/test_gpu_policy.py",
    "gpu/test_gpu_recurrent.py",
    "gpu/test_gpu_runner.py",
    "neuron/test_dynamo.py",
    "neuron/test_pieces.py",
    "project/test_foreign_platform.py",
    "project/test_hostile_server.py",
    "project/test_plugins.py",
    "project/test_public_api.py",
    "project/test_pooling_server.py",
    "project/test_real_size.py",
    "project/test_server.py",
    "project/test_sleep.py",
    "project/test_structure.py",
    "project/test_transcription_server.py",
    "project/test_vllm_names.py",
    "project/test_wheel.py",
]
"""Tests that run without torch_xla; those marked ``openxla`` or ``once`` are left out there."""

IN_PART = """
    audio gemma4 gguf hunyuan image_families kimi_linear latent_attention later_architectures lora
    mistral_files mistral_large pooling pooling_images pooling_lora quantised_models recurrent_adapters
    recurrent_models recurrent_speculation replaced_experts right_drafts_beside_windows small_caches
    sparse_attention stages state_prefixes sweep text_alone transcription unequal_heads untried_families
    written_references
""".split()
"""Files of tests/base that compare models with HF transformers, of whose cases the lane with torch_xla runs a quarter
unless ``--full`` is given. The newest lane, whose engines start sooner, runs all. The kit holds each release to the
promises that these models rest on."""
ONLY_WITH_OPENXLA = ("bamba", "pixtral")
"""Models of these files that the newest lane does not have, so that all of their cases run."""
