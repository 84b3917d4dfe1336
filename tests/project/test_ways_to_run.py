"""Ways to run besides in process: vLLM's engine core in one of its own, and the main job as the README starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BUNDLED_MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]

MULTIPROCESS = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    few = {"num_batched_tokens_buckets": [32], "num_seqs_buckets": [2], "context_length_buckets": [64]}
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64}
    llm = LLM(sys.argv[1], additional_config={"neuron_config": few}, **limits)
    outputs = llm.generate(["The LORD is my shepherd;", "And he"], SamplingParams(temperature=0, max_tokens=12))
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print("RESULT", type(llm.llm_engine.engine_core).__name__, tokens, flush=True)
"""


@pytest.mark.full
def test_engine_core_in_its_own_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MULTIPROCESS)
    out = subprocess.run(
        [sys.executable, script, BUNDLED_MODEL],
        env={"VLLM_LOGGING_LEVEL": "ERROR", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="float32")
    expected = []
    for prompt in ("The LORD is my shepherd;", "And he"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected.append(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist())
    assert f"RESULT SyncMPClient {expected}\n" in out.stdout


def test_main_job_prints_text_and_a_summary() -> None:
    out = subprocess.run(
        [sys.executable, ROOT / "examples" / "generate.py", "--prompt", "And the king said", "--max-tokens", "30"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    bar = [(int(done), int(total)) for done, total in re.findall(r"\| (\d+)/(\d+) \[", out.stderr)]
    assert bar == sorted(bar) and bar[-1][0] == bar[-1][1] > 2, "the bar goes back, or does not end"
    # Notes of libraries that a user who starts an engine cannot act on.
    assert not re.search("Gloo|CUDA_HOME|Triton|Inductor|Defaulting to PJRT", out.stdout + out.stderr)
    assert re.search(r"\d+ tokens in [\d.]+ s: \d+ tokens/s", out.stdout)
    counts = re.search(r"(\d+) of (\d+) model graphs when ready, [1-9]\d* XLA compilations", out.stdout)
    assert counts is not None and 0 < int(counts[1]) < int(counts[2])
    at_the_end = re.search(r"(\d+) of them at the end, \d+ compilations while steps ran", out.stdout)
    assert at_the_end is not None and int(counts[1]) <= int(at_the_end[1]) <= int(counts[2])
    # The text reads as English of its domain: its words are the common words of the source.
    text = re.search(r"And the king said(.*?)\n\n\d+ tokens", out.stdout, re.DOTALL)
    assert text is not None
    words = re.findall(r"[a-z]+", re.sub(r"\x1b\[\d*m", "", text[1]).lower())
    common = """
        the and of to that in he shall unto for i his a lord they be is him not them it with all thou thy was
        god which my me said but ye their have thee from as are when this out were upon man by you israel king
        up came had son people there come she behold will land men before let day one also forth go
        saying what children hand because an earth your good our god am so went no if at we who these into on
        do then now us did or answered great say speak made heart her done know am david servant servants sons
        life name art hath make any
    """
    assert len(words) > 10 and sum(word in common.split() for word in words) > 0.6 * len(words), words
