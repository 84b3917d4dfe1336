"""Weights of a trainer in a running engine, in chunks: the next tokens are theirs, and nothing is compiled again."""

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import compilations, engine
from greedy import expected, generate
from lane import HAS_OPENXLA, ROOT
from safetensors.torch import load_file
from test_quantised_models import LATER
from test_reload import reload_weights, small_engine
from vllm import LLM

from model_runner_base.errors import CheckpointError, WeightUpdateError
from model_runner_base.models.gloo_transfer import (
    GlooInitInfo,
    GlooSender,
    in_chunks,
    transfer_config,
    update_info,
)
from model_runner_base.runner.sleep import SleepingError
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import metric, runner_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.quantized import write_checkpoints
from model_runner_base.testing.weights import other_weights
from model_runner_base.vllm_compat.patches import worker_answers
from model_runner_base.vllm_compat.probes.config import note_local_replicas
from model_runner_base.vllm_compat.types import weight_transfer

PROMPTS = random_prompts(20, [5, 30, 70])
Make = Callable[[str], TinyModel]
Weights = list[tuple[str, torch.Tensor]]
WHOLE, SMALL = 1 << 30, 1
"""Bytes of a chunk: all weights in one, or one tensor in each."""


def weights_of(model: TinyModel) -> Weights:
    """Weights in an order in which the parts of a layer are far from each other."""
    weights = list(load_file(model.path / "model.safetensors").items())
    random.Random(1).shuffle(weights)
    return weights


class Trainer:
    """Trainer in a thread of the engine's process."""

    def __init__(self, llm: LLM, num_workers: int = 1) -> None:
        self.llm = llm
        self._threads = ThreadPoolExecutor(1)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 1 + num_workers}
        joining = self._threads.submit(GlooSender, GlooInitInfo(**info))
        self.call("init_weight_transfer_engine", init_info=info)
        self._sender = joining.result(60)

    def call(self, method: str, **kwargs: Any) -> None:
        self.llm.collective_rpc(method, kwargs=kwargs)

    def send(self, chunk: Weights, receive: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Sends a chunk to ``update_weights``, or to another function that receives it."""
        sending = self._threads.submit(self._sender.send, chunk)
        try:
            (receive or (lambda info: self.call("update_weights", update_info=info)))(update_info(chunk))
        finally:
            sending.result(60)

    def update(self, model: TinyModel, num_bytes: int, start: str = "start_weight_update") -> None:
        self.call(start)
        for chunk in in_chunks(weights_of(model), num_bytes):
            self.send(chunk)
        self.call("finish_weight_update")
        self.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def old(tiny_model: Make) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def new(old: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    model = other_weights(old, tmp_path_factory.mktemp("weights") / "new")
    assert expected(model, PROMPTS) != expected(old, PROMPTS)
    return model


@pytest.fixture(scope="module")
def trainer(old: TinyModel) -> Iterator[Trainer]:
    """An engine with graphs, where the device has some, that a trainer is connected to."""
    with small_engine(old, weight_transfer_config=transfer_config()) as llm:
        yield Trainer(llm)


def test_tokens_after_updates_in_one_chunk_and_in_many(trainer: Trainer, old: TinyModel, new: TinyModel) -> None:
    llm, before = trainer.llm, compilations()
    assert generate(llm, PROMPTS) == expected(old, PROMPTS)
    for model, num_bytes in ((new, WHOLE), (old, SMALL), (new, SMALL), (old, WHOLE)):
        trainer.update(model, num_bytes)
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
    assert compilations() == before, "an update compiled"


def test_the_prefix_cache_is_left_to_the_caller(trainer: Trainer, old: TinyModel, new: TinyModel) -> None:
    """Cached blocks of the old weights are read if the caller does not reset them."""
    llm = trainer.llm
    trainer.update(old, WHOLE)
    assert generate(llm, PROMPTS) == expected(old, PROMPTS)
    trainer.call("start_weight_update")
    trainer.send(weights_of(new))
    trainer.call("finish_weight_update")
    hits = metric(llm, "vllm:prefix_cache_hits")
    assert generate(llm, PROMPTS) != expected(new, PROMPTS)
    assert metric(llm, "vllm:prefix_cache_hits") > hits
    llm.reset_prefix_cache()
    hits = metric(llm, "vllm:prefix_cache_hits")
    assert generate(llm, PROMPTS) == expected(new, PROMPTS)
    assert metric(llm, "vllm:prefix_cache_hits") == hits
    trainer.update(old, WHOLE)


def test_what_does_not_fit_ends_the_update_alone(trainer: Trainer, old: TinyModel, new: TinyModel) -> None:
    """A misfit is named, the sender is not left waiting, and the engine serves on with the old weights."""
    llm, query = trainer.llm, "model.layers.0.self_attn.q_proj.weight"
    weights = dict(weights_of(new))
    cut = [("model.norm.weight", weights["model.norm.weight"]), (query, weights[query][1:].contiguous())]
    words = rf"{query} has shape \[\d+, \d+\], and must have \[\d+, \d+\]; the model keeps its weights"
    cases: list[tuple[Weights, str]] = [
        (cut, words),
        ([("model.layers.0.self_attn.no_such_weight", torch.ones(3))], "no_such_weight.*load again"),
    ]
    for chunk, message in cases:
        trainer.call("start_weight_update")
        with pytest.raises(CheckpointError, match=message):
            trainer.send(chunk)
        assert generate(llm, PROMPTS) == expected(old, PROMPTS), message
    trainer.call("start_weight_update")
    trainer.send([(query, weights[query])])
    with pytest.raises(CheckpointError, match=r"only a part of the weights of .*qkv_proj was given"):
        trainer.call("finish_weight_update")
    assert generate(llm, PROMPTS) == expected(old, PROMPTS)
    trainer.call("start_weight_update")
    trainer.send(list(weights.items()))
    with pytest.raises(CheckpointError, match=r"must have .*some layers may hold new weights, so load again"):
        trainer.send(cut)
    trainer.update(new, SMALL)
    assert generate(llm, PROMPTS) == expected(new, PROMPTS)
    trainer.update(old, WHOLE)
    assert generate(llm, PROMPTS) == expected(old, PROMPTS)


def test_calls_in_a_wrong_order(trainer: Trainer, old: TinyModel, new: TinyModel) -> None:
    llm, runner = trainer.llm, runner_of(trainer.llm)
    with pytest.raises(WeightUpdateError, match="no weight update has started"):
        trainer.call("finish_weight_update")
    if weight_transfer.HAS_SESSIONS:
        with pytest.raises(WeightUpdateError, match="no weight update has started"):
            trainer.call("update_weights", update_info={})
    with pytest.raises(WeightUpdateError, match="there is no draft model"):
        trainer.call("start_draft_weight_update")
    runner.pending = lambda grammar_output: None
    with pytest.raises(WeightUpdateError, match="a step waits for sample_tokens"):
        trainer.call("start_weight_update")
    runner.pending = None
    trainer.call("start_weight_update")
    for method in ("start_weight_update", "shutdown_weight_transfer_engine", "reload_weights"):
        with pytest.raises(WeightUpdateError, match="a weight update has started"):
            trainer.call(method)
    with pytest.raises(WeightUpdateError, match="a weight update has started"):
        trainer.call("save_sharded_state", path="unused")
    with pytest.raises(WeightUpdateError, match="update_info has 2 parts, and must have 1"):
        trainer.call("update_weights", update_info=[{}, {}])
    with pytest.raises(WeightUpdateError, match=r"a step came between .*pause the engine"):
        runner.execute_model(None)
    trainer.call("finish_weight_update")
    assert generate(llm, PROMPTS) == expected(old, PROMPTS), "an update without chunks changed weights"
    with pytest.raises(ValueError, match="Invalid init_info"):
        trainer.call("init_weight_transfer_engine", init_info={"port": 1})


def test_an_update_is_aborted(trainer: Trainer, old: TinyModel, new: TinyModel) -> None:
    llm, query = trainer.llm, "model.layers.0.self_attn.q_proj.weight"
    for is_started in (False, True):
        if is_started:
            trainer.call("start_weight_update")
            trainer.send([(query, dict(weights_of(new))[query])])
        trainer.call("abort_weight_update")
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)
    trainer.update(new, WHOLE)
    assert generate(llm, PROMPTS) == expected(new, PROMPTS)
    trainer.update(old, WHOLE)


def test_a_step_during_an_update_ends_a_rank_that_is_not_heard_of(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks would wait for it in a collective."""

    class Ended(BaseException): ...

    def end(status: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    runner = runner_of(trainer.llm)
    monkeypatch.setattr(runner.step_guard, "_rank", 1)
    trainer.call("start_weight_update")
    with pytest.raises(Ended):
        runner.execute_model(None)
    trainer.call("abort_weight_update")


def test_a_chunk_is_loaded_when_the_device_has_read_it(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, waits = runner_of(trainer.llm), []
    synchronize = runner.device_ops.synchronize
    monkeypatch.setattr(runner.device_ops, "synchronize", lambda: waits.append(synchronize()))
    with runner.reloading() as load_chunk:
        for count in (1, 2):
            load_chunk([])
            assert len(waits) == count


def test_weights_that_sleep_are_not_reached(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(trainer.llm)
    monkeypatch.setattr(runner.sleep, "tags", {"weights"})
    for method, kwargs in (
        ("start_weight_update", {}),
        ("save_sharded_state", {"path": "unused"}),
        ("reload_weights", {}),
    ):
        with pytest.raises((SleepingError, ValueError), match=r"weights sleep: call wake_up"):
            trainer.call(method, **kwargs)
    with pytest.raises(SleepingError, match=r"weights sleep: call wake_up"), runner.reloading():
        pass


def test_methods_of_vllms_front_end(trainer: Trainer, old: TinyModel, new: TinyModel) -> None:
    """Releases with sessions have three calls, and versions; the others have one call for all weights."""
    llm: Any = trainer.llm
    if weight_transfer.HAS_SESSIONS:
        llm.start_weight_update()
        # A list has the parts of all workers.
        trainer.send(weights_of(new), lambda info: llm.update_weights({"update_info": [info]}))
        llm.finish_weight_update(weight_version="second")
        assert llm.get_weight_version() == "second"
    else:
        trainer.send(weights_of(new), lambda info: llm.update_weights({"update_info": info}))
    llm.reset_prefix_cache()
    assert generate(llm, PROMPTS) == expected(new, PROMPTS)
    trainer.update(old, WHOLE)


@pytest.mark.newest
def test_answers_name_the_weights_that_they_are_of(trainer: Trainer, old: TinyModel) -> None:
    from vllm import SamplingParams, TokensPrompt

    llm: Any = trainer.llm
    llm.update_weight_version("third")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=list(PROMPTS[0]))], params, use_tqdm=False)
    assert [span.version for span in output.outputs[0].weight_versions] == ["third"]


def test_a_worker_takes_its_own_part() -> None:
    infos = [{"part": index} for index in range(4)]
    parallel: Any = SimpleNamespace(data_parallel_index=1, data_parallel_size=2, data_parallel_size_local=2)
    note_local_replicas(parallel)
    parallel.data_parallel_size, parallel.world_size, parallel.rank = 1, 2, 1  # As in the process of a replica.
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert weight_transfer.info_of_rank(infos, config) == {"part": 3}
    assert weight_transfer.info_of_rank({"part": 9}, config) == {"part": 9}
    parallel.rank = 0  # A list that is too short has a part for this rank.
    with pytest.raises(ValueError, match="update_info has 3 parts, and must have 4"):
        weight_transfer.info_of_rank(infos[:3], config)


@pytest.mark.in_turns
def test_two_workers_take_their_parts_of_each_tensor(old: TinyModel, new: TinyModel) -> None:
    options = {"enforce_eager": True, "tensor_parallel_size": 2, "weight_transfer_config": transfer_config()}
    with small_engine(old, **options) as llm:
        trainer = Trainer(llm, num_workers=2)

        def send(chunk: Weights, renamed: dict[str, str] | None = None) -> None:
            """Sends a chunk, of which the second worker may be told another name."""

            def receive(info: dict[str, Any]) -> None:
                second = info | {"names": [(renamed or {}).get(name, name) for name in info["names"]]}
                trainer.call("update_weights", update_info=[info, second])

            trainer.send(chunk, receive)

        def update() -> None:
            trainer.call("start_weight_update")
            for chunk in in_chunks(weights_of(new), 1 << 16):
                send(chunk)
            trainer.call("finish_weight_update")
            llm.reset_prefix_cache()

        norm = "model.norm.weight"
        # An error of both workers ends the update of both.
        trainer.call("start_weight_update")
        with pytest.raises((RuntimeError, ValueError), match=r"must have .*the model keeps its weights"):
            send([(norm, torch.ones(3))])
        update()
        assert generate(llm, PROMPTS) == expected(new, PROMPTS)
        # An error of the second worker leaves the first one's update open.
        trainer.call("start_weight_update")
        with pytest.raises((RuntimeError, ValueError), match="no_such_weight"):
            send([(norm, dict(weights_of(new))[norm])], {norm: "model.layers.0.no_such_weight"})
        with pytest.raises((RuntimeError, ValueError), match=r"a weight update has started: .* abort_weight_update"):
            trainer.call("start_weight_update")
        trainer.call("abort_weight_update")
        update()
        assert generate(llm, PROMPTS) == expected(new, PROMPTS)


def test_answers_of_all_workers_are_read_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue:
        def __init__(self, *answers: str) -> None:
            self.answers = list(answers)

        def dequeue(self, timeout: float | None = None) -> str:
            if not self.answers:
                raise TimeoutError
            return self.answers.pop(0)

    def read(executor: Any) -> None:
        """Does as vLLM's ``collective_rpc``."""
        for queue in executor.response_mqs:
            if queue.dequeue() == "error":
                raise RuntimeError("a worker failed")

    call = worker_answers._reading_all(read, lambda vllm_config: True)
    queues = [Queue("done", "next"), Queue("error", "next"), Queue("error", "next")]
    executor = SimpleNamespace(vllm_config=None, is_failed=False, response_mqs=queues)
    with pytest.raises(RuntimeError, match=r"a worker failed$"):
        call(executor)
    assert [queue.answers for queue in queues] == [["next"]] * 3
    assert executor.response_mqs is queues
    monkeypatch.setattr(worker_answers, "SECONDS", 0.0)
    executor.response_mqs = [Queue("error"), Queue()]
    with pytest.raises(RuntimeError, match=r"a worker failed; worker 1 has not answered .* restart the engine"):
        call(executor)


def load(llm: LLM, chunks: Iterable[Weights]) -> None:
    """Loads chunks as a worker extension would, and overwrites each afterwards, as a sender with one buffer does."""
    with runner_of(llm).reloading() as load_chunk:
        for chunk in chunks:
            sent = [(name, tensor.clone()) for name, tensor in chunk]
            load_chunk(sent)
            for _, tensor in sent:
                tensor.zero_()
    llm.reset_prefix_cache()


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_sender_may_overwrite_its_buffers(name: str, tiny_model: Make, tmp_path: Path) -> None:
    model = tiny_model(name)
    other = other_weights(model, tmp_path / "new")
    with small_engine(model, enforce_eager=True) as llm:
        load(llm, in_chunks(weights_of(other), SMALL))
        assert generate(llm, PROMPTS) == expected(other, PROMPTS)
        # As verl calls it, with a generator.
        reload_weights(llm, weights_iterator=iter(weights_of(model)), is_checkpoint_format=True)
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_parts_of_quantised_weights_in_different_chunks(name: str, tiny_model: Make, tmp_path: Path) -> None:
    quantised, plain = write_checkpoints(tiny_model("llama"), LATER[name], tmp_path)
    with engine(quantised.path, max_model_len=128, enforce_eager=True) as llm:
        weights = weights_of(quantised)
        zeros = [(key, torch.zeros_like(t)) for key, t in weights_of(plain) if not key.endswith("proj.weight")]
        load(llm, [zeros])
        assert generate(llm, PROMPTS) != expected(plain, PROMPTS)
        load(llm, in_chunks(weights, SMALL))
        assert generate(llm, PROMPTS) == expected(plain, PROMPTS)
        part = next(key for key, _ in weights if key.endswith("scale"))
        with pytest.raises(CheckpointError, match=r"is missing, and .* needs it"):
            load(llm, [[(key, t) for key, t in weights if key != part]])
        load(llm, in_chunks(weights, SMALL))
        assert generate(llm, PROMPTS) == expected(plain, PROMPTS)


def acceptance(llm: LLM) -> float:
    """Share of accepted drafts in a run of the prompts."""
    counts = [metric(llm, f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted")]
    generate(llm, PROMPTS)
    drafted, accepted = (
        metric(llm, f"vllm:spec_decode_num_{name}_tokens") - count
        for name, count in zip(("draft", "accepted"), counts, strict=True)
    )
    return accepted / drafted


@pytest.mark.in_turns
def test_a_draft_model_is_updated_by_a_session_of_its_own(old: TinyModel, new: TinyModel) -> None:
    config = speculation("same", old)
    with small_engine(old, weight_transfer_config=transfer_config(), speculative_config=config) as llm:
        trainer, before = Trainer(llm), compilations()
        assert acceptance(llm) > 0.8
        trainer.update(new, SMALL)
        assert generate(llm, PROMPTS) == expected(new, PROMPTS)
        assert acceptance(llm) < 0.5, "the draft got the model's weights"
        trainer.update(new, SMALL, "start_draft_weight_update")
        assert acceptance(llm) > 0.8
        assert generate(llm, PROMPTS) == expected(new, PROMPTS)
        assert compilations() == before
        with pytest.raises(CheckpointError, match="a model with a draft model cannot be saved as sharded state"):
            llm.collective_rpc("save_sharded_state", kwargs={"path": "unused"})


def test_a_draft_model_leaves_the_layers_that_it_shares(old: TinyModel) -> None:
    """An EAGLE head has the model's embeddings and logits head."""
    config = speculation("head", old)
    with small_engine(old, speculative_config=config, enforce_eager=True) as llm:
        runner, of_model = runner_of(llm), weights_of(old)
        own = load_file(Path(config["model"]) / "model.safetensors")
        shared = {
            name.removeprefix("model."): tensor
            for name, tensor in of_model
            if name in ("model.embed_tokens.weight", "lm_head.weight")
        }
        assert len(shared) == 2
        with runner.reloading(is_draft=True) as load_chunk:
            load_chunk([(name, torch.zeros_like(tensor)) for name, tensor in {**own, **shared}.items()])
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)
        assert not runner.get_draft_model().model.fc.weight.any(), "the draft kept its own layers"
        load(llm, [[(name, torch.zeros_like(tensor)) for name, tensor in of_model]])
        assert generate(llm, PROMPTS) != expected(old, PROMPTS), "the model's own weights are passed over"
        load(llm, [of_model])
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)


def test_sharded_state_is_saved_and_loaded(old: TinyModel, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for file in old.path.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, saved)
    with small_engine(old, enforce_eager=True) as llm:
        llm.collective_rpc("save_sharded_state", kwargs={"path": str(saved), "max_size": 1 << 16})
    assert len(list(saved.glob("model-rank-0-part-*.safetensors"))) > 1
    with engine(saved, max_model_len=128, enforce_eager=True, load_format="sharded_state") as llm:
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)


def test_sharded_state_of_experts_is_refused(tiny_model: Make, tmp_path: Path) -> None:
    """The base lays the weights of experts out for plain torch."""
    words = r"experts.*w13_weight has another layout than it was loaded in"
    with small_engine(tiny_model("mixtral"), enforce_eager=True) as llm, pytest.raises(CheckpointError, match=words):
        llm.collective_rpc("save_sharded_state", kwargs={"path": str(tmp_path)})
    assert not list(tmp_path.iterdir())


@pytest.mark.openxla
def test_sharded_state_of_relaid_weights_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has another layout than it was loaded in"):
        trainer.call("save_sharded_state", path=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_without_a_config_the_setting_is_named(old: TinyModel) -> None:
    with small_engine(old, enforce_eager=True) as llm:
        for method, kwargs in (
            ("init_weight_transfer_engine", {"init_info": {}}),
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {}}),
        ):
            with pytest.raises(WeightUpdateError, match="not configured: set weight_transfer_config"):
                llm.collective_rpc(method, kwargs=kwargs)
        assert generate(llm, PROMPTS) == expected(old, PROMPTS)
        if not HAS_OPENXLA:
            check_an_engine_of_vllms_kind(llm, old)


def check_an_engine_of_vllms_kind(llm: LLM, model: TinyModel) -> None:
    """Checks an engine that prepares and finishes the model itself, as vLLM's do, and does not override
    ``update_weights``."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from model_runner_base.runner.weight_updates import WeightUpdates

    weights = weights_of(model)

    class Theirs(WeightTransferEngine):  # type: ignore[type-arg, misc]
        init_info_cls = update_info_cls = SimpleNamespace  # type: ignore[assignment]

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:  # type: ignore[override]
            self.model.load_weights([weights[update_info.index]])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    config = llm.llm_engine.vllm_config
    updates = WeightUpdates(runner_of(llm), config, torch.device("cpu"))
    updates._transfer = Theirs(transfer_config(), config, torch.device("cpu"), updates._model)  # type: ignore[call-arg, arg-type]
    runner_of(llm).model.model.norm.weight.data.zero_()
    updates.start()
    for index in range(len(weights)):
        updates.update({"index": index})
    updates.finish()
    llm.reset_prefix_cache()
    assert generate(llm, PROMPTS) == expected(model, PROMPTS)
    updates.start()
    updates.shutdown()
    assert generate(llm, PROMPTS) == expected(model, PROMPTS), "the session outlasts the worker"


def test_backends_that_write_parameters_are_refused(old: TinyModel) -> None:
    config = weight_transfer.config_of("sparse_nccl")
    with pytest.raises(ValueError, match=r"weight transfer by sparse_nccl, .* is not supported"):
        small_engine(old, weight_transfer_config=config).__enter__()


@pytest.mark.in_turns
@pytest.mark.newest
def test_the_loop_of_the_example() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "trainer_loop.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the engine's greedy tokens were the trainer's" in done.stdout
    assert done.stdout.count("weights sent in") == 3
