"""vLLM's layers of MiniMax M3 in plain torch: their forwards are replaced on the instances, after loading.

A sparse layer writes keys and values, and an indexer's key of each token to a cache of its own. Its indexer chooses the
blocks that the layer's tokens see (attention/block_choice.py). All layers name one backend, so that all caches are in
one attention group. vLLM's norms, rotary positions and attention are kernels of a GPU here.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import set_default_torch_dtype

from model_runner_base.attention.block_choice import BlockChooser, BlockSparseBackend, BlockSparseImpl
from model_runner_base.attention.latent import LatentFormat
from model_runner_base.attention.metadata import PagedAttentionMetadata
from model_runner_base.attention.paged import PagedAttentionImpl
from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.models.checkpoint_record import CheckpointRecord, record_of
from model_runner_base.models.layers.indexer import IndexKeys
from model_runner_base.vllm_compat.probes.models import is_minimax_m3
from model_runner_base.vllm_compat.types.minimax_m3 import layer_classes


def use_plain_block_sparse(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Makes norms and attention of a loaded MiniMax M3 run in plain torch.

    Raises CheckpointError if a layer's indexer has no weights, and UnsupportedConfigError where other layers have an
    attention backend of their own.
    """
    if not is_minimax_m3(vllm_config.model_config.architecture):
        return
    classes = layer_classes()
    for module in model.modules():
        layer: Any = module
        if isinstance(module, classes.norm):
            layer.forward = MethodType(_norm, layer)
        elif isinstance(module, classes.dense):
            _check_backend(layer.attn)
            layer.forward = MethodType(_dense, layer)
            layer.attn.get_attn_backend = _backend
        elif isinstance(module, classes.sparse):
            _check_indexer(record_of(model), layer.layer_name)
            _prepare(layer, vllm_config.model_config)


def _check_backend(layer: Any) -> None:
    if type(layer.impl) is not PagedAttentionImpl:
        raise UnsupportedConfigError(
            f"MiniMax M3 is not supported with {type(layer.impl).__name__} yet: run attention as plain torch"
        )


def _check_indexer(record: CheckpointRecord | None, name: str) -> None:
    """Compares with what the model took: vLLM takes a layer's projections for loaded if it has some of them."""
    prefix = name.removesuffix(".attn")
    for projection in ("index_q_proj", "index_k_proj"):
        if record is not None and record.shapes and f"{prefix}.{projection}.weight" not in record.shapes:
            raise CheckpointError(
                f"{prefix}.{projection}.weight is missing, and sparse_attention_config says that the layer has an "
                "indexer: correct config.json, which has sparse layers if it does not say which, or save again"
            )


def _prepare(layer: Any, model_config: ModelConfig) -> None:
    """Makes a sparse layer and its indexer's cache layers of the base."""
    of_indexer, cache, dtype = layer.indexer.impl, layer.indexer.index_cache, model_config.dtype
    assert isinstance(dtype, torch.dtype)
    with set_default_torch_dtype(dtype):  # As while vLLM makes a model: the cache's numbers follow from it.
        layer.impl = BlockSparseImpl(layer.num_heads, layer.head_dim, layer.scaling, layer.num_kv_heads)
    layer.impl.chooser = BlockChooser(
        of_indexer.block_size,
        of_indexer.topk_blocks,
        of_indexer.init_blocks,
        of_indexer.local_blocks,
        model_config.max_model_len,
    )
    layer.kv_cache_torch_dtype = cache.dtype = dtype
    cache.impl = IndexKeys(LatentFormat(1, cache.head_dim))
    layer.get_attn_backend = cache.get_attn_backend = _backend
    layer.forward = MethodType(_sparse, layer)


def _backend() -> type[BlockSparseBackend]:
    return BlockSparseBackend


def _norm(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """RMS norm times 1 + weight, after ``residual`` was added; returns the sum, too, where there is one."""
    if residual is not None:
        x = residual = x + residual
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight.float())
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), residual)


def _dense(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Output of a layer whose tokens see all keys, [T, hidden]."""
    query, key, value = self.qkv_proj(hidden_states)[0].split([self.q_size, self.kv_size, self.kv_size], dim=1)
    query, key = _placed(self, positions, query, key, self.q_norm, self.k_norm)
    return self.o_proj(self.attn(query, key, value))[0]


def _sparse(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Output of a layer whose tokens see the blocks that its indexer chooses, [T, hidden]."""
    metadata: Any = get_forward_context().attn_metadata
    if metadata is None:
        return torch.zeros_like(hidden_states)
    sizes = [self.q_size, self.kv_size, self.kv_size, self.index_q_size, self.idx_head_dim]
    query, key, value, index_query, index_key = self.qkv_proj(hidden_states)[0].split(sizes, dim=1)
    query, key = _placed(self, positions, query, key, self.q_norm, self.k_norm)
    norms = self.index_q_norm, self.index_k_norm
    index_query, index_key = _placed(self, positions, index_query, index_key, *norms)

    step: PagedAttentionMetadata = metadata[self.layer_name]
    cache = self.indexer.index_cache
    index_keys = cache.impl.cache_format.view(cache.kv_cache, step.block_size)
    rows = index_key.view(-1, 1, self.idx_head_dim).to(index_keys.dtype)
    index_keys.index_put_((step.slot_blocks, step.slot_offsets), rows)
    index_query = index_query.view(-1, self.num_idx_heads, self.idx_head_dim)
    chosen = self.impl.chooser.choose(step, index_query, index_keys)
    return self.o_proj(self.impl.forward(self, query, key, value, self.kv_cache, chosen))[0]


def _placed(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, of_query: nn.Module, of_key: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normed by head, with their rotary positions."""
    query, key = (
        norm(x.reshape(len(x), -1, self.head_dim)).flatten(1) for norm, x in ((of_query, query), (of_key, key))
    )
    rotated: tuple[torch.Tensor, torch.Tensor] = self.rotary_emb(positions, query, key)
    return rotated
