"""Settings that replicas that share experts are not served with."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from test_limits import SERVED, check_refused, draft

from model_runner_base.admission import expert_replica_limits, limits
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.loader import load_checkpoint


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("platform.serves_expert_replicas", False, "Qwen3Moe.* experts, .* that does not run on this device yet"),
        (
            "model_config.architecture",
            "DbrxForCausalLM",
            "DbrxFor.* was not tried with replicas, .* or one of Deepseek",
        ),
        (
            "parallel_config.all2all_backend",
            "deepep_low_latency",
            "all2all_backend=deepep_low_latency is not supported",
        ),
        ("parallel_config.data_parallel_external_lb", True, "options of external and hybrid load balancing"),
        ("parallel_config.enable_eplb", True, "leave out enable_eplb"),
        ("parallel_config.use_ubatching", True, "leave out enable_dbo"),
        ("model_config.quantization", "fp8", "fp8 weights were not tried with replicas that share experts"),
        ("model_config.runner_type", "pooling", "pooling was not tried with replicas that share experts"),
        ("speculative_config", draft(), "speculative decoding is not supported .* share experts"),
        ("lora_config", object(), "adapters are not supported with replicas that share experts"),
        ("model_config.enable_sleep_mode", True, "replicas that share experts do not sleep yet"),
        (
            "weight_transfer_config",
            SimpleNamespace(backend="gloo"),
            "weights of a trainer are not received by replicas",
        ),
    ],
)
def test_what_replicas_that_share_experts_are_not_served_with_yet(
    setting: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(serves_replicas=True, serves_expert_replicas=True)
    for module in (limits, expert_replica_limits):
        monkeypatch.setattr(module, "current_platform", platform)
    config: Any = deepcopy(SERVED)
    config.parallel_config.data_parallel_size = 2
    vars(config.model_config).update(is_moe=True, architecture="Qwen3MoeForCausalLM")
    config.platform = platform
    check_refused(config, setting, value, message)


def test_experts_that_replicas_share_need_plain_torch() -> None:
    """vLLM's own layers would leave out the exchange of tokens, and not say so."""
    config: Any = deepcopy(SERVED)
    config.parallel_config.data_parallel_size = 2
    with pytest.raises(UnsupportedConfigError, match="replicas share experts that run in plain torch, which this dev"):
        load_checkpoint(config, use_plain_layers=False)
