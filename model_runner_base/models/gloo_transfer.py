"""Weight transfer over gloo, through the host's memory: the receiving engine, and a sender for trainers.

It needs no accelerator, and is an example for a transport of your own: a subclass of vLLM's ``WeightTransferEngine``
that hands each chunk to ``load_weights`` serves with any device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from model_runner_base.vllm_compat.types.weight_transfer import config_of, global_rank, register_engine

BACKEND = "gloo"
"""Name of the engine in ``weight_transfer_config``."""
Chunk = Sequence[tuple[str, torch.Tensor]]


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Address of the trainer, which is rank 0 of ``world_size``; workers follow from ``rank_offset`` on.

    The fields are those of vLLM's backend ``nccl``.
    """

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    timeout_seconds: int = 600
    """Time that one side waits for the other, while it connects and during a chunk."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Tensors of a chunk, in the order in which they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes must have one entry for each tensor of the chunk")


class GlooWeightTransfer(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives chunks from a ``GlooSender``, and loads each as it comes; it holds one chunk at a time."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = True
    vllm_config: Any
    model: Any
    _group: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self._group = _join(init_info, init_info.rank_offset + global_rank(self.parallel_config))

    def start_weight_update(self) -> None:
        """Does nothing: the model is prepared by its worker."""

    def finish_weight_update(self) -> None:
        """Does nothing: each chunk is loaded as it comes."""

    def receive_weights(self, update_info: GlooUpdateInfo, load_weights: Callable[[Any], Any] | None = None) -> None:
        """Receives a whole chunk before any of it is loaded, so that a misfit does not leave the sender waiting.

        Args:
            load_weights: loads the chunk, in releases of vLLM whose engines have no ``model``.
        """
        if self._group is None:
            raise RuntimeError("no trainer is connected: call init_weight_transfer_engine first")
        chunk = [
            (name, torch.empty(shape, dtype=getattr(torch, dtype), device="cpu"))
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        ]
        for _, tensor in chunk:
            _broadcast(self._group, tensor)
        (load_weights or self.model.load_weights)(chunk)

    def shutdown(self) -> None:
        self._group = None


class GlooSender:
    """Sends chunks from a trainer to all workers; made while the workers run ``init_transfer_engine``."""

    def __init__(self, init_info: GlooInitInfo) -> None:
        self._group = _join(init_info, rank=0)

    def send(self, chunk: Chunk) -> None:
        """Sends the tensors of a chunk, while the workers run ``update_weights`` with its ``update_info``."""
        for _, tensor in chunk:
            _broadcast(self._group, tensor.detach().cpu().contiguous())


def update_info(chunk: Chunk) -> dict[str, Any]:
    """Describes a chunk for ``update_weights``."""
    return {
        "names": [name for name, _ in chunk],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
        "shapes": [list(tensor.shape) for _, tensor in chunk],
    }


def in_chunks(weights: Iterable[tuple[str, torch.Tensor]], num_bytes: int) -> Iterable[list[tuple[str, torch.Tensor]]]:
    """Yields weights in lists of at most ``num_bytes``, or of one tensor that is larger."""
    chunk: list[tuple[str, torch.Tensor]] = []
    for name, tensor in weights:
        if chunk and sum(each.nbytes for _, each in chunk) + tensor.nbytes > num_bytes:
            yield chunk
            chunk = []
        chunk.append((name, tensor))
    if chunk:
        yield chunk


def transfer_config() -> WeightTransferConfig:
    """Makes the ``weight_transfer_config`` of this engine; vLLM 0.16 does not take ``{"backend": "gloo"}``."""
    return config_of(BACKEND)


def register() -> None:
    """Makes the engine known to vLLM by its name."""
    register_engine(BACKEND, __name__, GlooWeightTransfer.__name__)


def _join(init_info: GlooInitInfo, rank: int) -> Any:
    """Makes the group of trainer and workers, next to torch's default group. The trainer has the store."""
    timeout = timedelta(seconds=init_info.timeout_seconds)
    address, size = init_info.master_address, init_info.world_size
    store = dist.TCPStore(address, init_info.master_port, size, rank == 0, timeout)
    # vLLM's own function redirects the output of the whole process, which a trainer in another thread may do, too.
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, size, timeout)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Broadcasts from rank 0, as bytes, since gloo does not know all dtypes."""
    if tensor.numel():
        group.broadcast([tensor.reshape(-1).view(torch.uint8)], dist.BroadcastOptions()).wait()
