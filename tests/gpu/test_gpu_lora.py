"""LoRA on the GPU runner: metadata that a step's graph writes for vLLM's kernels, their products, and the tokens."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gpu_runner import run
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
from vllm.lora.punica_wrapper import punica_gpu

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.inputs.adapters.kernels import KernelProducts
from model_runner_base.testing.adapters import EVERYWHERE, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.models import make_checkpoint
from model_runner_base.testing.reference import logits_after

NUM_SLOTS, MAX_TOKENS, VOCAB_SIZE = 3, 24, 100
TRITON = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
"""vLLM's own kernels, in Triton's interpreter."""


def make_wrapper() -> punica_gpu.PunicaWrapperGPU:
    """vLLM's own wrapper, with the class of the buffers, which its module lacks where Triton is of no use."""
    config = SimpleNamespace(max_loras=NUM_SLOTS, specialize_active_lora=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
        return punica_gpu.PunicaWrapperGPU(MAX_TOKENS, 8, torch.device("cpu"), lora_config=config)


def tokens_by_slot(meta: LoRAKernelMeta, count: int) -> dict[int, list[int]]:
    """Tokens that each program of a launch finds, by the slot whose matrices it takes."""
    _, indices, num_tokens, starts, ids, no_lora_flag, num_programs = meta.meta_args(count, False)
    assert not no_lora_flag.item(), "a graph that is captured with the flag never multiplies"
    found = {}
    for program in range(num_programs):
        if (slot := int(ids[program])) != -1:
            start = int(starts[program])
            found[slot] = indices[start : start + int(num_tokens[program])].tolist()
    return found


slots_of_step = st.lists(st.integers(-1, NUM_SLOTS - 1), min_size=1, max_size=MAX_TOKENS)


@given(steps=st.lists(st.tuples(slots_of_step, slots_of_step), min_size=1, max_size=4))
@settings(max_examples=examples(100), deadline=None)
def test_each_program_finds_the_tokens_of_its_slot(steps: list[tuple[list[int], list[int]]]) -> None:
    """Steps follow one another in the same buffers, which graphs know by their addresses."""
    wrapper = make_wrapper()
    products = KernelProducts(wrapper)
    products.vocab_size = VOCAB_SIZE
    metas = wrapper.token_mapping_meta, wrapper.prompt_mapping_meta

    def addresses() -> list[int]:
        tensors = [value for meta in metas for value in vars(meta).values() if isinstance(value, torch.Tensor)]
        return [tensor.data_ptr() for tensor in (*tensors, wrapper._embeddings_indices)]

    before = addresses()
    for step in steps:
        products.bind(*(torch.tensor(slots, dtype=torch.int32) for slots in step))
        for meta, slots in zip(metas, step, strict=True):
            expected = {slot: [i for i, each in enumerate(slots) if each == slot] for slot in range(NUM_SLOTS)}
            assert tokens_by_slot(meta, len(slots)) == expected
            assert meta.token_lora_mapping[: len(slots)].tolist() == slots
        first_rows = torch.atleast_2d(wrapper._embeddings_indices)[-1, : len(step[0])].tolist()
        assert first_rows == [max(slot, 0) * VOCAB_SIZE for slot in step[0]]
        products.unbind()
    assert addresses() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float32}, r"do not take torch.float32: use --dtype bfloat16 or float16"),
        (
            {"lora_dtype": torch.bfloat16},
            r"torch.bfloat16 adapters with a torch.float16 model: leave out",
        ),
        ({"specialize_active_lora": True}, "one graph serves every batch: leave it out"),
    ],
)
def test_what_the_kernels_cannot_serve(changes: dict[str, Any], words: str) -> None:
    values = {"dtype": torch.float16, "lora_dtype": torch.float16, "specialize_active_lora": False} | changes
    config: Any = SimpleNamespace(lora_config=SimpleNamespace(**values), model_config=SimpleNamespace(**values))
    with pytest.raises(UnsupportedConfigError, match=words):
        KernelProducts.check(config)


PRODUCTS = """
from types import SimpleNamespace
import torch
from model_runner_base.testing.platform_choice import choose_platform
choose_platform("cuda_stand_in.KernelPlatform")
import cuda_stand_in
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.triton_utils import HAS_TRITON
from model_runner_base.inputs.adapters.kernels import KernelProducts

assert HAS_TRITON
torch.manual_seed(0)
slots, vocab_size, width, rank, parts = 3, 50, 40, 8, (48, 16, 16)
config = SimpleNamespace(max_loras=slots, specialize_active_lora=False)
wrapper = PunicaWrapperGPU(64, 8, torch.device("cpu"), lora_config=config)
products = KernelProducts(wrapper)
products.vocab_size = vocab_size

def random(*shape):
    return torch.randn(shape).half()

a, b = [random(slots, 1, rank, width) for _ in parts], [random(slots, 1, part, rank) for part in parts]
table, b_of_table = random(slots, vocab_size, rank), random(slots, 1, width, rank)
a_of_head, b_of_head = random(slots, 1, rank, width), random(slots, 1, vocab_size, rank)

def product(x, a, b):
    return b.float() @ (a.float() @ x.float())

for case in ([-1, 0, 1, 2, 1, 1, -1, 0, 2, 2, 2], [1], [-1, -1, -1], [2] * 40, [0, -1] * 20):
    of = torch.tensor(case, dtype=torch.int32)
    rows = torch.arange(0, len(case), 2)
    products.bind(of, of[rows])
    x, y, ids = random(len(case), width), random(len(case), sum(parts)), torch.arange(len(case))
    plain = random(len(case), width)
    logits = random(len(rows), vocab_size + 14)
    expected = [y.float(), plain.float(), logits.float()]
    for token, slot in enumerate(case):
        if slot != -1:
            expected[0][token] += torch.cat([product(x[token], p[slot, 0], q[slot, 0]) for p, q in zip(a, b)])
            expected[1][token] += b_of_table[slot, 0].float() @ table[slot, ids[token]].float()
            if token % 2 == 0:
                expected[2][token // 2, :vocab_size] += product(x[token], a_of_head[slot, 0], b_of_head[slot, 0])
    looked_up = table.view(-1, rank)[ids + torch.atleast_2d(wrapper._embeddings_indices)[-1, : len(case)]]
    wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, parts)
    wrapper.add_lora_embedding(plain, looked_up, b_of_table)
    wrapper.add_lora_logits(logits, x[rows], a_of_head, b_of_head, 1.0)
    for name, found, wanted in zip(("linear", "embedding", "logits"), (y, plain, logits), expected):
        torch.testing.assert_close(found.float(), wanted, rtol=0.01, atol=0.1, msg=lambda text: f"{name}: {text}")
print("RIGHT")
"""


def test_products_of_vllms_kernels() -> None:
    """Products of tokens whose slots a graph bound equal a loop over them, in Triton's interpreter and float16."""
    assert "RIGHT\n" in run("-c", PRODUCTS, **TRITON)


SERVE = """
import json, sys
from model_runner_base.testing.platform_choice import choose_platform
choose_platform("cuda_stand_in.KernelPlatform")
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
import cuda_stand_in
from model_runner_base.step.trace import watch_steps
from model_runner_base.testing.engine import generate, greedy, runner_of

model, batches, adapters, options = json.loads(sys.argv[1])
llm = LLM(
    model, worker_cls="cuda_stand_in.StandInWorker", skip_tokenizer_init=True, enable_lora=True, max_loras=2,
    max_lora_rank=8, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, kv_cache_memory_bytes=8 << 20,
    compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 12, 32]}, **options,
)
captured, sent = len(cuda_stand_in.RecordedGraph.captured), []
for batch in batches:
    requests = [number and LoRARequest(f"adapter-{number}", number, adapters[number - 1]) for _, number in batch]
    with watch_steps(runner_of(llm)) as steps:
        outputs = generate(llm, [prompt for prompt, _ in batch], greedy(6), [request or None for request in requests])
    print("TOKENS", [list(output.outputs[0].token_ids) for output in outputs])
    sent += [step.num_sent for step in steps]
print("SENT NOTHING", sent.count(0))
print("CAPTURED LATER", len(cuda_stand_in.RecordedGraph.captured) - captured, "OF", captured, flush=True)
"""


@pytest.mark.parametrize(
    "draft",
    [pytest.param(None, marks=pytest.mark.newest), pytest.param("noisy", marks=pytest.mark.once)],
    ids=["alone", "drafts"],
)
def test_tokens_of_whole_graphs(draft: str | None, tmp_path: Path) -> None:
    """Batches are each mixed otherwise, so graphs are replayed with other adapters than at their capture.

    Three adapters take turns in two slots; a batch without any follows while both slots are taken.
    """
    model = make_checkpoint("llama", tmp_path)
    adapters = [
        make_adapter(model.path, tmp_path, 1, targets=EVERYWHERE),
        make_adapter(model.path, tmp_path, 2, rank=4),
        make_adapter(model.path, tmp_path, 3, rank=1, targets=("down_proj", "lm_head", "embed_tokens")),
    ]
    mixtures = [[1, 0, 2, 1], [0, 2, 1, 0], [0, 0], [3], [0], [2, 3, 0], [1, 3, 1]]
    batches = [
        list(zip(map(list, random_prompts(seed, [5, 20, 1, 9][: len(mixture)])), mixture, strict=True))
        for seed, mixture in enumerate(mixtures)
    ]
    options: dict[str, Any] = {"dtype": "float32"}
    if draft:
        options["speculative_config"] = speculation(draft, model)
    given = json.dumps([str(model.path), batches, [str(adapter.path) for adapter in adapters], options])
    out = run("-c", SERVE, given)
    found = [json.loads(line) for line in re.findall(r"^TOKENS (.*)$", out, re.M)]
    for batch, tokens in zip(batches, found, strict=True):
        for (prompt, number), output in zip(batch, tokens, strict=True):
            reference = adapters[number - 1].merged if number else model
            logits = logits_after(reference, [*prompt, *output])[len(prompt) - 1 : -1]
            lacking = logits.max(-1) - np.take_along_axis(logits, np.array(output)[:, None], -1)[:, 0]
            assert lacking.max() == 0, (prompt, number, output)
    if not draft:
        assert int(re.search(r"SENT NOTHING (\d+)", out)[1]) >= 2 * len(batches)  # type: ignore[index]
    assert re.search(r"CAPTURED LATER 0 OF [1-9]", out), "mappings are no reason for graphs"
