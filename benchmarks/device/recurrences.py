"""How the time of a prompt grows with its length in recurrent layers, by the number of tokens in a tile.

One layer of each kind in plain torch, with a fourth of the heads or channels of a released model (Falcon-Mamba 7B,
Mamba 2 2.7B, Qwen3-Next, Kimi-Linear), one prompt in one step: milliseconds, the fastest, by turns.
``exponent`` is the slope of log time over log length.

    python -m benchmarks.device.recurrences [--plot docs/plots/recurrences.svg]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import linregress

from benchmarks.harness.report import make_parser, progress, show, take_turns
from model_runner_base.models.recurrent.layers import RECURRENCES
from model_runner_base.models.recurrent.step import TileSteps
from model_runner_base.step.call import TILE_POSITIONS, TILE_SLOTS, TILE_STARTS, ChunkTiles
from model_runner_base.step.token_layout import fill_tiles

LENGTHS, QUICK = (128, 256, 512, 1024), (64, 128)
TILES = (4, 16, 64, 128)


@dataclass(frozen=True)
class Kind:
    """Shapes of one token's inputs, of the parameters and of the state."""

    inputs: tuple[tuple[int, ...], ...]
    state: tuple[int, ...]
    params: tuple[tuple[int, ...], ...] = ()


KINDS = {
    "mamba1": Kind(((2048,), (2048,), (16,), (16,)), (2048, 16), ((2048, 16),)),
    "mamba2": Kind(((20, 64), (20,), (1, 128), (1, 128)), (20, 64, 128), ((20,),)),
    "gated delta rule": Kind(((8, 128), (8, 128), (8, 128), (8,), (8,)), (8, 128, 128)),
    "channel delta rule": Kind(((8, 128), (8, 128), (8, 128), (8, 128), (8,)), (8, 128, 128)),
}


def steps_of(length: int, tile: int) -> TileSteps:
    """Tiles of one prompt, whose state is at index 1."""
    count = -(-length // tile)
    arrays = {
        TILE_STARTS: np.zeros(count + 1, np.int32),
        TILE_POSITIONS: np.zeros(count, np.int32),
        TILE_SLOTS: np.zeros(length, np.int32),
    }
    fill_tiles(tile, np.array([length]), np.zeros(1, np.int64), *arrays.values())
    tiles = ChunkTiles.of({name: torch.from_numpy(each) for name, each in arrays.items()}, tile)
    states = torch.ones(count, dtype=torch.int32)
    return TileSteps.of(tiles, states, states)


def prompt(name: str, length: int, tile: int) -> Callable[[], object]:
    kind, steps = KINDS[name], steps_of(length, tile)
    inputs = tuple(torch.rand(length, *shape) for shape in kind.inputs)
    if "delta" in name:
        v, q, k, log, beta = inputs
        inputs = v, q, torch.nn.functional.normalize(k, dim=-1), -log, beta
    params = tuple(-torch.rand(shape) for shape in kind.params)
    states = torch.zeros(2, *kind.state)
    return lambda: RECURRENCES[name].tiles(inputs, params, states, steps)


@torch.inference_mode()
def main() -> None:
    args = make_parser(__doc__, repeats=3, has_plot=True).parse_args()
    lengths, repeats = (QUICK, 1) if args.quick else (LENGTHS, args.repeats)
    curves: dict[str, dict[str, dict[int, float]]] = {name: {} for name in KINDS}
    for name, length in progress([(name, length) for name in KINDS for length in lengths], "prompts"):
        cases = {str(tile): prompt(name, length, tile) for tile in TILES}
        for tile, times in take_turns(cases, repeats).items():
            curves[name].setdefault(f"tiles of {tile}", {})[length] = min(times)
    rows = list[dict[str, Any]]()
    for name, lines in curves.items():
        for line, points in lines.items():
            exponent = linregress(np.log(list(points)), np.log(list(points.values()))).slope
            rows.append({"kind": name, "tiles": line, "exponent": float(exponent)})
            rows[-1] |= {f"{length}_ms": points[length] for length in lengths}
    show(rows, args.json)
    if args.plot:
        from benchmarks.harness.plots import draw_grid

        draw_grid(args.plot, {"milliseconds": {f"{name}: tokens": lines for name, lines in curves.items()}})


if __name__ == "__main__":
    main()
