"""Updates of the runner's states by the scheduler's step: rows, cache blocks, states of the head and of components."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from model_runner_base.heads.head import Head
from model_runner_base.inputs.adapters.adapters import Adapters
from model_runner_base.inputs.multimodal.encoder import Encoder
from model_runner_base.step.components import StepComponents
from model_runner_base.step.host_loops import int_array
from model_runner_base.step.repeat import Repeat
from model_runner_base.step.request_failures import RequestErrors
from model_runner_base.step.request_states import BlockTable, RequestStates
from model_runner_base.step.schedule import Arrival, Schedule


class StateUpdates:
    """Updates for the finished, preempted, arriving and continued requests of each step."""

    def __init__(
        self,
        requests: RequestStates,
        block_tables: Sequence[BlockTable],
        head: Head,
        components: StepComponents,
        adapters: Adapters,
        encoder: Encoder,
        repeat: Repeat,
        errors: RequestErrors,
    ) -> None:
        self._requests = requests
        self._block_tables = block_tables
        self._head = head
        self._components = components
        self._adapters = adapters
        self._encoder = encoder
        self._repeat = repeat
        self._errors = errors

    def apply(self, schedule: Schedule) -> Schedule:
        """Applies a step's changes to all states; returns the step without the requests that failed."""
        requests, errors = self._requests, self._errors
        for req_id in schedule.finished:
            self._forget(req_id)
        for req_id in schedule.preempted:
            requests.release(req_id)
        if errors:
            errors.forget(schedule.finished)
            schedule = errors.without_failed(schedule)
        if schedule.arrivals:
            requests.free_rows_for([arrival.req_id for arrival in schedule.arrivals], schedule.num_tokens)
            for arrival in schedule.arrivals:
                errors.admit_or_fail(arrival, requests.infos.get(arrival.req_id), self._admit)
            schedule = self._leave_out_failed(schedule)
        if any(schedule.new_blocks):
            self._append_blocks(schedule)
        return schedule

    def refuse(self, schedule: Schedule, error: Exception) -> Schedule:
        """Applies a step's changes, but ends each of its requests with ``error``; returns the step without them.

        Nothing of these requests reaches the device. Items that the step should have encoded are encoded later.
        """
        arriving = {arrival.req_id: arrival.items for arrival in schedule.arrivals}
        for req_id in schedule.num_tokens:
            if req_id not in self._errors:
                known = self._requests.infos.get(req_id)
                self._errors.fail(req_id, known.items if known else arriving[req_id], error)
        left = self.apply(schedule)
        for req_id in schedule.num_tokens:
            self._forget(req_id)
        self._encoder.put_off(item.identifier for item in left.failed_items)
        return replace(left, failed_items=[])

    def take_back(self, schedule: Schedule, has_drafts: bool) -> None:
        """Takes continued requests of a step back to where the scheduler has them.

        A request goes back if blocks are missing that a KV connector should have loaded for it: they are computed, and
        the token after them is sampled again. That happens in its first step since it took its row, so the host has all
        of its tokens.

        Raises RuntimeError for a request that goes back later: only the device has had its last tokens. ``has_drafts``:
        beyond the known tokens the host's own number may be higher, by drafts that were wrong.
        """
        if not schedule.continued:
            return
        requests, same = self._requests, self._repeat.rows_of(schedule.continued)
        rows = requests.rows_of(schedule.continued) if same is None else int_array(same)
        num_computed = int_array(schedule.num_computed)
        known = requests.num_known[rows]
        is_behind = num_computed < requests.num_computed[rows]
        if has_drafts:
            is_behind &= num_computed < known
        for index in is_behind.nonzero()[0].tolist():
            row, req_id = int(rows[index]), schedule.continued[index]
            if num_computed[index] + schedule.num_tokens[req_id] > known[index]:
                raise RuntimeError(
                    f"the KV connector says that blocks of {req_id} were not loaded, after the request's first step: "
                    "name them in the step in which they are needed first"
                )
            info, token_ids = requests.by_row[row], requests.token_ids[row, : requests.num_known[row]].tolist()
            assert info is not None
            requests.num_computed[row] = num_computed[index]
            self._head.admit(row, info, token_ids)
            self._components.admit(row, info, token_ids)
            self._repeat.stop()

    def _forget(self, req_id: str) -> None:
        self._requests.forget(req_id)
        self._head.forget(req_id)

    def _leave_out_failed(self, schedule: Schedule) -> Schedule:
        """Frees the rows of requests that failed in this step; returns the step without them."""
        failed = [req_id for req_id in schedule.num_tokens if req_id in self._errors] if self._errors else ()
        for req_id in failed:
            self._forget(req_id)
        return self._errors.without_failed(schedule) if failed else schedule

    def _admit(self, arrival: Arrival) -> None:
        """Gives a new or resumed request its row, and tells all parts that keep a state for each row."""
        requests, head, req_id = self._requests, self._head, arrival.req_id
        info = known = requests.infos.get(req_id)
        if info is None or not arrival.resumes(info):
            info = head.info_of(arrival)
            if known is None:  # Otherwise a session goes on, and its first prompt was introduced before.
                head.introduce(req_id, info)
        if info.adapter is not None:
            self._adapters.expect(info.adapter)
        row = requests.admit(req_id, info, arrival.token_ids, arrival.num_computed)
        head.admit(row, info, arrival.token_ids)
        self._components.admit(row, info, arrival.token_ids)
        for table, block_ids in zip(self._block_tables, arrival.block_ids, strict=True):
            table.assign(row, block_ids)

    def _append_blocks(self, schedule: Schedule) -> None:
        """Gives continued requests their new blocks; while a step is repeated, most have none."""
        every = schedule.new_blocks
        rows = self._repeat.rows_of(schedule.continued)
        if rows is not None:
            rows = list(compress(rows, every))
        else:
            rows = [self._requests.rows[req_id] for req_id in compress(schedule.continued, every)]
        by_table = zip(*filter(None, every), strict=True)
        for table, block_ids in zip(self._block_tables, by_table, strict=True):
            table.append(rows, block_ids)
