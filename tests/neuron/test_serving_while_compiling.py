"""An engine that serves while its sizes are compiled: right tokens, no step that compiles, every size in the end."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from greedy import expected, generate
from test_reload import other_weights
from torch_xla import _XLAC
from vllm import LLM, SamplingParams

from model_runner_base.runner import background
from model_runner_base.step.sizes import StepKind, StepSize
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import DEFAULTS, runner_of, shut_down
from model_runner_base.testing.models import TinyModel
from neuron_runner.config import NeuronConfig
from neuron_runner.executable import Executable
from neuron_runner.graph_policy import OpenXlaPolicy

PROMPTS = random_prompts(3, [1, 5, 30, 70, 140])
BUCKETS = {
    "num_batched_tokens_buckets": [24, 64],
    "num_seqs_buckets": [1, 4],
    "context_length_buckets": [100, 256],
}


NUM_ENGINES = itertools.count()


@contextmanager
def serving(model: TinyModel) -> Iterator[LLM]:
    """An engine that has just become ready, with a cache of a size of its own: no other engine compiled its graphs."""
    options = {"kv_cache_memory_bytes": (7 << 20) - (next(NUM_ENGINES) << 16)}
    llm = LLM(str(model.path), **(DEFAULTS | options | {"additional_config": {"neuron_config": BUCKETS}}))
    try:
        yield llm
    finally:
        runner_of(llm).background_compiler.stop()
        with suppress(Exception):
            runner_of(llm).background_compiler.wait()
        del llm
        shut_down()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record of compilations, in order: whether each ran in the engine's own thread."""
    made: list[bool] = []
    compile_one = Executable.compile

    def note(self: Executable) -> None:
        made.append(threading.current_thread() is threading.main_thread())
        compile_one(self)

    monkeypatch.setattr(Executable, "compile", note)
    return made


def test_tokens_are_right_while_sizes_are_compiled(
    tiny_model: Callable[[str], TinyModel], compilations: list[bool]
) -> None:
    model = tiny_model("llama")
    reference = expected(model, PROMPTS)
    drawn = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=2, repetition_penalty=1.2)
    with serving(model) as llm:
        policy, count = runner_of(llm).graph_policy, len(compilations)
        assert len(policy.offered) < len(policy.sizes)
        served, dispatch, numbers = set(), policy.dispatch, set[int]()

        def record(need: Any) -> Any:
            size = dispatch(need)
            assert size.num_tokens in runner_of(llm).tokenwise_graph_batch_sizes
            served.add(size)
            return size

        policy.dispatch = record  # type: ignore[method-assign]
        others: list[list[int]] = []
        while runner_of(llm).background_compiler.is_making or len(others) < 2:
            numbers.add(len(policy.offered))
            assert generate(llm, PROMPTS) == reference
            (output,) = llm.generate([{"prompt_token_ids": list(PROMPTS[2])}], drawn, use_tqdm=False)
            others.append(list(output.outputs[0].token_ids))
        assert all(tokens == others[0] for tokens in others)
        runner_of(llm).background_compiler.wait()
        assert len(numbers) > 2, "nothing was served between two sizes"
        assert set(policy.offered) == set(policy.sizes)
        assert len(compilations) > count and not any(compilations[count:])
        # Batches that need each of the sizes, until all have served.
        for _ in range(40):
            for batch in (PROMPTS, PROMPTS[:1], PROMPTS[4:], PROMPTS[1:2], [PROMPTS[4]] * 4, [PROMPTS[0]] * 4):
                assert generate(llm, batch) == [reference[PROMPTS.index(prompt)] for prompt in batch]
            if served == set(policy.sizes):
                break
        assert served == set(policy.sizes), set(policy.sizes) - served


def test_a_running_batch_changes_over_to_a_compiled_size(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request in steady decode, which is packed once, runs at the smallest size when that is compiled."""
    model, may_stand, compile_in_background = (
        tiny_model("llama"),
        threading.Event(),
        OpenXlaPolicy.compile_in_background,
    )

    def compile_slowly(policy: OpenXlaPolicy, run: Callable[[], None]) -> Callable[[], None]:
        wait = compile_in_background(policy, run)
        return lambda: (may_stand.wait(), wait())[1]

    monkeypatch.setattr(OpenXlaPolicy, "compile_in_background", compile_slowly)
    with serving(model) as llm:
        runner, core, sizes = runner_of(llm), llm.llm_engine, list[StepSize]()
        run = runner.parts.graph.run

        def record(batch: Any, step: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                sizes.append(step.size)
            return run(batch, step)

        runner.parts.graph.run = record
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
        core.add_request("0", {"prompt_token_ids": list(PROMPTS[1])}, params)
        while core.has_unfinished_requests():
            outputs = core.step()
            if len(sizes) == 20:
                may_stand.set()
                runner.background_compiler.wait()
        may_stand.set()
        assert list(outputs[0].outputs[0].token_ids) == model.greedy(PROMPTS[1], 200)
        decodes = [size for size in sizes if size.kind == StepKind.DECODE]
        assert len(set(decodes[:15])) == 1 and decodes[0].num_reqs == 4
        assert decodes[25].num_reqs == 1


def test_a_failing_compilation_harms_no_request(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compilation that fails, here every third, is left out: larger sizes serve in its place, with a warning each."""
    model, warnings = tiny_model("llama"), list[str]()
    reference, compile_one = expected(model, PROMPTS), _XLAC._xla_warm_up_cache
    monkeypatch.setattr(background.logger, "warning", lambda text, *values: warnings.append(text % values))
    with serving(model) as llm:
        policy, attempts = runner_of(llm).graph_policy, itertools.count()

        def fail_sometimes(*args: Any) -> None:
            if next(attempts) % 3 == 0:
                raise MemoryError("no memory for a graph")
            compile_one(*args)

        monkeypatch.setattr(_XLAC, "_xla_warm_up_cache", fail_sometimes)
        while runner_of(llm).background_compiler.is_making:
            assert generate(llm, PROMPTS) == reference
        left_out = len(policy.sizes) - len(policy.offered)
        assert 0 < left_out == len(warnings)
        assert all("no memory for a graph" in warning for warning in warnings)
        assert generate(llm, PROMPTS) == reference
        with pytest.raises(MemoryError):
            runner_of(llm).background_compiler.wait()


def test_new_weights_while_sizes_are_compiled(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    old = tiny_model("llama")
    new = other_weights(old, tmp_path / "new")
    with serving(old) as llm:
        models, count = [old, new], 0
        while runner_of(llm).background_compiler.is_making:
            models.reverse()
            count += 1
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models[0].path)})
            llm.reset_prefix_cache()
            assert generate(llm, PROMPTS) == expected(models[0], PROMPTS)
        runner_of(llm).background_compiler.wait()
        assert count > 1 and generate(llm, PROMPTS) == expected(models[0], PROMPTS)


def test_several_workers_cannot() -> None:
    assert NeuronConfig().warms_up_in_background(1) and not NeuronConfig().warms_up_in_background(2)
    assert not NeuronConfig(warm_up="full").warms_up_in_background(1)
    with pytest.raises(
        ValueError, match="warm_up=background needs one worker, there are 2: leave it out, or give full"
    ):
        NeuronConfig(warm_up="background").warms_up_in_background(2)
