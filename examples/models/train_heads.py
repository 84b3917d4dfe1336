"""Trains draft heads for the bundled model, one for each way in which vLLM drafts from a target's hidden states.

    python examples/models/train_heads.py

A head learns from text that the target writes itself, so nothing but `kjv-2m` is needed. `kjv-eagle` is an EAGLE-1
head, `kjv-eagle3` an EAGLE-3 head, `kjv-medusa` has three Medusa heads that share the logits head; weights have the
names that vLLM loads. They are stored in bfloat16, and meant to be run in float32. The printed agreement is how often
each draft is the target's argmax, on text that was not trained on; tokens a step are those of greedy decoding with
three drafts.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

HERE = Path(__file__).parent
TARGET = HERE / "kjv-2m"
DRAFTS = 3
# EAGLE-3 reads the states that enter these layers of the target. The last of them is the target's last layer.
AUX_LAYERS = (1, 3, 4)
MEDUSA_LAYERS = 2
# The first tokens of every sequence are drawn at temperature 1, so that greedy sequences differ.
PROMPT = 16


@dataclass(frozen=True)
class Text:
    """Sequences that the target wrote, with the states it had at each token."""

    tokens: Tensor
    aux: Tensor
    final: Tensor


@torch.no_grad()
def write(target: LlamaForCausalLM, temperatures: Tensor, length: int) -> Text:
    """Has the target write one sequence for each temperature, from <s> on."""
    cache = DynamicCache(config=target.config)
    token = torch.full((len(temperatures), 1), target.config.bos_token_id)
    columns = []
    for position in tqdm(range(length), desc="text", mininterval=10):
        out = target(input_ids=token, past_key_values=cache, output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer] for layer in AUX_LAYERS], -1)
        columns.append((token, aux, out.hidden_states[-1]))
        logits = out.logits[:, -1]
        heat = temperatures[:, None] if position >= PROMPT else 1
        token = (logits - heat * torch.empty_like(logits).exponential_().log()).argmax(-1, keepdim=True)
    return Text(*(torch.cat(column, 1) for column in zip(*columns, strict=True)))


class Attention(nn.Module):
    """Attention of a draft layer over several passes, where every position of a sequence starts its own drafts.

    Row i of pass j is at position i + j. As when serving, it sees the keys of the first pass, made from the target's
    states, up to position i, and row i of each later pass.
    """

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        query, key = llama.apply_rotary_pos_emb(query, key, *rotary)
        kept.append((llama.repeat_kv(key, self.groups), llama.repeat_kv(value, self.groups)))
        (keys, values), *later = kept
        rows = x.shape[1]
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = [(query @ keys.mT).masked_fill(future, -torch.inf)]
        scores += [(query * key).sum(-1, keepdim=True) for key, _ in later]
        weights = (torch.cat(scores, -1) / math.sqrt(self.head_dim)).softmax(-1)
        out = weights[..., :rows] @ values
        for column, (_, value) in enumerate(later, start=rows):
            out = out + weights[..., column, None] * value
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A Llama layer without the norm in front of its attention."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, width)
        self.post_attention_layernorm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = llama.LlamaMLP(config)

    def forward(self, x: Tensor, residual: Tensor, *attention: Any) -> Tensor:
        residual = residual + self.self_attn(x, *attention)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle(nn.Module):
    """EAGLE-1: the next token's embedding and the target's final state, one layer, the target's own head."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.rotary = llama.LlamaRotaryEmbedding(target.config)
        # The target's embedding is also its head. Neither is stored again.
        self.register_buffer("embedding", target.lm_head.weight.detach(), persistent=False)
        self.build(target.config)

    @staticmethod
    def config(target: dict[str, Any]) -> dict[str, Any]:
        return target | {"num_hidden_layers": 1, "is_eagle": True}

    def build(self, config: LlamaConfig) -> None:
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, config.hidden_size)])

    def first(self, text: Text) -> Tensor:
        """The hidden states that the first pass takes."""
        return text.final

    def step(self, embedded: Tensor, hidden: Tensor, *attention: Any) -> Tensor:
        """The hidden states of a pass, which are the next one's input."""
        x = self.fc(torch.cat((embedded, hidden), -1))
        return self.layers[0](x, x, *attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding)

    def forward(self, text: Text, passes: int) -> list[Tensor]:
        """Logits of each pass: row i of pass j is for the token after i + 1 + j, made from the target's states to i."""
        rows = text.tokens.shape[1] - passes
        hidden = self.first(text)[:, :rows]
        kept: list[tuple[Tensor, Tensor]] = []
        logits = []
        for index in range(passes):
            embedded = F.embedding(text.tokens[:, index + 1 : index + 1 + rows], self.embedding)
            rotary = self.rotary(embedded, torch.arange(index, index + rows)[None])
            hidden = self.step(embedded, hidden, rotary, kept)
            logits.append(self.logits(hidden))
        return logits

    def start(self, target: LlamaForCausalLM, text: Text) -> None:
        """Starts from the target's last layer, with a guess of that layer's input, in the scale of the final states."""
        last, layer = target.model.layers[-1], self.layers[0]
        entering = text.aux[:, 1:, -target.config.hidden_size :]
        scale = rms(text.final) / rms(entering)
        embedded = F.embedding(text.tokens[:, 1:], self.embedding)
        self.fc.weight.copy_(least_squares(torch.cat((embedded, text.final[:, :-1]), -1), scale * entering))
        layer.load_state_dict(last.state_dict(), strict=False)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight.mul_(last.input_layernorm.weight / rms(text.final))
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_(scale)


class Eagle3(Eagle):
    """EAGLE-3: states of three of the target's layers, mixed once, then one layer, a norm and a head of its own."""

    @staticmethod
    def config(target: dict[str, Any]) -> dict[str, Any]:
        return target | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": target["vocab_size"],
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
            "tie_word_embeddings": False,
        }

    def build(self, config: LlamaConfig) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(AUX_LAYERS) * size, size, bias=False)
        self.midlayer = Layer(config, 2 * size)
        self.midlayer.input_layernorm = llama.LlamaRMSNorm(size, epsilon)
        self.midlayer.hidden_norm = llama.LlamaRMSNorm(size, epsilon)
        self.norm = llama.LlamaRMSNorm(size, epsilon)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)

    def first(self, text: Text) -> Tensor:
        return self.fc(text.aux)

    def step(self, embedded: Tensor, hidden: Tensor, *attention: Any) -> Tensor:
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1)
        return layer(x, hidden, *attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def start(self, target: LlamaForCausalLM, text: Text) -> None:
        """Starts from the target's last layer and head, with attention of its own and a guess of that layer's input."""
        last = target.model.layers[-1]
        self.fc.weight.copy_(least_squares(text.aux[:, :-1], text.aux[:, 1:, -target.config.hidden_size :]))
        for part in ("self_attn.o_proj", "post_attention_layernorm", "mlp"):
            self.midlayer.get_submodule(part).load_state_dict(last.get_submodule(part).state_dict())
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.lm_head.load_state_dict(target.lm_head.state_dict())


class MedusaBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(MEDUSA_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(nn.Module):
    """Medusa: a block for each draft, on the target's final state alone, and one head for all of them."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        size, vocabulary = target.config.hidden_size, target.config.vocab_size
        self.blocks = nn.ModuleList(MedusaBlock(size) for _ in range(DRAFTS))
        self.lm_head = nn.Linear(size, vocabulary, bias=False)

    @staticmethod
    def config(target: dict[str, Any]) -> dict[str, Any]:
        kind = {"architectures": ["MedusaModel"], "model_type": "medusa", "original_lm_head": True}
        sizes = {"hidden_size": target["hidden_size"], "vocab_size": target["vocab_size"]}
        return kind | sizes | {"num_heads": DRAFTS, "num_hidden_layers": MEDUSA_LAYERS, "dtype": target["dtype"]}

    def forward(self, text: Text, passes: int) -> list[Tensor]:
        final = text.final[:, : text.tokens.shape[1] - passes]
        return [self.lm_head(block(final)) for block in self.blocks[:passes]]

    def start(self, target: LlamaForCausalLM, text: Text) -> None:
        """Starts from the target's head on a nearly unchanged state: two layers of zeros would learn the same."""
        for weight in self.blocks.parameters():
            nn.init.normal_(weight, std=0.01)
        self.lm_head.load_state_dict(target.lm_head.state_dict())


def rms(states: Tensor) -> float:
    return states.square().mean().sqrt().item()


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The weight of the linear layer that comes closest to these outputs."""
    return torch.linalg.lstsq(inputs.flatten(0, 1), outputs.flatten(0, 1)).solution.T


@dataclass(frozen=True)
class Recipe:
    """Settings of one head's training; `passes` is the number of passes that are unrolled."""

    directory: str
    head: type[Eagle | Medusa]
    passes: int
    steps: int
    peak_rate: float


RECIPES = (
    Recipe("kjv-eagle", Eagle, passes=2, steps=750, peak_rate=5e-3),
    Recipe("kjv-eagle3", Eagle3, passes=3, steps=460, peak_rate=5e-3),
    Recipe("kjv-medusa", Medusa, passes=DRAFTS, steps=900, peak_rate=1e-2),
)


def compare(head: Eagle | Medusa, target: LlamaForCausalLM, text: Text, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of the head and of the target, for each pass."""
    wanted = target.lm_head(text.final)
    for index, logits in enumerate(head(text, passes)):
        yield logits, wanted[:, index + 1 : index + 1 + logits.shape[1]]


def train(recipe: Recipe, target: LlamaForCausalLM, text: Text, batch: int) -> Eagle | Medusa:
    """Trains one head and saves it; returns it as it was saved."""
    head = recipe.head(target)
    with torch.no_grad():
        head.start(target, text)
    optimizer = torch.optim.Adam(head.parameters(), lr=recipe.peak_rate, betas=(0.9, 0.95))
    warmup = recipe.steps // 20

    def rate(step: int) -> float:
        return min(step / warmup, 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    progress = tqdm(range(recipe.steps), desc=recipe.directory, mininterval=10)
    for _ in progress:
        rows = torch.randint(len(text.tokens), (batch,))
        pairs = compare(head, target, Text(text.tokens[rows], text.aux[rows], text.final[rows]), recipe.passes)
        # A draft counts only where those before it are right, hence the weights.
        losses = [F.cross_entropy(ours.flatten(0, 1), theirs.flatten(0, 1).softmax(-1)) for ours, theirs in pairs]
        loss = sum(0.8**index * part for index, part in enumerate(losses))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)

    directory = HERE / recipe.directory
    directory.mkdir(exist_ok=True)
    config = head.config(json.loads((TARGET / "config.json").read_text()))
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = {name: weight.to(torch.bfloat16) for name, weight in head.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    head.load_state_dict(weights)
    return head


@torch.no_grad()
def evaluate(head: Eagle | Medusa, target: LlamaForCausalLM, text: Text) -> tuple[list[float], float]:
    """How often each draft is the target's argmax, and, if the text is greedy, the tokens a step of decoding it."""
    pairs = compare(head, target, text, DRAFTS)
    right = torch.stack([ours.argmax(-1) == theirs.argmax(-1) for ours, theirs in pairs], -1)[:, PROMPT:]
    lengths = right.int().cumprod(-1).sum(-1) + 1
    steps = 0
    for row in lengths.tolist():
        position = 0
        while position < len(row):
            position += row[position]
            steps += 1
    return right.float().mean((0, 1)).tolist(), lengths.numel() / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1500, help="how many to train on")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--sequences-per-step", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[recipe.directory for recipe in RECIPES], help="train this one alone")
    args = parser.parse_args()

    # More threads would add in another order, and the same seed would give other weights.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval().requires_grad_(False)
    # Heads are to draft well for greedy requests and for sampling ones.
    text = write(target, torch.linspace(0, 1, args.sequences), args.length)
    greedy, sampled = (write(target, torch.full((100,), heat), args.length) for heat in (0.0, 1.0))
    for recipe in RECIPES:
        if args.only in (None, recipe.directory):
            torch.manual_seed(args.seed)
            start = time.perf_counter()
            head = train(recipe, target, text, args.sequences_per_step)
            seconds = time.perf_counter() - start
            agreement, tokens = evaluate(head, target, greedy)
            print(f"{recipe.directory}: {tokens:.2f} tokens a step, {seconds:.0f} s; agreement by draft:")
            print("  greedy ", *(f"{share:.3f}" for share in agreement))
            print("  sampled", *(f"{share:.3f}" for share in evaluate(head, target, sampled)[0]))


if __name__ == "__main__":
    main()
