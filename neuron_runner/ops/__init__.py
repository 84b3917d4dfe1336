"""vLLM's layers as Neuron computes them, put in place of vLLM's own by its registry of out-of-tree custom ops.

An override is a subclass whose ``forward_oot`` runs: on the device by the SDK's fused operator where there is one,
otherwise by ours. A layer class that derives from one of these (``Llama3RotaryEmbedding``) is another name to the
registry and keeps its own forward. Experts are not here: ``model_runner_base/models/layers/fused_moe.py`` serves every
device.
"""

from typing import Any

import torch
from vllm.model_executor.custom_op import op_registry_oot

_host_ops: torch.library.Library | None = None
"""Registration of the host's implementations, which exist as long as this object."""


def register() -> None:
    """Replaces vLLM's layers in this process; a second call changes nothing.

    Called by the runner, when vLLM has settled on this platform: a process of another platform never gets here.
    """
    from neuron_runner.ops.activation import NeuronGeluAndMul, NeuronSiluAndMul
    from neuron_runner.ops.logits import NeuronLogitsProcessor
    from neuron_runner.ops.norms import NeuronRMSNorm
    from neuron_runner.ops.rotary import NeuronRotaryEmbedding
    from neuron_runner.ops.towers import NeuronConv2d, NeuronConv3d, NeuronTowerAttention

    override: Any
    for override in (
        NeuronConv2d,
        NeuronConv3d,
        NeuronGeluAndMul,
        NeuronLogitsProcessor,
        NeuronRMSNorm,
        NeuronRotaryEmbedding,
        NeuronSiluAndMul,
        NeuronTowerAttention,
    ):
        (replaced,) = override.__bases__
        if op_registry_oot.get(replaced.__name__) is not override:
            replaced.register_oot(override)
    _run_towers_on_the_host()


def _run_towers_on_the_host() -> None:
    """Registers attention of towers for the host too, where some towers run.

    vLLM registers it for the platform's own dispatch key only.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.ops.vit_attn_wrappers import torch_sdpa_wrapper

    global _host_ops
    if _host_ops is None and current_platform.dispatch_key != "CPU":
        _host_ops = torch.library.Library("vllm", "FRAGMENT")
        _host_ops.impl("torch_sdpa_wrapper", torch_sdpa_wrapper, "CPU")
