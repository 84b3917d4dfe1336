"""The stand-in refuses what a NeuronCore cannot do; the kernels' own limits say what to change."""

import sys
from collections.abc import Callable, Iterator

import nki_standin
import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nki_cases import DECODE, MIXED, Case, make_step
from nki_standin import isa as nisa
from nki_standin import language as nl
from nki_standin import memory

from neuron_runner.nki import nki_available, use_nki
from neuron_runner.nki.attention import NkiAttentionBackend, NkiAttentionImpl
from neuron_runner.nki.tiling import Tiling


@pytest.fixture(autouse=True)
def empty_memory() -> None:
    memory.start()


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in nki_standin.install().items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = ("neuron_runner.nki.dialect", "neuron_runner.nki.kernel")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ours:
        sys.modules.pop(name, None)


def tile(*shape: int, dtype: str = nl.float32, buffer: str = nl.sbuf, value: float | None = 1.0) -> memory.Tensor:
    result = nl.ndarray(shape, dtype, buffer)
    if value is not None:
        result.write(np.full(shape, value))
    return result


def hbm(*shape: int, dtype: str = nl.float32) -> memory.Tensor:
    return tile(*shape, dtype=dtype, buffer=nl.private_hbm)


def gather(index: memory.Tensor, source: memory.Tensor, mode: nisa.oob_mode = nisa.oob_mode.error) -> memory.Tensor:
    p, n = index.shape[0], source.shape[1]
    dst = tile(p, n, value=None)
    nisa.dma_copy(dst, source.ap([[n, p], [1, n]], vector_offset=index, indirect_dim=0), oob_mode=mode)
    return dst


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "129 partitions": (lambda: tile(129, 1), "partitions"),
    "a full SBUF": (lambda: tile(128, 48 * 1024 + 1), "sbuf is full"),
    "a full SBUF, little by little": (lambda: [tile(128, 16 * 1024) for _ in range(4)], "sbuf is full"),
    "a ninth PSUM bank": (lambda: [tile(1, 1, buffer=nl.psum) for _ in range(9)], "psum is full"),
    "a PSUM tile of nine banks": (lambda: tile(1, 8 * 512 + 1, buffer=nl.psum), "psum is full"),
    "a product over 129": (lambda: _product(129, 8, 8), "partitions"),
    "129 stationary columns": (lambda: _product(8, 129, 8), "stationary columns"),
    "513 moving columns": (lambda: _product(8, 8, 513), "moving columns"),
    "partitions that differ": (
        lambda: nisa.nc_matmul(tile(8, 8, buffer=nl.psum), tile(16, 8), tile(8, 8), accumulate=False),
        "contraction",
    ),
    "a product into SBUF": (lambda: nisa.nc_matmul(tile(8, 8), tile(8, 8), tile(8, 8), accumulate=False), "psum"),
    "a product from PSUM": (
        lambda: nisa.nc_matmul(tile(8, 8, buffer=nl.psum), tile(8, 8, buffer=nl.psum), tile(8, 8), accumulate=False),
        "sbuf",
    ),
    "a product into bfloat16": (
        lambda: nisa.nc_matmul(tile(8, 8, dtype=nl.bfloat16, buffer=nl.psum), tile(8, 8), tile(8, 8), accumulate=False),
        "float32",
    ),
    "float32 times bfloat16": (
        lambda: nisa.nc_matmul(tile(8, 8, buffer=nl.psum), tile(8, 8), tile(8, 8, dtype=nl.bfloat16), accumulate=False),
        "float32 goes with float32",
    ),
    "a transpose of 129 columns": (
        lambda: nisa.nc_transpose(tile(8, 8, buffer=nl.psum), tile(8, 129)),
        "transposes up to",
    ),
    "a transpose that casts": (
        lambda: nisa.nc_transpose(tile(8, 8, buffer=nl.psum), tile(8, 8, dtype=nl.bfloat16)),
        "bfloat16",
    ),
    "an engine on HBM": (lambda: nisa.tensor_copy(tile(8, 8), hbm(8, 8)), "cannot reach"),
    "DMA from PSUM": (lambda: nisa.dma_copy(hbm(8, 8), tile(8, 8, buffer=nl.psum)), "PSUM"),
    "DMA that casts": (lambda: nisa.dma_copy(tile(8, 8, dtype=nl.bfloat16), hbm(8, 8)), "bytes"),
    "DMA of another shape": (lambda: nisa.dma_copy(tile(8, 8), hbm(8, 4)), "copy of"),
    "an engine from partition 1 on": (lambda: nisa.tensor_copy(tile(7, 8), tile(8, 8)[1:8, :]), "start at partition"),
    "two inputs in PSUM": (
        lambda: nisa.tensor_tensor(tile(8, 8), tile(8, 8, buffer=nl.psum), tile(8, 8, buffer=nl.psum), nl.add),
        "both",
    ),
    "a row as a vector operand": (
        lambda: nisa.tensor_scalar(tile(8, 8), tile(8, 8), nl.add, tile(1, 8)),
        "vector operand",
    ),
    "a bfloat16 vector operand": (
        lambda: nisa.tensor_scalar(tile(8, 8), tile(8, 8), nl.add, tile(8, 1, dtype=nl.bfloat16)),
        "float32",
    ),
    "an index out of bounds": (lambda: gather(tile(2, 1, dtype=nl.int32, value=9), hbm(9, 4)), "out of bounds"),
    "an index never written": (
        lambda: gather(tile(2, 1, dtype=nl.int32, value=None), hbm(9, 4)),
        "out of bounds",
    ),
    "a float index": (lambda: gather(tile(2, 1), hbm(9, 4)), "int32"),
    "a pattern out of bounds": (lambda: hbm(4, 4).ap([[4, 5], [1, 4]]), "elements"),
    "a pattern that skips partitions": (lambda: tile(4, 4).ap([[8, 2], [1, 4]]), "free dimension"),
    "a pattern on a view": (lambda: tile(4, 4)[0:2, :].ap([[4, 2], [1, 4]]), "whole tensor"),
    "a slice out of bounds": (lambda: tile(4, 4)[0:5, :], "slice"),
    "a register never loaded": (lambda: nl.fori_loop(0, nisa.register_alloc(), lambda i: None), "before it is loaded"),
    "a reduction of partitions": (lambda: nisa.tensor_reduce(tile(1, 8), nl.add, tile(8, 8), 0), "last free"),
    "an integer in a float tile": (lambda: nisa.memset(tile(8, 8), 0), "float32"),
    "a launch without a device": (lambda: nki_standin.jit(len), "simulate"),
    "an output that is not shared": (lambda: nki_standin.simulate(lambda: hbm(1, 1))(), "shared_hbm"),
}


def _product(k: int, m: int, n: int) -> None:
    dst = nl.ndarray((min(m, 128), n), nl.float32, nl.psum)
    nisa.nc_matmul(dst, tile(k, m), tile(k, n), accumulate=False)


@pytest.mark.parametrize("name", REFUSED)
def test_stand_in_refuses(name: str) -> None:
    action, message = REFUSED[name]
    with pytest.raises(memory.HardwareError, match=message):
        action()


def test_registers_are_opaque() -> None:
    register = nisa.register_alloc(3)
    for use in (lambda: register + 1, lambda: range(register), lambda: register < 4):  # type: ignore[operator, call-overload]
        with pytest.raises(TypeError):
            use()


def test_fresh_memory_is_poison_and_freed_memory_can_be_had_again() -> None:
    for _ in range(100):
        fresh = tile(128, 20_000, value=None)
    assert np.isnan(fresh.array).all()  # type: ignore[arg-type]
    bank = tile(4, 8, buffer=nl.psum, value=None)
    nisa.nc_matmul(bank, tile(2, 4), tile(2, 8), accumulate=True)
    assert np.isnan(bank.array).all(), "accumulating on what was never written"  # type: ignore[arg-type]


def test_indices_out_of_bounds_are_passed_over_if_asked() -> None:
    index = tile(3, 1, dtype=nl.int32, value=0)
    index.write(np.array([[1], [9], [-1]]))
    found = gather(index, hbm(9, 4), nisa.oob_mode.skip)
    assert (found.array[0] == 1).all() and np.isnan(found.array[1:]).all()  # type: ignore[index]


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
@settings(max_examples=examples(50), deadline=None)
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    want = torch.tensor(values, dtype=torch.float32).bfloat16().float().numpy()
    np.testing.assert_array_equal(memory.rounded(np.array(values, np.float32), nl.bfloat16), want)


# The kernels' own limits.


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((6, 4, 64, 1, 128, 2), "no multiple"),
        ((4, 4, 256, 1, 128, 2), "VLLM_NEURON_NKI=0"),
        ((4, 4, 64, 129, 128, 2), "lower query_tile"),
        ((4, 4, 64, 1, 192, 2), "block size"),
        ((4, 4, 64, 1, 128, 1), "bfloat16"),
        ((32, 32, 128, 1, 2048, 4), "smaller KV tile"),
    ],
)
def test_sizes_that_do_not_fit_say_what_to_change(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiling(*sizes)


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("requests", [DECODE, MIXED], ids=["decode", "mixed"])
def test_mixed_dtypes_are_refused(requests: tuple[tuple[int, int], ...]) -> None:
    step = make_step(Case(requests))
    with pytest.raises(ValueError, match="one dtype"):
        NkiAttentionImpl(4, 16, 1.0, 2).attend(step.query.bfloat16().flatten(1), step.cache, step.metadata)


@pytest.mark.skipif(nki_available(), reason="Neuron's SDK is installed")
def test_without_the_sdk_the_layer_says_what_to_install() -> None:
    with pytest.raises(RuntimeError, match="needs nki"):
        NkiAttentionImpl(4, 16, 0.25, 2)


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("feature", [{"alibi_slopes": [0.5] * 4}, {"sinks": torch.zeros(4)}])
def test_layers_that_the_kernel_cannot_do_are_refused(feature: dict) -> None:
    with pytest.raises(NotImplementedError, match="VLLM_NEURON_NKI=0"):
        NkiAttentionImpl(4, 16, 0.25, 2, **feature)


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("case", [Case(MIXED, (16, 16), 64), Case(MIXED, (32, 8), 128, 32, 512, 128)], ids=str)
def test_the_estimate_of_memory_covers_what_a_kernel_takes(case: Case) -> None:
    step = make_step(case)
    meta, num_rows = step.metadata, step.metadata.num_decode_tokens
    impl = NkiAttentionImpl(case.heads[0], case.head_size, 0.1, case.heads[1])
    query, cache = step.query.flatten(1), torch.nan_to_num(step.cache)
    assert meta.decode is not None and meta.chunks is not None
    for attend, part, plan, sizes in (
        (impl.attend_decode, query[:num_rows], meta.decode, case.decode),
        (impl.attend_chunks, query[num_rows:], meta.chunks, case.chunk),
    ):
        attend(part, cache, plan)
        tiling = Tiling(*case.heads, case.head_size, *sizes, 4)
        assert tiling.sbuf_bytes / 2 < memory.usage.peak["sbuf"] <= tiling.sbuf_bytes


def test_whole_cache_lines_are_not_asked_for() -> None:
    assert not NkiAttentionBackend.reads_lines


# ---- Where the kernels run ----


@pytest.mark.usefixtures("standin")
def test_the_kernels_run_where_there_is_a_device_and_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NEURON_NKI", raising=False)
    assert not use_nki()
    monkeypatch.setenv("VLLM_NEURON_NKI", "1")
    with pytest.raises(RuntimeError, match="no Neuron device is visible"):
        use_nki()
    monkeypatch.setattr("neuron_runner.environment.neuron_device_visible", lambda: True)
    assert use_nki()
    monkeypatch.delenv("VLLM_NEURON_NKI")
    assert use_nki()
    monkeypatch.setenv("VLLM_NEURON_NKI", "0")
    assert not use_nki()
    monkeypatch.setenv("VLLM_NEURON_NKI", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        use_nki()


@pytest.mark.skipif(nki_available(), reason="Neuron's SDK is installed")
def test_kernels_that_are_asked_for_without_the_sdk_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_NKI", "1")
    with pytest.raises(RuntimeError, match="needs nki"):
        use_nki()
