"""An engine whose attention layers run the NKI kernels, on the stand-in: greedy tokens equal HF transformers."""

import sys
from collections.abc import Callable, Iterator

import nki_standin
import pytest
from conftest import engine
from test_architectures import check
from test_nki_attention import OURS
from vllm.v1.attention.selector import _cached_get_attn_backend

from model_runner_base.step.sizes import Tiling
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, runner_of, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.vllm_compat.types.kv_cache import attention_layers
from neuron_runner.model_runner import NeuronModelRunner
from neuron_runner.nki.attention import NkiAttentionBackend, NkiAttentionImpl


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Clears vLLM's choice of a backend, which it keeps for the process, and kernels imported on the stand-in."""
    _cached_get_attn_backend.cache_clear()
    yield
    _cached_get_attn_backend.cache_clear()
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("query_tile", "kv_tile"), [(16, 64), (128, 512)])
def test_engine_through_the_kernels(
    query_tile: int, kv_tile: int, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2: GQA, layers with and without a window, soft caps; chunked prompts with decode, then steady decode."""
    for name, module in nki_standin.install().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    # Eager, since the stand-in has no graphs; a device would have the runner capture the layer's custom op.
    monkeypatch.setattr(NkiAttentionBackend, "get_impl_cls", staticmethod(lambda: NkiAttentionImpl))
    monkeypatch.setattr("neuron_runner.nki.use_nki", lambda: True)
    monkeypatch.setattr(NeuronModelRunner, "CHUNK_QUERY_TILE", query_tile)
    for name in ("KV_TILE", "CHUNK_KV_TILE"):
        monkeypatch.setattr(NeuronModelRunner, name, kv_tile)
    model = tiny_model("gemma2")
    prompts = random_prompts(0, [5, 60, 90])
    with engine(model.path, max_model_len=256, enforce_eager=True) as llm:
        runner = runner_of(llm)
        layers = attention_layers(runner.vllm_config).values()
        assert all(isinstance(layer.impl, NkiAttentionImpl) for layer in layers)
        limits = runner.parts.layout.limits
        assert (limits.decode, limits.chunk) == (Tiling(1, kv_tile), Tiling(query_tile, kv_tile))
        check(model, prompts, tokens_of(generate(llm, prompts, greedy(10))))
