"""Which sizes are compiled, and the compilation: the graph policy of openxla buckets."""

import os
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from itertools import product

import torch
from torch_xla import _XLAC

from model_runner_base.caches.lines import line_sizes
from model_runner_base.graph_policy import BucketPolicy, StepFunction, Wait
from model_runner_base.start.size_placement import place_sizes, prompts_alone
from model_runner_base.step.sizes import StepKind, StepLimits, StepSize, geometric
from neuron_runner.compilation import CompiledFunction
from neuron_runner.config import NeuronConfig
from neuron_runner.executable import Compiler
from neuron_runner.metrics import CompilationCount
from neuron_runner.sampling import sort_limits

CACHE_SIZE = "XLA_COMPILATION_CACHE_SIZE"
"""torch_xla's variable: how many graphs a process keeps, of all engines; 2048 if it is not set."""
GRAPHS_A_SIZE = 64
"""More than a size has with its samplers: some 7 where it was counted."""


class OpenXlaPolicy(BucketPolicy):
    """Two families of sizes: uniform decode, and mixed steps of prefill and decode; a third on a contiguous cache.

    The attention of a step costs what its (query tile, KV tile) pairs cost, so the context dimension is a number of
    pairs: short and long requests may be mixed freely under one mean. A family's sizes are placed where traffic is
    expected; a list that the user gives for one of its dimensions makes it a grid over that list.
    """

    num_at_a_time = max(1, Compiler.WIDTH // 2)
    """XLA's own threads take part: half as many compilations as cores leave steps more than half of their speed."""

    def __init__(self, config: NeuronConfig, num_workers: int = 1) -> None:
        self.config = config
        self._compiles_behind = config.warms_up_behind(num_workers)
        self.sort_limits = sort_limits(config)
        self._compiler = Compiler()

    def configure(self, limits: StepLimits) -> None:
        super().configure(limits)
        requests = _given(self.config.num_seqs_buckets, 1, limits.max_num_reqs)
        contexts = _given(self.config.context_length_buckets, 128, limits.max_model_len)
        tokens = _given(self.config.num_batched_tokens_buckets, 128, limits.max_num_tokens)
        if requests or contexts:
            decode = self._decode_grid(limits, requests, contexts)
        else:
            decode = [size for size in self._placed(limits) if size.kind == StepKind.DECODE]
        if tokens:
            mixed = self._mixed_grid(limits, tokens, requests or geometric(1, limits.max_num_reqs))
        else:
            mixed = [size for size in self._placed(limits) if size.kind == StepKind.MIXED]
        self.set_sizes([*decode, *mixed, *line_sizes(limits)])
        # torch_xla reads it when it compiles for the first time; a graph that its cache has dropped cannot be run.
        os.environ.setdefault(CACHE_SIZE, str(max(2048, GRAPHS_A_SIZE * len(self.sizes))))

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
        """Tokens of chunks x decode rows beside them x pairs; and chunks alone, unless that saves next to nothing.

        Of decode rows there may be as many as requests, or an eighth of that, eight at least; of pairs the most that
        the limits allow, and quarters of it down to some eight a tile.
        """
        sizes, most_rows = [], limits.max_num_reqs
        few_rows = min(most_rows, max(8, most_rows // 8))
        for num_tokens in tokens:
            num_chunks = min(num_tokens, most_rows)
            num_tiles = limits.num_tiles(num_tokens, num_chunks)
            most_pairs, fewest = num_tiles * limits.max_chunk_kv_tiles, max(8, 2 * num_tokens // limits.chunk.query)
            shares = [4**quarter for quarter in range(max(1, (most_pairs // fewest).bit_length() // 2))]
            for rows, share in product({most_rows, few_rows}, shares):
                decode_pairs, chunk_pairs = max(rows, rows * limits.max_kv_tiles // share), most_pairs // share
                tiles = min(num_tiles, chunk_pairs)  # Each has a pair at least.
                sizes.append(limits.mixed_size(rows, decode_pairs, num_tokens, num_chunks, chunk_pairs, tiles))
            if len(shares) > 1:
                sizes.append(prompts_alone(limits, num_tokens, requests))
        return sizes

    def num_compilations(self) -> int:
        count = CompilationCount.now()
        return count.compilations + count.captures

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        return CompiledFunction(function, state, self._compiler)

    def make_ahead(self, runs: Sequence[Callable[[], None]]) -> Iterator[None]:
        """Traces all, which are compiled meanwhile, then runs all."""
        with self._compiler.ahead() as compilations:
            last_of_runs: deque[int] = deque()
            for run in runs:
                run()
                last_of_runs.append(len(compilations))
                while last_of_runs and all(compilation.done() for compilation in compilations[: last_of_runs[0]]):
                    last_of_runs.popleft()
                    yield
            for last in last_of_runs:
                for compilation in compilations[:last]:
                    compilation.result()
                yield
        made, kept = len(self._compiler.hashes), _XLAC._xla_get_num_cached_compilation_graph()
        if made > kept:
            raise RuntimeError(
                f"{made} graphs were compiled, and torch_xla keeps {kept}: set {CACHE_SIZE} above {made}, or give "
                "fewer sizes"
            )
        for run in runs:
            run()

    def first_sizes(self, sizes: Sequence[StepSize]) -> Sequence[StepSize]:
        if not self._compiles_behind:
            return sizes
        return self.largest_sizes(sizes)

    def compile_behind(self, run: Callable[[], None]) -> Wait:
        made, kept = len(self._compiler.hashes), int(os.environ[CACHE_SIZE])
        if made + GRAPHS_A_SIZE > kept:
            enough = GRAPHS_A_SIZE * len(self.sizes)
            raise RuntimeError(f"torch_xla keeps {kept} graphs: set {CACHE_SIZE} to {enough}, or leave it out")
        with self._compiler.behind() as compilations:
            run()

        def wait() -> None:
            for compilation in compilations:
                compilation.result()

        return wait


def _given(buckets: list[int] | str | None, start: int, limit: int) -> list[int] | None:
    """A list as the user means it: powers of two begin at ``start`` and end at the limit."""
    return geometric(start, limit) if isinstance(buckets, str) else buckets
