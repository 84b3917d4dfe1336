"""LoRA adapters: each request has the tokens of a model with its adapter merged into the weights."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import LLM
from vllm.lora.request import LoRARequest

from model_runner_base.testing.adapters import ATTENTION, EVERYWHERE, EXPERTS, TinyAdapter, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric, runner_of, sampled
from model_runner_base.testing.logprobs import check_logprobs, check_prompt_logprobs
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.precision import NotLooked
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.table import refusal

OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 16}
NEW_TOKENS = 10
Adapters = Sequence[TinyAdapter | None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def adapters(tiny_model: Callable[[str], TinyModel], directory: Path) -> list[TinyAdapter]:
    """Adapters of ranks 1 to 16: of attention, of all layers, of MLP and head, with another scale, of queries and
    embeddings."""
    model = tiny_model("llama").path
    return [
        make_adapter(model, directory, 1, rank=8),
        make_adapter(model, directory, 2, rank=16, targets=EVERYWHERE),
        make_adapter(model, directory, 3, rank=2, targets=("down_proj", "gate_proj", "lm_head")),
        make_adapter(model, directory, 4, rank=1, use_rslora=True),
        make_adapter(model, directory, 5, rank=4, targets=("q_proj", "embed_tokens")),
    ]


@pytest.fixture
def llm(text_engine: Callable[..., LLM]) -> LLM:
    """An engine with two slots, and places for four adapters on the host."""
    return text_engine(**OPTIONS)


def run(llm: LLM, model: TinyModel, requests: Sequence[Request], adapters: Adapters) -> None:
    """Runs the requests in one batch, each with its adapter, and compares each with its own merged model."""
    outputs = generate(
        llm,
        [request.prompt for request in requests],
        [request.params for request in requests],
        [adapter.request if adapter else None for adapter in adapters],
    )
    for request, adapter, output in zip(requests, adapters, outputs, strict=True):
        reference = adapter.merged if adapter else model
        where = f"{model.path.name} with {adapter.name if adapter else 'no adapter'}"
        for completion in output.outputs:
            check_tokens(reference, request, completion.token_ids, adapter.request if adapter else None, where)
            if request.params.logprobs is not None:
                try:
                    check_logprobs(reference, request, completion, "raw_logprobs")
                except AssertionError as error:
                    error.args = (f"{where}: {error}",)
                    raise
        if request.params.prompt_logprobs is not None:
            check_prompt_logprobs(reference, request, output)


def greedy_requests(seed: int, lengths: Sequence[int]) -> list[Request]:
    return [Request(prompt, greedy(NEW_TOKENS)) for prompt in random_prompts(seed, list(lengths))]


def test_adapters_differ(text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    """The reference's tokens differ with each adapter, so the checks would notice a wrong one."""
    (prompt,) = random_prompts(0, [20])
    models = [text_model, *(adapter.merged for adapter in adapters)]
    assert len({tuple(model.greedy(prompt, NEW_TOKENS, is_certain=False)) for model in models}) == len(models)


def test_adapter_alone(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    """A request with each adapter, its prompt cut into chunks; then one without, while the slots are full."""
    for adapter in (*adapters, None):
        run(llm, text_model, greedy_requests(1, [90]), [adapter])


def test_adapters_in_one_batch(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    """Two adapters and none side by side, in every order; chunks and decodes share steps."""
    for seed, (first, second) in enumerate([(0, 1), (1, 0), (2, 3), (4, 1), (3, 4)]):
        one, other = adapters[first], adapters[second]
        run(llm, text_model, greedy_requests(seed, [5, 70, 1, 100, 33, 64]), [one, None, other, one, other, None])


def test_more_adapters_than_slots(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    """Requests wait for a slot; adapters leave the host, and come back when they are asked for."""
    rng = np.random.default_rng(2)
    for seed in range(3):
        chosen = [[None, *adapters][index] for index in rng.integers(0, len(adapters) + 1, 12)]
        run(llm, text_model, greedy_requests(seed, rng.choice([1, 9, 40, 80], 12).tolist()), chosen)
    assert len(llm.llm_engine.list_loras()) <= OPTIONS["max_cpu_loras"]


def test_preemption(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    preemptions = metric(llm, "vllm:num_preemptions")
    requests = [Request(prompt, greedy(90)) for prompt in random_prompts(3, [60, 70, 80, 90])]
    run(llm, text_model, requests, [adapters[0], adapters[1], None, adapters[0]])
    check_preempted(llm, preemptions)


def test_log_probabilities(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    """Log-probabilities of outputs and of prompts, which an adapter of the head changes, too."""
    prompts = random_prompts(4, [70, 8, 40])
    requests = [Request(prompt, sampled(6, temperature=0, logprobs=3, prompt_logprobs=2)) for prompt in prompts]
    for adapter in (adapters[1], adapters[2]):
        run(llm, text_model, requests, [adapter, None, adapter])


def test_sampling_rules(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    prompts = random_prompts(5, [8, 40, 12, 30])
    options: list[dict[str, Any]] = [
        {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0, "allowed_token_ids": list(range(40, 60))},
        {"temperature": 1.2, "seed": 1, "top_k": 4},
        {"temperature": 0.8, "seed": 2, "top_p": 0.5, "frequency_penalty": 0.5},
    ]
    requests = [Request(p, sampled(NEW_TOKENS, **each)) for p, each in zip(prompts, options, strict=True)]
    run(llm, text_model, requests, [adapters[2], adapters[1], adapters[1], None])


@pytest.mark.usefixtures("llm")  # A device without adapters refuses here.
def test_adapters_of_experts(
    engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """Adapters of experts and none in one batch, with prompts in chunks; tokens of each share an expert.

    A device without experts is not looked at.
    """
    model = tiny_model("qwen3-moe")
    one = make_adapter(model.path, tmp_path, 1, rank=8, targets=(*ATTENTION, EXPERTS))
    other = make_adapter(model.path, tmp_path, 2, rank=2, targets=(EXPERTS,))
    (prompt,) = random_prompts(0, [20])
    models = (model, one.merged, other.merged)
    assert len({tuple(each.greedy(prompt, NEW_TOKENS, is_certain=False)) for each in models}) == 3
    try:
        llm = engine(model.path, **OPTIONS)
        llm.llm_engine.add_lora(one.request)
    except (ValueError, NotImplementedError) as error:
        if (words := refusal(error)) is None:
            raise
        raise NotLooked(words) from error
    run(llm, model, greedy_requests(11, [5, 70, 1, 33]), [one, None, other, one])
    run(llm, model, greedy_requests(12, [40, 12, 90]), [None, other, one])


def test_cached_prefixes(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    """A prefix that was cached under one adapter serves that adapter alone."""
    (prompt,) = random_prompts(6, [80])
    request = Request(prompt, greedy(NEW_TOKENS))
    for adapter in (adapters[0], adapters[1], None):
        hits = metric(llm, "vllm:prefix_cache_hits")
        run(llm, text_model, [request], [adapter])
        assert metric(llm, "vllm:prefix_cache_hits") == hits, "another adapter's prefix was taken"
        run(llm, text_model, [request], [adapter])
        assert metric(llm, "vllm:prefix_cache_hits") > hits, "its own was not"


def test_new_files_under_an_old_name(
    llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter], tmp_path: Path
) -> None:
    """New files under an adapter's name are refused, or the prefixes cached under that name are forgotten."""
    (prompt,) = random_prompts(7, [80])
    request = Request(prompt, greedy(NEW_TOKENS))
    run(llm, text_model, [request], [adapters[0]])
    other = make_adapter(text_model.path, tmp_path, 6)
    renamed = LoRARequest(adapters[0].name, 7, str(other.path))
    try:
        llm.llm_engine.add_lora(renamed)
    except ValueError as error:
        assert adapters[0].name in str(error)
    else:
        (output,) = generate(llm, [prompt], request.params, [renamed])
        where = f"{text_model.path.name} with new files of {renamed.lora_name}"
        check_tokens(other.merged, request, output.outputs[0].token_ids, renamed, where)
    run(llm, text_model, [request], [adapters[0]])


def test_adding_and_removing(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    """Adapters are added, pinned and removed by hand, also while a request runs: it keeps its tokens."""
    engine = llm.llm_engine
    for number in engine.list_loras():
        assert engine.remove_lora(number)
    assert engine.list_loras() == set() and not engine.remove_lora(1)
    assert engine.add_lora(adapters[0].request) and engine.list_loras() == {1}
    assert engine.pin_lora(1)
    (prompt,) = random_prompts(8, [30])
    engine.add_request("running", {"prompt_token_ids": list(prompt)}, greedy(40), lora_request=adapters[1].request)
    tokens: list[int] = []
    for step in range(200):
        if step % 5 == 4:  # Each takes the slot of the least recently used, and at last a place on the host.
            engine.add_lora(adapters[2 + step // 5 % 3].request)
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)  # type: ignore[union-attr, index]
        if not engine.has_unfinished_requests():
            break
    where = f"{text_model.path.name} with {adapters[1].name}"
    check_tokens(adapters[1].merged, Request(prompt, greedy(40)), tokens, adapters[1].request, where)
    assert len(tokens) == 40
    assert 1 in engine.list_loras(), "a pinned adapter was evicted"
    engine.remove_lora(1)
    run(llm, text_model, [Request(prompt, greedy(NEW_TOKENS))], [adapters[0]])


def test_nothing_is_compiled(llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter]) -> None:
    """Nothing is compiled for loading an adapter of any rank into any slot, nor for any mixture in a batch."""
    policy = runner_of(llm).graph_policy
    warm, rng = policy.num_compilations(), np.random.default_rng(9)
    for seed in range(4):
        for number in llm.llm_engine.list_loras():
            if rng.random() < 0.5:
                llm.llm_engine.remove_lora(number)
        chosen = [[None, *adapters][index] for index in rng.integers(0, len(adapters) + 1, 6)]
        run(llm, text_model, greedy_requests(seed, rng.choice([1, 9, 40, 80], 6).tolist()), chosen)
    assert policy.num_compilations() == warm


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _remove(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_config.json").unlink()


def _truncate(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


BAD: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "missing": ({}, _remove, "No adapter found"),
    "cut short": ({}, _truncate, ""),
    "of another model": ({"of": "wide"}, lambda path: None, "does not fit"),
    "rank": ({"rank": 32}, lambda path: None, "rank"),
    "DoRA": ({}, _config(use_dora=True), "DoRA"),
    "bias": ({}, _config(bias="all"), "bias"),
    "modules_to_save": ({}, _config(modules_to_save=["lm_head"]), "modules_to_save"),
    "alpha_pattern": ({}, _config(alpha_pattern={"q_proj": 4}), "alpha_pattern"),
    "no LoRA": ({}, _config(peft_type="IA3"), "IA3"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_adapters(fault: str, llm: LLM, text_model: TinyModel, adapters: list[TinyAdapter], tmp_path: Path) -> None:
    """A bad adapter is refused with a message; other adapters and requests go on, and the slot is free."""
    options, spoil, words = BAD[fault]
    options = dict(options)
    model = text_model.path
    if options.pop("of", None):
        model = wider(tmp_path)
    bad = make_adapter(model, tmp_path, 60 + list(BAD).index(fault), **options)
    spoil(bad.path)
    before = llm.llm_engine.list_loras()
    with pytest.raises(Exception) as raised:
        llm.llm_engine.add_lora(bad.request)
    assert words in str(raised.value), raised.value
    assert llm.llm_engine.list_loras() == before
    run(llm, text_model, greedy_requests(10, [20, 30, 10]), [adapters[0], adapters[1], None])


def wider(directory: Path) -> Path:
    """A checkpoint of twice the hidden size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from model_runner_base.testing.architectures import CONFIGS

    config = CONFIGS["llama"]()
    config.hidden_size *= 2
    path = directory / "wide"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict())).save_pretrained(path)
    return path
