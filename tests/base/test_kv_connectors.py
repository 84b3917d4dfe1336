"""KV connectors of a real engine: tokens are those of an engine without one, also where loads fail."""

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import zmq
from conftest import engine
from greedy import expected, generate
from lane import ROOT
from serving import block_files
from test_limits import SERVED
from vllm import LLM
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from model_runner_base.admission.kv_connectors import HOST_SPEC, OF_VLLM, check_connector, offload_by_the_base
from model_runner_base.caches.host_offload import HostBlocks
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.runner.state_updates import StateUpdates
from model_runner_base.step.request_states import RequestInfo, RequestStates
from model_runner_base.step.schedule import Schedule
from model_runner_base.testing import engine as engines
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, metric, sampled, tokens_of
from model_runner_base.testing.kept_blocks import KeptBlocks, transfer_config
from model_runner_base.testing.models import TinyModel
from model_runner_base.vllm_compat.types.kv_connector import OFFLOADING, SEVERAL

PROMPTS = random_prompts(30, [90, 5, 33, 64, 120, 49])
EAGER: dict[str, Any] = {"enforce_eager": True, "max_model_len": 192, "block_size": 16}
RULES = sampled(8, temperature=0.8, seed=3, frequency_penalty=1.5, repetition_penalty=1.3)
"""Parameters that need the request's output so far, in which a token that is sampled again must not count twice."""


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[LLM]:
    """An engine that loads prompts that it has computed before, and preempts long requests."""
    KeptBlocks.forget()
    options = {"kv_transfer_config": transfer_config(), "kv_cache_memory_bytes": cache_bytes(model.path, 224)}
    with engine(model.path, **EAGER, **options, async_scheduling=False) as llm:
        yield llm


@pytest.mark.parametrize("between_steps", [False, True], ids=["inside steps", "between steps"])
@pytest.mark.parametrize("num_failing", [0, 1, 4])
def test_loaded_prefixes(between_steps: bool, num_failing: int, llm: LLM, model: TinyModel) -> None:
    """Prompts are loaded, and their rest is computed in chunks; where a block is missing, more is computed."""
    KeptBlocks.forget()
    KeptBlocks.between_steps = between_steps
    assert generate(llm, PROMPTS) == expected(model, PROMPTS)
    params = [RULES] * len(PROMPTS)
    drawn = tokens_of(engines.generate(llm, PROMPTS, params))
    saved = KeptBlocks.calls["saved"]
    assert saved >= sum((len(prompt) - 1) // 16 for prompt in PROMPTS)
    for run, wanted in (
        (lambda: generate(llm, PROMPTS), expected(model, PROMPTS)),
        (lambda: tokens_of(engines.generate(llm, PROMPTS, params)), drawn),
    ):
        assert llm.reset_prefix_cache()
        KeptBlocks.num_failing, before = num_failing, KeptBlocks.calls.copy()
        assert run() == wanted
        now = KeptBlocks.calls - before
        assert now["failed"] == num_failing and now["loaded"] > 4
        layers = [count for name, count in now.items() if name.startswith(("before", "after"))]
        assert len(layers) == 4 and len({*layers}) == 1 and now["steps"] >= layers[0] > 0
    assert llm.reset_prefix_cache()
    assert generate(llm, PROMPTS) == expected(model, PROMPTS), "what was kept is right after a load that failed"


@pytest.mark.parametrize("fails_again", [False, True], ids=["", "fails"])
@pytest.mark.parametrize("between_steps", [False, True], ids=["inside steps", "between steps"])
def test_preempted_requests(between_steps: bool, fails_again: bool, llm: LLM, model: TinyModel) -> None:
    """Requests that are preempted come back with loaded prompts, or compute them if the load fails."""
    KeptBlocks.forget()
    KeptBlocks.between_steps, KeptBlocks.fails_again = between_steps, fails_again
    before = metric(llm, "vllm:num_preemptions")
    for _ in range(2):
        assert generate(llm, PROMPTS, 60) == expected(model, PROMPTS, 60)
        llm.reset_prefix_cache()
    assert metric(llm, "vllm:num_preemptions") > before
    assert KeptBlocks.calls["loaded"] > 10 and bool(KeptBlocks.calls["failed"]) == fails_again


def test_a_request_that_has_started_is_aborted(llm: LLM, model: TinyModel) -> None:
    """A request that ends while its blocks are loaded leaves the engine as it was."""
    KeptBlocks.forget()
    generate(llm, PROMPTS)
    llm.reset_prefix_cache()
    KeptBlocks.between_steps = True
    llm.llm_engine.add_request("gone", {"prompt_token_ids": list(PROMPTS[0])}, engines.greedy(20))
    before = KeptBlocks.calls.copy()
    llm.llm_engine.step()
    assert (KeptBlocks.calls - before).keys() == {"loaded", "steps"}, "a step without tokens"
    llm.llm_engine.abort_request(["gone"])
    assert generate(llm, PROMPTS) == expected(model, PROMPTS)


def test_new_weights_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="an engine with a KV connector keeps its weights"):
        llm.collective_rpc("reload_weights")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address at which an engine publishes events of its blocks."""
    return f"ipc://{tmp_path_factory.mktemp('events')}/socket"


@pytest.fixture(scope="module")
def offloading(tiny_model: Callable[[str], TinyModel], endpoint: str) -> Iterator[tuple[LLM, TinyModel]]:
    """An engine of two kinds of layers that keeps blocks on the host, with asynchronous scheduling."""
    model = tiny_model("exaone4")
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    options = {"kv_offloading_size": 0.01, "kv_cache_memory_bytes": cache_bytes(model.path, 400)}
    with engine(model.path, **EAGER, **options, kv_events_config=events) as llm:
        yield llm, model


def test_blocks_on_the_host(offloading: tuple[LLM, TinyModel]) -> None:
    """Blocks come back from the host after the device's cache is emptied."""
    llm, model = offloading
    loaded: list[int] = []
    load = HostBlocks.load

    def noted(blocks: HostBlocks, *args: Any) -> int:
        loaded.append(len(args[1]))
        return load(blocks, *args)

    with patch.object(HostBlocks, "load", noted):
        for _ in range(3):
            assert generate(llm, PROMPTS) == expected(model, PROMPTS)
            generate(llm, PROMPTS[1:2])  # Stores begin with the next step.
            assert llm.reset_prefix_cache()
    assert sum(loaded) > 8


def test_log_probabilities_of_a_prompt_on_the_host(offloading: tuple[LLM, TinyModel]) -> None:
    """No token of such a prompt is loaded, since its log probabilities must be computed."""
    llm, _ = offloading
    params = engines.greedy(2, prompt_logprobs=0)
    first, second = (engines.generate(llm, PROMPTS[:1], params)[0].prompt_logprobs for _ in range(2))
    assert first is not None and len(first) == len(PROMPTS[0]) and first == second


def test_events_of_blocks(offloading: tuple[LLM, TinyModel], endpoint: str) -> None:
    """Blocks that the device and the host begin to keep are published, as vLLM does it."""
    llm, model = offloading
    (prompt,) = random_prompts(32, [90])
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.subscribe(b"")
        time.sleep(0.2)  # A publisher drops what comes before the connection is made.
        for _ in range(2):
            assert generate(llm, [prompt]) == expected(model, [prompt])
        generate(llm, PROMPTS[1:2])
        stored: list[BlockStored] = []
        while socket.poll(1000):
            batch = msgspec.msgpack.decode(socket.recv_multipart()[-1], type=KVEventBatch)
            stored += [event for event in batch.events if isinstance(event, BlockStored)]
    on_device = {tuple(event.token_ids[i : i + 16]) for event in stored for i in range(0, len(event.token_ids), 16)}
    assert {prompt[i : i + 16] for i in range(0, 80, 16)} <= on_device
    assert {event.medium for event in stored} == {"GPU", "CPU"}


def several(*listed: dict[str, Any]) -> dict[str, Any]:
    """Options of ``kv_transfer_config`` for several connectors."""
    extra = {"connectors": [{"kv_role": "kv_both"} | deepcopy(options) for options in listed]}
    return {"kv_connector": SEVERAL, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_two_connectors(model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are on files and on the host: they come from the files, or else from the host. Files that are broken leave
    nothing wrong on the host."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "prefill_and_decode")
    extra = {"cpu_bytes_to_use": cache_bytes(model.path, 16 * 30)}
    transfer = several(
        block_files("kv_both", tmp_path), {"kv_connector": OFFLOADING, "kv_connector_extra_config": extra}
    )
    options = {
        "kv_transfer_config": KVTransferConfig(**transfer, kv_load_failure_policy="recompute"),
        "kv_cache_memory_bytes": cache_bytes(model.path, 1024),
    }
    prompts, others = random_prompts(40, [90, 33, 64]), random_prompts(41, [120] * 5)
    loaded: list[int] = []
    load = HostBlocks.load

    def noted(blocks: HostBlocks, *args: Any) -> int:
        loaded.append(len(args[1]))
        return load(blocks, *args)

    def sources(asked: list[tuple[int, ...]]) -> tuple[bool, bool]:
        """Whether blocks were loaded, and whether from the host; no block is on the device before."""
        loaded.clear()
        before = metric(llm, "vllm:external_prefix_cache_hits")
        assert generate(llm, asked) == expected(model, asked)
        hits = metric(llm, "vllm:external_prefix_cache_hits") - before
        for _ in range(3):
            generate(llm, PROMPTS[1:2])  # Stores begin with the next step.
            if llm.reset_prefix_cache():
                return hits > 0, bool(loaded)
        raise AssertionError("blocks are still in use")

    def forget_files() -> None:
        for file in tmp_path.iterdir():
            file.unlink()

    with patch.object(HostBlocks, "load", noted), engine(model.path, **EAGER, **options) as llm:
        assert sources(prompts) == (False, False)
        assert sources(prompts) == (True, False)
        forget_files()
        assert sources(prompts) == (True, True)
        assert sources(others) == (False, False)  # They take the host's memory.
        for file in sorted(tmp_path.iterdir())[::2]:
            file.write_bytes(file.read_bytes()[:100])
        sources(prompts)
        forget_files()
        assert sources(prompts) == (True, True)


def with_connector(**options: Any) -> Any:
    """A config that is served, with ``KeptBlocks`` unless another connector is given."""
    config: Any = deepcopy(SERVED)
    config.model_config.enable_sleep_mode = False
    config.kv_transfer_config = KVTransferConfig(**(transfer_config("fail") | options))
    check_connector(config)
    return config


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("model_config.runner_type", "pooling", "pooling models"),
        ("model_config.is_mm_prefix_lm", True, "see each other"),
        ("model_config.attention_chunk_size", 64, "attention in chunks"),
        ("model_config.enable_sleep_mode", True, "leave out enable_sleep_mode"),
        ("model_config.is_hybrid", True, "recurrent layers"),
        ("scheduler_config.async_scheduling", True, 'set kv_load_failure_policy="fail" or async_scheduling=False'),
        *(
            ("kv_transfer_config.kv_connector", name, f"the KV connector {name} is not supported: {reason}")
            for name, reason in OF_VLLM.items()
        ),
        ("kv_transfer_config.kv_connector", "Undeclared", "Undeclared does not say that it moves whole blocks"),
    ],
)
def test_refusals(setting: str, value: Any, message: str) -> None:
    config = with_connector(kv_load_failure_policy="recompute")
    config.model_config.is_multimodal_model = True
    *path, name = setting.split(".")
    setattr(reduce(getattr, path, config), name, value)
    with pytest.raises(UnsupportedConfigError, match=message):
        check_connector(config)


class BetweenSteps(KeptBlocks):
    loads_between_steps = True


class WithEvents(BetweenSteps):
    def get_kv_connector_kv_cache_events(self) -> None:
        raise AssertionError


class WithHandshake(BetweenSteps):
    def get_handshake_metadata(self) -> None:
        raise AssertionError


class OfGroups(BetweenSteps, SupportsHMA):
    request_finished = KVConnectorBase_V1.request_finished

    def request_finished_all_groups(self, *args: Any) -> tuple[bool, None]:
        return False, None


class WithFigures(KeptBlocks):
    """A connector for a list that vLLM would fail on, in the process of the server."""

    loads_between_steps = True

    def get_kv_connector_stats(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([], "lists no connector"),
        ([{}], "lists no connector"),
        ([several()], "inside of MultiConnector"),
        ([{"kv_connector": OFFLOADING}] * 2, "listed more than once"),
        ([{"kv_connector": "NixlConnector"}, {"kv_connector": OFFLOADING}], "NixlConnector is not supported"),
        ([transfer_config(), {"kv_connector": OFFLOADING}], "KeptBlocks may load inside of a step, and the other"),
        ([transfer_config() | {"kv_connector": "Undeclared"}], "Undeclared does not say"),
        ([{"kv_connector": "WithFigures", "kv_connector_module_path": __name__}], "WithFigures reports figures"),
        ([{"kv_connector": OFFLOADING, "kv_connector_extra_config": {"spec_name": "CPU"}}], "leave spec_name out"),
        ([{"kv_connector": OFFLOADING, "engine_id": "a"}], "engine_id is one for all"),
        ([{"kv_connector": OFFLOADING, "kv_load_failure_policy": "fail"}], "kv_load_failure_policy is one for all"),
        ([{"kv_connector": "WithEvents", "kv_connector_module_path": __name__}], "WithEvents reports events"),
        ([{"kv_connector": "OfGroups", "kv_connector_module_path": __name__}], "which OfGroups does not have"),
        (
            [{"kv_connector": "WithHandshake", "kv_connector_module_path": __name__}, {"kv_connector": OFFLOADING}],
            "hands the metadata of .*WithHandshake",
        ),
    ],
)
def test_refused_lists(listed: list[dict[str, Any]], message: str) -> None:
    config = with_connector()
    config.kv_transfer_config = KVTransferConfig(**several(*listed) | {"kv_load_failure_policy": "recompute"})
    offload_by_the_base(config)
    with pytest.raises(UnsupportedConfigError, match=message):
        check_connector(config)


def test_a_size_chooses_a_connector() -> None:
    """vLLM names it for ``kv_offloading_size`` when the platform has checked the config, in place of the user's."""
    config = with_connector()
    config.cache_config.kv_offloading_size, config.cache_config.kv_offloading_backend = 1, "native"
    with pytest.raises(UnsupportedConfigError, match="takes the place of the KV connector KeptBlocks"):
        check_connector(config)
    config.kv_transfer_config = None
    offload_by_the_base(config)
    check_connector(config)
    config.cache_config.kv_offloading_backend = "lmcache"
    with pytest.raises(UnsupportedConfigError, match=r"the KV connector LMCache\w+ is not supported"):
        check_connector(config)


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"spec_name": "CPUOffloadingSpec"}, "leave spec_name out"), ({"canonical_layout": True}, "cuts blocks by heads")],
)
def test_refused_ways_to_offload(extra: dict[str, Any], message: str) -> None:
    config = with_connector()
    config.kv_transfer_config = None
    offload_by_the_base(config)
    assert config.kv_transfer_config is None
    transfer = KVTransferConfig("OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    config.kv_transfer_config = transfer
    offload_by_the_base(config)
    assert (transfer.kv_connector_extra_config == extra | HOST_SPEC) == ("spec_name" not in extra)
    with pytest.raises(UnsupportedConfigError, match=message):
        check_connector(config)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_blocks_that_are_named_late_are_an_error(has_drafts: bool) -> None:
    """A request goes back if its first step is made again; later the host lacks its tokens, and says so."""
    requests, admitted = RequestStates(2, 64), []
    part: Any = SimpleNamespace(
        rows_of=lambda req_ids: None, stop=lambda: None, admit=lambda row, info, token_ids: admitted.append(token_ids)
    )
    row = requests.admit("a", RequestInfo(None, 0, [*range(10)]), [*range(10)], 0)
    nothing: Any = None
    updates = StateUpdates(requests, [], part, part, nothing, nothing, part, nothing)

    def go_on(num_computed: int, num_tokens: int) -> None:
        requests.num_computed[row] = 12
        step = Schedule(set(), (), [], ["a"], [None], {"a": num_tokens}, num_tokens, [num_computed])
        updates.take_back(step, has_drafts)

    go_on(12, 1)
    assert not admitted
    go_on(4, 6)
    assert admitted == [[*range(10)]] * 2 and requests.num_computed[row] == 4
    with pytest.raises(RuntimeError, match="blocks of a were not loaded, after the request's first step"):
        go_on(4, 8)
    if has_drafts:
        go_on(11, 1)  # A draft was wrong.
    else:
        with pytest.raises(RuntimeError, match="after the request's first step"):
            go_on(11, 1)
