"""A stage between the model's logits and the sampler: one group of SamplingParams fields.

A batch passes only the stages that one of its requests asks for, so a feature that nobody uses costs nothing. What a
stage runs on the device is wrapped by the graph policy and warmed up for every number of rows, so that turning it on
compiles nothing.
"""

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.heads.head import Forward
from model_runner_base.requests.states import RequestInfo


class LogitsStage:
    """Rows are those of the request states."""

    def asked_by(self, params: SamplingParams) -> bool:
        """Whether a request needs this stage."""
        raise NotImplementedError

    def looks_back(self, params: SamplingParams) -> bool:
        """Whether the stage reads ``output_token_ids`` of a request that asked for it."""
        return False

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        """A request that asked for the stage took a row; ``token_ids`` are its prompt and its output so far."""

    def apply(self, forward: Forward, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        """The logits [S, V] float32 with the stage's rules applied.

        ``asking``: indices in the batch, at least one, of the requests that asked for the stage and yield a token; what
        rows of logits they have the batch says.
        """
        raise NotImplementedError

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        """Runs everything the stage has on the device once, on rows of padding."""
