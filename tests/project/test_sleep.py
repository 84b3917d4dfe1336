"""Development routes of the real `vllm serve` that this engine does not follow: words and a server that goes on."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import BUNDLED_MODEL, engine
from lane import HAS_OPENXLA
from serving import served
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

SMALL = ("--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--enforce-eager")

CAN_PAUSE = not HAS_OPENXLA
"""Level 0 of the newest vLLM's sleep only pauses the scheduler."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(BUNDLED_MODEL, *SMALL, VLLM_SERVER_DEV_MODE="1") as url:
        yield url


@pytest.fixture(scope="module")
def routes(server: str) -> set[str]:
    return set(httpx.get(f"{server}/openapi.json", timeout=60).json()["paths"])


@pytest.fixture(autouse=True)
def serves_after_each_test(server: str) -> Iterator[None]:
    yield
    body = {"model": str(BUNDLED_MODEL), "prompt": "In the", "max_tokens": 4}
    response = httpx.post(f"{server}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text


def post(server: str, route: str, **body: Any) -> tuple[int, str]:
    response = httpx.post(f"{server}{route}", json=body or None, timeout=60)
    return response.status_code, response.text


@pytest.mark.parametrize("query", ["", "?level=1", "?level=2"])
def test_sleep_is_refused(server: str, query: str) -> None:
    status, text = post(server, f"/sleep{query}")
    assert status == 400 and "this engine does not sleep: start it with enable_sleep_mode=True" in text
    assert httpx.get(f"{server}/is_sleeping").json() == {"is_sleeping": False}
    assert post(server, "/wake_up")[0] == 200, "it is awake"


def test_level_0_pauses_where_vllm_knows_it(server: str) -> None:
    status, text = post(server, "/sleep?level=0")
    assert httpx.get(f"{server}/is_sleeping").json() == {"is_sleeping": CAN_PAUSE}
    if CAN_PAUSE:
        assert status == 200
        assert post(server, "/sleep?level=1")[0] == 400
        assert httpx.get(f"{server}/is_sleeping").json() == {"is_sleeping": True}, "a refusal changed the pause"
        assert post(server, "/wake_up")[0] == 200
    else:
        assert status == 400 and "this engine does not sleep: start it with enable_sleep_mode=True" in text


def test_the_cache_alone_is_not_released_either(server: str, routes: set[str]) -> None:
    if "/release_kv_cache_memory" not in routes:
        pytest.skip("this vLLM has no such route")
    status, text = post(server, "/release_kv_cache_memory")
    assert status == 400 and "this engine does not sleep: start it with enable_sleep_mode=True" in text


@pytest.mark.parametrize(
    ("route", "body", "method"),
    [
        ("/collective_rpc", {"method": "no_such_method"}, "no_such_method"),
        ("/weight_checker", {"action": "checksum"}, "compute_weight_checksums"),
    ],
)
def test_what_the_workers_do_not_have_is_named(
    server: str, routes: set[str], route: str, body: dict[str, Any], method: str
) -> None:
    if route not in routes:
        pytest.skip("this vLLM has no such route")
    status, text = post(server, route, **body)
    assert status == 400 and f"the workers of this device have no method '{method}'" in text, text


def test_workers_that_are_called_directly_do_not_sleep_either(server: str, routes: set[str]) -> None:
    status, text = post(server, "/collective_rpc", method="sleep")
    assert status == 400 and "this engine does not sleep" in text, text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/update_weights", {"update_info": {}}),
        ("/start_weight_update", {}),
        ("/finish_weight_update", {}),
        ("/start_draft_weight_update", {}),
        ("/shutdown_weight_transfer_engine", {}),
    ],
)
def test_weight_transfer_that_is_not_configured(
    server: str, routes: set[str], route: str, body: dict[str, Any]
) -> None:
    if route not in routes:
        pytest.skip("this vLLM has no such route")
    status, text = post(server, route, **body)
    assert status == 400 and "not configured: set weight_transfer_config" in text, text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/reset_prefix_cache", {}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/reset_mm_cache", {}),
        ("/reset_encoder_cache", {}),
        ("/collective_rpc", {"method": "check_health"}),
    ],
)
def test_caches_are_reset_and_workers_are_called(server: str, route: str, body: dict[str, Any]) -> None:
    assert post(server, route, **body)[0] == 200


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_pause_and_resume(server: str, mode: str) -> None:
    assert post(server, f"/pause?mode={mode}")[0] == 200
    assert post(server, "/resume")[0] == 200
    assert httpx.get(f"{server}/is_paused").json() == {"is_paused": False}


def test_offline_it_is_a_value_error() -> None:
    def generate(llm: LLM) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": [5, 17, 300]}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    with engine(BUNDLED_MODEL, max_model_len=64, enforce_eager=True) as llm:
        before = generate(llm)
        with pytest.raises(ValueError, match=r"^this engine does not sleep"):
            llm.sleep(level=1)
        llm.wake_up()
        assert generate(llm) == before


def test_sleep_mode_is_refused_at_the_start_of_a_device_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: False)
    with (
        pytest.raises(ValueError, match=r"(?i)sleep mode is not supported"),
        engine(BUNDLED_MODEL, enable_sleep_mode=True),
    ):
        pass


def test_a_server_that_sleeps() -> None:
    """Requests to a sleeping server get status 400, or wait until it is awake; the text is the same after sleep."""
    body = {"model": str(BUNDLED_MODEL), "prompt": "In the", "max_tokens": 4, "temperature": 0}
    with served(BUNDLED_MODEL, *SMALL, "--enable-sleep-mode", VLLM_SERVER_DEV_MODE="1") as url:

        def text() -> str:
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["text"])

        before = text()
        for level in (1, 2):
            assert post(url, f"/sleep?level={level}")[0] == 200
            assert httpx.get(f"{url}/is_sleeping").json() == {"is_sleeping": True}
            if CAN_PAUSE:
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{url}/v1/completions", json=body, timeout=2)
            else:
                status, words = post(url, "/v1/completions", **body)
                assert status == 400 and "the engine sleeps (kv_cache, weights): wake it up first" in words
            status, words = post(url, "/collective_rpc", method="reload_weights")
            assert status == 400 and "weights sleep: call wake_up" in words
            assert post(url, "/wake_up?tags=weights")[0] == 200
            if level == 2:
                assert post(url, "/collective_rpc", method="reload_weights")[0] == 200
            assert post(url, "/wake_up?tags=kv_cache")[0] == 200
            assert text() == before
