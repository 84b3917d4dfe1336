"""Choice of the sizes to capture: those that save expected traffic most work, until little enough of it is padding.

A grid fine enough to waste little everywhere would need hundreds of graphs, and the steps of a server visit only a
small part of it. So steps are drawn at random as traffic makes them, and sizes are chosen one by one, each the one that
saves most of the remaining padding. The largest sizes are always chosen, so that every step within the limits has a
size. So are a few sizes for a lone request and for steps of prompts only: these are a small part of a server's work,
but a lone user waits for nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from model_runner_base.step.sizes import StepKind, StepLimits, StepSize, cost_of, geometric

PROMPT, OUTPUT = (100, 1.0), (225, 0.9)
"""Median and spread of log-normal token counts; their means are 160 and 340, as the vLLM paper gives for ShareGPT."""
OTHER_TRAFFIC = 0.2
"""Share of the batches whose requests have other lengths; short and long ones are equally likely."""
NUM_BATCHES = 1000
SMALLEST_MIXED = 32
"""Number of tokens in the smallest mixed step that gets a size; smaller steps cost hardly less."""
SMALLEST_PROMPT, LONG_PROMPT = 64, 512
"""Numbers of tokens for steps of prompts only: of the smallest size, and of the longest prompt that has one."""


@dataclass(frozen=True)
class ExpectedSteps:
    """Steps that traffic is expected to make."""

    sizes: np.ndarray
    """[N, 1 + dims] size that each step needs, as ``StepSize.as_row`` writes it."""
    frequency: np.ndarray
    """[N] weight of each step."""


@lru_cache(maxsize=8)
def expect_steps(limits: StepLimits) -> ExpectedSteps:
    """Draws many batches, and two steps of each, one of pure decode and one with new prompts; equal for equal
    limits."""
    rng = np.random.default_rng(0)
    sizes, frequency = [], []
    for index in range(NUM_BATCHES):
        # In every second batch the load is uniform up to overload; in the others it is log-uniform.
        load = 1.1 * rng.random() if index % 2 else limits.max_num_reqs ** (rng.random() - 1)
        num_reqs = min(limits.max_num_reqs, int(np.ceil(load * limits.max_num_reqs)))
        prompts, outputs = _draw_requests(limits, rng, 4 * num_reqs + 8)
        # A long answer is running more often than a short one, and a request may be anywhere in its answer.
        running = rng.choice(len(outputs), num_reqs, p=outputs / outputs.sum())
        contexts = prompts + (rng.random(len(outputs)) * outputs).astype(int)
        kv_tiles = contexts[running] // limits.decode.keys + 1
        if not limits.decodes:
            nothing, batch = np.empty(0, int), prompts[:num_reqs].tolist()
            sizes.append(_mixed_step(limits, nothing, batch, rng).as_row())
            frequency.append(1.0)
            continue
        arrivals = num_reqs / outputs.mean()
        sizes.append(limits.decode_size(num_reqs, int(kv_tiles.sum())).as_row())
        frequency.append(max(0.0, 1 - arrivals))
        if limits.max_num_tokens > 1:
            sizes.append(_mixed_step(limits, kv_tiles, prompts[: 1 + rng.poisson(arrivals)].tolist(), rng).as_row())
            frequency.append(min(1.0, arrivals))
    return ExpectedSteps(np.array(sizes), np.array(frequency))


def _draw_requests(limits: StepLimits, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output tokens of requests of one kind of traffic."""
    (prompt, prompt_spread), (output, output_spread) = PROMPT, OUTPUT
    if rng.random() < OTHER_TRAFFIC:
        length, share = np.exp(rng.uniform(np.log(16), np.log(max(32, limits.max_model_len)))), rng.random()
        prompt, output, prompt_spread, output_spread = length * share, length * (1 - share), 0.5, 0.5
    most = max(1, limits.max_model_len - 1)
    prompts = (prompt * np.exp(prompt_spread * rng.standard_normal(count))).clip(1, most).astype(int)
    outputs = (output * np.exp(output_spread * rng.standard_normal(count))).clip(1, most).astype(int)
    return prompts, np.minimum(outputs, np.maximum(1, limits.max_model_len - prompts))


def _mixed_step(limits: StepLimits, kv_tiles: np.ndarray, prompts: list[int], rng: np.random.Generator) -> StepSize:
    """Size of a step in which ``prompts``, or chunks of those that fit, take the place of as many decode rows."""
    num_rows = max(0, min(len(kv_tiles) - len(prompts), limits.max_num_tokens - 2))
    num_tokens = num_tiles = num_chunks = num_pairs = 0
    for prompt in prompts[: min(limits.max_num_reqs - num_rows, limits.max_chunks)]:
        chunk = min(prompt, limits.max_num_tokens - num_rows - num_tokens)
        if chunk == 0:
            break
        num_computed = int(rng.integers(0, prompt - chunk + 1))
        tile_ends = num_computed + np.arange(0, chunk, limits.chunk.query) + limits.chunk.query - 1
        num_pairs += int((np.minimum(tile_ends, num_computed + chunk - 1) // limits.chunk.keys + 1).sum())
        num_chunks, num_tokens, num_tiles = num_chunks + 1, num_tokens + chunk, num_tiles + len(tile_ends)
    return limits.mixed_size(num_rows, int(kv_tiles[:num_rows].sum()), num_tokens, num_chunks, num_pairs, num_tiles)


@lru_cache(maxsize=8)
def place_sizes(limits: StepLimits, max_padding: float) -> tuple[StepSize, ...]:
    """Sizes with which at most the share ``max_padding`` of the expected work is padding; few, found greedily.

    If all of the work may be padding (1), they are the largest sizes only.
    """
    if max_padding == 1:
        return limits.largest_sizes
    steps = expect_steps(limits)
    needs, frequency = steps.sizes, steps.frequency
    candidates = np.unique([_candidate(limits, need).as_row() for need in map(_from_row, needs.tolist())], axis=0)
    holds = (candidates[:, None] >= needs).all(axis=2) & (candidates[:, None, 0] == needs[:, 0])
    cost = cost_of(candidates, limits.dims)[:, None]
    contexts = geometric(1, limits.max_kv_tiles, factor=4) if limits.decodes else []
    lone = [limits.decode_size(1, num_pairs) for num_pairs in contexts]
    requests = geometric(1, limits.max_num_reqs)
    alone = [prompts_alone(limits, count, requests) for count in geometric(SMALLEST_PROMPT, limits.max_chunk_tokens)]
    sizes = [*limits.largest_sizes, *lone, *alone]
    always = np.array([size.as_row() for size in sizes])
    holds_need = (always[:, None] >= needs).all(axis=2) & (always[:, None, 0] == needs[:, 0])
    paid = np.where(holds_need, cost_of(always, limits.dims)[:, None], np.inf).min(axis=0)
    work = frequency @ cost_of(needs, limits.dims)
    while frequency @ paid * (1 - max_padding) > work:
        saved = np.where(holds, np.maximum(paid - cost, 0), 0) @ frequency
        best = int(saved.argmax())
        if saved[best] == 0:
            break
        sizes.append(_from_row(candidates[best].tolist()))
        paid = np.where(holds[best], np.minimum(paid, cost[best]), paid)
    return tuple(sizes)


def prompts_alone(limits: StepLimits, num_tokens: int, requests: Sequence[int]) -> StepSize:
    """Size of a step of prompts only: a lone user waits for such steps, and so do all users where many arrive at once.

    Its number of requests is one of ``requests``, and more than two if possible: each different number needs samplers
    of its own.
    """
    num_reqs = next((count for count in requests if count > max(2, num_tokens // 128)), limits.max_num_reqs)
    prompt = min(num_tokens, LONG_PROMPT, limits.max_model_len)
    num_prompts = min(-(-num_tokens // prompt), limits.max_chunks)
    tile_ends = np.arange(0, prompt, limits.chunk.query) + limits.chunk.query - 1
    pairs = int((tile_ends // limits.chunk.keys + 1).sum())
    num_tiles = limits.num_tiles(num_tokens, num_prompts)
    size = limits.mixed_size(0, 0, num_tokens, num_prompts, num_prompts * (pairs + 1), num_tiles)
    return limits.but(size, requests=num_reqs, logits=num_reqs * limits.decode.query)


def _from_row(row: list[int]) -> StepSize:
    return StepSize(StepKind(row[0]), tuple(row[1:]))


def _candidate(limits: StepLimits, need: StepSize) -> StepSize:
    """Size for a step, rounded up so that similar steps share it. Requests go by powers of two, since each number of
    them needs its own samplers."""
    dims = limits.named(need)
    num_reqs = min(_round_up(need.num_reqs, 1), limits.max_num_reqs)
    if need.kind == StepKind.DECODE:
        num_rows = min(_round_up(dims["decode_rows"], 4), limits.max_num_reqs)
        num_pairs = min(_round_up(dims["decode_pairs"] - 1, 8), num_rows * limits.max_kv_tiles)
        return limits.but(
            limits.decode_size(num_rows, num_pairs), requests=num_reqs, logits=num_reqs * limits.decode.query
        )
    num_rows = min(_round_up(dims["decode_rows"], 1), limits.max_num_reqs)
    num_pairs = min(_round_up(dims["decode_pairs"] - 1, 4), num_rows * limits.max_kv_tiles)
    num_tokens = min(_round_up(max(dims["chunk_tokens"], SMALLEST_MIXED), 4), limits.max_chunk_tokens)
    num_tiles = max(_round_up(dims["chunk_tiles"], 2), limits.num_tiles(num_tokens, 1))
    chunk_pairs = min(_round_up(dims["chunk_pairs"] - 1, 4), num_tiles * limits.max_chunk_kv_tiles)
    size = limits.mixed_size(num_rows, num_pairs, num_tokens, num_reqs, chunk_pairs, num_tiles)
    return limits.but(size, requests=num_reqs, logits=num_reqs * limits.decode.query)


def _round_up(value: int, steps: int) -> int:
    """``value`` rounded up to one of ``steps`` evenly spaced numbers between one power of two and the next."""
    step = max(1, (1 << (value - 1).bit_length()) // (2 * steps))
    return -(-value // step) * step
