"""Streaming-input sessions, fed to the engine core step by step, and the tokens that they must have.

vLLM's rule: when the next chunk of input comes, the outputs whose keys and values were computed become part of the
prompt (all but the last), and the chunk follows them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from model_runner_base.testing.engine import core_of, runner_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel

OUTPUTS = 7
WITHOUT_EOS: dict[str, Any] = {"eos_token_id": None} if "eos_token_id" in EngineCoreRequest.__struct_fields__ else {}


@dataclass
class Session:
    """A session as its user sees it: chunks of input, and the outputs that came for each."""

    name: str
    chunks: list[tuple[int, ...]]
    sent: int = 0
    prompt: tuple[int, ...] = ()
    """Prompt that vLLM makes of the session so far, by its rule."""
    outputs: list[list[int]] = field(default_factory=lambda: [[]])
    """Outputs for each chunk; the last list is of the outputs that come now."""

    def check(self, model: TinyModel, stops: Sequence[int]) -> None:
        assert self.outputs.pop() == [] and len(self.outputs) == len(self.chunks)
        for turn, (chunk, outputs) in enumerate(zip(self.chunks, self.outputs, strict=True)):
            self.prompt += chunk
            where = f"{self.name}, turn {turn}"
            check_equal(model, [self.prompt], [outputs], [OUTPUTS], where=where, until=partial(until, stops))
            self.prompt += tuple(outputs[:-1])


def until(stops: Sequence[int], tokens: list[int]) -> list[int]:
    """The tokens up to the first that ends them."""
    ends = [index + 1 for index, token in enumerate(tokens) if token in stops]
    return tokens[: min(ends, default=len(tokens))]


class Driver:
    """Feeds the engine core what AsyncLLM would, at chosen steps."""

    def __init__(self, llm: LLM) -> None:
        self.core = core_of(llm)
        self.runner = runner_of(llm)
        self.prompt_logprobs: int | None = None
        self.repetition_penalty = 1.0
        self.stops: list[int] = []
        self.prompts_answered = 0
        self.num_loaded = 0
        """Number of tokens that a KV connector has loaded."""
        self.sessions: dict[str, Session] = {}
        self.plain: dict[str, tuple[tuple[int, ...], list[int]]] = {}

    def send(self, name: str, tokens: tuple[int, ...], resumable: bool, priority: int = 0) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUTS,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=self.prompt_logprobs,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=self.stops,
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            **WITHOUT_EOS,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))

    def open(self, session: Session) -> None:
        self.sessions[session.name] = session
        self.feed(session)

    def feed(self, session: Session) -> None:
        """Sends the session's next chunk, or the word that it is over."""
        if session.sent < len(session.chunks):
            self.send(session.name, session.chunks[session.sent], resumable=True)
        elif session.sent == len(session.chunks):
            self.send(session.name, (0,), resumable=False)
        session.sent += 1

    def ask(self, name: str, prompt: tuple[int, ...]) -> None:
        self.plain[name] = (prompt, [])
        self.send(name, prompt, resumable=False)

    def step(self) -> None:
        by_client, executed = self.core.step_fn()
        self.core.post_step(model_executed=executed)
        for output in (by_client or {}).values():
            loaded = output.scheduler_stats and output.scheduler_stats.connector_prefix_cache_stats
            self.num_loaded += loaded.hits if loaded else 0
            for one in output.outputs:
                self.prompts_answered += one.new_prompt_logprobs_tensors is not None
                if one.request_id in self.plain:
                    self.plain[one.request_id][1].extend(one.new_token_ids)
                    continue
                outputs = self.sessions[one.request_id].outputs
                outputs[-1].extend(one.new_token_ids)
                if one.finish_reason is not None:
                    outputs.append([])

    def is_open(self) -> bool:
        return bool(self.core.scheduler.requests)

    def check(self, model: TinyModel) -> None:
        for session in self.sessions.values():
            session.check(model, self.stops)
        for prompt, tokens in self.plain.values():
            stops = partial(until, self.stops)
            check_equal(model, [prompt], [tokens], [OUTPUTS], where="next to sessions", until=stops)
