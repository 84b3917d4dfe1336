"""The hooks of the GPU runner: which exist, weights that are offloaded, memory that a step is said to need."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import engine
from test_plain_device import code_lines
from test_structure import HOOKS, ROOT
from torch import nn
from vllm.config import CompilationMode

import gpu_runner.cuda_graphs
import gpu_runner.device_ops
import gpu_runner.model_runner
from gpu_runner.model_runner import GPUModelRunner
from gpu_runner.static_inputs import StaticInputs
from gpu_runner.worker import GPUWorker, check_model
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.inputs.multimodal.encoder import NO_ENCODER, Encoder
from model_runner_base.inputs.multimodal.layer_inputs import DeepstackBuffers
from model_runner_base.testing.engine import runner_of
from model_runner_base.testing.images import make_seeing_model


def test_runner_overrides_exactly_the_hooks() -> None:
    path = ROOT / "gpu_runner" / "model_runner.py"
    (runner,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in runner.body if isinstance(node, ast.FunctionDef)} == HOOKS
    assert code_lines(path) < 120


def offload_budget() -> int:
    """Bytes of weights that a model which is made now leaves on the host."""
    if find_spec("vllm.model_executor.offloader"):
        offloader = import_module("vllm.model_executor.offloader").get_offloader()
        return getattr(offloader, "cpu_offload_max_bytes", 0)
    return import_module("vllm.model_executor.models.utils")._CPU_OFFLOAD_MAX_BYTES


def offload_options(gib: float) -> dict[str, Any]:
    """Offload settings as the config has them: in an object of their own, or in a number among the cache's."""
    if find_spec("vllm.config.offload"):
        config = import_module("vllm.config.offload")
        return {"offload_config": config.OffloadConfig(uva=config.UVAOffloadConfig(cpu_offload_gb=gib))}
    return {"cache_config": SimpleNamespace(cpu_offload_gb=gib)}


def test_weights_are_offloaded_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are offloaded by vLLM's models, which go by the budget that is set when they are made. The next engine
    has its own."""
    budgets = []

    def load(*args: Any, **options: Any) -> nn.Module:
        budgets.append(offload_budget())
        return nn.Identity()

    monkeypatch.setattr(gpu_runner.model_runner, "load_checkpoint", load)
    for gib in (1.5, 0):
        config = SimpleNamespace(
            **offload_options(gib),
            compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=2),
            speculative_config=None,
        )
        runner = SimpleNamespace(vllm_config=config, device=torch.device("cpu"))
        GPUModelRunner.load_model(runner)  # type: ignore[arg-type]
    assert budgets == [3 << 29, 0]


@pytest.mark.parametrize("has_embeds", [False, True])
def test_the_pool_of_prompt_embeddings_is_part_of_what_a_step_needs(has_embeds: bool) -> None:
    """The pool is allocated after the measurement: 8 tokens of 24 float32, a row of padding, and 8 that are copied."""
    model_config = SimpleNamespace(enable_prompt_embeds=has_embeds, get_inputs_embeds_size=lambda: 24)
    runner = SimpleNamespace(
        device_ops=SimpleNamespace(peak_memory=lambda run: 1000),
        profile_step=None,
        encoder=NO_ENCODER,
        model_config=model_config,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )
    needed = GPUModelRunner.profile_run(runner)  # type: ignore[arg-type]
    assert needed == 1000 + (torch.zeros(8 + 1 + 8, 24).nbytes if has_embeds else 0)


@pytest.mark.parametrize("of_encoder", [700, 3000])
def test_the_larger_of_a_step_and_an_encoder_is_what_is_needed(of_encoder: int) -> None:
    """A step and an encoder do not run at the same time, so they share what the larger one needs."""

    class Measured(Encoder):
        def profile(self) -> None:
            raise AssertionError("run by peak_memory alone")

    encoder = Measured()
    runner = SimpleNamespace(
        device_ops=SimpleNamespace(peak_memory=lambda run: of_encoder if run == encoder.profile else 1000),
        profile_step=None,
        encoder=encoder,
        model_config=SimpleNamespace(enable_prompt_embeds=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )
    assert GPUModelRunner.profile_run(runner) == max(1000, of_encoder)  # type: ignore[arg-type]


def test_inputs_stay_at_their_addresses() -> None:
    """Ids, embeddings, and positions of each kind lie in a later call where they lay in the first one. Their rows
    are as far apart, though that call had the most tokens."""
    inputs, rotated = (StaticInputs(8, torch.device("cpu")) for _ in range(2))
    seen = []
    for count in (8, 5, 1):
        given = {
            "input_ids": torch.arange(count, dtype=torch.int32),
            "inputs_embeds": torch.rand(count, 3),
            "intermediate_tensors": None,
        }
        for positions in (torch.arange(count, dtype=torch.int32), torch.randint(9, (3, count), dtype=torch.int32)):
            held = (inputs if positions.dim() == 1 else rotated)(None, (), given | {"positions": positions})[1]
            assert held["positions"].equal(positions.long()) and held["intermediate_tensors"] is None
            assert held["input_ids"].equal(given["input_ids"]) and held["inputs_embeds"].equal(given["inputs_embeds"])
            names = "input_ids", "inputs_embeds", "positions"
            seen.append({name: (held[name].data_ptr(), *held[name].stride()) for name in names})
    assert seen[0::2] == [seen[0]] * 3 and seen[1::2] == [seen[1]] * 3


def deepstack_model() -> Any:
    """A model with what ``DeepstackBuffers`` asks of one: it adds two levels after its first layers."""
    model: Any = nn.Module()
    model.use_deepstack, model.deepstack_num_level, model.deepstack_input_embeds = True, 2, []
    model._get_deepstack_input_embeds = model._clear_deepstack_input_embeds = None
    return model


def levels_of(model: Any, calls_alike: bool) -> DeepstackBuffers:
    """Buffers of rows of 3 float32, for steps of 8 tokens at most."""
    device_ops = DeviceOps(torch.device("cpu"))
    device_ops.calls_alike = calls_alike
    config: Any = SimpleNamespace(get_inputs_embeds_size=lambda: 3, dtype=torch.float32)
    return DeepstackBuffers(model, config, 8, device_ops)


@pytest.mark.parametrize("calls_alike", [False, True])
def test_levels_of_a_call_without_images(calls_alike: bool) -> None:
    """Levels are zeros, each in a tensor of its own, where calls have to be alike; elsewhere nothing is added."""
    model = deepstack_model()
    levels = levels_of(model, calls_alike)
    levels.bind(torch.arange(24.0).view(4, 6))
    bound = model._get_deepstack_input_embeds(4)
    assert [bound[f"deepstack_input_embeds_{level}"][1].tolist() for level in range(2)] == [[6, 7, 8], [9, 10, 11]]
    levels.unbind()
    without = model._get_deepstack_input_embeds(5)
    if not calls_alike:
        assert without is None
        return
    assert list(without.tensors) == list(bound.tensors)
    assert all(x.shape == (5, 3) and not x.any() for x in without.tensors.values())
    assert len({x.data_ptr() for x in without.tensors.values()}) == 2


def test_a_model_that_was_compiled_once_is_right_in_every_call() -> None:
    """Guards are dropped, as vLLM drops them, so the model is compiled for the largest step, which has no image.
    Later calls find their inputs at the same addresses, with the same strides."""
    model, graphs, seen = deepstack_model(), list[Any](), list[dict[str, tuple[int, ...]]]()
    levels, inputs = levels_of(model, calls_alike=True), StaticInputs(8, torch.device("cpu"))

    def text(embeds: torch.Tensor, positions: torch.Tensor, levels: Any) -> torch.Tensor:
        first, second = (levels[f"deepstack_input_embeds_{level}"] for level in range(2))
        return embeds + 10 * first + 100 * second + (positions * torch.tensor([[1], [2], [3]])).sum(0)[:, None]

    def backend(graph: Any, examples: list[Any]) -> Any:
        # No distance between rows was taken for the number of tokens, with which it would change.
        assert all(isinstance(each.stride(0), int) for each in examples if isinstance(each, torch.Tensor))
        graphs.append(graph)
        return graph.forward

    drop = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    compiled = torch.compile(text, backend=backend, fullgraph=True, options=drop)
    for num_tokens, has_image in ((8, False), (5, True), (8, True), (2, False)):
        embeds, positions = torch.rand(num_tokens, 3), torch.randint(9, (3, num_tokens), dtype=torch.int32)
        of_images = torch.rand(num_tokens, 6)
        if has_image:
            levels.bind(of_images)
        _, given = inputs(model, (), {"inputs_embeds": embeds, "positions": positions})
        added = model._get_deepstack_input_embeds(num_tokens)
        levels.unbind()
        every = {"embeds": given["inputs_embeds"], "positions": given["positions"], **added.tensors}
        if not graphs:
            for name, tensor in every.items():
                torch._dynamo.mark_dynamic(tensor, 1 if name == "positions" else 0)
        got = compiled(given["inputs_embeds"], given["positions"], added)
        of_levels = of_images if has_image else torch.zeros(num_tokens, 6)
        assert torch.allclose(
            got, text(embeds, positions, dict(zip(added.tensors, of_levels.chunk(2, 1), strict=True)))
        )
        seen.append({name: (tensor.data_ptr(), *tensor.stride()) for name, tensor in every.items()})
    assert len(graphs) == 1 and seen == [seen[0]] * 4


def test_weights_that_cannot_be_loaded_again_are_not_dropped() -> None:
    worker = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=True))
    with pytest.raises(ValueError, match="sleep at level 1"):
        GPUWorker.check_sleep(worker, level=2)  # type: ignore[arg-type]
    model = SimpleNamespace(draft_model=object())
    worker = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False), get_model=lambda: model)
    with pytest.raises(ValueError, match=r"with a draft.* sleep at level 1"):
        GPUWorker.check_sleep(worker, level=2)  # type: ignore[arg-type]


def test_models_that_need_the_base_s_attention_are_refused() -> None:
    plain = {"is_encoder_decoder": False, "is_mm_prefix_lm": False, "is_multimodal_model": True}
    check_model(SimpleNamespace(**plain))  # type: ignore[arg-type]
    for name, words in (("is_encoder_decoder", "cross-attention"), ("is_mm_prefix_lm", "see each other")):
        with pytest.raises(UnsupportedConfigError, match=words):
            check_model(SimpleNamespace(**plain | {name: True}))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_skipped", [False, True])
def test_encoders_are_measured_on_the_largest_items_of_a_step(
    is_skipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders are measured on as many items as the scheduler's budget holds, each as large as the processor makes
    them."""
    model = make_seeing_model("qwen3-vl", tmp_path)
    options = {"skip_tokenizer_init": False, "enforce_eager": True, "limit_mm_per_prompt": {"video": 0}}
    with engine(model.path, **options, max_num_batched_tokens=100, skip_mm_profiling=is_skipped) as llm:
        runner, seen = runner_of(llm), []
        embed = runner.model.embed_multimodal
        monkeypatch.setattr(runner.model, "embed_multimodal", lambda **given: seen.append(embed(**given)) or seen[-1])
        runner.encoder.profile()
    rows = [len(output) for outputs in seen for output in outputs]
    most = 64 // 4 // 2  # Of 64 x 64 pixels, the most, rows of two patches of 4 x 4 in either direction.
    assert rows == ([] if is_skipped else [most * most] * (100 // (most * most)))
