"""Models that see and hear on openxla: no image and no sound compiles anything, whether encoders are graphs on the
device or run on the host."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from conftest import engine

from model_runner_base.inputs.multimodal.towers import encoder_graphs
from model_runner_base.models.tower_placement import towers_of
from model_runner_base.testing.adapters import EVERYWHERE, make_adapter
from model_runner_base.testing.checks.test_multimodal import COUNT, Prompt, as_input, ask, expected, read
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import greedy, metric, runner_of
from model_runner_base.testing.images import SeeingModel, make_seeing_model, picture, video_facts
from model_runner_base.testing.models import TinyModel
from model_runner_base.testing.sounds import make_hearing_model, sound
from model_runner_base.testing.transcription import LENGTH, START, make_transcriber
from neuron_runner.metrics import CompilationCount

FEW_BUCKETS = {"num_batched_tokens_buckets": [64], "num_seqs_buckets": [4], "context_length_buckets": [256]}


def pictures(model: SeeingModel, count: int, seed: int) -> list[Prompt]:
    """Prompts with one image each, of many sizes; then one with three images."""
    random = Random(seed)
    asked = [
        (f"{number} {model.placeholder}", [picture(number, random.randint(8, 90), random.randint(8, 90))])
        for number in range(count)
    ]
    return [*asked, (model.placeholder * 3, [image for _, images in asked[:3] for image in images])]


@pytest.mark.parametrize("family", [pytest.param("qwen2-vl", marks=pytest.mark.full), "qwen2.5-vl", "qwen3-vl"])
def test_towers_of_patches_are_graphs(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers are graphs of 32, 64 and 128 patches. These take images that they hold, padded or not, and a video in
    several runs. Larger images are encoded on the host."""
    monkeypatch.setattr(encoder_graphs, "FEWEST", 32)
    monkeypatch.setattr(encoder_graphs, "MOST", 128)
    model = make_seeing_model(family, tmp_path)
    asked = pictures(model, 24, 0)
    frames = np.stack([np.array(picture(seed, 32, 32)) for seed in range(6)])
    see = model.placeholder.replace("image", "video")
    facts = video_facts(frames) | {"do_sample_frames": False, "video_backend": "opencv"}
    video: Any = {"video": (frames, facts) if model.takes_times else frames}
    options = {"skip_tokenizer_init": False, "max_model_len": 256}
    with engine(model.path, **options, additional_config={"neuron_config": FEW_BUCKETS}) as llm:
        module = runner_of(llm).model
        assert {p.device.type for p in module.language_model.parameters()} == {"xla"}
        eagerly, embed = [], module.embed_multimodal
        monkeypatch.setattr(module, "embed_multimodal", lambda **kwargs: eagerly.append(kwargs) or embed(**kwargs))
        before = CompilationCount.now()
        got = read(ask(llm, asked))
        num_eager = len(eagerly)
        assert all((kwargs["image_grid_thw"].prod(-1) > 128).all() for kwargs in eagerly)
        moved = read(llm.generate({"prompt": see, "multi_modal_data": video}, greedy(COUNT), use_tqdm=False))
        assert CompilationCount.now() == before
        assert 0 < num_eager < len(asked) and len(eagerly) == num_eager
        assert len({len(prompt) for prompt, _ in got}) > 10
    assert got == expected(model, asked, COUNT)
    assert moved == [model.greedy_of_video(see, frames, COUNT)]


@pytest.mark.parametrize("family", ["llava-next", pytest.param("internvl", marks=pytest.mark.full), "cohere2-vision"])
def test_towers_of_tiles_are_graphs(family: str, tmp_path: Path) -> None:
    """Images have one tile, or more than a graph has. The kit runs LLaVA and Gemma 3."""
    model = make_seeing_model(family, tmp_path)
    asked = pictures(model, 12, 1)
    options = {"skip_tokenizer_init": False, "max_model_len": 384, "enable_prefix_caching": False}
    buckets = {"neuron_config": FEW_BUCKETS | {"context_length_buckets": [384]}}
    with engine(model.path, **options, additional_config=buckets) as llm:
        runner = runner_of(llm)
        assert {p.device.type for tower in towers_of(runner.model) for p in tower.parameters()} == {"xla"}
        before = CompilationCount.now()
        got = read(ask(llm, asked))
        assert CompilationCount.now() == before
    assert got == expected(model, asked)


@pytest.mark.parametrize(
    ("kind", "counted"), [("ngram", "accepted"), pytest.param("head", "draft", marks=pytest.mark.full)]
)
def test_adapters_and_drafts_with_images(kind: str, counted: str, tmp_path: Path) -> None:
    """Adapters and drafts serve a model that adds to its first layers, in graphs that are compiled before any
    adapter is loaded."""
    model = make_seeing_model("qwen3-vl", tmp_path)
    adapter = make_adapter(model.path, tmp_path, 1, 8, EVERYWHERE, part="language_model.layers")
    asked = pictures(model, 5, 2)
    chosen = [adapter if number % 2 else None for number in range(len(asked))]
    want = [
        (SeeingModel(adapter.merged.path, model.placeholder) if each else model).greedy(*prompt, COUNT)
        for prompt, each in zip(asked, chosen, strict=True)
    ]
    options = {"skip_tokenizer_init": False, "max_model_len": 256, "enable_lora": True, "max_lora_rank": 8}
    drafts = speculation(kind, TinyModel(model.path))
    config = {"neuron_config": FEW_BUCKETS}
    with engine(model.path, **options, speculative_config=drafts, additional_config=config) as llm:
        before = CompilationCount.now()
        requests = [each.request if each else None for each in chosen]
        inputs = [as_input(prompt) for prompt in asked]
        got = read(llm.generate(inputs, greedy(COUNT), use_tqdm=False, lora_request=requests))
        assert CompilationCount.now() == before
        assert metric(llm, f"vllm:spec_decode_num_{counted}_tokens") > 0
    assert got == want


def test_a_model_with_an_embedding_of_its_own_between_rows(tmp_path: Path) -> None:
    """Images of several tiles and videos have rows that end in a parameter, which belongs to no tower."""
    model = make_seeing_model("llava-onevision", tmp_path)
    asked = [
        (f"{seed} {model.placeholder}", [picture(seed, width, height)])
        for seed, (width, height) in enumerate([(32, 32), (64, 48), (40, 24), (60, 20)])
    ]
    frames = np.stack([np.array(picture(seed, 32, 32)) for seed in range(4)])
    video: Any = {"prompt": "<video> moves", "multi_modal_data": {"video": frames}}
    options = {"skip_tokenizer_init": False, "max_model_len": 256}
    with engine(model.path, **options, additional_config={"neuron_config": FEW_BUCKETS}) as llm:
        before = CompilationCount.now()
        got = read(ask(llm, asked))
        moved = read(llm.generate(video, greedy(COUNT), use_tqdm=False))
        assert CompilationCount.now() == before
    assert got == expected(model, asked)
    assert moved == [model.greedy_of_video("<video> moves", frames, COUNT)]


def test_sounds(tmp_path: Path) -> None:
    model = make_hearing_model("qwen2-audio", tmp_path)
    asked = [(f"{seed} {model.placeholder}", [sound(seed, seconds)]) for seed, seconds in enumerate((0.2, 1.5, 0.9))]
    inputs: list[Any] = [{"prompt": text, "multi_modal_data": {"audio": sounds}} for text, sounds in asked]
    options = {"skip_tokenizer_init": False, "max_model_len": 256}
    with engine(model.path, **options, additional_config={"neuron_config": FEW_BUCKETS}) as llm:
        before = CompilationCount.now()
        got = read(llm.generate(inputs, greedy(COUNT), use_tqdm=False))
        assert CompilationCount.now() == before
    assert got == [model.greedy(text, sounds, COUNT) for text, sounds in asked]


def test_transcriptions(tmp_path: Path) -> None:
    """The encoder stays on the host. A graph that was compiled before projects its output and writes it."""
    model = make_transcriber(tmp_path)
    heard = [sound(seed, 0.3 + 0.4 * seed) for seed in range(6)]
    texts = [START, "<|startoftranscript|>", f"<|startoftranscript|><|prev|>and then: {START}"] * 2
    prompts: list[Any] = [model.prompt(*each) for each in zip(heard, texts, strict=True)]
    buckets = FEW_BUCKETS | {"num_batched_tokens_buckets": [LENGTH], "context_length_buckets": [128]}
    options = {"skip_tokenizer_init": False, "max_num_batched_tokens": LENGTH}
    with engine(model.path, **options, additional_config={"neuron_config": buckets}) as llm:
        module = runner_of(llm).model.model
        assert {p.device.type for p in module.encoder.parameters()} == {"cpu"}
        assert {p.device.type for p in module.decoder.parameters()} == {"xla"}
        before = CompilationCount.now()
        outputs = llm.generate(prompts, [greedy(count) for count in (12, 5, 20, 9, 14, 7)], use_tqdm=False)
        assert CompilationCount.now() == before
    for output, sound_of, text in zip(outputs, heard, texts, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == model.greedy(sound_of, model.tokens(text), len(tokens))[0]
