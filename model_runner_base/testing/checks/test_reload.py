"""Weight reload: after ``reload_weights`` the tokens are those of the new weights, in graphs too."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from vllm import LLM

from model_runner_base.testing.architectures import CONFIGS
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel, reference_model
from model_runner_base.testing.recurrent_architectures import RECURRENT
from model_runner_base.testing.table import refusal
from model_runner_base.testing.weights import broken_weights, other_weights

PROMPTS = random_prompts(160, [5, 30, 70])
COUNT = 12
FAMILIES = [name for name in ("gpt-neox", "nemotron-h", "zamba2", "gemma3n") if name in CONFIGS | RECURRENT]
"""Models whose classes in vLLM and transformers have tensors with different names, or buffers that are computed."""


@pytest.fixture(scope="module")
def other(text_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The same model with other weights."""
    return other_weights(text_model, tmp_path_factory.mktemp("weights") / "other")


def check(llm: LLM, model: TinyModel) -> None:
    check_equal(model, PROMPTS, tokens_of(generate(llm, PROMPTS, greedy(COUNT))), [COUNT] * len(PROMPTS))


def test_reloaded_weights(text_engine: Callable[..., LLM], text_model: TinyModel, other: TinyModel) -> None:
    """Weights of a path, then the first ones tensor by tensor: tokens follow, and nothing is compiled."""
    llm = text_engine()
    check(llm, text_model)
    policy = runner_of(llm).graph_policy
    warm = policy.num_compilations()
    # An engine that fails in between is closed, with the other weights.
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other.path)})
    llm.reset_prefix_cache()
    check(llm, other)
    weights = [*load_file(text_model.path / "model.safetensors").items()]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.reset_prefix_cache()
    check(llm, text_model)
    assert policy.num_compilations() == warm, "graphs were compiled again"


def test_tied_weights(engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Weights of a model whose head is its embedding: both are new."""
    model = tiny_model("gpt2")
    llm = engine(model.path)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_weights(model, tmp_path / "other").path)})
    llm.reset_prefix_cache()
    check(llm, TinyModel(tmp_path / "other"))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model.path)})
    llm.reset_prefix_cache()
    check(llm, model)


@pytest.mark.parametrize("name", FAMILIES)
def test_reload_by_family(
    name: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """The checkpoint that runs is loaded again, then another one; a broken one is refused before a weight changes."""
    model = tiny_model(name)
    other = other_weights(model, tmp_path / "other")
    reference_model(other.path)  # Before an engine: vLLM's Transformers backend changes transformers' class.
    llm = engine(model.path)
    check(llm, model)
    for each in (model, other):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(each.path)})
        llm.reset_prefix_cache()
        check(llm, each)
    for broken, words in broken_weights(model, tmp_path / "broken"):
        with pytest.raises(Exception) as raised:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(broken.path)})
        if words not in str(raised.value):
            raise raised.value
        llm.reset_prefix_cache()
        check(llm, other)


def test_a_checkpoint_that_is_not_there(text_engine: Callable[..., LLM], text_model: TinyModel, tmp_path: Path) -> None:
    """A reload that fails leaves the weights as they were, and the engine serves on."""
    llm = text_engine()
    with pytest.raises(Exception) as raised:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path / "nowhere")})
    if refusal(raised.value) or "nowhere" not in str(raised.value):
        raise raised.value
    check(llm, text_model)
