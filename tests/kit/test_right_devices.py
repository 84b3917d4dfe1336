"""Devices that are right, of any dtype and any layout of caches, pass the conformance kit; it catches faults there."""

import re
from pathlib import Path

import pytest
from device_fault import variant
from fault import FaultyModule
from forks import WITHOUT_SEARCH, Run, run_kit
from kernel_faults import FUSED, OWN_FORMAT, TRANSPOSED
from mutation import Mutation
from mutations import MUTATIONS

BFLOAT16_ALONE = "dtypes = (torch.bfloat16,)"
"""Body of a platform that has no other dtype."""
# An operator as docs/new_device/how_to.md has it: vLLM's class takes any arguments.
OWN_NORM = """
from vllm.model_executor.layers.layernorm import RMSNorm
@RMSNorm.register_oot
class Norm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return self.forward_native(x, residual)
"""
IN_BFLOAT16 = {
    "the window is one token too wide": "test_short_window",
    "a token does not see itself": "test_scalars",
    "keys are written one slot further": "test_one_request and llama",
}
"""Deliberate faults that the kit must catch in bfloat16, too, and the checks that do, all of which compare tokens."""


def run_on(module: str, directory: Path, *options: str) -> Run:
    """Runs the kit on a device of its own."""
    (directory / "faulty_device.py").write_text(module)
    device = ["faulty_device.PlainWorker", "--platform", "faulty_device.PlainPlatform"]
    return run_kit([*device, *WITHOUT_SEARCH, *options], directory, timeout_s=600, VLLM_PLUGINS="", COLUMNS="1000")


def rows_of(printed: str) -> dict[str, str]:
    """Results by group, with what the last column says of each."""
    found = re.findall(r"^  (\w[\w ]*?)  +\S.*?  +((?:passes|FAILS|not \w+)\b.*)$", printed, re.MULTILINE)
    return {f"{group} {number}": result for number, (group, result) in enumerate(found)}


def test_a_device_that_computes_in_bfloat16_alone(tmp_path: Path) -> None:
    """A device with slots as the last dimension and an RMSNorm of its own passes all rows, which say what counted."""
    module = variant(platform="import torch\n" + BFLOAT16_ALONE, attention=OWN_FORMAT, top=TRANSPOSED + OWN_NORM)
    chosen = "test_interfaces or test_equality and (one_request or arrivals) or test_scheduled_writes or test_scalars"
    chosen += " or test_rotary_style"
    chosen += " or test_logprobs_after_preemption"
    run = run_on(module, tmp_path, "--profile", "smoke", "-k", chosen)
    rows = rows_of(run.printed)
    assert run.status == 0 and len(rows) == 10, run.printed[-5000:]
    assert all(result.startswith("passes") for result in rows.values()), run.printed[-5000:]
    assert "in bfloat16" in run.printed
    counts = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) tokens counted", run.printed)]
    assert len(counts) == 7 and sum(one for one, _ in counts) > 0.3 * sum(all_ for _, all_ in counts), run.printed[
        -5000:
    ]


@pytest.mark.once
def test_a_layout_with_fused_dimensions(tmp_path: Path) -> None:
    """Slots and numbers of a head are one dimension of caches: their checks look all the same."""
    run = run_on(variant(attention=OWN_FORMAT, top=FUSED), tmp_path, "-k", "test_scheduled_writes")
    rows = rows_of(run.printed)
    assert run.status == 0 and [each.split()[0] for each in rows.values()] == ["passes"] * 3, run.printed[-5000:]


@pytest.mark.once
def test_a_format_that_cannot_be_written_outside_of_a_step(tmp_path: Path) -> None:
    """Rows that cannot look say why, and are no failure."""
    writes = "    def write(self, kv_cache, blocks, offsets, key, value):\n"
    closed = TRANSPOSED.replace(writes, f"{writes}        assert len(blocks) < 100, 'too many tokens'\n")
    run = run_on(variant(attention=OWN_FORMAT, top=closed), tmp_path, "-k", "test_start or test_old_contents")
    rows = [*rows_of(run.printed).values()]
    assert run.status == 0 and rows[0].startswith("passes") and rows[-1].startswith("not looked"), run.printed[-5000:]
    assert "Format.write does not run outside of a step: too many tokens" in rows[-1]


@pytest.mark.once
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_faults_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Faults of attention and slots that float32 catches are caught by tokens in bfloat16."""
    mutation: Mutation = next(each for each in MUTATIONS if each.name == name)
    device = ["examples.plain_device.PlainWorker", "--platform", "examples.plain_device.PlainPlatform"]
    options = [
        "-x",
        "--no-shrinking",
        "--assert=plain",
        "--dtype",
        "bfloat16",
        *WITHOUT_SEARCH,
        "-k",
        IN_BFLOAT16[name],
    ]
    arguments = {"compiles_loops": False, "timeout_s": 600}
    run = run_kit([*device, *options], tmp_path, FaultyModule(mutation), **arguments, VLLM_PLUGINS="", COLUMNS="1000")  # type: ignore[arg-type]
    assert run.status == 1 and re.search(r" FAILS .*bfloat16 moves logits by \d\.\d+", run.printed), run.printed[-3000:]
