"""Models in bfloat16 and float16: log probabilities as near to float32 as those of HF transformers."""

from collections.abc import Callable

import pytest
from vllm import LLM

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.half_precision import DTYPES, Half, even_out
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.rounding import changed

PROMPTS = random_prompts(33, [5, 30, 70, 120, 200, 230])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """Log probabilities in bfloat16 and float16 are as near to float32 as the reference's in the same dtype; greedy
    tokens are those that it clearly prefers."""
    plain = tiny_model("llama")
    model = changed(plain, plain.path.with_name("llama-even"), even_out)
    # Two requests at a time: graphs of these sizes are compiled for this check alone.
    llm = engine(model.path, dtype=dtype, max_num_seqs=2, max_logprobs=-1)
    Half.run(llm, model, PROMPTS, dtype).check()
