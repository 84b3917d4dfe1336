"""A serving trace without a device: which steps the real scheduler makes of requests that arrive at random.

Lengths are log-normal with the means that the vLLM paper (arXiv:2309.06180, figure 11) gives for ShareGPT, 161 prompt
and 338 output tokens, or with long prompts and short answers as retrieval has them; they are cut to the model length.
Arrivals are Poisson, ``load`` times the rate at which ``max_num_seqs`` requests would run all the time.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.harness.releases import new_request
from benchmarks.harness.runners import make_config
from model_runner_base.attention.plan import PairGeometry
from model_runner_base.caches.spans import NO_ENDS
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.model_runner import ModelRunnerBase
from model_runner_base.step.sizes import COMMON_DIMS, StepLimits, StepSize, Tiling

BLOCK_SIZE = 32
DECODE = Tiling(1, ModelRunnerBase.KV_TILE)
CHUNK = Tiling(ModelRunnerBase.CHUNK_QUERY_TILE, ModelRunnerBase.CHUNK_KV_TILE)


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of token counts."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        return self.median * float(np.exp(self.sigma**2 / 2))

    def draw(self, rng: np.random.Generator, most: int) -> int:
        return int(np.clip(rng.lognormal(np.log(self.median), self.sigma), 1, most))


@dataclass(frozen=True)
class Mix:
    """Mixture of requests: how long their prompts and outputs are."""

    name: str
    prompt: Lengths
    output: Lengths


CHAT = Mix("chat", Lengths(100, 0.98), Lengths(225, 0.9))
RETRIEVAL = Mix("retrieval", Lengths(900, 0.5), Lengths(100, 0.8))


def step_limits(max_num_reqs: int, max_num_tokens: int, max_model_len: int) -> StepLimits:
    dims = (*COMMON_DIMS, *plan_dims(DECODE, CHUNK))
    return StepLimits(max_num_tokens, max_num_reqs, max_model_len, DECODE, CHUNK, dims)


def make_scheduler(limits: StepLimits) -> Scheduler:
    """vLLM's scheduler, with a cache large enough for every request at its longest."""
    config = make_config(
        is_async=False,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_reqs,
        max_num_batched_tokens=limits.max_num_tokens,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
    )
    num_blocks = limits.max_num_reqs * -(-limits.max_model_len // BLOCK_SIZE) + 1
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, cache, StructuredOutputManager(config), BLOCK_SIZE)


def serve(limits: StepLimits, mix: Mix, load: float, num_steps: int) -> Iterator[SchedulerOutput]:
    """Steps of a trace, after as many again in which the batch fills. Each must be used before the next is made."""
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(limits)
    rate = load * limits.max_num_reqs / mix.output.mean
    count = 0
    for step in range(2 * num_steps):
        for _ in range(rng.poisson(rate)):
            # A request ends at the model length, prompt and output together.
            prompt = mix.prompt.draw(rng, limits.max_model_len - 1)
            output = mix.output.draw(rng, limits.max_model_len - prompt)
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            scheduler.add_request(new_request(f"{count}", [5] * prompt, params))
            count += 1
        scheduled = scheduler.schedule()
        if step >= num_steps and scheduled.total_num_scheduled_tokens:
            yield scheduled
        req_ids = list(scheduled.num_scheduled_tokens)
        # A request with prompt left yields nothing.
        requests = [scheduler.requests[req_id] for req_id in req_ids]
        tokens = [[] if request.num_computed_tokens < request.num_tokens else [5] for request in requests]
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        scheduler.update_from_output(scheduled, ModelRunnerOutput(req_ids, index, tokens))


def needs_of(limits: StepLimits, mix: Mix, load: float, num_steps: int) -> Counter[StepSize]:
    """Sizes that the steps of a trace need, before padding."""
    decode, chunk = (
        PairGeometry(BLOCK_SIZE, *tiling, -(-limits.max_model_len // tiling.keys))
        for tiling in (limits.decode, limits.chunk)
    )
    needs: Counter[StepSize] = Counter()
    for scheduled in serve(limits, mix, load, num_steps):
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        query_len = np.fromiter(scheduled.num_scheduled_tokens.values(), np.int64)
        num_computed = np.array([computed[req_id] for req_id in scheduled.num_scheduled_tokens])
        is_row = query_len <= limits.decode.query
        rows, chunks = (
            tiles.count(query_len[which], num_computed[which], int(query_len[which].sum()), NO_ENDS)
            for tiles, which in ((decode, is_row), (chunk, ~is_row))
        )
        need = limits.decode_size(rows.num_tiles, rows.num_pairs)
        if chunks.num_tiles:
            tokens, count = int(query_len[~is_row].sum()), int((~is_row).sum())
            need = limits.mixed_size(rows.num_tiles, rows.num_pairs, tokens, count, chunks.num_pairs, chunks.num_tiles)
        needs[need] += 1
    return needs
