"""Sleep: an engine gives up the device memory of its weights and KV caches between two steps, and takes it back later.

While a tag sleeps, steps take no requests, so an awake runner asks nothing: other state updates end each of them with
an error, and ``background_compiler`` traces nothing. What reads or writes weights asks ``check_weights`` first.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from model_runner_base.device_ops import DeviceOps
from model_runner_base.inputs.multimodal.encoder import Encoder
from model_runner_base.models.draft_loading import ATTRIBUTE as DRAFT
from model_runner_base.models.reloading import check_reloadable
from model_runner_base.runner.background import BackgroundCompiler
from model_runner_base.runner.state_updates import StateUpdates
from model_runner_base.step.guard import StepGuard
from model_runner_base.step.schedule import Schedule
from model_runner_base.vllm_compat.probes.config import preserved_weights

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)


class SleepingError(RuntimeError):
    """Error of a request, or of a call, that needs memory which sleeps."""


class Sleeper(Protocol):
    """Interface of a runner that may sleep."""

    vllm_config: VllmConfig
    model: Any
    encoder: Encoder
    parts: Any
    pending: Any
    step_guard: StepGuard
    background_compiler: BackgroundCompiler

    @property
    def device_ops(self) -> DeviceOps: ...


class Memory(NamedTuple):
    """Tensors of a tag."""

    kept: list[torch.Tensor]
    """Tensors whose contents come back."""
    dropped: list[torch.Tensor]
    """Tensors that come back as zeros."""


class Sleep:
    """Memory of a runner, by tag: which tags sleep, and the calls that free memory and take it back."""

    def __init__(self, runner: Sleeper) -> None:
        self._runner = runner
        self.tags: set[str] = set()
        """Tags that sleep."""

    def check(self, level: int) -> None:
        """Raises ValueError if the runner cannot sleep at a level; then nothing has changed."""
        if not self._runner.vllm_config.model_config.enable_sleep_mode:
            raise ValueError("this engine does not sleep: start it with enable_sleep_mode=True")
        if level not in (1, 2):
            raise ValueError(f"there is no sleep level {level}: use 1, which keeps weights on the host, or 2")
        if level == 2:
            check_reloadable(self._runner.model)
            self._runner.encoder.check_reload()
            weights_of(self._runner.model, self._runner.vllm_config, level)

    def check_weights(self) -> None:
        """Raises SleepingError while weights sleep, since their memory is freed."""
        if WEIGHTS in self.tags:
            raise SleepingError(
                'weights sleep: call wake_up(tags=["weights"]) before reload_weights, start_weight_update and '
                "save_sharded_state"
            )

    def begin(self, level: int) -> None:
        """Frees weights and caches. Level 1 keeps weights on the host; level 2 drops those that a reload brings
        back."""
        self.check(level)
        with self._between_steps():
            memory = {KV_CACHE: self._caches()}
            if WEIGHTS not in self.tags:  # Last: if caches cannot be freed, no weights have been dropped.
                memory[WEIGHTS] = weights_of(self._runner.model, self._runner.vllm_config, level)
            self._free(memory)

    def discard(self, tags: Collection[str]) -> None:
        """Frees the memory of ``tags``, which may be the KV cache alone, and drops its contents."""
        _check_tags(tags)
        if WEIGHTS in tags:
            raise ValueError("weights alone are not discarded: use sleep(level=2)")
        self.check(level=1)
        with self._between_steps():
            self._free({KV_CACHE: self._caches()})

    def end(self, tags: Collection[str] | None = None) -> None:
        """Takes the memory of tags back, of all tags by default. After level 2, ``reload_weights`` must follow."""
        _check_tags(tags or ())
        with self._between_steps():
            self._wake(tags or TAGS)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        runner = self._runner
        with runner.step_guard.lock, current_platform.inference_mode():
            if runner.pending is not None:
                raise SleepingError("a step waits for sample_tokens: sleep and wake up between two steps")
            runner.parts.repeat.stop()
            yield

    def _caches(self) -> Memory:
        return Memory([], [*self._runner.parts.kv_caches])

    def _free(self, memory: Mapping[str, Memory]) -> None:
        """Frees the memory of tags that are awake; if one cannot be freed, takes back those before it."""
        awake = [tag for tag in memory if tag not in self.tags]
        try:
            for tag in awake:
                self.tags.add(tag)
                self._guard()
                self._runner.device_ops.sleep(tag, *memory[tag])
        except BaseException:
            self._wake(awake)  # The executor does not count as sleeping, so it would never call wake_up.
            raise

    def _wake(self, tags: Collection[str]) -> None:
        try:
            for tag in [tag for tag in TAGS if tag in self.tags and tag in tags]:
                self._runner.device_ops.wake(tag)
                self.tags.discard(tag)
        finally:
            self._guard()

    def _guard(self) -> None:
        """Lets an awake runner's own objects work; puts others in the places of those that need what sleeps."""
        runner: Any = self._runner
        updates = runner.parts.updates
        if isinstance(updates, RefusedSteps):
            runner.parts.updates = updates.usual
        runner.background_compiler.is_held = bool(self.tags)
        if self.tags:
            error = SleepingError(f"the engine sleeps ({', '.join(sorted(self.tags))}): wake it up first, by wake_up()")
            runner.parts.updates = RefusedSteps(runner.parts.updates, error)


class RefusedSteps:
    """Ends each request of a step with an error; other requests are untouched."""

    def __init__(self, usual: StateUpdates, error: Exception) -> None:
        self.usual = usual
        """State updates of an awake runner."""
        self._error = error

    def apply(self, schedule: Schedule) -> Schedule:
        return self.usual.refuse(schedule, self._error)


def _check_tags(tags: Iterable[str]) -> None:
    if unknown := sorted({*tags} - {*TAGS}):
        raise ValueError(f"unknown tags {', '.join(unknown)}: use {' or '.join(TAGS)}")


def weights_of(model: nn.Module, vllm_config: VllmConfig, level: int) -> Memory:
    """Weights and buffers of a model, draft included, and which of them are kept.

    Level 2 keeps what no reload brings back: buffers, a draft's own weights, and those that
    ``sleep_preserve_parameter_names`` matches. Raises ValueError for a name in it that matches nothing.
    """
    kept: list[torch.Tensor] = [*model.buffers()]
    if level == 1:
        return Memory([*kept, *model.parameters()], [])
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    patterns = preserved_weights(vllm_config)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for each in names.values() for name in each):
            raise ValueError(f"no weight has a name like {pattern}: correct sleep_preserve_parameter_names")
    dropped: list[torch.Tensor] = []
    for weight, known_as in names.items():
        is_of_draft = all(name.startswith(f"{DRAFT}.") for name in known_as)
        is_preserved = any(fnmatchcase(name, pattern) for name in known_as for pattern in patterns)
        (kept if is_of_draft or is_preserved else dropped).append(weight)
    return Memory(kept, dropped)
