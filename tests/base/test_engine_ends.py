"""Ends of engines in one process: memory is free again, and other engines go on."""

import os
import subprocess
import sys
from collections.abc import Callable

from conftest import BUNDLED_MODEL

from model_runner_base.testing.models import TinyModel

RUN = """
import sys
import weakref
from model_runner_base.testing.engine import Engines, greedy, runner_of
from model_runner_base.testing.time_limit import OutOfTime, limit_steps

engines = Engines("auto", enforce_eager=True)
for is_cut in (False, True, False):
    llm = engines.get(sys.argv[1], is_new=True)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    llm.generate(prompt, greedy(4), use_tqdm=False)
    try:
        with limit_steps(llm, 0.0 if is_cut else float("inf")):
            llm.generate(prompt, greedy(4), use_tqdm=False)
    except OutOfTime:
        assert is_cut
    weights = [weakref.ref(parameter) for parameter in runner_of(llm).model.parameters()]
    del llm
    engines.close()
    print("KEPT", sum(weight() is not None for weight in weights), "OF", len(weights) > 0, flush=True)
"""


def test_weights_of_every_engine_are_freed() -> None:
    """An engine keeps no memory of the device, also after a run that was cut."""
    out = subprocess.run(
        [sys.executable, "-c", RUN, BUNDLED_MODEL],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.stdout.count("KEPT 0 OF True\n") == 3, out.stdout + out.stderr[-3000:]


TWO = """
import sys
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, model_parallel_is_initialized

def start(model):
    return LLM(model, max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=1 << 20, enforce_eager=True,
               dtype="float32", skip_tokenizer_init=True)

def run(llm):
    return llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, temperature=0, detokenize=False),
                        use_tqdm=False)[0].outputs[0].token_ids

dense, experts = sys.argv[1:]
llm = start(dense)
alone = run(llm)
llm = start(dense)  # The first engine ends once the second one has started.
print("AFTER", run(llm) == alone)
other = start(experts)
others = run(other)
print("DENSE", run(llm) == alone)
del llm
print("EXPERTS", run(other) == others)
del other
cleanup_dist_env_and_memory()
print("LEFT", model_parallel_is_initialized())
"""


def test_an_engine_goes_on_when_another_one_ends(tiny_model: Callable[[str], TinyModel]) -> None:
    """An engine runs on when one that started before it ends, also if one of them needs groups of experts. The process
    groups end with the last engine."""
    out = subprocess.run(
        [sys.executable, "-c", TWO, BUNDLED_MODEL, tiny_model("mixtral").path],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = [line for line in out.stdout.splitlines() if line.startswith(("AFTER", "DENSE", "EXPERTS", "LEFT"))]
    assert said == ["AFTER True", "DENSE True", "EXPERTS True", "LEFT False"], out.stdout + out.stderr[-3000:]
