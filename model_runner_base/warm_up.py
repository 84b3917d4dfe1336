"""What runs before the first request: the step that is measured, every size once, the host's loops.

The runner's own half of start-up, kept apart from its step: these functions know its insides as its methods do.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from model_runner_base.graph_policy import GraphSize
from model_runner_base.prompt_embeds import profile_inputs
from model_runner_base.request_states import RequestInfo
from model_runner_base.sample.params import SamplingMode

if TYPE_CHECKING:
    from model_runner_base.model_runner import ModelRunnerBase


def profile_step(runner: "ModelRunnerBase") -> None:
    """The largest step without KV caches, attention left out, and the sampling that takes most memory."""
    num_tokens = runner.scheduler_config.max_num_batched_tokens
    num_reqs = min(runner.scheduler_config.max_num_seqs, num_tokens)
    zeros = runner.device_ops.zeros
    token_ids = zeros((num_tokens,), torch.int32)
    with override_forward_context(create_forward_context(None, runner.vllm_config)):
        inputs = profile_inputs(runner.model_config, runner.model, token_ids)
        hidden_states = runner.model(positions=token_ids, intermediate_tensors=None, **inputs)
        logits = runner._compute_logits(hidden_states, token_ids[:num_reqs])
    tables = (zeros((1, 3), dtype) + 1 for dtype in (torch.float32, torch.int32))
    runner._make_sampler(SamplingMode.SORTED)(logits, zeros((2, num_reqs), torch.int32), *tables, token_ids)


def warm_up(runner: "ModelRunnerBase", sizes: Iterable[GraphSize]) -> None:
    """Every size, and all that sampling may need after it, largest first, under a progress bar."""
    compile_host_loops(runner)
    largest_first = sorted(sizes, reverse=True)
    runner.graph_policy.compile_ahead(lambda: _run_each(runner, largest_first))
    what = {"desc": "Capturing graphs", "unit": "graph"} if runner.use_piecewise_graph else {"desc": "Warming up"}
    _run_each(runner, tqdm(largest_first, **what))
    runner.device_ops.synchronize()


def _run_each(runner: "ModelRunnerBase", sizes: Iterable[GraphSize]) -> None:
    """Runs each size on padding; the parts of sampling once a number of tokens or requests."""
    num_reqs_seen: set[int] = set()
    num_tokens_seen: set[int] = set()
    for size in sizes:
        logits, sample_slots, hidden_states = runner._dummy_run(size)
        if size.num_tokens not in num_tokens_seen:
            num_tokens_seen.add(size.num_tokens)
            runner.sampling.prompt_logprobs.warm_up(hidden_states)
        if size.num_reqs not in num_reqs_seen:
            num_reqs_seen.add(size.num_reqs)
            runner.sampling.warm_up(logits, sample_slots)


def compile_host_loops(runner: "ModelRunnerBase") -> None:
    """A request of padding decodes into its second block, then has two tokens.

    As far as the limits allow: what they rule out, no step will call.
    """
    req_id = "warm-up"
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs.req_ids.append(req_id)
    info = RequestInfo(SamplingParams(), seed=0, prompt_token_ids=[0])
    most_tokens = min(2, runner.max_model_len, runner.scheduler_config.max_num_batched_tokens)
    for num_tokens in range(1, 1 + most_tokens):
        row = runner.requests.add(req_id, info, [0], 0)
        for table in runner.block_tables:
            table.append([row], [[]])
        step.num_scheduled_tokens = {req_id: num_tokens}
        step.total_num_scheduled_tokens = num_tokens
        batch = runner.batch_builder.build(step)
        plans = runner.attention.plan(batch)
        # The first way that a step can be run is the one with loops.
        size = runner.graph_policy.dispatch(runner.attention.needed_sizes(batch, plans)[0])
        runner._pack_at(size, batch, plans)
        runner.sampling.prepare(batch)
        if runner._steady is not None:
            block_size = max((table.block_size for table in runner.block_tables), default=0)
            for _ in range(min(block_size, runner.max_model_len - 1)):
                runner._steady.advance(step)
    runner.requests.remove(req_id)
    runner._steady = None
