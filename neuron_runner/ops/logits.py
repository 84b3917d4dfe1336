"""The vocabulary head's logits: gathered from all ranks, or left on each rank for the sampler to draw from."""

from contextlib import suppress
from typing import Any

import torch
from vllm.distributed import get_tp_group, tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from model_runner_base.heads.sampling.sampler import WHOLE, CutVocabulary, Vocabulary
from model_runner_base.models.draft_loading import ATTRIBUTE as DRAFT


class NeuronLogitsProcessor(LogitsProcessor):
    """Soft cap and scale in float32, the sampler's dtype, not in place. vLLM rounds to the model's dtype after each.

    The product itself is the head's (``weights.py``, ``quantization.py``).
    """

    gathers = True
    """Whether every rank gets all logits; else each keeps those of its own rows of the head, padding included."""

    def forward(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        logits = hidden_states if self.logits_as_input else self._get_logits(hidden_states, lm_head, embedding_bias)
        if logits is None:
            return None  # Tensor parallelism: another rank has them.
        logits = logits.float()
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.scale == 1.0 else logits * self.scale

    def _get_logits(
        self, hidden_states: torch.Tensor, lm_head: VocabParallelEmbedding, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self.gathers:
            return super()._get_logits(hidden_states, lm_head, embedding_bias)
        return lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)


@torch.no_grad()
def cut_vocabulary(model: Any) -> Vocabulary:
    """Has each rank of a loaded model keep its own part of the logits, for the sampler to draw from.

    Returns ``WHOLE`` where every rank has all logits: with one rank, or if the model treats its logits otherwise than
    element by element. A trial with one row, on the host, tells.
    """
    group = get_tp_group()
    own = [module for name, module in model.named_modules() if not name.startswith(f"{DRAFT}.")]  # Drafters gather.
    processors = [module for module in own if isinstance(module, NeuronLogitsProcessor)]
    heads: list[Any] = [module for module in own if isinstance(module, VocabParallelEmbedding)]
    if group.world_size == 1 or len(processors) != 1 or not heads:
        return WHOLE
    (processor,), head = processors, heads[-1]
    row = torch.linspace(-1, 1, head.embedding_dim, dtype=head.weight.dtype).view(1, -1)
    gathered = model.compute_logits(row)
    processor.gathers = False
    with suppress(IndexError, RuntimeError):  # Raised if the model reads tokens that a part of the row does not have.
        part = model.compute_logits(row)
        width = part.shape[-1]
        start, size = group.rank_in_group * width, gathered.shape[-1]
        vocabulary = CutVocabulary(start, width, group.world_size, size, tensor_model_parallel_all_gather)
        if vocabulary.whole(part).allclose(gathered, equal_nan=True):
            return vocabulary
    processor.gathers = True
    return WHOLE
