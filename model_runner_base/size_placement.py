"""Which sizes to capture: those that expected traffic gains most from, until little enough of its work is padding.

A grid fine enough to waste little everywhere would need hundreds of graphs, and the steps of a server visit a small
part of it. So steps are drawn at random as traffic makes them, and sizes are taken one by one, each the one that saves
most of the padding that is left. Always among them are the largest sizes, so that whatever the limits allow has a
size, and a few for a lone request: it is little work in a server's day, but all there is to its user.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from model_runner_base.graph_policy import GraphSize, StepLimits, geometric, step_cost

PROMPT, OUTPUT = (100, 1.0), (225, 0.9)
"""Median and spread of log-normal token counts: means of 160 and 340, as the vLLM paper gives for ShareGPT."""
OTHER_TRAFFIC = 0.2
"""Share of the batches whose requests have any other length, a short one as likely as a long one."""
NUM_BATCHES = 1000
SMALLEST_MIXED = 32
"""Tokens; what is smaller costs hardly less."""


@dataclass(frozen=True)
class ExpectedSteps:
    sizes: np.ndarray
    """[N, 5] what each step needs, as GraphSize has it."""
    frequency: np.ndarray
    """[N]"""


@lru_cache(maxsize=8)
def expect_steps(limits: StepLimits) -> ExpectedSteps:
    """Two steps of each of many batches, one that decodes and one that takes prompts in; the same for equal limits."""
    rng = np.random.default_rng(0)
    sizes, frequency = [], []
    for index in range(NUM_BATCHES):
        # Any load up to overload; every second batch any order of magnitude of load.
        load = 1.1 * rng.random() if index % 2 else limits.max_num_reqs ** (rng.random() - 1)
        num_reqs = min(limits.max_num_reqs, int(np.ceil(load * limits.max_num_reqs)))
        prompts, outputs = _draw_requests(limits, rng, 4 * num_reqs + 8)
        # Requests with long answers are met more often, and anywhere in their answer.
        running = rng.choice(len(outputs), num_reqs, p=outputs / outputs.sum())
        contexts = prompts + (rng.random(len(outputs)) * outputs).astype(int)
        kv_tiles = contexts[running] // limits.kv_tile + 1
        arrivals = num_reqs / outputs.mean()
        sizes.append(GraphSize(1, num_reqs, num_reqs, num_reqs, int(kv_tiles.sum()) + 1))
        frequency.append(max(0.0, 1 - arrivals))
        if limits.max_num_tokens > 1:
            sizes.append(_mixed_step(limits, kv_tiles, prompts[: 1 + rng.poisson(arrivals)].tolist(), rng))
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


def _mixed_step(limits: StepLimits, kv_tiles: np.ndarray, prompts: list[int], rng: np.random.Generator) -> GraphSize:
    """A step in which ``prompts``, or the chunks of them that fit, take the place of as many decodes."""
    num_reqs = min(max(0, len(kv_tiles) - len(prompts)), limits.max_num_tokens - 2)
    num_tokens = num_tiles = num_reqs
    num_pairs = int(kv_tiles[:num_reqs].sum())
    for prompt in prompts[: limits.max_num_reqs - num_reqs]:
        chunk = min(prompt, limits.max_num_tokens - num_tokens)
        if chunk == 0:
            break
        num_computed = int(rng.integers(0, prompt - chunk + 1))
        tile_ends = num_computed + np.arange(0, chunk, limits.query_tile) + limits.query_tile - 1
        num_pairs += int((np.minimum(tile_ends, num_computed + chunk - 1) // limits.kv_tile + 1).sum())
        num_reqs, num_tokens, num_tiles = num_reqs + 1, num_tokens + chunk, num_tiles + len(tile_ends)
    return GraphSize(limits.query_tile, num_tokens, num_reqs, num_tiles, num_pairs + 1)


@lru_cache(maxsize=8)
def place_sizes(limits: StepLimits, max_padding: float) -> tuple[GraphSize, ...]:
    """Sizes with at most ``max_padding`` of the expected work spent on padding; few, since greedily found."""
    steps = expect_steps(limits)
    needs, frequency = steps.sizes, steps.frequency
    candidates = np.unique([_candidate(limits, GraphSize(*need)) for need in needs.tolist()], axis=0)
    holds = (candidates[:, None] >= needs).all(axis=2) & (candidates[:, None, 0] == needs[:, 0])
    cost = step_cost(candidates)[:, None]
    lone = [GraphSize(1, 1, 1, 1, num_pairs + 1) for num_pairs in geometric(1, limits.max_kv_tiles, factor=4)]
    sizes = [*limits.largest_sizes, *lone]
    largest_decode, largest_mixed = step_cost(np.array(limits.largest_sizes))
    paid = np.where(needs[:, 0] == 1, largest_decode, largest_mixed)
    work = frequency @ step_cost(needs)
    while frequency @ paid * (1 - max_padding) > work:
        saved = np.where(holds, np.maximum(paid - cost, 0), 0) @ frequency
        best = int(saved.argmax())
        if saved[best] == 0:
            break
        sizes.append(GraphSize(*candidates[best].tolist()))
        paid = np.where(holds[best], np.minimum(paid, cost[best]), paid)
    return tuple(sizes)


def _candidate(limits: StepLimits, need: GraphSize) -> GraphSize:
    """A size for a step, rounded up so that steps nearby share it; rows by powers of two: each has its samplers."""
    query_tile, num_tokens, num_reqs, num_tiles, num_pairs = need
    num_reqs = min(_round_up(num_reqs, 1), limits.max_num_reqs)
    if query_tile == 1:
        num_tokens = num_tiles = min(_round_up(num_tokens, 4), limits.max_num_reqs)
    else:
        num_tokens = min(_round_up(max(num_tokens, SMALLEST_MIXED), 4), limits.max_num_tokens)
        num_tiles = num_tokens // query_tile + num_reqs
    num_pairs = min(_round_up(num_pairs - 1, 8), num_tiles * limits.max_kv_tiles)
    return GraphSize(query_tile, num_tokens, num_reqs, num_tiles, num_pairs + 1)


def _round_up(value: int, steps: int) -> int:
    """``value`` or the next larger of ``steps`` evenly spaced numbers from a power of two to the next."""
    step = max(1, (1 << (value - 1).bit_length()) // (2 * steps))
    return -(-value // step) * step
