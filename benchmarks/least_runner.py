"""What no runner can leave out of a step of repeated decode: a bound for the ratios of ``benchmarks.host_step``.

Checked steps, and steps of other kinds, are our runner's. A repeated decode step compares the requests' ids, writes new
blocks to the block table (in a plain loop, which is no slower here than our runner's way), moves every position on by
one, copies token sources, positions and sequence lengths to the device, and makes the output. There is no attention
plan, no forward context, no model call and no sampling.
"""

import numpy as np
import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from benchmarks.fake_device import VOCAB_SIZE, FakeDeviceRunner
from model_runner_base.input_batch import InputBatch


class LeastOutput(AsyncModelRunnerOutput):
    """Tokens [R] int32 that lie on the host already."""

    def __init__(self, batch: InputBatch, tokens: np.ndarray) -> None:
        self._batch = batch
        self._tokens = tokens

    def get_output(self) -> ModelRunnerOutput:
        tokens = self._tokens[:, None].tolist()
        return ModelRunnerOutput(self._batch.req_ids, self._batch.req_id_to_index, tokens)


class LeastRunner(FakeDeviceRunner):
    """Takes a step over once it repeats the one before."""

    _repeated: InputBatch | None = None
    """The step that is run over and over."""
    _repeats = False

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        cached, batch = scheduler_output.scheduled_cached_reqs, self._repeated
        self._repeats = batch is not None and cached.req_ids == batch.req_ids
        if not self._repeats:
            output = super().execute_model(scheduler_output, intermediate_tensors)
            self._repeated = None if self.fake_device.is_live or self._steady is None else self._steady.batch
            if self._repeated is not None:
                self._begin(self._repeated)
            return output
        table = self.block_tables[0]
        for row, block_ids in zip(self._rows, cached.new_block_ids, strict=True):
            if block_ids is not None:
                for block_id in block_ids[0]:
                    table.table[row, table.num_blocks[row]] = block_id
                    table.num_blocks[row] += 1
        self._on_host += 1
        np.copyto(self._on_device.numpy(), self._on_host)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if not self._repeats:
            return super().sample_tokens(grammar_output)
        assert self._repeated is not None
        output = LeastOutput(self._repeated, self._tokens)
        return output if self.scheduler_config.async_scheduling else output.get_output()

    def _begin(self, batch: InputBatch) -> None:
        self._rows = batch.rows.tolist()
        self._on_host = np.zeros(3 * batch.num_reqs, np.int32)
        self._on_device = torch.zeros(3 * batch.num_reqs, dtype=torch.int32)
        self._tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=batch.num_reqs, dtype=np.int32)
