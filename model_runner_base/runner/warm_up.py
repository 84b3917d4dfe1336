"""Warm-up before the first request: runs the step that is measured, every size once, and the host's loops."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from tqdm import tqdm
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.sampling_params import SamplingParams
from vllm.sequence import IntermediateTensors

from model_runner_base.heads.generate import ModelLogits
from model_runner_base.heads.pipeline_stages import received_at_profile
from model_runner_base.heads.sampling.sampler import SamplingMode
from model_runner_base.inputs.embeddings import profile_inputs
from model_runner_base.models.layers.expert_exchange import agree_at_profile
from model_runner_base.runner.background import SizeRuns
from model_runner_base.runner.wiring import Runner
from model_runner_base.step.call import ModelResults
from model_runner_base.step.host_loops import compiling
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import StepSize
from model_runner_base.vllm_compat.types.speculation import read_speculation


def profile_largest_step(runner: Runner) -> None:
    """Runs the largest step without KV caches and attention, and the kind of sampling that takes most memory, if
    requests decode."""
    scheduler = runner.vllm_config.scheduler_config
    num_tokens = scheduler.max_num_batched_tokens
    num_logits = min(scheduler.max_num_seqs, num_tokens) * (1 + read_speculation(runner.vllm_config).num_drafts)
    decodes = runner.step_limits().decodes
    zeros = runner.device_ops.zeros
    token_ids = zeros((num_tokens,), torch.int32)
    with (
        override_forward_context(create_forward_context(None, runner.vllm_config)),
        runner.adapters.unused(num_tokens, num_logits),
    ):
        agree_at_profile(runner.model, num_tokens)
        received = received_at_profile(runner.vllm_config, runner.model, num_tokens, token_ids.device)
        output = runner.model(**profile_inputs(runner.model_config, runner.model, token_ids, received))
        if not decodes or isinstance(output, IntermediateTensors):
            return
        hidden_states = output if isinstance(output, torch.Tensor) else output[0]  # Else with other layers' states.
        logits = ModelLogits(runner.model, runner.vocabulary).whole(hidden_states, zeros((num_logits,), torch.int32))
    tables = (zeros((1, 3), dtype) + 1 for dtype in (torch.float32, torch.int32))
    rows = zeros((num_tokens, 1), torch.int32), token_ids
    runner.make_sampler(SamplingMode.SORTED)(logits, zeros((2, num_logits), torch.int32), *tables, *rows)


def warm_up_sizes(runner: Runner, sizes: Iterable[StepSize]) -> None:
    """Makes every size that serving waits for, and all that sampling may need for it, and shows a progress bar.

    The other sizes are left to ``runner.background_compiler``. Where nothing is captured, pairs beyond two pieces would
    be arithmetic on padding alone, and are left out.
    """
    policy = runner.graph_policy
    if not policy.sizes:
        sizes = map(runner.step_limits().in_two_pieces, sizes)
    largest_first = sorted(sizes, reverse=True)
    with compiling():
        compile_host_loops(runner)
    first = policy.first_sizes(largest_first)
    made: set[object] = set()
    runs = list[Callable[[], None]]()
    for size in first:
        keys = {key for key, _ in runs_of(runner, size)} - made
        runs.append(partial(_run_size, runner, size, keys))
        made |= keys
    what = {"desc": "Capturing graphs", "unit": "graph"} if runner.use_piecewise_graph else {"desc": "Warming up"}
    with frozen_heap():
        for _ in tqdm(policy.make_ahead(runs), total=len(runs), **what):
            pass
    runner.device_ops.synchronize()
    left = [size for size in largest_first if size not in first]
    if left:
        policy.offer_only(first)
        runner.background_compiler.queue(left, made, runs_of, runner)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keeps the garbage collector from searching the objects that exist, while captures make many more.

    It does nothing if the process has frozen some already, as vLLM's engine core does.
    """
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def runs_of(runner: Runner, size: StepSize) -> SizeRuns:
    """Yields the runs of a size: those of components, of the model's graph, and of sampling on its results.

    Sizes with the same number of tokens, or of logits, share the runs that are made for that number.
    """
    parts = runner.parts
    components, head = parts.components, parts.head
    results: list[ModelResults] = []
    yield "components", components.warm_up
    yield size, lambda: results.append(parts.graph.dummy_run(size))
    yield ("tokens", size.num_tokens), lambda: head.warm_up_tokens(results[0].hidden_states)
    yield ("logits", size.num_logits), lambda: head.warm_up_logits(results[0].logits, results[0].sample_slots)
    yield ("drafts", size), lambda: parts.graph.warm_up_drafter(size, results[0])


def _run_size(runner: Runner, size: StepSize, keys: set[object]) -> None:
    """Does the runs of a size that have these keys, on padding."""
    for key, run in runs_of(runner, size):
        if key in keys:
            run()


def compile_host_loops(runner: Runner) -> None:
    """Compiles the host's loops on a made-up request, which decodes into its second block, then has a chunk of two
    tokens.

    It goes as far as the limits allow: loops that they rule out are never called by a step.
    """
    parts, req_id = runner.parts, "warm-up"
    info = RequestInfo(SamplingParams(), seed=0, prompt_token_ids=[0])
    query = parts.layout.limits.decode.query
    most_tokens = min(runner.max_model_len, runner.vllm_config.scheduler_config.max_num_batched_tokens)
    # After its prompt it has a decode row; in a model with a length of one token there are only prompts.
    for num_computed, num_tokens in ((min(1, runner.max_model_len - query), query), (0, 2)):
        if num_tokens > most_tokens or num_computed < 0 or (num_computed and not parts.layout.limits.decodes):
            continue
        computed = [num_computed]
        row = parts.requests.admit(req_id, info, [0], num_computed)
        for table in parts.block_tables:
            table.append([row], [[]])
        step = Schedule(set(), (), [], [req_id], [None], {req_id: num_tokens}, num_tokens, computed)
        batch = parts.batches.build(step)
        size = runner.graph_policy.dispatch(parts.layout.needs(batch)[0])
        packed = parts.graph.pack(size, batch, parts.repeat.place_for(batch))
        parts.repeat.watch(batch, packed, parts.components)
        parts.head.plan(batch)
        block_size = max((table.block_size for table in parts.block_tables), default=0)
        for _ in range(min(block_size, (runner.max_model_len - num_computed) // query - 1)):
            computed[0] += query
            if parts.repeat.advance(step) is None:
                break
    parts.requests.forget(req_id)
    parts.repeat.stop()
