"""The hooks of the GPU runner: which there are, weights that are offloaded, what a step is said to need."""

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
from gpu_runner.worker import check_model
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.multimodal.encoder import NO_ENCODER, Encoder
from model_runner_base.multimodal.levels import Levels
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
    """What the config says of it: an object of its own, or a number beside the cache's."""
    if find_spec("vllm.config.offload"):
        config = import_module("vllm.config.offload")
        return {"offload_config": config.OffloadConfig(uva=config.UVAOffloadConfig(cpu_offload_gb=gib))}
    return {"cache_config": SimpleNamespace(cpu_offload_gb=gib)}


def test_weights_are_offloaded_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's models, which go by the budget that stands when they are made; the next engine has its own."""
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
    """It is allocated after the measurement: 8 tokens of 24 float32, a row of padding, and 8 on their way to it."""
    model_config = SimpleNamespace(enable_prompt_embeds=has_embeds, get_inputs_embeds_size=lambda: 24)
    runner = SimpleNamespace(
        device_ops=SimpleNamespace(peak_memory=lambda run: 1000),
        encoder=NO_ENCODER,
        model_config=model_config,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )
    needed = GPUModelRunner.profile_run(runner)  # type: ignore[arg-type]
    assert needed == 1000 + (torch.zeros(8 + 1 + 8, 24).nbytes if has_embeds else 0)


@pytest.mark.parametrize("of_encoder", [700, 3000])
def test_the_larger_of_a_step_and_an_encoder_is_what_is_needed(of_encoder: int) -> None:
    """They do not run at a time."""

    class Measured(Encoder):
        def profile(self) -> None:
            raise AssertionError("run by peak_memory alone")

    encoder = Measured()
    runner = SimpleNamespace(
        device_ops=SimpleNamespace(peak_memory=lambda run: of_encoder if run == encoder.profile else 1000),
        encoder=encoder,
        model_config=SimpleNamespace(enable_prompt_embeds=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )
    assert GPUModelRunner.profile_run(runner) == max(1000, of_encoder)  # type: ignore[arg-type]


def test_inputs_stay_at_their_addresses() -> None:
    """Ids, embeddings, and positions of each kind: what a model sees of a later call lies where the first one's lay."""
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
            seen.append({name: held[name].data_ptr() for name in ("input_ids", "inputs_embeds", "positions")})
    assert seen[0::2] == [seen[0]] * 3 and seen[1::2] == [seen[1]] * 3


@pytest.mark.parametrize("calls_alike", [False, True])
def test_levels_of_a_call_without_images(calls_alike: bool) -> None:
    """What a compiler sees at the first call is there in all; elsewhere nothing is added."""
    device_ops = DeviceOps(torch.device("cpu"))
    device_ops.calls_alike = calls_alike
    model: Any = SimpleNamespace(
        use_deepstack=True,
        deepstack_num_level=2,
        deepstack_input_embeds=[],
        _get_deepstack_input_embeds=None,
        _clear_deepstack_input_embeds=None,
    )
    config: Any = SimpleNamespace(get_inputs_embeds_size=lambda: 3, dtype=torch.float16)
    levels = Levels(model, config, device_ops)
    levels.bind(torch.arange(24, dtype=torch.float16).view(4, 6))
    bound = model._get_deepstack_input_embeds(4)
    assert [bound[f"deepstack_input_embeds_{level}"][1].tolist() for level in range(2)] == [[6, 7, 8], [9, 10, 11]]
    levels.unbind()
    without = model._get_deepstack_input_embeds(5)
    if not calls_alike:
        assert without is None
        return
    assert list(without.tensors) == list(bound.tensors)
    assert all(x.dtype == torch.float16 and x.shape == (5, 3) and not x.any() for x in without.tensors.values())


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
    """So many that no more fit the scheduler's budget, each as large as the processor makes them."""
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
