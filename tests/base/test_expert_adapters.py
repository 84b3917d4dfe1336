"""LoRA adapters of experts: tokens of the model with the adapter merged into its weights."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import compilations, engine
from lane import HAS_OPENXLA
from safetensors.torch import load_file, save_file
from test_lora import COMPILED, EAGER, LENGTHS, LORA, Made, check, flat
from vllm import EngineArgs
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridModel

from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.inputs.adapters import experts as adapted
from model_runner_base.inputs.adapters import lora
from model_runner_base.inputs.adapters.experts import AdaptedExperts, ExpertsSlots, NamedExperts
from model_runner_base.inputs.adapters.lora import check_adapters
from model_runner_base.inputs.adapters.manager import SlotManager
from model_runner_base.inputs.adapters.slots import SlotWriter
from model_runner_base.models.layers import fused_moe
from model_runner_base.models.layers.fused_moe import Experts, run_experts
from model_runner_base.testing.adapters import ATTENTION, EXPERTS, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_lora import greedy_requests, run
from model_runner_base.testing.engine import greedy, metric, runner_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request

Tiny = Callable[[str], TinyModel]
ALL = {"qwen3-moe": (*ATTENTION, "embed_tokens", "lm_head", EXPERTS), "gpt-oss": (*ATTENTION, EXPERTS)}
LONG_STEPS = {"max_num_batched_tokens": 128}
"""Steps of more tokens than all experts run on, whose choices are sorted into tiles."""
SMALL_CACHE = {"num_gpu_blocks_override": 8}
"""A cache of 224 tokens: two long requests, of which one is preempted."""
CASES: dict[str, tuple[str, dict[str, Any]]] = (
    {"compiled": ("qwen3-moe", COMPILED), "two ranks": ("gpt-oss", EAGER | {"tensor_parallel_size": 2})}
    if HAS_OPENXLA
    else {"eager": ("qwen3-moe", EAGER | LONG_STEPS | SMALL_CACHE), "in one": ("gpt-oss", EAGER)}
)


@pytest.mark.parametrize("case", CASES)
def test_adapters(case: str, tiny_model: Tiny, tmp_path: Path) -> None:
    """Adapters of all experts, of some experts, and of attention, with requests without any; more of them than slots.

    A token whose request has no adapter, or another one, shares tiles with those that have.
    """
    name, options = CASES[case]
    model = tiny_model(name)
    some: Any = {"part": "layers.1.mlp.experts", "without": "experts.3.up_proj"}
    adapters = [
        make_adapter(model.path, tmp_path, 1, targets=ALL[name]),
        make_adapter(model.path, tmp_path, 2, rank=4, targets=(EXPERTS,), use_rslora=True),
        make_adapter(model.path, tmp_path, 3, rank=2, targets=(EXPERTS,), size=1.0, **some),
        make_adapter(model.path, tmp_path, 4, targets=ATTENTION),
    ]
    (prompt,) = random_prompts(0, [20])
    models = [model, *(adapter.merged for adapter in adapters)]
    assert len({tuple(each.greedy(prompt, 10, is_certain=False)) for each in models}) == len(models)
    with engine(model.path, **LORA, **options) as llm:
        before = compilations()
        check(llm, model, adapters[:2])
        check(llm, model, adapters[2:])
        run(llm, model, greedy_requests(4, [20]), adapters[:1])
        if SMALL_CACHE.items() <= options.items():
            preemptions = metric(llm, "vllm:num_preemptions")
            requests = [Request(prompt, greedy(60)) for prompt in random_prompts(3, [60, 50, 40])]
            run(llm, model, requests, [adapters[1], None, adapters[0]])
            assert metric(llm, "vllm:num_preemptions") > preemptions
        assert compilations() == before


def without_one(path: Path) -> None:
    """Leaves out the last product of experts that an adapter has all matrices of in one."""
    file = path / "adapter_model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if ".experts.lora" not in name}, file)


def test_experts_of_other_models(tiny_model: Tiny, tmp_path: Path) -> None:
    """Adapters that do not fit a model's experts are refused by name, and others serve."""
    model, other = tiny_model("gpt-oss"), tiny_model("qwen3-moe")
    good = make_adapter(model.path, tmp_path, 1, targets=(EXPERTS,), target_parameters=["experts.gate_up_proj"])
    half = make_adapter(model.path, tmp_path, 2, targets=(EXPERTS,))
    without_one(half.path)
    of_other = make_adapter(other.path, tmp_path, 3, targets=(EXPERTS,))
    large = make_adapter(model.path, tmp_path, 4, rank=16, targets=(EXPERTS,), r=8)
    with engine(model.path, **LORA, **EAGER) as llm:
        for bad, words in (
            (half, r"is for .*experts.base_layer alone: train it for .*experts, too"),
            (of_other, r"is for .*experts\..*, which this model has no adapters in"),
            (large, r"LoRA rank 16 of .*experts.* is greater than max_lora_rank 8"),
        ):
            with pytest.raises(ValueError, match=words):
                llm.llm_engine.add_lora(bad.request)
        run(llm, model, greedy_requests(5, LENGTHS), [good, None, good, None])


def test_experts_that_take_none(tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of experts is refused with their own reason, here or on another pipeline stage; others serve."""
    model = tiny_model("gpt-oss")
    good = make_adapter(model.path, tmp_path, 1)
    bad, later = (
        make_adapter(model.path, tmp_path, number, targets=(EXPERTS,), target_parameters=["experts.gate_up_proj"])
        for number in (2, 3)
    )
    file = later.path / "adapter_model.safetensors"
    save_file({re.sub(r"layers\.\d", "layers.9", name): each for name, each in load_file(file).items()}, file)
    stage: Any = ({}, {"model.layers.9.mlp.experts": "stages"}, False)
    monkeypatch.setattr(NamedExperts, "unsupported_reason", lambda *_: "tests")
    monkeypatch.setattr(lora, "gather_stages", lambda config, own: [own, stage])
    with engine(model.path, **LORA, **EAGER) as llm:
        for adapter, words in ((bad, r"\.[01]\..* with tests"), (later, r"\.9\..* with stages")):
            with pytest.raises(ValueError, match=rf"layers{words}"):
                llm.llm_engine.add_lora(adapter.request)
        run(llm, model, greedy_requests(5, LENGTHS[:2]), [good, None])
        stacks = [each for layer in runner_of(llm).adapters._slots.modules.values() for each in flat(layer.layer)]
        weights = sum(each.nbytes for each in runner_of(llm).model.parameters())
        counted = llm.llm_engine.model_executor.driver_worker.worker._weights_memory  # type: ignore[attr-defined]
        assert counted - weights >= sum(each.nbytes for each in stacks) > 0


def test_names_of_experts() -> None:
    """Experts have the names of the checkpoint, with each name of a parent once."""
    config = SimpleNamespace(config=SimpleNamespace(num_local_experts=2))
    granite = [name for _, name, _, _ in GraniteMoeHybridModel.get_expert_mapping(config)]  # type: ignore[arg-type]
    for parent, names in (("block_sparse_moe", granite), ("mlp", ["experts.0.up_proj", "experts.1.up_proj"])):
        mapping = {"experts": [name.rstrip(".") for name in names]}
        manager: Any = SimpleNamespace(_is_3d_moe_model=False, packed_modules_mapping=mapping)
        found = SlotManager._named(manager, f"model.layers.0.{parent}.experts", None)  # type: ignore[arg-type]
        first, last = f"model.layers.0.{parent}.experts.0.", f"model.layers.0.{parent}.experts.1.up_proj"
        assert found.names[0].startswith(first) and found.names[-1] == last
        assert all(name.count("experts") == name.count(parent) == 1 for name in found.names)


def test_names_of_a_model_without_a_head() -> None:
    """A pooling model's experts that take no adapters are known by the names of a model without a head, too."""
    own = {"modules": {}, "packed_modules": {}, "experts": {}, "model": torch.nn.Module()}
    without = {"model.layers.0.mlp.experts": "tests"}
    manager: Any = SimpleNamespace(**own, without=without, is_pooling_model=True, _is_3d_moe_model=True)
    SlotManager.use_slots(manager, lambda layer: layer)
    assert manager.without == without | {"layers.0.mlp.experts": "tests"}


HAS_TARGETS = "lora_target_modules" in EngineArgs.__dataclass_fields__


@pytest.mark.skipif(not HAS_TARGETS, reason="this vLLM has no such setting")
def test_experts_that_are_asked_for(tiny_model: Tiny, tmp_path: Path) -> None:
    """Experts and attention have adapters if only they are asked for, and the head has none."""
    model = tiny_model("qwen3-moe")
    targets = (*ATTENTION, EXPERTS)
    adapters = [make_adapter(model.path, tmp_path, number, rank=4, targets=targets) for number in (1, 2)]
    of_head = make_adapter(model.path, tmp_path, 3, rank=4, targets=("lm_head",))
    with engine(model.path, **LORA, **EAGER, lora_target_modules=list(targets)) as llm:
        check(llm, model, adapters)
        with pytest.raises(ValueError, match="lm_head, which this model has no adapters in"):
            llm.llm_engine.add_lora(of_head.request)


@pytest.mark.skipif(not HAS_TARGETS, reason="this vLLM has no such settings")
@pytest.mark.parametrize("setting", ["enable_mixed_moe_lora_format", "enable_moe_shared_loras"])
def test_formats_that_are_refused(setting: str, tiny_model: Tiny) -> None:
    with (
        pytest.raises(UnsupportedConfigError, match=rf"adapters of experts in another format.*leave out {setting}"),
        engine(tiny_model("qwen3-moe").path, **LORA, **EAGER, **{setting: True}),
    ):
        pass


@pytest.mark.skipif(not HAS_TARGETS, reason="this vLLM has no such settings")
def test_formats_of_models_without_experts(tiny_model: Tiny) -> None:
    """vLLM ignores the settings of experts' formats in other models."""
    options: dict[str, Any] = LORA | {"enable_mixed_moe_lora_format": True}
    for name, is_refused in (("llama", False), ("qwen3-moe", True)):
        config = EngineArgs(str(tiny_model(name).path), **options).create_engine_config()
        with pytest.raises(UnsupportedConfigError) if is_refused else nullcontext():
            check_adapters(config)


# ---- The layer alone ----

NUM_EXPERTS, HIDDEN, INNER, TOP_K, SLOTS, RANK = 4, 6, 8, 2, 3, 5


def same_types(function: Callable[..., torch.Tensor], _: Any) -> Any:
    """Wraps a function that writes slots: other types of values would be another graph."""

    def written(stack: torch.Tensor, slot: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = function(stack, slot, values)
        assert stack.dtype == values.dtype == out.dtype
        return out

    return written


WRITER = SlotWriter(same_types, DeviceOps(torch.device("cpu")))


class Kind(NamedTuple):
    """A kind of experts: how gate and up numbers are computed, and which matrices a checkpoint has."""

    activation: str
    parts: Sequence[str]
    """Names of one expert's matrices, in vLLM's order; none if all experts have theirs in one."""


KINDS = {
    "by expert": Kind("silu", ("gate", "down", "up")),
    "by expert, without a gate": Kind("relu2_no_mul", ("up", "down")),
    "in one, in halves": Kind("silu", ()),
    "in one, alternating": Kind("swigluoai", ()),
}


def experts_of(kind: Kind, plain: Experts, num_ranks: int = 1, rank: int = 0) -> NamedExperts:
    names = [f"experts.{number}.{part}" for number in range(NUM_EXPERTS) for part in kind.parts]
    layer: Any = SimpleNamespace(
        activation=kind.activation,
        global_num_experts=NUM_EXPERTS,
        expert_map=None,
        moe_config=SimpleNamespace(tp_size=num_ranks, tp_rank=rank, experts_per_token=TOP_K),
        quant_method=SimpleNamespace(experts=lambda weights: plain),
        weights=SimpleNamespace(),
    )
    return NamedExperts(layer, names or ("experts.base_layer", "experts"))


def cut(plain: Experts, num_ranks: int, rank: int) -> Experts:
    """Weights of one rank, as vLLM cuts them."""
    gate_up = plain.gate_up
    halves = 1 if plain.activation in ("swigluoai", "relu2_no_mul") else 2
    columns = gate_up.unflatten(2, (halves, num_ranks, -1))[:, :, :, rank].flatten(2)
    return plain._replace(gate_up=columns, down=plain.down.unflatten(1, (num_ranks, -1))[:, rank])


def rounded(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random float32 numbers that ``dtype`` has."""
    return torch.randn(*shape).to(dtype).float()


def random_adapter(
    kind: Kind, width: int, rank: int, dtype: torch.dtype = torch.float32, without: str = ""
) -> tuple[list[LoRALayerWeights | None], Experts]:
    """Matrices of an adapter as a checkpoint has them, and what they add to the experts' weights.

    One matrix is left out, and all of the part ``without``.
    """
    gate_up, down = torch.zeros(NUM_EXPERTS, HIDDEN, width), torch.zeros(NUM_EXPERTS, INNER, HIDDEN)
    found: list[LoRALayerWeights | None] = []
    if not kind.parts:
        for added in (gate_up, down):
            num_in, num_out = added.shape[1:]
            a, b = (rounded(shape, dtype) for shape in ((rank * NUM_EXPERTS, num_in), (num_out, rank * NUM_EXPERTS)))
            for expert in range(NUM_EXPERTS):
                for number in range(rank):
                    column = b[:, number * NUM_EXPERTS + expert]
                    added[expert] += 0.5 * torch.outer(a[expert * rank + number], column)
            found.append(LoRALayerWeights("", rank, rank, a.to(dtype), b.to(dtype), scaling=0.5))
        return found, Experts(gate_up, down, kind.activation)
    for expert in range(NUM_EXPERTS):
        for part in kind.parts:
            start = INNER if part == "up" and "gate" in kind.parts else 0
            added = down[expert] if part == "down" else gate_up[expert, :, start : start + INNER]
            a, b = (rounded(shape, dtype) for shape in ((rank, added.shape[0]), (added.shape[1], rank)))
            if (expert, part) == (2, "up") or part == without:
                found.append(None)
                continue
            added += 0.5 * (b @ a).t()
            found.append(LoRALayerWeights("", rank, rank, a.to(dtype), b.to(dtype), scaling=0.5))
    return found, Experts(gate_up, down, kind.activation)


PARTS_LEFT_OUT = [("by expert", "down"), ("by expert", "gate"), ("by expert, without a gate", "up")]


@pytest.mark.parametrize(("num_ranks", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
@pytest.mark.parametrize(("kind", "without"), [*((kind, "") for kind in KINDS), *PARTS_LEFT_OUT])
def test_every_way_to_run_experts(
    kind: str, without: str, num_ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens have the experts of their own adapters, as if merged, and none has another's: all experts in
    one go, in tiles that are run a few at a time, and one by one; also as the sum of two ranks.

    An adapter may leave out a product. Slots have the adapters' own type, and are computed with in float32 here.
    """
    torch.manual_seed(0)
    of = KINDS[kind]
    width = INNER if of.activation.endswith("_no_mul") else 2 * INNER
    gate_up, down = torch.randn(NUM_EXPERTS, HIDDEN, width), torch.randn(NUM_EXPERTS, INNER, HIDDEN)
    plain = Experts(gate_up, down, of.activation)
    config: Any = SimpleNamespace(max_lora_rank=RANK, max_loras=SLOTS, lora_dtype=dtype)
    monkeypatch.setattr(adapted, "AdaptedExpertsMethod", lambda moe, stacks, punica: stacks)
    adapters = {slot: random_adapter(of, width, rank, dtype, without) for slot, rank in ((0, 2), (2, RANK))}
    ranks = []
    for rank in range(num_ranks):
        own = cut(plain, num_ranks, rank)
        named = experts_of(of, own, num_ranks, rank)
        slots = ExpertsSlots(named, config, WRITER, None)
        for slot in (2, 0):
            # Twice: what the slot had before is gone.
            for found, _ in (random_adapter(of, width, RANK, dtype), adapters[slot]):
                packed: Any = slots.pack("experts", found)
                slots.set_lora(slot, packed.lora_a, packed.lora_b)
        stacks = named.layer.weights.quant_method
        assert {stack.dtype for stack in stacks} == {dtype}
        ranks.append(AdaptedExperts(*own, *(stack.float() for stack in stacks)))
    for num_tokens in (1, 40, 90):
        hidden, weights = torch.randn(num_tokens, HIDDEN), torch.rand(num_tokens, TOP_K)
        ids = torch.randn(num_tokens, NUM_EXPERTS).topk(TOP_K).indices
        slot_of = torch.randint(-1, SLOTS, (num_tokens,))
        is_own = slot_of[:, None] == torch.arange(SLOTS)
        want = run_experts(plain, hidden, ids, weights)
        for slot, (_, added) in adapters.items():
            merged = plain._replace(gate_up=gate_up + added.gate_up, down=down + added.down)
            want = torch.where(slot_of[:, None] == slot, run_experts(merged, hidden, ids, weights), want)
        for way in (fused_moe._each_choice, fused_moe._every_expert, fused_moe._in_tiles):
            for memory in (1, 6000, 1 << 25):
                monkeypatch.setattr(fused_moe, "GATHERED_AT_ONCE", memory)
                got = sum(way(rank, hidden, ids, weights, further=[is_own]) for rank in ranks)
                torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)


def test_memory_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is counted for a layer holds what its adapters make in a step, and not twice that."""
    monkeypatch.setattr(adapted, "AdaptedExpertsMethod", lambda moe, stacks, punica: stacks)
    plain = Experts(torch.randn(NUM_EXPERTS, HIDDEN, 2 * INNER), torch.randn(NUM_EXPERTS, INNER, HIDDEN), "silu")
    config: Any = SimpleNamespace(max_lora_rank=RANK, max_loras=SLOTS, lora_dtype=torch.float32)
    named = experts_of(KINDS["in one, in halves"], plain)
    slots = ExpertsSlots(named, config, WRITER, None)
    experts = AdaptedExperts(*plain, *named.layer.weights.quant_method)
    for num_tokens in (64, 300):
        hidden, weights = torch.randn(num_tokens, HIDDEN), torch.rand(num_tokens, TOP_K)
        ids = torch.randn(num_tokens, NUM_EXPERTS).topk(TOP_K).indices
        is_own = torch.randint(-1, SLOTS, (num_tokens, 1)) == torch.arange(SLOTS)
        with Made() as with_adapters:
            run_experts(experts, hidden, ids, weights, further=[is_own])
        with Made() as without:
            run_experts(plain, hidden, ids, weights)
        made = with_adapters.bytes - without.bytes
        assert made <= slots.products_memory(num_tokens, 1) < 2 * made
    assert slots.slots_memory() == sum(stack.nbytes for stack in named.layer.weights.quant_method)
    assert slots.write_memory() == NUM_EXPERTS * RANK * 2 * INNER * 4 * (SLOTS + 1)


def test_reasons_for_no_adapters() -> None:
    """Experts that take no adapters say why."""
    plain = Experts(torch.zeros(NUM_EXPERTS, HIDDEN, 2 * INNER), torch.zeros(NUM_EXPERTS, INNER, HIDDEN), "silu")
    config: Any = SimpleNamespace(fully_sharded_loras=True)

    def reason(has_kernels: bool = False, num_ranks: int = 1, **changes: Any) -> str:
        named = experts_of(KINDS["by expert"], plain, num_ranks)
        own_method = object.__new__(fused_moe.PlainExpertsMethod)
        vars(named.layer).update({"quant_method": own_method} | changes)
        return named.unsupported_reason(config, has_kernels)

    assert reason() == ""
    assert reason(has_kernels=True) == "vLLM's LoRA kernels"
    assert reason(num_ranks=2) == "fully_sharded_loras (leave it out)"
    assert reason(expert_map=torch.zeros(8)) == "enable_expert_parallel (leave it out)"
    assert reason(quant_method=SimpleNamespace()) == "experts that SimpleNamespace runs"
    assert "alternate" in reason(activation="swigluoai")
    assert "gate, up and down" in reason(activation="relu2_no_mul")
