"""Hooks of a scheduler: vLLM's methods that run in every step, each overridden once.

A correction (``corrections/``) is a mixin that changes one behaviour of vLLM's scheduler. It overrides these hooks
instead of vLLM's methods.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

NO_ERRORS: dict[str, str | None] = {}


def errors_of(output: ModelRunnerOutput) -> dict[str, str | None]:
    """Requests that failed in a step, as a runner of this library reports them; None means "no token is allowed"."""
    return getattr(output, "errors", NO_ERRORS)


class StepHooks(Scheduler):
    """Base of corrections and rows: a mixin, listed before ``Scheduler`` or ``AsyncScheduler`` among the bases.

    A correction puts its work into the attributes below, or overrides a hook. A step for which the attributes are empty
    is vLLM's own: no hook is called in it, and each method of vLLM's runs once.
    """

    num_hidden = 0
    """Number of running requests that are in rows of the scheduler, so that vLLM's own code does not see them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before_schedule: list[Callable[[], None]] = []
        """Functions to call before the next step is scheduled; other threads may add to them."""
        self.after_schedule: list[Callable[[SchedulerOutput], None]] = []
        """Functions to call once the step is scheduled, with the step."""
        self.after_update: list[Callable[[dict[int, EngineCoreOutputs]], None]] = []
        """Functions to call after the next output has been read, with the outputs by client."""
        self.late_outputs: dict[str, Any] = {}
        """Requests with outputs that must be dropped (``_before_update``)."""
        self.compiling_turns: set[str] = set()
        """Requests whose grammar may still be compiling while a step of theirs is in flight (``_before_bitmask``)."""

    # ---- Limits ----

    @property
    def max_num_active_reqs(self) -> int:
        """Largest number of running requests that vLLM's own code sees; newer releases have this limit.

        Those releases subtract the sessions that wait for input from it.
        """
        return self._num_seats - self.num_hidden + self._num_idle_seats()

    @max_num_active_reqs.setter
    def max_num_active_reqs(self, value: int) -> None:
        self._num_seats = value

    def get_request_counts(self) -> tuple[int, int]:
        num_running, num_waiting = super().get_request_counts()
        return num_running + self.num_hidden, num_waiting

    # ---- Once a step ----

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        while self.before_schedule:
            self.before_schedule.pop()()
        step = super().schedule(*args, **kwargs)
        while self.after_schedule:
            self.after_schedule.pop()(step)
        if not step.total_num_scheduled_tokens and not self.running and not self.num_hidden:
            self._when_nothing_runs()
        return step

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if self.compiling_turns:
            scheduler_output = self._before_bitmask(scheduler_output)
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self.late_outputs or errors_of(model_runner_output):
            scheduler_output = self._before_update(scheduler_output, model_runner_output)
        transfers = model_runner_output.kv_connector_output
        if transfers is not None and transfers.invalid_block_ids:
            self._before_failed_loads(scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.after_update:
            # Functions that these add are for the next output.
            functions, self.after_update = self.after_update, []
            for function in functions:
                function(outputs)
        return outputs

    # ---- Once a request of a step ----

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], **options: Any
    ) -> tuple[list[int], bool]:
        params = request.sampling_params
        if not request.resumable and (params is None or not params.min_tokens):
            return super()._update_request_with_output(request, new_token_ids, **options)
        num_sampled = len(new_token_ids)
        with self._around_check(request, new_token_ids):
            accepted, stopped = super()._update_request_with_output(request, new_token_ids, **options)
        if stopped and request.resumable:
            self._when_turn_stops(request, num_sampled - len(accepted))
        return accepted, stopped

    # ---- Hooks ----

    def _num_idle_seats(self) -> int:
        """Number of sessions that wait for input and take no other request's place."""
        return 0

    def _when_nothing_runs(self) -> None:
        """Called after a step that has nothing to do, while requests may wait."""

    def _before_bitmask(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Returns the step whose bitmask vLLM computes; called while there are ``compiling_turns``."""
        return scheduler_output

    def _before_update(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> SchedulerOutput:
        """Returns the step whose output vLLM reads; called if a request failed, or while there are ``late_outputs``."""
        return scheduler_output

    def _before_failed_loads(self, scheduler_output: SchedulerOutput) -> None:
        """Called before vLLM reads the output of a step in which cache blocks were not loaded."""

    def _around_check(self, request: Request, new_token_ids: list[int]) -> AbstractContextManager[None]:
        """Surrounds vLLM's check of tokens; called for sessions and for requests with ``min_tokens``."""
        return nullcontext()

    def _when_turn_stops(self, request: Request, num_dropped: int) -> None:
        """Called when a session's turn stops, with the number of sampled tokens that follow the stop."""
