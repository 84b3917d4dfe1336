"""Structured outputs: valid, and the best tokens that the grammar allows, among free requests."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import regex
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.completions import check_completions
from model_runner_base.testing.engine import check_preempted, generate, greedy, metric
from model_runner_base.testing.grammars import is_one_of, matches_regex
from model_runner_base.testing.logprobs import check_all
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Grammar, Request
from model_runner_base.testing.tokenizer import make_tokenizer

Start = Callable[..., LLM]
CHOICES = ["yes", "no", "yesterday", "the king", "and so"]
PATTERN = r"(ab|cd)[0-9]{3}(-[a-z]{2,5})?"
EBNF = 'root ::= ("north" | "south") ("-" [a-z] [a-z])*\n'
SCHEMA = {
    "type": "object",
    "properties": {
        "good": {"type": "boolean"},
        "kind": {"enum": ["wise", "foolish", 12]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["good", "kind", "list"],
    "additionalProperties": False,
}

GRAMMARS: dict[str, tuple[dict[str, Any], Grammar]] = {
    "choice": ({"choice": CHOICES}, is_one_of(CHOICES)),
    "regex": ({"regex": PATTERN}, matches_regex(PATTERN)),
    "long": ({"regex": "([a-z]|[0-9]){300}"}, matches_regex("[a-z0-9]{300}")),
    "grammar": ({"grammar": EBNF}, matches_regex("(north|south)(-[a-z][a-z])*")),
}


# The scope sorts the checks by backend: those of one share an engine.
@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def structured_engine(backend: str, text_engine: Start) -> Start:
    """An engine of each backend."""
    config = {"backend": backend, "disable_any_whitespace": True}
    return lambda: text_engine(structured_outputs_config=config)


def structured(backend: str, kind: str, length: int = 8, **options: Any) -> Request:
    """A request of one of the grammars that brute force can follow."""
    constraint, grammar = GRAMMARS[kind]
    sampling = {"temperature": 0, "max_tokens": 24} | options
    params = SamplingParams(**sampling, structured_outputs=StructuredOutputsParams(**constraint))
    return Request(random_prompts(30 + length, [length])[0], params, grammar, backend == "guidance")


def test_structural_tag(text_engine: Start, text_model: TinyModel) -> None:
    """A structural tag: free text, and a value of the schema after each trigger."""
    # By xgrammar alone: vLLM 0.16 hands guidance the schema in a form that it takes for any JSON.
    (prompt,) = random_prompts(41, [9])
    trigger = make_tokenizer().decode(text_model.greedy(prompt, 3)[2:])
    tag = {"begin": trigger, "schema": {"enum": ["wise", "foolish"]}, "end": "."}
    constraint = json.dumps({"type": "structural_tag", "structures": [tag], "triggers": [trigger]})
    params = greedy(40, structured_outputs=StructuredOutputsParams(structural_tag=constraint), detokenize=True)
    (output,) = generate(text_engine(), [prompt], params)
    first, *pieces = output.outputs[0].text.split(trigger)
    assert pieces, f"{Request(prompt, params)}: the trigger {trigger!r} never came"
    assert first == make_tokenizer().decode(text_model.greedy(prompt, 2)), f"{Request(prompt, params)}: free text"
    for piece in pieces:
        assert regex.fullmatch(r'("wise"|"foolish")\..*', piece, partial=True, flags=regex.DOTALL), (
            f"{Request(prompt, params)}: {piece!r} after the trigger {trigger!r}"
        )


@pytest.mark.parametrize("kind", ["choice", "regex", "grammar"])
def test_best_allowed_token(kind: str, backend: str, structured_engine: Start, text_model: TinyModel) -> None:
    """choice, regex and EBNF: each token is the best of those that brute force finds allowed."""
    requests = [structured(backend, kind, length) for length in (3, 20, 90)]
    assert check_completions(structured_engine(), text_model, requests), "the grammar changed nothing"


@pytest.mark.parametrize("kind", ["choice", "regex", "grammar"])
def test_drawn_tokens(kind: str, backend: str, structured_engine: Start, text_model: TinyModel) -> None:
    """Drawn tokens keep to the grammar, temperature and top_k apply to what it leaves."""
    requests = [structured(backend, kind, temperature=1.0, top_k=5, seed=seed) for seed in range(4)]
    check_completions(structured_engine(), text_model, requests)


def test_logprobs_under_a_grammar(backend: str, structured_engine: Start, text_model: TinyModel) -> None:
    """Log probabilities, raw ones too, are of what the grammar leaves."""
    requests = [structured(backend, "regex", length, logprobs=3, prompt_logprobs=1) for length in (3, 20)]
    check_all(structured_engine(), text_model, requests)


def test_different_grammars_in_a_batch(backend: str, structured_engine: Start, text_model: TinyModel) -> None:
    """Requests of one batch have different grammars, or none, and penalties in addition."""
    requests = [
        structured(backend, kind, 5 + 30 * i, repetition_penalty=1.3)
        for i, kind in enumerate(["choice", "grammar", "regex"])
    ]
    check_completions(structured_engine(), text_model, [*requests, *requests[::-1]])


def test_beside_plain_and_finished_rows(backend: str, structured_engine: Start, text_model: TinyModel) -> None:
    """Grammars beside rows without one, while requests finish and others take their rows."""
    counts = [1, 4, 9, 2]
    free = [Request(p, greedy(count)) for p, count in zip(random_prompts(42, [7] * 4), counts, strict=True)]
    kinds = ["regex", "long", "grammar", "choice"]
    constrained = [structured(backend, kind, 6 + 3 * index) for index, kind in enumerate(kinds)]
    mixed = [request for pair in zip(free, constrained, strict=True) for request in pair]
    check_completions(structured_engine(), text_model, [*mixed, *mixed[::-1]])


def test_grammar_after_preemption(backend: str, structured_engine: Start, text_model: TinyModel) -> None:
    """A grammar goes on where it was after preemption and resume."""
    llm = structured_engine()
    before = metric(llm, "vllm:num_preemptions")
    requests = [structured(backend, "long", length, max_tokens=80) for length in (60, 70, 80, 90)]
    check_completions(llm, text_model, requests, bystanders=0)
    check_preempted(llm, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schema(temperature: float, structured_engine: Start) -> None:
    """A JSON schema: the text parses and follows it."""
    prompts = random_prompts(40, [4, 30, 80])
    constraint = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=100, structured_outputs=constraint)
    outputs = generate(structured_engine(), prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        check_json(Request(prompt, params), output.outputs[0].text)


def check_json(request: Request, text: str) -> None:
    """The text is a document of SCHEMA."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise AssertionError(f"{request}: {text!r} is no JSON: {error}") from None
    is_valid = (
        document.keys() == {"good", "kind", "list"}
        and isinstance(document["good"], bool)
        and document["kind"] in ("wise", "foolish", 12)
        and len(document["list"]) in (2, 3)
        and all(isinstance(item, bool) for item in document["list"])
    )
    assert is_valid, f"{request}: {text!r} does not follow the schema"
