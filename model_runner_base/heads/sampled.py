"""What sampling leaves on the device, and the engine is told of later."""

from dataclasses import dataclass, field

import torch

from model_runner_base.heads.prompt_logprobs import PromptChunk
from model_runner_base.heads.sampling.logprobs import DeviceLogprobs


@dataclass
class SampledStep:
    """What sampling left on the device: S padded rows of logits."""

    tokens: torch.Tensor
    """[S] int32, -1 for what was sampled behind a draft that was wrong, NO_TOKEN where no rule allows any."""
    logprobs: DeviceLogprobs | None = None
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    errors: dict[str, str | None] = field(default_factory=dict)
    """Requests that cannot go on, with the reason; None: no token is allowed."""
    num_nans: torch.Tensor | None = None
    """[S] int32 NaNs in each row of logits, if they are counted."""
