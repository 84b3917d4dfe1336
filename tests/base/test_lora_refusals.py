"""An adapter that cannot serve is refused before the request that names it is queued."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import engine
from test_lora import EAGER, LENGTHS, LORA
from vllm import LLM
from vllm.lora.request import LoRARequest

from model_runner_base.testing.adapters import TinyAdapter, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.checks.test_lora import greedy_requests, run
from model_runner_base.testing.engine import generate, greedy
from model_runner_base.testing.models import TinyModel

PROMPTS = random_prompts(90, [9, 30])


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[LLM]:
    with engine(model.path, **LORA, **EAGER) as llm:
        yield llm


@pytest.fixture(scope="module")
def adapter(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyAdapter:
    return make_adapter(model.path, tmp_path_factory.mktemp("adapters"), 1, rank=4)


def check_unharmed(llm: LLM, model: TinyModel, adapter: TinyAdapter) -> None:
    assert not llm.llm_engine.has_unfinished_requests()
    run(llm, model, greedy_requests(1, LENGTHS), [adapter, None, adapter, None])


def requests(adapter: TinyAdapter, other: TinyAdapter) -> dict[str, LoRARequest]:
    taken, name = adapter.request, adapter.request.lora_name
    return {
        "stood for other files": LoRARequest(name, 7, str(other.path)),
        "is taken by adapter": LoRARequest("another", taken.lora_int_id, str(other.path)),
        "nowhere": LoRARequest("nowhere", 8, str(other.path / "nowhere")),
        "lora_int_id must be an integer": LoRARequest("huge", 2**63, str(other.path)),
        "greater than max_lora_rank": LoRARequest("wide", 9, str(other.path)),
    }


WORDS = (
    "stood for other files",
    "is taken by adapter",
    "nowhere",
    "lora_int_id must be an integer",
    "greater than max_lora_rank",
)


@pytest.mark.parametrize("words", WORDS)
def test_refused_before_it_is_queued(
    words: str, llm: LLM, model: TinyModel, adapter: TinyAdapter, tmp_path: Path
) -> None:
    """An adapter is refused also along with a good one in the same call. Neither leaves anything queued."""
    check_unharmed(llm, model, adapter)
    other = make_adapter(model.path, tmp_path, 2, rank=16 if "rank" in words else 4)
    bad = requests(adapter, other)[words]
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            generate(llm, PROMPTS, greedy(5), [adapter.request, bad])
        check_unharmed(llm, model, adapter)


def test_files_that_are_gone_when_they_are_needed_again(
    llm: LLM, model: TinyModel, adapter: TinyAdapter, tmp_path: Path
) -> None:
    """A request that names them ends with an error, and no other request does."""
    passing = make_adapter(model.path, tmp_path, 5, rank=4)
    run(llm, model, greedy_requests(2, [9]), [passing])
    llm.llm_engine.remove_lora(passing.request.lora_int_id)
    shutil.rmtree(passing.path)
    good, bad = generate(llm, PROMPTS, greedy(5), [adapter.request, passing.request])
    assert list(good.outputs[0].token_ids) == adapter.merged.greedy(PROMPTS[0], 5)
    assert bad.outputs[0].finish_reason == "error"
    check_unharmed(llm, model, adapter)
