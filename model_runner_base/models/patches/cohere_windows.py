"""Gives the local layers of Cohere 2 the window of their config, as transformers does.

Some releases of vLLM make it a token wider. Their source says that the models were trained so; transformers, and
earlier releases, have it as it is in the config.
"""

from typing import Any

from torch import nn

LAYERS = ("CohereAttention", "Cohere2MoeAttention")
"""Names of vLLM's classes, which not every release has."""


def correct_windows(model: nn.Module) -> None:
    """Narrows the windows that are wider than the config's."""
    module: Any
    for module in model.modules():
        if type(module).__name__ in LAYERS and module.sliding_window is not None:
            window = module.config.sliding_window
            module.sliding_window = module.attn.sliding_window = window
            # vLLM's own kernels count the tokens on each side.
            is_one_number = isinstance(module.attn.impl.sliding_window, int)
            module.attn.impl.sliding_window = window if is_one_number else (window - 1, 0)
