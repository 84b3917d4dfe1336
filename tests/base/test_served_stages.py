"""Pipeline stages with what they are served with: each engine has the tokens, or values, of HF transformers.

The tests of messages between stages, and of errors, are in ``test_stages.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import engine
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

from model_runner_base.errors import RequestError
from model_runner_base.inputs.adapters.inputs import SECTION, AdapterInputs
from model_runner_base.testing.adapters import EVERYWHERE, make_adapter
from model_runner_base.testing.architectures import UNTIED
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_lora import greedy_requests, run
from model_runner_base.testing.checks.test_multimodal import ask, check_read, expected, prompts
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric
from model_runner_base.testing.images import TOKEN_BYTES, make_seeing_model
from model_runner_base.testing.logprobs import check_all
from model_runner_base.testing.models import TinyModel, vary
from model_runner_base.testing.pooling import make_pooling_model
from model_runner_base.testing.pooling_requests import check_values, pool
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.tokenizer import add_tokenizer

pytestmark = pytest.mark.newest
SHARED: dict[str, Any] = {"enforce_eager": True, "pipeline_parallel_size": 2, "max_num_batched_tokens": 32}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8}
TEXT: dict[str, dict[str, Any]] = {
    "three stages, in turn": {"pipeline_parallel_size": 3, "async_scheduling": False},
    "two stages of two ranks": {"tensor_parallel_size": 2, "async_scheduling": True},
}
"""Engines of text: synchronous and asynchronous scheduling, with an odd and an even number of stages."""


@contextmanager
def staged(path: Path, **options: Any) -> Iterator[LLM]:
    """An engine with stages; vLLM schedules them asynchronously with the contract of its second model runner alone."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if options["async_scheduling"]:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        with engine(path, **SHARED | options) as llm:
            yield llm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A Llama of three layers, with a tokenizer."""
    path = tmp_path_factory.mktemp("three") / "llama"
    torch.manual_seed(59)
    llama = LlamaForCausalLM(LlamaConfig(**UNTIED | {"num_hidden_layers": 3}))
    for name, parameter in llama.named_parameters():
        vary(name, parameter)
    llama.save_pretrained(path)
    return add_tokenizer(TinyModel(path))


@pytest.fixture(scope="module", params=TEXT.values(), ids=TEXT.keys())
def llm(request: pytest.FixtureRequest, model: TinyModel) -> Iterator[LLM]:
    with staged(model.path, **LORA | {"max_model_len": 128, "skip_tokenizer_init": False} | request.param) as llm:
        yield llm


def test_text(llm: LLM, model: TinyModel) -> None:
    """Greedy tokens, rules for logits, log probabilities of outputs and of prompts; more requests than rows."""
    rules: list[dict[str, Any]] = [{"logprobs": 2, "prompt_logprobs": 1}, {}, {"presence_penalty": 1.5, "logprobs": 0}]
    lengths = [5, 40, 70, 17, 33, 1]
    requests = [
        Request(prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, **rules[index % 3]))
        for index, prompt in enumerate(random_prompts(59, lengths))
    ]
    check_all(llm, model, requests)
    check_all(llm, model, requests[::-1])


def test_adapters(llm: LLM, model: TinyModel, tmp_path: Path) -> None:
    """Stages have their own layers' matrices; a batch repeats while adapters of another one take slots."""
    one, other = (make_adapter(model.path, tmp_path, number, targets=EVERYWHERE) for number in (1, 2))
    last = make_adapter(model.path, tmp_path, 3, part="layers.2.")
    run(llm, model, greedy_requests(1, [5, 70, 1, 40]), [one, None, last, one])
    lengths, counts = [9, 12, 7, 11, 8, 6, 5], [60, 4, 5, 4, 5, 4, 5]
    requests = [Request(p, greedy(count)) for p, count in zip(random_prompts(2, lengths), counts, strict=True)]
    run(llm, model, requests, [one, other, last, other, last, other, last])


def test_a_step_is_not_repeated_with_the_adapter_of_another_batch() -> None:
    """A request with adapter 7 in slot 0 and one without; then another batch's adapter takes a free slot, and that."""
    wanted: Any = [SimpleNamespace(adapter=SimpleNamespace(lora_int_id=7)), SimpleNamespace(adapter=None)]
    requests: Any = SimpleNamespace(max_num_reqs=4, infos_of=lambda rows: wanted)
    adapters: Any = SimpleNamespace(batches_take_turns=True, ids=[7, None], ready=lambda asked: {7: 0})
    rows = np.array([2, 3])
    batch: Any = SimpleNamespace(
        rows=rows, query_start=rows - 2, query_len=np.ones_like(rows), num_decodes=2, decode_query_len=1
    )
    inputs, size = AdapterInputs(requests, adapters), cast(Any, None)
    inputs.fill(batch, size, {SECTION: np.zeros(4, np.int32)})
    (updater,) = inputs.repeat(batch, cast(Any, None))
    assert updater.advance(rows)
    adapters.ids = [7, 8]
    assert updater.advance(rows)
    adapters.ids = [9, 8]
    assert not updater.advance(rows)


def test_an_adapter_that_one_stage_cannot_serve(llm: LLM, model: TinyModel, tmp_path: Path) -> None:
    """Refusal of the request alone, before any stage has loaded the adapter."""
    good, wrong = (make_adapter(model.path, tmp_path, number, rank=4) for number in (11, 12))
    tensors = load_file(wrong.path / "adapter_model.safetensors")
    (name,) = (each for each in tensors if "layers.2.self_attn.o_proj.lora_B" in each)
    save_file(tensors | {name: torch.ones(65, 4)}, wrong.path / "adapter_model.safetensors")
    before = llm.collective_rpc("list_loras")
    with pytest.raises(RequestError, match=r"layers.2.self_attn.o_proj has a matrix of shape \[65, 4\] where the"):
        run(llm, model, greedy_requests(3, [6]), [wrong])
    assert llm.collective_rpc("list_loras") == before
    run(llm, model, greedy_requests(4, [6, 30]), [good, None])


def test_vectors(tmp_path: Path) -> None:
    model, texts = make_pooling_model("qwen3", tmp_path), random_prompts(95, [1, 2, 17, 40, 64, 90, 128, 33])
    with staged(model.path, **model.options, max_model_len=128, async_scheduling=False) as llm:
        check_values(model, texts, pool(llm, texts, model.task), model.task)
        check_values(model, texts[::-1], pool(llm, texts[::-1], model.task), model.task)


def test_states(tiny_model: Callable[[str], TinyModel]) -> None:
    """A stage has the states of its own recurrent layers, also those that are kept for later prompts."""
    model, texts = tiny_model("falcon-h1"), random_prompts(99, [1, 2, 5, 33, 90, 130])
    options = {"max_model_len": 256, "enable_prefix_caching": True, "block_size": 16, "async_scheduling": True}
    with staged(model.path, **options) as llm:
        for asked in (texts, [(*text, 7, 8, 9) for text in texts[::-1]]):
            outputs = generate(llm, asked, greedy(16))
            for text, output in zip(asked, outputs, strict=True):
                check_tokens(model, Request(text, greedy(16)), output.outputs[0].token_ids)


def test_images(tmp_path: Path) -> None:
    """The first stage encodes them, and each rotates tokens by height and width."""
    model = make_seeing_model("qwen3-vl", tmp_path)
    asked = prompts(model)
    options = model.limits | {"skip_tokenizer_init": False, "max_model_len": 256, "async_scheduling": True}
    options |= {"kv_cache_memory_bytes": 192 * TOKEN_BYTES, "max_num_batched_tokens": 24}  # Requests are preempted.
    with staged(model.path, **options) as llm:
        num_before = metric(llm, "vllm:num_preemptions")
        check_read(ask(llm, asked), expected(model, asked))
        check_read(ask(llm, asked[::-1]), expected(model, asked[::-1]))
        check_preempted(llm, num_before)
