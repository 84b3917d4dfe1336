"""vLLM's classes of MiniMax M3, which only later releases have."""

from typing import Any, NamedTuple


class Classes(NamedTuple):
    """Classes of the layers whose forwards are kernels of a GPU."""

    norm: type[Any]
    dense: type[Any]
    """Attention to all keys."""
    sparse: type[Any]
    """Attention to the blocks that an indexer chooses."""


def layer_classes() -> Classes:
    """The classes; vLLM has imported their module already for a model that has them."""
    from vllm.models.minimax_m3.nvidia import model

    return Classes(model.MiniMAXGemmaRMSNorm, model.MiniMaxM3Attention, model.MiniMaxM3SparseAttention)
