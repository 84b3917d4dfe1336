"""Exchange of tokens among replicas that share experts: against a sum over all experts, and with planted faults."""

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.utils.network_utils import get_open_port

from model_runner_base.models.layers import expert_exchange
from model_runner_base.models.layers.expert_exchange import ExpertExchange, ReplicaError

NUM_EXPERTS, HIDDEN, TOP_K = 6, 5, 2
COUNTS = [(3, 7), (1, 1), (8, 0), (2, 5)]
"""Numbers of tokens of the two replicas, in each run; 0 stands for one of padding."""


def weights() -> torch.Tensor:
    return torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))


def tokens(rank: int, run: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, chosen experts and weights of a replica's tokens in a run."""
    made, count = torch.Generator().manual_seed(10 * run + rank), max(1, COUNTS[run][rank])
    ids = torch.rand(count, NUM_EXPERTS, generator=made).topk(TOP_K).indices.to(torch.int32)
    return torch.randn(count, HIDDEN, generator=made), ids, torch.rand(count, TOP_K, generator=made)


def own_experts(rank: int, hidden: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the experts of one replica, every other one."""
    out, experts = torch.zeros_like(hidden), weights()
    for choice in range(TOP_K):
        is_own = (ids[:, choice] % 2 == rank).float()
        each = torch.einsum("th,thk->tk", hidden, experts[ids[:, choice].long()])
        out += each * (is_own * chosen[:, choice]).unsqueeze(-1)
    return out


def run_replica(rank: int, port: int, directory: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    cpu_group: Any = dist.group.WORLD
    group = DeviceCommunicatorBase(cpu_group, torch.device("cpu"), cpu_group)
    group.cpu_group = cpu_group
    expert_exchange.get_dp_group = lambda: group
    exchange = ExpertExchange()
    exchange.meet()
    run = exchange.around(lambda layer, *values: own_experts(rank, *values))
    results = []
    for index in range(len(COUNTS)):
        values = tokens(rank, index)
        exchange.agree(len(values[0]))
        results += [run(None, *values) for _ in range(2)]
    with pytest.raises(RuntimeError, match="called with 9 tokens, in a run of"):
        run(None, torch.zeros(9, HIDDEN), torch.zeros(9, TOP_K), torch.zeros(9, TOP_K))
    torch.save(results, directory / f"results-{rank}")
    # A fault: a replica does not join the others' run.
    while rank == 1 and not (directory / "left").exists():
        time.sleep(0.1)
    with (
        pytest.raises(ReplicaError, match="did not join a step within 1 s, or has ended")
        if rank == 0
        else nullcontext()
    ):
        exchange.agree(3)
    (directory / "left").touch()
    # A fault: a replica pads its tokens to another number than the others.
    exchange.agree(4)
    (directory / f"agreed-{rank}").touch()
    exchange._num_padded += rank
    run(None, *(value[:1].repeat(4, 1) for value in tokens(rank, 0)))
    (directory / f"ran-{rank}").touch()


def test_sums_are_those_of_all_experts_and_faults_are_noticed(tmp_path: Path) -> None:
    """A replica that stays away is an error, and one with another number of tokens ends the others."""
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        spawn(run_replica, (get_open_port(), tmp_path), nprocs=2)
    assert (tmp_path / "left").exists() and len(list(tmp_path.glob("agreed-*"))) == 2
    assert not list(tmp_path.glob("ran-*"))
    for rank in range(2):
        results = torch.load(tmp_path / f"results-{rank}")
        for index, result in enumerate(results):
            values = tokens(rank, index // 2)
            torch.testing.assert_close(result, own_experts(0, *values) + own_experts(1, *values))
