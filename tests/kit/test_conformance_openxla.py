"""The conformance kit holds NeuronWorker to vLLM's promises, with openxla's graphs."""

import json

import pytest
from counts import IS_FULL
from kit_runs import FEWER, assert_all_pass, run

pytestmark = pytest.mark.openxla

NEURON = ["neuron_runner.worker.NeuronWorker", *FEWER, "--engine-options"]
# The largest sizes alone, since each is traced anew for each of some forty engines; five where sizes matter: they are
# compiled while steps run, and steps choose among them.
LARGEST = [*NEURON, json.dumps({"additional_config": {"neuron_config": {"max_padding": 1}}})]
SEVERAL = [*NEURON, json.dumps({"additional_config": {"neuron_config": {"max_padding": 0.5}}})]
OF_SIZES = "(test_compilation or test_schedules)"
# What the example device meets in full, in part, since an engine's start takes ten seconds and more: of the
# distributions one, of the ways to give logprobs one, and of each drafter's graphs one engine.
SOME = " and ".join(
    [
        "(not distributions or under_penalties)",
        "not (logprobs_mode and (raw or processed_logprobs))",
        "not (draft-always-wrong or [draft-often-right] or eagle-synchronous)",
    ]
)
ALL_BUT_SIZES = f"not {OF_SIZES}" if IS_FULL else f"not {OF_SIZES} and {SOME}"


def test_keeps_every_promise() -> None:
    status, results, printed = run([*LARGEST, "-k", ALL_BUT_SIZES])
    assert_all_pass(status, results, printed)


def test_sizes_that_are_compiled_behind_and_chosen_from() -> None:
    status, results, printed = run([*SEVERAL, "-k", OF_SIZES])
    assert status == 0, printed[-8000:]
    assert len(results) == 8 and all(result.startswith("passes") for result in results.values()), printed[-8000:]
