"""Runs requests through an engine and compares everything that comes back with the reference."""

from collections.abc import Sequence

from vllm import LLM, CompletionOutput

from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import generate, greedy
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request, check_tokens
from model_runner_base.testing.tokenizer import EOS
from model_runner_base.testing.words import show


def check_completions(llm: LLM, model: TinyModel, requests: Sequence[Request], bystanders: int = 2) -> int:
    """Runs the requests in one batch, among greedy bystanders that must come out as if they were alone.

    Returns:
        The number of tokens at which the requests' parameters mattered.

    Raises:
        AssertionError: naming the request that came out wrong.
    """
    strangers = [Request(prompt, greedy(12)) for prompt in random_prompts(99, [5, 21, 33][:bystanders])]
    # One bystander comes first and the others last, so that parameters must find their rows.
    batch = [*strangers[:1], *requests, *strangers[1:]]
    outputs = generate(llm, [request.prompt for request in batch], [request.params for request in batch])
    changed = 0
    for request, output in zip(batch, outputs, strict=True):
        completion = output.outputs[0]
        changed += check_tokens(model, request, completion.token_ids)
        check_ending(request, completion)
    return changed


def check_ending(request: Request, completion: CompletionOutput) -> None:
    """Checks that a request ends at its first stop token after ``min_tokens``, or else at ``max_tokens``; and that it
    says which."""
    params = request.params
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    tokens = list(completion.token_ids)
    ends = [i for i, token in enumerate(tokens) if token in stops and i + 1 >= params.min_tokens]
    where = f"{request}: ended with {completion.finish_reason} after {len(tokens)} tokens {show(tokens)}"
    if ends:
        reason = tokens[-1] if tokens[-1] in (params.stop_token_ids or ()) else None
        assert (ends[0], completion.finish_reason) == (len(tokens) - 1, "stop"), where
        assert completion.stop_reason == reason, f"{where}, reason {completion.stop_reason}, not {reason}"
    else:
        assert (len(tokens), completion.finish_reason) == (params.max_tokens, "length"), where
