"""Tensor parallelism through vLLM's mp executor: every rank gives the tokens that one worker gives."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from threading import Timer
from typing import Any

import pytest
import torch
from conftest import engine
from transformers import Qwen3MoeConfig
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.testing import architectures
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.engine import generate, greedy, sampled, tokens_of
from model_runner_base.testing.grammars import is_one_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request
from model_runner_base.testing.tokenizer import add_tokenizer
from neuron_runner.communicator import _HostTransport
from neuron_runner.metrics import CompilationCount

CHOICES = ["yes", "no", "yesterday"]
FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [128]}
OPTIONS = {"max_model_len": 128, "skip_tokenizer_init": False, "max_logprobs": -1}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return add_tokenizer(tiny_model("llama"))


@pytest.fixture(scope="module")
def pair(model: TinyModel) -> Iterator[LLM]:
    """An engine of two workers."""
    buckets = {"neuron_config": FEW_BUCKETS}
    with engine(model.path, **OPTIONS, tensor_parallel_size=2, additional_config=buckets) as llm:
        yield llm


def state_of_rank(worker: Any) -> tuple[CompilationCount, list[int]]:
    """State of a worker, read in it: its compilations, and the rows' last tokens; ranks may place a request in
    another row."""
    return CompilationCount.now(), sorted(worker.model_runner.parts.rows.tensors[0].tolist()[:-1])


def watch_gathers(worker: Any) -> None:
    plain = _HostTransport.all_gather
    worker.widths = []

    def noting(self: _HostTransport, x: torch.Tensor, dim: int) -> torch.Tensor:
        worker.widths.append(x.shape[-1])
        return plain(self, x, dim)

    _HostTransport.all_gather = noting  # type: ignore[method-assign]


def gathered_widths(worker: Any) -> list[int]:
    """Numbers a row that this rank handed over, for every gather since the last call."""
    widths, worker.widths = worker.widths, []
    return widths


def count_of_rank(worker: Any) -> CompilationCount:
    return CompilationCount.now()


def pid_of_rank(worker: Any) -> int:
    return os.getpid()


def test_requests_are_answered_as_by_the_reference_on_every_rank(pair: LLM, model: TinyModel) -> None:
    before = [count for count, _ in pair.collective_rpc(state_of_rank)]
    prompts = random_prompts(1, [5, 40, 70, 17])
    assert tokens_of(generate(pair, prompts, greedy(20))) == [model.greedy(tuple(p), 20) for p in prompts]
    grammar = StructuredOutputsParams(choice=CHOICES)
    requests = [
        Request(prompts[0], greedy(16, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.5)),
        Request(prompts[2], SamplingParams(temperature=0, structured_outputs=grammar), is_one_of(CHOICES)),
    ]
    assert check_completions(pair, model, requests) > 0
    check_completions(pair, model, [Request(prompts[1], sampled(16, top_k=5, top_p=0.9)) for _ in range(2)])
    (zero, zeros_tokens), (one, ones_tokens) = pair.collective_rpc(state_of_rank)
    assert zeros_tokens == ones_tokens
    assert [zero, one] == before, "graphs were compiled after warm-up"


def test_what_is_drawn_is_what_one_worker_draws(pair: LLM, model: TinyModel) -> None:
    """Draws are one worker's with seeds, and without: the engine draws the same for a request on all ranks."""
    prompts = random_prompts(2, [5, 40, 17, 30])
    params = [
        sampled(16, temperature=0.8),
        sampled(16, temperature=1.2, seed=7, logprobs=3),
        sampled(16, top_k=20, top_p=0.8),
        sampled(16, min_p=0.05, seed=1 << 40, prompt_logprobs=2),
    ]
    # None of these needs whole rows.
    plain = [sampled(16, temperature=0.8), sampled(16, min_p=0.05, seed=1 << 40), greedy(16), sampled(16, seed=7)]
    drawn = []
    before = pair.collective_rpc(count_of_rank)
    with engine(model.path, **OPTIONS, enforce_eager=True) as alone:
        for llm in (alone, pair):
            # A fresh engine has drawn no seeds yet; the pair has.
            llm.collective_rpc(partial(restart_seeds, 3))
            drawn.append(generate(llm, prompts, params))
        pair.collective_rpc(watch_gathers)
        alone_plain, pair_plain = (tokens_of(generate(llm, prompts, plain)) for llm in (alone, pair))
    assert alone_plain == pair_plain
    # A token in three numbers, and the maximum for min-p.
    for widths in pair.collective_rpc(gathered_widths):
        assert set(widths) == {1, 3} and widths.count(3) >= 16
    generate(pair, prompts[:1], [sampled(4, top_k=5)])
    part = pair.llm_engine.model_config.get_vocab_size() // 2
    assert [set(widths) for widths in pair.collective_rpc(gathered_widths)] == [{part}] * 2
    assert pair.collective_rpc(count_of_rank) == before
    assert tokens_of(drawn[0]) == tokens_of(drawn[1])
    assert drawn[1][3].prompt_logprobs is not None
    for alone_output, pair_output in zip(*drawn, strict=True):
        (one,), (other,) = alone_output.outputs, pair_output.outputs
        assert one.logprobs is None or [
            {token: round(value.logprob, 3) for token, value in place.items()} for place in one.logprobs
        ] == [{token: round(value.logprob, 3) for token, value in place.items()} for place in other.logprobs]


def restart_seeds(seed: int, worker: Any) -> None:
    worker.model_runner.parts.head._states._random.seed(seed)


def break_the_last_rank(worker: Any) -> None:
    if worker.rank == 3:
        worker.model_runner._prepare_inputs = None


def test_a_worker_that_dies_ends_the_engine(pair: LLM) -> None:
    """The engine of ``pair`` ends here, in the last test of it, so later ones have the machine to themselves."""
    _, victim = pair.collective_rpc(pid_of_rank)
    timer = Timer(0.5, os.kill, (victim, signal.SIGKILL))
    timer.start()
    with pytest.raises(Exception, match=r"cancelled|Executor failed|Worker failed"):
        while True:
            generate(pair, random_prompts(4, [5, 6]), greedy(100))
    with pytest.raises(RuntimeError, match="Executor failed"):
        generate(pair, random_prompts(4, [5]), greedy(2))


def test_four_workers_replicate_heads_and_pad_the_vocabulary(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has two KV heads for four ranks, 509 tokens, and experts. It runs eager, with gloo's collectives."""
    shape: dict[str, Any] = architectures.UNTIED | {"vocab_size": 509}
    config = partial(Qwen3MoeConfig, **shape, **architectures.EXPERTS, head_dim=32, norm_topk_prob=True)
    monkeypatch.setitem(architectures.CONFIGS, "qwen3-moe-509", config)
    model = tiny_model("qwen3-moe-509")
    prompts = [[token % 509 for token in prompt] for prompt in random_prompts(3, [5, 40, 70])]
    with engine(model.path, max_model_len=128, tensor_parallel_size=4, enforce_eager=True) as llm:
        got = tokens_of(generate(llm, prompts, greedy(12)))
        assert got == [model.greedy(tuple(prompt), 12) for prompt in prompts]
        # A rank whose step fails ends the engine too: the others would add what does not belong together.
        llm.collective_rpc(break_the_last_rank)
        with pytest.raises(Exception, match=r"cancelled|Executor failed|Worker failed"):
            while True:
                generate(llm, prompts, greedy(12))


@pytest.mark.full
def test_latents_are_on_every_rank(tiny_model: Callable[[str], TinyModel]) -> None:
    """Ranks share the heads of latent attention, whose absorbed projections are cut; each has the whole latents."""
    model, prompts = tiny_model("deepseek-v2"), random_prompts(5, [5, 40, 70])
    options: dict[str, Any] = {"max_model_len": 128, "tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 20}
    with engine(model.path, **options, additional_config={"neuron_config": FEW_BUCKETS}) as llm:
        before = llm.collective_rpc(count_of_rank)
        assert tokens_of(generate(llm, prompts, greedy(12))) == [model.greedy(tuple(p), 12) for p in prompts]
        assert llm.collective_rpc(count_of_rank) == before
        assert llm.collective_rpc(latent_shapes) == [[(2, 16, 24), (2, 24, 12)]] * 2


def latent_shapes(worker: Any) -> list[tuple[int, ...]]:
    """Shapes of the first layer's absorbed projections."""
    projection = worker.get_model().model.layers[0].self_attn.kv_b_proj
    return [tuple(projection.to_latent.shape), tuple(projection.from_latent.shape)]
