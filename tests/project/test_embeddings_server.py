"""Images as embeddings in the real server, whose front end sends its engine an item once: bad ones have status 400."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from serving import served
from test_image_server import COUNT, LIMITS, TEMPLATE, as_url, expected

from model_runner_base.testing.images import SeeingModel, make_seeing_model, picture
from model_runner_base.testing.processed import reference

IMAGE = picture(40, 32, 32)
Part = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_seeing_model("qwen2-vl", tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def client(model: SeeingModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    arguments = [part for name, value in LIMITS.items() for part in (f"--{name}", str(value))]
    more = ("--enforce-eager", "--enable-mm-embeds", "--chat-template", str(template))
    with served(model.path, *arguments, *more) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def embeddings(model: SeeingModel) -> dict[str, torch.Tensor]:
    seeing, processor = reference(model.path)
    inputs = processor.image_processor([IMAGE], return_tensors="pt")
    with torch.no_grad():
        features = seeing.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    (rows,) = features if isinstance(features, list | tuple) else features.pooler_output
    return {"image_embeds": rows, "image_grid_thw": inputs["image_grid_thw"][0]}


def given(embeddings: dict[str, torch.Tensor]) -> Part:
    """A part of a message."""

    def encoded(tensor: torch.Tensor) -> str:
        torch.save(tensor.clone(), data := io.BytesIO())
        return base64.b64encode(data.getvalue()).decode()

    return {"type": "image_embeds", "image_embeds": {name: encoded(each) for name, each in embeddings.items()}}


def ask(client: openai.OpenAI, text: str, *parts: Part) -> Any:
    """The tokens of an answer."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],  # type: ignore[list-item]
        temperature=0,
        max_tokens=COUNT,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.choices[0].token_ids  # type: ignore[attr-defined]


def test_bad_embeddings(client: openai.OpenAI, model: SeeingModel, embeddings: dict[str, torch.Tensor]) -> None:
    """Bad embeddings are refused twice: the second time the front end might believe that the engine has them."""
    rows, grid = embeddings["image_embeds"], embeddings["image_grid_thw"]
    nan = rows.clone()
    nan[3, 3] = float("nan")
    for change, words in (
        ({"image_embeds": rows[:, :-1]}, "63"),
        ({"image_embeds": nan}, "NaN or infinity"),
        ({"image_embeds": rows.int()}, "floating point"),
        ({"image_embeds": rows[:-1]}, "must have 16 rows.* got 15"),
        ({"image_grid_thw": -grid}, "positive"),
        ({"image_grid_thw": grid * 10**6}, "more patches than"),
    ):
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=words):
                ask(client, "what?", given(embeddings | change))
    want = expected(model, "what?", [IMAGE])
    for _ in range(2):
        assert ask(client, "what?", given(embeddings)) == want


def test_items_of_a_refused_request(
    client: openai.OpenAI, model: SeeingModel, embeddings: dict[str, torch.Tensor]
) -> None:
    """A text that is too long, with an image that the engine has not seen, is refused; a short one is then served."""
    image = picture(60, 32, 32)
    fresh = embeddings | {"image_embeds": embeddings["image_embeds"] * 1.0}
    for part, shown in (({"type": "image_url", "image_url": {"url": as_url(image)}}, image), (given(fresh), IMAGE)):
        with pytest.raises(openai.BadRequestError):
            ask(client, "too long?" * 60, part)
        assert ask(client, "what?", part) == expected(model, "what?", [shown])
