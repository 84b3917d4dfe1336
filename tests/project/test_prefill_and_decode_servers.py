"""Two servers and a proxy as the docs start them, each a process of its own; what a client sees if one is killed."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from conftest import BUNDLED_MODEL
from lane import ROOT
from serving import block_files, served

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.server import gauge, wait_until_idle

pytestmark = pytest.mark.newest
EXAMPLE = ROOT / "examples" / "prefill_and_decode"
PROMPTS = random_prompts(34, [90, 5, 33])
SMALL = ["--max-model-len", "512", "--max-num-seqs", "4", "--block-size", "16", "--enforce-eager"]
ASKED = "vllm:prompt_tokens_total"
LOADED = "vllm:external_prefix_cache_hits_total"


def options(role: str, directory: Path) -> list[str]:
    transfer = block_files(role, directory)
    return [*SMALL, "--kv-cache-memory-bytes", str(1 << 26), "--kv-transfer-config", json.dumps(transfer)]


@contextmanager
def proxied(prefill: str, decode: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(EXAMPLE / "proxy.py"), str(port), prefill, decode])
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                httpx.get(url)
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline, "the proxy does not answer"
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def body(prompt: tuple[int, ...], count: int, **others: Any) -> dict[str, Any]:
    what = {"model": str(BUNDLED_MODEL), "prompt": list(prompt), "max_tokens": count, "temperature": 0}
    return what | {"ignore_eos": True, "return_token_ids": True} | others


def ask(url: str, prompt: tuple[int, ...], count: int = 12) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body(prompt, count), timeout=120)


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def processes_of(url: str) -> list[psutil.Process]:
    """The process at a port, and the processes that it has started."""
    port = url.rsplit(":", 1)[1]
    (first,) = (each for each in psutil.Process().children(recursive=True) if port in each.cmdline())
    return [first, *first.children(recursive=True)]


def named(part: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if part in each.cmdline()[0]]


def kill(processes: list[psutil.Process]) -> None:
    assert processes
    for process in processes:
        process.kill()


def cut_answer(url: str, prompt: tuple[int, ...], processes: list[psutil.Process]) -> list[str]:
    """Lines that come of a streamed answer while the processes are killed after the first one."""
    lines = []
    asked = body(prompt, 400, stream=True)
    with (
        suppress(httpx.RemoteProtocolError, httpx.ReadError),
        httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=120) as got,
    ):
        for line in got.iter_lines():
            if not lines:
                kill(processes)
            lines.append(line)
    assert lines and not any('"finish_reason":"length"' in line for line in lines), "an answer that is cut looks whole"
    return lines


@contextmanager
def ending(url: str) -> Iterator[list[psutil.Process]]:
    """Yields the processes of a server that is killed in this context, and waits until nothing is left of it."""
    started = processes_of(url)
    mapped = {Path(each.path) for process in started for each in process.memory_maps()}
    shared = {path for path in mapped if path.parent == Path("/dev/shm")}
    assert shared or not named("Worker_TP", started)
    yield started
    _, left = psutil.wait_procs(started, timeout=120)
    assert not left, [each.cmdline() for each in left]
    assert not any(path.exists() for path in shared)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))


def test_a_rank_with_blocks_on_the_host_is_killed() -> None:
    """A client sees an error while its answer comes. The server ends, and leaves no process and no shared memory."""
    ranks = ["--tensor-parallel-size", "2", "--kv-offloading-size", "0.01"]
    with served(BUNDLED_MODEL, *SMALL, "--kv-cache-memory-bytes", str(1 << 24), *ranks) as url:
        (prompt,) = random_prompts(36, [90])
        assert tokens_of(ask(url, prompt)) == TinyModel(BUNDLED_MODEL).greedy(prompt, 12)
        with ending(url) as started:
            lines = cut_answer(url, prompt, named("Worker_TP1", started))
            assert any('"error"' in line for line in lines), lines[-3:]


def test_two_servers(tmp_path: Path) -> None:
    """Tokens are right through a proxy. Then the proxy, both engine cores and an API server are killed in turn."""
    model = TinyModel(BUNDLED_MODEL)
    wanted = [model.greedy(prompt, 12) for prompt in PROMPTS]
    path = {"PYTHONPATH": f"{EXAMPLE}:{':'.join(filter(None, sys.path))}"}
    with ExitStack() as stack:
        prefill, decode, other = (
            stack.enter_context(served(BUNDLED_MODEL, *options(role, tmp_path), **path))
            for role in ("kv_producer", "kv_consumer", "kv_consumer")
        )
        proxy, killed = (stack.enter_context(proxied(prefill, decode)) for _ in range(2))
        assert [tokens_of(ask(proxy, prompt)) for prompt in PROMPTS] == wanted
        assert gauge(decode, LOADED) == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)
        new, long = random_prompts(35, [70, 400])
        num_asked = gauge(decode, ASKED)
        assert ask(proxy, new * 10).status_code == 400, "the client's fault"
        assert gauge(decode, ASKED) == num_asked, "the decode engine is asked for what the other one refuses"

        with ending(killed) as started:
            lines = cut_answer(killed, new, started)
            assert not any('"error"' in line or "[DONE]" in line for line in lines)
        wait_until_idle(decode, 120)  # It does not go on for a client that is gone.

        files = {*tmp_path.iterdir()}
        with ending(prefill) as started, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, proxy, long)
            while files == {*tmp_path.iterdir()}:
                assert not answer.done(), "the prefill engine writes nothing"
                time.sleep(0.001)
            kill(named("EngineCore", started))
            assert tokens_of(answer.result()) == model.greedy(long, 12)
        for file in tmp_path.glob("*.0"):
            torch.load(file, weights_only=True)
        assert tokens_of(ask(proxy, new)) == model.greedy(new, 12), "the decode engine computes the prompt"

        with ending(decode) as started:
            lines = cut_answer(proxy, new, named("EngineCore", started))
            assert any('"error"' in line for line in lines), lines[-3:]
        refused = ask(proxy, new)
        assert refused.status_code == 503 and "does not answer" in refused.json()["error"]["message"]

        proxy = stack.enter_context(proxied(prefill, other))
        with ending(other) as started:
            lines = cut_answer(proxy, new, started[:1])
            assert not any("[DONE]" in line for line in lines)
        assert ask(proxy, new).status_code == 503
