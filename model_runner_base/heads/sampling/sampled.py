"""Results of sampling that are still on the device; the engine reads them later."""

from dataclasses import dataclass, field

import torch

from model_runner_base.heads.sampling.logprobs import DeviceLogprobs
from model_runner_base.heads.sampling.params import SamplingMode
from model_runner_base.heads.sampling.prompt_logprobs import PromptChunk
from model_runner_base.step.call import StepResults


@dataclass
class SampledStep(StepResults):
    """Results of sampling on the device, for S padded rows of logits."""

    tokens: torch.Tensor
    """[S] int32; -1 for tokens sampled after a wrong draft, NO_TOKEN where no rule allows any token."""
    logprobs: DeviceLogprobs | None = None
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    num_nans: torch.Tensor | None = None
    """[S] int32 NaNs in each row of logits, if they are counted."""
    mode: SamplingMode = SamplingMode.GREEDY
    """Mode that the tokens were drawn in."""
