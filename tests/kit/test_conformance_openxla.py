"""The conformance kit holds NeuronWorker to vLLM's promises, with openxla's graphs."""

import json

import pytest
import test_conformance
from counts import IS_FULL
from kit_runs import FEWER, assert_all_pass, collected, measure

pytestmark = pytest.mark.openxla

NEURON = ["neuron_runner.worker.NeuronWorker", *FEWER, "--engine-options"]
DEVICE = "Neuron runner on PJRT CPU"
# The largest sizes alone, since each is traced anew for each of some forty engines; five where sizes matter: they are
# compiled while steps run, and steps choose among them.
LARGEST = [*NEURON, json.dumps({"additional_config": {"neuron_config": {"max_padding": 1}}})]
SEVERAL = [*NEURON, json.dumps({"additional_config": {"neuron_config": {"max_padding": 0.5}}})]
OF_SIZES = "(test_compilation or test_schedules or test_scheduled_writes)"
# What the example device meets in full, in part, since an engine's start takes ten seconds and more: of the
# distributions one, of the ways to give logprobs one, and of each drafter's graphs one engine.
SOME = " and ".join(
    [
        "(not distributions or under_penalties)",
        "not (logprobs_mode and (raw or processed_logprobs))",
        "not (draft-always-wrong or [draft-often-right] or eagle-synchronous)",
        "not (test_windows and (synchronous or gemma3))",
        "not test_wrong_drafts",
        "not (classes_of_tokens and bert)",
        "not (test_prompt_embeddings or test_priorities or test_start_by_figures)",
        # Files of tests/base and tests/project hold sessions, reload and the server to the same promises on openxla.
        "not (test_sessions.py or test_reload.py or test_server.py)",
        "not (test_preemption.py or test_draft_gaps or test_reasoning or test_long_contexts)",
        # Files of tests/base have these models on openxla, and others with rotary positions and windows like these.
        "not (test_attention and (gemma2 or gpt-oss or scalars or rotary_style or short_window))",
    ]
)
# Cases that run with --full and --record alone: base/test_right_drafts_beside_windows.py has gpt-oss with EAGLE-3 on
# openxla, and neuron/test_images.py graphs of transcription and of further models that see.
FURTHER = "not (test_windows and gpt-oss or test_transcription.py or test_multimodal.py and llava)"
# Schedules with chunked attention, and with windows in some layers, take two minutes here; tests/base compares both
# architectures on openxla with transformers.
OF_SIZES_HERE = OF_SIZES if IS_FULL else f"{OF_SIZES} and not (test_random_schedules and (gemma3 or chunks))"
# tests/neuron/test_tensor_parallel.py has two ranks and four.
ALL_BUT_SIZES = f"not {OF_SIZES} and not test_ranks.py" + ("" if IS_FULL else f" and {SOME}")


def test_keeps_every_promise(pytestconfig: pytest.Config) -> None:
    is_recorded = pytestconfig.getoption("record")
    chosen = ALL_BUT_SIZES if IS_FULL or is_recorded else f"{ALL_BUT_SIZES} and {FURTHER}"
    status, results, printed = measure(DEVICE, [*LARGEST, "-k", chosen], is_recorded)
    assert_all_pass(status, results, printed, "Values in float16")  # XLA sums float16 in float16 there.


def test_sizes_that_are_compiled_while_steps_run(pytestconfig: pytest.Config) -> None:
    status, results, printed = measure(DEVICE, [*SEVERAL, "-k", OF_SIZES_HERE], pytestconfig.getoption("record"))
    assert status == 0, printed[-8000:]
    assert len(results) == 11 and all(result.startswith("passes") for result in results.values()), printed[-8000:]


def test_a_check_that_one_device_leaves_out_runs_on_the_other() -> None:
    """Cases that the example device leaves out run here, on this release."""
    example = collected(" and ".join(f"not ({each})" for each in test_conformance.FURTHER))
    here = collected(f"{ALL_BUT_SIZES} and {FURTHER}") | collected(OF_SIZES_HERE)
    assert collected("test_") - example - here == set() and example and here
