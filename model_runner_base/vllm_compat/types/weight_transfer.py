"""vLLM's engines of weight transfer, whose interface differs between releases."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from model_runner_base.vllm_compat.probes.config import num_local_replicas

HAS_SESSIONS = hasattr(WeightTransferEngine, "start_weight_update")
"""Whether an update is a session of several calls. Otherwise ``update_weights`` is all of it."""
WRITING_BACKENDS = ("sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress")
"""Backends of vLLM that write to parameters of vLLM's own models, and not by ``load_weights``."""

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


class Receiver(nn.Module):
    """Model that a transfer engine is given in place of the real one: its ``load_weights`` is that of the session.

    It has no layers, so an engine that prepares them for new weights has nothing to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.load: Load | None = None
        """Set while a session runs."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        assert self.load is not None, "a session has started"
        self.load(weights)
        return set()


def config_of(backend: str) -> WeightTransferConfig:
    """Makes a config with any registered backend, which some releases' constructor would refuse."""
    config = WeightTransferConfig()
    object.__setattr__(config, "backend", backend)
    return config


def make_engine(vllm_config: VllmConfig, device: torch.device, receiver: Receiver) -> Any:
    """Makes the engine that ``weight_transfer_config`` names; None if it names none."""
    config = vllm_config.weight_transfer_config
    if config is None:
        return None
    if HAS_SESSIONS:
        return WeightTransferEngineFactory.create_engine(config, vllm_config, device, receiver)  # type: ignore[call-arg, arg-type]
    return WeightTransferEngineFactory.create_engine(config, vllm_config.parallel_config)


def register_engine(name: str, module: str, cls: str) -> None:
    """Registers an engine's class by its name, once."""
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, module, cls)


def start(engine: Any, receiver: Receiver, draft_config: ModelConfig | None) -> None:
    """Tells an engine that an update starts, of the draft model if its config is given."""
    if HAS_SESSIONS:
        if draft_config is not None:
            engine.set_weight_update_target(receiver, draft_config)
        engine.start_weight_update()


def receive(engine: Any, update_info: dict[str, Any], receiver: Receiver) -> None:
    """Has an engine receive a chunk, and load it by the receiver.

    vLLM's own ``update_weights`` waits for torch's accelerator, which fails where torch has none; an engine's own is
    called. The receiver's load waits for the device.
    """
    if not HAS_SESSIONS:
        info = engine.parse_update_info(update_info)
        if not info.is_checkpoint_format:
            raise ValueError("weights in a device's own layout cannot be loaded: leave out is_checkpoint_format")
        engine.receive_weights(info, receiver.load_weights)
    elif type(engine).update_weights is WeightTransferEngine.update_weights:  # type: ignore[attr-defined]
        engine.receive_weights(engine.parse_update_info(update_info))
    else:
        engine.update_weights(update_info)


def finish(engine: Any) -> None:
    """Has an engine load what it still holds."""
    if HAS_SESSIONS:
        engine.finish_weight_update()


def leave_target(engine: Any) -> None:
    """Tells an engine that no update runs."""
    if HAS_SESSIONS:
        engine.reset_weight_update_target()


def info_of_rank(update_info: dict[str, Any] | Sequence[dict[str, Any]], vllm_config: VllmConfig) -> dict[str, Any]:
    """A worker's own part of a list, which has one for each worker of each replica.

    Raises ValueError, on all workers alike, if the list has another length.
    """
    if isinstance(update_info, dict):
        return update_info
    parallel = vllm_config.parallel_config
    # The process of a replica without shared experts has a config that names no other replica.
    num_workers = max(parallel.data_parallel_size, num_local_replicas(parallel)) * parallel.world_size
    if len(update_info) != num_workers:
        raise ValueError(f"update_info has {len(update_info)} parts, and must have {num_workers}, one a worker")
    return update_info[global_rank(vllm_config.parallel_config)]


def global_rank(parallel: ParallelConfig) -> int:
    """Number of a worker among those of all replicas."""
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


@contextmanager
def chunk_of_weights() -> Iterator[None]:
    """Context in which a model's ``load_weights`` may be given only some of the weights."""
    if find_spec("vllm.model_executor.model_loader.mtp_validation") is None:
        yield
        return
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    with disable_mtp_completeness_check():
        yield
