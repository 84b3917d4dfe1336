"""Replicas that share experts: whatever each of them answers meanwhile, all have the tokens of HF transformers.

Two processes run the engines of all models in turn, each its own replica of them. Experts are whole, or cut.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import replicated_engine
import torch
from conftest import engine
from lane import HAS_OPENXLA, ROOT
from scripts import results_of
from torch.multiprocessing.spawn import spawn
from vllm.utils.network_utils import get_open_port

from model_runner_base.admission import limits
from model_runner_base.admission.expert_replica_limits import REPLICATED, check_expert_replicas
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel, make_checkpoint
from model_runner_base.vllm_compat.probes.experts import experts_layers

PROMPTS = random_prompts(133, [1, 5, 33, 90, 130])
"""Prompts of one token, and of several chunks of 64."""
NEW_TOKENS = 16
FEW = 3
"""Number of tokens of the only request of a replica that is idle afterwards."""
OPTIONS: dict[str, Any] = {
    "data_parallel_size": 2,
    "distributed_executor_backend": "external_launcher",
    "async_scheduling": False,  # vLLM would leave out dummy batches, since these are no processes of a server.
    "enforce_eager": True,
    "max_model_len": 256,
}


class Case(NamedTuple):
    """A model, and whether a rank has some of its experts whole."""

    name: str
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.name}-{'whole' if self.is_whole else 'cut'}"


CASES = [Case(name, is_whole) for name in ("qwen3-moe", "deepseek-v3", "gpt-oss") for is_whole in (True, False)]
# The others share the code of these.
CASES += [Case("qwen2-moe", False), Case("mixtral", True), Case("deepseek-v2", False)]
if HAS_OPENXLA:
    CASES = CASES[:3]


def requests_of(replica: int, turn: int) -> list[tuple[list[tuple[int, ...]], list[int]]]:
    """Prompts of a replica and their numbers of tokens, in a turn: all of them on one replica, a short one on the
    other."""
    if replica == turn % 2:
        return PROMPTS, [NEW_TOKENS] * len(PROMPTS)
    return [PROMPTS[-turn]], [FEW]


def serve_replica(rank: int, ports: Sequence[int], directory: Path) -> None:
    """Answers in an engine of each model, as one of its two replicas."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    # Users start replicas by a server. Here each process is one, so that one start serves all cases.
    limits._check_replicas = check_expert_replicas
    for case, port in zip(CASES, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with engine(directory / case.name, enable_expert_parallel=case.is_whole, **OPTIONS) as llm:
            answers = []
            for turn in range(4):  # The last two turns find prefixes in the cache.
                prompts, counts = requests_of(rank, turn)
                answers.append(tokens_of(generate(llm, prompts, greedy(counts[0]))))
            again = answers[-1]
            if case.name == "qwen3-moe" and not (HAS_OPENXLA and case.is_whole):
                llm.collective_rpc("reload_weights")
                runner_of(llm).profile_step()  # As a device that measures its peak does.
                llm.reset_prefix_cache()
                again = tokens_of(generate(llm, prompts, greedy(counts[0])))
            layer = next(layer for _, layer in experts_layers(runner_of(llm).get_model()))
            weight = layer.weights.w13_weight
            torch.save((answers, again, len(weight), weight.numel()), directory / f"{case}-{rank}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models and of what each replica answered."""
    directory = tmp_path_factory.mktemp("replicas")
    for name in {case.name for case in CASES}:
        make_checkpoint(name, directory)
    with pytest.MonkeyPatch.context() as patch:
        # The example device's platform, in processes that begin with this one's paths.
        patch.setenv("VLLM_NEURON_RUNNER", "0")
        patch.syspath_prepend(ROOT / "tests" / "plugin")
        spawn(serve_replica, ([get_open_port() for _ in CASES], directory), nprocs=2)
    return directory


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_replicas(case: Case, served: Path) -> None:
    model, weights = TinyModel(served / case.name), []
    for replica in range(2):
        answers, again, num_experts, size = torch.load(served / f"{case}-{replica}")
        for turn, tokens in enumerate(answers):
            prompts, counts = requests_of(replica, turn)
            check_equal(model, prompts, tokens, counts)
        assert again == answers[-1]
        weights.append((num_experts, size))
    num_experts = 4 if case.is_whole else 8
    assert weights[0] == weights[1] and weights[0][0] == num_experts


@pytest.mark.newest
def test_a_server_whose_replicas_pause_fail_and_stay_away(tmp_path: Path) -> None:
    """Tokens of an idle replica's neighbour, of both at once, beside requests that are aborted or fail alone, and
    across a pause. A replica that does not join the other's steps ends the engine."""
    make_checkpoint("qwen3-moe", tmp_path)
    model = TinyModel(tmp_path / "qwen3-moe")
    # Functions go to the workers; a replica waits long enough for a loaded machine.
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "25"}
    found = results_of(replicated_engine.__file__, model.path, 1, env=env)
    results, output = found["RESULT"], found["OUTPUT"]
    for name in ("first", "second", "both", "any", "beside", "paused"):
        check_equal(model, replicated_engine.PROMPTS, results[name], replicated_engine.COUNTS)
    failed, after = results["alone"]
    prompts = [replicated_engine.PROMPTS[index] for index in (4, 2)]
    check_equal(model, prompts, [after, results["late"]], [replicated_engine.COUNTS[index] for index in (4, 2)])
    assert {failed, *results["failed"]} == {f"IndexError: nothing at {replicated_engine.SEED}"}
    assert results["stays away"] == "EngineDeadError"
    assert "another replica did not join a step within 25 s" in output


def test_each_architecture_that_is_served_was_compared() -> None:
    compared = {case.name.replace("-", "") for case in CASES}
    served = {name.removesuffix("ForCausalLM").lower() for name in REPLICATED}
    assert compared <= served if HAS_OPENXLA else compared == served
