"""Layers of one model that differ in KV heads, head size or window: greedy tokens equal HF transformers in float32.

vLLM's own classes of such models have none in transformers. So the model is vLLM's Llama with a config a layer, and the
reference is HF's Qwen2, of which Llama is the case without biases and windows, built from the same configs.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from model_runner_base.testing.architectures import MAX_LENGTH, VOCAB_SIZE, WINDOW
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, runner_of, tokens_of

HEADS = 6
PROMPTS = random_prompts(0, [5, 33, 90, 150])
NEW_TOKENS = 12

Layer = dict[str, Any]
"""Settings that a layer's config has of its own."""


def of_layer(config: Any, index: int) -> Any:
    """The config of one layer."""
    own = deepcopy(config)
    for name, value in config.layers[index].items():
        setattr(own, name, value)
    return own


class UnequalLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        config = of_layer(config or vllm_config.model_config.hf_config, extract_layer_index(prefix))
        super().__init__(vllm_config, prefix, config)


class UnequalLlama(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=UnequalLayer)


ModelRegistry.register_model("UnequalLlama", UnequalLlama)


class Unequal:
    """A checkpoint of vLLM's and its reference.

    Args:
        layers: what is each layer's own.
        windows: whether each layer has a window.
    """

    def __init__(self, directory: Path, layers: list[Layer], windows: list[bool]) -> None:
        config = Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=len(layers),
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=max(layer.get("head_dim", 16) for layer in layers),
            max_position_embeddings=MAX_LENGTH,
            layer_types=["sliding_attention" if window else "full_attention" for window in windows],
            sliding_window=WINDOW if any(windows) else None,
            use_sliding_window=any(windows),
            tie_word_embeddings=False,
        )
        config.layers = [{"head_dim": 16, **layer} for layer in layers]
        torch.manual_seed(0)
        self._reference = Qwen2ForCausalLM(config).eval()
        for index in range(len(layers)):
            self._reference.model.layers[index] = _reference_layer(config, index)
        for name, parameter in self._reference.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        self._reference.save_pretrained(directory)
        told = json.loads((directory / "config.json").read_text())
        told |= {"model_type": "llama", "architectures": ["UnequalLlama"], "qkv_bias": True}
        (directory / "config.json").write_text(json.dumps(told))
        self.path = directory

    @torch.no_grad()
    def check(self, prompts: list[tuple[int, ...]], tokens: list[list[int]]) -> None:
        """Checks that each token is the reference's choice after those before it."""
        assert len({token for row in tokens for token in row}) > 10, "the tokens are not diverse"
        for prompt, got in zip(prompts, tokens, strict=True):
            logits = self._reference(torch.tensor([[*prompt, *got[:-1]]])).logits[0, len(prompt) - 1 :]
            assert got == logits.argmax(dim=-1).tolist()


def _reference_layer(config: Any, index: int) -> Any:
    """HF's layer of its own config. Rotary angles come from the model, for its largest heads: a head of half the size
    takes every other one."""
    layer = Qwen2DecoderLayer(of_layer(config, index), index).eval()
    stride = config.head_dim // config.layers[index]["head_dim"]

    def with_own_angles(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        angles = tuple(angle[..., ::stride] for angle in kwargs["position_embeddings"])
        return args, kwargs | {"position_embeddings": angles}

    layer.self_attn.register_forward_pre_hook(with_own_angles, with_kwargs=True)
    return layer


def kv_heads(*counts: int) -> list[Layer]:
    return [{"num_key_value_heads": count} for count in counts]


CASES: dict[str, tuple[list[Layer], list[bool], int]] = {
    "KV heads": (kv_heads(1, 6, 3, 6), [False] * 4, 1),
    "head sizes": ([{"head_dim": size} for size in (32, 16, 32, 16)], [False] * 4, 1),
    "KV heads and windows alike": (kv_heads(2, 6), [True] * 2, 1),
    "larger window layers": (kv_heads(3, 6, 3, 6), [False, True] * 2, 2),
    "smaller window layers": (kv_heads(6, 2, 6, 2), [False, True] * 2, 2),
    "one block, heads as many as large": (
        [{"num_key_value_heads": 6}, {"num_key_value_heads": 3, "head_dim": 32}],
        [False, True],
        2,
    ),
}
"""Layers, windows, and KV-cache groups that vLLM makes of them.

Groups share memory, so vLLM multiplies the block size of the one that keeps less of a token: by 2, and by 3, whose
blocks of 48 are not parts of a KV tile of 64. In the last both keep as much, in other shapes.
"""


FEW_BUCKETS = {
    "neuron_config": {
        "num_batched_tokens_buckets": [64],
        "num_seqs_buckets": [4],
        "context_length_buckets": [256],
    }
}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Unequal]:
    """Makes a case's checkpoint, once."""

    @cache
    def make(name: str) -> Unequal:
        layers, windows, _ = CASES[name]
        return Unequal(tmp_path_factory.mktemp("unequal"), layers, windows)

    return make


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, unequal: Callable[[str], Unequal]) -> None:
    """Prompts come in chunks and mixed batches, then alone, to find their prefix in the cache."""
    model, num_groups = unequal(name), CASES[name][2]
    with engine(model.path, max_model_len=256, enforce_eager=True, block_size=16) as llm:
        assert len(runner_of(llm).parts.block_tables) == num_groups
        model.check(PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS))))
        for prompt in PROMPTS:
            model.check([prompt], tokens_of(generate(llm, [prompt], greedy(40))))


@pytest.mark.parametrize("name", ["KV heads", "smaller window layers"])
@pytest.mark.parametrize(
    "options",
    [{"block_size": 256}, {"block_size": 16, "disable_hybrid_kv_cache_manager": True}],
    ids=["contiguous", "one-group"],
)
def test_in_other_caches(name: str, options: dict[str, Any], unequal: Callable[[str], Unequal]) -> None:
    """Caches are a block a request, or one group for layers with a window and without."""
    model = unequal(name)
    with engine(model.path, max_model_len=256, enforce_eager=True, **options) as llm:
        model.check(PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(NEW_TOKENS))))


def test_compiled_equals_transformers(unequal: Callable[[str], Unequal]) -> None:
    """Compiled steps go up to all that the limits allow: the sizes hold groups of any block size."""
    model, prompts = unequal("smaller window layers"), random_prompts(1, [90, 200, 200, 200])
    with engine(model.path, max_model_len=256, block_size=16, additional_config=FEW_BUCKETS) as llm:
        model.check(prompts, tokens_of(generate(llm, prompts, greedy(56))))


def test_kernels_for_unequal_keys_and_values_are_refused(unequal: Callable[[str], Unequal]) -> None:
    """Pangu with sinks of its own is refused before it is loaded."""
    path, architecture = str(unequal("KV heads").path), "PanguProMoEV2ForCausalLM"
    overrides = {"param_sink_number": 4, "architectures": [architecture]}
    with pytest.raises(ValueError, match=f"{architecture} is not supported here yet: .* use another model"):
        EngineArgs(path, max_model_len=128, hf_overrides=overrides).create_engine_config()
