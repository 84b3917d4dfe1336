"""Custom logits processors under the contract of vLLM's second model runner, which has an interface of its own on some
releases; on the others the processors are those of the first."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import engine
from vllm import LLM, envs

from model_runner_base.heads.sampling.slot_processors import SlotStates
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import cache_bytes, core_of, generate, greedy, metric, sampled
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.processors import PROCESSORS, favour, keep_top, never_again
from model_runner_base.testing.reference import Request
from model_runner_base.testing.tokenizer import add_tokenizer
from model_runner_base.vllm_compat.probes.config import HAS_SLOT_PROCESSORS

processors: list[Any] = PROCESSORS
if HAS_SLOT_PROCESSORS:
    from model_runner_base.testing.slot_processors import SLOT_PROCESSORS

    processors = SLOT_PROCESSORS


@pytest.fixture(autouse=True)
def second_contract(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    envs.disable_envs_cache()
    yield
    monkeypatch.undo()
    envs.disable_envs_cache()


class Penalised(Request):
    """A request whose processors see penalised logits, as with vLLM's second interface."""

    def processed(self, logits: np.ndarray, output: Sequence[int]) -> np.ndarray:
        values = Request(self.prompt, self.params).processed(logits, output)
        for each in self.processors:
            values = each(values, list(self.prompt), list(output))
        return values


def start(model: TinyModel, **options: Any) -> Any:
    """An engine with the processors, in which requests are preempted."""
    options |= {"kv_cache_memory_bytes": cache_bytes(model.path, 320) * (2 if "speculative_config" in options else 1)}
    return engine(
        model.path,
        logits_processors=processors,
        skip_tokenizer_init=False,
        max_model_len=256,
        enforce_eager=True,
        **options,
    )


def changed_requests() -> list[Request]:
    """Requests that look back on their tokens, among such as favour a token, and one that is drawn."""
    prompts = random_prompts(63, [60, 70, 80, 90, 5, 40])
    return [
        *(
            Request(each, greedy(80, extra_args={"never_again": 40}), processors=[never_again(40)])
            for each in prompts[:4]
        ),
        (Penalised if HAS_SLOT_PROCESSORS else Request)(
            prompts[4],
            greedy(30, repetition_penalty=2.0, extra_args={"favour": 100}),
            processors=[favour(100)],
        ),
        Request(
            prompts[5],
            sampled(30, seed=1, temperature=2.0, extra_args={"keep_top": 2}),
            late_processors=[keep_top(2)],
        ),
    ]


def test_tokens_of_slots_on_a_device() -> None:
    """A device of its own has the same numbers as the host after each change; an index makes one of the CPU."""
    states = SlotStates(3, 8, 99, torch.device("cpu", 0))
    info = RequestInfo(None, 0, [5, 6, 7])
    states.admit(2, 3, [5, 6, 7])
    info.output_token_ids += [8, 9]
    states.catch_up(np.array([2]), [info])
    info.output_token_ids += [10]
    states.catch_up(np.array([2]), [info])
    assert states.all_token_ids.gpu[2].tolist() == [5, 6, 7, 8, 9, 10, 0, 0]
    assert (int(states.prompt_len.gpu[2]), int(states.prefill_len.gpu[2]), int(states.total_len.gpu[2])) == (3, 3, 6)
    states.admit(2, 1, [1])
    assert states.total_len.gpu.tolist() == [0, 0, 1]
    assert states.all_token_ids.gpu is not states.all_token_ids.cpu


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_processors_follow_their_requests(is_async: bool, tiny_model: Callable[[str], TinyModel]) -> None:
    """Through preemption, when a request resumes as a new one, and among requests that ask for none."""
    model = add_tokenizer(tiny_model("llama"))
    with start(model, async_scheduling=is_async) as llm:
        assert core_of(llm).scheduler.use_v2_model_runner
        assert check_completions(llm, model, changed_requests()), "the processors changed nothing"
        assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"
        check_refused_argument(llm)


def check_refused_argument(llm: LLM) -> None:
    """An argument that a processor refuses is the request's error, where the interface has such a check."""
    if HAS_SLOT_PROCESSORS:
        with pytest.raises(Exception, match="favour takes an integer"):
            generate(llm, [(5, 6)], [greedy(2, extra_args={"favour": "much"})])


@pytest.mark.skipif(not HAS_SLOT_PROCESSORS, reason="vLLM refuses processors of the first interface with drafts")
def test_processors_see_drafts(tiny_model: Callable[[str], TinyModel]) -> None:
    """A place that verifies a draft is processed as if the drafts before it were the request's tokens."""
    model = add_tokenizer(tiny_model("llama"))
    with start(model, speculative_config=speculation("noisy", model)) as llm:
        requests = [each for each in changed_requests() if each.params.temperature == 0]
        assert check_completions(llm, model, requests), "the processors changed nothing"
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 20
