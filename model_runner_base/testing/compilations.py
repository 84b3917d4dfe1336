"""Compilations as torch and vLLM count them, whatever a device says of itself."""

from collections import Counter

from torch._dynamo.utils import counters, get_compilation_metrics
from vllm.compilation.counter import compilation_counter


def count_compilations() -> Counter[str]:
    """Counts so far in this process: of torch.compile, and of vLLM's own compilation and graphs."""
    own = {f"vLLM's {name}": value for name, value in vars(compilation_counter).items() if isinstance(value, int)}
    return Counter(
        {
            "functions that torch.compile looked at": counters["frames"]["total"],
            "graphs that torch.compile made": counters["stats"]["unique_graphs"],
            **own,
        }
    )


def last_compiled() -> str:
    """The function that torch.compile last compiled, and its place; empty if it has compiled none."""
    metrics = get_compilation_metrics()
    if not metrics:
        return ""
    last = metrics[-1]
    return f"{last.co_name} in {last.co_filename}:{last.co_firstlineno}"
