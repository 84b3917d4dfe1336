"""A decode step that does next to nothing: how far ``benchmarks.host_step`` could go with a leaner runner.

A step that repeats the last compares the requests' ids, writes new blocks to the block table, moves positions on by
one, copies them to the device and makes the output, which is what every runner does in some form. There is no attention
plan, no forward context, no model call and no sampling. Other steps, and all that are checked, are our runner's.
"""

from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from benchmarks.fake_device import VOCAB_SIZE, FakeDeviceRunner
from model_runner_base.input_batch import InputBatch


@dataclass
class Repeated(AsyncModelRunnerOutput):
    """A step of R requests that is run over and over, and its output, always the same."""

    batch: InputBatch
    rows: list[int]
    positions: np.ndarray
    """[R] int32, on the host"""
    on_device: np.ndarray
    """[R] int32, their copy"""
    tokens: np.ndarray
    """[R, 1] int32"""

    @classmethod
    def of(cls, batch: InputBatch) -> "Repeated":
        positions = batch.num_computed.astype(np.int32)
        tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=(batch.num_reqs, 1), dtype=np.int32)
        return cls(batch, batch.rows.tolist(), positions, np.zeros_like(positions), tokens)

    def get_output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(self.batch.req_ids, self.batch.req_id_to_index, self.tokens.tolist())


class LeastRunner(FakeDeviceRunner):
    """Takes over once a step repeats the one before, for good: our runner's states no longer follow these requests."""

    _repeated: Repeated | None = None
    _is_repeat = False
    """Whether the running step is one that was taken over."""

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        cached, repeated = scheduler_output.scheduled_cached_reqs, self._repeated
        self._is_repeat = repeated is not None and cached.req_ids == repeated.batch.req_ids
        if repeated is None or not self._is_repeat:
            output = super().execute_model(scheduler_output, intermediate_tensors)
            is_checked = self.fake_device.is_live
            self._repeated = None if is_checked or self._steady is None else Repeated.of(self._steady.batch)
            return output
        assert not scheduler_output.scheduled_new_reqs and not cached.resumed_req_ids
        rows, block_ids = [], []
        for row, new in zip(repeated.rows, cached.new_block_ids, strict=True):
            if new is not None:
                rows.append(row)
                block_ids.append(new[0])
        if rows:
            self.block_tables[0].append(rows, block_ids)
        repeated.positions += 1
        np.copyto(repeated.on_device, repeated.positions)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._repeated is None or not self._is_repeat:
            return super().sample_tokens(grammar_output)
        return self._repeated if self.scheduler_config.async_scheduling else self._repeated.get_output()
