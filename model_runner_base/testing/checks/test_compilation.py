"""Nothing is compiled after warm-up, caches are written in place, and the host does not wait for the device."""

from collections.abc import Callable
from threading import Event, get_ident
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from model_runner_base.testing.cases import FEATURES, random_prompts
from model_runner_base.testing.compilations import count_compilations, last_compiled
from model_runner_base.testing.engine import generate, greedy, runner_of, tokens_of
from model_runner_base.testing.mismatch import check_equal
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.table import refusal

SAMPLING: dict[str, dict[str, Any]] = {
    **{feature.name: feature.example for feature in FEATURES},
    "greedy": {},
    "everything sorted": {"temperature": 0.8, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "seed": 3},
    "logprobs": {"logprobs": 3},
    "many logprobs": {"logprobs": 100},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "structured output": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,9}")},
}
LENGTHS = [1, 3, 17, 40, 64, 65, 150]


def test_serving_while_sizes_are_made(text_engine: Callable[..., LLM], text_model: TinyModel) -> None:
    """Tokens are the same whichever sizes are compiled when a request comes; in the end all sizes are."""
    llm = text_engine(is_new=True)
    compiler, policy = runner_of(llm).background_compiler, runner_of(llm).graph_policy
    prompts = random_prompts(7, LENGTHS)
    is_last = False
    while not is_last:
        is_last = not compiler.is_making
        for asked in (prompts, prompts[2:3]):
            where = f"at {[*map(str, policy.offered)]}"
            check_equal(text_model, asked, tokens_of(generate(llm, asked, greedy(12))), [12] * len(asked), where=where)
    compiler.wait()
    assert not policy.offered or set(policy.offered) == set(policy.sizes)


def test_no_compilation_after_warm_up(text_engine: Callable[..., LLM]) -> None:
    """Nothing is compiled after warm-up, whatever single requests ask of sampling.

    The device counts, and so do torch and vLLM.
    """
    llm = text_engine()
    policy = runner_of(llm).graph_policy
    warm, of_torch = policy.num_compilations(), count_compilations()
    assert warm or not policy.sizes, "sizes were captured, but num_compilations() counts none"
    rng = np.random.default_rng(0)
    refused = []
    for name, options in SAMPLING.items():
        prompts = random_prompts(int(rng.integers(1000)), rng.choice(LENGTHS, 3).tolist())
        others = [greedy(int(count)) for count in rng.integers(1, 12, 2)]
        try:
            generate(llm, prompts, [SamplingParams(**({"temperature": 0, "max_tokens": 8} | options)), *others])
        except Exception as error:
            if refusal(error) is None:
                raise
            refused.append(name)
        case = f"for {name}, with prompts of {[len(p) for p in prompts]} tokens"
        count, by_others = policy.num_compilations() - warm, dict(count_compilations() - of_torch)
        assert not count, f"{count} compilations {case}"
        assert not by_others, f"not counted by num_compilations(), {case}: {by_others}; the last: {last_compiled()}"
    assert "greedy" not in refused


def test_padding_ends_at_sizes_that_the_runner_names(
    text_engine: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is padded to a token count that ``tokenwise_graph_batch_sizes`` names, or runs at its own size."""
    llm = text_engine()
    runner = runner_of(llm)
    runner.background_compiler.wait()
    choose, padded = runner.graph_policy.choose, set[int]()

    def record(needs: Any) -> Any:
        size = choose(needs)
        padded.update([] if size in needs else [size.num_tokens])
        return size

    monkeypatch.setattr(runner.graph_policy, "choose", record)
    generate(llm, random_prompts(3, LENGTHS), greedy(8))
    named = runner.tokenwise_graph_batch_sizes
    assert padded <= set(named), f"steps are padded to {padded} tokens, {named} are named"
    assert runner.use_piecewise_graph or not padded


def test_caches_are_written_in_place(text_engine: Callable[..., LLM]) -> None:
    """The KV caches stay where they are, so that no step's memory or time grows with them."""
    llm = text_engine()
    runner = runner_of(llm)

    def addresses() -> list[int]:
        return [runner.device_ops.buffer_address(cache) for cache in runner.parts.kv_caches]

    before = addresses()
    assert len(set(before)) == len(before)
    for rows in (1, 4):
        generate(llm, [(5, 6, 7)] * rows, greedy(9))
        assert addresses() == before, f"after steps of {rows} requests"


def test_host_does_not_wait(
    text_engine: Callable[..., LLM], text_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is launched before the last one's tokens are read, and nothing is read while it is launched."""
    llm = text_engine()
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling, "asynchronous scheduling is off by default"
    runner, count = runner_of(llm), 6
    launches = Launches(count)
    for name in ("execute_model", "sample_tokens"):
        monkeypatch.setattr(runner, name, launches.launching(getattr(runner, name), name == "sample_tokens"))
    for name in ("to_host", "synchronize"):
        monkeypatch.setattr(runner.device_ops, name, launches.waiting(getattr(runner.device_ops, name), name))
    check_equal(text_model, [(5, 6, 7)], tokens_of(generate(llm, [(5, 6, 7)], greedy(count))), [count])
    assert not launches.waits, f"launching a step called {launches.waits}"


class Reads(TorchDispatchMode):
    """Notes the operations that wait for a tensor of the device and copy it to the host."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, so that compiled graphs may be called in this mode; it does not see the operations inside them."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in args if isinstance(x, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            asked = {**dict(zip(("self", "src", "non_blocking"), args, strict=False)), **(kwargs or {})}
            is_read = result.is_cpu and not asked.get("non_blocking")
        if is_read and not given[-1].is_cpu:
            self._waits.append(str(func))
        return result


class Launches:
    """Holds back each step's tokens until the next step is launched: a runner that waits for them first gets stuck."""

    def __init__(self, count: int) -> None:
        self.waits: list[str] = []
        self._launched = [Event() for _ in range(count)]
        self._launched.append(Event())
        self._launched[count].set()  # No step follows the last one.
        self._num_launched = self._num_outputs = 0
        self._launching_thread: int | None = None

    def launching(self, function: Callable[[Any], Any], is_last: bool) -> Callable[[Any], Any]:
        def call(argument: Any) -> Any:
            self._launching_thread = get_ident()
            with Reads(self.waits):
                result = function(argument)
            self._launching_thread = None
            if is_last:
                self._launched[self._num_launched].set()
                self._num_launched += 1
                self._hold(result)
            return result

        return call

    def waiting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.waits += [name] if get_ident() == self._launching_thread else []
            return function(*arguments)

        return call

    def _hold(self, output: Any) -> None:
        """Makes reading a step's output wait until the next step is launched."""
        read = output.get_output
        self._num_outputs += 1
        number = self._num_outputs

        def get_output() -> Any:
            assert self._launched[number].wait(30), f"step {number + 1} waits for the tokens of step {number}"
            return read()

        output.get_output = get_output
