"""Tiny pooling models with random weights, and their vectors and scores by HF transformers in float32."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from model_runner_base.testing.architectures import MAX_LENGTH, SHAPE, TOKENS, hf
from model_runner_base.testing.models import vary
from model_runner_base.testing.precision import PRECISION
from model_runner_base.testing.tokenizer import make_tokenizer

TOLERANCE = 2e-4
"""Largest difference from the reference of normalised vectors and of probabilities, in float32."""
LOOSE = 2e-3
"""The same of numbers that are not normalised, which are of the order of 1 to 10."""
MEASURED = (10, 40, 100, 100)
"""Lengths of the random texts by which it is measured how much rounding moves."""
SLACK = 4.0
"""Factor of the largest difference that rounding makes there, which another order of sums may exceed."""
LABELS = 3
FIRST, LAST = 0, 1
"""Tokens at the beginning and the end of a text."""
ANSWERS = ["n", "y"]
"""Tokens whose logits a reranker compares: no and yes."""

_OF_DECODERS = ("num_key_value_heads", "max_position_embeddings", *TOKENS)
_SHAPE = {name: value for name, value in SHAPE.items() if name not in _OF_DECODERS}
_BERT = {**_SHAPE, "max_position_embeddings": MAX_LENGTH, "pad_token_id": 2}
_ROBERTA = {**_SHAPE, "max_position_embeddings": MAX_LENGTH + 3, "type_vocab_size": 1, **TOKENS}
_MODERN = {
    **_SHAPE,
    "num_hidden_layers": 4,
    "max_position_embeddings": MAX_LENGTH,
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
    "norm_bias": False,
    "reference_compile": False,
    "cls_token_id": 0,
    "sep_token_id": 1,
    **TOKENS,
}
_GEMMA = {
    **SHAPE,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_bidirectional_attention": True,
}
_MEAN = {"pooler_config": {"seq_pooling_type": "MEAN"}}
_LABELS = {"num_labels": LABELS}
_ONE_LABEL = {"num_labels": 1}


@dataclass(frozen=True)
class _Kind:
    make: Callable[[], Any]
    """Makes the model in transformers."""
    task: str = "embed"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``vllm.LLM``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further fields of config.json."""
    pooled: str = "last"
    """Rows that a vector is made of: the last one, the first one, or the mean of all."""
    activates: bool = True
    """Whether vLLM activates values of this model unless it is told otherwise."""
    heads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the pooler's own tensors, by name."""
    in_files: bool = False
    """Whether each of these layers is a file of its own."""
    prefix: str = ""
    """Beginning of the names of the model's own tensors in the checkpoint."""
    repeats: bool = False
    """Whether the checkpoint has tensors that two layers share under both names."""


def _qwen3(**more: Any) -> Any:
    return hf.Qwen3Config(**SHAPE, head_dim=32, **more)


def _two_sided(config: Any) -> Any:
    """A decoder whose tokens see all of their text."""
    model = hf.AutoModel.from_config(config)
    model.config.is_causal = False
    return model


KINDS: dict[str, _Kind] = {
    "qwen3": _Kind(lambda: hf.Qwen3Model(_qwen3()), config={"is_matryoshka": True}),
    "qwen3-classes": _Kind(lambda: hf.Qwen3ForSequenceClassification(_qwen3(**_LABELS)), "classify"),
    "qwen3-reranker": _Kind(
        lambda: hf.Qwen3ForCausalLM(_qwen3(tie_word_embeddings=False)),
        "score",
        {
            "hf_overrides": {
                "architectures": ["Qwen3ForSequenceClassification"],
                "classifier_from_token": ANSWERS,
                "is_original_qwen3_reranker": True,
            }
        },
    ),
    "qwen2-reward": _Kind(
        lambda: hf.Qwen2Model(hf.Qwen2Config(**SHAPE)),
        "token_classify",
        config={"architectures": ["Qwen2ForRewardModel"]},
        activates=False,
    ),
    "qwen2-process-reward": _Kind(
        lambda: hf.Qwen2Model(hf.Qwen2Config(**SHAPE)),
        "token_classify",
        {"pooler_config": {"step_tag_id": 7}},
        {"architectures": ["Qwen2ForProcessRewardModel"]},
    ),
    "llama-mean": _Kind(
        lambda: hf.LlamaModel(hf.LlamaConfig(**SHAPE)),
        options=_MEAN,
        pooled="mean",
    ),
    "mistral-window": _Kind(lambda: hf.MistralModel(hf.MistralConfig(**SHAPE, head_dim=16, sliding_window=40))),
    "qwen2-two-sided": _Kind(lambda: _two_sided(hf.Qwen2Config(**SHAPE)), options=_MEAN, pooled="mean"),
    "qwen3-two-sided": _Kind(lambda: _two_sided(_qwen3()), options=_MEAN, pooled="mean"),
    "llama-two-sided": _Kind(lambda: _two_sided(hf.LlamaConfig(**SHAPE)), options=_MEAN, pooled="mean"),
    "gemma3": _Kind(lambda: hf.Gemma3TextModel(hf.Gemma3TextConfig(**_GEMMA)), options=_MEAN, pooled="mean"),
    "bert": _Kind(lambda: hf.BertModel(hf.BertConfig(**_BERT), add_pooling_layer=False), pooled="first"),
    "bert-mean": _Kind(
        lambda: hf.BertModel(hf.BertConfig(**_BERT), add_pooling_layer=False),
        options=_MEAN,
        pooled="mean",
    ),
    "bert-classes": _Kind(lambda: hf.BertForSequenceClassification(hf.BertConfig(**_BERT, **_LABELS)), "classify"),
    "bert-reranker": _Kind(lambda: hf.BertForSequenceClassification(hf.BertConfig(**_BERT, **_ONE_LABEL)), "score"),
    "bert-tokens": _Kind(lambda: hf.BertForTokenClassification(hf.BertConfig(**_BERT, **_LABELS)), "token_classify"),
    "bert-splade": _Kind(
        lambda: hf.BertForMaskedLM(hf.BertConfig(**_BERT, tie_word_embeddings=False)),
        config={"architectures": ["BertSpladeSparseEmbeddingModel"], "cls_token_id": 0, "sep_token_id": 1},
        repeats=True,
    ),
    "bert-colbert": _Kind(
        lambda: hf.BertModel(hf.BertConfig(**_BERT), add_pooling_layer=False),
        "token_embed",
        config={"architectures": ["HF_ColBERT"]},
        heads={"linear.weight": (24, 64)},
        prefix="bert.",
    ),
    "bge-m3": _Kind(
        lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**_ROBERTA), add_pooling_layer=False),
        pooled="first",
        config={"architectures": ["BgeM3EmbeddingModel"]},
        heads={
            "sparse_linear.weight": (1, 64),
            "sparse_linear.bias": (1,),
            "colbert_linear.weight": (64, 64),
            "colbert_linear.bias": (64,),
        },
        in_files=True,
    ),
    "roberta": _Kind(lambda: hf.RobertaModel(hf.RobertaConfig(**_ROBERTA), add_pooling_layer=False), pooled="first"),
    "xlm-roberta-reranker": _Kind(
        lambda: hf.XLMRobertaForSequenceClassification(hf.XLMRobertaConfig(**_ROBERTA, **_ONE_LABEL)), "score"
    ),
    "modernbert": _Kind(lambda: hf.ModernBertModel(hf.ModernBertConfig(**_MODERN)), pooled="first"),
    "modernbert-tokens": _Kind(
        lambda: hf.ModernBertForTokenClassification(hf.ModernBertConfig(**_MODERN, **_LABELS)), "token_classify"
    ),
    "modernbert-classes": _Kind(
        lambda: hf.ModernBertForSequenceClassification(hf.ModernBertConfig(**_MODERN, **_LABELS)), "classify"
    ),
}
"""Tiny pooling models by name."""


@dataclass(frozen=True)
class PoolingModel:
    """A checkpoint on disk, with a tokenizer, and its reference."""

    name: str
    path: Path

    @property
    def task(self) -> str:
        """The model's own task; those of token vectors are served too."""
        return KINDS[self.name].task

    @property
    def options(self) -> dict[str, Any]:
        """Options that an engine needs for this model."""
        return {"runner": "pooling", "skip_tokenizer_init": False, **KINDS[self.name].options}

    def value(
        self, prompt: Sequence[int], task: str | None = None, activated: bool | None = None, second: int | None = None
    ) -> torch.Tensor:
        """The reference's value: a vector, or a row for each token.

        ``activated``: whether vectors are normalised, and logits made probabilities, by default as vLLM does;
        ``second``: the position of a second text's first token.
        """
        activated = KINDS[self.name].activates if activated is None else activated
        return _value(self.name, self.path, tuple(prompt), task or self.task, activated, second, torch.float32)

    def tolerance(self, task: str | None = None, activated: bool | None = None) -> float:
        """Largest difference that a value may have: in float32 by whether it is ``activated``; in a dtype that rounds
        by how much that moves the reference's."""
        if PRECISION.is_exact:
            return LOOSE if activated is False else TOLERANCE
        is_activated = KINDS[self.name].activates if activated is None else activated
        return SLACK * _moved(self.name, self.path, task or self.task, is_activated)


def make_pooling_model(name: str, directory: Path) -> PoolingModel:
    """Writes a tiny checkpoint; large weights make its values vary."""
    path, kind = directory / f"pooling-{name}", KINDS[name]
    if not path.exists():
        torch.manual_seed(sum(map(ord, name)))
        model = kind.make()
        for tensor_name, tensor in model.named_parameters():
            vary(tensor_name, tensor)
        score = _score_layers(name)
        if score is not None:
            model.save_pretrained(path, state_dict={f"model.{k}": v for k, v in model.state_dict().items()} | score)
        elif kind.in_files:
            model.save_pretrained(path)
            _save_layers(_head_tensors(name), path)
        else:
            tensors = model.state_dict().items()
            state = {kind.prefix + key: each.clone() if kind.repeats else each for key, each in tensors}
            model.save_pretrained(path, state_dict=state | _head_tensors(name))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | kind.config))
        _save_tokenizer(name, path)
    return PoolingModel(name, path)


def _save_tokenizer(name: str, path: Path) -> None:
    if name.startswith("bert"):
        _pair_tokenizer(path).save_pretrained(path)
        return
    make_tokenizer().save_pretrained(path)
    if name == "qwen3-reranker":
        return  # It returns types of tokens, all 0, which the model does not know.
    # As those of most models it marks no second text.
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]}))


def _pair_tokenizer(path: Path) -> Any:
    """A tokenizer of words and letters that marks the second of two texts by token types, as BERT's do."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (path / "vocab.txt").write_text("\n".join(words))
    return hf.BertTokenizerFast(vocab_file=str(path / "vocab.txt"))


@cache
def _head_tensors(name: str) -> dict[str, torch.Tensor]:
    """Random tensors of the pooler's own layers."""
    rng = torch.Generator().manual_seed(4)
    return {key: 0.2 * torch.randn(shape, generator=rng) for key, shape in KINDS[name].heads.items()}


def _save_layers(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Saves each layer to a file of its own, as BGE-M3 does."""
    for layer in {key.rpartition(".")[0] for key in tensors}:
        state = {key.rpartition(".")[2]: each for key, each in tensors.items() if key.startswith(f"{layer}.")}
        torch.save(state, path / f"{layer}.pt")


@cache
def _score_layers(name: str) -> dict[str, torch.Tensor] | None:
    """Weights of a reward model's two layers, which transformers has no class for; None for other models."""
    architecture = KINDS[name].config.get("architectures", [""])[0]
    if "Reward" not in architecture:
        return None
    labels = 2 if "Process" in architecture else 1
    rng = torch.Generator().manual_seed(3)
    sizes: dict[str, tuple[int, ...]] = {"score.0": (64, 64), "score.2": (labels, 64)}
    shapes = {f"{layer}.weight": size for layer, size in sizes.items()}
    shapes |= {f"{layer}.bias": size[:1] for layer, size in sizes.items()}
    return {key: 0.1 * torch.randn(shape, generator=rng) for key, shape in shapes.items()}


@cache
def _reference(name: str, path: Path, dtype: torch.dtype) -> Any:
    model = KINDS[name].make()
    if _score_layers(name) is None:
        return type(model).from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    state = load_file(path / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")})
    return model.to(dtype).eval()


@cache
def _moved(name: str, path: Path, task: str, activated: bool) -> float:
    """Largest difference of a value in the kit's dtype from that in float32, over random texts."""
    rng, moved = np.random.default_rng(0), 0.0
    tag = (KINDS[name].options.get("pooler_config") or {}).get("step_tag_id")
    for length in MEASURED:
        tokens = rng.integers(3, SHAPE["vocab_size"], length).tolist()
        tokens[length // 2] = tokens[length // 2] if tag is None else tag
        values = (
            _value(name, path, (*tokens,), task, activated, None, each) for each in (torch.float32, PRECISION.dtype)
        )
        exact, rounded = values
        moved = max(moved, float((exact - rounded).abs().max()))
    return moved


def _inner(prompt: Sequence[int]) -> slice:
    """Rows of a prompt without the special tokens at its ends, which vectors of words leave out."""
    return slice(int(prompt[0] == FIRST), len(prompt) - int(prompt[-1] == LAST))


@cache
@torch.no_grad()
def _value(
    name: str,
    path: Path,
    prompt: tuple[int, ...],
    task: str,
    activated: bool,
    second: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The reference's value, by a model in ``dtype``; what follows the model is in float32."""
    kind, model = KINDS[name], _reference(name, path, dtype)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt])}
    if second is not None:
        inputs["token_type_ids"] = (torch.arange(len(prompt)) >= second).long()[None]
    if name.endswith("two-sided"):
        inputs["attention_mask"] = torch.zeros(1, 1, len(prompt), len(prompt), dtype=dtype)
    if name == "qwen3-reranker":
        no, yes = map(make_tokenizer().convert_tokens_to_ids, ANSWERS)
        logits = model(**inputs).logits[0, -1].float()
        score = logits[yes] - logits[no]
        return (torch.sigmoid(score) if activated else score)[None]
    if name == "bert-splade" and task == "embed":
        logits = model(**inputs).logits[0][_inner(prompt)].float()
        return torch.log1p(torch.relu(logits)).amax(0) if len(logits) else logits.new_zeros(logits.shape[-1])
    if name == "bge-m3" and task != "embed":
        states = model(**inputs).last_hidden_state[0].float()
        layer = "sparse_linear" if task == "token_classify" else "colbert_linear"
        rows = torch.nn.functional.linear(
            states, *(_head_tensors(name)[f"{layer}.{each}"] for each in ("weight", "bias"))
        )
        if task == "token_classify":
            return (torch.relu(rows) if activated else rows)[_inner(prompt)].squeeze(-1)
        rows = rows[1:] if prompt[0] == FIRST else rows
        return torch.nn.functional.normalize(rows, dim=-1) if activated else rows
    if task in ("embed", "token_embed"):
        states = getattr(model, model.base_model_prefix, model)(**inputs).last_hidden_state[0].float()
        if task == "embed":
            states = {"last": states[-1], "first": states[0], "mean": states.mean(0)}[kind.pooled]
        if name == "bert-colbert":
            states = states @ _head_tensors(name)["linear.weight"].T
        return torch.nn.functional.normalize(states, dim=-1) if activated else states
    score_layers = _score_layers(name)
    if score_layers is not None:
        states = model(**inputs).last_hidden_state[0].float()
        inner = torch.relu(states @ score_layers["score.0.weight"].T + score_layers["score.0.bias"])
        logits = inner @ score_layers["score.2.weight"].T + score_layers["score.2.bias"]
        if "Process" in kind.config["architectures"][0]:
            logits = logits[inputs["input_ids"][0] == kind.options["pooler_config"]["step_tag_id"]]
    else:
        logits = model(**inputs).logits[0].float()
    if not activated:
        return logits
    return torch.sigmoid(logits) if logits.shape[-1] == 1 else torch.softmax(logits, -1)
