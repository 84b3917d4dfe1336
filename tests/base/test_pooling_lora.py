"""LoRA adapters of pooling models: values are those of HF transformers with the adapter merged into the model."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import engine
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification
from vllm import LLM, PoolingParams
from vllm.inputs import TokensPrompt

from model_runner_base.testing.adapters import TinyAdapter, make_adapter
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import metric
from model_runner_base.testing.pooling import TOLERANCE, PoolingModel, make_pooling_model

SHARED = random_prompts(90, [40])[0]
PROMPTS = [*random_prompts(91, [1, 2, 17, 33, 64, 100]), *(SHARED + tail for tail in random_prompts(92, [3, 20]))]
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 16}
LAYERS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    return make_pooling_model("qwen3", tmp_path_factory.mktemp("pooling"))


@pytest.fixture(scope="module")
def adapters(model: PoolingModel) -> list[TinyAdapter]:
    """Three adapters; the second has the names of a model without a head, which PEFT saves for vectors."""
    directory = model.path.parent
    made = [
        make_adapter(model.path, directory, 1),
        make_adapter(model.path, directory, 2, rank=4, task_type="FEATURE_EXTRACTION"),
        make_adapter(model.path, directory, 3, rank=16, targets=LAYERS),
    ]
    for adapter in made:
        merged(adapter.merged.path)
    file = made[1].path / "adapter_model.safetensors"
    save_file({name.replace("model.model.", "model."): each for name, each in load_file(file).items()}, file)
    return made


@cache
def merged(path: Path) -> torch.nn.Module:
    return AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def vector_of(model: PoolingModel, adapter: TinyAdapter | None, prompt: tuple[int, ...]) -> torch.Tensor:
    if adapter is None:
        return model.value(prompt)
    states = merged(adapter.merged.path)(torch.tensor([prompt])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(states, dim=-1)


@pytest.fixture(scope="module")
def llm(model: PoolingModel) -> Iterator[LLM]:
    """An engine with two slots, whose prompts come in chunks."""
    limits = {"max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 16}
    options = model.options | LORA | limits
    with engine(model.path, **options, enforce_eager=True, enable_prefix_caching=True) as started:
        yield started


def test_vectors_with_adapters(llm: LLM, model: PoolingModel, adapters: list[TinyAdapter]) -> None:
    """Requests of three adapters and of none share steps and two slots; prefixes are cached for each on its own."""
    chosen = [(adapter, prompt) for prompt in PROMPTS for adapter in (None, *adapters)]
    for _ in range(2):
        outputs = llm.encode(
            [TokensPrompt(prompt_token_ids=list(prompt)) for _, prompt in chosen],
            PoolingParams(),
            pooling_task="embed",
            lora_request=[adapter and adapter.request for adapter, _ in chosen],
            use_tqdm=False,
        )
        for (adapter, prompt), output in zip(chosen, outputs, strict=True):
            want = vector_of(model, adapter, prompt)
            assert (output.outputs.data - want).abs().max() < TOLERANCE, (adapter, len(prompt))
            if adapter:
                assert (want - model.value(prompt)).abs().max() > 100 * TOLERANCE, "the adapter changes nothing"
    assert metric(llm, "vllm:prefix_cache_hits") > 0


@pytest.mark.once
def test_classes_with_an_adapter(tmp_path: Path) -> None:
    """The classifier is the model's own, and takes no adapter."""
    model = make_pooling_model("qwen3-classes", tmp_path)
    adapter = make_adapter(model.path, tmp_path, 1)
    reference = AutoModelForSequenceClassification.from_pretrained(model.path, dtype=torch.float32).eval()
    reference.model.load_state_dict(merged(adapter.merged.path).state_dict())
    with engine(model.path, **model.options | LORA, max_model_len=128, enforce_eager=True) as llm:
        for prompt in PROMPTS:
            inputs = [TokensPrompt(prompt_token_ids=list(prompt))] * 2
            own, got = llm.classify(inputs, lora_request=[None, adapter.request], use_tqdm=False)
            with torch.no_grad():
                want = reference(torch.tensor([prompt])).logits[0].softmax(-1)
            assert (torch.tensor(got.outputs.probs) - want).abs().max() < TOLERANCE
            assert (torch.tensor(own.outputs.probs) - model.value(prompt)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["layers.0.self_attn.dense", "score"])
def test_adapters_of_other_layers_are_refused(
    name: str, llm: LLM, model: PoolingModel, adapters: list[TinyAdapter], tmp_path: Path
) -> None:
    other = TinyAdapter("other", 9, tmp_path, model.path)
    tensors = {f"base_model.model.{name}.lora_{each}.weight": torch.ones(4, 4) for each in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "target_modules": ["dense"]}))
    with pytest.raises(ValueError, match=f"is for {name}, which this model has no adapters in"):
        llm.llm_engine.add_lora(other.request)
