"""The real `vllm serve` with a pooling model of each kind: vectors by the real OpenAI client, scores and ranks."""

from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
from serving import served

from model_runner_base.testing.pooling import TOLERANCE, PoolingModel, make_pooling_model

LIMITS = ("--runner", "pooling", "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager")
SIZES = ("--max-model-len", "128", "--max-num-batched-tokens", "128", "--max-num-seqs", "8")
TEXTS = ["a cat", "what is this animal", "it is a boat with a sail"]


def serve(model: PoolingModel) -> Iterator[str]:
    with served(model.path, *LIMITS, *SIZES) as url:
        yield url


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    return make_pooling_model("qwen3", tmp_path_factory.mktemp("pooling"))


@pytest.fixture(scope="module")
def vectors(embedder: PoolingModel) -> Iterator[str]:
    yield from serve(embedder)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    return make_pooling_model("bert-reranker", tmp_path_factory.mktemp("pooling"))


@pytest.fixture(scope="module")
def scores(reranker: PoolingModel) -> Iterator[str]:
    yield from serve(reranker)


def ids_of(url: str, text: str) -> list[int]:
    return httpx.post(f"{url}/tokenize", json={"model": "tiny", "prompt": text}).json()["tokens"]


def test_vectors(vectors: str, embedder: PoolingModel) -> None:
    client = openai.OpenAI(base_url=f"{vectors}/v1", api_key="unused", max_retries=0)
    wanted = [embedder.value(ids_of(vectors, text)) for text in TEXTS]
    # The client asks for base64 by itself.
    for encoding in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="tiny", input=TEXTS, **encoding)  # type: ignore[call-overload]
        for item, want in zip(answer.data, wanted, strict=True):
            assert (torch.tensor(item.embedding) - want).abs().max() < TOLERANCE
    short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=16).data[0].embedding
    want = torch.nn.functional.normalize(embedder.value(ids_of(vectors, TEXTS[0]), activated=False)[:16], dim=-1)
    assert (torch.tensor(short) - want).abs().max() < TOLERANCE
    tokens = client.embeddings.create(model="tiny", input=[[5, 6, 7]]).data[0].embedding
    assert (torch.tensor(tokens) - embedder.value([5, 6, 7])).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "body",
    [{"input": "a" * 400}, {"input": [[5] * 129]}, {"input": [[5, 512]]}, {"input": "a", "dimensions": 65}],
    ids=["too long", "too many tokens", "no token", "too wide"],
)
def test_bad_requests(body: dict[str, object], vectors: str) -> None:
    assert httpx.post(f"{vectors}/v1/embeddings", json={"model": "tiny", **body}).status_code == 400
    assert httpx.get(f"{vectors}/health").status_code == 200


def test_other_uses_of_an_embedder(vectors: str, embedder: PoolingModel) -> None:
    """A vector by ``/pooling``; scores and ranks of two texts by their cosine; a request for text, which is refused."""
    answer = httpx.post(f"{vectors}/pooling", json={"model": "tiny", "input": TEXTS[0], "task": "embed"}).json()
    want = embedder.value(ids_of(vectors, TEXTS[0]))
    assert (torch.tensor(answer["data"][0]["data"]) - want).abs().max() < TOLERANCE
    score = httpx.post(f"{vectors}/score", json={"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS[1]}).json()
    cosines = [float(want @ embedder.value(ids_of(vectors, text))) for text in TEXTS[1:]]
    assert abs(score["data"][0]["score"] - cosines[0]) < TOLERANCE
    body = {"model": "tiny", "query": TEXTS[0], "documents": TEXTS[1:]}
    ranked = httpx.post(f"{vectors}/rerank", json=body).json()["results"]
    assert [item["index"] for item in ranked] == sorted(range(2), key=lambda index: -cosines[index])
    for item in ranked:
        assert abs(item["relevance_score"] - cosines[item["index"]]) < TOLERANCE
    text = httpx.post(f"{vectors}/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert 400 <= text.status_code < 500


@pytest.mark.once
def test_scores_and_ranks(scores: str, reranker: PoolingModel) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reranker.path)
    query, documents = TEXTS[0], TEXTS[1:]
    wanted = []
    for document in documents:
        encoded = tokenizer(query, document)
        wanted.append(float(reranker.value(encoded["input_ids"], second=encoded["token_type_ids"].index(1))))
    body = {"model": "tiny", "text_1": query, "text_2": documents}
    got = [item["score"] for item in httpx.post(f"{scores}/score", json=body).json()["data"]]
    assert all(abs(a - b) < TOLERANCE for a, b in zip(got, wanted, strict=True))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"model": "tiny", "query": query, "documents": documents}
        ranked = httpx.post(f"{scores}{path}", json=body).json()["results"]
        order = sorted(range(len(wanted)), key=lambda index: -wanted[index])
        assert [item["index"] for item in ranked] == order
    classes = httpx.post(f"{scores}/classify", json={"model": "tiny", "input": query}).json()["data"][0]
    assert abs(classes["probs"][0] - float(reranker.value(tokenizer(query)["input_ids"]))) < TOLERANCE
