"""Collectives of a group of workers: in the graph on Neuron, by gloo between the pieces of a graph on PJRT CPU.

A collective is an operator of its own, so that a capture holds it as one node. On Neuron the operator becomes XLA's
collective over replica groups (not run on Neuron hardware). PJRT CPU has none across processes: each process is alone
there, and XLA's collective would hand back its own input. So a graph is cut at these nodes (``cutting.py``), and the
operator runs on the host, on tensors of the host, as it does in eager mode. On a tensor of PJRT CPU it raises.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from neuron_runner import environment


class CollectiveError(RuntimeError):
    """A collective would not reach the other workers, or did not."""


class NeuronCommunicator(DeviceCommunicatorBase):
    """vLLM's entry to the operators below, for one group of ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _communicators[self.unique_name] = self

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in a new tensor."""
        return all_reduce(input_, self.unique_name)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors side by side along ``dim``, in the order of ranks."""
        return all_gather(input_, dim % input_.dim(), self.unique_name)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The sum over ranks, cut along ``dim`` into a part for each rank; returns this rank's part.

        The number of ranks divides the size of ``dim``.
        """
        return reduce_scatter(input_, dim % input_.dim(), self.unique_name)


_communicators: WeakValueDictionary[str, NeuronCommunicator] = WeakValueDictionary()


# ---- The operators: ``group`` is vLLM's unique name of the group ----


@torch.library.custom_op("neuron_runner::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return _transport(x, group).all_reduce(x)


@all_reduce.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("neuron_runner::all_gather", mutates_args=())
def all_gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return _transport(x, group).all_gather(x, dim)


@all_gather.register_fake
def _(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] * _communicators[group].world_size, *x.shape[dim + 1 :]))


@torch.library.custom_op("neuron_runner::reduce_scatter", mutates_args=())
def reduce_scatter(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return _transport(x, group).reduce_scatter(x, dim)


@reduce_scatter.register_fake
def _(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] // _communicators[group].world_size, *x.shape[dim + 1 :]))


OPERATORS = frozenset(op._opoverload for op in (all_reduce, all_gather, reduce_scatter))
"""The operators as the nodes of a captured graph name them."""


# ---- How they reach the other ranks ----


def run_on_host() -> bool:
    """Whether collectives run on the host, so that graphs have to be cut at them."""
    return not environment.neuron_device_visible()


class _HostTransport:
    """Collectives by gloo, on tensors of the host. Every rank gets the same bits: a ring adds each part up once."""

    def __init__(self, communicator: NeuronCommunicator) -> None:
        self._group = communicator.cpu_group
        self._world_size = communicator.world_size
        self._rank = communicator.rank_in_group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        with _told_plainly():
            dist.all_reduce(out, group=self._group)
        return out

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(self._world_size)]
        with _told_plainly():
            dist.all_gather(shards, x, group=self._group)
        return torch.cat(shards, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.all_reduce(x).chunk(self._world_size, dim)[self._rank].clone()


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turns an error of the transport into a CollectiveError that says what it means."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(
            f"another worker has ended or cannot be reached, and its own log says why: {error}"
        ) from error


class _GraphTransport:
    """XLA's collectives over a replica group; the operator's body is traced. Not run on Neuron hardware."""

    def __init__(self, communicator: NeuronCommunicator) -> None:
        import torch_xla.runtime as xr

        self._groups = [communicator.ranks]
        self._world_size = communicator.world_size
        if xr.world_size() != communicator.global_world_size:
            raise CollectiveError(
                f"{communicator.global_world_size} workers run, but the XLA runtime knows of {xr.world_size()}, so its "
                "collectives would return their own input: check NEURON_PJRT_PROCESSES_NUM_DEVICES and "
                "NEURON_RT_ROOT_COMM_ID; PJRT CPU has no collectives across processes"
            )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        import torch_xla.core.xla_model as xm

        total = xm.all_reduce(xm.REDUCE_SUM, x, groups=self._groups)
        assert isinstance(total, torch.Tensor)  # A list is returned for a list.
        return total

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        import torch_xla.core.xla_model as xm

        return xm.all_gather(x, dim, groups=self._groups)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        import torch_xla.core.xla_model as xm

        return xm.reduce_scatter(xm.REDUCE_SUM, x, 1.0, dim, self._world_size, groups=self._groups)


def _transport(x: torch.Tensor, group: str) -> _HostTransport | _GraphTransport:
    communicator = _communicators.get(group)
    if communicator is None:
        raise CollectiveError(f"there is no group of workers named {group}: it was destroyed, or never made")
    return (_HostTransport if x.device.type == "cpu" else _GraphTransport)(communicator)
