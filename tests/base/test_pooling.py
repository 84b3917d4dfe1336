"""Pooling models equal HF transformers in float32: vectors, classes and scores of prompts of any length."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compilations, engine
from vllm import LLM, PoolingParams, SamplingParams, envs
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.tasks import POOLING_TASKS

from model_runner_base.models.loader import CheckpointError
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import core_of, metric, runner_of
from model_runner_base.testing.pooling import KINDS, LOOSE, TOLERANCE, PoolingModel, make_pooling_model
from model_runner_base.testing.pooling_requests import check_arrivals, check_pairs, check_values, pool, task_of

Make = Callable[[str], PoolingModel]
PROMPTS = [*random_prompts(70, [1, 2, 3, 5, 16, 17, 33, 63, 64, 65, 90, 128]), (5, 7, 9, 7, 7, 11), (0, 7, 9, 8, 1)]
EAGER: dict[str, Any] = {"enforce_eager": True, "max_model_len": 128}
WHOLE = {"max_num_batched_tokens": 128}
"""Limits of models whose prompts are not cut: a step holds the longest one."""
NEWEST = "score" not in POOLING_TASKS
"""Whether this is a release whose engines serve one task each."""
OF_EACH_LANE = [
    *("qwen3", "qwen3-reranker", "llama-mean", "bert-classes", "xlm-roberta-reranker", "modernbert"),
    *("bert-colbert", "bge-m3"),
]
CUT = ["qwen3", "qwen3-classes", "qwen3-reranker", "qwen2-reward", "mistral-window"]
"""Models whose prompts may be cut into chunks."""


@pytest.fixture(scope="session")
def pooling_model(tmp_path_factory: pytest.TempPathFactory) -> Make:
    directory = tmp_path_factory.mktemp("pooling")
    return lambda name: make_pooling_model(name, directory)


def once_but(of_each_lane: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which only some are tested in each lane: engines of the newest vLLM start slowly."""
    return [value if value in of_each_lane else pytest.param(value, marks=pytest.mark.once) for value in values]


def options_of(model: PoolingModel) -> dict[str, Any]:
    limits = {} if model.name in CUT else WHOLE
    return EAGER | limits | model.options


def tasks_of(llm: LLM, model: PoolingModel) -> list[str]:
    """The model's own task, and vectors of tokens where the engine serves both."""
    if model.task != "embed" or NEWEST:
        return [task_of(llm, model)]
    return ["embed", "token_embed", *(["token_classify"] if model.name == "bge-m3" else [])]


@pytest.mark.parametrize("name", once_but(OF_EACH_LANE, KINDS))
def test_equals_transformers(name: str, pooling_model: Make) -> None:
    """Tasks of a model, for requests alone and in batches, with and without the activation."""
    model = pooling_model(name)
    with engine(model.path, **options_of(model)) as llm:
        for task in tasks_of(llm, model):
            for prompt in PROMPTS[:3]:
                check_values(model, [prompt], pool(llm, [prompt], task), task)
            check_values(model, PROMPTS, pool(llm, PROMPTS, task), task)
            bare = pool(llm, PROMPTS, task, PoolingParams(use_activation=False))
            check_values(model, PROMPTS, bare, task, activated=False)


def check_random(llm: LLM, model: PoolingModel, prompts: list[tuple[int, ...]], rng: Any, num_aborted: int = 0) -> None:
    """Requests that arrive at any step, for vectors of prompts and of tokens where the model has both."""
    kinds = ["embed", "token_embed"] if model.task == "embed" and not NEWEST else [task_of(llm, model)]
    tasks = [str(each) for each in rng.choice(kinds, len(prompts))]
    check_arrivals(llm, model, prompts, tasks, rng, num_aborted)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("num_tokens", once_but([16], [3, 16]))
@pytest.mark.parametrize("name", once_but(["qwen3"], ["qwen3", "qwen2-reward"]))
def test_chunks(name: str, num_tokens: int, is_async: bool, pooling_model: Make) -> None:
    """Small chunks of requests that arrive at any step, for vectors of prompts and of tokens at once."""
    model, rng = pooling_model(name), np.random.default_rng(5)
    limits = {"max_num_batched_tokens": num_tokens, "max_num_seqs": 3, "async_scheduling": is_async}
    with engine(model.path, **options_of(model) | limits) as llm:
        check_random(llm, model, PROMPTS, rng)
        check_random(llm, model, random_prompts(71, [40, 9, 77, 128, 1, 30, 2, 64]), rng, num_aborted=3)
        assert not runner_of(llm).parts.head._pieces


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("name", once_but(["qwen3"], ["qwen3", "qwen3-classes"]))
def test_few_blocks_preempt(name: str, is_async: bool, pooling_model: Make) -> None:
    """Requests that share the steps and run out of blocks: a preempted one is computed from its first token on."""
    model, rng = pooling_model(name), np.random.default_rng(6)
    limits = {"block_size": 16, "num_gpu_blocks_override": 14, "long_prefill_token_threshold": 16}
    with engine(
        model.path, **options_of(model) | limits, async_scheduling=is_async, enable_prefix_caching=False
    ) as llm:
        check_random(llm, model, random_prompts(72, [128, 100, 90, 128, 110, 70, 128, 128]), rng)
        assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"


@pytest.mark.parametrize("is_async", once_but([True], [True, False]), ids=["async", "sync"])
def test_second_contract(is_async: bool, pooling_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that takes the worker for vLLM's second model runner calls requests new that resume."""
    model, rng = pooling_model("qwen3"), np.random.default_rng(7)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    envs.disable_envs_cache()
    limits = {"block_size": 16, "num_gpu_blocks_override": 14, "long_prefill_token_threshold": 16}
    with engine(
        model.path, **options_of(model) | limits, async_scheduling=is_async, enable_prefix_caching=False
    ) as llm:
        assert core_of(llm).scheduler.use_v2_model_runner
        check_random(llm, model, random_prompts(75, [128, 100, 90, 128, 110, 70, 128, 128]), rng)
        assert metric(llm, "vllm:num_preemptions") > 0, "nothing was preempted"
    envs.disable_envs_cache()


def test_prefix_cache(pooling_model: Make) -> None:
    """A vector of a prompt whose beginning is cached is the same; vectors of tokens compute all of it."""
    model = pooling_model("qwen3")
    shared = random_prompts(73, [70])[0]
    prompts = [shared + tail for tail in random_prompts(74, [1, 5, 20, 58])]
    with engine(model.path, **options_of(model), block_size=16, enable_prefix_caching=True) as llm:
        for prompt in prompts:
            check_values(model, [prompt], pool(llm, [prompt], "embed"), "embed")
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert hits >= 3 * 64
        if NEWEST:
            return
        check_values(model, prompts, pool(llm, prompts, "token_embed"), "token_embed")
        assert metric(llm, "vllm:prefix_cache_hits") == hits
        with pytest.raises(ValueError, match="every token of the prompt computed"):
            pool(llm, prompts, "token_embed", PoolingParams(skip_reading_prefix_cache=False))


def test_parameters_of_one_batch(pooling_model: Make) -> None:
    """Dimensions, and whether a vector is normalised, are each request's own."""
    model, prompt = pooling_model("qwen3"), PROMPTS[6]
    with engine(model.path, **options_of(model)) as llm:
        params = [
            PoolingParams(dimensions=size, use_activation=flag) for size in (8, 64, None) for flag in (True, False)
        ]
        values = pool(llm, [prompt] * len(params), "embed", params)
        for each, value in zip(params, values, strict=True):
            want = model.value(prompt, "embed", activated=False)[: each.dimensions]
            want = torch.nn.functional.normalize(want, dim=-1) if each.use_activation else want
            assert value.shape == want.shape and (value - want).abs().max() < LOOSE
        for bad in (PoolingParams(dimensions=65), PoolingParams(dimensions=0), PoolingParams(step_tag_id=3)):
            with pytest.raises((ValueError, VLLMValidationError)):
                pool(llm, [prompt], "embed", bad)
        with pytest.raises((ValueError, VLLMValidationError), match="128"):
            pool(llm, [[5] * 129], "embed")
        with pytest.raises((ValueError, VLLMValidationError), match="out of vocabulary"):
            pool(llm, [[5, 512]], "embed")
        with pytest.raises((ValueError, VLLMValidationError)):
            pool(llm, [prompt], "classify")
        with pytest.raises((ValueError, RuntimeError)):
            llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1))
        check_values(model, PROMPTS, pool(llm, PROMPTS, "embed"), "embed")


def test_a_request_that_cannot_be_pooled_fails_alone(pooling_model: Make) -> None:
    model = pooling_model("qwen2-process-reward")
    prompts = [(5, 7, 9, 7, 7, 11), (7, 7, 6)]
    with engine(model.path, **options_of(model)) as llm:
        check_values(model, prompts, pool(llm, prompts, "token_classify"))
        params = [PoolingParams(), PoolingParams(returned_token_ids=[0, 9])]
        core = llm.llm_engine
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            each.task = "token_classify"
            core.add_request(str(index), TokensPrompt(prompt_token_ids=list(prompt)), each)
        done = []
        while core.has_unfinished_requests():
            done += core.step()
        first, second = (next(each for each in done if each.request_id == name).outputs.data for name in ("0", "1"))
        check_values(model, prompts[:1], [first])
        assert not second.numel(), "a request that failed has a result"
        check_values(model, prompts, pool(llm, prompts, "token_classify"))


QUERIES, DOCUMENTS = ["what is a cat", "is it"], ["an animal", "a kind of boat with a sail"]


def test_pairs_with_token_types(pooling_model: Make) -> None:
    """Scores of pairs of token ids and of texts; the types of tokens change them."""
    model = pooling_model("bert-reranker")
    with engine(model.path, **options_of(model)) as llm:
        check_pairs(llm, model, [(prompt, len(prompt) // 3) for prompt in PROMPTS])
        tokenizer, outputs = llm.get_tokenizer(), llm.score(QUERIES, DOCUMENTS, use_tqdm=False)
        for output, query, document in zip(outputs, QUERIES, DOCUMENTS, strict=True):
            encoded = tokenizer(query, document)
            second = encoded["token_type_ids"].index(1)
            (want,) = model.value(encoded["input_ids"], "score", second=second)
            (other,) = model.value(encoded["input_ids"], "score")
            assert abs(want - other) > 10 * TOLERANCE, "token types change nothing"
            assert abs(output.outputs.score - want) < TOLERANCE


def test_pairs_for_a_decoder(pooling_model: Make) -> None:
    """Scores of pairs of texts by a model of text that is converted to a reranker."""
    model = pooling_model("qwen3-reranker")
    with engine(model.path, **options_of(model)) as llm:
        outputs = llm.score(QUERIES, DOCUMENTS, use_tqdm=False)
        for output in outputs:
            (want,) = model.value(output.prompt_token_ids)
            assert abs(output.outputs.score - want) < TOLERANCE
        assert len({len(output.prompt_token_ids) for output in outputs}) == 2


@pytest.mark.openxla
def test_bfloat16(pooling_model: Make) -> None:
    """Vectors point where those of float32 do; the pooler's own layers are in float32."""
    model = pooling_model("qwen3")
    with engine(model.path, **options_of(model) | {"dtype": "bfloat16"}) as llm:
        got = torch.stack(pool(llm, PROMPTS, "embed"))
    want = torch.stack([model.value(prompt) for prompt in PROMPTS])
    assert got.dtype == torch.float32 and ((got * want).sum(1) > 0.99).all()
    assert (want @ want.T < 0.98).any(), "vectors of all prompts point to one side"


@pytest.mark.openxla
@pytest.mark.parametrize("name", ["qwen3", "bert-reranker", "modernbert"])
def test_compiled(name: str, pooling_model: Make) -> None:
    """The same values by graphs, of mixed steps alone, and no compilation after warm-up."""
    model, few = pooling_model(name), {"neuron_config": {"max_padding": 0.5}}
    with engine(model.path, **options_of(model) | {"enforce_eager": False}, additional_config=few) as llm:
        runner = runner_of(llm)
        assert {str(size.kind) for size in runner.graph_policy.sizes} == {"mixed"}
        before = compilations()
        for prompt in PROMPTS[:4]:
            check_values(model, [prompt], pool(llm, [prompt], task_of(llm, model)))
        check_values(model, PROMPTS, pool(llm, PROMPTS, task_of(llm, model)))
        assert compilations() == before


def test_weights_are_not_loaded_again(pooling_model: Make) -> None:
    model = pooling_model("qwen3")
    with engine(model.path, **options_of(model)) as llm:
        with pytest.raises(CheckpointError, match="start another engine; nothing was changed"):
            llm.collective_rpc("reload_weights")
        check_values(model, PROMPTS[:4], pool(llm, PROMPTS[:4], "embed"))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("bert", {"enable_lora": True}, "leave out enable_lora"),
        ("llama-mean", {"enable_chunked_prefill": True}, "leave out enable_chunked_prefill"),
        ("bert", {"enable_chunked_prefill": True}, "leave out enable_chunked_prefill"),
        ("llama-mean", {"enable_prefix_caching": True}, "leave out enable_prefix_caching"),
        ("qwen3", {"enable_prompt_embeds": True}, "leave out enable_prompt_embeds"),
        ("bert", {"hf_overrides": {"architectures": ["RobertaForMaskedLM"]}}, "RobertaForMaskedLM.* use a decoder"),
        pytest.param(
            *("bert", {"hf_overrides": {"architectures": ["GritLM"]}}, "without a pooler of its own"),
            marks=pytest.mark.once,
        ),
        ("bert", {"pooler_config": {"enable_chunked_processing": True}}, "leave enable_chunked_processing out"),
    ],
)
def test_what_is_not_served_is_refused(name: str, options: dict[str, Any], words: str, pooling_model: Make) -> None:
    model = pooling_model(name)
    with pytest.raises(ValueError, match=words), engine(model.path, **options_of(model) | options):
        pass
