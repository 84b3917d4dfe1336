"""Bundled heads draft in the engine what they draft in plain torch, from their checkpoints, over the same text.

Drafts that are poor change no token, so nothing else shows that a head reads what it was trained to read.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import BUNDLED_MODEL, engine
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from model_runner_base.testing.engine import generate, greedy, metric, tokens_of
from model_runner_base.testing.models import TinyModel, reference_model

NUM_DRAFTS, NUM_TOKENS = 3, 48
PROMPTS = [
    "And the LORD spake unto Moses,",
    "In the beginning God created the heaven and the earth. And the earth",
    "He that",
    "And it came to pass, when the king heard these words, that he rent his clothes, and sent messengers unto",
    "The sons of Reuben:",
    "Blessed is the man",
]


class Text(NamedTuple):
    """A prompt and what the target greedily says after it, with the states it has at each token."""

    num_prompt: int
    tokens: Tensor
    """[T]"""
    states: Tensor
    """[layers + 1, T, hidden] what enters each layer, and the last of all, normed."""


class Target(NamedTuple):
    """The bundled model in HF transformers."""

    embedding: Tensor
    texts: list[Text]


@pytest.fixture(scope="module")
@torch.no_grad()
def target() -> Target:
    model, tokenizer = reference_model(BUNDLED_MODEL), AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids
        # A request's last step may verify drafts after its end.
        tokens = torch.tensor(ids + TinyModel(BUNDLED_MODEL).greedy(tuple(ids), NUM_TOKENS + NUM_DRAFTS))
        states = torch.cat(model(tokens[None], output_hidden_states=True).hidden_states)
        texts.append(Text(len(ids), tokens, states))
    return Target(model.lm_head.weight, texts)


class Head:
    """A checkpoint of a head, read here with no code of vLLM's."""

    def __init__(self, path: Path, target: Target) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {name: weight.float() for name, weight in load_file(path / "model.safetensors").items()}
        self.embedding = target.embedding

    def drafts(self, tokens: Tensor, states: Tensor) -> list[int]:
        """Drafts after ``tokens`` [T], of which the target has had all but the last; ``states`` [layers + 1, T - 1,
        hidden] are those that it had there."""
        raise NotImplementedError

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def layer(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """A Llama layer over rows [T, ...] at positions from 0 on, but for the norm in front."""
        heads = (x.shape[0], -1, self.config["head_dim"])
        query, key, value = (self.linear(f"{name}.self_attn.{p}_proj", x).view(heads).transpose(0, 1) for p in "qkv")
        query, key = self.rotated(query), self.rotated(key)
        out = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]
        residual = residual + self.linear(f"{name}.self_attn.o_proj", out.transpose(0, 1).flatten(1))
        x = self.norm(f"{name}.post_attention_layernorm", residual)
        gate, up = (self.linear(f"{name}.mlp.{p}_proj", x) for p in ("gate", "up"))
        return residual + self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[-2])[:, None] * frequencies
        first, second = x.split(half, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Eagle(Head):
    """A row for each token but the first: the token, with the state of the token before it. The last row's output
    yields a draft; with that draft it is one row more."""

    def drafts(self, tokens: Tensor, states: Tensor) -> list[int]:
        rows, states = tokens[1:], self.first(states)
        for _ in range(NUM_DRAFTS):
            out = self.run(F.embedding(rows, self.embedding), states)[-1:]
            rows, states = torch.cat((rows, self.logits(out).argmax(-1))), torch.cat((states, out))
        return rows[-NUM_DRAFTS:].tolist()

    def first(self, states: Tensor) -> Tensor:
        """States of the target that the head reads; [T, hidden]."""
        return states[-1]

    def run(self, embedded: Tensor, states: Tensor) -> Tensor:
        x = self.linear("fc", torch.cat((embedded, states), -1))
        return self.layer("layers.0", x, x)

    def logits(self, out: Tensor) -> Tensor:
        return F.linear(out, self.embedding)


class Eagle3(Eagle):
    def first(self, states: Tensor) -> Tensor:
        return self.linear("fc", torch.cat([states[i] for i in self.config["eagle_aux_hidden_state_layer_ids"]], -1))

    def run(self, embedded: Tensor, states: Tensor) -> Tensor:
        x = torch.cat((self.norm("midlayer.input_layernorm", embedded), self.norm("midlayer.hidden_norm", states)), -1)
        return self.layer("midlayer", x, states)

    def logits(self, out: Tensor) -> Tensor:
        return self.linear("lm_head", self.norm("norm", out))


class Medusa(Head):
    """A set of heads, each of which guesses a token further ahead, from the last state alone."""

    def drafts(self, tokens: Tensor, states: Tensor) -> list[int]:
        last, drafts = states[-1, -1], []
        for index in range(NUM_DRAFTS):
            x = last
            for layer in range(self.config["num_hidden_layers"]):
                x = x + F.silu(self.linear(f"blocks.{index}.layers.{layer}", x))
            drafts.append(int(self.linear("lm_head", x).argmax()))
        return drafts


def verified(head: Head, text: Text) -> Iterator[int]:
    """How many drafts are right in each step of a request that has some."""
    # The prompt's step has yielded a token, the first step of decode another: for them nothing was drafted.
    end = text.num_prompt + 2
    while end < text.num_prompt + NUM_TOKENS:
        drafts = head.drafts(text.tokens[:end], text.states[:, : end - 1])
        pairs = zip(drafts, text.tokens[end:].tolist(), strict=False)
        num_right = next((i for i, (draft, token) in enumerate(pairs) if draft != token), NUM_DRAFTS)
        yield num_right
        end += num_right + 1


@pytest.mark.parametrize("kind", [Eagle, Eagle3, Medusa])
@torch.no_grad()
def test_as_many_drafts_are_right_as_in_plain_torch(kind: type[Head], target: Target) -> None:
    method = kind.__name__.lower()
    path = BUNDLED_MODEL.with_name(f"kjv-{method}")
    head = kind(path, target)
    right = [count for text in target.texts for count in verified(head, text)]
    speculation = {"method": method, "model": str(path), "num_speculative_tokens": NUM_DRAFTS}
    with engine(BUNDLED_MODEL, enforce_eager=True, speculative_config=speculation) as llm:
        prompts = [text.tokens[: text.num_prompt].tolist() for text in target.texts]
        tokens = tokens_of(generate(llm, prompts, greedy(NUM_TOKENS)))
        num_steps = metric(llm, "vllm:spec_decode_num_drafts")
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        (right_by_place,) = (each.values for each in llm.get_metrics() if each.name == name)
        if llm.llm_engine.vllm_config.scheduler_config.async_scheduling:
            # That scheduler also counts each request's first step of decode, which has no drafts.
            num_steps -= len(prompts)
    for text, got in zip(target.texts, tokens, strict=True):
        assert got == text.tokens[text.num_prompt :][:NUM_TOKENS].tolist()
    assert right_by_place == [sum(count > place for count in right) for place in range(NUM_DRAFTS)]
    assert num_steps == len(right)
