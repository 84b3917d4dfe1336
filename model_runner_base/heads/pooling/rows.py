"""The rows of a step's hidden states that pooling of one token reads: the last token of each request, or the first."""

import numpy as np

from model_runner_base.step.batch import InputBatch
from model_runner_base.step.components import StepComponent
from model_runner_base.step.packing import Section, pad_into
from model_runner_base.step.sizes import StepSize

POOLED_ROWS = "pooled_rows"


class PooledRows(StepComponent):
    """Packs the index of each request's last token in the step, or of its first token (``is_first``).

    Example: "a" has 3 tokens of its prompt, "b" 2, after one row of padding: the last ones are 3 and 5.
    """

    prompts_in_chunks = True
    """True: a pooling model has tokens of prompts only, so a step has no decode rows, and only mixed sizes run."""

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def sections(self, size: StepSize) -> list[Section]:
        return [Section(POOLED_ROWS, (size.num_logits,))]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        rows = batch.query_start if self._is_first else batch.query_start + batch.query_len - 1
        pad_into(views[POOLED_ROWS], rows, 0)
