"""Requests in steady decode, each in one row of a few arrays: their progress, and when their next events are due."""

from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request, RequestStatus

from model_runner_base.scheduling.releases import (
    FREES_BY_TOKENS_READ,
    count_step,
    is_plain_decode,
    num_in_flight,
    stop_tokens,
)
from model_runner_base.scheduling.rows.outputs import Batch, RowEvents
from model_runner_base.scheduling.rows.request_arrays import MAX_STOPS, NEVER, RequestArrays
from model_runner_base.scheduling.rows.row_request import RowRequest
from model_runner_base.scheduling.state_group import StateManager

BlockIds = tuple[list[int], ...]
"""New blocks of a request, by group."""
FAR = 1 << 40
"""Number of tokens beyond any window."""


class ScheduledRows(RequestArrays):
    """The rows, in the order in which the requests run.

    Requests in a row are ``RowRequest``s. A row whose request has left it is ``loose`` until ``update``.
    """

    def __init__(self, manager: KVCacheManager, max_model_len: int, has_placeholders: bool) -> None:
        self.requests: list[Request] = []
        self.req_ids: list[str] = []
        self.loose: set[int] = set()
        self._manager, self._pool = manager, manager.block_pool
        groups = manager.coordinator.single_type_managers
        self._growing = [each for each in groups if not isinstance(each, StateManager)]
        """Managers of groups with attention, whose blocks grow; those of recurrent layers have none that do."""
        self.num_growing = len(self._growing)
        self._unchanged: BlockIds = ([],) * (len(groups) - self.num_growing)
        """New blocks of the groups of recurrent layers, the last ones: none."""
        self._windows = [each for each in self._growing if isinstance(each, SlidingWindowManager)]
        self._attention = self._growing[0]
        self.block_size = self._attention.block_size
        self._max_model_len = max_model_len
        self._has_placeholders = has_placeholders
        self._batch: Batch | None = None
        self._batches: set[Batch] = set()
        """Batches of steps in flight, whose row indices are updated when rows move."""
        self._row_of: dict[str, int] | None = None
        super().__init__(self.block_size)

    # ---- Requests that have a row ----

    def update(self, running: list[Request], scheduled_before: Set[str] | None, in_flight: Iterable[Batch]) -> None:
        """Gives rows to running requests from the first on, up to one that cannot have a row; no later one has one.

        ``scheduled_before`` are the ids of the last step; None: any request may have a row, whenever it last ran.
        """
        self._batches = set(in_flight)
        if self.loose:
            self._fill_loose(scheduled_before)
        count = len(self.requests)
        if running[:count] != self.requests:
            same = 0
            while same < min(count, len(running)) and running[same] is self.requests[same]:
                same += 1
            for row in range(same, count):
                self._release_row(row)
            self._drop(list(range(same, count)))
            self.loose.clear()
            count = same
        if count < len(running):
            self._append(running, count, scheduled_before)

    def can_take(self, request: Request, scheduled_before: Set[str] | None) -> bool:
        """Whether the request is in steady decode: each next step yields one token of it, and nothing else happens."""
        params, req_id = request.sampling_params, request.request_id
        if type(request) is not Request or request.status != RequestStatus.RUNNING or params is None:
            return False
        if request.pooling_params is not None or request.mm_features:
            return False
        if request.trace_headers is not None or request.stop_reason is not None or request.events:
            return False
        if request.num_nans_in_logits or request.spec_token_ids or request.is_prefill_chunk:
            return False
        if not is_plain_decode(request) or (scheduled_before is not None and req_id not in scheduled_before):
            return False
        computed, known, placeholders = request.num_computed_tokens, request.num_tokens, request.num_output_placeholders
        if known + placeholders - computed != 1 or known >= request.num_prompt_tokens + request.max_tokens - 1:
            return False
        if computed + 2 >= self._max_model_len or (placeholders and not self._has_placeholders):
            return False
        num_blocks = -(-computed // self.block_size)
        if any(len(each.req_to_blocks.get(req_id, ())) != num_blocks for each in self._growing):
            return False
        if self._attention.enable_caching and len({each.num_cached_block.get(req_id) for each in self._growing}) > 1:
            return False
        stops = stop_tokens(request)
        return len(stops) <= MAX_STOPS and all(-NEVER < token < NEVER for token in stops)

    def _fill_loose(self, scheduled_before: Set[str] | None) -> None:
        dropped = []
        for row in sorted(self.loose):
            if self.can_take(self.requests[row], scheduled_before):
                self._take(row, self.requests[row])
            else:
                dropped.append(row)
        self.loose.clear()
        if dropped:
            self._drop(dropped)

    def _append(self, running: list[Request], start: int, scheduled_before: Set[str] | None) -> None:
        row = start
        while row < len(running) and self.can_take(running[row], scheduled_before):
            row += 1
        if row == start:
            return
        self._reserve(row)
        for request in running[start:row]:
            self.requests.append(request)
            self.req_ids.append(request.request_id)
        self._moved()
        for index in range(start, row):
            self._take(index, running[index])

    def _take(self, row: int, request: Request) -> None:
        """Puts a request into its row."""
        size, params = self.block_size, request.sampling_params
        assert params is not None
        computed, known = request.num_computed_tokens, request.num_tokens
        length = min(
            request.num_prompt_tokens + request.max_tokens, NEVER
        )  # A request may ask for more than int64 holds.
        last, cap = min(length - 1, self._max_model_len - 1), min(length, self._max_model_len)
        next_full = (known // size + 1) * size
        next_block = len(self._attention.req_to_blocks[request.request_id]) * size
        next_cached = NEVER
        if self._attention.enable_caching:
            next_cached = (self._attention.num_cached_block.get(request.request_id, 0) + 1) * size
        next_left = 0 if self._windows else NEVER  # The first step with the row finds out.
        self._numbers[:, row] = (
            computed,
            known,
            request.num_output_placeholders,
            known,
            next_block,
            next_cached,
            next_full,
            next_left,
            last,
            min(next_block, next_cached - 1, next_left, last),
            min(next_full, next_cached + 1, cap),
            length,
            cap,
            request.num_prompt_tokens,
            getattr(request, "num_cached_tokens", 0),
            getattr(request, "num_external_computed_tokens", 0),
            num_in_flight(request) - computed + known,
            getattr(request, "last_sched_seq", 0),
            request.client_index,
            request.structured_output_request is not None,
            getattr(params, "num_logprobs", params.logprobs) is not None,
            False,
        )
        self._set_stops(row, stop_tokens(request))
        request.__dict__["decode_rows"] = self
        request.__class__ = RowRequest

    def _drop(self, dropped: list[int]) -> None:
        """Removes rows whose requests have left them; the rows after them move up."""
        count = len(self.requests)
        is_staying = np.ones(count, bool)
        is_staying[dropped] = False
        staying = np.flatnonzero(is_staying)
        moved = np.full(count, -1)
        moved[staying] = np.arange(len(staying))
        for batch in self._batches:
            batch.rows = moved[: len(batch.req_ids)] if batch.rows is None else np.append(moved, -1)[batch.rows]
        self._move_up(staying)
        for row in reversed(dropped):
            del self.requests[row], self.req_ids[row]
        self._moved()

    def _moved(self) -> None:
        """Forgets everything that depends on which request has which row."""
        self._show(len(self.requests))
        self._batch = self._row_of = None

    def _row(self, request: Request) -> int:
        if self._row_of is None:
            self._row_of = {req_id: row for row, req_id in enumerate(self.req_ids)}
        return self._row_of[request.request_id]

    # ---- Requests as others see them ----

    def bring_up_to_date(self, request: Request) -> None:
        self._write(self._row(request))

    def release(self, request: Request) -> None:
        self._release_row(self._row(request))

    def release_all(self) -> None:
        """Takes all requests out of their rows."""
        if not self.requests:
            return
        for row in range(len(self.requests)):
            self._release_row(row)
        self.loose.clear()
        self.requests, self.req_ids, self._num_stops = [], [], 0
        self._moved()

    def _release_row(self, row: int) -> None:
        if row not in self.loose:
            request = self.requests[row]
            self._write(row)
            del request.__dict__["decode_rows"]
            request.__class__ = Request
            self.loose.add(row)

    def _write(self, row: int) -> None:
        state = self.requests[row].__dict__
        state["num_computed_tokens"] = int(self.computed[row])
        state["num_output_placeholders"] = int(self.placeholders[row])
        if "num_in_flight_tokens" in state:
            state["num_in_flight_tokens"] = int(self.in_flight[row] + self.computed[row] - self.known[row])
        if "last_sched_seq" in state:
            state["last_sched_seq"] = int(self.last_step[row])
        start, end = int(self.written[row]), int(self.known[row])
        if start < end:
            # The tokens lie in one block, because a full block is written at once.
            first = start % self.block_size
            _append_tokens(state, self._tokens[row, first : first + end - start].tolist())
            self.written[row] = end

    # ---- A step is scheduled ----

    def events(self) -> RowEvents | None:
        """Events of the next step; None if a request that was at its end is no longer there."""
        rows = (self.computed >= self.next_event).nonzero()[0]
        if not len(rows):
            return RowEvents(rows, rows, rows, rows)
        computed = self.computed[rows]
        at_end = rows[computed >= self.last[rows]]
        if len(at_end):
            idle = self._is_at_end(at_end)
            if (idle < self.idle[at_end]).any():
                return None
            if (idle > self.idle[at_end]).any():
                self.idle[at_end] = idle
                self._batch = None
            rows = rows[self.idle[rows] == 0]
            computed = self.computed[rows]
        entering = rows[computed >= self.next_block[rows]]
        caching = rows[self.known[rows] >= self.next_cached[rows]]
        leaving = rows[computed >= self.next_left[rows]] if self._windows else rows[:0]
        return RowEvents(rows, entering, caching, leaving)

    def _is_at_end(self, rows: np.ndarray) -> np.ndarray:
        """Whether vLLM schedules no further step for each row, because the token in flight is the last."""
        computed, placeholders = self.computed[rows], self.placeholders[rows]
        is_length = (placeholders > 0) & (computed + 2 - placeholders >= self.length[rows])
        return is_length | (computed >= self._max_model_len - 1)

    def batch(self) -> Batch:
        """Returns the batch of rows that the next step schedules."""
        if self._batch is None:
            self._batch = Batch(self, np.flatnonzero(self.idle == 0) if self.idle.any() else None)
        return self._batch

    def grow(self, events: RowEvents) -> list[BlockIds]:
        """Gives blocks to the rows that enter one, in order, and returns their ids; caches the blocks that are due."""
        if not len(events.rows):
            return []
        size = self.block_size
        ids = self._grow_groups(events) if self._windows or self.num_growing > 1 else self._grow_one_group(events)
        self.next_block[events.entering] += size
        if len(events.caching):
            known = self.known[events.caching]
            for row, num_tokens in zip(events.caching.tolist(), known.tolist(), strict=True):
                self._manager.cache_blocks(self.requests[row], num_tokens)
            self.next_cached[events.caching] = (known // size + 1) * size
        rows = events.rows
        self.next_event[rows] = np.minimum(
            np.minimum(self.next_block[rows], self.next_cached[rows] - 1),
            np.minimum(self.next_left[rows], self.last[rows]),
        )
        return ids

    def _grow_one_group(self, events: RowEvents) -> list[BlockIds]:
        ids: list[BlockIds] = []
        blocks = self._pool.get_new_blocks(len(events.entering))
        for row, block in zip(events.entering.tolist(), blocks, strict=True):
            self._attention.req_to_blocks[self.req_ids[row]].append(block)
            ids.append(([block.block_id], *self._unchanged))
        return ids

    def _grow_groups(self, events: RowEvents) -> list[BlockIds]:
        """Frees blocks that have left a window and gives new ones row by row, because free blocks have an order."""
        ids: list[BlockIds] = []
        entering, leaving = set(events.entering.tolist()), set(events.leaving.tolist())
        for row in sorted(entering | leaving):
            if row in leaving:
                self._free_left(row)
            if row in entering:
                blocks = self._pool.get_new_blocks(self.num_growing)
                for manager, block in zip(self._growing, blocks, strict=True):
                    manager.req_to_blocks[self.req_ids[row]].append(block)
                ids.append((*([block.block_id] for block in blocks), *self._unchanged))
        return ids

    def _free_left(self, row: int) -> None:
        """Frees the blocks of a row that have left their windows, and notes when the next one may."""
        # Tokens whose blocks may go: those that are computed, less those in flight where vLLM waits for these.
        done = int(self.known[row] - self.in_flight[row] if FREES_BY_TOKENS_READ else self.computed[row])
        next_left = NEVER
        for manager in self._windows:
            manager.remove_skipped_blocks(self.req_ids[row], done)
            num_left = manager.get_num_skipped_tokens(done) // self.block_size
            before = FAR - manager.get_num_skipped_tokens(FAR)  # Tokens that a window keeps.
            next_left = min(next_left, (num_left + 1) * self.block_size + before)
        self.next_left[row] = next_left

    def advance(self, batch: Batch, step: int) -> None:
        """Counts a step that has been scheduled; ``step`` is its number, or 0 where vLLM does not number steps."""
        at: slice | np.ndarray = slice(None) if batch.rows is None else batch.rows
        self.computed[at] += 1
        if self._has_placeholders:
            self.placeholders[at] += 1
        if step:
            self.last_step[at] = step
        # Requests that a KV connector has written while the step was made.
        for row in self.loose:
            if not self.idle[row]:
                count_step(self.requests[row], int(self._has_placeholders), step)

    # ---- A step's tokens arrive ----

    def receive(self, batch: Batch, token_ids: list[int], also_theirs: Sequence[int]) -> list[int]:
        """Takes a token for each request of the batch.

        Returns the places of requests that are left to vLLM's own code: they may end, belong to a loose row, or are
        ``also_theirs``. These have left their rows, and their tokens are not taken.
        """
        tokens = np.array(token_ids)
        at: slice | np.ndarray = slice(len(tokens))
        rows, places = self._all[at], None
        if batch.rows is not None:
            at = rows = batch.rows
            if (rows < 0).any():
                places = np.flatnonzero(rows >= 0)
                at, tokens = rows[places], tokens[places]
                rows = at
        before = self.known[at]
        known = before + 1
        is_theirs = self._is_theirs(at, tokens)
        near = (known >= self.next_output[at]).nonzero()[0]
        if len(near):
            is_theirs[near] |= self._ends(rows[near], known[near])
        their_places: list[int] = []
        if places is not None or also_theirs or is_theirs.any():
            their_places = self._their_places(batch, places, is_theirs, also_theirs)
            for row in rows[is_theirs].tolist():
                self._release_row(row)
        self._tokens[rows, before % self.block_size] = tokens
        self.known[at] = known
        if self._has_placeholders:
            self.placeholders[at] -= 1
        if len(near):
            self._fill(rows[near])
        return their_places

    def _is_theirs(self, at: slice | np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Whether each request's token may be its last, or the request has left its row."""
        is_theirs = np.zeros(len(tokens), bool)
        for stops in self._stops[: self._num_stops]:
            is_theirs |= stops[: len(self.requests)][at] == tokens
        if self.loose:
            is_loose = np.zeros(len(self.requests), bool)
            is_loose[list(self.loose)] = True
            is_theirs |= is_loose[at]
        return is_theirs

    def _ends(self, rows: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Whether each row is at its length limit, or has got two outputs since its block was due to be cached."""
        ends = known >= self.cap[rows]
        return ends | (known > self.next_cached[rows]) if self._has_placeholders else ends

    def _their_places(
        self, batch: Batch, places: np.ndarray | None, is_theirs: np.ndarray, also_theirs: Sequence[int]
    ) -> list[int]:
        """Returns the places in the batch that vLLM's own code updates, and marks ``also_theirs`` in ``is_theirs``.

        ``is_theirs`` is for the requests that have rows, which are at ``places``; None: all.
        """
        if places is None:
            is_theirs[list(also_theirs)] = True
            return is_theirs.nonzero()[0].tolist()
        whole = np.ones(len(batch.req_ids), bool)
        whole[places] = is_theirs
        whole[list(also_theirs)] = True
        is_theirs[:] = whole[places]
        return whole.nonzero()[0].tolist()

    def _fill(self, near: np.ndarray) -> None:
        """Writes the tokens of full blocks into the requests' lists, and hashes the blocks."""
        rows = near[self.known[near] >= self.next_full[near]]
        if len(rows):
            ends = self.known[rows]
            firsts = self.written[rows] % self.block_size
            for row, first, block in zip(rows.tolist(), firsts.tolist(), self._tokens[rows].tolist(), strict=True):
                if row not in self.loose:
                    request = self.requests[row]
                    _append_tokens(request.__dict__, block[first:])
                    request.__class__ = Request  # The hasher then reads plain attributes.
                    request.update_block_hashes()
                    request.__class__ = RowRequest
            self.written[rows] = ends
            self.next_full[rows] = ends + self.block_size
        self.next_output[near] = np.minimum(
            np.minimum(self.next_full[near], self.cap[near]), self.next_cached[near] + 1
        )


def _append_tokens(state: dict[str, Any], tokens: list[int]) -> None:
    """Appends to the two lists of tokens in a request's attributes, ``state``."""
    state["_output_token_ids"].extend(tokens)
    state["_all_token_ids"].extend(tokens)
