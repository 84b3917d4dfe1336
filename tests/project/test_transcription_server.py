"""Sounds in the real server, by the real client: the texts are those of HF transformers."""

import io
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from serving import served

from model_runner_base.testing.sounds import SAMPLING_RATE, sound
from model_runner_base.testing.transcription import START, Transcriber, make_transcriber

pytestmark = pytest.mark.newest  # The server and its checks are the same on both lanes.

COUNT, NUM_CLIENTS = 16, 12
LIMITS = {
    "max-num-seqs": 4,
    "dtype": "float32",
    "kv-cache-memory-bytes": 8 << 20,
    "served-model-name": "tiny",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transcriber:
    return make_transcriber(tmp_path_factory.mktemp("transcription"))


@pytest.fixture(scope="module")
def client(model: Transcriber) -> Iterator[openai.OpenAI]:
    """Client of a server that runs eager, since tests/base test what runs beneath."""
    arguments = [part for name, value in LIMITS.items() for part in (f"--{name}", str(value))]
    with served(model.path, *arguments, "--enforce-eager") as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def as_wave(samples: np.ndarray) -> tuple[bytes, np.ndarray]:
    """A file of 16 bits a sample, and the samples as they are read from it, float32."""
    rounded, data = (samples * 32767).astype(np.int16), io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLING_RATE)
        file.writeframes(rounded.tobytes())
    return data.getvalue(), rounded.astype(np.float32) / 32768


def transcribe(client: openai.OpenAI, file: bytes, **options: Any) -> Any:
    return client.audio.transcriptions.create(
        model="tiny",
        file=("sound.wav", file),
        language="en",
        temperature=0,
        extra_body={"max_completion_tokens": COUNT},
        **options,
    )


def complaint(client: openai.OpenAI, file: bytes) -> str:
    """Message of a failed request: vLLM 0.16 gives it with status 200 for any error in reading a file but a
    ValueError, later releases with status 400."""
    try:
        message: str = transcribe(client, file).model_extra["error"]["message"]
    except openai.BadRequestError as error:
        message = error.message
    return message


def test_transcriptions(client: openai.OpenAI, model: Transcriber) -> None:
    """Transcriptions are right for more clients than rows at once; then in pieces, as they are made."""
    files, heard = zip(*(as_wave(sound(seed, 0.2 + 0.2 * seed)) for seed in range(NUM_CLIENTS)), strict=True)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        got = [answer.text for answer in pool.map(lambda file: transcribe(client, file), files)]
    want = [model.text(samples, START, COUNT) for samples in heard]
    assert got == want
    pieces = [event.choices[0]["delta"].get("content") or "" for event in transcribe(client, files[3], stream=True)]
    assert "".join(pieces) == want[3]


def test_a_file_that_is_no_sound(client: openai.OpenAI, model: Transcriber) -> None:
    assert complaint(client, b"no sound")
    file, heard = as_wave(sound(3, 0.8))
    assert transcribe(client, file).text == model.text(heard, START, COUNT)


def test_text_alone_is_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError):
        client.completions.create(model="tiny", prompt="what?", max_tokens=2)
