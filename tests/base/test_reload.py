"""New weights in a running engine: the next tokens are the new checkpoint's, and nothing is compiled again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compilations, engine
from greedy import expected, generate
from lane import HAS_OPENXLA
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from model_runner_base.errors import CheckpointError
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.weights import broken_weights, other_weights

PROMPTS = random_prompts(20, [5, 30, 70])
FEW_BUCKETS = {
    "num_batched_tokens_buckets": [64],
    "num_seqs_buckets": [4],
    "context_length_buckets": [128],
}


def small_engine(model: TinyModel, **options: Any) -> Any:
    return engine(model.path, max_model_len=128, additional_config={"neuron_config": FEW_BUCKETS}, **options)


def reload_weights(llm: Any, **kwargs: Any) -> None:
    llm.collective_rpc("reload_weights", kwargs=kwargs)
    llm.reset_prefix_cache()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_compiled_graphs_see_new_weights(name: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    old = tiny_model(name)
    new = other_weights(old, tmp_path / "new")
    assert expected(new, PROMPTS) != expected(old, PROMPTS)
    with small_engine(old) as llm:
        before = compilations()
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)
        reload_weights(llm, weights_path=str(new.path))
        assert generate(llm, PROMPTS) == expected(new, PROMPTS)
        reload_weights(llm, weights_iterator=list(load_file(old.path / "model.safetensors").items()))
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)
        assert compilations() == before
        for item in load_file(new.path / "model.safetensors").items() if HAS_OPENXLA else ():  # Which re-lays weights.
            with pytest.raises(CheckpointError, match=r"reload_weights\(weights_iterator"):
                llm.apply_model(lambda module, item=item: module.load_weights([item]))
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)


@pytest.mark.parametrize("is_eager", [False, True])
def test_an_engine_that_started_without_weights_gets_them(
    is_eager: bool, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    with small_engine(model, load_format="dummy", enforce_eager=is_eager) as llm:
        with pytest.raises(CheckpointError, match=r"load_format=dummy cannot load a model again: .* by update_config"):
            reload_weights(llm)
        with pytest.raises(ValueError, match=r"cache_config, model_config cannot be changed .*weights_path="):
            llm.collective_rpc("update_config", args=({"cache_config": {}, "load_config": {}, "model_config": {}},))
        llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
        part = next(broken_weights(model, tmp_path))[0]
        with pytest.raises(CheckpointError, match="some layers may hold new weights"):
            reload_weights(llm, weights_path=str(part.path))  # Nothing is known yet of a whole checkpoint.
        reload_weights(llm, weights_path=str(model.path))
        with pytest.raises(CheckpointError, match=r"is missing, of shape .*; the model keeps its weights"):
            reload_weights(llm, weights_path=str(part.path))
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)


@pytest.mark.parametrize("name", ["llama", "gemma", "opt"])
def test_eager(name: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    old = tiny_model(name)
    new = other_weights(old, tmp_path / "new")
    with small_engine(old, enforce_eager=True) as llm:
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)
        reload_weights(llm, weights_path=str(new.path))
        assert generate(llm, PROMPTS) == expected(new, PROMPTS)


def test_what_does_not_fit_leaves_the_weights(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    missing = other_weights(model, tmp_path / "missing")
    weights = load_file(missing.path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, missing.path / "model.safetensors", metadata={"format": "pt"})
    truncated = other_weights(model, tmp_path / "truncated")
    content = (truncated.path / "model.safetensors").read_bytes()
    (truncated.path / "model.safetensors").write_bytes(content[:-100])
    query = "model.layers.0.self_attn.q_proj.weight"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"weights_path": str(missing.path)}, r"layers\.1\.mlp\.up_proj\.weight is missing, .*; the model keeps"),
        ({"weights_path": str(tmp_path / "nowhere")}, "nowhere"),
        ({"weights_path": str(truncated.path)}, "truncated"),
        ({"weights_iterator": [], "is_checkpoint_format": False}, "as the checkpoint has them"),
        ({"weights_iterator": [("model.norm.weight", torch.ones(3))]}, "must have .*; the model keeps its weights"),
        ({"weights_iterator": [(query, load_file(missing.path / "model.safetensors")[query])]}, "qkv_proj was given"),
    ]
    with small_engine(model, enforce_eager=True) as llm:
        for kwargs, message in cases:
            with pytest.raises(CheckpointError, match=message):
                reload_weights(llm, **kwargs)
            assert generate(llm, PROMPTS) == expected(model, PROMPTS), message
        reload_weights(llm)  # The model's own checkpoint, not one that failed.
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)


def test_running_requests_go_on_with_new_weights(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """A running request keeps what is in the cache, as in vLLM; its next tokens come from the new weights."""
    old = tiny_model("llama")
    with small_engine(old, enforce_eager=True) as llm:
        core, tokens = llm.llm_engine, []
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
        core.add_request("a", {"prompt_token_ids": list(PROMPTS[0])}, params)
        while len(tokens) < 10:
            tokens = [token for output in core.step() for token in output.outputs[0].token_ids]
        zeros = [(name, torch.zeros_like(t)) for name, t in load_file(old.path / "model.safetensors").items()]
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": zeros})
        while core.has_unfinished_requests():
            for output in core.step():
                tokens = list(output.outputs[0].token_ids)
        assert tokens[:10] == old.greedy(PROMPTS[0], 10)
        assert tokens[12:] == [0] * 8


@pytest.mark.parametrize("name", ["glm4-moe", "gpt-oss"])
def test_what_cannot_be_reloaded_is_refused(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    """A router's bias and attention sinks do not pass through what vLLM's reloading watches."""
    model = tiny_model(name)
    with small_engine(model, enforce_eager=True) as llm:
        with pytest.raises(CheckpointError, match="nothing was changed"):
            reload_weights(llm)
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
