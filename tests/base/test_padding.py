"""Padding of steps to sizes of graphs, which happens only where ``use_piecewise_graph`` is True."""

from collections.abc import Callable
from typing import Any

import pytest
from conftest import engine
from greedy import expected, generate
from test_reload import FEW_BUCKETS

from model_runner_base.step.graph_policy import BucketPolicy
from model_runner_base.step.sizes import StepLimits, StepSize
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import runner_of
from model_runner_base.testing.models import TinyModel

PROMPTS = random_prompts(20, [5, 30, 70])


class LargestAlone(BucketPolicy):
    """Policy in place of an eager device's; it captures nothing."""

    def configure(self, limits: StepLimits) -> None:
        super().configure(limits)
        self.set_sizes(limits.largest_sizes)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[list[StepSize], StepSize]]]:
    """Notes what the steps of a runner need, and the size that each runs at."""

    def watch(runner: Any) -> list[tuple[list[StepSize], StepSize]]:
        steps, choose = list[tuple[list[StepSize], StepSize]](), runner.graph_policy.choose

        def record(needs: list[StepSize]) -> StepSize:
            steps.append((needs, choose(needs)))
            return steps[-1][1]

        monkeypatch.setattr(runner.graph_policy, "choose", record)
        return steps

    return watch


def test_an_eager_device_runs_steps_at_their_own_sizes(
    tiny_model: Callable[[str], TinyModel], chosen: Callable[[Any], list[tuple[list[StepSize], StepSize]]]
) -> None:
    model = tiny_model("llama")
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        runner, steps = runner_of(llm), chosen(runner_of(llm))
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        assert runner.use_piecewise_graph is False
        assert runner.tokenwise_graph_batch_sizes == []
    assert len({size.num_tokens for _, size in steps}) > 2
    assert all([size] == needs for needs, size in steps)


@pytest.mark.parametrize("is_eager", [True, pytest.param(False, marks=pytest.mark.openxla)], ids=["eager", "compiled"])
def test_a_device_with_graphs_runs_steps_at_the_sizes_it_names(
    is_eager: bool,
    tiny_model: Callable[[str], TinyModel],
    chosen: Callable[[Any], list[tuple[list[StepSize], StepSize]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes are those of compiled graphs, or on an eager device those of a policy of the two largest."""
    model = tiny_model("llama")
    if is_eager:
        monkeypatch.setattr("model_runner_base.model_runner.GraphPolicy", LargestAlone)
    buckets = {"neuron_config": FEW_BUCKETS}
    with engine(model.path, max_model_len=128, enforce_eager=is_eager, additional_config=buckets) as llm:
        runner, steps = runner_of(llm), chosen(runner_of(llm))
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        assert runner.use_piecewise_graph is True
        named = set(runner.tokenwise_graph_batch_sizes)
        assert {size.num_tokens for _, size in steps} == named
    assert any(size not in needs for needs, size in steps)
