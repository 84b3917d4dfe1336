"""An engine for prompts and one for the tokens after them, as ``examples/prefill_and_decode`` has them."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from conftest import engine
from greedy import expected, generate
from lane import ROOT
from serving import block_files

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import cache_bytes, metric
from model_runner_base.testing.models import TinyModel

pytestmark = pytest.mark.newest
EXAMPLE = ROOT / "examples" / "prefill_and_decode"
PROMPTS = random_prompts(31, [90, 5, 33, 64, 49])
LOADED = "vllm:external_prefix_cache_hits"


@pytest.fixture(autouse=True)
def _example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)


def options(model: TinyModel, role: str, directory: Path) -> dict[str, Any]:
    transfer = block_files(role, directory)
    memory = cache_bytes(model.path, 1024)
    return {"enforce_eager": True, "block_size": 16, "kv_cache_memory_bytes": memory, "kv_transfer_config": transfer}


def test_two_engines(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """Tokens are those of one engine: blocks of prompts come from the first, or are computed if a file is broken."""
    model, half = tiny_model("llama"), tmp_path / "block.half"
    half.touch()  # An engine was killed while it wrote it.
    os.utime(half, (0, 0))
    with engine(model.path, **options(model, "kv_producer", tmp_path)) as llm:
        generate(llm, PROMPTS, 1)
        assert metric(llm, LOADED) == 0
    num_blocks = sum((len(prompt) - 1) // 16 for prompt in PROMPTS)
    files = sorted(tmp_path.iterdir())
    assert len(files) == num_blocks
    with engine(model.path, **options(model, "kv_consumer", tmp_path)) as llm:
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        assert metric(llm, LOADED) == 16 * num_blocks
        for file in files[::3]:
            file.write_bytes(file.read_bytes()[:100])
        llm.reset_prefix_cache()
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
    assert sorted(tmp_path.iterdir()) == files, "an engine that only reads has written"


def test_proxy() -> None:
    """The first engine gets a request for one token, then the second one the client's request; errors of either are the
    client's."""
    sys.modules.pop("proxy", None)
    from proxy import make_proxy  # type: ignore[import-not-found]

    seen: list[tuple[str, dict[str, Any]]] = []

    def stand_in(name: str) -> TestServer:
        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            seen.append((name, body))
            return web.json_response({"from": name}, status=400 if body["prompt"] == f"wrong for {name}" else 200)

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        return TestServer(app)

    async def ask(url: str, **body: Any) -> tuple[int, Any]:
        async with ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
            return response.status, json.loads(await response.text())

    async def run() -> list[tuple[int, Any]]:
        async with stand_in("prefill") as prefill, stand_in("decode") as decode:
            app = make_proxy(*(str(server.make_url("")).rstrip("/") for server in (prefill, decode)))
            async with TestServer(app) as proxy:
                url = str(proxy.make_url("")).rstrip("/")
                prompts = "right", "wrong for prefill", "wrong for decode"
                return [await ask(url, prompt=prompt, max_tokens=7) for prompt in prompts]

    answers = asyncio.run(run())
    assert answers == [(200, {"from": "decode"}), (400, {"from": "prefill"}), (400, {"from": "decode"})]
    assert [(name, body["max_tokens"]) for name, body in seen] == [
        ("prefill", 1),
        ("decode", 7),
        ("prefill", 1),
        ("prefill", 1),
        ("decode", 7),
    ]
