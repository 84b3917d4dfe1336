"""Random schedules of a model with recurrent layers: after them each request's state is that of its own tokens.

A state that is wrong may show in a text much later, or not at all. So the tensors of the runner are compared.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis.stateful import invariant
from vllm import LLM

from model_runner_base.step.trace import StepTrace
from model_runner_base.testing.checks.test_schedules import OPTIONS, Bench, Run, Schedules, bench_of, run_schedules
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.schedules import Request, Share
from model_runner_base.testing.states import expected_states, states_in

RULES = 15
"""Number of rules in a schedule; states are compared after each."""


class StateRun(Run):
    """Requests under way, and the tokens that the runner has computed of each."""

    def __init__(self, bench: Bench, seed: int, is_async: bool) -> None:
        super().__init__(bench, seed, is_async)
        self._computed: dict[Request, list[int | None]] = {}

    def note_fed(self, shares: list[Share], seen: StepTrace) -> None:
        super().note_fed(shares, seen)
        for share in shares:
            fed = seen.requests[share.request.name].token_ids
            self._computed[share.request] = [*share.tokens[: share.start], *fed]

    def check_states(self) -> None:
        """Compares the states of all requests that run, also of those that no step had of late."""
        for request in self.requests:
            if request.is_running:
                tokens = [token for token in self._computed[request] if token is not None]
                assert len(tokens) == request.num_computed
                found, wanted = states_in(self.bench.runner, request.state), expected_states(self.bench.model, tokens)
                assert found.keys() == wanted.keys()
                for layer, parts in wanted.items():
                    for got, want in zip(found[layer], parts, strict=True):
                        message = f"{request.name}: state {request.state} of layer {layer} after {len(tokens)} tokens"
                        np.testing.assert_allclose(
                            got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max(), err_msg=message
                        )


class StateSchedules(Schedules):
    """Rules of ``Schedules``; after each, states are compared."""

    run_class = StateRun

    @invariant()
    def states_are_right(self) -> None:
        if isinstance(self.run, StateRun):
            self.run.check_states()


def test_states_of_random_schedules(
    engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], pytestconfig: pytest.Config
) -> None:
    """A request's state is that of HF transformers after its tokens, whatever happens to it and to others.

    Requests are preempted, also without the runner being told, come back with other states, and end at any step.
    """
    model = tiny_model("qwen3-next")
    with bench_of(engine(model.path, **OPTIONS, enforce_eager=True), model) as bench:
        assert bench.num_states
        run_schedules(partial(StateSchedules, bench), pytestconfig, RULES)
