"""Steady decode: the same requests again, one token each, by adding one to what the packed buffer holds.

Everything that grows by one a step (positions, sequence lengths, a backend's cache slots) lies side by side at the
front of the buffer (``Section.grows``). So a step in which nobody enters a cache block is one addition, and one in
which some do touches only theirs. It applies from the second step of the same requests on, until a request comes, goes
or resumes, a step has more tokens, or the buffer has no room for another attention pair.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from model_runner_base.attention.adapter import SteadySections
from model_runner_base.host_loops import compiled
from model_runner_base.input_batch import InputBatch, PackedStep
from model_runner_base.request_states import RequestStates


class SteadyDecode:
    """A step of pure decode that was packed, all of whose requests yield a token, and its successors.

    ``batch`` and ``packed`` are always those of the last step.
    """

    def __init__(
        self, batch: InputBatch, packed: PackedStep, plans: Sequence[SteadySections], requests: RequestStates
    ) -> None:
        self.batch = batch
        self.packed = packed
        self._plans = plans
        self._requests = requests

    @cached_property
    def rows(self) -> list[int]:
        """Of the batch's requests."""
        return self.batch.rows.tolist()

    def advance(self, scheduler_output: SchedulerOutput) -> bool:
        """Moves on to the scheduled step; False if it is another, or has no room, and has to be built from scratch."""
        batch = self.batch
        if not _schedules_the_same(scheduler_output, batch):
            return False
        if not batch.follows:
            self._begin()
        num_computed = self._requests.num_computed
        step_on(self._growing, self._increments, num_computed, batch.rows, batch.seq_lens)
        if all(plan.advance() for plan in self._plans):
            return True
        num_computed[batch.rows] -= 1  # Built from scratch, the step counts itself.
        return False

    def _begin(self) -> None:
        """The batch's arrays become views of the buffer, which moves them on."""
        batch, views = self.batch, self.packed.views
        # What a step adds to the growing sections: 1, and 0 for padding.
        self._growing, self._increments, increment_views = self.packed.growing
        self._increments[:] = 0
        for name in ("positions", "sample_positions"):
            increment_views[name][: batch.num_reqs] = 1
        for plan in self._plans:
            plan.begin(increment_views)
        batch.num_computed = views["positions"][: batch.num_reqs]
        batch.seq_lens = views["sample_positions"][: batch.num_reqs]
        # All were sampled, so all input tokens lie on the device.
        views["token_sources"][: batch.num_reqs] = batch.rows
        batch.follows = True


@compiled
def step_on(
    growing: np.ndarray, increments: np.ndarray, num_computed: np.ndarray, rows: np.ndarray, seq_lens: np.ndarray
) -> None:
    """Adds to what grows, ``seq_lens`` [R] among it, which are then the requests' ``num_computed`` [rows]."""
    for index in range(len(growing)):
        growing[index] += increments[index]
    for index in range(len(rows)):
        num_computed[rows[index]] = seq_lens[index]


def _schedules_the_same(scheduler_output: SchedulerOutput, last: InputBatch) -> bool:
    """Whether a step has the requests of ``last``, in its order and in their rows, with one token each."""
    return (
        scheduler_output.total_num_scheduled_tokens == last.num_reqs
        and not scheduler_output.scheduled_new_reqs
        and not scheduler_output.scheduled_cached_reqs.resumed_req_ids
        and scheduler_output.scheduled_cached_reqs.req_ids == last.req_ids
    )
