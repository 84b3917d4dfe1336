"""The example of a vendor's device: small, complete, and served however vLLM comes to know its platform."""

import ast
import importlib
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import torch
from conftest import BUNDLED_MODEL
from lane import WITH_PLAIN_PLATFORM
from test_structure import HOOKS
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plain_device.py"
PROMPT = [5, 17, 300, 42, 9]
NEW_TOKENS = 12

INSTALLED = {"PYTHONPATH": WITH_PLAIN_PLATFORM["PYTHONPATH"]}
"""Environment in which nothing tells vLLM which of the installed platforms to take."""

BY_HAND = """
import vllm.platforms
from examples.plain_device import PlainPlatform
vllm.platforms.current_platform = PlainPlatform()
"""

SERVE = """
import sys
import vllm.platforms
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128, **eval(sys.argv[4]))
params = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": eval(sys.argv[3])}], params, use_tqdm=False)
foreign = sorted({"neuron_runner.platform", "neuron_runner.worker", "torch_xla"} & set(sys.modules))
print("RESULT", type(vllm.platforms.current_platform).__name__, foreign, list(output.outputs[0].token_ids), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "environment", "options"),
    [
        pytest.param(
            BY_HAND, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(ROOT)}, {}, marks=pytest.mark.once
        ),
        pytest.param("", INSTALLED, {}, marks=pytest.mark.newest),
        # The kit's row of ranks serves over two workers, and so do tests/base/test_*_ranks.py.
        pytest.param(
            "",
            INSTALLED,
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            marks=[pytest.mark.newest, pytest.mark.full],
        ),
    ],
    ids=["by hand, in process", "by entry point, multiprocess", "over two workers"],
)
def test_serves(how: str, environment: dict[str, str], options: dict[str, object]) -> None:
    """The example device serves next to an installed platform of another device, which must not be touched."""
    out = subprocess.run(
        [sys.executable, "-c", how + SERVE, BUNDLED_MODEL, str(NEW_TOKENS), str(PROMPT), str(options)],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    ids = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="float32").generate(
        torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    assert f"RESULT PlainPlatform [] {ids[0, len(PROMPT) :].tolist()}\n" in out.stdout


@pytest.mark.once
def test_prints_text_as_a_script() -> None:
    out = subprocess.run(
        [sys.executable, EXAMPLE],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    assert "In the beginning God created\033[1m " in out.stdout


def test_overrides_the_four_hooks_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    example = importlib.import_module("examples.plain_device")
    own = {name for name, value in vars(example.PlainModelRunner).items() if callable(value)}
    assert own == HOOKS
    own = {name for name, value in vars(example.PlainWorker).items() if not name.startswith("__")}
    assert own == {"model_runner_cls", "make_device"}
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        example.Absent  # noqa: B018


def test_is_under_150_lines_of_code() -> None:
    assert code_lines(EXAMPLE) < 150


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    text = path.read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)
