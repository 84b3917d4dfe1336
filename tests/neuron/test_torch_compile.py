"""Compilation of each size through torch.compile with torch_xla's own backend."""

from collections.abc import Callable

import pytest
from conftest import engine
from greedy import expected, generate
from vllm import SamplingParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import runner_of
from model_runner_base.testing.models import TinyModel
from neuron_runner.config import NeuronConfig
from neuron_runner.dynamo import EachSize
from neuron_runner.metrics import CompilationCount

PROMPTS = random_prompts(8, [1, 30, 70])
BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [128]}
DRAWN = SamplingParams(temperature=0.9, top_k=20, seed=5, max_tokens=9, logprobs=2, presence_penalty=0.5)


@pytest.mark.in_turns
def test_tokens_equal_the_default_path(tiny_model: Callable[[str], TinyModel]) -> None:
    model, drawn = tiny_model("llama"), []
    for backend in ("torch.compile", "openxla"):
        config = {"neuron_config": BUCKETS | {"compile_backend": backend}}
        with engine(model.path, max_model_len=128, additional_config=config) as llm:
            assert isinstance(runner_of(llm).parts.graph.forward, EachSize) == (backend == "torch.compile")
            warm = CompilationCount.now()
            assert generate(llm, PROMPTS) == expected(model, PROMPTS)
            outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], DRAWN, use_tqdm=False)
            drawn.append([list(output.outputs[0].token_ids) for output in outputs])
            assert CompilationCount.now() == warm
    assert drawn[0] == drawn[1]


def test_what_it_cannot_do_is_refused() -> None:
    config = NeuronConfig(compile_backend="torch.compile")
    assert not config.warms_up_in_background(1)
    with pytest.raises(ValueError, match=r"torch\.compile needs one worker, there are 2: .* give openxla"):
        config.warms_up_in_background(2)
    with pytest.raises(ValueError, match=r"warm_up=background is not for torch\.compile"):
        NeuronConfig(compile_backend="torch.compile", warm_up="background").warms_up_in_background(1)
