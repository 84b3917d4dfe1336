"""Random schedules, step by step, against a model that keeps no state: arrivals, chunks, aborts, preemptions, moves.

The schedules go to the runner itself, past the engine's scheduler, so that any schedule that vLLM's contract allows may
come. Each example begins and ends with a runner that holds no request, so that hypothesis can shrink a failing one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from model_runner_base.heads.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from model_runner_base.step.trace import StepTrace, watch_steps
from model_runner_base.testing import reference
from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.brute_force import check_step
from model_runner_base.testing.engine import core_of, greedy, runner_of, sampled
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import check_tokens
from model_runner_base.testing.scheduler_outputs import frees_unseen_blocks
from model_runner_base.testing.schedules import CacheGroup, HandScheduler, Request, Sees, Share
from model_runner_base.testing.table import refusal
from model_runner_base.testing.tokenizer import EOS, make_tokenizer
from model_runner_base.vllm_compat.types.recurrent import has_states, num_states

MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_MODEL_LEN = 4, 32, 352
OPTIONS = {
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": MAX_NUM_TOKENS,
    "max_model_len": MAX_MODEL_LEN,
    "block_size": 16,
    # Four long requests do not fit: 63 blocks for 88.
    "num_gpu_blocks_override": 64,
    "async_scheduling": True,
}
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 100, 240, 250, 257, 310]
"""Prompt lengths: around a block's end; near the end of a KV tile of 256, which decode then passes; and past that end
by more than a window."""
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0, "bad_words": ["an", "the", "e "]},
    {"temperature": 0, "min_tokens": 1, "stop_token_ids": list(range(60, 160)), "logit_bias": {30: 4.0}},
    {"temperature": 0.8, "top_k": 3},
]
"""Sampling parameters whose rules mostly depend on the output so far, which must survive whatever happens to the
request."""
CHUNKS = [1, 0, 2, 15, 16, 17, 32]


class Arrival(NamedTuple):
    family: int
    length: int
    new_tokens: int
    kind: int
    shares_prefix: bool


class Steps(NamedTuple):
    """A number of similar steps: the most tokens of each request, the request that comes first, and how many steps."""

    chunks: list[int]
    turn: int
    times: int


ARRIVALS = st.builds(
    Arrival, st.integers(0, 2), st.sampled_from(LENGTHS), st.integers(1, 40), st.integers(0, 9), st.booleans()
)
STEPS = st.builds(
    Steps, st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 12)
)


class Bench:
    """An engine's worker that is fed by hand, and everything about it that a step is compared with."""

    def __init__(self, llm: LLM, model: TinyModel, seen: list[StepTrace]) -> None:
        self.model = model
        self.worker = llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[union-attr]
        self.runner = runner_of(llm)
        config = core_of(llm).scheduler.kv_cache_config
        layers: Any = self.runner.vllm_config.compilation_config.static_forward_context
        self.groups = [
            CacheGroup(
                {name: _sees(layers[name]) for name in group.layer_names},
                group.kv_cache_spec.block_size,
                _kept_for(group.kv_cache_spec),
            )
            for group in config.kv_cache_groups
            if layers.keys() >= set(group.layer_names)  # That of states names none.
        ]
        self.num_states = num_states(self.runner.vllm_config) if has_states(self.runner.vllm_config) else 0
        self.num_blocks = config.num_blocks
        self.seen = seen
        self.kinds = [kind for kind in KINDS if _is_supported(llm, kind)]
        # The engine would tell of its last request's end in its next step; from here on it makes none.
        self.worker.execute_model(core_of(llm).scheduler.schedule())

    def params(self, kind: int, count: int) -> SamplingParams:
        """Parameters for ``count`` tokens of a kind; the first kind if there is none of this number."""
        return _as_runner_gets(self.kinds[kind if kind < len(self.kinds) else 0], count)

    def scheduler(self, seed: int) -> HandScheduler:
        limits = MAX_NUM_SEQS, MAX_NUM_TOKENS
        return HandScheduler(self.groups, self.num_blocks, *limits, Random(seed), self.num_states)


def _as_runner_gets(options: dict[str, Any], count: int) -> SamplingParams:
    """Parameters for exactly ``count`` tokens, with what vLLM's front end fills in."""
    options = options | ({"min_tokens": count} if "min_tokens" in options else {})
    params = sampled(count, seed=7, **options)
    params.update_from_generation_config({}, EOS)
    params.update_from_tokenizer(_wrapped_tokenizer())
    return params


@cache
def _wrapped_tokenizer() -> Any:
    tokenizer: Any = make_tokenizer()
    tokenizer.max_token_id = VOCAB_SIZE - 1  # vLLM's wrapper around a tokenizer has it.
    return tokenizer


def _is_supported(llm: LLM, options: dict[str, Any]) -> bool:
    """Whether the device accepts such requests; the checks of sampling report it if not."""
    try:
        llm.llm_engine.add_request("probe", TokensPrompt(prompt_token_ids=[5, 6, 7]), _as_runner_gets(options, 1))
    except Exception as error:
        if refusal(error) is None:
            raise
        return False
    llm.llm_engine.abort_request(["probe"])
    return True


def _sees(of: object) -> Sees:
    """The rule of visible keys in one of vLLM's layers, or in a cache spec."""
    return Sees(getattr(of, "sliding_window", None), getattr(of, "attention_chunk_size", None))


def _kept_for(spec: object) -> Sees:
    """The rule by which vLLM's scheduler keeps a group's blocks.

    A spec of full attention may name a window or chunks too, but all of its blocks are kept.
    """
    return _sees(spec) if frees_unseen_blocks(spec) else Sees()


@contextmanager
def bench_of(llm: LLM, model: TinyModel) -> Iterator[Bench]:
    with watch_steps(runner_of(llm)) as seen:
        yield Bench(llm, model, seen)


class Run:
    """Requests under way on a bench: launches steps, reads them at once or one step late, checks each."""

    def __init__(self, bench: Bench, seed: int, is_async: bool) -> None:
        self.bench = bench
        self.scheduler = bench.scheduler(seed)
        self.is_async = is_async
        self._unread: list[tuple[list[Share], AsyncModelRunnerOutput | ModelRunnerOutput]] = []
        self._fed_early: list[tuple[Share, int, int]] = []

    @property
    def requests(self) -> list[Request]:
        return list(self.scheduler.requests.values())

    def step(self, wanted: dict[str, int]) -> None:
        """Runs a step of up to the wanted number of tokens of each named request, in that order."""
        output, shares = self.scheduler.step(wanted)
        self.bench.seen.clear()
        result = self.bench.worker.execute_model(output)
        if not shares:
            assert result is not None and not result.req_ids and not self.bench.seen
            self.read_all()
            return
        (seen,) = self.bench.seen
        check_step(seen, shares, MAX_NUM_SEQS, self.bench.groups)
        self.note_fed(shares, seen)
        later = self.bench.worker.sample_tokens(None)
        assert (result is None) != (later is None), "a step is answered at once, or by sample_tokens"
        self._unread.append((shares, result or later))
        while len(self._unread) > self.is_async:
            self._read()

    def go(self, steps: Steps) -> None:
        """Runs steps of requests in some order, some of them skipped, each with a chunk size of its own."""
        for _ in range(steps.times):
            names = [request.name for request in self.requests if request.num_left]
            turn = steps.turn % max(1, len(names))
            names = names[turn:] + names[:turn]
            self.step({name: steps.chunks[index % len(steps.chunks)] for index, name in enumerate(names)})

    def decode(self, count: int) -> None:
        """Runs ``count`` steps of one token of each running request."""
        for _ in range(count):
            running = [request.name for request in self.requests if request.is_running and request.num_left]
            if running:
                self.step(dict.fromkeys(running, 1))

    def finish(self, request: Request) -> None:
        output = [token for token in request.tokens[len(request.prompt) :] if token is not None]
        if output:
            check_tokens(self.bench.model, reference.Request(request.prompt, request.params), output)
        self.scheduler.finish(request)

    def read_all(self) -> None:
        while self._unread:
            self._read()

    def end(self) -> None:
        """Finishes everything, and checks that the runner then holds no request."""
        self.read_all()
        for request in self.requests:
            self.finish(request)
        self.step({})
        assert not self.bench.runner.parts.requests.num_reqs, "the runner keeps requests that have finished"

    def clean(self) -> None:
        """Takes back what was launched, whatever state the runner is in after a failure."""
        self.bench.worker.sample_tokens(None)
        for request in self.requests:
            self.scheduler.finish(request)
        self.bench.worker.execute_model(self.scheduler.step({})[0])

    def _read(self) -> None:
        shares, output = self._unread.pop(0)
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        assert [output.req_id_to_index[name] for name in output.req_ids] == list(range(len(shares)))
        assert set(output.req_ids) == {share.request.name for share in shares}
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for share in shares:
            count = len(sampled[share.request.name])
            assert count == share.is_sampled, f"{share.request.name}: {count} tokens, sampled {share.is_sampled}"
        self.scheduler.take_output(shares, sampled)
        self._check_fed_early()
        for request in self.requests:
            if len(request.tokens) - len(request.prompt) == request.params.max_tokens and None not in request.tokens:
                self.finish(request)

    def note_fed(self, shares: list[Share], seen: StepTrace) -> None:
        """Remembers tokens that were fed before the scheduler was told of them."""
        for share in shares:
            fed = seen.requests[share.request.name].token_ids
            for position, token in enumerate(fed, start=share.start):
                if share.tokens[position] is None:
                    self._fed_early.append((share, position, token))

    def _check_fed_early(self) -> None:
        for share, position, fed in self._fed_early:
            if share.generation == share.request.generation:
                token = share.request.tokens[position]
                assert fed == token, f"{share.request.name}: {fed} was fed at {position}, {token} was sampled"
        self._fed_early.clear()


def has_requests(machine: "Schedules") -> bool:
    return bool(machine.run and machine.run.requests)


class Schedules(RuleBasedStateMachine):
    """Rules for what may happen between two steps. Each rule ends with steps, so that every example goes on."""

    run_class: type[Run] = Run

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.run: Run = None  # type: ignore[assignment]

    @initialize(seed=st.integers(0, 99), is_async=st.booleans())
    def start(self, seed: int, is_async: bool) -> None:
        self.run = self.run_class(self.bench, seed, is_async)

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=3), steps=STEPS)
    def arrive(self, arrivals: list[Arrival], steps: Steps) -> None:
        """Adds requests. Prompts of a family begin alike; a name may be that of an earlier request, even of one that
        has just ended."""
        names = [name for name in "abcdef" if name not in self.run.scheduler.requests]
        for name, arrival in zip(names, arrivals, strict=False):
            prompt = np.random.default_rng(arrival.family).integers(3, VOCAB_SIZE, arrival.length).tolist()
            params = self.bench.params(arrival.kind, arrival.new_tokens)
            self.run.scheduler.add(name, prompt, params, arrival.shares_prefix)
        self.run.go(steps)

    @rule(steps=STEPS)
    @precondition(has_requests)
    def go(self, steps: Steps) -> None:
        self.run.go(steps)

    @rule(count=st.integers(1, 20))
    @precondition(has_requests)
    def decode(self, count: int) -> None:
        self.run.decode(count)

    @rule(count=st.integers(1, 6), silently=st.booleans(), rests=st.booleans(), steps=STEPS)
    @precondition(has_requests)
    def preempt(self, count: int, silently: bool, rests: bool, steps: Steps) -> None:
        """Takes the blocks of the last ``count`` requests; if it ``rests``, a step without tokens follows."""
        for request in self.run.requests[-count:]:
            self.run.scheduler.preempt(request, silently)
        if rests:
            self.run.step({})
        self.run.go(steps)

    @rule(index=st.integers(0, 5), steps=STEPS)
    @precondition(has_requests)
    def abort(self, index: int, steps: Steps) -> None:
        self.run.finish(self.run.requests[index % len(self.run.requests)])
        self.run.go(steps)

    def teardown(self) -> None:
        if self.run:
            try:
                self.run.end()
            finally:
                self.run.clean()


def test_repeated_step_is_interrupted(engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """Requests that come back in other blocks, one token each, are not taken for those of the step before."""
    model = tiny_model("llama")
    with bench_of(engine(model.path, **OPTIONS), model) as bench:
        for silently in (True, False):
            run = Run(bench, seed=0, is_async=True)
            for name in "ab":
                run.scheduler.add(name, [5, 6, ord(name)], bench.params(0, 12))
            run.step({"a": 3, "b": 3})
            run.decode(2)
            for request in run.requests:
                run.scheduler.preempt(request, silently)
            if not silently:
                run.step({})  # A step without tokens leaves nothing of the batch before.
            while run.requests:
                run.step({request.name: 1 for request in run.requests})
            run.end()


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", pytest.param("llama4", id="chunks")])
def test_random_schedules(
    name: str, engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel], pytestconfig: pytest.Config
) -> None:
    """Arrays and tokens of random schedules all equal those of a model without state."""
    model = tiny_model(name)
    with bench_of(engine(model.path, **OPTIONS), model) as bench:
        run_schedules(partial(Schedules, bench), pytestconfig)


def run_schedules(machine: Callable[[], Schedules], pytestconfig: pytest.Config, steps: int = 40) -> None:
    """Runs random schedules of up to so many ``steps`` of a machine, as many as the options of pytest ask for."""
    run_state_machine_as_test(
        machine,  # type: ignore[arg-type]
        settings=settings(
            max_examples=pytestconfig.getoption("schedules") + pytestconfig.getoption("soak") // 20,
            stateful_step_count=steps,
            deadline=None,
            # A verdict on a device must come out the same twice, and leave no files behind.
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            phases=set(Phase) - ({Phase.shrink} if pytestconfig.getoption("no_shrinking") else set()),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_requests_set_aside_by_the_engine(engine: Callable[..., LLM], tiny_model: Callable[[str], TinyModel]) -> None:
    """Requests that the engine sets aside without telling the runner make way for a new one, and come back."""
    model = tiny_model("llama")
    llm = engine(model.path, max_num_seqs=2, scheduling_policy="priority")
    prompts = {"a": (5, 6, 97), "b": (5, 6, 98), "first": (7, 8)}
    tokens: dict[str, list[int]] = {}
    core = llm.llm_engine
    for name in ("a", "b"):
        core.add_request(name, TokensPrompt(prompt_token_ids=list(prompts[name])), greedy(12), priority=1)
    for _ in range(4):
        core.step()
    core.engine_core.reset_prefix_cache(reset_running_requests=True)
    core.add_request("first", TokensPrompt(prompt_token_ids=list(prompts["first"])), greedy(12), priority=0)
    for _ in range(200):
        tokens.update((out.request_id, list(out.outputs[0].token_ids)) for out in core.step() if out.finished)  # type: ignore
    assert tokens.keys() == prompts.keys(), f"{prompts.keys() - tokens.keys()} did not end"
    check_equal(model, [*prompts.values()], [tokens[name] for name in prompts], [12] * len(prompts))
