"""The conformance kit holds NeuronWorker to vLLM's promises, with openxla's graphs."""

import json

import pytest
from counts import IS_FULL
from kit_runs import FEWER_DRAWS, FEWER_SCHEDULES, assert_all_pass, run

pytestmark = pytest.mark.openxla

DRAWS = [] if IS_FULL else FEWER_DRAWS
NEURON = ["neuron_runner.worker.NeuronWorker", *FEWER_SCHEDULES, *DRAWS, "--engine-options"]
# The largest sizes alone, since each is traced anew for each of some forty engines; five where sizes matter: they are
# compiled behind the steps, and steps choose among them.
LARGEST = [*NEURON, json.dumps({"additional_config": {"neuron_config": {"max_padding": 1}}})]
SEVERAL = [*NEURON, json.dumps({"additional_config": {"neuron_config": {"max_padding": 0.5}}})]
OF_SIZES = "(test_compilation or test_schedules)"
# Of the distributions, which the example device meets all, one: in openxla's graphs its requests take a while.
SOME = "(not distributions or under_penalties)"


def test_keeps_every_promise() -> None:
    status, results, printed = run([*LARGEST, "-k", f"{SOME} and not {OF_SIZES}"])
    assert_all_pass(status, results, printed)


def test_sizes_that_are_compiled_behind_and_chosen_from() -> None:
    status, results, printed = run([*SEVERAL, "-k", OF_SIZES])
    assert status == 0, printed[-8000:]
    assert len(results) == 8 and all(result.startswith("passes") for result in results.values()), printed[-8000:]
