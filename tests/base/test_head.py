"""A head that answers a step at once: the engine has the step's output from ``execute_model``, and asks no more."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import engine
from failing import SEED, fail_admission
from vllm import SamplingParams

from model_runner_base.step.call import Forward
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, runner_of, tokens_of
from model_runner_base.testing.models import TinyModel


def test_an_answer_at_once(tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation that samples within ``answer`` gives the same tokens, and leaves nothing for ``sample_tokens``."""
    prompts, model = random_prompts(5, [5, 40, 9]), tiny_model("llama")
    with engine(model.path, enforce_eager=True, async_scheduling=False) as llm:
        runner = runner_of(llm)
        head, steps = runner.parts.head, []

        def answer(forward: Forward) -> Any:
            assert runner.pending is None
            steps.append(dict(forward.schedule.num_tokens))
            return head.sample(head.plan(forward.batch), forward, None)

        monkeypatch.setattr(head, "answer", answer)
        outputs = generate(llm, prompts, greedy(12))
        assert runner.pending is None
        # A request that fails is answered with its error, the others go on.
        fail_admission(llm, monkeypatch)
        params = [greedy(4), SamplingParams(temperature=0, max_tokens=4, seed=SEED), greedy(4)]
        beside = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        assert f"nothing at {SEED}" in str(beside[1].outputs[0].stop_reason)
        assert [tokens_of(beside)[index] for index in (0, 2)] == [model.greedy(prompts[index], 4) for index in (0, 2)]
    assert tokens_of(outputs) == [model.greedy(prompt, 12) for prompt in prompts]
    assert sum(steps[0].values()) == 54 and len(steps) == 12 + 4
