"""The numbers of the worked example in docs/architecture.md are those that the components write."""

import re
from pathlib import Path

import torch
from vllm.sampling_params import SamplingParams

from model_runner_base import DeviceOps, StepLimits
from model_runner_base.caches.factory import make_layout
from model_runner_base.caches.group import AttentionGroup
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.inputs.tokens import TokenInputs
from model_runner_base.step.batch import BatchBuilder
from model_runner_base.step.components import StepComponents
from model_runner_base.step.packing import PackedStep
from model_runner_base.step.request_states import BlockTable, RequestInfo, RequestStates
from model_runner_base.step.schedule import Schedule
from model_runner_base.step.sizes import COMMON_DIMS, Tiling

TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def test_the_documented_buffer_is_what_is_packed() -> None:
    decode, chunk = Tiling(1, 64), Tiling(64, 128)
    limits = StepLimits(512, 8, 512, decode, chunk, (*COMMON_DIMS, *plan_dims(decode, chunk)))
    requests, table = RequestStates(8, 512), BlockTable(8, 512, block_size=32, blocks_per_tile=4)
    for name in ("0", "1", "2", "3"):
        requests.admit(name, RequestInfo(SamplingParams(), 0, [1]), [1], 0)
    for name, tokens, num_computed, blocks in (
        ("a", list(range(100)), 130, [11, 12, 13, 14, 15]),
        ("b", list(range(300, 400)), 0, [21, 22, 23, 24]),
    ):
        row = requests.admit(name, RequestInfo(SamplingParams(), 0, tokens), tokens, num_computed)
        table.assign(row, blocks)
    caches = PagedCaches([AttentionGroup(["layer"], table, 64, 128)], limits)
    layout = make_layout([caches], limits)
    # The scheduler's order is another: decode rows come first.
    schedule = Schedule(set(), (), [], ["a"], [None], {"b": 100, "a": 1}, 101)
    batch = BatchBuilder(requests, layout.order).build(schedule)
    (need,) = layout.needs(batch)
    size = limits.mixed_size(2, 4, 128, 2, 3, num_tiles=3)
    assert size.holds(need) and size.num_reqs == 4
    components = StepComponents([TokenInputs(requests), layout, caches])
    step = PackedStep(size, components.checked_sections(size), DeviceOps(torch.device("cpu")))
    batch.query_start[1:] += layout.chunk_start(size, 1) - 1
    components.fill(batch, size, step.views)

    listed = TEXT.partition("```text\ntoken_ids")[2].partition("```")[0]
    rows = re.findall(r"^(\w\S*) +((?:-?\d+ )*-?\d+)( \.\.\.)?(?: |$)", "token_ids" + listed, re.MULTILINE)
    assert [name for name, *_ in rows] == list(step.views)
    for name, numbers, is_cut in rows:
        packed, shown = step.views[name].reshape(-1).tolist(), list(map(int, numbers.split()))
        assert (packed[: len(shown)] if is_cut else packed) == shown, name
