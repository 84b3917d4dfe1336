"""Requests that no honest client sends: every field of ``SamplingParams`` at its limits and beyond, odd prompts."""

import math
from typing import Any

from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.testing.architectures import VOCAB_SIZE
from model_runner_base.testing.tokenizer import EOS

INTEGERS = [
    0,
    1,
    -1,
    2,
    7,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    -(2**31),
    -(2**63),
    -(2**64),
]
FLOATS = [0.0, 1.0, -1.0, 0.5, 2.0, 1e-5, 1e-38, 1e-300, 1e30, 1e38, 1e300, math.inf, -math.inf, math.nan]
TEXTS = ["", " ", "a", "\x00", "\u00e9", "\U0001f600", "\ud800", "\u202e" * 3, "a" * 70_000, "\n\n"]

numbers = st.sampled_from([*INTEGERS, *FLOATS])
integers = st.sampled_from(INTEGERS) | st.integers(-3, VOCAB_SIZE + 3)
texts = st.sampled_from(TEXTS)
token_lists = st.lists(integers, max_size=5) | st.sampled_from([[], [EOS], list(range(VOCAB_SIZE)), [3] * 5000])
few_tokens = st.lists(st.integers(20, 30), min_size=1, max_size=3)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.sampled_from([0, -1, 10**9, 2**64, 1.5]),  # Others make several requests of one.
    "presence_penalty": numbers,
    "frequency_penalty": numbers,
    "repetition_penalty": numbers,
    "temperature": numbers,
    "top_p": numbers,
    "top_k": integers,
    "min_p": numbers,
    "seed": integers,
    "stop": st.lists(texts, max_size=3) | st.just(["a"] * 5000),
    "stop_token_ids": token_lists,
    "ignore_eos": st.booleans(),
    "max_tokens": integers | st.sampled_from([1, 2, 20]),
    "min_tokens": integers,
    "logprobs": integers,
    "prompt_logprobs": integers,
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "structured_outputs": st.sampled_from(
        [
            {"regex": "[a-h]{2,20}"},
            {"choice": ["7"]},
            {"choice": []},
            {"regex": "("},
            {"regex": ""},
            {"grammar": "root ::= root"},
            {"json": "{"},
            {"json": {"type": "integer", "maximum": -1, "minimum": 1}},
            {"structural_tag": "no"},
        ]
    ),
    "logit_bias": st.dictionaries(integers, numbers, max_size=3) | st.just(dict.fromkeys(range(VOCAB_SIZE), -math.inf)),
    "allowed_token_ids": token_lists | few_tokens,
    "bad_words": st.lists(texts, max_size=3),
    "extra_args": st.sampled_from(
        [{}, {"\ud800": 1}, {"a": 2**64}, {"kv_transfer_params": {"do_remote_decode": True}}]
    ),
    "skip_reading_prefix_cache": st.booleans(),
}
"""Values of each field, of which most are refused."""

prompts = (
    st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=70)
    | st.lists(integers, max_size=3)
    | st.sampled_from([[], [5] * 255, [5] * 256, [5] * 257, [5] * 5000])
)
"""Token ids; the kit's engines take 256 tokens."""

some_fields = st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
clashes = st.fixed_dictionaries(
    {
        "structured_outputs": st.sampled_from([{"regex": "[a-h]{2,20}"}, {"choice": ["7"]}]),
        "allowed_token_ids": few_tokens,
    },
    optional={"min_tokens": st.integers(0, 5), "temperature": st.sampled_from([0, 1.0]), "ignore_eos": st.booleans()},
)
"""Fields whose rules leave no token when they are combined."""

params = st.one_of(some_fields, some_fields, some_fields, clashes)
"""Fields of one request's ``SamplingParams``; the others keep their defaults."""


def make(fields: dict[str, Any]) -> SamplingParams:
    """Parameters with these fields. Where vLLM's own checks refuse them, the fields are set without the checks, as a
    client of another kind may do.

    May raise what vLLM's constructors raise.
    """
    fields = {"max_tokens": 8, "temperature": 0} | fields
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    try:
        return SamplingParams(**fields)
    except Exception:
        made = SamplingParams()
        for name, value in fields.items():
            setattr(made, name, value)
        return made
