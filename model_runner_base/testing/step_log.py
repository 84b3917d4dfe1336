"""Log of the steps that an engine has run: a wrong token is told with its step, whichever check compares it.

The log keeps what the host knows of a step, so the device is neither asked nor waited for. Checks do not have to pass
their engine on: the kit has one engine at a time, and its log finds a request by its tokens.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from model_runner_base.step.sizes import StepSize
from model_runner_base.testing.words import counted

KEPT = 4000
"""Number of steps that are kept, the newest."""


class Share(NamedTuple):
    """Part that one request has in a step."""

    start: int
    """Position of its first token."""
    num_tokens: int
    """Number of its tokens, drafts included."""
    num_drafts: int


@dataclass
class LoggedStep:
    """One step."""

    number: int
    """Number of the step, from 1, since the engine had none of the requests that it has now."""
    size: StepSize
    shares: dict[str, Share]
    """Shares by request id."""
    prompts: dict[str, tuple[int, ...]]
    """Prompts of requests that the step is the first of; without those of embeddings."""
    sampled: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that the step yielded, by request id."""

    def __str__(self) -> str:
        num_tokens = sum(share.num_tokens for share in self.shares.values())
        return describe_step(self.number, self.size, len(self.shares), num_tokens)


def describe_step(number: int, size: StepSize, num_rows: int, num_tokens: int) -> str:
    """Step in words, such as "step 1, mixed, 1 row, 40 tokens padded to 41"."""
    padded = f" padded to {size.num_tokens}" if size.num_tokens > num_tokens else ""
    return f"step {number}, {size.kind}, {counted(num_rows, 'row')}, {counted(num_tokens, 'token')}{padded}"


class Place(NamedTuple):
    """Step that yielded an output, and how the request came until then."""

    step: LoggedStep
    came: "Coming"

    def __str__(self) -> str:
        words = [f"in {self.came.num_chunks} chunks"] if self.came.num_chunks > 1 else []
        words += [f"{counted(self.came.num_cached, 'token')} cached"] if self.came.num_cached else []
        words += self.came.preempted()
        return f"{self.step}{'; its prompt: ' * bool(words)}{', '.join(words)}"


class Coming(NamedTuple):
    """How a request's tokens came, as its steps show it."""

    num_chunks: int
    """Chunks of its prompt, since it was preempted last."""
    num_cached: int
    """Tokens that the prefix cache had."""
    num_preemptions: int

    @classmethod
    def of(cls, starts: Sequence[int], length: int) -> "Coming":
        """Works it out from positions of the first token in each of the request's steps."""
        again = [index for index, (before, after) in enumerate(pairwise(starts), 1) if after < before]
        last = starts[again[-1] :] if again else starts
        return cls(sum(start < length for start in last), starts[0], len(again))

    def preempted(self) -> list[str]:
        return [f"preempted {counted(self.num_preemptions, 'time')}"] if self.num_preemptions else []

    def __str__(self) -> str:
        """Words after "prompt of 40 tokens"."""
        chunks = f" in {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        cached = f", {self.num_cached} of them cached" if self.num_cached else ""
        return chunks + cached + "".join(f", {words}" for words in self.preempted())


class StepLog:
    """Newest steps of one engine in this process."""

    def __init__(self) -> None:
        self._steps: deque[LoggedStep] = deque(maxlen=KEPT)
        self._unread: deque[LoggedStep] = deque(maxlen=KEPT)
        """Steps whose tokens the scheduler has not been given yet."""
        self._known: set[str] = set()
        """Requests of the engine at the last step."""

    def attach(self, runner: Any, scheduler: Any) -> None:
        """Logs what a runner, a ``ModelRunnerBase``, runs from now on for its scheduler; nothing if it does already."""
        graph = runner.parts.graph
        if not getattr(graph.run, "is_logged", False):
            run = graph.run

            def logged(batch: Any, step: Any) -> Any:
                if batch is not None:
                    self._begin(batch, step.size, scheduler.requests)
                return run(batch, step)

            logged.is_logged = True  # type: ignore[attr-defined]
            graph.run = logged
        if not getattr(scheduler.update_from_output, "is_logged", False):
            update = scheduler.update_from_output

            def updated(scheduled: Any, output: Any) -> Any:
                self._end(output)
                return update(scheduled, output)

            updated.is_logged = True  # type: ignore[attr-defined]
            scheduler.update_from_output = updated

    def _begin(self, batch: Any, size: StepSize, requests: Mapping[str, Any]) -> None:
        is_first = not self._steps or self._known.isdisjoint(requests)
        came = [name for name in batch.req_ids if name in requests and (is_first or name not in self._steps[-1].shares)]
        prompts = {name: tuple(requests[name].prompt_token_ids or ()) for name in came}
        self._known = set(requests)
        numbers = zip(batch.num_computed.tolist(), batch.query_len.tolist(), strict=True)
        shares = {
            name: Share(start, count, len(batch.drafts.get(name, ())))
            for name, (start, count) in zip(batch.req_ids, numbers, strict=False)
        }
        step = LoggedStep(1 if is_first else self._steps[-1].number + 1, size, shares, prompts)
        self._steps.append(step)
        self._unread.append(step)

    def _end(self, output: Any) -> None:
        while output.req_ids and self._unread:
            step = self._unread.popleft()
            if step.shares.keys() >= set(output.req_ids):  # Else its own output was never given.
                for name, tokens in zip(output.req_ids, output.sampled_token_ids or (), strict=False):
                    step.sampled[name] = list(tokens or ())
                break

    def place_of(self, prompt: Sequence[int], tokens: Sequence[int], output: int) -> Place | None:
        """Place of an output of the newest request that had this prompt and these tokens; None if there is none.

        If there is no such output, as the request has ended too early, it is the place of the last one. Without tokens
        it is the last step of the newest request with the prompt, as vectors are of that one.
        """
        if not tokens:
            return self._last_of(tuple(prompt))
        output = min(output, len(tokens) - 1)
        wanted = {len(prompt) + index: int(token) for index, token in enumerate(tokens)}
        for run in reversed(self._runs()):
            others = _others(run, tuple(prompt))
            for name in dict.fromkeys(name for step in reversed(run) for name in step.shares if name not in others):
                shares = _actual_shares(run, name)
                # Tokens of a step that was thrown away may differ; the last one at a position counts.
                got = {each.yields_at + index: token for each in shares for index, token in enumerate(each.tokens)}
                if all(got.get(position) == token for position, token in wanted.items()):
                    reach = [index for index, each in enumerate(shares) if each.has_yielded(len(prompt) + output)]
                    own = shares[: reach[-1] + 1]
                    return Place(own[-1].step, Coming.of([each.start for each in own], len(prompt)))
        return None

    def _last_of(self, prompt: tuple[int, ...]) -> Place | None:
        """Last step of the newest request with a prompt."""
        for run in reversed(self._runs()):
            for first in reversed(run):
                for name in [name for name, its in first.prompts.items() if its == prompt]:
                    own = [step for step in run if name in step.shares]
                    return Place(own[-1], Coming.of([step.shares[name].start for step in own], len(prompt)))
        return None

    def _runs(self) -> list[list[LoggedStep]]:
        """Steps, cut where the engine had none of the requests of the step before."""
        runs: list[list[LoggedStep]] = []
        for step in self._steps:
            if step.number == 1 or not runs:
                runs.append([])
            runs[-1].append(step)
        return runs


def _others(steps: Sequence[LoggedStep], prompt: tuple[int, ...]) -> set[str]:
    """Requests with another prompt. That of a session begins with the prompts of its earlier turns."""
    known: dict[str, list[tuple[int, ...]]] = {}
    for step in steps:
        for name, its in step.prompts.items():
            known.setdefault(name, []).append(its)
    return {name for name, its in known.items() if all(prompt[: len(each)] != each for each in its)}


class _ActualShare(NamedTuple):
    """Share of a request in a step, where it was in truth."""

    step: LoggedStep
    start: int
    """Position of its first token."""
    yields_at: int
    """Position of the first token that it yields."""
    tokens: list[int]
    """Tokens that it yields."""

    def has_yielded(self, position: int) -> bool:
        return 0 <= position - self.yields_at < len(self.tokens)


def _actual_shares(steps: Sequence[LoggedStep], name: str) -> list[_ActualShare]:
    """Shares of one request.

    Where drafts are in flight, the host takes a request to be further than it is: by those that turn out wrong.
    """
    shares: list[_ActualShare] = []
    next_position = num_wrong = 0
    for step in steps:
        if name not in step.shares:
            continue
        share, tokens = step.shares[name], step.sampled.get(name, [])
        position = share.start + share.num_tokens - share.num_drafts
        too_far = num_wrong if position - num_wrong == next_position else 0
        position -= too_far
        shares.append(_ActualShare(step, share.start - too_far, position, tokens))
        next_position, num_wrong = position + len(tokens), share.num_drafts + 1 - len(tokens) if tokens else 0
    return shares
