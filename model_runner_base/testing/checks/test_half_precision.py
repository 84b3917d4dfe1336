"""Models in bfloat16 and float16: log probabilities as near to float32 as those of HF transformers."""

from collections.abc import Callable

from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.half_precision import Half, even_out
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.rounding import changed

Start = Callable[..., LLM]
Tiny = Callable[[str], TinyModel]
PROMPTS = random_prompts(33, [5, 30, 70, 120, 200, 230])


def check(dtype: str, engine: Start, tiny_model: Tiny) -> None:
    """Compares values of a model whose sums are of many small numbers."""
    plain = tiny_model("llama")
    model = changed(plain, plain.path.with_name("llama-even"), even_out)
    # Two requests at a time: graphs of these sizes are compiled for this check alone.
    Half.run(engine(model.path, dtype=dtype, max_num_seqs=2, max_logprobs=-1), model, PROMPTS, dtype).check()


def test_bfloat16(engine: Start, tiny_model: Tiny) -> None:
    """Values in bfloat16 are as near to float32 as the reference's; tokens are those that it clearly prefers."""
    check("bfloat16", engine, tiny_model)


def test_float16(engine: Start, tiny_model: Tiny) -> None:
    """Values in float16 are as near to float32 as the reference's; tokens are those that it clearly prefers."""
    check("float16", engine, tiny_model)
