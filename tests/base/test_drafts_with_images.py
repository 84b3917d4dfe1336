"""Adapters and drafts in requests with images. The text's layers have adapters for an image's tokens too."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import engine
from test_trained_heads import Eagle, Eagle3, Target
from vllm import LLM

from model_runner_base.testing.adapters import EVERYWHERE, TinyAdapter, make_adapter
from model_runner_base.testing.checks.test_multimodal import COUNT, Prompt, as_input, ask, expected, prompts, read
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import greedy, metric, runner_of
from model_runner_base.testing.images import FAMILIES, SeeingModel, make_seeing_model
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.processed import make_processed_model, reference

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "enforce_eager": True, "max_num_batched_tokens": 24}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8}
TEXT = "language_model"
Answers = list[tuple[list[int], list[int]]]


def ask_with(llm: LLM, asked: Sequence[Prompt], adapters: Sequence[TinyAdapter | None]) -> Answers:
    requests = [adapter and adapter.request for adapter in adapters]
    inputs = [as_input(prompt) for prompt in asked]
    return read(llm.generate(inputs, greedy(COUNT), use_tqdm=False, lora_request=requests))


def expected_with(model: SeeingModel, asked: Sequence[Prompt], adapters: Sequence[TinyAdapter | None]) -> Answers:
    merged = [SeeingModel(each.merged.path, model.placeholder) if each else model for each in adapters]
    return [each.greedy(text, images, COUNT) for each, (text, images) in zip(merged, asked, strict=True)]


@pytest.mark.parametrize(("family", "draft"), [("llava", None), ("qwen3-vl", "ngram"), ("gemma3", "ngram")])
def test_tokens_with_adapters_are_those_of_merged_weights(family: str, draft: str | None, tmp_path: Path) -> None:
    """Prompts of images and of text, each with both adapters and with none in one batch, are cut by chunks."""
    model = make_seeing_model(family, tmp_path)
    made = [make_adapter(model.path, tmp_path, n, 4 * n, EVERYWHERE, part=f"{TEXT}.layers") for n in (1, 2)]
    asked = [prompt for prompt in prompts(model) for _ in range(3)]
    adapters = [None, *made] * (len(asked) // 3)
    want = expected_with(model, asked, adapters)
    assert len({tuple(tokens) for _, tokens in want}) > len(want) // 2
    drafts = {"speculative_config": speculation(draft, TinyModel(model.path))} if draft else {}
    with engine(model.path, **OPTIONS, **LORA, **drafts) as llm:
        assert ask_with(llm, asked, adapters) == want
        assert ask_with(llm, asked[::-1], adapters[::-1]) == want[::-1]  # With a cached prefix each.
        assert not draft or metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


def test_what_adapters_may_be_for(tmp_path: Path) -> None:
    """Adapters of the table of embeddings and of the head work with an image. One of the tower is refused, since
    requests share the tower's outputs."""
    model = make_seeing_model("llava", tmp_path)
    table, head, tower = (
        make_adapter(model.path, tmp_path, n, 4, [target], part=part)
        for n, target, part in ((1, "embed_tokens", TEXT), (2, "lm_head", ""), (3, "q_proj", "vision_tower"))
    )
    asked, adapters = prompts(model)[:3] * 2, [table] * 3 + [head] * 3
    with engine(model.path, **OPTIONS, **LORA) as llm:
        assert ask_with(llm, asked, adapters) == expected_with(model, asked, adapters)
        with pytest.raises(ValueError, match=r"vision_tower\..*q_proj, which this model has no adapters in"):
            llm.llm_engine.add_lora(tower.request)
        assert ask(llm, asked[:1])


def test_an_adapter_of_towers_is_refused(tmp_path: Path) -> None:
    options = OPTIONS | LORA | {"enable_tower_connector_lora": True}
    with (
        pytest.raises(ValueError, match="leave out enable_tower_connector_lora"),
        engine(make_seeing_model("llava", tmp_path).path, **options),
    ):
        pass


def deep_model(directory: Path) -> SeeingModel:
    """Qwen3-VL with as many layers of text as EAGLE-3 reads, and one."""
    return SeeingModel(*make_processed_model("deep", directory, partial(FAMILIES["qwen3-vl"], num_hidden_layers=4)))


@pytest.mark.parametrize(
    ("family", "kind", "counted"),
    [
        ("qwen2-vl", "ngram", "accepted"),
        ("llava", "further-heads", "accepted"),
        ("gemma3", "head", "draft"),
    ],
)
def test_drafts_with_images(family: str, kind: str, counted: str, tmp_path: Path) -> None:
    """A decode row has several tokens, which models of M-RoPE rotate by other positions than the cache's. In other
    models the row comes after tokens that see each other."""
    model = make_seeing_model(family, tmp_path)
    asked = prompts(model)
    want = expected(model, asked, 24)
    config = speculation(kind, TinyModel(model.path))
    with engine(model.path, **OPTIONS, speculative_config=config) as llm:
        assert read(ask(llm, asked, 24)) == want
        assert read(ask(llm, asked[::-1], 24)) == want[::-1]
        assert metric(llm, f"vllm:spec_decode_num_{counted}_tokens") > 0


@pytest.mark.parametrize(
    ("family", "kind", "head_class"),
    [("llava", "head", Eagle), ("qwen2.5-vl", "head", Eagle), ("deep", "head-over-layers", Eagle3)],
)
def test_heads_draft_what_they_draft_in_plain_torch(
    family: str, kind: str, head_class: type[Eagle], tmp_path: Path
) -> None:
    """Drafts are those of the head in plain torch, given the reference's states of all tokens, an image's too.
    Prompts are cut by chunks, then cached."""
    model = deep_model(tmp_path) if family == "deep" else make_seeing_model(family, tmp_path)
    config = speculation(kind, TinyModel(model.path))
    seeing, _ = reference(model.path)
    head = head_class(Path(config["model"]), Target(seeing.get_input_embeddings().weight, []))
    if head_class is Eagle:  # An EAGLE head shares the target's.
        head.logits = lambda out: seeing.lm_head(out)  # type: ignore[method-assign]
    num_compared = 0
    with engine(model.path, **OPTIONS, speculative_config=config, async_scheduling=False) as llm, torch.no_grad():
        runner, drafted = runner_of(llm), list[Any]()
        take = runner.take_draft_token_ids
        runner.take_draft_token_ids = lambda: drafted.append(take()) or drafted[-1]
        for number, (text, images) in enumerate(prompts(model) * 2):
            llm.llm_engine.add_request(str(number), as_input((text, images)), greedy(COUNT))
            while llm.llm_engine.has_unfinished_requests():
                for out in llm.llm_engine.step():
                    tokens = list(out.outputs[0].token_ids)
                    if out.finished or not (drafts := drafted[-1].draft_token_ids[0]):
                        continue
                    states = torch.cat(model.run(text, images, tokens, output_hidden_states=True).hidden_states)
                    every = torch.tensor([*out.prompt_token_ids, *tokens])
                    assert drafts == head.drafts(every, states[:, :-1]), (text, tokens)
                    num_compared += 1
    assert num_compared > 100


def test_drafts_by_a_model_of_its_own_are_refused(tmp_path: Path) -> None:
    model = make_seeing_model("llava", tmp_path)
    config = {"method": "draft_model", "model": str(model.path), "num_speculative_tokens": 2}
    with (
        pytest.raises(ValueError, match="are not supported with multimodal models yet: use one of ngram, "),
        engine(model.path, **OPTIONS, speculative_config=config),
    ):
        pass
