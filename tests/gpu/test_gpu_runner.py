"""The whole GPU runner on a CPU: its CUDA calls are replaced (cuda_stand_in.py), all else is real.

Each test runs in a process of its own, since a process has one platform.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUNDLED_MODEL
from counts import IS_FULL
from lane import HAS_OPENXLA
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PROMPTS = [[5, 17, 300, 42, 9], [1500], list(range(40, 90))]
NEW_TOKENS = 6
TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
"""Path of vLLM's own backend, with its metadata builder and kernels, in Triton's interpreter."""
EAGLE = {"method": "eagle", "model": str(BUNDLED_MODEL.with_name("kjv-eagle")), "num_speculative_tokens": 2}

SERVE = """
import json, sys
from model_runner_base.testing.platform_choice import choose_platform
choose_platform(sys.argv[1])
from vllm import LLM, SamplingParams
from vllm.forward_context import get_forward_context
import cuda_stand_in
from model_runner_base.step.trace import watch_steps
from model_runner_base.testing.engine import runner_of

# What Dynamo would fix at the first call has to be so in all.
calls = set()
load_model = cuda_stand_in.GPUWorker.model_runner_cls.load_model

def load_and_watch(runner):
    load_model(runner)
    def note(model, args, kwargs):
        missing = tuple(sorted(name for name, value in kwargs.items() if value is None))
        calls.add((missing, get_forward_context().all_moe_layers is None))
    runner.model.register_forward_pre_hook(note, with_kwargs=True)

cuda_stand_in.GPUWorker.model_runner_cls.load_model = load_and_watch
if sys.argv[2]:
    cuda_stand_in.KernelPlatform.attention = sys.argv[2]
llm = LLM(
    sys.argv[3], worker_cls="cuda_stand_in.StandInWorker", max_num_seqs=3, max_num_batched_tokens=32, max_model_len=64,
    **json.loads(sys.argv[6]),
)
print("CAPTURED", [size.as_row() for size in cuda_stand_in.RecordedGraph.captured])
params = SamplingParams(temperature=0, max_tokens=int(sys.argv[4]), ignore_eos=True)
with watch_steps(runner_of(llm)) as steps:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in eval(sys.argv[5])], params, use_tqdm=False)
print("SENT", [step.num_sent for step in steps])
print("TOKENS", [list(output.outputs[0].token_ids) for output in outputs])
print("KINDS OF CALLS", len(calls))
print("CAPTURED IN ALL", len(cuda_stand_in.RecordedGraph.captured), flush=True)
"""


def run(*arguments: object, **environment: str) -> str:
    out = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    return out.stdout


@pytest.fixture(scope="module")
def shortened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's first two layers of five, since each takes Triton's interpreter long; a full run has all."""
    if IS_FULL:
        return BUNDLED_MODEL
    path = tmp_path_factory.mktemp("shortened") / "model"
    shutil.copytree(BUNDLED_MODEL, path, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="float32", num_hidden_layers=2).save_pretrained(path)
    return path


def reference(path: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    generated = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        for ids in PROMPTS
    ]
    return [ids[0, -NEW_TOKENS:].tolist() for ids in generated]


@pytest.mark.parametrize(
    ("platform", "attention", "options"),
    [
        pytest.param("KernelPlatform", "", {}, marks=pytest.mark.once),
        pytest.param("PlanningPlatform", "", {"enable_prompt_embeds": True}, marks=pytest.mark.newest),
        pytest.param("KernelPlatform", TRITON, {}, marks=pytest.mark.newest),
        pytest.param("KernelPlatform", TRITON, {"speculative_config": EAGLE}, marks=pytest.mark.once),
    ],
    ids=["graphs keep metadata", "metadata planned each step, prompts may be embeddings", "triton", "triton, drafts"],
)
def test_tokens_of_whole_graphs(platform: str, attention: str, options: dict[str, Any], shortened: Path) -> None:
    """Steps, or those of pure decode, are replayed graphs; the largest was captured first, none after warm-up.

    Steps that repeat the last one go by what the graph of that one left on the device.
    """
    # vLLM takes Triton without a GPU for usable only where no GPU is meant to be seen yet.
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if attention else {}
    platform = f"cuda_stand_in.{platform}"
    model = BUNDLED_MODEL if "speculative_config" in options else shortened  # The head was trained on the whole model.
    out = run(*("-c", SERVE, platform, attention, model, NEW_TOKENS, PROMPTS, json.dumps(options)), **environment)
    assert f"TOKENS {reference(model)}\n" in out
    captured = eval(re.search(r"CAPTURED (\[.*\])", out)[1])  # type: ignore[index]
    in_all = int(re.search(r"CAPTURED IN ALL (\d+)", out)[1])  # type: ignore[index]
    assert captured and in_all == len(captured)
    assert captured == sorted(captured, reverse=True)
    sent = eval(re.search(r"SENT (\[.*\])", out)[1])  # type: ignore[index]
    assert sent.count(0) >= (1 if options.get("speculative_config") else 2), "repeated steps send nothing"
    assert "KINDS OF CALLS 1\n" in out


PROMISES_ON_THE_NEWEST = {
    "KernelPlatform": {
        "preemption and window or interrupted or host_does_not_wait": 3,
        "test_arrivals_and_aborts and eagle or hostile": 3,
        "multimodal and qwen3 and test_tokens": 1,
        "scheduled_writes or padding_of_nan or results_are_kept or copies_are_finished or host_buffers": 10,
    },
    "PlanningPlatform": {
        "prefix_hits and llama and not around or interrupted or no_compilation or random_schedules and llama": 4,
    },
}
PROMISES_WITH_OPENXLA = {
    "KernelPlatform": {
        "multimodal and qwen3 and (test_tokens or cached_prefix)": 2,
        "test_pooling and (vectors_of_tokens or preemption or mixed_batches and qwen3)": 3,
    },
    "PlanningPlatform": {
        "multimodal and qwen3 and (test_tokens or several_requests or aborted)": 3,
        "speculation and preempt and (often or lookup)": 3,
    },
}
PROMISES = PROMISES_WITH_OPENXLA if HAS_OPENXLA else PROMISES_ON_THE_NEWEST
"""Checks of the kit by pytest's -k expressions, each with how many it adds to the others of its platform.

Each lane has some, since together they take minutes: what they show of one release may differ on the other."""


@pytest.mark.parametrize("platform", PROMISES)
def test_promises(platform: str) -> None:
    """Checks of the kit pass, some of them; docs/gpu.md has the command for all, which takes longer."""
    chosen = PROMISES[platform]
    worker = ("cuda_stand_in.StandInWorker", "--platform", f"cuda_stand_in.{platform}")
    fewer = () if IS_FULL else ("--schedules", 6)
    out = run("-m", "model_runner_base.testing", *worker, "-k", " or ".join(chosen), *fewer)
    assert re.search(rf"^{sum(chosen.values())} passed, \d+ deselected", out, re.M), out[-3000:]
    assert "not supported" not in out, out[-3000:]
