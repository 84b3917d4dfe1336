"""Two schedulers in lockstep, vLLM's own and ours: the same requests, the same tokens, and all that they make of it."""

import random
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from scheduler_setting import VOCAB_SIZE, Asked, AsyncTurns, EagerAsyncRows, EagerRows, Setting, SyncTurns, make
from scheduler_state import asked, caches_of, same, state_of, told
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from model_runner_base.scheduling.rows.row_request import RowRequest

NUM_ADAPTERS = 5
"""Number of adapters that requests ask for, "none" among them."""


@dataclass
class Habits:
    """Behaviour of the clients, as chances a step."""

    arrivals: float = 0.3
    aborts: float = 0.02
    resets: float = 0.005
    forced_resets: float = 0.005
    n: float = 0.1
    structured: float = 0.05
    logprobs: float = 0.1
    sessions: float = 0.05
    drains: float = 0.02
    shuffles: float = 0.2
    no_tokens: float = 0.0
    longest_output: int = 60
    longest_prompt: int = 100
    num_clients: int = 2


def some_habits(**further: st.SearchStrategy[Any]) -> st.SearchStrategy[Habits]:
    """Habits of all kinds of clients, with those of ``further``."""
    return st.builds(
        Habits,
        arrivals=st.sampled_from([0.05, 0.3]),
        aborts=st.sampled_from([0, 0.02]),
        resets=st.sampled_from([0, 0.01]),
        forced_resets=st.sampled_from([0, 0, 0.01]),
        structured=st.sampled_from([0, 0.1]),
        drains=st.sampled_from([0, 0.1]),
        longest_output=st.sampled_from([20, 150]),
        **further,
    )


class FreedInOtherOrder(Exception):
    """Raised where several requests end in a step, one of them because its grammar rejects a token.

    Such a request gives back its blocks before the others, and vLLM's in the order of the batch: from there on requests
    get other blocks.
    """


class BothFailed(Exception):
    """Error when vLLM's own scheduler fails an assertion of its own, and ours fails the same one."""


class Pair:
    """Two schedulers, vLLM's and ours, stepped as an engine steps one of them."""

    def __init__(
        self,
        setting: Setting,
        habits: Habits,
        seed: int,
        ours: type[Scheduler] | None = None,
        stock: type[Scheduler] | None = None,
    ) -> None:
        """``ours`` and ``stock`` are the two schedulers' classes, chosen by the setting and the habits if None."""
        self.setting, self.habits = setting, habits
        self.random = random.Random(seed)
        plain: type[Scheduler] = AsyncScheduler if setting.is_async else Scheduler
        if habits.sessions or habits.forced_resets or habits.structured or setting.policy == "priority":
            plain = AsyncTurns if setting.is_async else SyncTurns
        self.both: list[Any] = [
            make(stock or plain, setting),
            make(ours or (EagerAsyncRows if setting.is_async else EagerRows), setting),
        ]
        self.depth = setting.depth if setting.is_async else 1
        self.in_flight: deque[tuple[list[SchedulerOutput], dict[str, list[int]]]] = deque()
        self.num_requests = 0
        self.sessions: list[str] = []
        self.has_failed = False
        self.num_rows = self.num_scheduled = self.num_preempted = self.num_steps = 0

    @property
    def stock(self) -> Any:
        return self.both[0]

    # ---- What the clients do ----

    def arrive(self) -> None:
        draw, habits = self.random, self.habits
        shared = draw.randrange(3)
        length = draw.randint(1, habits.longest_prompt)
        prompt = [(shared * 5 + index) % VOCAB_SIZE for index in range(min(length, draw.choice([0, 32, 70])))]
        prompt += [draw.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
        max_tokens = draw.randint(1, habits.longest_output)
        params: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": max_tokens,
            "min_tokens": draw.choice([0, 0, min(5, max_tokens)]),
            "ignore_eos": draw.random() < 0.5,
            "stop_token_ids": draw.choice([None, None, [3], [3, 11]]),
            "logprobs": 2 if draw.random() < habits.logprobs else None,
        }
        options: dict[str, Any] = {
            "priority": draw.randrange(3),
            "client_index": draw.randrange(habits.num_clients),
        }
        if self.setting.max_loras:
            adapter = draw.randrange(NUM_ADAPTERS)
            options["lora_request"] = LoRARequest(f"adapter {adapter}", adapter, "-") if adapter else None
        is_structured = draw.random() < habits.structured
        is_session = not is_structured and draw.random() < habits.sessions
        for _ in range(draw.randint(2, 4) if draw.random() < habits.n and not is_session else 1):
            req_id = str(self.num_requests)
            self.num_requests += 1
            options = {**options, "arrival_time": float(self.num_requests), "resumable": is_session}
            self._add(Asked(req_id, prompt, params, options, is_structured))
            if is_session:
                self.sessions.append(req_id)

    def _add(self, asked: Asked) -> None:
        for scheduler in self.both:
            scheduler.add_request(asked.make())

    def go_on(self) -> None:
        """Continues a streaming session with more input, or with the word that it is over."""
        req_id = self.random.choice(self.sessions)
        if req_id not in self.stock.requests:
            self.sessions.remove(req_id)
            return
        is_over = self.random.random() < 0.3
        prompt = [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 9))]
        options = {"arrival_time": 0.0, "resumable": not is_over}
        self._add(Asked(req_id, prompt, {"temperature": 0, "max_tokens": 5, "stop_token_ids": [3]}, options))

    def abort(self) -> None:
        req_ids = self.random.sample(sorted(self.stock.requests), min(len(self.stock.requests), 2))
        for scheduler in self.both:
            scheduler.finish_requests(req_ids, RequestStatus.FINISHED_ABORTED)

    def reset(self, force: bool) -> None:
        results: list[Any] = []
        for scheduler in self.both:
            try:
                is_connected = self.setting.connector is not None
                results.append(scheduler.reset_prefix_cache(force, is_connected))
            except RuntimeError as error:  # A session that waits for input holds blocks.
                results.append(str(error))
        assert results[0] == results[1]

    def interfere(self) -> None:
        """Sends what can reach an engine also while a step runs."""
        draw, habits = self.random, self.habits
        if draw.random() < habits.aborts:
            self.abort()
        if self.sessions and draw.random() < 0.2:
            self.go_on()

    # ---- A step ----

    def step(self, look: bool = True) -> None:
        self.num_steps += 1
        if self.random.random() < self.habits.arrivals:
            self.arrive()
        self.interfere()
        if self.random.random() < self.habits.resets:
            self.reset(False)
        if self.random.random() < self.habits.forced_resets:
            self.reset(True)
        outputs = self._each(lambda scheduler, _: scheduler.schedule())
        same(*map(told, outputs), "what is scheduled")
        assert list(outputs[0].num_scheduled_tokens) == list(outputs[1].num_scheduled_tokens)
        bitmasks = [scheduler.get_grammar_bitmask(output) for scheduler, output in zip(self.both, outputs, strict=True)]
        same(*[bitmask and asdict(bitmask) for bitmask in bitmasks], "the bitmasks")
        self.num_scheduled += len(outputs[0].num_scheduled_tokens)
        self.num_preempted += len(outputs[0].preempted_req_ids or ())
        ours = self.both[1].requests
        self.num_rows += sum(isinstance(ours[req_id], RowRequest) for req_id in outputs[0].num_scheduled_tokens)
        self.in_flight.append((outputs, self._tokens(outputs[0])))
        if look:
            self.look()
        depth = self.depth
        if self.random.random() < self.habits.drains:
            depth = 1
        while len(self.in_flight) >= depth:
            self.interfere()
            self._update()
            if look:
                self.look()

    def run(self, num_steps: int, look: float = 0.5) -> "Pair":
        """Steps both schedulers. Their state is compared in some steps, since looking brings requests up to date."""
        try:
            for _ in range(num_steps):
                self.step(self.random.random() < look)
            while self.in_flight:
                self._update()
            self.look()
        except BothFailed:
            self.has_failed = True
        except FreedInOtherOrder:
            pass
        return self

    def _each(self, call: Callable[[Any, int], Any]) -> list[Any]:
        """Answers of the two schedulers. If vLLM's own breaks, as on sessions that grow too long, ours must too."""
        results: list[Any] = []
        errors: list[str | None] = []
        for index, scheduler in enumerate(self.both):
            try:
                results.append(call(scheduler, index))
                errors.append(None)
            except AssertionError as error:
                errors.append(traceback.extract_tb(error.__traceback__)[-1].line)
        assert errors[0] == errors[1], f"ours: {errors[1]}, but vLLM's: {errors[0]}"
        if errors[0] is not None:
            raise BothFailed
        return results

    def _tokens(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """Tokens that a runner samples; none for a part of a prompt."""
        tokens = {}
        for req_id in output.num_scheduled_tokens:
            request = self.stock.requests[req_id]
            token = (request.num_computed_tokens * 31 + int(req_id) // 3 * 17 + 5) % VOCAB_SIZE
            is_silent = request.is_prefill_chunk or self.random.random() < self.habits.no_tokens
            tokens[req_id] = [] if is_silent else [token]
        return tokens

    def _update(self) -> None:
        outputs, tokens = self.in_flight.popleft()
        req_ids = list(tokens)
        if self.random.random() < self.habits.shuffles:
            self.random.shuffle(req_ids)
        made = self._each(
            lambda scheduler, index: scheduler.update_from_output(outputs[index], self._answer(req_ids, tokens))
        )
        assert list(made[0]) == list(made[1])
        same(*[{client: asked(outputs) for client, outputs in each.items()} for each in made], "the outputs")
        reasons = [output.finish_reason for each in made[0].values() for output in each.outputs]
        ends = [reason for reason in reasons if reason is not None]
        if FinishReason.ERROR in ends and len(ends) > 1:
            orders = [caches_of(scheduler)["free"] for scheduler in self.both]
            assert sorted(orders[0]) == sorted(orders[1])
            if orders[0] != orders[1]:
                raise FreedInOtherOrder

    def _answer(self, req_ids: list[str], tokens: dict[str, list[int]]) -> ModelRunnerOutput:
        numbers = np.arange(len(req_ids) * 3).reshape(len(req_ids), 3)
        return ModelRunnerOutput(
            req_ids=list(req_ids),
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[list(tokens[req_id]) for req_id in req_ids],
            logprobs=LogprobsLists(numbers, numbers.astype(float), numbers[:, 0]),
        )

    # ---- Both are the same ----

    def look(self) -> None:
        stock, ours = self.both
        assert list(stock.requests) == list(ours.requests)
        for name in ("running", "waiting"):
            queues = [[request.request_id for request in getattr(scheduler, name)] for scheduler in self.both]
            assert queues[0] == queues[1], name
        for req_id, request in stock.requests.items():
            same(state_of(request), state_of(ours.requests[req_id]), f"request {req_id}")
        same(*map(caches_of, self.both), "the caches")
        names = ("finished_req_ids", "prev_step_scheduled_req_ids", "num_waiting_for_streaming_input")
        for name in (*names, "finished_req_ids_dict", "max_num_scheduled_tokens", "max_num_running_reqs"):
            assert getattr(stock, name) == getattr(ours, name), name
