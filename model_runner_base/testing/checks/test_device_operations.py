"""``DeviceOps`` keeps its contract: zeros, arrays that are overwritten, results that are read late, memory figures."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from vllm import LLM
from vllm.platforms import current_platform

from model_runner_base.device_ops import MemoryInfo
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_same

Start = Callable[..., LLM]
TAKEN = 64 << 20
"""Bytes that are taken to see whether memory figures show it."""
TRIES = 16
SHAPES = [(1,), (7,), (3, 1000), (1 << 20,)]
ODD_SHAPES = [(1,), (3,), (13,), (5, 7), (3, 1001), (64, 17), ((1 << 16) + 1,)]
"""Shapes whose sizes in bytes are multiples of few numbers, so that a size that is rounded shows."""
DTYPES = [np.int32, np.float32]
ODD_DTYPES: list[Any] = [np.uint8, np.int32, np.float32]
OLD, NEW = 3, 7
"""Contents of an array when it is copied, and what is written over it."""


@pytest.fixture
def ops(text_engine: Start) -> Iterator[Any]:
    """Operations of the engine's device, in the mode in which steps call them."""
    found = runner_of(text_engine()).device_ops
    with current_platform.inference_mode():
        yield found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zeros(ops: Any, shape: tuple[int, ...]) -> None:
    """Memory from zeros is zero, also where it was used before."""
    for dtype in (torch.int32, torch.float32, torch.uint8):
        for _ in range(3):
            tensor = ops.zeros(shape, dtype)
            got = ops.to_host(tensor)
            wrong = np.count_nonzero(got != 0)
            assert got.shape == shape and not wrong, f"zeros({shape}, {dtype}): {wrong} numbers are not 0"
            tensor.fill_(77)
            ops.synchronize()
            del tensor, got


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_arrays_are_overwritten(ops: Any, shape: tuple[int, ...], dtype: type) -> None:
    """An array may be overwritten as soon as to_device returns."""
    array: np.ndarray = np.full(shape, OLD, dtype)
    tensors = []
    for number in range(6):
        array[...] = number
        tensors.append(ops.to_device(array))
    array[...] = NEW
    for number, tensor in enumerate(tensors):
        got = ops.to_host(tensor)
        assert (got == number).all(), (
            f"to_device: an array {shape} of {number} was overwritten after the call, and the device has "
            f"{np.unique(got)[:3]}: it reads the array later, or shares its memory"
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_are_written_again(ops: Any, shape: tuple[int, ...]) -> None:
    """A tensor that to_device writes again has the new array, and what was computed before has the old one."""
    array = np.full(shape, OLD, np.int32)
    tensor = ops.to_device(array)
    computed = tensor * 2
    array[...] = NEW
    again = ops.to_device(array, tensor)
    array[...] = 0
    _check(ops.to_host(again), NEW, f"to_device with out, {shape}: the tensor")
    _check(ops.to_host(computed), 2 * OLD, f"to_device with out, {shape}: what was computed of the tensor before")


def numbered(shape: tuple[int, ...], dtype: Any, first: int = 0) -> np.ndarray:
    """Array whose neighbours differ, in every byte of small numbers."""
    return ((np.arange(np.prod(shape)) * 7 + first) % 251).astype(dtype).reshape(shape)


def test_odd_sizes(ops: Any) -> None:
    """Arrays of any size are copied whole: to new tensors, to those that exist, and back."""
    for dtype in ODD_DTYPES:
        for shape in ODD_SHAPES:
            name = f"{dtype.__name__} {shape}, {np.prod(shape) * np.dtype(dtype).itemsize} bytes"
            old, new = numbered(shape, dtype), numbered(shape, dtype, first=100)
            tensor = ops.to_device(old)
            compare(ops.to_host(tensor), old, f"to_device, {name}: the tensor")
            compare(ops.to_host(ops.to_device(new, tensor)), new, f"to_device with out, {name}: the tensor")
            compare(ops.begin_to_host(ops.to_device(new))(), new, f"begin_to_host, {name}: the result")
            compare(ops.to_host(ops.upload(torch.from_numpy(old))), old, f"upload, {name}: the tensor")
            target = ops.zeros(shape, torch.from_numpy(old).dtype)
            ops.overwrite(target, ops.upload(torch.from_numpy(new)))
            compare(ops.to_host(target), new, f"overwrite, {name}: the tensor")


def test_tensors_do_not_overlap(ops: Any) -> None:
    """Tensors that are alive at a time share no memory, whatever their sizes."""
    makers: dict[str, Callable[[np.ndarray], torch.Tensor]] = {
        "zeros": lambda array: ops.zeros(array.shape, torch.from_numpy(array).dtype),
        "to_device": ops.to_device,
        "upload": lambda array: ops.upload(torch.from_numpy(array)),
    }
    arrays = [numbered(shape, dtype) for dtype in ODD_DTYPES for shape in ODD_SHAPES]
    held = [(maker, array, make(array)) for array in arrays for maker, make in makers.items()]
    for number, (_, _, tensor) in enumerate(held):
        tensor.fill_(number + 1)
    ops.synchronize()
    for number, (maker, array, tensor) in enumerate(held):
        got = ops.to_host(tensor)
        wrong = np.flatnonzero((got != number + 1).ravel())
        if not len(wrong):
            continue
        found = int(got.ravel()[wrong[0]]) - 1
        name = f"the tensor of {array.nbytes} bytes from {maker}"
        other = f", where tensor {found}, from {held[found][0]}, was filled later" if found in range(len(held)) else ""
        raise AssertionError(f"{name} shares its bytes from {wrong[0] * array.itemsize} on with another{other}")


def test_views(ops: Any) -> None:
    """Views of a tensor are copied to the host as they are seen."""
    array = numbered((6, 10), np.int32)
    tensor, host = ops.to_device(array), torch.from_numpy(array.copy())
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "rows from 1 on": lambda x: x[1:],
        "every other column": lambda x: x[:, ::2],
        "transposed": lambda x: x.t(),
        "one column": lambda x: x[:, 3],
        "flattened": lambda x: x.view(-1)[7:50],
    }
    for name, view in views.items():
        compare(ops.to_host(view(tensor)), view(host).numpy(), f"to_host of a view, {name}: the array")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_are_finished_late(ops: Any, shape: tuple[int, ...]) -> None:
    """Copies to the host that were begun one after the other have their own contents, in whichever order they end."""
    finish = [ops.begin_to_host(ops.to_device(np.full(shape, number, np.int32)) + 1) for number in range(4)]
    results = {number: finish[number]() for number in (2, 0, 3, 1)}
    for number, got in results.items():
        _check(got, number + 1, f"begin_to_host {shape}, copy {number} of 4 that are under way: the result")


def test_results_are_kept(text_engine: Start) -> None:
    """Results of a wrapped function stay as they are while it runs again.

    The function is the check's own: the policy gets it after warm-up. It has no StepSize. Results of a step's graph
    need not last so long: the group ``pooling`` looks at those that are read late, of a prompt's earlier chunks.
    """
    runner = runner_of(text_engine())
    ops = runner.device_ops
    function = runner.graph_policy.wrap(_double, [])
    with current_platform.inference_mode():
        results = [function(ops.to_device(np.full(64, number, np.int32))) for number in (1, 2, 3)]
        finish = [ops.begin_to_host_from_graph(result) for result in results]
    for number, (result, read) in enumerate(zip(results, finish, strict=True), start=1):
        which = f"run {number} of 3 of a function without a StepSize"
        _check(ops.to_host(result), 2 * number, f"graph_policy.wrap, {which}: the result, after the last run,")
        _check(read(), 2 * number, f"begin_to_host_from_graph, {which}: the result")


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def test_figures(text_engine: Start) -> None:
    """No more memory is free than there is; if it is the device's own, zeros takes what it should."""
    llm = text_engine()
    ops = runner_of(llm).device_ops
    memory: MemoryInfo = ops.memory_info()
    if not memory.total:
        raise NotImplementedError("memory figures are not supported: memory_info reports no memory")
    assert 0 < memory.free <= memory.total, f"memory_info: {memory.free} bytes are free of {memory.total}"
    if shares_host_memory(llm):
        host = psutil.virtual_memory().total
        assert memory.total <= host, f"memory_info: {memory.total} bytes in all, of the host's {host}"
        return
    falls: list[int] = []
    taken = []
    # An allocator may have had some left, or may take more than it was asked for and keep that for the next calls.
    while not TAKEN * len(falls) // 2 < sum(falls) < TAKEN * len(falls) * 2:
        assert len(falls) < TRIES, (
            f"zeros takes {TAKEN} bytes each time, and free memory of memory_info falls by {falls}"
        )
        before = ops.memory_info().free
        taken.append(ops.zeros((TAKEN,), torch.uint8))
        ops.synchronize()
        falls.append(before - ops.memory_info().free)


def shares_host_memory(llm: LLM) -> bool:
    """Whether the device's memory is the host's, as the platform says."""
    shares = getattr(current_platform, "shares_host_memory", None)
    return shares is not None and bool(shares(llm.llm_engine.vllm_config))


def test_other_copies(ops: Any) -> None:
    """Tensors are uploaded, and overwritten where they are, and waits return."""
    first, second = torch.full((5, 3), 1.5), torch.full((5, 3), 2.5)
    tensor = ops.upload(first)
    _check(ops.to_host(tensor), 1.5, "upload: the tensor")
    wait = ops.mark()
    ops.overwrite(tensor, ops.upload(second))
    wait()
    ops.synchronize()
    _check(ops.to_host(tensor), 2.5, "overwrite: the tensor")


def test_host_buffers_are_overwritten(text_engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are the same if each array is overwritten as soon as it was sent, whole buffers and changes to them."""
    llm = text_engine()
    prompts, params = random_prompts(61, [3, 40, 17, 65, 5]), greedy(20)
    ops = runner_of(llm).device_ops
    to_device = ops.to_device
    num_sent = count()

    def scribble(array: np.ndarray, out: torch.Tensor | None = None) -> torch.Tensor:
        sent = array.copy()
        result: torch.Tensor = to_device(sent, out)
        sent[...] = 1
        next(num_sent)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(ops, "to_device", scribble)
        got = tokens_of(generate(llm, prompts, params))
    assert llm.reset_prefix_cache(), "the prefix cache is in use without requests"
    usual = tokens_of(generate(llm, prompts, params))
    names = [f"arrays were overwritten after to_device, prompt of {len(prompt)} tokens" for prompt in prompts]
    check_same(got, usual, names, prompts, "compared with the same requests without overwriting")
    assert next(num_sent) > 0, "no step sent its arrays by device_ops.to_device"


def _check(got: np.ndarray, wanted: float, what: str) -> None:
    assert (got == wanted).all(), f"{what} has {np.unique(got)[:3]}, not {wanted}"


def compare(got: np.ndarray, want: np.ndarray, what: str) -> None:
    assert got.shape == want.shape, f"{what} has the shape {got.shape}, not {want.shape}"
    wrong = np.flatnonzero((got != want).ravel())
    if len(wrong):
        first = int(wrong[0])
        raise AssertionError(
            f"{what} has {len(wrong)} wrong numbers of {got.size}, from number {first} (byte {first * want.itemsize}) "
            f"on: {got.ravel()[first]}, not {want.ravel()[first]}"
        )
