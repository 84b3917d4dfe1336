"""Updates of weights by a trainer, in sessions of several calls, between which no step may run."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from threading import Lock
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from vllm.config import VllmConfig

from model_runner_base.errors import CheckpointError, WeightUpdateError
from model_runner_base.models import gloo_transfer
from model_runner_base.models.reloading import Load
from model_runner_base.step.guard import guarded
from model_runner_base.vllm_compat.types import weight_transfer
from model_runner_base.vllm_compat.types.weight_transfer import Receiver


class Reloadable(Protocol):
    """Interface of a runner whose weights are updated."""

    pending: Any

    @property
    def step_guard(self) -> Any: ...

    def get_draft_model(self) -> nn.Module | None: ...

    def reloading(self, is_draft: bool = False) -> AbstractContextManager[Load]: ...


class WeightUpdates:
    """Sessions in which a trainer's weights take the place of the old ones, over an engine of weight transfer.

    Methods have vLLM's names. They raise WeightUpdateError for a call that does not fit, and then change nothing. An
    update that fails ends its session, and the next one can start.
    """

    def __init__(self, runner: Reloadable, vllm_config: VllmConfig, device: torch.device) -> None:
        gloo_transfer.register()
        self._runner = runner
        self._config = vllm_config
        self._model, self._draft = Receiver(), Receiver()
        self._receiver = self._model
        self._transfer = weight_transfer.make_engine(vllm_config, device, self._model)
        self._session: ExitStack | None = None

    @property
    def supports_drafts(self) -> bool:
        """Whether a draft model can be updated."""
        engine = self._transfer
        can = engine is not None and getattr(engine, "supports_draft_weight_update", True)
        return can and self._runner.get_draft_model() is not None

    @property
    def _lock(self) -> Lock:
        lock: Lock = self._runner.step_guard.lock
        return lock

    @property
    def _engine(self) -> Any:
        if self._transfer is None:
            raise WeightUpdateError(
                'weight transfer is not configured: set weight_transfer_config, for example {"backend": "gloo"}'
            )
        return self._transfer

    def init(self, init_info: dict[str, Any]) -> None:
        """Connects to the trainer."""
        engine = self._engine
        engine.init_transfer_engine(engine.parse_init_info(init_info))

    def disconnect(self) -> None:
        """Ends the connection to the trainer; another one may be made."""
        engine = self._engine
        self.check_idle()
        engine.shutdown()

    def start(self, is_draft: bool = False) -> None:
        """Starts a session. Steps raise an error until it is finished."""
        engine = self._engine
        self.check_idle()
        if self._runner.pending is not None:
            raise WeightUpdateError("a step waits for sample_tokens: start an update between two steps")
        if is_draft and not self.supports_drafts:
            raise WeightUpdateError(
                f"there is no draft model, or {type(engine).__name__} does not update one: call start_weight_update"
            )
        speculation = self._config.speculative_config
        draft_config = speculation.draft_model_config if is_draft and speculation is not None else None
        self._receiver = self._draft if is_draft else self._model
        with self._lock, ExitStack() as session:
            self._receiver.load = session.enter_context(self._runner.reloading(is_draft))
            session.callback(self._leave)
            weight_transfer.start(engine, self._receiver, draft_config)
            # A pending step keeps sizes from being traced, which would find layers without weights.
            self._runner.pending = _refuse_step
            vars(self._runner)["execute_model"] = partial(_refuse_guarded_step, self._runner)
            self._session = session.pop_all()

    def update(self, update_info: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Loads a chunk: of a list, the part of this worker. Releases of vLLM without sessions have one a call."""
        engine = self._engine
        try:
            own = weight_transfer.info_of_rank(update_info, self._config)
        except ValueError as error:
            raise WeightUpdateError(str(error)) from None
        if self._session is None and weight_transfer.HAS_SESSIONS:
            raise WeightUpdateError("no weight update has started: call start_weight_update before update_weights")
        is_alone = self._session is None
        if is_alone:
            self.start()
        session = self._session
        assert session is not None
        with self._lock, ExitStack() as failing:
            failing.push(session)
            weight_transfer.receive(engine, own, self._receiver)
            failing.pop_all()
        if is_alone:
            self.finish()

    def finish(self) -> None:
        """Ends the session: layers that are complete have their new weights, others keep the old ones."""
        engine, session = self._engine, self._session
        if session is None:
            raise WeightUpdateError("no weight update has started: call start_weight_update before")
        with self._lock, session:
            weight_transfer.finish(engine)

    def abort(self) -> None:
        """Ends the session, if there is one, as an error would: layers that are complete keep their new weights.

        An error ends the session of the rank that had it. This ends those of the other ranks.
        """
        if (session := self._session) is not None:
            with self._lock, suppress(CheckpointError), session:
                raise WeightUpdateError("it was aborted")

    def check_idle(self) -> None:
        """Raises WeightUpdateError while a session runs."""
        if self._session is not None:
            raise WeightUpdateError(
                "a weight update has started: call finish_weight_update or abort_weight_update before"
            )

    def shutdown(self) -> None:
        """Ends the session and the connection to the trainer, if there are any."""
        with suppress(Exception):
            self.abort()
        if self._transfer is not None:
            self._transfer.shutdown()

    def _leave(self) -> None:
        """Lets steps run again."""
        self._session, self._receiver.load, self._runner.pending = None, None, None
        vars(self._runner).pop("execute_model", None)
        weight_transfer.leave_target(self._engine)


def _refuse_step(*args: Any, **kwargs: Any) -> NoReturn:
    raise WeightUpdateError(
        "a step came between start_weight_update and finish_weight_update: pause the engine before an update, for "
        "example by pause_generation"
    )


_refuse_guarded_step = guarded(_refuse_step)
"""Refuses inside the guard, so that a rank whose error vLLM would not hear of ends, and no other rank waits for it."""
