"""The examples as a reader runs them, each in a process of its own; texts are those of HF transformers."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import BUNDLED_MODEL
from PIL import Image
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    LlavaForConditionalGeneration,
)

from model_runner_base.testing.adapters import TinyAdapter
from model_runner_base.testing.pooling import TOLERANCE

ROOT = Path(__file__).parents[2]
LIGHT = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "XLA_FLAGS")}
"""Settings with which tests end sooner."""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Setting that spares a second process, in which all would be imported again: two of the examples show that."""


PARAPHRASES = {
    "god made the sky and the earth": "In the beginning God created the heaven and the earth.",
    "gentle answer turns anger": "A soft answer turneth away wrath: but grievous words stir up anger.",
    "blessed are those who make peace": "Blessed are the peacemakers: for they shall be called the children of God.",
    "go to the ant you lazy man": "Go to the ant, thou sluggard; consider her ways, and be wise:",
}
"""Verses by queries that find them."""
DOCUMENTED = {
    "What is the capital of China?": "The capital of China is Beijing.",
    "Explain gravity": "Gravity is a force that attracts two bodies towards each other. It gives weight to physical "
    "objects and is responsible for the movement of planets around the sun.",
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Brazil?": "The capital of Brazil is Brasilia.",
}
"""Pairs of vLLM's examples of embedding and of scoring."""


@cache
def greedy_text(prompt: str, count: int, model: Path = BUNDLED_MODEL) -> str:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = AutoModelForCausalLM.from_pretrained(model, dtype="float32").generate(
        ids, max_new_tokens=count, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def run(name: str, *arguments: str, **variables: str) -> str:
    """Output of an example, without its messages."""
    out = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING", **LIGHT, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


def check_offline_inference(printed: str) -> None:
    prompts = [
        ("In the beginning God created", 32),
        ("And it came to pass, when the king heard", 8),
        ("Blessed are they that", 16),
        ("The LORD is my shepherd;", 24),
    ]
    lines = [f"Prompt: {prompt!r}, Generated text: {greedy_text(prompt, count)!r}" for prompt, count in prompts]
    assert [line for line in printed.splitlines() if line.startswith("Prompt: ")] == lines


def check_openai_server(printed: str) -> None:
    assert f"Completion: {greedy_text('A wise man', 24)!r}\n" in printed
    assert re.search(r"^Chat: .{20,}$", printed, re.MULTILINE)


def check_bucketing(printed: str) -> None:
    graphs = [line.split(", ") for line in printed.splitlines() if line.startswith("Graph: ")]
    kinds = [graph[0].removeprefix("Graph: ") for graph in graphs]
    numbers = [{name: int(count) for count, name in (part.split(" ", 1) for part in graph[1:])} for graph in graphs]
    assert kinds == ["decode", "decode", "mixed", "mixed"]
    assert all(size["requests"] == 2 for size in numbers)
    # Two requests' contexts of 64 and 128 tokens in tiles of 64, and a pair of padding.
    assert [size["decode pairs"] for size in numbers[:2]] == [3, 5]
    assert [size["chunk tokens"] for size in numbers[2:]] == [32, 64]
    prompt = "And the angel said unto her, Fear not: " * 6
    num_tokens = len(AutoTokenizer.from_pretrained(BUNDLED_MODEL)(prompt).input_ids)
    assert 64 < num_tokens < 128
    assert f"Prompt of {num_tokens} tokens, Generated text: {greedy_text(prompt, 16)!r}\n" in printed
    assert re.search(r"^Refused: .*\b128\b", printed, re.MULTILINE)


def check_override_config(printed: str) -> None:
    for prompt in ("In the beginning God created", "A wise man"):
        assert f"Prompt: {prompt!r}, Generated text: {greedy_text(prompt, 24)!r}\n" in printed


@pytest.mark.parametrize("drafts", [pytest.param("draft_model", marks=pytest.mark.full), "eagle"])
def test_speculative_decoding(drafts: str) -> None:
    """Texts are those of the model alone, in fewer steps than tokens."""
    printed = run("speculative_decoding.py", drafts, **IN_PROCESS)
    for prompt in ("In the beginning God created", "And it came to pass, when the king heard", "A wise man"):
        assert f"Prompt: {prompt!r}, Generated text: {greedy_text(prompt, 48)!r}\n" in printed
    line = re.search(r"^Tokens a step of a request: ([0-9.]+)$", printed, re.MULTILINE)
    assert line and 1.5 < float(line[1]) <= 4


def test_adapter(tmp_path: Path) -> None:
    """The bundled adapter's texts are those of the model with it merged, and not the model's own."""
    adapter = BUNDLED_MODEL.with_name("kjv-modern")
    copy = Path(shutil.copytree(adapter, tmp_path / adapter.name))
    merged = TinyAdapter(adapter.name, 1, copy, BUNDLED_MODEL).merged.path
    prompts = ["And the king said unto David, Thou hast", "Then said Moses,"]
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    options = ["--temperature", "0", "--max-tokens", "24", "--enforce-eager"]
    printed = re.sub("\033\\[[0-9]*m", "", run("generate.py", "--lora", *options, *arguments))
    for prompt in prompts:
        text = greedy_text(prompt, 24, merged)
        assert text != greedy_text(prompt, 24)
        assert f"\n{prompt}{text}\n" in printed, printed


def test_pictures() -> None:
    """The toy that sees says of the bundled pictures what it says in HF transformers, and that is right."""
    path = BUNDLED_MODEL.with_name("shapes")
    processor = AutoProcessor.from_pretrained(path)
    model = LlavaForConditionalGeneration.from_pretrained(path, dtype="float32")
    printed = re.sub("\033\\[[0-9]*m", "", run("generate.py", "--image", "--temperature", "0", "--enforce-eager"))
    answers = printed.split("\n<image>")[1:]
    pictures = sorted((path / "pictures").iterdir())
    assert len(answers) == 2 * len(pictures) == 6
    for index, answer in enumerate(answers):
        picture = pictures[index // 2]
        colour, shape = picture.stem.split("-")
        question = ("What is in the picture?", "Which colour is it?")[index % 2]
        inputs = processor(text=[f"<image>{question}"], images=[Image.open(picture)], return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        text = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer.split("\n")[0] == f"{question}{text}", printed
        assert (text.strip() == f"{colour.capitalize()}.") if index % 2 else text.startswith(f" A {colour} {shape} ")


@torch.no_grad()
def vectors(texts: list[str]) -> torch.Tensor:
    """Normalised vectors [texts, hidden] of the bundled embedding model."""
    path = BUNDLED_MODEL.with_name("kjv-embed")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path, dtype="float32")
    means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


def test_ranks(tmp_path: Path) -> None:
    """The verse that a query rewords comes first; order and cosines are those of HF transformers."""
    pairs = PARAPHRASES | DOCUMENTED
    queries, sentences = list(pairs), list(pairs.values())
    file = tmp_path / "sentences.txt"
    file.write_text("\n".join(sentences))
    arguments = [part for query in queries for part in ("--query", query)]
    printed = run("rank.py", "--enforce-eager", "--file", str(file), "--top", str(len(sentences)), *arguments)
    blocks = [block.splitlines() for block in printed.split("\n\n") if block.strip()][-len(queries) :]
    for (query, *lines), cosines in zip(blocks, vectors(queries) @ vectors(sentences).T, strict=True):
        got = {line[9:]: float(line[:7]) for line in lines}
        want = dict(sorted(zip(sentences, cosines.tolist(), strict=True), key=lambda pair: -pair[1]))
        assert list(got) == list(want), query
        assert got == pytest.approx(want, abs=TOLERANCE), query
        if query in PARAPHRASES:
            assert next(iter(got)) == PARAPHRASES[query]


def check_cache_on_host(printed: str) -> None:
    first, again = re.findall(r"(?:at first|again), (\d+) tokens of the prompt copied: (.*)", printed)
    assert int(first[0]) == 0 and int(again[0]) >= 32 and first[1] == again[1], printed


@pytest.mark.parametrize(
    ("check", "variables"),
    [
        (check_cache_on_host, {}),
        (check_offline_inference, {}),
        (check_openai_server, {}),
        pytest.param(check_bucketing, {}, marks=pytest.mark.full),
        pytest.param(check_override_config, IN_PROCESS, marks=pytest.mark.full),
    ],
)
def test_example(check: Callable[[str], None], variables: dict[str, str]) -> None:
    check(run(f"{check.__name__.removeprefix('check_')}.py", **variables))


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda file: file.name)
def test_an_example_may_be_imported_by_the_processes_that_it_starts(file: Path) -> None:
    """vLLM's processes import the script again, where they are spawned: without a guard it would start over there."""
    *_, last = ast.parse(file.read_text()).body
    assert isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'"
