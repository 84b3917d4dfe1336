"""vLLM's poolers on the host: what they read of a request, and their results.

A pooler is plain torch with branches on its requests, so no graph holds it. It runs on the host, in the dtype that vLLM
gives it, which is float32 unless the user asks for another (``head_dtype``). It gets whole requests of one task. So no
pooler sees parts of a prompt, and one request's rows never depend on where another request's lie.
"""

from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.pooler.seqwise import CLSPool, LastPool, SequencePooler
from vllm.model_executor.layers.pooler.special import DispatchPooler
from vllm.pooling_params import PoolingParams
from vllm.tasks import SupportedTask

from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.heads.head import Value
from model_runner_base.heads.pooling.metadata import pooling_metadata

logger = init_logger(f"vllm.{__name__}")


class Need(Enum):
    """Hidden states of a request that a pooler reads."""

    FIRST = "first"
    LAST = "last"
    ALL = "all"


NEEDS: dict[type, Need] = {CLSPool: Need.FIRST, LastPool: Need.LAST}
"""Needs of vLLM's methods of pooling; others read all hidden states."""


class Whole(NamedTuple):
    """A request whose prompt is computed."""

    req_id: str
    params: PoolingParams
    token_ids: Sequence[int]
    hidden_states: torch.Tensor
    """[tokens, hidden] float32 on the host: all of its hidden states, or the one that its pooler reads."""


class HostPooler:
    """The pooler of a loaded model."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """``dtype``: the model's, in which the pooler gets hidden states, as it would from vLLM's own runner."""
        self._pooler = model.pooler
        self._dtype = dtype
        self.need_of = cache(self._need_of)
        """Hidden states that requests of a task need."""
        needs = {self.need_of(task) for task in self._pooler.get_supported_tasks()}
        if {Need.FIRST, Need.LAST} <= needs:
            raise UnsupportedConfigError(
                "a model that pools first tokens for one task, and last tokens for another, is not supported yet: "
                "choose one of its tasks by pooler_config"
            )
        self.is_first = Need.FIRST in needs

    def _need_of(self, task: Any) -> Need:
        pooler = self._pooler.poolers_by_task[task] if isinstance(self._pooler, DispatchPooler) else self._pooler
        while isinstance(pooler, SequencePooler):  # The pooler of a classifier may be another pooler.
            pooler = pooler.pooling
        # A subclass may read others than its base.
        return NEEDS.get(type(pooler), Need.ALL)

    def pool(self, requests: Sequence[Whole]) -> tuple[list[Value], dict[str, str | None]]:
        """Returns a value for each request, and the reasons of requests that cannot be pooled, whose value is None."""
        values: list[Value] = [None] * len(requests)
        errors: dict[str, str | None] = {}
        by_task: dict[Any, list[int]] = {}
        for index, request in enumerate(requests):
            by_task.setdefault(request.params.task, []).append(index)
        for task, indices in by_task.items():
            for index, value in zip(indices, self._of_task(task, [requests[i] for i in indices], errors), strict=True):
                values[index] = value
        return values, errors

    def _of_task(self, task: Any, requests: list[Whole], errors: dict[str, str | None]) -> Sequence[Value]:
        try:
            return self._run(task, requests)
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if len(requests) > 1:  # Parameters of one request may not fit the model; the others go on.
                return [value for each in requests for value in self._of_task(task, [each], errors)]
            logger.exception("Request %s cannot be pooled.", requests[0].req_id)
            errors[requests[0].req_id] = f"{type(error).__name__}: {error}"
            return [None]

    @torch.no_grad()
    def _run(self, task: Any, requests: list[Whole]) -> Sequence[Value]:
        has_ids = self._pooler.get_pooling_updates(task).requires_token_ids
        metadata = pooling_metadata(
            [each.params for each in requests],
            [each.token_ids for each in requests],
            [len(each.hidden_states) for each in requests],
            has_ids,
        )
        hidden_states = torch.cat([each.hidden_states for each in requests]).to(self._dtype)
        # Each value is memory of its own: the engine may keep one of them longer than the others.
        return [value.clone() for value in self._pooler(hidden_states=hidden_states, pooling_metadata=metadata)]


def supported_pooling_tasks(model: Any, num_labels: int) -> tuple[SupportedTask, ...]:
    """Tasks of a pooling model, but for two at once; as in vLLM a score needs a model with one label."""
    tasks = sorted(model.pooler.get_supported_tasks() - {"plugin", "embed&token_classify"})
    return tuple(task for task in tasks if task != "score" or num_labels == 1)
