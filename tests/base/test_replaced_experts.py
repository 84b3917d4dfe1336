"""Experts that vLLM's Transformers backend replaces keep the activation that transformers has, or are refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lane import HAS_OPENXLA
from torch import nn
from torch.nn import functional as F

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.layers.replaced_experts import activation_of, check_activation, follow_activation
from model_runner_base.testing.architectures import hf

LATER = pytest.mark.skipif(HAS_OPENXLA, reason="this release of transformers has no such experts")


class Expert(nn.Module):
    """An expert as checkpoints with code of their own have it, one of a list."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], limit: float | None = None) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)
        self.activation, self.limit = activation, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.w1(x) if self.limit is None else self.w1(x).clamp(max=self.limit)
        return self.w2(self.activation(gate) * self.w3(x))


class NormedExpert(Expert):
    """An expert whose output is normed."""

    def __init__(self) -> None:
        super().__init__(F.silu)
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class ExpertOfTwo(Expert):
    """An expert that is given more than its input."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * super().forward(x)


@pytest.mark.parametrize(
    ("expert", "name"),
    [
        (Expert(F.silu), "silu"),
        (Expert(F.gelu), "gelu"),
        (Expert(F.relu), None),
        (Expert(F.silu, limit=10.0), None),
        (Expert(F.silu, limit=100.0), None),
        (ExpertOfTwo(F.silu), None),
        (NormedExpert(), None),
        (nn.Linear(8, 8), None),
    ],
)
def test_lists_of_experts(expert: nn.Module, name: str | None) -> None:
    experts = nn.ModuleList([expert]).to("meta")  # As the backend builds models.
    if name is not None:
        assert activation_of(experts) == name
        return
    with pytest.raises(UnsupportedConfigError, match=r"experts of ModuleList are not supported by .* use a model that"):
        activation_of(experts)


def later(family: str, name: str, config: str, **fields: Any) -> nn.Module:
    """Experts of transformers by the family's module, their class and their config, without memory."""
    classes = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    config = getattr(hf, config)(**fields)
    with torch.device("meta"):
        return getattr(classes, name)(config)


@LATER
@pytest.mark.parametrize(
    ("experts", "name"),
    [
        (("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig"), "silu"),
        (("gemma4", "Gemma4TextExperts", "Gemma4TextConfig"), "gelu_tanh"),
        (("gpt_oss", "GptOssExperts", "GptOssConfig"), "swigluoai"),
        (("minimax_m3_vl", "MiniMaxM3VLExperts", "MiniMaxM3VLTextConfig"), "swigluoai_uninterleave"),
        (("deepseek_v4", "DeepseekV4Experts", "DeepseekV4Config"), None),
        (("nemotron_h", "NemotronHExperts", "NemotronHConfig"), None),
        (("muse_spark", "MuseSparkExperts", "MuseSparkTextConfig"), None),
        (("llama4", "Llama4TextExperts", "Llama4TextConfig"), None),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_experts_of_transformers(experts: tuple[str, str, str], name: str | None) -> None:
    fields = {"num_experts": 4, "moe_intermediate_size": 8} if experts[0] == "gemma4" else {}
    made = later(*experts, **fields)
    if name is not None:
        assert activation_of(made) == name
        return
    with pytest.raises(UnsupportedConfigError, match=f"experts of {experts[1]} are not supported"):
        activation_of(made)


@LATER
def test_another_limit_is_refused() -> None:
    """MiniMax M3's experts are served with the limit that is published, and not with one that no layer has."""
    with pytest.raises(UnsupportedConfigError, match="experts of MiniMaxM3VLExperts are not supported"):
        activation_of(later("minimax_m3_vl", "MiniMaxM3VLExperts", "MiniMaxM3VLTextConfig", swiglu_limit=6.0))


def test_a_layer_of_vllms() -> None:
    """Plain torch takes the activation over; kernels that were chosen for another one are refused."""
    experts = nn.ModuleList([Expert(F.gelu)])
    names: list[str] = []
    layer: Any = SimpleNamespace(activation="silu", set_activation=names.append)
    follow_activation(layer, experts)
    assert names == ["gelu"]
    with pytest.raises(
        UnsupportedConfigError, match=r"compute gelu, and vLLM's Transformers backend silu: use a model"
    ):
        check_activation(layer, experts)
    check_activation(SimpleNamespace(activation="gelu"), experts)  # type: ignore[arg-type]
