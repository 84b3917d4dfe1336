"""Images given as embeddings that do not fit are refused before they are queued, each time; others are served."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import engine
from vllm import LLM
from vllm.exceptions import VLLMValidationError

from model_runner_base.admission import refused_items
from model_runner_base.errors import RequestError
from model_runner_base.testing.checks.test_multimodal import COUNT, ask, expected, read
from model_runner_base.testing.engine import greedy
from model_runner_base.testing.images import SeeingModel, make_seeing_model, picture
from model_runner_base.testing.processed import reference
from model_runner_base.testing.sounds import make_hearing_model, sound

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": False, "enforce_eager": True, "max_model_len": 256}
IMAGES = [picture(40, 32, 32), picture(41, 48, 32)]
REFUSED = ValueError, VLLMValidationError
"""Newer releases of vLLM have errors of requests that are no ValueError."""
INF, NAN = float("inf"), float("nan")


def embeddings(model: SeeingModel) -> Any:
    """Data that vLLM takes in place of the two images."""
    seeing, processor = reference(model.path)
    inputs = processor.image_processor(IMAGES, return_tensors="pt")
    grid = {name: inputs[name] for name in ("image_grid_thw",) if name in inputs}
    with torch.no_grad():
        features = seeing.model.get_image_features(inputs["pixel_values"], *grid.values())
    if not isinstance(features, list | tuple):  # As transformers 5 returns them.
        levels = getattr(features, "deepstack_features", None) or ()
        features = features.pooler_output, [torch.cat(list(each)) for each in levels]
    elif isinstance(features[0], torch.Tensor):
        features = features, ()
    rows, levels = features
    return grid | {"image_embeds": torch.cat([torch.cat(list(rows)), *levels], dim=1)} if grid else torch.stack([*rows])


@dataclass
class Served:
    llm: LLM
    model: SeeingModel

    @property
    def text(self) -> str:
        return f"{self.model.placeholder} and {self.model.placeholder}?"

    def ask(self, image: Any, text: str = "") -> list[tuple[list[int], list[int]]]:
        prompt = {"prompt": text or self.text, "multi_modal_data": {"image": image}}
        return read(self.llm.generate([prompt], greedy(COUNT), use_tqdm=False))  # type: ignore[arg-type, list-item]


@pytest.fixture(scope="module", params=["llava", "qwen2-vl", "qwen3-vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_seeing_model(request.param, tmp_path_factory.mktemp("seeing"))
    limits = {"limit_mm_per_prompt": {"image": 2} | dict(model.limits.get("limit_mm_per_prompt", {}))}
    with engine(model.path, **OPTIONS, enable_mm_embeds=True, **limits) as llm:
        yield Served(llm, model)


@pytest.fixture(scope="module")
def good(served: Served) -> Any:
    return embeddings(served.model)


def changed(value: float, row: int = 5) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows.view(-1, rows.shape[-1])[row, 3] = value
        return rows

    return change


OF_ROWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "narrow": (lambda rows: rows[..., :-1], "63|191"),
    "wide": (lambda rows: torch.cat([rows, rows], dim=-1), "128|384"),
    "no width": (lambda rows: rows[..., :0], "0"),
    "no rows": (lambda rows: rows[..., :0, :], "rows|0"),
    "rank 1": (lambda rows: rows.reshape(-1), "shape|At most 2 image"),
    "integers": (lambda rows: rows.to(torch.int32), "floating point, got torch.int32"),
    "complex": (lambda rows: rows.to(torch.complex64), "floating point, got torch.complex64"),
    "NaN": (changed(NAN), "NaN or infinity"),
    "infinity": (changed(-INF, -1), "NaN or infinity"),
    "above float32": (lambda rows: changed(1e300)(rows.double()), "NaN or infinity"),
}
OF_GRIDS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a row less": (lambda data: {"image_embeds": data["image_embeds"][:-1]}, "must have 40 rows.* got 39"),
    "a row more": (lambda data: {"image_embeds": data["image_embeds"][[0, *range(40)]]}, "must have 40 rows.* got 41"),
    "a grid less": (lambda data: {"image_grid_thw": data["image_grid_thw"][:1]}, "must have 16 rows.* got 40"),
    "a larger grid": (lambda data: {"image_grid_thw": data["image_grid_thw"] * 2}, "must have 320 rows.* got 40"),
    "negative": (lambda data: {"image_grid_thw": -data["image_grid_thw"]}, "positive"),
    "two negative": (lambda data: {"image_grid_thw": data["image_grid_thw"] * torch.tensor([1, -1, -1])}, "positive"),
    "zero": (lambda data: {"image_grid_thw": data["image_grid_thw"] * 0}, "positive"),
    "huge": (lambda data: {"image_grid_thw": data["image_grid_thw"] * 10**6}, "more patches than 40 rows"),
    "huge, of product 0": (lambda data: {"image_grid_thw": data["image_grid_thw"] * 2**40}, "more patches than 40"),
    "floats": (lambda data: {"image_grid_thw": data["image_grid_thw"].float()}, "integers of shape"),
    "rank 4": (lambda data: {"image_embeds": data["image_embeds"][None, None]}, r"must have shape \[rows, width\]"),
    "rank 1": (lambda data: {"image_grid_thw": data["image_grid_thw"][0]}, "integers of shape"),
    "of two": (lambda data: {"image_grid_thw": data["image_grid_thw"][:, :2]}, "integers of shape"),
}


def refused_twice(served: Served, bad: Any, words: str) -> None:
    for _ in range(2):
        with pytest.raises(REFUSED, match=words):
            served.ask(bad)
    assert not served.llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("fault", OF_ROWS)
def test_rows(fault: str, served: Served, good: Any) -> None:
    """A fault is refused twice, since the front end keeps what it has processed; then good embeddings are served."""
    spoil, words = OF_ROWS[fault]
    has_grid = isinstance(good, dict)
    bad = good | {"image_embeds": spoil(good["image_embeds"])} if has_grid else spoil(good)
    refused_twice(served, bad, words)
    assert served.ask(good) == expected(served.model, [(served.text, IMAGES)])


@pytest.mark.parametrize("fault", OF_GRIDS)
def test_grids(fault: str, served: Served, good: Any) -> None:
    if not isinstance(good, dict):
        pytest.skip("its images have no grid")
    spoil, words = OF_GRIDS[fault]
    refused_twice(served, good | spoil(good), words)
    assert served.ask(good) == expected(served.model, [(served.text, IMAGES)])


def test_those_before_a_refused_one_are_not_queued(served: Served, good: Any) -> None:
    """Honest requests that come before a refused one in the same call are given up, too."""
    has_grid = isinstance(good, dict)
    rows = changed(NAN)(good["image_embeds"] if has_grid else good)
    bad = good | {"image_embeds": rows} if has_grid else rows
    prompts: Any = [{"prompt": served.text, "multi_modal_data": {"image": each}} for each in (good, bad, good)]
    with pytest.raises(RequestError, match="NaN"):
        served.llm.generate(prompts, greedy(COUNT), use_tqdm=False)
    assert not served.llm.llm_engine.has_unfinished_requests()
    assert served.ask(good) == expected(served.model, [(served.text, IMAGES)])


def test_more_items_than_allowed(served: Served, good: Any) -> None:
    """Three items are refused where two are allowed, as images and as embeddings. So is an image that the text does
    not name."""
    has_grid = isinstance(good, dict)
    more = good | {"image_grid_thw": good["image_grid_thw"][[0, 1, 0]]} if has_grid else good[[0, 1, 0]]
    if has_grid:
        more["image_embeds"] = good["image_embeds"][[*range(40), *range(16)]]
    see = served.model.placeholder
    for given, text in ((more, see * 3), ([*IMAGES, IMAGES[0]], see * 3), (good, see)):
        with pytest.raises(REFUSED):
            served.ask(given, text)
    assert served.ask(good) == expected(served.model, [(served.text, IMAGES)])


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 7)], ids=str)
def test_odd_images(size: tuple[int, int], served: Served) -> None:
    """Odd images are served as the reference has them, or refused where its processor refuses them; nothing is left."""
    model, asked = served.model, [(f"{served.model.placeholder}?", [picture(50, *size)])]
    try:
        want = expected(model, asked)
    except REFUSED:
        want = []
    try:
        got = read(ask(served.llm, asked))
    except REFUSED:
        got = []
    assert got == want
    ordinary = [(served.text, IMAGES)]
    assert read(ask(served.llm, ordinary)) == expected(model, ordinary)


def test_images_without_pixels(served: Served) -> None:
    for array in (np.zeros((0, 8, 3), np.uint8), np.zeros((8, 0, 3), np.uint8)):
        with pytest.raises(REFUSED):
            served.ask(array, served.model.placeholder)
    ordinary = [(served.text, IMAGES)]
    assert read(ask(served.llm, ordinary)) == expected(served.model, ordinary)


def test_a_model_without_a_place_for_embeddings(tmp_path: Path) -> None:
    model = make_seeing_model("mistral3", tmp_path)
    with engine(model.path, **OPTIONS, enable_mm_embeds=True) as llm:
        for given in (torch.zeros(2, 4, 64), {"image_embeds": torch.zeros(4, 64)}):
            refused_twice(Served(llm, model), given, "cannot be read|Failed to apply")
        asked = [(model.placeholder, IMAGES[:1])]
        assert read(ask(llm, asked)) == expected(model, asked)


@pytest.mark.openxla
def test_sounds_without_samples(tmp_path: Path) -> None:
    """Sounds without samples are refused. Qwen2-Audio itself is refused on the newest vLLM."""
    model = make_hearing_model("qwen2-audio", tmp_path)
    with engine(model.path, **OPTIONS, enable_mm_embeds=True) as llm:

        def ask_of(audio: Any) -> list[tuple[list[int], list[int]]]:
            prompt: Any = {"prompt": model.placeholder, "multi_modal_data": {"audio": audio}}
            return read(llm.generate([prompt], greedy(COUNT), use_tqdm=False))

        want = ask_of(sound(1, 0.5))
        for bad in (
            np.zeros(0, np.float32),
            {"audio_embeds": torch.zeros(1, 4, 63)},
            {"audio_embeds": torch.full((1, 4, 64), NAN)},
        ):
            for _ in range(2):
                with pytest.raises(REFUSED):
                    ask_of(bad)
        assert ask_of(sound(1, 0.5)) == want


class Cache:
    """A front end's cache that has only what it was told, as one whose engine is another process."""

    def __init__(self) -> None:
        self._cache: dict[str, object] = {}

    def get_and_update_item(self, mm_item: object, mm_hash: str) -> None:
        self._cache[mm_hash] = mm_item


def test_a_refused_requests_items_are_forgotten() -> None:
    """A refused request's items leave the cache. Those of other threads, and earlier ones, stay."""
    cache, other = Cache(), Cache()
    note = refused_items._noting(Cache.get_and_update_item)

    @refused_items._reading
    def fails(self: object) -> None:
        note(cache, 1, "mine")
        thread = threading.Thread(target=note, args=(other, 2, "another's"))
        thread.start()
        thread.join()
        raise KeyError("nothing there")

    note(cache, 3, "earlier")
    with pytest.raises(RequestError, match="nothing there"):
        fails(None)
    assert [*cache._cache] == ["earlier"] and [*other._cache] == ["another's"]
