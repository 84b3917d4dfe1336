"""Graph policy of openxla: when and how sizes are compiled."""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence

import torch
from torch_xla import _XLAC

from model_runner_base.step.graph_policy import StepFunction, Wait
from model_runner_base.step.sizes import StepLimits, StepSize
from neuron_runner.buckets import NeuronBuckets
from neuron_runner.compilation import CompiledFunction
from neuron_runner.config import NeuronConfig
from neuron_runner.executable import Compiler
from neuron_runner.metrics import CompilationCount

CACHE_SIZE = "XLA_COMPILATION_CACHE_SIZE"
"""torch_xla's variable: how many graphs a process keeps, of all engines; 2048 if it is not set."""
GRAPHS_A_SIZE = 64
"""Upper bound of a size's graphs, its samplers included; some 7 were counted."""


class OpenXlaPolicy(NeuronBuckets):
    """Makes each size a graph of openxla, compiled before the steps are served or while they are."""

    replaces_state = True
    num_at_a_time = max(1, Compiler.WIDTH // 2)
    """Half of the usual number, since XLA's own threads take part: steps keep more than half of their speed."""

    def __init__(self, config: NeuronConfig, num_workers: int = 1) -> None:
        super().__init__(config, num_workers)
        self._compiler = Compiler()

    def configure(self, limits: StepLimits) -> None:
        super().configure(limits)
        # torch_xla reads it when it compiles for the first time; a graph that its cache has dropped cannot be run.
        os.environ.setdefault(CACHE_SIZE, str(max(2048, GRAPHS_A_SIZE * len(self.sizes))))

    def num_compilations(self) -> int:
        count = CompilationCount.now()
        return count.compilations + count.captures

    def wrap(self, function: StepFunction, state: MutableSequence[torch.Tensor]) -> StepFunction:
        return CompiledFunction(function, state, self._compiler, self._has_several)

    def _has_several(self, sizes: Sequence[StepSize]) -> bool:
        """Whether steps of these kinds, or of any kind where a function is given no size, run at several sizes."""
        counts = Counter(size.kind for size in self.sizes)
        return any(counts[kind] > 1 for kind in [size.kind for size in sizes] or counts)

    def make_ahead(self, runs: Sequence[Callable[[], None]]) -> Iterator[None]:
        """Traces all runs, which compile meanwhile, then runs them; RuntimeError if torch_xla dropped a graph."""
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
        made, cached = self._compiler.num_graphs, _XLAC._xla_get_num_cached_compilation_graph()
        if made > cached:
            raise RuntimeError(
                f"{made} graphs were compiled, and torch_xla keeps {cached}: set {CACHE_SIZE} above {made}, or give "
                "fewer sizes"
            )
        for run in runs:
            run()

    def compile_in_background(self, run: Callable[[], None]) -> Wait:
        made, most = self._compiler.num_graphs, int(os.environ[CACHE_SIZE])
        if made + GRAPHS_A_SIZE > most:
            enough = GRAPHS_A_SIZE * len(self.sizes)
            raise RuntimeError(f"torch_xla keeps {most} graphs: set {CACHE_SIZE} to {enough}, or leave it out")
        with self._compiler.in_background() as compilations:
            run()

        def wait() -> None:
            for compilation in compilations:
                compilation.result()

        return wait
