"""HF transformers in float32; compares a request's tokens with it under the rules of ``rules.py``.

In a dtype that rounds, a token is right if it would be but for rounding (``precision.py``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.testing import rules
from model_runner_base.testing.engine import generate, tokens_of
from model_runner_base.testing.mismatch import Case, Difference, Mismatch, Prompt, Replay, Wrong
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.tokenizer import EOS, make_tokenizer
from model_runner_base.testing.words import show

TOLERANCE = 1e-3
"""Largest difference of logits from the reference's in float32; the tiny models' are of the order of 10."""

Grammar = Callable[[list[int]], np.ndarray]
"""Function from the output tokens so far to a mask [V] of those that may follow."""


def logits_after(model: TinyModel, tokens: Sequence[int]) -> np.ndarray:
    """The reference's logits [len(tokens), V] float32: row i predicts token i + 1."""
    return model.logits(tokens)


@cache
def _tokenizer() -> Any:
    return make_tokenizer()


def _bad_word_ids(word: str) -> list[list[int]]:
    """The token sequences of a bad word: as it is; and after a blank, if it then begins with another token."""
    plain, spaced = (_tokenizer().encode(blank + word.lstrip(), add_special_tokens=False) for blank in ("", " "))
    return [plain, spaced] if spaced[0] != plain[0] and len(spaced) == len(plain) else [plain]


def _is_forced(mask: np.ndarray) -> bool:
    """Whether all allowed tokens [V] begin with one character."""
    return len({_tokenizer().decode([token])[0] for token in np.flatnonzero(mask)}) == 1


@dataclass
class Request:
    """A prompt of token ids, its sampling parameters, and its grammar and logits processors, if any."""

    prompt: Sequence[int]
    params: SamplingParams
    grammar: Grammar | None = None
    any_where_forced: bool = False
    """Whether any allowed token is right where all begin with one character, so that the text there is forced: of
    those, llguidance allows only the tokenizer's own."""
    processors: Sequence[rules.Processor] = ()
    """Custom logits processors that may change the maximum."""
    late_processors: Sequence[Callable[[np.ndarray], np.ndarray]] = ()
    """Custom logits processors that leave the maximum alone: they act on drawn tokens only, after the temperature."""

    def __str__(self) -> str:
        return f"prompt_token_ids={show(self.prompt)}, {describe(self.params)}"

    def processed(self, logits: np.ndarray, output: Sequence[int]) -> np.ndarray:
        """Logits [V] for the token after ``output``, by the rules."""
        if self.grammar is not None:
            logits = np.where(self.grammar(list(output)), logits, -np.inf)
        bad_words = [ids for word in self.params.bad_words or () for ids in _bad_word_ids(word)]
        return rules.processed(logits, self.params, self.prompt, output, [EOS], bad_words, self.processors)

    def accepts(self, values: np.ndarray, token: int, output: Sequence[int], slack: float = TOLERANCE) -> bool:
        """Whether the token may follow ``output``, by processed logits [V] whose differences are off by ``slack`` at
        most."""
        if not rules.is_greedy(self.params):
            return bool(self.truncated(values, slack)[token] > -np.inf)
        if self.any_where_forced and self.grammar is not None and _is_forced(self.grammar(list(output))):
            return bool(values[token] > -np.inf)
        return bool(values[token] >= values.max() - slack)

    def is_certain(self, values: np.ndarray, output: Sequence[int], slack: float) -> bool:
        """Whether one token alone may follow ``output``, or, if it is drawn, whether some may not."""
        if not rules.is_greedy(self.params):
            return bool((self.truncated(values, slack) == -np.inf).any())
        return not self.accepts(values, int(np.argsort(values)[-2]), output, slack)

    @property
    def stretch(self) -> float:
        """Factor by which the rules may stretch what rounding moves; 1 in float32, whose tolerances have it."""
        if PRECISION.is_exact:
            return 1.0
        params = self.params
        heat = 1.0 if rules.is_greedy(params) else max(1.0, 1 / params.temperature)
        return heat * max(1.0, params.repetition_penalty, 1 / params.repetition_penalty)

    @property
    def cuts_off(self) -> bool:
        """Whether only the likeliest tokens are drawn."""
        params = self.params
        return not rules.is_greedy(params) and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

    def truncated(self, values: np.ndarray, slack: float = 0.0) -> np.ndarray:
        """Logits [V] that a token is drawn from, made from processed ones; the same ones for a greedy request."""
        if rules.is_greedy(self.params):
            return values
        return rules.truncated(values, self.params, slack, self.late_processors)


def describe(params: SamplingParams) -> str:
    """The parameters that differ from the defaults."""
    default = SamplingParams()

    def show(value: Any) -> str:
        if not isinstance(value, StructuredOutputsParams):
            return repr(value)
        constraint = {name: kind for name, kind in vars(value).items() if kind and not name.startswith("_")}
        return f"StructuredOutputsParams(**{constraint})"

    hidden = {"output_kind", "skip_reading_prefix_cache", "output_text_buffer_length", "detokenize"}
    given = {
        name: getattr(params, name)
        for name in params.__struct_fields__
        if not name.startswith("_") and name not in hidden and getattr(params, name) != getattr(default, name)
    }
    return f"SamplingParams({', '.join(f'{name}={show(value)}' for name, value in given.items())})"


def check_tokens(
    model: TinyModel, request: Request, tokens: Sequence[int], adapter: LoRARequest | None = None, where: str = ""
) -> int:
    """Asserts that every token is the maximum of the reference's logits under the rules, or may be drawn from them.

    Args:
        adapter: the request's adapter, with which it may be run again; the reference has it merged.
        where: words for the beginning of the sentence, in place of the model's name.

    Returns:
        The number of tokens at which the rules changed the maximum: 0 says that the check has shown little.

    Raises:
        Mismatch: naming the request, the place, and both tokens.
    """
    tokens, prompt = list(tokens), tuple(request.prompt)
    changed, difference = _first_wrong(model, request, tokens)
    if difference is None:
        return changed

    def compare(case: Case, got: Sequence[Sequence[int]]) -> Difference | None:
        requests = [replace(request, prompt=each) for each in case.prompts]
        found = [_first_wrong(model, each, own) for each, own in zip(requests, got, strict=True)]
        return next((each._replace(request=index) for index, (_, each) in enumerate(found) if each), None)

    def run(llm: LLM, prompts: list[Prompt], counts: list[int]) -> list[list[int]]:
        params = [_with_count(request.params, count) for count in counts]
        return tokens_of(generate(llm, prompts, params, [adapter] * len(prompts)))

    name = ", ".join([where or model.path.name, describe(request.params)])
    replay = Replay(name, model, Case([prompt], [len(tokens)]), difference, compare, run)
    sentence = ", ".join(filter(None, [where, f"{request}: {difference}"]))
    raise Mismatch(sentence, Wrong(prompt, tokens, difference.output), replay)


def _first_wrong(model: TinyModel, request: Request, tokens: Sequence[int]) -> tuple[int, Difference | None]:
    """How many tokens the rules changed up to the first wrong one, and that one."""
    start = len(request.prompt)
    logits = logits_after(model, [*request.prompt, *tokens])[start - 1 : -1]
    slacks = model.tolerances([*request.prompt, *tokens], TOLERANCE)[start - 1 : -1] * request.stretch
    changed = 0
    for i, token in enumerate(tokens):
        slack = float(slacks[i])
        values = request.processed(logits[i], tokens[:i])
        changed += int(values.argmax() != logits[i].argmax())
        if not PRECISION.is_exact and (rules.is_greedy(request.params) or request.cuts_off):
            PRECISION.note(request.is_certain(values, tokens[:i], slack), 1)
        if not request.accepts(values, token, tokens[:i], slack):
            why = "" if rules.is_greedy(request.params) else "which the rules exclude"
            return changed, Difference(0, i, token, int(values.argmax()), why)
    return changed, None


def _with_count(params: SamplingParams, count: int) -> SamplingParams:
    changed = params.clone()
    changed.max_tokens, changed.min_tokens = count, min(params.min_tokens, count)
    return changed


def best_tokens(model: TinyModel, request: Request, count: int) -> list[int]:
    """The reference's own greedy tokens under the rules."""
    output: list[int] = []
    for _ in range(count):
        output.append(int(request.processed(logits_after(model, [*request.prompt, *output])[-1], output).argmax()))
    return output


def distribution(model: TinyModel, request: Request, output: Sequence[int] = ()) -> np.ndarray:
    """Probabilities [V] of the token after ``output``."""
    logits = logits_after(model, [*request.prompt, *output])[-1]
    return rules.softmax(request.truncated(request.processed(logits, output)))
