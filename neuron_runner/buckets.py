"""Sizes that are compiled; they are the same for all compile backends."""

from collections.abc import Sequence
from itertools import product

from model_runner_base.caches.contiguous import contiguous_sizes
from model_runner_base.step.graph_policy import BucketPolicy
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize, geometric
from neuron_runner.config import NeuronConfig
from neuron_runner.sampling import sort_limits
from neuron_runner.size_placement import place_sizes, prompts_alone


class NeuronBuckets(BucketPolicy):
    """Two families of sizes: uniform decode, and mixed steps of prefill and decode; a third on a contiguous cache.

    The attention of a step costs what its (query tile, KV tile) pairs cost, so the context dimension is a number of
    pairs: short and long requests may be mixed freely under one mean. A family's sizes are placed where traffic is
    expected; a list that the user gives for one of its dimensions makes it a grid over that list.
    """

    def __init__(self, config: NeuronConfig, num_workers: int = 1) -> None:
        self.config = config
        self._compiles_in_background = config.warms_up_in_background(num_workers)
        self.sort_limits = sort_limits(config)

    def configure(self, limits: StepLimits) -> None:
        super().configure(limits)
        self._limits = limits
        requests = _given(self.config.num_seqs_buckets, 1, limits.max_num_reqs)
        contexts = _given(self.config.context_length_buckets, 128, limits.max_model_len)
        tokens = _given(self.config.num_batched_tokens_buckets, 128, limits.max_num_tokens)
        if not limits.decodes:
            decode = []
        elif requests or contexts:
            decode = self._decode_grid(limits, requests, contexts)
        else:
            decode = [size for size in self._placed(limits) if size.kind == StepKind.DECODE]
        if tokens:
            mixed = self._mixed_grid(limits, tokens, requests or geometric(1, limits.max_num_reqs))
        else:
            mixed = [size for size in self._placed(limits) if size.kind == StepKind.MIXED]
        self.set_sizes([*decode, *mixed, *contiguous_sizes(limits)])

    def first_sizes(self, sizes: Sequence[StepSize]) -> Sequence[StepSize]:
        if not self._compiles_in_background:
            return sizes
        few = self.few_users_sizes() if self.is_slow or self.compiles_in_pauses else ()
        first = {*self.largest_sizes(sizes), *few}
        return [size for size in sizes if size in first]

    def few_users_sizes(self) -> list[StepSize]:
        """Sizes of a lone request's decode, of that of a few requests, and of a short prompt."""
        limits = self._limits
        tiles, few = limits.max_kv_tiles, min(8, limits.max_num_reqs)
        num_tokens = max(1, min(100, limits.max_chunk_tokens - limits.decode.query))
        needs = [limits.mixed_size(0, 0, num_tokens, 1, min(2, limits.max_chunk_kv_tiles))]
        if limits.decodes:
            needs += [limits.decode_size(1, min(16, tiles)), limits.decode_size(few, min(32, few * tiles))]
        return [self.dispatch(need) for need in needs if any(size.holds(need) for size in self.sizes)]

    def _placed(self, limits: StepLimits) -> tuple[StepSize, ...]:
        return place_sizes(limits, self.config.max_padding)

    def _decode_grid(
        self, limits: StepLimits, requests: list[int] | None, contexts: list[int] | None
    ) -> list[StepSize]:
        """Requests x mean context; a list that is not given grows twofold, contexts from 256 on."""
        requests = requests or geometric(1, limits.max_num_reqs)
        contexts = contexts or [limits.decode.keys, *geometric(256, limits.max_model_len)]
        tiles = sorted({-(-context // limits.decode.keys) for context in contexts})
        return [limits.decode_size(n, n * kv_tiles) for n in requests for kv_tiles in tiles]

    def _mixed_grid(self, limits: StepLimits, tokens: list[int], requests: list[int]) -> list[StepSize]:
        """Chunk tokens x decode rows x pairs; and sizes of chunks alone, unless they save next to nothing.

        Decode rows are as many as requests, or an eighth of that, at least eight. Pairs are the most that the limits
        allow, a quarter of that, and so on down to some two for each full tile. If no request decodes, there are no
        decode rows, and pairs go by halves: attention is then all that differs between two sizes of as many tokens.
        """
        sizes, most_rows = [], limits.max_num_reqs
        few_rows = min(most_rows, max(8, most_rows // 8))
        decode_rows, bits = ({most_rows, few_rows}, 2) if limits.decodes else ({0}, 1)
        for num_tokens in tokens:
            num_chunks = min(num_tokens, most_rows)
            num_tiles = limits.num_tiles(num_tokens, num_chunks)
            most_pairs, fewest = num_tiles * limits.max_chunk_kv_tiles, max(8, 2 * num_tokens // limits.chunk.query)
            num_shares = max(1, (most_pairs // fewest).bit_length() // bits)
            shares = [1 << (bits * power) for power in range(num_shares)]
            for num_rows, share in product(decode_rows, shares):
                decode_pairs, chunk_pairs = max(num_rows, num_rows * limits.max_kv_tiles // share), most_pairs // share
                tiles = min(num_tiles, chunk_pairs)  # Each has a pair at least.
                sizes.append(limits.mixed_size(num_rows, decode_pairs, num_tokens, num_chunks, chunk_pairs, tiles))
            if len(shares) > 1:
                sizes.append(prompts_alone(limits, num_tokens, requests))
        return sizes


def _given(buckets: list[int] | str | None, start: int, limit: int) -> list[int] | None:
    """The user's list; powers of two are spelled out from ``start`` to ``limit``. None if there is no list."""
    return geometric(start, limit) if isinstance(buckets, str) else buckets
