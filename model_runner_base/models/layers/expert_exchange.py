"""Exchange of tokens among replicas that share experts (data parallelism of models with experts).

Of N replicas, each has its own requests, attention, shared experts and head. The routed experts are cut over the ranks
of all replicas: with expert parallelism a rank has some of the experts whole, else a part of each. In each such layer
a rank gathers the tokens of all replicas, with the experts that each token chose and their weights. It runs its own
part of the experts on them, and each replica gets the sum for its own tokens. vLLM's layer then adds up the ranks of
tensor parallelism, as it does without replicas.

The replicas therefore run together. Before a run they agree on its number of tokens, to which each pads its own. A
replica without tokens runs padding. No state is kept from one run to the next, so tokens do not depend on which runs
meet.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from vllm import envs
from vllm.distributed.parallel_state import get_dp_group

from model_runner_base.step.components import StepComponent

EXCHANGE = "expert_exchange"
"""Attribute of a model with the exchange of its layers, if it shares experts with other replicas."""

RunExperts = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that takes a layer, hidden states [T, hidden], and ids and weights [T, top-k] of chosen experts; returns the
weighted sum of those experts, or of the part of them that this rank has."""


class ReplicaError(RuntimeError):
    """Error of a run that other replicas did not join."""


class ExpertExchange:
    """Exchange of one model's layers with those of the other replicas."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_padded = 0
        self._timeout: timedelta | None = None

    def meet(self) -> None:
        """Waits until all replicas are here, as long as the process group allows; from now on a run waits for
        ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``."""
        self.agree(0)
        self._timeout = timedelta(seconds=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)

    def agree(self, num_tokens: int) -> None:
        """Says that this replica's next run has so many tokens, and waits for what the others say.

        Raises ReplicaError if one of them does not within ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``, or has ended.
        """
        most = torch.tensor([num_tokens])
        try:
            work: Any = dist.all_reduce(most, dist.ReduceOp.MAX, get_dp_group().cpu_group, async_op=True)
            work.wait() if self._timeout is None else work.wait(self._timeout)
        except RuntimeError as error:
            missed = "did not finish loading"
            if self._timeout is not None:
                missed = f"did not join a step within {self._timeout.total_seconds():g} s"
            raise ReplicaError(f"another replica {missed}, or has ended: its log may say why") from error
        self._num_tokens, self._num_padded = num_tokens, int(most)

    def around(self, run: RunExperts) -> RunExperts:
        """Returns ``run`` on the tokens of all replicas. The result is summed over replicas, not over the ranks of
        one."""

        def run_all(layer: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            num_tokens = len(hidden)
            if num_tokens != self._num_tokens:
                raise RuntimeError(
                    f"experts of all replicas were called with {num_tokens} tokens, in a run of {self._num_tokens}"
                )
            out = run(layer, *map(self._gather, (hidden, ids, weights)))
            return get_dp_group().reduce_scatter(out, 0)[:num_tokens]

        return run_all

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N * P, W] rows of all N replicas from the rows [T, W] of each, padded to P with zeros."""
        padded = F.pad(x, (0, 0, 0, self._num_padded - len(x)))
        return get_dp_group().all_gather(padded.contiguous(), 0)


class ExpertReplica(StepComponent):
    """Component of a replica that shares experts: says the number of tokens of each run, and joins runs of others."""

    def __init__(self, exchange: ExpertExchange, run_padding: Callable[[], Any]) -> None:
        self._exchange = exchange
        self._run_padding = run_padding

    def prepare(self, batch: Any, step: Any, rows: Any) -> None:
        self._exchange.agree(step.size.num_tokens)

    def run_idle(self) -> None:
        self._run_padding()

    def warm_up(self) -> None:
        self._exchange.meet()


def agree_at_profile(model: nn.Module, num_tokens: int) -> None:
    """Agrees on the tokens of a profiled run, if the model shares experts with replicas, which profile as well."""
    exchange = getattr(model, EXCHANGE, None)
    if exchange is not None:
        exchange.agree(num_tokens)


def expert_replicas(model: nn.Module, run_padding: Callable[[], Any]) -> list[StepComponent]:
    """The component of a model that shares experts with other replicas; ``run_padding`` runs its smallest step."""
    exchange = getattr(model, EXCHANGE, None)
    return [] if exchange is None else [ExpertReplica(exchange, run_padding)]
