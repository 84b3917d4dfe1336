"""Stand-ins for vLLM's CUDA extension where it is missing: just enough for a plain Llama.

A vLLM built with VLLM_TARGET_DEVICE=empty has no ``vllm._C``, without which its CUDA platform cannot even be imported.
``stand_in`` puts an empty module there and defines the operators that are named or called on the way of a plain Llama
with native operators and Triton attention. No kernel is replaced: norms, rotations and activations run as vLLM's own
native torch code (``custom_ops=["none"]``), the cache is written and read by vLLM's own Triton kernels.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

import torch

ENGINE_OPTIONS = {"attention_backend": "TRITON_ATTN"}
COMPILATION = {
    "custom_ops": ["none"],
    "pass_config": {
        "fuse_norm_quant": False,
        "fuse_act_quant": False,
        "fuse_attn_quant": False,
        "fuse_allreduce_rms": False,
        "enable_sp": False,
        "fuse_gemm_comms": False,
    },
}
"""Engine options and compilation_config without which vLLM calls operators that are missing."""

NAMED = """
    silu_and_mul silu_and_mul_quant rms_norm fused_add_rms_norm rotary_embedding rms_norm_static_fp8_quant
    fused_add_rms_norm_static_fp8_quant rms_norm_dynamic_per_token_quant rms_norm_per_block_quant fused_qk_norm_rope
    static_scaled_fp8_quant dynamic_scaled_fp8_quant dynamic_per_token_scaled_fp8_quant per_token_group_fp8_quant
    cutlass_scaled_mm
""".split()
"""Operators that layers and fusion passes look up without calling them. A call is torch's "could not run"."""

ASKED = """
    cutlass_scaled_mm_supports_fp8 cutlass_scaled_mm_supports_block_fp8 cutlass_sparse_scaled_mm_supported
    cutlass_group_gemm_supported cutlass_scaled_mm_supports_fp4
""".split()
"""Questions about what the extension can do for a compute capability. The answer is always no."""

_libraries: list[torch.library.Library] = []


def _missing_flash_attention(*_: object, **__: object) -> None:
    raise RuntimeError("this vLLM was built without FlashAttention: choose attention_backend TRITON_ATTN")


def has_kernels() -> bool:
    return "vllm._C" not in sys.modules and find_spec("vllm._C") is not None


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory that does not keep it alive: vLLM holds the outputs of captured graphs so."""
    size = int(tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size())
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, size)
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, tensor.size(), tensor.stride())  # type: ignore[call-overload]


class _Grammars(ModuleType):
    """Stand-in for xgrammar, whose wheel is larger than all others together; vLLM's engine only names its classes."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in() -> bool:
    """Defines what is missing, for the rest of the process; before anything asks vLLM for its platform.

    Returns:
        Whether anything was missing.
    """
    if has_kernels() or _libraries:
        return bool(_libraries)
    sys.modules["vllm._C"] = ModuleType("vllm._C")
    # Every attention layer's package imports these two names on CUDA. A module without submodules tells vLLM's own
    # question for a FlashAttention version that there is none.
    flash_attention = ModuleType("vllm.vllm_flash_attn")
    flash_attention.flash_attn_varlen_func = _missing_flash_attention  # type: ignore[attr-defined]
    flash_attention.get_scheduler_metadata = _missing_flash_attention  # type: ignore[attr-defined]
    sys.modules["vllm.vllm_flash_attn"] = flash_attention
    if find_spec("xgrammar") is None:
        sys.modules["xgrammar"] = _Grammars("xgrammar")
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    for name in NAMED:
        library.define(f"{name}(Tensor unused) -> Tensor")
    for name in ASKED:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    library.define("weak_ref_tensor(Tensor tensor) -> Tensor")
    library.impl("weak_ref_tensor", weak_ref_tensor, "CompositeExplicitAutograd")
    return True


def register_model() -> None:
    """Registers Llama under its name: vLLM would inspect it in a process of its own, which has no stand-ins."""
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
