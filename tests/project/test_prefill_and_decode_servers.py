"""Two servers and a proxy as the docs start them, each a process of its own; what a client sees if one is killed."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import BUNDLED_MODEL
from lane import ROOT
from serving import block_files, served

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.server import gauge

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
    return httpx.post(f"{url}/v1/completions", json=body(prompt, count), timeout=60)


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def processes_of(url: str) -> list[psutil.Process]:
    """The server at a port, and the processes that it has started, of which one is the engine's."""
    port = url.rsplit(":", 1)[1]
    children = psutil.Process().children(recursive=True)
    (server,) = (each for each in children if "serve" in each.cmdline() and port in each.cmdline())
    return [server, *server.children(recursive=True)]


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def cut_answer(url: str, prompt: tuple[int, ...], processes: list[psutil.Process]) -> list[str]:
    """Lines that come of a streamed answer while the processes are killed after the first one."""
    lines = []
    asked = body(prompt, 400, stream=True)
    with (
        suppress(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as got,
    ):
        for line in got.iter_lines():
            if not lines:
                kill(processes)
            lines.append(line)
    return lines


def test_a_rank_with_blocks_on_the_host_is_killed() -> None:
    """A client sees an error while its answer comes. The server ends, and leaves no process and no shared memory."""
    ranks = ["--tensor-parallel-size", "2", "--kv-offloading-size", "0.01"]
    with served(BUNDLED_MODEL, *SMALL, "--kv-cache-memory-bytes", str(1 << 24), *ranks) as url:
        (prompt,) = random_prompts(36, [90])
        assert tokens_of(ask(url, prompt)) == TinyModel(BUNDLED_MODEL).greedy(prompt, 12)
        started = processes_of(url)
        mapped = {Path(each.path) for process in started for each in process.memory_maps()}
        shared = {path for path in mapped if path.parent == Path("/dev/shm")}
        assert shared
        lines = cut_answer(url, prompt, [each for each in started if "Worker_TP1" in each.cmdline()[0]])
        assert not any('"finish_reason":"length"' in line for line in lines), "an answer that is cut looks whole"
        assert any('"error"' in line for line in lines), lines[-3:]
        _, left = psutil.wait_procs(started, timeout=60)
        assert not left, [each.cmdline() for each in left]
    assert not any(path.exists() for path in shared)


def test_two_servers(tmp_path: Path) -> None:
    model = TinyModel(BUNDLED_MODEL)
    wanted = [model.greedy(prompt, 12) for prompt in PROMPTS]
    path = {"PYTHONPATH": f"{EXAMPLE}:{':'.join(filter(None, sys.path))}"}
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(served(BUNDLED_MODEL, *options(role, tmp_path), **path))
            for role in ("kv_producer", "kv_consumer")
        )
        proxy = stack.enter_context(proxied(prefill, decode))
        assert [tokens_of(ask(proxy, prompt)) for prompt in PROMPTS] == wanted
        assert gauge(decode, LOADED) == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)
        (new,) = random_prompts(35, [70])
        of_prefill, of_decode = processes_of(prefill), processes_of(decode)
        num_asked = gauge(decode, ASKED)
        assert ask(proxy, new * 10).status_code == 400, "the client's fault"
        assert gauge(decode, ASKED) == num_asked, "the decode engine is asked for what the other one refuses"

        kill(of_prefill)
        assert tokens_of(ask(proxy, new)) == model.greedy(new, 12), "the decode engine computes the prompt"

        lines = cut_answer(proxy, new, of_decode)
        assert lines and not any("[DONE]" in line for line in lines), "an answer that is cut looks whole"
        refused = ask(proxy, new)
        assert refused.status_code == 503 and "does not answer" in refused.json()["error"]["message"]
