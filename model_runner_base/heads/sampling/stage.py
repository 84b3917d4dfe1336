"""A stage between the model's logits and the sampler: it applies one group of SamplingParams fields.

A batch passes only the stages that one of its requests asks for, so an unused feature costs nothing. The graph policy
wraps the functions that a stage runs on the device. They are warmed up for every number of rows, so using a stage
compiles nothing. A stage may read the tokens of earlier steps in an ``OutputHistory`` (``history.py``).
"""

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.step.call import Forward
from model_runner_base.step.request_states import RequestInfo


class LogitsStage:
    """Stage interface. A ``row`` is a request's row in ``RequestStates``."""

    def asked_by(self, params: SamplingParams) -> bool:
        """Whether a request needs this stage."""
        raise NotImplementedError

    def looks_back(self, params: SamplingParams) -> bool:
        """Whether the stage reads ``output_token_ids`` of a request that asked for it."""
        return False

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        """Called when a request that asks for the stage takes a row; ``token_ids`` are its prompt and output so far."""

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        """Applies the stage's rules to the logits [S, V] float32, and returns the result.

        ``asking``: indices in the batch, at least one, of the requests that ask for the stage and yield a token.
        ``InputBatch.logits_rows`` gives their rows of logits.
        """
        raise NotImplementedError

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        """Runs all functions of the stage on the device once, on padding rows."""
