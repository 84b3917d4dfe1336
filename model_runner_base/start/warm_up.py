"""What runs before the first request: the step that is measured, every size once, the host's loops."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from tqdm import tqdm
from vllm.config import ModelConfig, VllmConfig
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.sampling_params import SamplingParams

from model_runner_base.device_ops import DeviceOps
from model_runner_base.graph_policy import GraphPolicy, StepFunction
from model_runner_base.heads.generate import LogitsOf
from model_runner_base.heads.sampling.params import SamplingMode
from model_runner_base.heads.sampling.vocabulary import Vocabulary
from model_runner_base.inputs.embeddings import profile_inputs
from model_runner_base.requests.states import RequestInfo
from model_runner_base.start.behind import SizeParts, SizesBehind
from model_runner_base.start.wiring import StepParts
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import StepSize


class Starting(Protocol):
    """What a runner is before its first step."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    max_model_len: int

    @property
    def device_ops(self) -> DeviceOps: ...

    @property
    def graph_policy(self) -> GraphPolicy: ...

    vocabulary: Vocabulary
    use_piecewise_graph: bool
    model: Any
    parts: StepParts
    sizes_behind: SizesBehind

    def _make_sampler(self, mode: SamplingMode) -> StepFunction: ...

    def _dummy_run(self, size: StepSize) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def _pack_at(self, size: StepSize, batch: Any) -> Any: ...

    def _prepare_sampling(self, batch: Any) -> Any: ...


def profile_step(runner: Starting) -> None:
    """The largest step without KV caches, attention left out, and the sampling that takes most memory."""
    scheduler = runner.vllm_config.scheduler_config
    num_tokens = scheduler.max_num_batched_tokens
    num_reqs = min(scheduler.max_num_seqs, num_tokens)
    zeros = runner.device_ops.zeros
    token_ids = zeros((num_tokens,), torch.int32)
    with override_forward_context(create_forward_context(None, runner.vllm_config)):
        inputs = profile_inputs(runner.model_config, runner.model, token_ids)
        hidden_states = runner.model(positions=token_ids, intermediate_tensors=None, **inputs)
        logits = LogitsOf(runner.model, runner.vocabulary).whole(hidden_states, token_ids[:num_reqs])
    tables = (zeros((1, 3), dtype) + 1 for dtype in (torch.float32, torch.int32))
    rows = zeros((num_tokens, 1), torch.int32), token_ids
    runner._make_sampler(SamplingMode.SORTED)(logits, zeros((2, num_reqs), torch.int32), *tables, *rows)


def warm_up(runner: Starting, sizes: Iterable[StepSize]) -> None:
    """Makes every size that serving waits for, and all that sampling may need after it, under a progress bar.

    The other sizes are left to ``runner.sizes_behind``.
    """
    policy, parts = runner.graph_policy, runner.parts
    largest_first = sorted(sizes, reverse=True)
    first = policy.first_sizes(largest_first)
    compile_host_loops(runner)
    made: set[object] = set()
    runs: list[Callable[[], None]] = [parts.inputs.warm_up]
    for size in first:
        keys = set(keys_of(size)) - made
        runs.append(partial(_run_size, runner, size, keys))
        made |= keys
    what = {"desc": "Capturing graphs", "unit": "graph"} if runner.use_piecewise_graph else {"desc": "Warming up"}
    for _ in tqdm(policy.make_ahead(runs), total=len(runs), **what):
        pass
    runner.device_ops.synchronize()
    left = [size for size in largest_first if size not in first]
    runner.sizes_behind.leave(left, made, partial(parts_of, runner), policy, parts.repeat.stop)


def keys_of(size: StepSize) -> list[object]:
    """What the parts of a size go by: sizes of as many tokens, or rows of logits, share the parts made for these."""
    return [size, ("tokens", size.num_tokens), ("logits", size.num_logits)]


def parts_of(runner: Starting, size: StepSize) -> SizeParts:
    """What a size is made of: the model's graph, then sampling on what that returned."""
    head = runner.parts.head
    results: list[torch.Tensor] = []

    def run_model() -> None:
        results.extend(runner._dummy_run(size))

    runs = [run_model, lambda: head.warm_up_tokens(results[2]), lambda: head.warm_up_logits(*results[:2])]
    yield from zip(keys_of(size), runs, strict=True)


def _run_size(runner: Starting, size: StepSize, keys: set[object]) -> None:
    """Runs a size on padding, and those of its parts that have these keys."""
    for key, run in parts_of(runner, size):
        if key in keys:
            run()


def compile_host_loops(runner: Starting) -> None:
    """A request of padding decodes into its second block, then has two tokens.

    As far as the limits allow: what they rule out, no step will call.
    """
    parts, req_id = runner.parts, "warm-up"
    info = RequestInfo(SamplingParams(), seed=0, prompt_token_ids=[0])
    most_tokens = min(2, runner.max_model_len, runner.vllm_config.scheduler_config.max_num_batched_tokens)
    for num_tokens in range(1, 1 + most_tokens):
        row = parts.requests.admit(req_id, info, [0], 0)
        for table in parts.block_tables:
            table.append([row], [[]])
        step = Schedule(set(), (), [], [req_id], [None], {req_id: num_tokens}, num_tokens)
        batch = parts.batches.build(step)
        paged = runner.graph_policy.dispatch(parts.caches.needs(batch)[0])
        runner._pack_at(paged, batch)
        runner._prepare_sampling(batch)
        block_size = max((table.block_size for table in parts.block_tables), default=0)
        for _ in range(min(block_size, runner.max_model_len - 1)):
            if parts.repeat.follow(step) is None:
                break
    parts.requests.forget(req_id)
    parts.repeat.stop()
