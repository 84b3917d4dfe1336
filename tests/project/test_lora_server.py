"""LoRA adapters in the real server, by the real client: each answer is that of a model with the adapter merged."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from serving import served

from model_runner_base.testing.adapters import ATTENTION, EVERYWHERE, TinyAdapter, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_lora import wider
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.tokenizer import add_tokenizer

NUM_ADAPTERS, NUM_CLIENTS, NEW_TOKENS = 6, 16, 12
LIMITS = {
    "max-loras": 2,
    "max-cpu-loras": 4,
    "max-lora-rank": 16,
    "max-model-len": 256,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,
    "dtype": "float32",
    "kv-cache-memory-bytes": 8 << 20,
}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return add_tokenizer(tiny_model("llama"))


@pytest.fixture(scope="module")
def adapters(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> list[TinyAdapter]:
    """Adapters, more than the host has places for; the first is loaded from the start."""
    directory = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(model.path, directory, number, rank=rank, targets=EVERYWHERE if number % 2 else ATTENTION)
        for number, rank in enumerate([8, 1, 16, 4, 2, 8], 1)
    ]


@pytest.fixture(scope="module")
def server(model: TinyModel, adapters: Sequence[TinyAdapter]) -> Iterator[str]:
    """Server that runs eager, since the kit tests what runs beneath."""
    first = adapters[0]
    arguments = [part for name, value in LIMITS.items() for part in (f"--{name}", str(value))]
    lora = ["--enable-lora", "--lora-modules", f"{first.name}={first.path}", "--served-model-name", "base"]
    with served(model.path, *arguments, *lora, "--enforce-eager", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0)


def load(server: str, name: str, path: Path) -> httpx.Response:
    return httpx.post(f"{server}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}, timeout=60)


def unload(server: str, name: str) -> httpx.Response:
    return httpx.post(f"{server}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)


def names(client: openai.OpenAI) -> set[str]:
    return {model.id for model in client.models.list()}


def complete(client: openai.OpenAI, name: str, prompt: Sequence[int]) -> list[int]:
    body = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model=name, prompt=list(prompt), max_tokens=NEW_TOKENS, temperature=0, extra_body=body
    )
    return answer.choices[0].token_ids  # type: ignore[attr-defined]


def check_unharmed(client: openai.OpenAI, model: TinyModel, first: TinyAdapter) -> None:
    (prompt,) = random_prompts(1, [20])
    assert complete(client, "base", prompt) == model.greedy(prompt, NEW_TOKENS)
    assert complete(client, first.name, prompt) == first.merged.greedy(prompt, NEW_TOKENS)


def test_adapter_of_the_command_line(client: openai.OpenAI, model: TinyModel, adapters: Sequence[TinyAdapter]) -> None:
    assert names(client) == {"base", adapters[0].name}
    check_unharmed(client, model, adapters[0])


def test_load_use_and_unload(
    server: str, client: openai.OpenAI, model: TinyModel, adapters: Sequence[TinyAdapter]
) -> None:
    (prompt,) = random_prompts(2, [70])
    second = adapters[1]
    with pytest.raises(openai.NotFoundError):
        complete(client, second.name, prompt)
    for _ in range(2):
        assert load(server, second.name, second.path).status_code == 200
        assert names(client) == {"base", adapters[0].name, second.name}
        assert complete(client, second.name, prompt) == second.merged.greedy(prompt, NEW_TOKENS)
        assert unload(server, second.name).status_code == 200
        assert names(client) == {"base", adapters[0].name}
        with pytest.raises(openai.NotFoundError):
            complete(client, second.name, prompt)
    check_unharmed(client, model, adapters[0])


def test_clients_that_mix_adapters(
    server: str, client: openai.OpenAI, model: TinyModel, adapters: Sequence[TinyAdapter]
) -> None:
    """Sixteen clients at once use more adapters than slots and than places on the host, while one loads and unloads."""
    rng = np.random.default_rng(3)
    for adapter in adapters[1:]:
        assert load(server, adapter.name, adapter.path).status_code == 200
    sides = [("base", model), *((adapter.name, adapter.merged) for adapter in adapters)]
    chosen = rng.integers(0, len(sides), 4 * NUM_CLIENTS).tolist()
    prompts = random_prompts(3, rng.choice([1, 9, 40, 80, 120], len(chosen)).tolist())

    def churn() -> None:
        for _ in range(8):
            assert unload(server, adapters[-1].name).status_code == 200
            assert load(server, adapters[-1].name, adapters[-1].path).status_code == 200

    with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
        changes = pool.submit(churn)
        # The last adapter comes and goes, so no request names it yet.
        answers = [
            pool.submit(complete, client, sides[min(index, NUM_ADAPTERS - 1)][0], prompt)
            for index, prompt in zip(chosen, prompts, strict=True)
        ]
        got = [answer.result() for answer in answers]
        changes.result()
    expected = [
        sides[min(index, NUM_ADAPTERS - 1)][1].greedy(prompt, NEW_TOKENS)
        for index, prompt in zip(chosen, prompts, strict=True)
    ]
    assert got == expected
    (prompt,) = random_prompts(4, [30])
    assert complete(client, adapters[-1].name, prompt) == adapters[-1].merged.greedy(prompt, NEW_TOKENS)


def _missing(model: TinyModel, directory: Path) -> Path:
    return directory / "nowhere"


def _wrong_shape(model: TinyModel, directory: Path) -> Path:
    return make_adapter(wider(directory), directory, 61).path


def _rank(model: TinyModel, directory: Path) -> Path:
    return make_adapter(model.path, directory, 62, rank=32).path


def _dora(model: TinyModel, directory: Path) -> Path:
    return make_adapter(model.path, directory, 63, use_dora=True).path


def _no_json(model: TinyModel, directory: Path) -> Path:
    path = make_adapter(model.path, directory, 64).path
    (path / "adapter_config.json").write_text(json.dumps({"r": 8})[:-1])
    return path


@pytest.mark.parametrize(
    ("make", "status", "words"),
    [
        (_missing, 404, "No adapter found"),
        (_wrong_shape, 400, "does not fit"),
        (_rank, 400, "max_lora_rank"),
        (_dora, 400, "DoRA"),
        (_no_json, 400, ""),
    ],
)
def test_bad_adapter_is_refused(
    make: Callable[[TinyModel, Path], Path],
    status: int,
    words: str,
    server: str,
    client: openai.OpenAI,
    model: TinyModel,
    adapters: Sequence[TinyAdapter],
    tmp_path: Path,
) -> None:
    """A bad adapter is refused in words. Nothing else changes, and its name is free for a good one."""
    before, name = names(client), make.__name__
    answer = load(server, name, make(model, tmp_path))
    assert answer.status_code == status and words in answer.text, answer.text
    assert names(client) == before
    check_unharmed(client, model, adapters[0])
    good = make_adapter(model.path, tmp_path, 70)
    assert load(server, name, good.path).status_code == 200
    (prompt,) = random_prompts(5, [20])
    assert complete(client, name, prompt) == good.merged.greedy(prompt, NEW_TOKENS)
    assert unload(server, name).status_code == 200


def test_name_that_is_taken(
    server: str, client: openai.OpenAI, model: TinyModel, adapters: Sequence[TinyAdapter], tmp_path: Path
) -> None:
    """A name that is taken is refused; so is one that stood for other files before, as prefixes are cached by name."""
    first = adapters[0]
    other = make_adapter(model.path, tmp_path, 80)
    answer = load(server, first.name, other.path)
    assert answer.status_code == 400 and "already been loaded" in answer.text
    assert load(server, "passing", other.path).status_code == 200
    assert unload(server, "passing").status_code == 200
    answer = load(server, "passing", first.path)
    assert answer.status_code == 400 and "stood for other files before" in answer.text, answer.text
    assert unload(server, "passing").status_code == 404
    check_unharmed(client, model, first)
