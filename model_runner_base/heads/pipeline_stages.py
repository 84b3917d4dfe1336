"""Stages of a pipeline: each has some of the layers, hands its hidden states on, and gets the sampled tokens back.

    stage 0:  StageHead  -- hidden states -->  ReceivedStates  :stage 1
              TokensHome  <------ tokens ----  SentTokens

A stage is a head that hands on and a component that receives. All stages get the same steps in the same order, so they
make the same batches; rows may differ. A header before the hidden states tells a stage that is at another step. Tokens
are awaited before a step that has one of their requests, and not earlier, so that stages work at the same time.

Messages go through the host's memory, over vLLM's gloo group of the pipeline. They have sizes that both sides know.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors

from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.heads.factory import pools
from model_runner_base.heads.head import HandedOn, Head
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import NO_FIELDS, Forward, ModelCall
from model_runner_base.step.components import PromptsInChunks, StepComponent
from model_runner_base.step.graph_policy import WrapFunction
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import DeviceRows, ReceivedTokens, RequestInfo
from model_runner_base.step.schedule import Arrival, Grammar, Schedule

T = TypeVar("T")

HEADER, STATES, TOKENS = 1, 2, 3
"""Tags of messages. Messages of a tag between two stages arrive in order."""
FAILED = -1
"""Number of tokens in the header of a stage that failed; then the length of its error's text follows."""
SECONDS_TO_TELL = 1.0
"""Time that a stage which failed stays alive. When it ends, the engine ends all stages, and says nothing of errors."""


class StageError(RuntimeError):
    """Error of a pipeline's stage, which its message names."""


class StageLink:
    """Messages between the stages of a pipeline, of host tensors."""

    def __init__(self, index: int, ranks: Sequence[int], group: Any) -> None:
        self.index, self.count = index, len(ranks)
        self.step = 0
        """Number of the engine's steps so far, those without tokens included."""
        self._ranks, self._group = ranks, group
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        """Last messages, each kept until it is sent. There are fewer steps in flight than messages kept."""

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def send(self, stage: int, tag: int, tensor: torch.Tensor) -> None:
        """Begins to send a tensor, which must not change any more."""
        self._sent.append((dist.isend(tensor, self._ranks[stage], self._group, tag), tensor))
        if len(self._sent) > 8 * self.count:
            self._sent.popleft()[0].wait()

    def begin_to_receive(self, stage: int, tag: int, tensor: torch.Tensor) -> Callable[[], None]:
        """Begins to receive a tensor, and returns a function that waits for it."""
        work: Any = dist.irecv(tensor, self._ranks[stage], self._group, tag)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise StageError(
                    f"stage {stage} of the pipeline is gone; the log of its worker (PP{stage}) says why: {error}"
                ) from error

        return wait

    def hand_on(self, batch: InputBatch, states: np.ndarray) -> None:
        """Sends the hidden states of a batch to the next stage."""
        self.send(self.index + 1, HEADER, torch.tensor([self.step, len(states), _checksum(batch)]))
        self.send(self.index + 1, STATES, torch.from_numpy(states))

    def take(self, batch: InputBatch, states: torch.Tensor) -> None:
        """Receives the hidden states of a batch from the stage before; raises StageError if that has failed, or has
        another batch."""
        before, header = self.index - 1, torch.empty(3, dtype=torch.int64)
        self.begin_to_receive(before, HEADER, header)()
        step, num_tokens, number = header.tolist()
        if num_tokens == FAILED:
            text = torch.empty(number, dtype=torch.uint8)
            self.begin_to_receive(before, STATES, text)()
            raise StageError(bytes(text.tolist()).decode())
        if (step, num_tokens, number) != (self.step, len(states), _checksum(batch)):
            raise StageError(
                f"stages {before} and {self.index} of the pipeline are at different steps: steps {step} and "
                f"{self.step}, {num_tokens} and {len(states)} tokens, {number} and {_checksum(batch)} in their caches; "
                "please report this"
            )
        self.begin_to_receive(before, STATES, states)()

    def explain(self, error: Exception) -> Exception:
        """Error that names the stage; tells the next stage of it, so that the last one, which vLLM listens to, raises
        it."""
        if not isinstance(error, StageError):
            error = StageError(f"stage {self.index} of the pipeline failed: {type(error).__name__}: {error}")
        if not self.is_last:
            text = str(error).encode()
            try:
                self.send(self.index + 1, HEADER, torch.tensor([self.step, FAILED, len(text)]))
                self.send(self.index + 1, STATES, torch.tensor(list(text), dtype=torch.uint8))
                time.sleep(SECONDS_TO_TELL)
            except RuntimeError:
                pass  # The next stage is gone, too.
        return error


def _checksum(batch: InputBatch) -> int:
    return int(batch.seq_lens.sum())


class Handed(NamedTuple):
    """Tensors that a model hands from one stage to the next, side by side in one of ``width``, in float32."""

    names: list[str]
    widths: list[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any, architecture: str, dtype: torch.dtype) -> "Handed":
        tensors = model.make_empty_intermediate_tensors(1, dtype, torch.device("cpu")).tensors
        if any(tensor.shape[:-1] != (1,) for tensor in tensors.values()):
            raise UnsupportedConfigError(
                f"{architecture} hands on more than a row for each token, which pipeline stages do not do yet: use "
                "pipeline_parallel_size=1"
            )
        return cls(list(tensors), [tensor.shape[-1] for tensor in tensors.values()], dtype)

    @property
    def width(self) -> int:
        return sum(self.widths)

    def join(self, handed: IntermediateTensors) -> torch.Tensor:
        return torch.cat([handed.tensors[name].float() for name in self.names], dim=-1)

    def split(self, states: torch.Tensor) -> IntermediateTensors:
        parts = states.to(self.dtype).split(self.widths, dim=-1)
        return IntermediateTensors({name: part.contiguous() for name, part in zip(self.names, parts, strict=True)})


class StageHead(Head):
    """Head of a stage that is not the last: it hands the hidden states on, and samples nothing."""

    def __init__(self, link: StageLink, handed: Handed, device_ops: DeviceOps) -> None:
        self._link = link
        self._handed = handed
        self._device_ops = device_ops

    def info_of(self, arrival: Arrival) -> RequestInfo:
        return RequestInfo(arrival.params, 0, arrival.token_ids, arrival.prompt_embeds, arrival.adapter, arrival.items)

    def traced(self, hidden_states: Any, call: ModelCall) -> tuple[torch.Tensor, ...]:
        states = self._handed.join(hidden_states)
        return states, call.sample_slots, states

    def answer(self, forward: Forward) -> HandedOn | None:
        states = self._device_ops.begin_to_host_from_graph(forward.hidden_states)()
        self._link.hand_on(forward.batch, states)
        return None

    def sample(self, plan: Any, forward: Forward, grammar: Grammar | None) -> HandedOn:
        return HandedOn()


class PoolingStageHead(StageHead):
    """Head of such a stage of a pooling model: the engine asks for no tokens, so a step ends with the hidden states."""

    answers_at_once: ClassVar[bool] = True

    def components(self) -> Sequence[StepComponent]:
        return (PromptsInChunks(),)

    def answer(self, forward: Forward) -> HandedOn:
        super().answer(forward)
        return HandedOn()


class StepCounter(StepComponent):
    """Counts the engine's steps for the header of handed-on states.

    Messages say nothing of it: a stage that left a step out would take that step's states in the next one.
    """

    def __init__(self, link: StageLink) -> None:
        self._link = link

    def begin_step(self, schedule: Schedule) -> None:
        self._link.step += 1


class ReceivedStates(StepComponent):
    """Gives the model the hidden states of the stage before; a run on padding gets zeros."""

    def __init__(self, link: StageLink, handed: Handed, device_ops: DeviceOps) -> None:
        self._link = link
        self._handed = handed
        self._device_ops = device_ops
        self._states = device_ops.upload(torch.zeros(1, handed.width))

    def prepare(self, batch: InputBatch | None, step: PackedStep, rows: DeviceRows) -> None:
        states = torch.zeros(step.size.num_tokens, self._handed.width)
        if batch is not None:
            self._link.take(batch, states)
        self._states = self._device_ops.upload(states)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return (self._states,)

    def bind(self, call: ModelCall) -> None:
        (states,) = call.tensors
        call.kwargs["intermediate_tensors"] = self._handed.split(states)


class SentTokens(StepComponent):
    """Sends the tokens of each step to all other stages, in the order of the batch; part of the last stage."""

    def __init__(self, link: StageLink, max_num_reqs: int, device_ops: DeviceOps) -> None:
        self._link = link
        self._max_num_reqs = max_num_reqs
        self._device_ops = device_ops

    def end_step(self, forward: Forward | None) -> Mapping[str, Any]:
        if forward is not None and forward.batch.num_sampled:
            results: Any = forward.results
            count = forward.batch.num_reqs
            tokens = np.zeros(self._max_num_reqs, np.int32)
            tokens[:count] = self._device_ops.to_host(results.tokens)[:count]
            for stage in range(self._link.index):
                self._link.send(stage, TOKENS, torch.from_numpy(tokens))
        return NO_FIELDS


class Expected(NamedTuple):
    """Tokens of a step that are on their way home; arrays are padded to the largest number of requests."""

    req_ids: frozenset[str]
    """Requests that yield a token."""
    rows: np.ndarray
    """[S] rows of the tokens as they were in that step; the padding row where there is no token."""
    positions: np.ndarray
    tokens: torch.Tensor
    wait: Callable[[], None]


class TokensHome(StepComponent):
    """Receives the tokens of each step, and records them before a step that has one of their requests."""

    def __init__(self, link: StageLink, max_num_reqs: int, received: ReceivedTokens) -> None:
        self._link = link
        self._max_num_reqs = max_num_reqs
        self._received = received
        self._expected: deque[Expected] = deque()

    def begin_step(self, schedule: Schedule) -> None:
        """Records tokens step by step: those that a request of this step yielded, all before them, and old ones."""
        if not self._expected:
            return
        scheduled = schedule.num_tokens.keys()
        count = max(0, len(self._expected) - 4 * self._link.count)
        for index, each in enumerate(self._expected):
            if not each.req_ids.isdisjoint(scheduled):
                count = max(count, index + 1)
        for _ in range(count):
            each = self._expected.popleft()
            each.wait()
            self._received.record(each.rows, each.positions, each.tokens.numpy())

    def end_step(self, forward: Forward | None) -> Mapping[str, Any]:
        """Begins to receive what the last stage samples in this step."""
        if forward is not None and forward.batch.num_sampled:
            batch, size = forward.batch, self._max_num_reqs
            sampled = np.flatnonzero(batch.is_sampled)
            rows, positions = np.full(size, size), np.zeros(size, np.int64)  # The padding row is the one after all.
            rows[sampled], positions[sampled] = batch.rows[sampled], batch.seq_lens[sampled]
            req_ids = frozenset(compress(batch.req_ids, batch.is_sampled))
            tokens = torch.empty(size, dtype=torch.int32)
            wait = self._link.begin_to_receive(self._link.count - 1, TOKENS, tokens)
            self._expected.append(Expected(req_ids, rows, positions, tokens, wait))
        return NO_FIELDS


@dataclass
class PipelineStage:
    """Parts that make a rank one stage of a pipeline; the defaults are those of an engine without stages."""

    count: int = 1
    head: Head | None = None
    """Head of a stage that is not the last; None for the model's own."""
    components: Sequence[StepComponent] = ()
    """Components, which come after the token ids."""
    explain: Callable[[Exception], Exception] = lambda error: error
    """``StageLink.explain``"""


def make_stage(
    vllm_config: VllmConfig, model: Any, rows: DeviceRows, wrap: WrapFunction, device_ops: DeviceOps
) -> PipelineStage:
    """Makes this rank's stage of a loaded ``model``."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return PipelineStage()
    group, config = get_pp_group(), vllm_config.model_config
    assert isinstance(config.dtype, torch.dtype)
    link = StageLink(group.rank_in_group, group.ranks, group.cpu_group)
    handed = Handed.of(model, config.architecture, config.dtype)
    max_num_reqs = vllm_config.scheduler_config.max_num_seqs
    components: list[StepComponent] = [StepCounter(link)]
    if link.index:
        components.append(ReceivedStates(link, handed, device_ops))
    head: StageHead | None = None
    if pools(config):
        if not link.is_last:
            head = PoolingStageHead(link, handed, device_ops)
    elif link.is_last:
        components.append(SentTokens(link, max_num_reqs, device_ops))
    else:
        head = StageHead(link, handed, device_ops)
        components.append(TokensHome(link, max_num_reqs, ReceivedTokens(rows, wrap, device_ops)))
    return PipelineStage(link.count, head, components, link.explain)


def is_first_stage(vllm_config: VllmConfig) -> bool:
    """Whether this rank runs the model's first layers, as every rank does without pipeline stages."""
    return vllm_config.parallel_config.pipeline_parallel_size == 1 or get_pp_group().is_first_rank


def gather_stages(vllm_config: VllmConfig, value: T) -> list[T]:
    """Values of all stages, each of which gives its own; without stages a list of ``value`` alone."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return [value]
    group = get_pp_group()
    values: list[T] = [value] * len(group.ranks)
    dist.all_gather_object(values, value, group.cpu_group)
    return values


def received_at_profile(vllm_config: VllmConfig, model: Any, num_tokens: int, device: torch.device) -> Any:
    """Zeros in place of hidden states of the stage before; None on the first stage."""
    if is_first_stage(vllm_config):
        return None
    return model.make_empty_intermediate_tensors(num_tokens, vllm_config.model_config.dtype, device)
