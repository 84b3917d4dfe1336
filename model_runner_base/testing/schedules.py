"""A scheduler for tests: does what it is told, however odd, within vLLM's contract.

It builds the engine's SchedulerOutput by hand, so that a test may draw chunks, orders, preemptions and aborts that the
engine's own scheduler would seldom choose. Blocks are handed out at random. Requests are skipped, preempted with or
without the runner being told, and come back in other blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import NamedTuple

from vllm.sampling_params import SamplingParams

from model_runner_base.step.schedule import SchedulerOutput
from model_runner_base.testing.scheduler_outputs import Continued, HandMadeStep

NULL_BLOCK = 0


@dataclass(eq=False)
class Request:
    """A request as the scheduler knows it."""

    name: str
    prompt: list[int]
    params: SamplingParams
    shares_prefix: bool
    """Whether it takes cached blocks when it is given its blocks."""
    tokens: list[int | None] = field(default_factory=list)
    """Tokens of prompt and output; None for one that was sampled by a step whose output was not read yet."""
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    """Blocks by KV-cache group; empty unless the request runs."""
    state: int = 0
    """Index of its state in recurrent layers; 0 unless the request runs, and the model has such layers."""
    is_running: bool = False
    is_set_aside: bool = False
    """Whether it lost its blocks and the runner was not told."""
    is_known_to_runner: bool = False
    was_in_last_step: bool = False
    generation: int = 0
    """A counter that rises whenever tokens in flight become void."""

    @property
    def num_left(self) -> int:
        """Tokens that could be scheduled now."""
        assert self.params.max_tokens is not None
        if len(self.tokens) - len(self.prompt) >= self.params.max_tokens:
            return 0
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True)
class Share:
    """One request's share of a step: all that a model without state needs to work out what the step must contain."""

    request: Request
    tokens: list[int | None]
    """Tokens of the request at that time."""
    start: int
    """Number of tokens computed before."""
    count: int
    blocks: list[list[int]]
    generation: int

    @property
    def is_sampled(self) -> bool:
        return self.start + self.count == len(self.tokens)


class Sees(NamedTuple):
    """Rule of the earlier tokens that a layer's tokens see, or that a group's blocks are kept for: all, if both are
    None."""

    window: int | None = None
    """Number of tokens that a token sees, itself included."""
    chunk: int | None = None
    """Number of tokens in a chunk; a token sees those in its own chunk."""


@cache
def seen_keys(sees: Sees, position: int) -> list[int]:
    """Positions that the token at ``position`` sees."""
    keys = list(range(position + 1))
    if sees.window is not None:
        keys = [key for key in keys if position - key < sees.window]
    if sees.chunk is not None:
        keys = [key for key in keys if key // sees.chunk == position // sees.chunk]
    return keys


@dataclass(frozen=True)
class CacheGroup:
    """A KV-cache group: its layers with what each sees, the tokens of a block, and what its blocks are kept for."""

    layers: dict[str, Sees]
    """Rules of what the layers see, by layer name."""
    block_size: int
    kept_for: Sees


class BlockPool:
    """Blocks in random order, how many requests hold each, and which prefix a full block ends."""

    def __init__(self, num_blocks: int, random: Random) -> None:
        self._random = random
        self._holders = [0] * num_blocks
        self._block_of: dict[tuple, int] = {}
        self._key_of: dict[int, tuple] = {}
        self._free = [block for block in range(num_blocks) if block != NULL_BLOCK]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        blocks = [self._free.pop(self._random.randrange(len(self._free))) for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            self._block_of.pop(self._key_of.pop(block, ()), None)
        return blocks

    def hold(self, block: int) -> None:
        """Counts one more request that uses a block, which may be a free one whose contents are remembered."""
        if block == NULL_BLOCK:
            return
        if not self._holders[block]:
            self._free.remove(block)
        self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block != NULL_BLOCK:
                self._holders[block] -= 1
                if not self._holders[block]:
                    self._free.append(block)

    def remember(self, key: tuple, block: int) -> None:
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key

    def find(self, key: tuple) -> int | None:
        return self._block_of.get(key)


class HandScheduler:
    """Requests and their blocks; ``step`` makes a SchedulerOutput of what it is asked for."""

    def __init__(
        self,
        groups: list[CacheGroup],
        num_blocks: int,
        max_num_seqs: int,
        max_num_tokens: int,
        random: Random,
        num_states: int = 0,
    ) -> None:
        """``num_states`` is the number of states in recurrent layers, one for each request that may run; 0: none."""
        self.groups = groups
        self.max_num_seqs, self.max_num_tokens = max_num_seqs, max_num_tokens
        self.pool = BlockPool(num_blocks, random)
        self.states = BlockPool(1 + num_states, random) if num_states else None
        self.requests: dict[str, Request] = {}
        self._finished: set[str] = set()
        self._preempted: set[str] = set()

    def add(self, name: str, prompt: list[int], params: SamplingParams, shares_prefix: bool = False) -> Request:
        request = Request(name, prompt, params, shares_prefix, tokens=list(prompt))
        self.requests[name] = request
        return request

    def finish(self, request: Request) -> None:
        """Ends a request, which has finished or is aborted."""
        self._release(request)
        del self.requests[request.name]
        self._finished.add(request.name)
        request.generation += 1

    def preempt(self, request: Request, silently: bool) -> None:
        """Takes a request's blocks. If ``silently``, as by a reset of the prefix cache, the runner is not told, and a
        token in flight is void."""
        if not request.is_running:
            return
        self._release(request)
        if silently:
            request.is_set_aside = True
            request.generation += 1
            if request.tokens[-1] is None:
                request.tokens.pop()
        else:
            self._preempted.add(request.name)

    def step(self, wanted: dict[str, int]) -> tuple[SchedulerOutput, list[Share]]:
        """Schedules up to the wanted number of tokens of each named request, in that order, as blocks and limits
        allow."""
        shares: list[Share] = []
        told = HandMadeStep()
        budget = self.max_num_tokens
        for name, most in wanted.items():
            request = self.requests[name]
            was_running = request.is_running
            if name in self._preempted or not (was_running or self._admit(request, shares)):
                continue
            count = min(most, budget, request.num_left)
            new_blocks = self._grow(request, request.num_computed + count) if count > 0 else None
            if new_blocks is None:
                if not was_running:
                    self._release(request)
                continue
            budget -= count
            blocks = [list(blocks) for blocks in request.blocks]
            shares.append(Share(request, list(request.tokens), request.num_computed, count, blocks, request.generation))
            self._tell(told, request, was_running, new_blocks, blocks)
        self._commit(shares)
        scheduled = {share.request.name: share.count for share in shares}
        num_groups = len(self.groups) + (self.states is not None)
        output = told.scheduler_output(scheduled, self._finished, self._preempted, num_groups)
        self._finished, self._preempted = set(), set()
        return output, shares

    def _admit(self, request: Request, shares: list[Share]) -> bool:
        """Lets a waiting request run if all its tokens are known and there is a free row; returns whether it runs.

        While some requests are set aside silently, the runner must guess which still run. So, as in vLLM, no request
        is let in then if a running one could go on and is not in this step.
        """
        running = [other for other in self.requests.values() if other.is_running]
        if None in request.tokens or len(running) == self.max_num_seqs:
            return False
        scheduled = [share.request for share in shares]
        if any(other.is_set_aside for other in self.requests.values()) and any(
            other.num_left and other not in scheduled for other in running
        ):
            return False
        # Where a request has one state, no other request can begin with it.
        shares_prefix = request.shares_prefix and not self.states
        request.blocks = self._cached_prefix(request) if shares_prefix else [[] for _ in self.groups]
        for blocks in request.blocks:
            for block in blocks:
                self.pool.hold(block)
        request.num_computed = len(request.blocks[0]) * self.groups[0].block_size
        if self.states:
            (request.state,) = self.states.take(1)
        request.is_running = True
        return True

    def _cached_prefix(self, request: Request) -> list[list[int]]:
        """Blocks by group of the longest cached prefix that leaves a token to compute.

        Groups whose tokens see only a part of the prefix need only that part in the cache.
        """
        size = self.groups[0].block_size
        for num_blocks in range((len(request.tokens) - 1) // size, 0, -1):
            found = []
            for index, group in enumerate(self.groups):
                first = self._num_unseen_blocks(group, num_blocks * size)
                keys = [(index, *request.tokens[: (block + 1) * size]) for block in range(first, num_blocks)]
                blocks = [block for key in keys if (block := self.pool.find(key)) is not None]
                if len(blocks) < len(keys):
                    break
                found.append([NULL_BLOCK] * first + blocks)
            else:
                return found
        return [[] for _ in self.groups]

    def _num_unseen_blocks(self, group: CacheGroup, num_computed: int) -> int:
        """Number of first blocks of which neither the next token nor a later one sees anything."""
        return seen_keys(group.kept_for, num_computed)[0] // group.block_size

    def _grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Takes blocks for a request's first ``num_tokens`` tokens, and frees those that are no longer seen.

        Returns the new ones by group, or None if there are too few.
        """
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            unseen = self._num_unseen_blocks(group, request.num_computed)
            self.pool.free(blocks[:unseen])
            blocks[:unseen] = [NULL_BLOCK] * len(blocks[:unseen])
        missing = [
            max(0, -(-num_tokens // group.block_size) - len(blocks))
            for group, blocks in zip(self.groups, request.blocks, strict=True)
        ]
        if sum(missing) > self.pool.num_free:
            return None
        new = [self.pool.take(count) for count in missing]
        for blocks, more in zip(request.blocks, new, strict=True):
            blocks += more
        for index, (group, blocks) in enumerate(zip(self.groups, request.blocks, strict=True)):
            for end in range(group.block_size, num_tokens + 1, group.block_size):
                block = blocks[end // group.block_size - 1]
                if block != NULL_BLOCK and None not in request.tokens[:end]:
                    self.pool.remember((index, *request.tokens[:end]), block)
        return new

    def _release(self, request: Request) -> None:
        for blocks in request.blocks:
            self.pool.free(blocks)
        if request.state:
            assert self.states
            self.states.free([request.state])
        request.blocks, request.state, request.num_computed, request.is_running = [], 0, 0, False

    def _tell(
        self, told: HandMadeStep, request: Request, was_running: bool, new: list[list[int]], every: list[list[int]]
    ) -> None:
        """Adds a request to a step: one that the runner does not know with all its data, another with what is new."""
        if self.states:
            new, every = [*new, []], [*every, [request.state]]
        if not request.is_known_to_runner:
            told.add_new(request.name, list(request.prompt), request.params, every, request.num_computed)
            return
        was_there = was_running and request.was_in_last_step
        blocks = new if was_running else every
        told.continued.append(
            Continued(
                req_id=request.name,
                is_resumed=not was_running,
                all_token_ids=None if was_there else [token for token in request.tokens if token is not None],
                new_block_ids=tuple(blocks) if any(blocks) else None,
                num_computed=request.num_computed,
                num_output_tokens=len(request.tokens) - len(request.prompt),
            )
        )

    def _commit(self, shares: list[Share]) -> None:
        for request in self.requests.values():
            request.was_in_last_step = False
        for share in shares:
            request = share.request
            request.num_computed += share.count
            request.is_known_to_runner = request.was_in_last_step = True
            request.is_set_aside = False
            if share.is_sampled:
                request.tokens.append(None)

    def take_output(self, shares: list[Share], sampled: dict[str, list[int]]) -> None:
        """Reads a step's tokens; those of requests that ended or were set aside silently since are void."""
        for share in shares:
            request = share.request
            if share.is_sampled and share.generation == request.generation:
                (request.tokens[len(share.tokens)],) = sampled[request.name]
