"""A step that repeats the last one: the same requests, one token each, every one a token further.

Where drafts are verified: as many drafts each, every one as far as the scheduler says that it may be.

Most steps of a server are such. Nothing is planned or packed for them: the device knows each row's token and position
(``DeviceRows``), the graph works out whatever follows from them, and what is left are the entries of the packed buffer
that change where a request enters a cache block. It applies from the second step of the same requests on, until a
request comes, goes or resumes, a step has more tokens, or the buffer has no room for another attention pair.
"""

from collections.abc import Sequence

import numpy as np

from model_runner_base.host_loops import compiled, put_ints
from model_runner_base.requests.states import RequestStates
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.components import RepeatPart, StepComponents
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.schedule import Schedule


class Repeat:
    """Follows a schedule that repeats the last step, or says no."""

    def __init__(self, requests: RequestStates) -> None:
        self._requests = requests
        self._batch: InputBatch | None = None
        self._step: PackedStep
        self._parts: Sequence[RepeatPart]
        self._rows: list[int] | None = None
        self._same: Sequence[str] | None = None
        """A list that was found to name the last step's requests, in this step."""

    def watch(self, batch: InputBatch, step: PackedStep, components: StepComponents) -> None:
        """The next step may repeat this one, which ``components`` have just packed.

        So it is if all its requests decode, each with as many tokens as its row holds, and yield a token; and every
        component can keep its sections up.
        """
        self._batch = None
        if batch.is_decode and batch.num_sampled == batch.num_reqs and batch.num_tokens == batch.num_decode_tokens:
            parts = components.repeat(batch, step)
            if parts is not None:
                self._batch, self._step, self._rows = batch, step, None
                self._parts = parts

    def stop(self) -> None:
        """No step repeats what came before."""
        self._batch = None

    def rows_of(self, req_ids: Sequence[str]) -> list[int] | None:
        """The rows of requests, if they are the last step's: a look-up each would be most of a repeat's cost."""
        if self._batch is None or self._batch.req_ids != req_ids:
            return None
        self._same = req_ids
        if self._rows is None:
            self._rows = self._batch.rows.tolist()
        return self._rows

    def follow(self, schedule: Schedule) -> tuple[InputBatch, PackedStep] | None:
        """The step moved on to the scheduled one; None if that is another, or has no room, and must be built."""
        batch, same, self._same = self._batch, self._same, None
        if batch is None or schedule.total_num_tokens != batch.num_tokens or schedule.arrivals:
            return None
        if schedule.continued is not same and schedule.continued != batch.req_ids:
            return None
        step, is_first = self._step, not batch.is_repeat
        if is_first:
            self._begin(batch)
        step.entries.clear()
        if batch.row_len == 1:
            move_on(self._requests.num_computed, batch.rows, batch.num_computed, batch.seq_lens)
        else:
            put_ints(schedule.num_computed, batch.num_computed)
            batch.seq_lens[:] = batch.num_computed + batch.row_len
        for part in self._parts:
            if not part.follow(batch.num_computed):
                if batch.row_len == 1:
                    self._requests.num_computed[batch.rows] -= 1  # Built from scratch, the step counts itself.
                self._batch = None
                return None
        if is_first:
            step.send()
        else:
            step.send_entries()
        return batch, step

    def _begin(self, batch: InputBatch) -> None:
        """All were sampled, so the device knows all tokens and positions."""
        batch.is_repeat = True
        batch.num_computed, batch.seq_lens = batch.num_computed.copy(), batch.seq_lens.copy()
        for part in self._parts:
            part.begin(batch.num_computed)


@compiled
def move_on(progress: np.ndarray, rows: np.ndarray, num_computed: np.ndarray, seq_lens: np.ndarray) -> None:
    """Moves requests on by a token: ``num_computed`` and ``seq_lens`` [R], and their ``progress`` by row."""
    for index in range(len(rows)):
        num_computed[index] += 1
        seq_lens[index] += 1
        progress[rows[index]] = seq_lens[index]
