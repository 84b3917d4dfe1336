"""The vocabulary head's logits."""

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class NeuronLogitsProcessor(LogitsProcessor):
    """Soft cap and scale in float32, the sampler's dtype, and not in place. vLLM rounds after each in the model's own.

    The product itself is the head's (``weights.py``, ``quantization.py``).
    """

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
