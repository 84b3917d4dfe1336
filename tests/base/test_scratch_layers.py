"""vLLM's layers that see each request whole: their groups and caches, and schedules that they refuse."""

from typing import Any

import numpy as np
import pytest
import torch
from bare_step import BareStep
from scratch_step import HEAD_SIZE, MAX_LENGTH, batch_of, dense_attention
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention
from vllm.v1.attention.backend import AttentionBackend

from model_runner_base.attention.plan import KeyRange
from model_runner_base.caches.allocation import allocate, bind_kv_caches
from model_runner_base.caches.attention_groups import attention_groups
from model_runner_base.caches.factory import collect_specs, make_caches
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.caches.scratch import ScratchCaches
from model_runner_base.caches.spans import NO_SPANS
from model_runner_base.caches.step_limits import step_limits
from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.vllm_compat.types.kv_cache import CacheLayout, GroupLayout, TensorLayout, layer_caches


@pytest.fixture
def config(tiny_model: Any) -> VllmConfig:
    """Config of a model that pools whole prompts; layers add themselves."""
    config = EngineArgs(
        str(tiny_model("llama").path),
        dtype="float32",
        block_size=16,
        max_num_seqs=4,
        max_model_len=MAX_LENGTH,
        max_num_batched_tokens=MAX_LENGTH,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    ).create_engine_config()
    config.model_config.runner_type = "pooling"  # admission/limits.py lets no engine by so far.
    return config


def make_layers(config: VllmConfig, **windows: int | None) -> dict[str, Any]:
    """Encoder-only layers by name, with their windows; the one that is named "causal" is a decoder's."""
    with set_current_vllm_config(config):
        return {
            name: (Attention if name == "causal" else EncoderOnlyAttention)(
                *(4, HEAD_SIZE, HEAD_SIZE**-0.5),
                num_kv_heads=2,
                cache_config=config.cache_config,
                per_layer_sliding_window=window,
                prefix=name,
            )
            for name, window in windows.items()
        }


def layout_of(config: VllmConfig, num_blocks: int) -> CacheLayout:
    """Cache layout as the scheduler has it: it knows of the layers that keep a cache."""
    kept = layer_caches(collect_specs(config))
    groups = [GroupLayout(kept, config.cache_config.block_size)] if kept else []
    return CacheLayout(num_blocks, groups, [TensorLayout(num_blocks, [name]) for name in kept])


@pytest.mark.parametrize("others", [{}, {"causal": None}], ids=["alone", "beside a cache"])
def test_layers_of_vllm_share_a_scratch_cache(others: dict[str, None], config: VllmConfig) -> None:
    layers = make_layers(config, first=None, local=17, last=None, **others)
    layout, device_ops = layout_of(config, 60), DeviceOps(torch.device("cpu"))
    tables, groups = attention_groups(layout, config, 4, MAX_LENGTH, (64, 128))
    assert len(tables) == len(others), "the scheduler has no blocks for these layers"
    names = [[*others], ["first", "last"], ["local"]]
    assert [group.layer_names for group in groups] == [group for group in names if group]
    assert [group.reads_lines for group in groups] == [True] * len(others) + [False, False]
    limits = step_limits(config, MAX_LENGTH, 64, 64, 128, 0)
    kinds = make_caches(groups, limits, NO_SPANS, config, device_ops)
    assert [type(kind) for kind in kinds] == [ScratchCaches, *([PagedCaches] if others else [])]

    caches, index_of = allocate(layout, config, device_ops, 64)
    assert index_of == dict.fromkeys(others, (0,)) | dict.fromkeys(("first", "local", "last"), (len(others),))
    assert caches[-1].shape == (13 + 4 + 1, 16, 4, HEAD_SIZE) and caches[-1].dtype == torch.float32
    bind_kv_caches(caches, index_of, config)

    bare, batch = BareStep(kinds, limits, 4, MAX_LENGTH), batch_of([1, 33, 90, 70], first_row=3)
    batch.rows %= 4
    bare.requests.num_known[:] = MAX_LENGTH
    for table in tables:
        for row in range(4):
            table.assign(row, list(range(1 + 14 * row, 15 + 14 * row)))
    (size,) = bare.layout.needs(batch)
    call = bare.run(batch, bare.send(batch, size))
    rng, context = np.random.default_rng(0), create_forward_context(call.metadata, config)
    for name, layer in layers.items():
        query, key, value = (
            rng.normal(size=(size.num_tokens, heads, HEAD_SIZE)).astype(np.float32) for heads in (4, 2, 2)
        )
        with override_forward_context(context):
            out = layer(*(torch.from_numpy(x).flatten(1) for x in (query, key, value)))
        key_range = KeyRange(window=17 if name == "local" else 0, is_whole=name != "causal")
        for start, length in zip(batch.query_start, batch.query_len, strict=True):
            tokens = slice(start, start + length)
            want = dense_attention(query[tokens], key[tokens], value[tokens], key_range)
            np.testing.assert_allclose(out[tokens].reshape(want.shape), want, atol=2e-5)


def test_models_without_such_layers_are_paged_as_ever(config: VllmConfig) -> None:
    make_layers(config, causal=None)
    layout, device_ops = layout_of(config, 60), DeviceOps(torch.device("cpu"))
    tables, groups = attention_groups(layout, config, 4, MAX_LENGTH, (64, 128))
    limits = step_limits(config, MAX_LENGTH, 64, 64, 128, 0)
    kinds = make_caches(groups, limits, NO_SPANS, config, device_ops)
    assert [type(kind) for kind in kinds] == [PagedCaches] and len(tables) == len(groups) == 1
    assert len(allocate(layout, config, device_ops, 64)[0]) == 1


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (("model_config", "runner_type", "generate"), "use a model that pools"),
        (("scheduler_config", "enable_chunked_prefill", True), "set enable_chunked_prefill=False"),
        (("cache_config", "enable_prefix_caching", True), "set enable_prefix_caching=False"),
    ],
)
def test_schedules_in_parts_are_refused_at_the_start(
    change: tuple[str, str, Any], advice: str, config: VllmConfig
) -> None:
    make_layers(config, first=None)
    section, field, value = change
    setattr(getattr(config, section), field, value)
    with pytest.raises(UnsupportedConfigError, match=f"layer first sees each request whole, in one step: {advice}"):
        attention_groups(layout_of(config, 1), config, 4, MAX_LENGTH, (64, 128))


def test_backends_with_kernels_of_their_own_are_refused(config: VllmConfig) -> None:
    (layer,) = make_layers(config, first=None).values()
    layer.attn_backend = type("Kernels", (AttentionBackend,), {})
    with pytest.raises(UnsupportedConfigError, match="use the base's own attention backend"):
        attention_groups(layout_of(config, 1), config, 4, MAX_LENGTH, (64, 128))
