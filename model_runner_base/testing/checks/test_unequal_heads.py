"""Values of a head size of their own, in a model of later releases of transformers."""

from collections.abc import Callable

from vllm import LLM

from model_runner_base.testing.architectures import WINDOW
from model_runner_base.testing.checks.test_cache_formats import PROMPTS, check
from model_runner_base.testing.models import TinyModel


def test_unequal_heads(engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """Values of another head size than keys, in layers with windows and sinks and layers without."""
    model = tiny_model("mimo-v2")
    llm = engine(model.path, hf_overrides={"sliding_window_size": WINDOW})
    check(llm, model, PROMPTS)
    check(llm, model, PROMPTS[-1:])
