"""Bytes that a step sends between devices, by model and by kind of parallelism: arithmetic, not a measurement.

Formulas are those of docs/parallelism.md: a decoder's tensor-parallel step has two sums a layer and one for the
embedding, and a ring sends ``2 (N - 1) / N`` times a tensor's bytes for a sum over N ranks. A pipeline stage sends
hidden states and residuals once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

BYTES = 2
"""Bytes of a number: bfloat16."""
NUM_RANKS = 8
STEPS = {"64 decodes": 64, "a prompt of 2,048": 2048}
LINKS = {"100 Gb/s": 12.5e9, "NeuronLink-v4": 2.56e12}
"""Bytes a second. NeuronLink-v4's are a device's in AWS's page on the architecture of Trainium3."""


@dataclass(frozen=True)
class Model:
    """Sizes in a model's published ``config.json``."""

    num_layers: int
    hidden_size: int
    cache_width: int
    """Numbers that a layer keeps of a token: keys and values of all KV heads, or a latent."""

    def summed(self, num_tokens: int) -> float:
        ring = 2 * (NUM_RANKS - 1) / NUM_RANKS
        return (2 * self.num_layers + 1) * ring * num_tokens * self.hidden_size * BYTES

    def handed_on(self, num_tokens: int) -> float:
        return 2 * num_tokens * self.hidden_size * BYTES

    def cached(self, num_tokens: int) -> float:
        return num_tokens * self.num_layers * self.cache_width * BYTES


MODELS = {
    "Qwen3-0.6B": Model(28, 1024, 2 * 8 * 128),
    "Llama-3.1-8B": Model(32, 4096, 2 * 8 * 128),
    "Llama-3.3-70B": Model(80, 8192, 2 * 8 * 128),
    "Qwen3-235B-A22B": Model(94, 4096, 2 * 4 * 128),
    "DeepSeek-V3": Model(61, 7168, 512 + 64),
}


def rows() -> Iterator[tuple[str, ...]]:
    """Cells of the table: model, step, kind, bytes, and a time by link."""
    for name, model in MODELS.items():
        for step, num_tokens in STEPS.items():
            kinds = {
                f"{NUM_RANKS} tensor-parallel ranks, experts cut or whole": model.summed(num_tokens),
                "a pipeline stage": model.handed_on(num_tokens),
            }
            if num_tokens == max(STEPS.values()):
                kinds["cache blocks to another engine"] = model.cached(num_tokens)
            for kind, sent in kinds.items():
                times = [_in_units(sent / rate * 1e9, ("ns", "µs", "ms", "s")) for rate in LINKS.values()]
                yield name, step, kind, _in_units(sent, ("B", "kB", "MB", "GB")), *times


def _in_units(value: float, units: tuple[str, ...]) -> str:
    """The value in the largest of the units, each a thousand of the one before, in which it is at least one."""
    index = 0
    while value >= 1000 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    return f"{value:.2g} {units[index]}" if value < 100 else f"{value:.0f} {units[index]}"
