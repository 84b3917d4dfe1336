"""Ends of engines in the kit's process: a device has all of its memory again, whichever engine comes next."""

import os
import subprocess
import sys

from conftest import BUNDLED_MODEL

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
