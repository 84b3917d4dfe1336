"""Sleep of a real engine: memory is freed, tokens are the same after it, and what comes meanwhile is refused."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compilations, engine
from greedy import expected, generate
from lane import HAS_OPENXLA
from vllm import LLM

from model_runner_base.device_ops import DeviceOps
from model_runner_base.errors import WeightUpdateError
from model_runner_base.models.draft_loading import draft_of
from model_runner_base.testing.adapters import make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_lora import greedy_requests, run
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import core_of, greedy, metric, runner_of
from model_runner_base.testing.models import TinyModel

PROMPTS = random_prompts(20, [5, 30, 70])
LONG = PROMPTS[:2]
"""Prompts whose outputs are long enough to repeat themselves, as prompt lookup needs them."""
SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "enable_sleep_mode": True}
FEW_BUCKETS = {
    "num_batched_tokens_buckets": [64],
    "num_seqs_buckets": [4],
    "context_length_buckets": [128],
}
EAGER = {"enforce_eager": True}
COMPILED = {"additional_config": {"neuron_config": FEW_BUCKETS}}
WAYS = [
    pytest.param(EAGER, id="eager"),
    pytest.param(COMPILED, id="compiled", marks=pytest.mark.openxla),
]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module", params=WAYS)
def llm(request: pytest.FixtureRequest, model: TinyModel) -> Iterator[LLM]:
    with engine(model.path, **SMALL, **request.param) as llm:
        yield llm


@contextmanager
def unchanged_tokens(llm: LLM, model: TinyModel) -> Iterator[None]:
    """Context that must not change the tokens of requests, and must compile nothing."""
    assert generate(llm, PROMPTS) == expected(model, PROMPTS)
    before = compilations()
    yield
    assert generate(llm, PROMPTS) == expected(model, PROMPTS)
    assert compilations() == before


def held_bytes(tensors: Any) -> int:
    """Bytes that tensors have on their device."""
    if tensors and tensors[0].device.type == "cpu":
        return sum(each.untyped_storage().nbytes() for each in tensors)
    return sum(each.nbytes for each in tensors)


def are_zeros(tensors: Iterable[torch.Tensor]) -> bool:
    return not any(each.cpu().any() for each in tensors)  # On the device, this would be a graph.


def weights(llm: LLM) -> list[torch.Tensor]:
    """Weights and buffers on the device; some devices leave a few on the host."""
    model, kind = runner_of(llm).model, runner_of(llm).device.type
    return [each for each in (*model.parameters(), *model.buffers()) if each.device.type == kind]


def caches(llm: LLM) -> list[torch.Tensor]:
    return [*runner_of(llm).parts.kv_caches]


def test_storages_of_plain_torch() -> None:
    """Storages are emptied once, whatever views they have. One that NumPy shares keeps its memory, and is zeros if it
    is dropped."""
    ops, base = DeviceOps(torch.device("cpu")), torch.arange(6.0)
    view, shared, known = base.view(2, 3)[1], torch.arange(4.0), torch.arange(3.0)
    array, elsewhere = (shared.numpy(), known.numpy())[0], torch.empty(2, device="meta")
    ops.sleep("weights", [base, view, known, elsewhere], [shared])
    assert [each.untyped_storage().nbytes() for each in (base, view, shared)] == [0, 0, 16]
    ops.wake("kv_cache")
    assert base.untyped_storage().nbytes() == 0
    ops.wake("weights")
    assert view.tolist() == [3, 4, 5] and known.tolist() == [0, 1, 2] and not array.any()
    view[0] = 9
    assert base.tolist() == [0, 1, 2, 9, 4, 5]


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_the_same(level: int, llm: LLM, model: TinyModel) -> None:
    """Memory is freed, caches come back as zeros, and weights as they were or, at level 2, by a reload."""
    with unchanged_tokens(llm, model):
        num_bytes = held_bytes(weights(llm)), held_bytes(caches(llm))
        buffers = [each.cpu().clone() for each in runner_of(llm).model.buffers()]
        for _ in range(2):
            llm.sleep(level=level)
            assert (held_bytes(weights(llm)), held_bytes(caches(llm))) == (0, 0)
            llm.wake_up(tags=["weights"])
            assert (held_bytes(weights(llm)), held_bytes(caches(llm))) == (num_bytes[0], 0)
            now = [each.cpu() for each in runner_of(llm).model.buffers()]
            assert all(map(torch.equal, now, buffers))
            if level == 2:
                assert are_zeros(runner_of(llm).model.parameters())
                llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
            assert (held_bytes(weights(llm)), held_bytes(caches(llm))) == num_bytes
            assert are_zeros(caches(llm))
            assert generate(llm, PROMPTS) == expected(model, PROMPTS)


def test_no_prefix_is_found_after_sleep(llm: LLM, model: TinyModel) -> None:
    """Prompts that were cached are computed again, however the engine was sent to sleep."""
    for sleep, wake in (
        (llm.sleep, llm.wake_up),
        (lambda: llm.collective_rpc("sleep"), lambda: llm.collective_rpc("wake_up")),
        (lambda: llm.collective_rpc("discard", args=(("kv_cache",),)), lambda: llm.collective_rpc("wake_up")),
    ):
        generate(llm, PROMPTS)
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        assert metric(llm, "vllm:prefix_cache_hits") > hits
        sleep()
        wake()
        hits = metric(llm, "vllm:prefix_cache_hits")
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        assert metric(llm, "vllm:prefix_cache_hits") == hits


def test_requests_to_a_sleeping_engine_are_refused(llm: LLM, model: TinyModel) -> None:
    """``LLM`` refuses them before they are queued, until all tags are awake."""
    with unchanged_tokens(llm, model):
        llm.sleep()
        with pytest.raises(ValueError, match=r"kv_cache and weights sleep: call wake_up\(\)"):
            generate(llm, PROMPTS)
        llm.wake_up(tags=["kv_cache"])
        with pytest.raises(ValueError, match=r"^weights sleep: call wake_up\(\)"):
            generate(llm, PROMPTS)
        llm.wake_up(tags=["weights"])
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        llm.collective_rpc("sleep", kwargs={"level": 1})
        with pytest.raises(ValueError, match=r'sleep: call collective_rpc\("wake_up"\)'):
            generate(llm, PROMPTS)
        llm.collective_rpc("wake_up")
        assert not core_of(llm).scheduler.requests


def test_a_step_of_a_sleeping_runner_ends_its_requests_alone(llm: LLM, model: TinyModel) -> None:
    """A request that reaches a sleeping runner ends with an error; the worker was called without the engine's help."""
    core = llm.llm_engine
    with unchanged_tokens(llm, model):
        for step in range(3):  # Before its first step, as it decodes, and as it decodes and others arrive.
            core.add_request("a", {"prompt_token_ids": list(PROMPTS[2])}, greedy(20))
            for _ in range(2 * step):
                core.step()
            (worker,) = llm.collective_rpc(lambda worker: worker.worker)
            worker.sleep()
            if step == 2:
                core.add_request("b", {"prompt_token_ids": list(PROMPTS[0])}, greedy(20))
            done = {}
            while core.has_unfinished_requests():
                done |= {output.request_id: output for output in core.step() if output.finished}
            assert len(done) == 1 + (step == 2)
            for output in done.values():
                (completion,) = output.outputs
                assert completion.finish_reason == "error"
                assert "SleepingError: the engine sleeps (kv_cache, weights)" in str(completion.stop_reason)
            worker.wake_up()
            llm.reset_prefix_cache()
            assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        assert not runner_of(llm).errors


def test_running_requests_keep_their_keys(llm: LLM, model: TinyModel) -> None:
    """A worker is not put to sleep while requests run."""
    core = llm.llm_engine
    with unchanged_tokens(llm, model):
        core.add_request("a", {"prompt_token_ids": list(PROMPTS[1])}, greedy(20))
        core.step()
        with pytest.raises(ValueError, match="requests are running, and sleep drops their keys"):
            llm.collective_rpc("sleep")
        tokens: list[int] = []
        while core.has_unfinished_requests():
            tokens = [token for output in core.step() for token in output.outputs[0].token_ids]
        assert tokens == expected(model, PROMPTS)[1]


def test_calls_that_a_sleeping_engine_cannot_follow(llm: LLM, model: TinyModel) -> None:
    with unchanged_tokens(llm, model):
        for level in (3, -1):
            with pytest.raises(ValueError, match=f"there is no sleep level {level}"):
                llm.sleep(level=level)
        for call in ("wake_up", "discard"):
            with pytest.raises(ValueError, match="unknown tags scheduler: use weights or kv_cache"):
                llm.collective_rpc(call, args=(["scheduler"],))
        with pytest.raises(ValueError, match=r"use sleep\(level=2\)"):
            llm.collective_rpc("discard", args=(["weights"],))
        llm.sleep(level=2)
        with pytest.raises(ValueError, match=r'call wake_up\(tags=\["weights"\]\) before reload_weights'):
            llm.collective_rpc("reload_weights")
        llm.collective_rpc("sleep", kwargs={"level": 1})  # The engine sleeps, and goes on sleeping.
        llm.collective_rpc("wake_up", kwargs={"tags": []})  # All tags, as for vLLM.
        assert llm.collective_rpc("sleeping_tags") == [[]]
        llm.wake_up()
        assert are_zeros(runner_of(llm).model.parameters())
        llm.collective_rpc("reload_weights")


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("num_freed", [0, 1])
def test_a_sleep_that_fails_leaves_the_engine_awake(
    num_freed: int, level: int, llm: LLM, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may have too little memory for the weights; no prefix is found whose keys were dropped before."""
    ops, freed = runner_of(llm).device_ops, list[str]()

    def sleep(tag: str, kept: Any, dropped: Any) -> None:
        if len(freed) == num_freed:
            raise MemoryError("no host memory")
        freed.append(tag)
        type(ops).sleep(ops, tag, kept, dropped)

    with unchanged_tokens(llm, model):
        num_bytes = held_bytes(weights(llm)), held_bytes(caches(llm))
        with monkeypatch.context() as patch:
            patch.setattr(ops, "sleep", sleep)
            with pytest.raises(MemoryError):
                llm.sleep(level=level)
        assert len(freed) == num_freed
        assert llm.collective_rpc("sleeping_tags") == [[]]
        assert (held_bytes(weights(llm)), held_bytes(caches(llm))) == num_bytes
        llm.wake_up()  # vLLM 0.33 has paused the scheduler.
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        llm.sleep(level=1)
        assert (held_bytes(weights(llm)), held_bytes(caches(llm))) == (0, 0)
        llm.wake_up()


def test_sleep_within_a_weight_update_is_refused(llm: LLM, model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come before vLLM pauses the scheduler, so the engine goes on serving."""
    (worker,) = llm.collective_rpc(lambda worker: worker.worker)

    def refuse() -> None:
        raise WeightUpdateError("an update has started")

    with unchanged_tokens(llm, model):
        with monkeypatch.context() as patch:
            patch.setattr(worker.weight_updates, "check_idle", refuse)
            with pytest.raises(ValueError, match="weight update refused: an update has started"):
                llm.sleep()
            for method, args in (("sleep", ()), ("discard", (["kv_cache"],)), ("wake_up", ())):
                with pytest.raises(ValueError, match="weight update refused: an update has started"):
                    llm.collective_rpc(method, args=args)
        assert not llm.llm_engine.is_sleeping()


@pytest.mark.skipif(HAS_OPENXLA, reason="this vLLM has no call for the cache alone")
def test_caches_alone(llm: LLM, model: TinyModel) -> None:
    with unchanged_tokens(llm, model):
        num_bytes = held_bytes(weights(llm))
        for _ in range(3):  # They tell the workers which requests are over, as an engine in its own process does.
            llm.llm_engine.step()
        llm.sleep(level=0)
        llm.release_kv_cache_memory()
        assert (held_bytes(weights(llm)), held_bytes(caches(llm))) == (num_bytes, 0)
        with pytest.raises(ValueError, match="kv_cache sleep"):
            generate(llm, PROMPTS)
        llm.wake_up(tags=["kv_cache"])


@pytest.mark.skipif(HAS_OPENXLA, reason="level 0 came later")
def test_a_paused_engine_refuses_requests_too(llm: LLM, model: TinyModel) -> None:
    with unchanged_tokens(llm, model):
        llm.sleep(level=0)
        with pytest.raises(ValueError, match="requests are paused: call wake_up"):
            generate(llm, PROMPTS)
        llm.wake_up(tags=["scheduling"])


@pytest.mark.in_turns
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("kind", ["same", "ngram"])
def test_drafts(kind: str, options: dict[str, Any], model: TinyModel) -> None:
    """Drafts are accepted as often as before, at level 2 too: a draft model's weights are kept, as no reload has
    them."""
    with engine(model.path, **SMALL, **options, speculative_config=speculation(kind, model)) as llm:

        def accepted() -> int:
            before = metric(llm, "vllm:spec_decode_num_accepted_tokens")
            llm.reset_prefix_cache()
            assert generate(llm, LONG, 60) == expected(model, LONG, 60)
            return int(metric(llm, "vllm:spec_decode_num_accepted_tokens") - before)

        before = accepted()
        assert before > 0
        compiled = compilations()
        for level in (1, 2):
            llm.sleep(level=level)
            draft = draft_of(runner_of(llm).model)
            assert held_bytes(weights(llm)) == 0
            llm.wake_up(tags=["weights"])
            assert draft is None or not are_zeros(draft.parameters())
            if level == 2:
                llm.collective_rpc("reload_weights")
            llm.wake_up()
            assert accepted() == before
        assert compilations() == compiled


@pytest.mark.parametrize("options", WAYS)
def test_adapters(options: dict[str, Any], model: TinyModel, tmp_path: Path) -> None:
    """Adapters in their slots are as before. One that is loaded while weights sleep works after that."""
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    one, other = (make_adapter(model.path, tmp_path, number) for number in (1, 2))
    with engine(model.path, **SMALL, **options, **lora) as llm:
        run(llm, model, greedy_requests(1, [5, 40]), [one, None])
        compiled = compilations()
        for level in (1, 2):
            llm.sleep(level=level)
            if level == 2:
                llm.llm_engine.add_lora(other.request)
            llm.wake_up(tags=["weights"])
            if level == 2:
                llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
            run(llm, model, greedy_requests(2, [5, 40, 20]), [one, None, other])
        assert compilations() == compiled


def test_what_no_reload_brings_back_sleeps_at_level_1_alone(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("gpt-oss")
    with engine(model.path, **SMALL, **EAGER) as llm, unchanged_tokens(llm, model):
        with pytest.raises(ValueError, match="nothing was changed"):
            llm.sleep(level=2)
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        llm.sleep(level=1)
        llm.wake_up()


@pytest.mark.skipif(HAS_OPENXLA, reason="this vLLM has no such setting")
def test_weights_that_a_user_wants_kept(model: TinyModel) -> None:
    with engine(model.path, **SMALL, **EAGER, sleep_preserve_parameter_names=["model.layers.1.*"]) as llm:
        llm.sleep(level=2)
        llm.wake_up()
        for name, weight in runner_of(llm).model.named_parameters():
            assert bool(weight.any()) == name.startswith("model.layers.1."), name
    with (
        engine(model.path, **SMALL, **EAGER, sleep_preserve_parameter_names=["no.such"]) as llm,
        pytest.raises(ValueError, match=r"no weight has a name like no\.such"),
    ):
        llm.sleep(level=2)
