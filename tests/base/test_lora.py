"""LoRA adapters together with everything else: tokens of each request's model with its adapter merged into it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import compilations, engine
from safetensors.torch import load_file
from test_reload import other_weights, reload_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.import_utils import resolve_obj_by_qualname

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.models.draft_loading import draft_of
from model_runner_base.testing.adapters import ATTENTION, EVERYWHERE, TinyAdapter, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_lora import NEW_TOKENS, greedy_requests, run
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import greedy, metric, runner_of
from model_runner_base.testing.grammars import is_one_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request
from model_runner_base.testing.tokenizer import add_tokenizer

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_model_len": 128}
FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [128]}
COMPILED = {"additional_config": {"neuron_config": FEW_BUCKETS}}
EAGER = {"enforce_eager": True}
LENGTHS = [5, 70, 1, 40]
CHOICES = ["yes", "no", "yesterday"]


@pytest.fixture(scope="module")
def compiled(tiny_model: Callable[[str], TinyModel]) -> Iterator[LLM]:
    """An engine with more slots, on openxla."""
    more = {"max_loras": 4, "max_cpu_loras": 8}
    with engine(tiny_model("llama").path, **LORA | more, **COMPILED) as llm:
        yield llm


def two_adapters(model: TinyModel, directory: Path, first: int = 1) -> list[TinyAdapter]:
    """Adapters of all layers, and of attention's; their numbers are ``first`` and the next."""
    return [
        make_adapter(model.path, directory, first, targets=EVERYWHERE),
        make_adapter(model.path, directory, first + 1, rank=4),
    ]


def check(llm: LLM, model: TinyModel, adapters: Sequence[TinyAdapter]) -> None:
    """Checks two adapters and none in one batch; then none, while both adapters have their slots."""
    one, other = adapters
    run(llm, model, greedy_requests(1, LENGTHS), [one, None, other, one])
    run(llm, model, greedy_requests(2, LENGTHS), [None, other, one, None])
    run(llm, model, greedy_requests(3, LENGTHS[:2]), [None, None])


@pytest.mark.parametrize(
    "fully_sharded",
    [pytest.param(False, id="B or A is cut"), pytest.param(True, id="both are cut", marks=pytest.mark.once)],
)
def test_tensor_parallelism(fully_sharded: bool, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Adapters work over two workers. These are eager, with the collectives of the compiled step."""
    model = tiny_model("llama")
    options = LORA | {"fully_sharded_loras": fully_sharded, "tensor_parallel_size": 2}
    with engine(model.path, **options, **EAGER) as llm:
        check(llm, model, two_adapters(model, tmp_path))


def test_contiguous_cache(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    with engine(model.path, **LORA, **EAGER, block_size=LORA["max_model_len"]) as llm:
        check(llm, model, two_adapters(model, tmp_path))


def test_synchronous_scheduling(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    with engine(model.path, **LORA, **EAGER, async_scheduling=False) as llm:
        check(llm, model, two_adapters(model, tmp_path))


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("punica_cpu.PunicaWrapperCPU", r"LoRA adapters are not supported with PunicaWrapperCPU yet: leave"),
        ("punica_gpu.PunicaWrapperGPU", r"vLLM's LoRA kernels do not take torch.float32: use --dtype"),
    ],
)
def test_platform_with_products_of_its_own(
    wrapper: str, words: str, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of another wrapper are refused before weights are read."""
    name = f"vllm.lora.punica_wrapper.{wrapper}"
    monkeypatch.setattr(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: name))
    worker: Any = resolve_obj_by_qualname(current_platform.worker_cls)
    monkeypatch.setattr(worker.model_runner_cls, "load_model", None)
    with pytest.raises(UnsupportedConfigError, match=words), engine(tiny_model("llama").path, **LORA, **EAGER):
        pass


class Made(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within it, views and single numbers left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim and not func.is_view:
            self.bytes += out.nbytes
        return out


def test_memory_of_a_step(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Memory that is counted for adapters holds what the largest layer's products make, and not twice that."""
    num_tokens, num_logits = 64, 4
    with engine(tiny_model("llama").path, **LORA, **EAGER) as llm:
        adapters = runner_of(llm).adapters
        layers = {name: slotted.layer for name, slotted in adapters._slots.slotted.items()}
        made = {}
        with torch.no_grad(), adapters.unused(num_tokens, num_logits):
            for name, layer in layers.items():
                stacks = layer.lora_a_stacked, layer.lora_b_stacked
                rows, punica = num_logits if name == "lm_head" else num_tokens, adapters.products
                if "embed" in name:
                    inputs = torch.zeros(rows, stacks[1].shape[-1]), torch.zeros(rows, stacks[1].shape[1]), stacks[1]
                    product = partial(punica.add_lora_embedding, *inputs)
                elif name == "lm_head":
                    inputs = torch.zeros(rows, stacks[1].shape[-1]), torch.zeros(rows, stacks[0].shape[0]), *stacks
                    product = partial(punica.add_lora_logits, *inputs, 1.0)
                else:
                    width = sum(b.shape[-1] for b in stacks[1])
                    inputs = torch.zeros(rows, width), torch.zeros(rows, stacks[0][0].shape[0]), *stacks
                    product = partial(punica.add_lora_linear, *inputs, 1.0, ())
                with Made() as counted:
                    product()
                made[name] = counted.bytes
        written = max(slotted.write_memory() for slotted in adapters._slots.slotted.values())
        largest = max(stack.nbytes for layer in layers.values() for stack in flat(layer))
        assert written == largest * 3 // 2  # A stack of two slots, and a slot.
        assert max(made.values()) <= adapters.step_memory() - written < 2 * max(made.values())


def flat(layer: Any) -> Iterator[torch.Tensor]:
    for stacks in (layer.lora_a_stacked, layer.lora_b_stacked):
        yield from stacks if isinstance(stacks, tuple) else (stacks,)


@pytest.mark.parametrize("kind", ["noisy", "head"])
def test_speculation(kind: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """A draft guesses without adapters; the tokens are those of the adapters all the same."""
    model = tiny_model("llama")
    with engine(model.path, **LORA, **EAGER, speculative_config=speculation(kind, model)) as llm:
        check(llm, model, two_adapters(model, tmp_path))
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
        draft: nn.Module = draft_of(runner_of(llm).model)
        assert not any("lora" in type(each).__module__ for each in draft.modules())


def test_structured_output(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = add_tokenizer(tiny_model("llama"))
    adapters = two_adapters(model, tmp_path)
    grammar = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=CHOICES))
    prompts = random_prompts(4, LENGTHS)
    with engine(model.path, **LORA, **EAGER, skip_tokenizer_init=False) as llm:
        requests = [Request(prompt, grammar, is_one_of(CHOICES)) for prompt in prompts]
        requests[1] = Request(prompts[1], greedy(NEW_TOKENS))
        run(llm, model, requests, [adapters[0], adapters[1], adapters[1], None])


@pytest.mark.openxla
def test_twenty_adapters_compile_nothing(compiled: LLM, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Adapters come, go and are mixed at random while requests run, over four slots and eight places on the host."""
    model, rng = tiny_model("llama"), np.random.default_rng(5)
    adapters = [
        make_adapter(model.path, tmp_path, number, rank=int(rng.choice([1, 2, 8])), targets=targets)
        for number, targets in zip(range(1, 21), [EVERYWHERE, ATTENTION, ("down_proj",), ("lm_head",)] * 5, strict=True)
    ]
    prompts = random_prompts(6, rng.choice([1, 9, 40, 80], 40).tolist())
    chosen = [adapters[index] if index < len(adapters) else None for index in rng.integers(0, 23, len(prompts))]
    warm, core = compilations(), compiled.llm_engine
    waiting = [(str(number), prompts[number], chosen[number]) for number in range(len(prompts))]
    tokens: dict[str, list[int]] = {}
    while waiting or core.has_unfinished_requests():
        if waiting and rng.random() < 0.6:
            name, prompt, adapter = waiting.pop()
            request = adapter.request if adapter else None
            core.add_request(name, {"prompt_token_ids": list(prompt)}, greedy(NEW_TOKENS), lora_request=request)
        if rng.random() < 0.3:
            core.add_lora(adapters[rng.integers(len(adapters))].request)
        if rng.random() < 0.2:
            core.remove_lora(int(rng.integers(1, len(adapters) + 1)))
        tokens |= {out.request_id: list(out.outputs[0].token_ids) for out in core.step() if out.finished}
    assert compilations() == warm
    for number, (prompt, adapter) in enumerate(zip(prompts, chosen, strict=True)):
        reference = adapter.merged if adapter else model
        assert tokens[str(number)] == reference.greedy(prompt, NEW_TOKENS), number


@pytest.mark.openxla
def test_new_weights_beneath_adapters(compiled: LLM, tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """The adapters stay in their slots, and add to the new weights; graphs see both."""
    model = tiny_model("llama")
    new = other_weights(model, tmp_path / "new")
    before = two_adapters(model, tmp_path, 31)
    after = [replace(adapter, model=new.path) for adapter in before]  # The same files.
    warm = compilations()
    check(compiled, model, before)
    reload_weights(compiled, weights_path=str(new.path))
    check(compiled, new, after)
    reload_weights(compiled, weights_iterator=list(load_file(model.path / "model.safetensors").items()))
    check(compiled, model, before)
    assert compilations() == warm
