"""The conformance kit holds NeuronWorker to vLLM's promises, with openxla's graphs."""

import json

import pytest
import test_conformance
from _pytest.mark.expression import Expression
from counts import IS_FULL
from kit_runs import (
    COMPILED,
    COMPILED_NOW,
    FEATURES_COMPILED,
    FEWER,
    IN_TURNS,
    OF_SIZES,
    SIZES_COMPILED,
    SIZES_COMPILED_NOW,
    TEXT_COMPILED,
    assert_all_pass,
    collected,
    measure,
)

pytestmark = pytest.mark.openxla

NEURON = ["neuron_runner.worker.NeuronWorker", *FEWER, "--engine-options"]
DEVICE = "Neuron runner on PJRT CPU"
# The largest sizes alone, since each is traced anew for each of some forty engines; five where sizes matter: they are
# compiled while steps run, and steps choose among them.
LARGEST = [*NEURON, json.dumps({"additional_config": {"neuron_config": {"max_padding": 1}}})]
SEVERAL = [*NEURON, json.dumps({"additional_config": {"neuron_config": {"max_padding": 0.5}}})]
# tests/neuron/test_tensor_parallel.py has two ranks and four.
ALL_BUT_SIZES = f"not {OF_SIZES} and not (test_ranks.py or test_stages.py or test_replicas.py)"


def test_keeps_every_promise(pytestconfig: pytest.Config) -> None:
    is_recorded = pytestconfig.getoption("record")
    chosen = ALL_BUT_SIZES if IS_FULL or is_recorded else f"({COMPILED_NOW}) and {ALL_BUT_SIZES}"
    status, results, printed = measure(DEVICE, [*LARGEST, "-k", chosen], is_recorded)
    assert_all_pass(status, results, printed, "Values in float16")  # XLA sums float16 in float16 there.


def test_sizes_that_are_compiled_while_steps_run(pytestconfig: pytest.Config) -> None:
    is_recorded = pytestconfig.getoption("record")
    is_whole = IS_FULL or is_recorded
    chosen = OF_SIZES if is_whole else " or ".join(SIZES_COMPILED_NOW)
    status, results, printed = measure(DEVICE, [*SEVERAL, "-k", chosen], is_recorded)
    assert status == 0, printed[-8000:]
    assert len(results) == 11 if is_whole else results
    assert all(result.startswith("passes") for result in results.values()), printed[-8000:]


def test_each_part_of_the_selection_has_cases() -> None:
    """A check that has another name now would go to the example device in silence."""
    cases = [case.lower() for case in collected("test_")]
    for part in [*TEXT_COMPILED, *FEATURES_COMPILED, *IN_TURNS, *SIZES_COMPILED]:
        chosen = Expression.compile(part)
        assert any(chosen.evaluate(lambda word, case=case, **_: word.lower() in case) for case in cases), part
    for case in cases:
        turns = [part for part in IN_TURNS if Expression.compile(part).evaluate(lambda word, **_: word.lower() in case)]  # noqa: B023
        assert len(turns) < 2, f"{case} would wait for two turns: {turns}"


def test_a_check_that_one_device_leaves_out_runs_on_another() -> None:
    """Cases run here or on the example device, on this release or on the newest, if not all at one commit."""
    ours, newest = test_conformance.FURTHER, test_conformance.FURTHER_ON_THE_NEWEST
    example = collected(test_conformance.but([*test_conformance.LEFT_OUT_WITH_OPENXLA, *ours]))
    example |= collected(test_conformance.but([*test_conformance.LEFT_OUT_OF_THE_NEWEST, *newest]))
    here = collected(f"({COMPILED}) and {ALL_BUT_SIZES}") | collected(" or ".join(SIZES_COMPILED))
    assert collected("test_") - example - here == set() and example and here
