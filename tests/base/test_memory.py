"""Memory measurement and sizing, on a device whose memory figures are scripted."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from vllm.config import KVTransferConfig
from vllm.platforms.interface import Platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from model_runner_base import (
    DeviceMemoryProfiler,
    DeviceOps,
    MemoryInfo,
    ModelRunnerWorker,
    StepLimits,
    estimate_step_memory,
)
from model_runner_base.caches.pair_shapes import asked_memory, attention_memory
from model_runner_base.caches.step_limits import plan_dims
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.inputs.adapters.adapters import NO_ADAPTERS
from model_runner_base.inputs.multimodal.encoder import NO_ENCODER
from model_runner_base.platform import PagedPlatform
from model_runner_base.step.sizes import COMMON_DIMS, StepKind, Tiling
from neuron_runner.device_ops import XlaDeviceOps


class ScriptedOps(DeviceOps):
    """A device of 1,000 bytes of which ``used`` are taken."""

    used = 0

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=1000 - self.used, total=1000)


def test_profiler_measures_what_stays_taken() -> None:
    ops = ScriptedOps(torch.device("cpu"))
    ops.used = 100
    with DeviceMemoryProfiler(ops) as profiler:
        ops.used += 300  # a model and its temporaries
        ops.used -= 50  # the temporaries
    assert profiler.consumed_memory == 250


def test_plain_host_reports_its_memory() -> None:
    info = DeviceOps(torch.device("cpu")).memory_info()
    assert 0 < info.free <= info.total


WITHOUT_LAYERS = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}), kv_transfer_config=None)
"""Config of a model whose layers keep no states."""


def runner_that_needs(step: int, ops: object, useful: float = float("inf")) -> SimpleNamespace:
    return SimpleNamespace(
        device_ops=ops,
        profile_run=lambda: step,
        useful_cache_memory=lambda: useful,
        adapters=NO_ADAPTERS,
        encoder=NO_ENCODER,
    )


@pytest.mark.parametrize(
    ("asked", "used", "step", "useful", "sharing", "expected"),
    [
        (None, 200, 100, float("inf"), 1, 600),  # 90 % of 1000, less 200 taken, less 100 for a step
        (None, 950, 100, float("inf"), 1, 0),
        (400, 200, 100, float("inf"), 1, 400),
        (300, 200, 100, float("inf"), 2, 300),
        (None, 200, 100, 500, 1, 500),
        (2000, 200, 100, 500, 1, 500),  # Asking for more than is free does no harm if less is of use.
    ],
)
def test_available_memory(asked: int | None, used: int, step: int, useful: float, sharing: int, expected: int) -> None:
    ops = ScriptedOps(torch.device("cpu"))
    ops.used = used
    worker = SimpleNamespace(
        model_runner=runner_that_needs(step, ops, useful),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=asked, gpu_memory_utilization=0.9),
        _memory_at_start=MemoryInfo(free=1000, total=1000),
        _allowed_memory=900,
        _num_sharing=lambda: sharing,
        _shares_host_memory=lambda: False,
        vllm_config=WITHOUT_LAYERS,
    )
    assert ModelRunnerWorker.determine_available_memory(worker) == expected  # type: ignore[arg-type]


class OtherPlatform(Platform):
    """Platform such as vLLM's own, which knows nothing of what the base asks of a PagedPlatform."""

    device_type = "cuda"


class HostPlatform(PagedPlatform):
    device_type = "cpu"


@pytest.mark.parametrize(("platform", "sharing"), [(OtherPlatform(), 1), (HostPlatform(), 2)])
def test_workers_share_the_hosts_memory_and_no_devices(
    platform: Platform, sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    worker = SimpleNamespace(num_local_workers=2, vllm_config=None)
    worker._shares_host_memory = lambda: ModelRunnerWorker._shares_host_memory(worker)  # type: ignore[arg-type]
    assert ModelRunnerWorker._num_sharing(worker) == sharing  # type: ignore[arg-type]


def test_device_without_a_report_needs_to_be_told() -> None:
    """A device without a report is refused before anything is loaded, unless a size is set, which is taken as it is."""
    ops = SimpleNamespace(memory_info=lambda: MemoryInfo(free=0, total=0))
    worker = SimpleNamespace(
        model_runner=runner_that_needs(700, ops),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9),
        _num_sharing=lambda: 1,
        _shares_host_memory=lambda: False,
        vllm_config=WITHOUT_LAYERS,
    )
    with pytest.raises(ValueError, match="does not report its memory: set kv_cache_memory_bytes"):
        ModelRunnerWorker.measure_at_start(worker)  # type: ignore[arg-type]
    worker.cache_config.kv_cache_memory_bytes = 400
    ModelRunnerWorker.measure_at_start(worker)  # type: ignore[arg-type]
    assert ModelRunnerWorker.determine_available_memory(worker) == 400  # type: ignore[arg-type]


@pytest.mark.parametrize(("used", "asked", "is_refused"), [(100, None, False), (101, None, True), (101, 400, False)])
def test_too_little_free_memory_is_an_error_before_anything_is_loaded(
    used: int, asked: int | None, is_refused: bool
) -> None:
    ops = ScriptedOps(torch.device("cpu"))
    ops.used = used
    worker: Any = SimpleNamespace(
        model_runner=SimpleNamespace(device_ops=ops),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=asked, gpu_memory_utilization=0.9),
        _shares_host_memory=lambda: False,
    )
    with pytest.raises(ValueError, match="lower it, or free the device") if is_refused else nullcontext():
        ModelRunnerWorker.measure_at_start(worker)


def test_runtimes_report_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is torch_xla's as its documentation shows it, in place of that of a Neuron device."""
    ops = XlaDeviceOps(torch_xla.device())
    monkeypatch.setattr(xm, "xla_device_hw", lambda device: "NEURON")
    # PJRT CPU, asked as if it were a device with memory of its own, reports none.
    assert ops.memory_info() == MemoryInfo(free=0, total=0)
    report = {"bytes_used": 290816, "bytes_limit": 34088157184, "peak_bytes_used": 500816}
    monkeypatch.setattr(xm, "get_memory_info", lambda device: report)
    assert ops.memory_info() == MemoryInfo(free=34088157184 - 290816, total=34088157184)

    def fail(device: torch.device) -> None:
        raise RuntimeError("INTERNAL: the runtime is gone")

    monkeypatch.setattr(xm, "get_memory_info", fail)
    with pytest.raises(RuntimeError, match="gone"):
        ops.memory_info()


@pytest.mark.parametrize(("step", "sharing"), [(700, 1), (200, 2)])
def test_asking_for_more_than_is_free_names_the_limits(step: int, sharing: int) -> None:
    ops = ScriptedOps(torch.device("cpu"))
    worker = SimpleNamespace(
        model_runner=runner_that_needs(step, ops),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=400, gpu_memory_utilization=0.9),
        _num_sharing=lambda: sharing,
        _shares_host_memory=lambda: sharing > 1,
        vllm_config=WITHOUT_LAYERS,
    )
    with pytest.raises(ValueError, match="lower kv_cache_memory_bytes, max_num_batched_tokens"):
        ModelRunnerWorker.determine_available_memory(worker)  # type: ignore[arg-type]


@pytest.mark.parametrize(("offloaded", "is_refused"), [(600, False), (602, True)])
def test_blocks_on_the_host_count_where_the_device_has_the_hosts_memory(offloaded: int, is_refused: bool) -> None:
    """Ranks share what is kept: each of two takes half, 300 of its 500 bytes, in addition to a cache of 100."""
    extra = {"cpu_bytes_to_use": offloaded}
    config: Any = SimpleNamespace(
        **vars(WITHOUT_LAYERS) | {"kv_transfer_config": KVTransferConfig("OffloadingConnector", kv_role="kv_both")},
        parallel_config=SimpleNamespace(world_size=2),
    )
    config.kv_transfer_config.kv_connector_extra_config = extra
    worker: Any = SimpleNamespace(
        model_runner=runner_that_needs(100, ScriptedOps(torch.device("cpu"))),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=100, gpu_memory_utilization=0.9),
        _num_sharing=lambda: 2,
        _shares_host_memory=lambda: True,
        vllm_config=config,
    )
    with pytest.raises(ValueError, match="lower kv_offloading_size, kv_cache") if is_refused else nullcontext():
        assert ModelRunnerWorker.determine_available_memory(worker) == 100
    worker._shares_host_memory = lambda: False
    assert ModelRunnerWorker.determine_available_memory(worker) == 100


DECODE, CHUNK = Tiling(1, 32), Tiling(16, 64)
LIMITS = StepLimits(512, 8, 1024, DECODE, CHUNK, (*COMMON_DIMS, *plan_dims(DECODE, CHUNK)))
HIDDEN, INNER, HEADS, VOCABULARY = 100, 300, 6, 1000


def model_config(**text_config: int) -> Any:
    return SimpleNamespace(
        architecture="LlamaForCausalLM",
        get_hidden_size=lambda: HIDDEN,
        get_vocab_size=lambda: VOCABULARY,
        get_num_experts=lambda: text_config.get("num_experts", 0),
        enable_prompt_embeds=False,
        dtype=torch.bfloat16,
        head_dtype=torch.bfloat16,
        model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS),
        hf_text_config=SimpleNamespace(**{"intermediate_size": INNER, **text_config}),
    )


def attention(
    tiling: Tiling, num_pairs: int, num_kv_heads: int, head_size: int, num_tiles: int, kernel: bool = False
) -> int:
    """Numbers that one layer's pairs take, array by array, and the results of ``num_tiles`` query tiles."""
    total = 0
    outputs = tiling.query * HEADS * head_size
    # Queries of rows are laid out for all KV heads at once, and so are their outputs.
    is_of_rows = tiling.keys == DECODE.keys
    laid_out = outputs * (num_kv_heads if is_of_rows else 1)
    for _ in range(num_pairs):
        keys_and_values = tiling.keys * 2 * num_kv_heads * head_size
        scores = tiling.query * HEADS * tiling.keys
        of_kernel = tiling.keys + (2 * outputs if is_of_rows else 4 * tiling.query)
        total += of_kernel if kernel else 2 * keys_and_values + 4 * scores + 3 * laid_out
        if is_of_rows and not kernel:  # Whether the pair is of each row, and the maxima of those that are.
            total += num_tiles * (1 + tiling.query * HEADS)
    if kernel:  # Queries' and outputs' places in the tiles.
        return total if is_of_rows else total + 2 * num_tiles * tiling.query * HEADS
    return total + 3 * num_tiles * outputs


def spec(num_kv_heads: int, head_size: int, window: int | None = None) -> KVCacheSpec:
    options: Any = {"block_size": 16, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": torch.float32}
    return SlidingWindowSpec(**options, sliding_window=window) if window else FullAttentionSpec(**options)


@pytest.mark.parametrize("gathers_cache", [True, False])
def test_step_memory_counts_the_pairs_of_rows_and_of_chunks(gathers_cache: bool) -> None:
    """Step memory is that of the layer that takes most, at the size that takes most. A pair of a chunk is larger
    than one of a row."""
    decode, mixed = LIMITS.decode_size(8, 40), LIMITS.mixed_size(4, 20, 100, 3, 12)
    specs = {"narrow": spec(2, 8), "wide": spec(3, 16), "window": spec(2, 8, 64)}
    tokens = {decode: 8, mixed: 4 + 100}
    logits = {decode: 8, mixed: 4 + 3}
    wanted = {}
    for size in (decode, mixed):
        dims = LIMITS.named(size)
        assert (size.num_tokens, size.num_logits) == (tokens[size], logits[size])
        layer = attention(DECODE, dims["decode_pairs"], 3, 16, dims["decode_rows"], not gathers_cache)
        layer += attention(CHUNK, dims["chunk_pairs"], 3, 16, dims["chunk_tiles"], not gathers_cache)
        layer += tokens[size] * (6 * HIDDEN + 2 * INNER) + logits[size] * VOCABULARY
        sampling = 4 * tokens[size] * HIDDEN + 10 * logits[size] * VOCABULARY
        wanted[size] = 4 * (max(layer, sampling) + (LIMITS.max_num_reqs + 1) * VOCABULARY)
        assert estimate_step_memory([size], LIMITS, specs, model_config(), gathers_cache) == wanted[size]
    both = estimate_step_memory([decode, mixed], LIMITS, specs, model_config(), gathers_cache)
    assert both == max(wanted.values()) and wanted[decode] != wanted[mixed]
    assert estimate_step_memory([], LIMITS, specs, model_config(), gathers_cache) == 0


def test_step_memory_counts_a_pass_that_drafts_in_parallel() -> None:
    """A pass that drafts in parallel takes more tokens of a row than verification does."""
    specs, size = {"layer": spec(2, 8)}, LIMITS.decode_size(8, 40)
    wider = replace(LIMITS, pass_tokens=DECODE.query + 3)
    counts = LIMITS.named(size)["decode_pairs"], 2, 8, 8
    row, passed = attention(DECODE, *counts), attention(DECODE._replace(query=DECODE.query + 3), *counts)
    more = [estimate_step_memory([size], limits, specs, model_config()) for limits in (LIMITS, wider)]
    assert more[1] - more[0] == 4 * (passed - row)


def test_attention_in_pieces_takes_no_more_at_larger_limits() -> None:
    """Contexts that are sixteen times as long take no more memory if attention holds a number of pairs at a time."""
    specs, in_pieces = {"layer": spec(2, 8)}, replace(LIMITS, decode_piece=10, chunk_piece=4)
    longer = replace(in_pieces, max_model_len=16 * LIMITS.max_model_len)
    few, many = (
        [estimate_step_memory([size], limits, specs, model_config()) for size in limits.largest_sizes]
        for limits in (in_pieces, longer)
    )
    assert few == many
    whole = [estimate_step_memory([size], LIMITS, specs, model_config()) for size in LIMITS.largest_sizes]
    assert few[0] < whole[0] / 2 and few[1] < whole[1] / 2
    # A piece's own pairs count as before.
    (size,) = [LIMITS.decode_size(2, 5)]
    assert estimate_step_memory([size], in_pieces, specs, model_config()) == estimate_step_memory(
        [size], LIMITS, specs, model_config()
    )


def test_a_kernel_of_chunks_keeps_nothing_for_each_pair_but_operands() -> None:
    """A prompt of 32,768 tokens beside 255 others in chunks of 8,192, with the heads of Llama-3.1-8B."""
    limits = replace(LIMITS, max_model_len=32768, max_num_reqs=256, max_num_tokens=8192)
    size = limits.mixed_size(0, 0, 8192, 8192 // CHUNK.query, 255 * 32768 // CHUNK.keys)
    memory = estimate_step_memory([size], limits, {"layer": spec(8, 128)}, model_config(), gathers_cache=False)
    assert memory < 2**30 * 3 // 4


@pytest.mark.parametrize("size", [0, -1, True, "1", float("inf"), float("nan")])
def test_attention_memory_that_is_no_size_is_refused(size: object) -> None:
    config: Any = SimpleNamespace(additional_config={"attention_memory_gib": size})
    with pytest.raises(UnsupportedConfigError, match=r"attention_memory_gib=.* give GiB above 0"):
        asked_memory(config)


@pytest.mark.parametrize(
    ("asked", "total", "is_on_host", "expected"),
    [
        (0.5, 1 << 40, False, (512, 512)),
        (0.5, 1 << 40, True, (512, 512)),
        (None, 1 << 40, False, (256, 256)),
        (None, 6 << 30, False, (96, 96)),
        (None, 0, False, (256, 256)),
        (None, 1 << 40, True, (12, 32)),
        (None, 1 << 30, True, (12, 16)),
    ],
)
def test_attention_memory_follows_the_device_unless_it_is_set(
    asked: float | None, total: int, is_on_host: bool, expected: tuple[int, int]
) -> None:
    config: Any = SimpleNamespace(additional_config={} if asked is None else {"attention_memory_gib": asked})
    assert attention_memory(config, total, is_on_host) == tuple(mebibytes << 20 for mebibytes in expected)


def test_step_memory_grows_with_whatever_a_step_has_more_of() -> None:
    specs = {"layer": spec(2, 8)}
    size = LIMITS.mixed_size(4, 20, 100, 3, 12)
    least = estimate_step_memory([size], LIMITS, specs, model_config())
    dims = LIMITS.named(size)
    for name in ("tokens", "logits", "decode_pairs", "chunk_pairs"):
        larger = LIMITS.size(StepKind.MIXED, **(dims | {name: dims[name] + 1}))
        assert estimate_step_memory([larger], LIMITS, specs, model_config()) > least, name
    alone, shared = (
        estimate_step_memory([size], LIMITS, specs, model_config(num_experts=4), num_replicas=num) for num in (1, 2)
    )
    assert least < alone < shared
    streams = estimate_step_memory([size], LIMITS, specs, model_config(hc_mult=4))
    assert streams == least + 4 * 5 * size.num_tokens * 4 * HIDDEN
    # A head in float32 has its weights converted beside the arrays of sampling.
    logits = LIMITS.size(StepKind.MIXED, **(dims | {"logits": 10_000}))
    of_model, of_its_own = model_config(), model_config()
    of_its_own.head_dtype = torch.float32
    before, after = (estimate_step_memory([logits], LIMITS, specs, config) for config in (of_model, of_its_own))
    assert after == before + 4 * HIDDEN * VOCABULARY
    # The pool of prompt embeddings has a row of padding; a piece of any length may be on its way to it.
    embeds = model_config()
    embeds.enable_prompt_embeds, embeds.get_inputs_embeds_size = True, lambda: 24
    pool = torch.empty(LIMITS.max_num_tokens + 1, 24), torch.empty(LIMITS.max_num_tokens, 24)
    wanted = least + sum(tensor.nbytes for tensor in pool)
    assert estimate_step_memory([size], LIMITS, specs, embeds) == wanted
    # The MLP's inner size is a guess where the config has none.
    unknown = model_config()
    del unknown.hf_text_config.intermediate_size
    assert estimate_step_memory([size], LIMITS, specs, unknown) == least + 4 * size.num_tokens * 2 * (
        4 * HIDDEN - INNER
    )


def test_step_memory_of_backends_with_kernels_of_their_own() -> None:
    """Steps of such backends have no pairs to count; the rest is counted."""
    limits = StepLimits(512, 8, 1024, DECODE, CHUNK)
    size = limits.size(StepKind.MIXED, tokens=50, requests=5, logits=5)
    wanted = 4 * max(50 * (6 * HIDDEN + 2 * INNER) + 5 * VOCABULARY, 50 * 4 * HIDDEN + 10 * 5 * VOCABULARY)
    wanted += 4 * (8 + 1) * VOCABULARY
    assert estimate_step_memory([size], limits, {"layer": spec(2, 8)}, model_config()) == wanted
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    assert estimate_step_memory([size], limits, {"layer": spec(2, 8), "other": state}, model_config()) == wanted


def test_step_memory_counts_an_indexers_choice() -> None:
    """Longer contexts take tables of block ids alone, unless graphs hold each round; more tokens, heads and larger keys
    of the indexer take more."""
    specs, dims = {"layer": spec(2, 8)}, {"index_topk": 256, "index_n_heads": 4, "index_head_dim": 32}
    in_pieces = replace(LIMITS, decode_piece=10, chunk_piece=4)
    longer = replace(in_pieces, max_model_len=16 * LIMITS.max_model_len)
    size = LIMITS.mixed_size(4, 20, 100, 3, 12)
    tiles = LIMITS.named(size)["decode_rows"] + LIMITS.named(size)["chunk_tiles"]

    def estimate(limits: StepLimits = in_pieces, is_unrolled: bool = False, **others: int) -> int:
        config = model_config(**(dims | others))
        config.max_model_len = LIMITS.max_model_len
        return estimate_step_memory([size], limits, specs, config, is_unrolled=is_unrolled)

    added = estimate(longer) - estimate()
    ids = 4 * tiles * 15 * LIMITS.max_model_len // 16
    assert ids < added < 8 * ids
    assert estimate(longer, True) - estimate(in_pieces, True) > added
    for name, value in dims.items():
        assert estimate(**{name: 2 * value}) > estimate(), name
    dense = estimate_step_memory([size], in_pieces, specs, model_config())
    assert estimate(index_topk=LIMITS.max_model_len) == dense


def test_step_memory_counts_a_choice_of_blocks() -> None:
    """Rows sixteen times as long take scores of as many more blocks, which five arrays hold for each token and KV head.
    No row is longer than a size's pairs."""
    settings = {"sparse_attention_freq": [0, 1], "sparse_num_index_heads": 2, "sparse_block_size": 16}
    limits = replace(LIMITS, decode_piece=10, chunk_piece=4)
    size = LIMITS.mixed_size(4, 20, 100, 3, 12)
    dims = LIMITS.named(size)
    queries = dims["decode_rows"] * LIMITS.longest_row + dims["chunk_tiles"] * LIMITS.chunk.query

    def estimate(max_model_len: int, **others: Any) -> int:
        config = model_config(**others)
        config.architecture = "MiniMaxM3SparseForCausalLM"
        return estimate_step_memory([size], replace(limits, max_model_len=max_model_len), {"layer": spec(2, 8)}, config)

    added = estimate(512, sparse_attention_config=settings) - estimate(32, sparse_attention_config=settings)
    assert added == 4 * 5 * queries * 2 * (512 - 32) // 16
    longest = [estimate(length, sparse_attention_config=settings) for length in (832, 1 << 20)]
    assert longest[0] == longest[1] > estimate(1 << 20) == estimate(512)


def test_step_memory_counts_compression() -> None:
    """Longer requests take larger tables of entries, of which lower rates make more; a higher rate reads more rows."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    dims = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 32, "head_dim": 16, "num_attention_heads": HEADS}
    size = LIMITS.mixed_size(4, 20, 100, 3, 12)

    def estimate(max_model_len: int = 512, **others: Any) -> int:
        config = model_config(**(dims | {"compress_rates": rates, "layer_types": [*rates]} | others))
        config.architecture = "DeepseekV4ForCausalLM"
        return estimate_step_memory(
            [size], replace(LIMITS, max_model_len=max_model_len), {"layer": spec(1, 16)}, config
        )

    tiles = LIMITS.named(size)["decode_rows"] + LIMITS.named(size)["chunk_tiles"]
    assert estimate(4096) - estimate() >= 4 * tiles * 6 * (4096 - 512) // 4
    assert estimate(4096, compress_rates=rates | {"compressed_sparse_attention": 8}) < estimate(4096)
    assert estimate(compress_rates=rates | {"heavily_compressed_attention": 256}) > estimate()
    assert estimate(index_topk=128) > estimate()
    # Rates that no layer has, or that compress nothing, count nothing.
    for rate in (0, 1, 2):
        assert estimate(compress_rates=rates | {"other": rate}) == estimate()
    for rate in (0, 1):
        others = {"compress_rates": rates | {"sliding_attention": rate}, "layer_types": ["sliding_attention", *rates]}
        assert estimate(**others) == estimate() > estimate(layer_types=["sliding_attention"])
