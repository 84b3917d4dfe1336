"""Images in the real server, by the real client: answers are those of HF transformers."""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from serving import served

from model_runner_base.testing.images import SeeingModel, make_seeing_model, picture

NUM_CLIENTS, COUNT = 16, 8
LIMITS = {
    "max-model-len": 256,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,
    "dtype": "float32",
    "kv-cache-memory-bytes": 8 << 20,
    "limit-mm-per-prompt": '{"image": 3, "video": 0}',
    "served-model-name": "tiny",
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_seeing_model("qwen2.5-vl", tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def client(model: SeeingModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Client of a server that runs eager, since the kit tests what runs beneath."""
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    arguments = [part for name, value in LIMITS.items() for part in (f"--{name}", str(value))]
    with served(model.path, *arguments, "--enforce-eager", "--chat-template", str(template)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def as_url(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def ask(client: openai.OpenAI, text: str, urls: list[str]) -> Any:
    """The tokens of an answer."""
    parts: Any = [{"type": "image_url", "image_url": {"url": url}} for url in urls] + [{"type": "text", "text": text}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        max_tokens=COUNT,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.choices[0].token_ids  # type: ignore[attr-defined]


def expected(model: SeeingModel, text: str, images: list[Image.Image]) -> list[int]:
    """Reference's tokens; vLLM puts a line for each image before a chat's text."""
    _, tokens = model.greedy("\n".join([*[model.placeholder] * len(images), text]), images, COUNT)
    return tokens


@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_chat(client: openai.OpenAI, model: SeeingModel, num_images: int) -> None:
    images = [picture(20, 40, 32), picture(21, 64, 24)][:num_images]
    assert ask(client, "what is it?", [as_url(image) for image in images]) == expected(model, "what is it?", images)


def test_bad_images_are_told(client: openai.OpenAI, model: SeeingModel) -> None:
    """A bad image has status 400 and a message that says what is wrong; the next request is served."""
    small, large = as_url(picture(22, 32, 32)), as_url(picture(23, 64, 64))
    broken = f"data:image/png;base64,{base64.b64encode(b'no picture').decode()}"
    for text, urls, words in (
        ("one?", [broken], "cannot identify image|Failed to load|broken"),
        ("too many?", [small] * 4, "At most 3 image"),
        ("too long?" * 20, [large] * 3, "maximum (model|context) length|longer than"),
        ("twice as long as wide by 300", [as_url(picture(24, 900, 3))], "Failed to apply Qwen2_5_VLProcessor"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(client, text, urls)
    assert ask(client, "and now?", [small]) == expected(model, "and now?", [picture(22, 32, 32)])


def test_sixteen_clients_at_once(client: openai.OpenAI, model: SeeingModel) -> None:
    asked = [
        (f"client {number}", [picture(30 + number % 5, 24 + 8 * (number % 3), 32)] * (number % 3))
        for number in range(NUM_CLIENTS)
    ]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        got = list(pool.map(lambda one: ask(client, one[0], [as_url(image) for image in one[1]]), asked))
    assert got == [expected(model, text, images) for text, images in asked]
