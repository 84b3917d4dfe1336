"""Ranges that each field of a request is held to before the request is queued."""

import math
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from model_runner_base.admission.request_ranges import POOLING, REQUEST, SAMPLING, check_params, check_rest
from model_runner_base.admission.request_rules import check_rules

VOCAB_SIZE = 50
HUGE = [2**31, 2**32, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**5000]


def params_with(**fields: Any) -> SamplingParams:
    """Parameters as a client that goes past their constructor could send them."""
    params = SamplingParams()
    for name, value in fields.items():
        setattr(params, name, value)
    return params


def test_every_field_has_a_row() -> None:
    """A field of a newer vLLM without a row would reach the step unseen."""
    assert set(SamplingParams.__struct_fields__) <= SAMPLING.keys()
    assert set(EngineCoreRequest.__struct_fields__) <= REQUEST.keys()
    assert set(PoolingParams.__struct_fields__) <= POOLING.keys()
    with pytest.raises(ValueError, match="dimensions"):
        check_params(PoolingParams(dimensions=2**63), VOCAB_SIZE)


GOOD: list[tuple[str, Any]] = [
    ("max_tokens", 1),
    ("max_tokens", 2**63 - 1),
    ("min_tokens", 0),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("stop_token_ids", [0, VOCAB_SIZE, 2**31 - 1, -1]),
    ("allowed_token_ids", [0, VOCAB_SIZE - 1]),
    ("logit_bias", {0: -math.inf, VOCAB_SIZE - 1: 100}),
    ("temperature", 0.0),
    ("temperature", 1e30),
    ("repetition_penalty", 1e-30),
    ("stop", ["\u00e9\U0001f600"]),
    ("bad_words", ["a"] * 1024),
    ("extra_args", {"anything": [1]}),
    ("n", 1),
    ("logprobs", -1),
    ("top_k", 2**63 - 1),
]
BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", 2**63),
    ("max_tokens", 3.5),
    ("min_tokens", -1),
    ("seed", 2**63),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", [2**63]),
    ("stop_token_ids", [0.5]),
    ("stop_token_ids", list(range(5000))),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB_SIZE]),
    ("allowed_token_ids", [-1]),
    ("logit_bias", {0: math.nan}),
    ("logit_bias", {0: math.inf}),
    ("logit_bias", {VOCAB_SIZE: 1.0}),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("temperature", -0.1),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", 1e-38),
    ("repetition_penalty", math.nan),
    ("presence_penalty", math.nan),
    ("top_p", math.nan),
    ("top_p", 0.0),
    ("min_p", 1.1),
    ("stop", ["\ud800"]),
    ("stop", ["a"] * 1025),
    ("bad_words", [" "]),
    ("bad_words", [""]),
    ("extra_args", [1]),
    ("extra_args", {"a": 2**64}),
    ("extra_args", {"a": ["\ud800"]}),
    ("n", 0),
    ("n", 10**9),
    ("logprobs", -2),
    ("top_k", -2),
    ("detokenize", "yes"),
]


@pytest.mark.parametrize(("name", "value"), GOOD, ids=repr)
def test_within_a_range(name: str, value: Any) -> None:
    check_params(params_with(**{name: value}), VOCAB_SIZE)


@pytest.mark.parametrize(("name", "value"), BAD, ids=repr)
def test_beyond_a_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        check_params(params_with(**{name: value}), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_logprob_token_ids", [1]),
        ("prompt_logprob_start", 0),
        ("trace_decode_token_ids", [1]),
        ("routed_experts_prompt_start", 1),
        ("watermarking", True),
    ],
)
def test_what_would_be_left_out_of_an_answer_is_refused(name: str, value: Any) -> None:
    """Fields of later releases that no step reads: a client would not notice that its wish was left out."""
    if name not in SamplingParams.__struct_fields__:
        pytest.skip("this release of vLLM has no such field")
    check_params(SamplingParams(watermarking=False), VOCAB_SIZE)
    with pytest.raises(ValueError, match=f"{name} is not supported yet: leave it out"):
        check_params(params_with(**{name: value}), VOCAB_SIZE)


@pytest.mark.parametrize("name", [name for name in SAMPLING if name in SamplingParams.__struct_fields__])
@pytest.mark.parametrize("value", [*HUGE, math.nan, math.inf, "\ud800", object(), [2**64], {2**64: 1}], ids=type)
def test_no_value_of_any_field_fails_otherwise(name: str, value: Any) -> None:
    """A value of any field passes, or is refused with a ValueError."""
    try:
        check_params(params_with(**{name: value}), VOCAB_SIZE)
    except ValueError as error:
        assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", 2**63), ("priority", 1.5), ("cache_salt", "\ud800"), ("request_id", "\udfff"), ("trace_headers", 1)],
)
def test_what_a_request_has_beside_its_parameters(name: str, value: Any) -> None:
    class Sent:
        pass

    request = Sent()
    setattr(request, name, value)
    with pytest.raises(ValueError, match=name):
        check_rest(request, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({"allowed_token_ids": [3, 4], "_bad_words_token_ids": [[3], [4]]}, "allowed_token_ids, bad_words"),
        ({"allowed_token_ids": [7], "min_tokens": 1, "_all_stop_token_ids": {7}}, "allowed_token_ids, min_tokens"),
        ({"allowed_token_ids": [1, 2], "logit_bias": {1: -math.inf, 2: -math.inf}}, "allowed_token_ids, logit_bias"),
        ({"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -math.inf)}, "logit_bias"),
    ],
)
def test_rules_that_leave_nothing(fields: dict[str, Any], rules: str) -> None:
    with pytest.raises(ValueError, match=f"no token is left that {rules} allow"):
        check_rules(params_with(**fields), VOCAB_SIZE)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [3, 4], "_bad_words_token_ids": [[3], [4, 5]]},
        {"allowed_token_ids": [7], "min_tokens": 0, "_all_stop_token_ids": {7}},
        {"allowed_token_ids": [7, 8], "min_tokens": 1, "_all_stop_token_ids": {7}},
        {"logit_bias": dict.fromkeys(range(1, VOCAB_SIZE), -math.inf)},
    ],
)
def test_rules_that_leave_one(fields: dict[str, Any]) -> None:
    check_rules(params_with(**fields), VOCAB_SIZE)
