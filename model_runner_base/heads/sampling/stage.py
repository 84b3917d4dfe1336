"""A stage between the model's logits and the sampler: one group of SamplingParams fields, in a room of its own.

A batch passes only the stages that one of its requests asks for, so a feature that nobody uses costs nothing. What a
stage runs on the device is wrapped by the graph policy and warmed up for every number of rows, so that turning it on
compiles nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

from model_runner_base.requests.states import RequestInfo
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.packing import PackedStep


@dataclass
class SampleInputs:
    """What a step's forward leaves for sampling: S padded rows of logits, T padded tokens."""

    batch: InputBatch
    step: PackedStep
    """As the forward left it."""
    logits: torch.Tensor
    """[S, V] float32, or this rank's part of the rows if the vocabulary is cut"""
    sample_slots: torch.Tensor
    """[2, S] or [3, S] int32, as ``ModelCall.sample_slots`` has them."""
    hidden_states: torch.Tensor
    """[T, hidden]"""
    kept: tuple[torch.Tensor, ...] = ()
    """What drafting needs beside."""
    grammar_masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    """What a grammar allows, by row of logits: bitmasks as ``token_masks.py`` has them."""


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

    def apply(self, inputs: SampleInputs, asking: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        """The logits [S, V] float32 with the stage's rules applied.

        ``asking``: indices in the batch, at least one, of the requests that asked for the stage and yield a token; what
        rows of logits they have the batch says.
        """
        raise NotImplementedError

    def warm_up(self, logits: torch.Tensor, sample_slots: torch.Tensor) -> None:
        """Runs everything the stage has on the device once, on rows of padding."""
