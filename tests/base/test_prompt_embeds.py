"""Prompts as embeddings: the tokens are those of the same prompt by ids, or of HF transformers given the embeddings."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bare_step import BareStep, padded, scheduled
from conftest import compilations, engine
from counts import examples
from greedy import expected
from hypothesis import given, settings
from hypothesis import strategies as st
from lane import HAS_OPENXLA
from test_batch_builder import make_caches
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.embeddings import EmbeddingInputs
from model_runner_base.inputs.pool import SMALLEST_PIECE
from model_runner_base.step.batch import BatchBuilder
from model_runner_base.step.components import StepComponent
from model_runner_base.step.request_states import RequestInfo, RequestStates
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import metric
from model_runner_base.testing.models import TinyModel

NEW_TOKENS = 20
FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [2, 4], "context_length_buckets": [256]}


def reference(model: TinyModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()


@torch.no_grad()
def embeddings(model: TinyModel, prompts: list[tuple[int, ...]]) -> list[torch.Tensor]:
    embed = reference(model).get_input_embeddings()
    return [embed(torch.tensor(prompt)) for prompt in prompts]


def run(llm: LLM, prompts: list[dict[str, Any]], count: int = NEW_TOKENS, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **options)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def alternating(prompts: list[tuple[int, ...]], embeds: list[torch.Tensor], first: int) -> list[dict[str, Any]]:
    """Prompts of which every second one is given by its embeddings."""
    return [
        {"prompt_embeds": embeds[i]} if i % 2 == first else {"prompt_token_ids": list(prompt)}
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("name", "is_async"), [("llama", True), ("llama", False), ("gpt2", True)])
def test_equals_ids(name: str, is_async: bool, tiny_model: Callable[[str], TinyModel]) -> None:
    """Embeddings equal ids mixed in a batch, in chunks, hit in the prefix cache, preempted and resumed."""
    model = tiny_model(name)
    prompts = random_prompts(70, [1, 7, 33, 64, 90, 130])
    embeds = embeddings(model, prompts)
    options = {"enable_prompt_embeds": True, "async_scheduling": is_async, "num_gpu_blocks_override": 14}
    with engine(model.path, max_model_len=256, enforce_eager=True, **options) as llm:
        for first in (0, 1):
            assert run(llm, alternating(prompts, embeds, first)) == expected(model, prompts)
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert run(llm, [{"prompt_embeds": embeds[5]}]) == expected(model, prompts[5:])
        assert run(llm, [{"prompt_embeds": embeds[5]}]) == expected(model, prompts[5:])
        assert metric(llm, "vllm:prefix_cache_hits") > hits, "the prefix cache was not hit"
        long = random_prompts(71, [60, 70, 80, 90])
        preemptions = metric(llm, "vllm:num_preemptions")
        assert run(llm, alternating(long, embeddings(model, long), 1), 100) == expected(model, long, 100)
        assert metric(llm, "vllm:num_preemptions") > preemptions, "nothing was preempted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings_of_no_token(dtype: torch.dtype, tiny_model: Callable[[str], TinyModel]) -> None:
    """Prompts of one length that no ids spell come one after another: a cache by ids would mix them up."""
    model = tiny_model("llama")
    hf = reference(model)
    torch.manual_seed(3)
    prompts = torch.randn(3, 70, 64).to(dtype)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        wanted = [hf.generate(inputs_embeds=one[None].float(), **options)[0].tolist() for one in prompts]
    assert len({tuple(tokens) for tokens in wanted}) == 3
    with engine(model.path, max_model_len=128, enforce_eager=True, enable_prompt_embeds=True) as llm:
        assert [run(llm, [{"prompt_embeds": one}])[0] for one in prompts] == wanted
        assert run(llm, [{"prompt_embeds": one[None]} for one in prompts]) == wanted


@torch.no_grad()
def test_penalties_count_no_token_of_a_prompt_that_has_none(tiny_model: Callable[[str], TinyModel]) -> None:
    """Penalties do not count a prompt of embeddings, as in HF transformers. The rival's logit is the next below that
    of token 0, and a penalty would put token 0 below it."""
    model = tiny_model("llama")
    prompt = torch.randn(9, 64, generator=torch.Generator().manual_seed(4))
    logits = reference(model)(inputs_embeds=prompt[None]).logits[0, -1]
    rival = int(torch.where(logits < logits[0], logits, -torch.inf).argmax())
    with engine(model.path, max_model_len=128, enforce_eager=True, enable_prompt_embeds=True) as llm:
        options = {"repetition_penalty": 1.5, "allowed_token_ids": [0, rival]}
        assert run(llm, [{"prompt_embeds": prompt}], 1, **options) == [[0]]


class CountingOps(DeviceOps):
    """Counts the copies of numbers that are no integers."""

    num_floats = 0

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_floats += tensor.is_floating_point()
        return super().upload(tensor)


@given(
    prompts=st.lists(st.tuples(st.integers(1, 150), st.booleans()), min_size=1, max_size=5),
    chunks=st.lists(st.integers(0, 90), min_size=1, max_size=8),
    padding=st.integers(0, 3),
    has_plans=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=examples(50), deadline=None)
def test_pool_on_the_device_gives_each_token_its_embedding(
    prompts: list[tuple[int, bool]], chunks: list[int], padding: int, has_plans: bool, dtype: torch.dtype
) -> None:
    """A token gets its embedding in chunks, decode rows first or not, and then in decode. A step without embeddings
    uploads none."""
    hidden, count = 3, len(prompts)
    ops = CountingOps(torch.device("cpu"))
    num_written = []

    def wrap(function: Callable[..., Any], state: list[torch.Tensor]) -> Callable[..., Any]:
        def written(pool: torch.Tensor, rows: torch.Tensor, embeds: torch.Tensor) -> Any:
            assert pool is state[0] and rows.dtype == torch.int32 and rows.max() < len(pool)
            assert embeds.shape == (len(rows), hidden)
            num_written.append(len(rows))
            return function(pool, rows, embeds)

        return written

    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.normal(size=(500, hidden))).to(dtype)
    model: Any = SimpleNamespace(embed_input_ids=lambda ids: table[ids])

    def inputs(requests: RequestStates) -> list[StepComponent]:
        return [EmbeddingInputs(requests, 90 * count, hidden, model, wrap, ops)]

    caches, limits = make_caches(has_plans, length=200)
    bare = BareStep(caches, limits, count, 200, inputs)
    embeds, tokens = {}, {}
    for index, (length, is_embeds) in enumerate(prompts):
        name = f"request {index}"
        tokens[name] = [0] * length if is_embeds else rng.integers(0, 500, length).tolist()
        if is_embeds:
            embeds[name] = torch.from_numpy(rng.normal(size=(length, hidden)))
        info = RequestInfo(SamplingParams(), 0, tokens[name], embeds.get(name))
        row = bare.requests.admit(name, info, tokens[name], 0)
        bare.components.admit(row, info, tokens[name])
    computed = dict.fromkeys(tokens, 0)
    for step in range(len(chunks) + 6):
        wanted = {
            name: min(chunks[(step + index) % len(chunks)] if step < len(chunks) else 1, len(known) - computed[name])
            for index, (name, known) in enumerate(tokens.items())
        }
        wanted = {name: number for name, number in wanted.items() if number}
        if not wanted:
            continue
        schedule = scheduled(wanted)
        num_floats = ops.num_floats
        num_written.clear()
        repeated = bare.repeat.advance(schedule)
        if repeated is None:
            batch = BatchBuilder(bare.requests, bare.layout.order).build(schedule)
            repeated = batch, bare.send(batch, padded(limits, bare.layout.needs(batch), padding))
        batch, packed = repeated
        call = bare.run(batch, packed)
        given_embeds = call.kwargs["inputs_embeds"]
        assert call.kwargs["input_ids"] is None and given_embeds.dtype == dtype and given_embeds.isfinite().all()
        num_given = 0
        for index, name in enumerate(batch.req_ids):
            for offset in range(wanted[name]):
                position, token = computed[name] + offset, int(batch.query_start[index]) + offset
                want = table[tokens[name][position]]
                if name in embeds and position < len(embeds[name]):
                    want = embeds[name][position].float().to(dtype)
                    num_given += 1
                assert torch.equal(given_embeds[token], want), f"{name} at {position}"
        lengths = {SMALLEST_PIECE * 2**power for power in range(4)} | {90 * count}
        assert num_written == ([min(length for length in lengths if length >= num_given)] if num_given else [])
        assert ops.num_floats - num_floats == len(num_written)
        sampled = rng.integers(0, 500, packed.size.num_logits).tolist()
        bare.commit(call, sampled)
        for index, name in enumerate(batch.req_ids):
            computed[name] += wanted[name]
            if computed[name] == len(tokens[name]):
                tokens[name].append(sampled[index])


def test_compiled_graphs_serve_both(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    prompts = random_prompts(72, [1, 7, 33, 64, 90])
    embeds = embeddings(model, prompts)
    options = {"enable_prompt_embeds": True, "additional_config": {"neuron_config": FEW_BUCKETS}}
    with engine(model.path, max_model_len=256, **options) as llm:
        warm = compilations()
        for first in (0, 1):
            assert run(llm, alternating(prompts, embeds, first)) == expected(model, prompts)
        assert compilations() == warm


def test_what_the_model_cannot_take_is_refused(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama")
    cases: list[tuple[torch.Tensor, dict[str, Any], str]] = [
        (torch.zeros(5, 32), {}, r"must be \[tokens, 64\] .* got \[5, 32\]"),
        (torch.zeros(0, 64), {}, r"with a token at least, got \[0, 64\]"),
        (torch.zeros(5, 64, dtype=torch.int64), {}, "floating-point"),
        (torch.full((5, 64), float("nan")), {}, "finite"),
        (torch.full((5, 64), float("inf")), {}, "finite"),
        (torch.zeros(5, 64), {"prompt_logprobs": 1}, "leave one of them out"),
    ]
    (prompt,) = random_prompts(73, [9])
    with engine(model.path, max_model_len=128, enforce_eager=True, enable_prompt_embeds=True) as llm:
        for embeds, options, message in cases:
            with pytest.raises(ValueError, match=message):
                run(llm, [{"prompt_embeds": embeds}], **options)
        assert run(llm, [{"prompt_token_ids": list(prompt)}]) == expected(model, [prompt])


@pytest.mark.skipif(HAS_OPENXLA, reason="this release of vLLM has no such prompts")
def test_tokens_and_embeddings_in_one_prompt(tiny_model: Callable[[str], TinyModel]) -> None:
    """A prompt with embeddings between tokens gives the tokens of the whole prompt by ids, in chunks and with a cached
    prefix. Its placeholders have ids outside of the vocabulary."""
    model = tiny_model("llama")
    prompts = random_prompts(74, [5, 33, 64, 90])
    embeds = embeddings(model, prompts)
    rng = np.random.default_rng(5)
    asked = []
    for prompt, rows in zip(prompts, embeds, strict=True):
        is_token = rng.random(len(prompt)) < 0.5
        is_token[:2] = True, False
        asked.append(
            {
                "prompt_embeds": rows.masked_fill(torch.from_numpy(is_token).unsqueeze(1), 0.0),
                "prompt_token_ids": np.where(is_token, prompt, 10**6).tolist(),
                "prompt_is_token_ids": is_token.tolist(),
            }
        )
    zero: dict[str, Any] = {"prompt_embeds": torch.zeros(40, 64), "prompt_token_ids": [0] * 40}
    with engine(model.path, max_model_len=128, enforce_eager=True, enable_prompt_embeds=True) as llm:
        assert run(llm, asked) == expected(model, prompts)
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert run(llm, asked[::-1]) == expected(model, prompts[::-1])
        assert metric(llm, "vllm:prefix_cache_hits") > hits, "the prefix cache was not hit"
        # Token 0 and an embedding of zeros have the same id and the same row: the cache must not mix them up.
        got = [
            run(llm, [zero | {"prompt_is_token_ids": [True] * count + [False] * (40 - count)}])[0] for count in (1, 39)
        ]
        hf = reference(model)
        for count, tokens in zip((1, 39), got, strict=True):
            whole = torch.cat(
                (hf.get_input_embeddings()(torch.zeros(count, dtype=torch.long)), torch.zeros(40 - count, 64))
            )
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
            assert tokens == hf.generate(inputs_embeds=whole[None], **options)[0].tolist()
        for change, message in (
            ({"prompt_is_token_ids": [True] * 40}, "names no embedding"),
            ({"prompt_is_token_ids": [True] * 39}, "must have one length, got 40, 40 and 39"),
            ({"prompt_is_token_ids": [True] * 39 + [False], "prompt_token_ids": [10**6] * 40}, "out of vocabulary"),
            ({"prompt_is_token_ids": [False] * 40, "prompt_embeds": torch.full((40, 64), torch.nan)}, "finite"),
        ):
            with pytest.raises(ValueError, match=message):
                run(llm, [zero | change])
        with pytest.raises(ValueError, match="repetition_penalty counts the tokens of a prompt"):
            run(llm, asked, repetition_penalty=1.5)
        assert run(llm, asked[:1]) == expected(model, prompts[:1])
