"""Repeated steps (steady decode): the requests of the last step again, one token each, each one token further.

Where drafts are verified, each has as many drafts as before, and is at most as far as the scheduler says.

Most steps of a server repeat the last one. Nothing is planned or packed for them. The device knows each row's token and
position (``DeviceRows``), and the graph works out whatever follows from these. The first of them sends the packed
buffer once more. The others send only those entries of it that change where a request enters a cache block. Steps are
repeated from the second step of the same requests on, until a request comes, goes or resumes, a step has more tokens,
or the buffer has no space for another attention pair.

Where several batches are in flight in turn, as in a pipeline of stages, each of them repeats (``RepeatRing``).
"""

from collections.abc import Sequence

import numpy as np

from model_runner_base.step.batch import InputBatch
from model_runner_base.step.components import SectionUpdater, StepComponents
from model_runner_base.step.graph_policy import SizeDoor
from model_runner_base.step.host_loops import compiled, put_ints
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import RequestStates
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import StepSize


class Repeat:
    """Recognises a schedule that repeats the last step (steady decode), and moves the packed step on."""

    def __init__(self, requests: RequestStates) -> None:
        self._requests = requests
        self._batch: InputBatch | None = None
        self._step: PackedStep
        self._updaters: Sequence[SectionUpdater]
        self._rows: list[int] | None = None
        self._same: Sequence[str] | None = None
        """List of this step's schedule that ``rows_of`` found to be equal to the last step's requests."""

    def place_for(self, batch: InputBatch) -> int:
        """Place of the packed buffer that a batch is built in, among those of the steps that are remembered."""
        return 0

    def watch(self, batch: InputBatch, step: PackedStep, components: StepComponents) -> None:
        """Notes a step that ``components`` have just packed, and whether the next step may repeat it.

        It may if all requests decode, each with as many tokens as its row holds, if all of them yield a token, and if
        every component can keep its sections up to date.
        """
        self._batch = None
        if batch.is_decode and batch.num_sampled == batch.num_reqs and batch.num_tokens == batch.num_decode_tokens:
            updaters = components.repeat(batch, step)
            if updaters is not None:
                self._batch, self._step, self._rows = batch, step, None
                self._updaters = updaters

    def stop(self) -> None:
        """Forgets the last step, so that the next one is built from scratch."""
        self._batch = None

    def rows_of(self, req_ids: Sequence[str]) -> list[int] | None:
        """Returns the rows of requests if they are the last step's, else None.

        A look-up of each would be most of a repeated step's cost.
        """
        if self._batch is None or self._batch.req_ids != req_ids:
            return None
        self._same = req_ids
        if self._rows is None:
            self._rows = self._batch.rows.tolist()
        return self._rows

    def advance(self, schedule: Schedule) -> tuple[InputBatch, PackedStep] | None:
        """Moves the last step on to the scheduled one, sends what changes, and returns it.

        Returns None if the schedule is another one, or if the buffer has no space for the changes. Then the step must
        be built.
        """
        batch, same, self._same = self._batch, self._same, None
        if batch is None or schedule.total_num_tokens != batch.num_tokens or schedule.arrivals:
            return None
        if schedule.continued is not same and schedule.continued != batch.req_ids:
            return None
        step, is_first = self._step, not batch.is_repeat
        if is_first:
            self._begin(batch)
        step.entries.clear()
        if batch.decode_query_len == 1:
            move_on(self._requests.num_computed, batch.rows, batch.num_computed, batch.seq_lens)
        else:
            put_ints(schedule.num_computed, batch.num_computed)
            batch.seq_lens[:] = batch.num_computed + batch.decode_query_len
        if not (self._advance_sections(batch.num_computed) and self._runs_at(step.size)):
            if batch.decode_query_len == 1:
                self._requests.num_computed[batch.rows] -= 1  # Built from scratch, the step counts itself.
            self._batch = None
            return None
        if is_first:
            step.send()
        else:
            step.send_entries()
        return batch, step

    def _advance_sections(self, num_computed: np.ndarray) -> bool:
        """Moves the sections on; False as soon as the buffer has no space for one's changes."""
        # A generator in ``all`` takes three times as long.
        for updater in self._updaters:  # noqa: SIM110
            if not updater.advance(num_computed):
                return False
        return True

    def _runs_at(self, size: StepSize) -> bool:
        """Whether a step that can be repeated runs at the size that it was packed at. Called before it is sent."""
        return True

    def _begin(self, batch: InputBatch) -> None:
        """Begins a series of repeated steps. All requests were sampled, so the device knows all tokens and
        positions."""
        batch.is_repeat = True
        batch.num_computed, batch.seq_lens = batch.num_computed.copy(), batch.seq_lens.copy()
        for updater in self._updaters:
            updater.begin(batch.num_computed)

    # ---- One of several: ``RepeatRing`` ----

    @property
    def is_empty(self) -> bool:
        """Whether no step is remembered."""
        return self._batch is None

    def forget_shared(self, req_ids: set[str]) -> None:
        """Forgets a step with one of these requests, which another step is about to move on."""
        if self._batch is not None and not req_ids.isdisjoint(self._batch.req_ids):
            self._batch = None


class AgreedRepeat(Repeat):
    """Repeats of ranks that agree on sizes: a step is repeated if they agree on the size that it was packed at."""

    def __init__(self, requests: RequestStates, agree: SizeDoor) -> None:
        super().__init__(requests)
        self._agree = agree

    def _runs_at(self, size: StepSize) -> bool:
        return self._agree.is_repeated_at(size)


class RepeatRing(Repeat):
    """Several steps that are remembered, each with requests and a packed buffer of its own, which repeat in turn."""

    def __init__(self, requests: RequestStates, remembered: Sequence[Repeat]) -> None:
        self._requests = requests
        self._remembered = remembered
        self._place = 0

    def place_for(self, batch: InputBatch) -> int:
        """Place that remembers no step, or else the one after the place that was taken last."""
        req_ids, last = set(batch.req_ids), self._place
        for each in self._remembered:
            each.forget_shared(req_ids)
        count = len(self._remembered)
        places = [(last + 1 + distance) % count for distance in range(count)]
        self._place = next((place for place in places if self._remembered[place].is_empty), places[0])
        return self._place

    def watch(self, batch: InputBatch, step: PackedStep, components: StepComponents) -> None:
        self._remembered[self._place].watch(batch, step, components)

    def stop(self) -> None:
        for each in self._remembered:
            each.stop()

    def rows_of(self, req_ids: Sequence[str]) -> list[int] | None:
        for each in self._remembered:
            if (rows := each.rows_of(req_ids)) is not None:
                return rows
        return None

    def advance(self, schedule: Schedule) -> tuple[InputBatch, PackedStep] | None:
        for each in self._remembered:
            if (advanced := each.advance(schedule)) is not None:
                # Rows of the other batches are idle in this step, and must not be taken for those of paused requests.
                self._requests.note_step(advanced[0].rows)
                return advanced
        return None


def make_repeat(requests: RequestStates, agree: SizeDoor, agrees: bool, num_in_flight: int = 1) -> Repeat:
    """Makes the memory of ``num_in_flight`` steps that may repeat in turn; ``agrees``: ranks agree on their sizes."""
    remembered = [AgreedRepeat(requests, agree) if agrees else Repeat(requests) for _ in range(num_in_flight)]
    return RepeatRing(requests, remembered) if num_in_flight > 1 else remembered[0]


@compiled
def move_on(progress: np.ndarray, rows: np.ndarray, num_computed: np.ndarray, seq_lens: np.ndarray) -> None:
    """Moves requests on by a token: ``num_computed`` and ``seq_lens`` [R], and their ``progress`` by row."""
    for index in range(len(rows)):
        num_computed[index] += 1
        seq_lens[index] += 1
        progress[rows[index]] = seq_lens[index]
