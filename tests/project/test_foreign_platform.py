"""A worker of ours on a platform that knows nothing of it, such as vLLM's own of CUDA, whose requests are checked."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import BUNDLED_MODEL
from lane import HAS_OPENXLA
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7]

SERVE = """
import sys
from vllm.platforms.interface import Platform
from examples import plain_device

class ForeignPlatform(plain_device.PlainPlatform):
    stands_before_requests = False
    validate_request = Platform.validate_request

plain_device.ForeignPlatform = ForeignPlatform
from model_runner_base.testing.platform_choice import choose_platform
choose_platform("examples.plain_device.ForeignPlatform")
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(sys.argv[1], worker_cls="examples.plain_device.PlainWorker", max_model_len=64, max_num_seqs=3)
engine = llm.llm_engine

def send(name, prompt, **params):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **params)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)

for token in (-1, -(2**31)):
    try:
        send(f"bad {token}", [token])
        print("QUEUED", token)
    except Exception as error:
        print("REFUSED", token)
if sys.argv[3:]:
    send("honest", eval(sys.argv[2]))
    send("clash", [5, 6], structured_outputs=StructuredOutputsParams(choice=["7"]), allowed_token_ids=[20])
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0] for output in engine.step()}
    print("HONEST", list(done["honest"].token_ids))
    print("CLASH", done["clash"].finish_reason, done["clash"].stop_reason)
"""


def serve(*more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | variables
    command = [sys.executable, "-c", SERVE, str(BUNDLED_MODEL), str(PROMPT), *more]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    return out


def test_requests_are_held_on_a_foreign_platform() -> None:
    out = serve("all").stdout
    assert "REFUSED -1\nREFUSED -2147483648\n" in out and "QUEUED" not in out
    tokens = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL).generate(
        torch.tensor([PROMPT]), max_new_tokens=4, min_new_tokens=4, do_sample=False
    )
    assert f"HONEST {tokens[0, len(PROMPT) :].tolist()}\n" in out
    assert "CLASH error no token is left that structured_outputs, allowed_token_ids allow" in out
    assert "will end the engine" not in out


@pytest.mark.newest
def test_where_the_plugin_is_left_out_the_worker_says_so() -> None:
    """vLLM 0.16 queues what a device takes for an index, and an engine that ran it would end."""
    out = serve(VLLM_PLUGINS="acme")
    assert ("QUEUED -2147483648\n" in out.stdout) == HAS_OPENXLA
    assert "add model_runner_base to it" in out.stdout + out.stderr


STATES = """
import sys
from vllm.platforms.interface import Platform
from examples import plain_device

class ForeignPlatform(Platform):
    device_name = device_type = "cpu"
    dtypes = plain_device.PlainPlatform.dtypes

    @classmethod
    def check_and_update_config(cls, vllm_config):
        from vllm.config import CompilationMode
        vllm_config.load_config.device = "cpu"
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.custom_ops = ["all"]

# All that a device answers itself, and nothing of what prepares engines of this library.
LEFT_OUT = {"pre_register_and_update", "validate_request", "update_block_size_for_backend", "__init__"}
for name, value in vars(plain_device.PagedPlatform).items():
    if name not in LEFT_OUT and name not in vars(ForeignPlatform) and name != "stands_before_requests":
        setattr(ForeignPlatform, name, value)

plain_device.ForeignPlatform = ForeignPlatform
from model_runner_base.testing.platform_choice import choose_platform
choose_platform("examples.plain_device.ForeignPlatform")
from pathlib import Path
from vllm import LLM
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import DEFAULTS, generate, greedy, tokens_of
from model_runner_base.testing.models import make_checkpoint

model = make_checkpoint(sys.argv[2], Path(sys.argv[1]))
own = {"worker_cls": "examples.plain_device.PlainWorker", "enforce_eager": True}
llm = LLM(str(model.path), **DEFAULTS | own, enable_prefix_caching=True, block_size=16)
prompts = random_prompts(111, [50, 70, 33])
for _ in range(2):
    outputs = generate(llm, prompts, greedy(8))
    assert tokens_of(outputs) == [model.greedy(prompt, 8) for prompt in prompts]
    print("CACHED", [output.num_cached_tokens for output in outputs])
"""


def serve_states(directory: Path, model: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | variables
    command = [sys.executable, "-c", STATES, str(directory), model]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_prefixes_of_recurrent_layers_on_a_foreign_platform(tmp_path: Path) -> None:
    """States are kept at the ends of the user's blocks, though the platform leaves vLLM to choose how.

    vLLM 0.16 chooses for Mamba what its kernels alone have, and 0.33 raises the blocks of hybrid models.
    """
    out = serve_states(tmp_path, "mamba" if HAS_OPENXLA else "granite-hybrid")
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    assert "CACHED [0, 0, 0]\nCACHED [48, 64, 32]\n" in out.stdout


@pytest.mark.once
def test_states_without_the_plugin_are_refused(tmp_path: Path) -> None:
    """vLLM's own scheduler gives out no states: the engine says so before it loads a model."""
    out = serve_states(tmp_path, "lfm2", VLLM_PLUGINS="acme")
    assert "does not give out states of recurrent layers: leave out scheduler_cls; where VLLM_PLUGINS" in out.stderr
