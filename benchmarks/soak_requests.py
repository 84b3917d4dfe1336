"""Random requests for ``soak``, and how near to a tie their tokens are."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.heads.sampling.random import gumbel_noise
from model_runner_base.testing import rules
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.reference import Request, logits_after
from model_runner_base.testing.tokenizer import make_tokenizer

MAX_LENGTH = 128
MAX_TOKENS = 24
FEW = make_tokenizer().convert_tokens_to_ids(list("jqvxz"))
"""Tokens so few that prompt lookup is often right where only they are allowed."""

GREEDY: dict[str, Any] = {"temperature": 0}
KINDS: list[dict[str, Any]] = [
    *[GREEDY] * 4,
    GREEDY | {"repetition_penalty": 1.2},
    GREEDY | {"presence_penalty": 0.5, "frequency_penalty": -0.3},
    GREEDY | {"bad_words": ["an", "the", "q"]},
    GREEDY | {"stop_token_ids": list(range(40, 140))},
    GREEDY | {"stop": ["e"]},
    GREEDY | {"allowed_token_ids": FEW},
    GREEDY | {"logprobs": 3},
    GREEDY | {"prompt_logprobs": 1},
    GREEDY | {"structured_outputs": StructuredOutputsParams(regex="[a-h]{2,20}")},
    {"temperature": 1.0},
    {"temperature": 0.6, "logprobs": 2},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "frequency_penalty": 0.7},
    {"temperature": 1.0, "bad_words": ["a", "th", "e "]},
    {"temperature": 1.0, "allowed_token_ids": FEW, "frequency_penalty": -0.5},
    {"temperature": 0.8, "stop_token_ids": list(range(3, 60)), "min_tokens": 1},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="(ab|cd)[0-9]{3}(-[a-z]{2,5})?")},
    {"temperature": 0.9, "n": 2},
    {"temperature": 0.7, "top_p": 0.9, "n": 3, "logprobs": 1},
]


def request_of(number: int) -> Request:
    """Request number ``number``, the same every time. Every third prompt begins like others; a few requests end at
    the model's length."""
    rng = random.Random(number)
    length = rng.choice([1, 3, 15, 16, 17, 33, 48, 70, 96, 115])
    (prompt,) = random_prompts(number, [length])
    if number % 3 == 0:
        (family,) = random_prompts(-1 - rng.randrange(4) & 0xFFFF, [length])
        shared = rng.randint(0, length)
        prompt = family[:shared] + prompt[shared:]
    options = {"seed": rng.getrandbits(40), "max_tokens": rng.randint(1, MAX_TOKENS), "ignore_eos": rng.random() < 0.8}
    kind = rng.choice(KINDS)
    if "structured_outputs" in kind:
        options["ignore_eos"] = False
    return Request(prompt, SamplingParams(**(options | kind)))


def child_of(request: Request, index: int) -> Request:
    """A request for one of another's ``n`` completions, by itself."""
    params = request.params.clone()
    params.n, params.seed = 1, (params.seed or 0) + index
    return replace(request, params=params)


def distance(model: TinyModel, request: Request, before: Sequence[int], one: int, other: int) -> float:
    """Difference of two tokens in the quantity that sampling maximizes, after the output tokens ``before``.

    It is the reference model's: processed logits, with the noise of the place where tokens are drawn. A token that the
    rules exclude is infinitely far, but for one near a threshold of top-k or top-p. Grammars are left out; bad words
    are as the kit's tokenizer has them.
    """
    values = request.processed(logits_after(model, [*request.prompt, *before])[-1], before)
    params = request.params
    if not rules.is_greedy(params):
        if not all(np.isfinite(rules.kept(values, params, -1e-4)[[one, other]])):
            return 0.0 if all(np.isfinite(rules.kept(values, params, 1e-4)[[one, other]])) else np.inf
        low, high = np.array([params.seed], np.uint64).view(np.int32).tolist()
        position = torch.tensor([len(request.prompt) + len(before)], dtype=torch.int32)
        seeds = torch.tensor([[low], [high]], dtype=torch.int32)
        noise = gumbel_noise(seeds[0], seeds[1], position, len(values))[0].double().numpy()
        values = values / params.temperature + noise
    return float(abs(values[one] - values[other]))
