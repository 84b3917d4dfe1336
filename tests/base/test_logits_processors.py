"""Changes of the batch, as vLLM's logits processors are told them, and NaN counts."""

from collections.abc import Callable

import pytest
import torch
from conftest import engine
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality, process_dict_updates

from model_runner_base.heads.sampling.logits_processors import batch_update
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.testing.models import TinyModel

INFOS = [RequestInfo(SamplingParams(), 0, [index]) for index in range(8)]
batches = st.lists(st.sampled_from(range(8)), unique=True, max_size=8)


def documented_order(before: list[int], update: BatchUpdate) -> dict[int, int]:
    """A batch that removes, adds and moves as the interface's docstring says."""
    places = dict(enumerate(before))
    for index in update.removed:
        del places[index]
    for index, _, prompt, _ in update.added:
        places[index] = prompt[0]
    for source, target, direction in update.moved:
        if direction == MoveDirectionality.SWAP:
            places[source], places[target] = places[target], places[source]
        else:
            places[target] = places.pop(source)
    return places


@given(batches, batches)
def test_a_batch_update_makes_the_new_batch_of_the_old(before: list[int], after: list[int]) -> None:
    update = batch_update([INFOS[i] for i in before], [INFOS[i] for i in after])
    if update is None:
        assert before == after
        return
    assert update.batch_size == len(after)
    assert documented_order(before, update) == dict(enumerate(after))
    entries = dict(enumerate(before))
    process_dict_updates(entries, update, lambda _, prompt, __: prompt[0])
    # vLLM's helper leaves the old entry of a request that moved, at an index that is not read any more.
    assert [entries[index] for index in range(len(after))] == after


def test_nans_are_counted_where_asked(tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7, 8, 9]}]
    counts: list[dict[str, int]] = []
    with engine(tiny_model("llama").path, max_model_len=64, enforce_eager=True) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        update = scheduler.update_from_output

        def watch(scheduled: object, output: ModelRunnerOutput) -> object:
            counts.append(output.num_nans_in_logits or {})
            return update(scheduled, output)

        scheduler.update_from_output = watch
        llm.generate(prompts, params, use_tqdm=False)
        assert {count for step in counts for count in step.values()} == {0}
        counts.clear()

        def break_three_tokens(model: torch.nn.Module) -> None:
            model.lm_head.weight.data[[3, 50, 200]] = float("nan")

        llm.apply_model(break_three_tokens)
        llm.generate(prompts, params, use_tqdm=False)
        assert {count for step in counts for count in step.values()} == {3}
