"""Ranges of all fields of a request: one row for each field, checked before the request is queued.

A number that no column can hold, a list without an end, or a text that cannot be encoded would fail in the middle of a
step, and so fail every other request, too. A test fails if a newer vLLM has a field without a row here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import vllm.envs
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from model_runner_base.errors import RequestError

INT64_MAX = (1 << 63) - 1
INT32_MAX = (1 << 31) - 1
MAX_SEQUENCES = 16_384
"""Largest number of sequences of one request, unless ``VLLM_MAX_N_SEQUENCES`` of newer releases says otherwise."""
MAX_TEXTS = 1_024
"""Largest number of strings in a list: each one costs time at every token."""
MAX_TEXT_LENGTH = 65_536
HUGE = 1e30
"""Largest factor of a logit, or inverse of one, whose product float32 still holds."""


class Rule:
    """Rule for the values of a field; ``check`` raises RequestError for values that it forbids."""

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        """Checks a field's value; ``vocab_size`` is the number of tokens of the model."""


@dataclass(frozen=True)
class Integer(Rule):
    low: int
    high: int

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        if not isinstance(value, Integral) or not self.low <= int(value) <= self.high:
            raise RequestError(f"{name} must be an integer from {self.low} to {self.high}, got {_shown(value)}")


@dataclass(frozen=True)
class Number(Rule):
    """A float that is not NaN."""

    low: float
    high: float

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        if not isinstance(value, Real) or not self.low <= _float(value) <= self.high:
            raise RequestError(f"{name} must be a number from {self.low:g} to {self.high:g}, got {_shown(value)}")


@dataclass(frozen=True)
class Flag(Rule):
    def check(self, name: str, value: Any, vocab_size: int) -> None:
        if not isinstance(value, bool | int):
            raise RequestError(f"{name} must be true or false, got {_shown(value)}")


@dataclass(frozen=True)
class Text(Rule):
    """A string that UTF-8 can encode."""

    least: int = 0
    most: int = MAX_TEXT_LENGTH

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        if not isinstance(value, str) or not self.least <= len(value) <= self.most:
            bounds = f"{self.least} to {self.most} characters"
            raise RequestError(f"{name} must be a string of {bounds}, got {_shown(value)}")
        if self.least and not value.strip():
            raise RequestError(f"{name} must not be blank, got {_shown(value)}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{name} must be text that UTF-8 can encode, got {_shown(value)}") from None


@dataclass(frozen=True)
class Texts(Rule):
    """A list of strings."""

    each: Text = Text(least=1)

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        if not isinstance(value, list | tuple) or len(value) > MAX_TEXTS:
            raise RequestError(f"{name} must be a list of at most {MAX_TEXTS} strings, got {_shown(value)}")
        for text in value:
            self.each.check(name, text, vocab_size)


@dataclass(frozen=True)
class Tokens(Rule):
    """A list of token ids of the vocabulary, or of any that int32 holds; ids outside the vocabulary match no token."""

    in_vocabulary: bool = True
    least: int = 0

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        most = max(vocab_size, MAX_TEXTS)
        if not isinstance(value, list | tuple) or not self.least <= len(value) <= most:
            raise RequestError(f"{name} must be a list of {self.least} to {most} token ids, got {_shown(value)}")
        low, high = (0, vocab_size - 1) if self.in_vocabulary else (-INT32_MAX - 1, INT32_MAX)
        for token in value:
            if not isinstance(token, Integral):
                raise RequestError(f"{name} must be integers, got {_shown(token)}")
            if not low <= int(token) <= high:
                what = "out of vocabulary" if self.in_vocabulary else "no token id"
                raise RequestError(f"{name} contains {_shown(token)}, which is {what}: use ids below {high + 1}")


@dataclass(frozen=True)
class Biases(Rule):
    """A mapping of token ids to amounts, where -inf forbids a token."""

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} must be a mapping of token ids to numbers, got {_shown(value)}")
        Tokens().check(name, list(value), vocab_size)
        for token, bias in value.items():
            Number(-math.inf, HUGE).check(f"{name}[{token}]", bias, vocab_size)


@dataclass(frozen=True)
class Adapter(Rule):
    """A ``LoRARequest``; adapter_checks.py checks its files."""

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        Integer(1, INT64_MAX).check("lora_int_id", value.lora_int_id, vocab_size)
        Text(least=1).check("lora_name", value.lora_name, vocab_size)
        Text(least=1).check("lora_path", value.lora_path, vocab_size)


@dataclass(frozen=True)
class Named(Rule):
    """A mapping with names that UTF-8 can encode, and values that can be sent to an engine in another process."""

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} must be a mapping, got {_shown(value)}")
        for key in value:
            Text().check(f"a name in {name}", key, vocab_size)
        try:
            MsgpackEncoder().encode(value)
        except Exception as error:
            raise RequestError(f"{name} cannot be sent to the engine: {error}") from error


@dataclass(frozen=True)
class NotYet(Rule):
    """A field that is refused unless it is None or ``unset``, the value that vLLM gives it."""

    unset: Any = None

    def check(self, name: str, value: Any, vocab_size: int) -> None:
        if self.unset is None or value != self.unset:
            raise RequestError(f"{name} is not supported yet: leave it out")


@dataclass(frozen=True)
class ByVllm(Rule):
    """A field that vLLM sets or checks itself; ``why`` says why no other rule is needed here."""

    why: str


def _float(value: Any) -> float:
    """A number of any type as a float; infinite if no float holds it, and so out of every range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: Any) -> str:
    """A value as text for an error message, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits.
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


COUNT = Integer(0, INT64_MAX)
ANY = Integer(-INT64_MAX - 1, INT64_MAX)

SAMPLING: dict[str, Rule] = {
    "n": Integer(1, getattr(vllm.envs, "VLLM_MAX_N_SEQUENCES", MAX_SEQUENCES)),
    "presence_penalty": Number(-2.0, 2.0),
    "frequency_penalty": Number(-2.0, 2.0),
    "repetition_penalty": Number(1 / HUGE, HUGE),
    "temperature": Number(0.0, HUGE),
    "top_p": Number(1 / HUGE, 1.0),
    "top_k": Integer(-1, INT64_MAX),
    "min_p": Number(0.0, 1.0),
    "seed": ANY,
    "stop": Texts(Text(least=0)),
    "stop_token_ids": Tokens(in_vocabulary=False),
    "ignore_eos": Flag(),
    "max_tokens": Integer(1, INT64_MAX),
    "min_tokens": COUNT,
    "logprobs": Integer(-1, INT64_MAX),
    "prompt_logprobs": Integer(-1, INT64_MAX),
    "flat_logprobs": Flag(),
    "detokenize": Flag(),
    "skip_special_tokens": Flag(),
    "spaces_between_special_tokens": Flag(),
    "logits_processors": ByVllm("vLLM V1 refuses it"),
    "include_stop_str_in_output": Flag(),
    "truncate_prompt_tokens": Integer(-1, INT64_MAX),
    "skip_clone": Flag(),
    "output_text_buffer_length": ByVllm("made of the stop strings"),
    "_all_stop_token_ids": ByVllm("made of stop_token_ids"),
    "_eos_token_id": ByVllm("the tokenizer's"),
    "structured_outputs": ByVllm("its grammars are checked by vLLM, and compiled while the request is queued"),
    "output_kind": ByVllm("an enumeration"),
    "logit_bias": Biases(),
    "allowed_token_ids": Tokens(least=1),
    "extra_args": Named(),
    "bad_words": Texts(),
    "_bad_words_token_ids": ByVllm("made of bad_words"),
    "skip_reading_prefix_cache": Flag(),
    # Of newer releases.
    "watermarking": NotYet(unset=False),
    "_watermarking_skipped": ByVllm("made of watermarking"),
    "prompt_logprob_token_ids": NotYet(),
    "prompt_logprob_start": NotYet(),
    "logprob_token_ids": Tokens(),
    "stream_interval": Integer(1, INT64_MAX),
    "thinking_token_budget": COUNT,
    "repetition_detection": ByVllm(
        "its sizes are checked when it is made, and the scheduler's loop is bounded by them"
    ),
    "routed_experts_prompt_start": NotYet(unset=0),
    "trace_decode_token_ids": NotYet(),
}
"""Rules by field of ``SamplingParams``. A field that is None is not checked."""

POOLING: dict[str, Rule] = {
    "truncate_prompt_tokens": Integer(-1, INT64_MAX),
    "use_activation": Flag(),
    "dimensions": Integer(1, INT64_MAX),
    "step_tag_id": ANY,
    "returned_token_ids": Tokens(in_vocabulary=False),
    "task": ByVllm("checked against the model's tasks"),
    "requires_token_ids": ByVllm("set by poolers"),
    "skip_reading_prefix_cache": Flag(),
    "extra_kwargs": ByVllm("set by the front end, for pairs of texts"),
    "output_kind": ByVllm("an enumeration"),
    # Of newer releases.
    "late_interaction_params": NotYet(),
    "late_chunking_params": NotYet(),
}
"""Rules by field of ``PoolingParams``. A field that is None is not checked."""

REQUEST: dict[str, Rule] = {
    "request_id": Text(),
    "prompt_token_ids": ByVllm("checked against the vocabulary when the request arrives"),
    "prompt_embeds": ByVllm("checked when the request arrives (admission/request_checks.py)"),
    "prompt_is_token_ids": ByVllm("checked when the request arrives (admission/request_checks.py)"),
    "mm_features": ByVllm("made by the model's processor"),
    "sampling_params": ByVllm("has a table of its own"),
    "pooling_params": ByVllm("has a table of its own"),
    "eos_token_id": ByVllm("the tokenizer's"),
    "arrival_time": Number(-math.inf, math.inf),
    "lora_request": Adapter(),
    "cache_salt": Text(),
    "data_parallel_rank": COUNT,
    "client_index": COUNT,
    "current_wave": COUNT,
    "priority": ANY,
    "trace_headers": Named(),
    "resumable": Flag(),
    "external_req_id": Text(),
    "reasoning_ended": Flag(),
    # Of newer releases.
    "reasoning_parser_kwargs": Named(),
    "abort_immediately": Flag(),
    "session_id": Text(),
    "kv_hints": ByVllm("read by KV connectors alone"),
}
"""Rules by field of ``EngineCoreRequest``. A field that is None is not checked."""


EVERY_TOKEN = ("token_embed", "token_classify", "embed&token_classify")
"""Pooling tasks with a result for each token."""


def _check_all(rules: Mapping[str, Rule], values: Any, vocab_size: int) -> None:
    for name, rule in rules.items():
        value = getattr(values, name, None)
        if value is not None:
            rule.check(name, value, vocab_size)


def check_params(params: SamplingParams | PoolingParams, vocab_size: int) -> None:
    """Raises RequestError for the first field of a request's parameters that is out of its range."""
    if isinstance(params, SamplingParams):
        _check_all(SAMPLING, params, vocab_size)
        return
    _check_all(POOLING, params, vocab_size)
    if params.task in EVERY_TOKEN and params.skip_reading_prefix_cache is False:
        raise RequestError(
            f"{params.task} needs every token of the prompt computed, and with skip_reading_prefix_cache=False the "
            "prefix cache may have some: leave it out"
        )


def check_prompt(token_ids: list[int], vocab_size: int) -> None:
    """Raises RequestError for ids without an embedding; vLLM checks this only if it has a tokenizer."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(f"Token id {bad} is out of vocabulary: use ids below {vocab_size}")


def check_rest(request: Any, vocab_size: int) -> None:
    """Raises RequestError for fields of an ``EngineCoreRequest``, other than prompt and parameters, out of their
    range."""
    _check_all(REQUEST, request, vocab_size)
