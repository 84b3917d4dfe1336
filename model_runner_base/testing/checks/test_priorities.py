"""The priority policy, which may take a request out of the step in which it was scheduled.

A long request takes the last blocks in a step in which an urgent one then finds none. Nothing of that step may stay in
the caches: its blocks would be found as a cached prefix, and its images as encoded, though no step has computed them.
"""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import LLM, RequestOutput

from model_runner_base.testing.checks.test_multimodal import Prompt, as_input, check_read, expected
from model_runner_base.testing.engine import core_of, greedy, require_small_blocks
from model_runner_base.testing.images import TOKEN_BYTES, SeeingModel, make_seeing_model, picture

COUNT, FEW = 8, 2
"""New tokens of the long request, and of an urgent one."""
STEP, CHUNK = 96, 64
"""Tokens of a step, and those of them that a prompt may have."""
LONG = 296
"""Tokens of the long prompt."""
TURNS = [(1, 90), (2, 90), (3, 50)]
"""Steps before the urgent prompt arrives, and its tokens: with blocks of 16 and of 32 tokens, and in each release, one
of them finds no block after the long prompt has taken its own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_seeing_model("llava", tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def llm(engine: Callable[..., LLM], model: SeeingModel) -> LLM:
    """An engine whose cache holds little more than the long request."""
    sizes = {"max_model_len": 320, "max_num_batched_tokens": STEP, "long_prefill_token_threshold": CHUNK}
    memory = {"kv_cache_memory_bytes": 384 * TOKEN_BYTES}
    return engine(model.path, scheduling_policy="priority", skip_tokenizer_init=False, **sizes, **memory)


def text_of(llm: LLM, num_tokens: int, step: int) -> str:
    """A text of so many tokens; ``step`` makes it another one."""
    tokenizer: Any = llm.get_tokenizer()
    text, place = "", 0
    while len(tokenizer.encode(text)) < num_tokens:
        text, place = text + chr(97 + step * place % 23), place + 1
    return text


def test_text(llm: LLM, model: SeeingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is taken out of its step leaves no block of it as a cached prefix."""
    text = text_of(llm, LONG, 7)
    check(llm, model, lambda turn: (text, []), monkeypatch)


def test_images(llm: LLM, model: SeeingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is taken out of its step leaves no image of it as encoded."""
    shown = "".join(f"{model.placeholder} no. {number} " for number in range(4))
    text = text_of(llm, LONG - 100, 7) + shown + text_of(llm, 12, 3)
    # Each turn shows pictures of its own, since outputs for others may still be there.
    check(llm, model, lambda turn: (text, [picture(10 * turn + n, 32, 32) for n in range(4)]), monkeypatch)


def check(llm: LLM, model: SeeingModel, make_long: Callable[[int], Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves long prompts with urgent ones, which arrive and need blocks at several of its steps."""
    taken = note_taken(llm, monkeypatch)
    for turn, (delay, length) in enumerate(TURNS):
        long = make_long(turn)
        urgent: Prompt = text_of(llm, length, 5), []
        llm.reset_prefix_cache()
        got = serve(llm, long, urgent, delay)
        want = expected(model, [urgent], FEW) + expected(model, [long], COUNT)
        check_read([got["urgent"], got["long"]], want, f"{delay} steps before {length} tokens, ")
    if not taken:
        require_small_blocks("no request is preempted")
    assert any(taken), "no request was taken out of its step"


def serve(llm: LLM, long: Prompt, urgent: Prompt, delay: int) -> dict[str, RequestOutput]:
    """Outputs of both requests; the urgent one arrives after ``delay`` steps."""
    core, outputs = llm.llm_engine, dict[str, RequestOutput]()
    core.add_request("long", as_input(long), greedy(COUNT), priority=9)
    for number in range(200):
        if number == delay:
            core.add_request("urgent", as_input(urgent), greedy(FEW), priority=0)
        for output in core.step():
            if output.finished:
                outputs[output.request_id] = output  # type: ignore[assignment]
        if len(outputs) == 2:
            break
    return outputs


def note_taken(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Appends, for each preempted request, how many whole blocks it has for tokens of the step that is scheduled."""
    scheduler = core_of(llm).scheduler
    preempt, taken = scheduler._preempt_request, list[int]()

    def noting(request: Any, *args: Any, **kwargs: Any) -> None:
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        taken.append(max(0, len(blocks) - 1 - request.num_computed_tokens // scheduler.block_size))
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", noting)
    return taken
