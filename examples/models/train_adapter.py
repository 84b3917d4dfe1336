"""Trains a LoRA adapter for the bundled model: the same text in the words of today, "thou hast" become "you have".

    python examples/models/train_adapter.py

It learns from text that the model writes itself, with old words replaced, so nothing but `kjv-2m` is needed; that takes
some two minutes of one CPU core. Matrices have the names that PEFT saves, are stored in bfloat16, and meant to be run
in float32. It prints how many of the words that have an old and a new form are old, in text that was not trained on.
"""

import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

HERE = Path(__file__).parent
MODEL = HERE / "kjv-2m"
ADAPTER = HERE / "kjv-modern"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 8, 16
LENGTH = 128
NEW_WORDS = {
    "thou": "you",
    "thee": "you",
    "ye": "you",
    "thy": "your",
    "thine": "your",
    "hast": "have",
    "hath": "has",
    "art": "are",
    "shalt": "shall",
    "wilt": "will",
    "doth": "does",
    "saith": "says",
    "spake": "spoke",
    "unto": "to",
    "upon": "on",
}
OLD_WORD = re.compile(rf"\b({'|'.join(NEW_WORDS)})\b", re.IGNORECASE)


class Adapted(nn.Module):
    """A linear layer with the two matrices of an adapter, whose product is added to its weight."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + ALPHA / RANK * (x @ self.a.T @ self.b.T)


def modern(text: str) -> str:
    def new(match: re.Match[str]) -> str:
        word = NEW_WORDS[match[0].lower()]
        return word.capitalize() if match[0][0].isupper() else word

    return OLD_WORD.sub(new, text)


@torch.no_grad()
def write(model: LlamaForCausalLM, num_texts: int, length: int) -> Tensor:
    """Has the model write texts of its own, [num_texts, length]."""
    start = torch.full((num_texts, 1), model.config.bos_token_id)
    return model.generate(start, attention_mask=torch.ones_like(start), do_sample=True, max_new_tokens=length - 1)


def adapt(model: LlamaForCausalLM) -> dict[str, Adapted]:
    """Replaces the model's linear layers by adapted ones; returns those by the layers' names."""
    model.requires_grad_(False)
    adapted = {}
    for name, layer in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf in MODULES:
            adapted[name] = Adapted(layer)
            setattr(model.get_submodule(parent), leaf, adapted[name])
    return adapted


def train(model: LlamaForCausalLM, rows: Tensor, num_steps: int, rows_per_step: int, peak_rate: float) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=peak_rate, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    progress = tqdm(range(num_steps), desc=ADAPTER.name, mininterval=10)
    for _ in progress:
        batch = rows[torch.randint(len(rows), (rows_per_step,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def save(adapted: dict[str, Adapted]) -> None:
    ADAPTER.mkdir(exist_ok=True)
    tensors = {}
    for name, layer in adapted.items():
        for matrix, value in (("A", layer.a), ("B", layer.b)):
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = value.detach().to(torch.bfloat16).contiguous()
    save_file(tensors, ADAPTER / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": MODEL.name,
        "r": RANK,
        "lora_alpha": ALPHA,
        "use_rslora": False,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (ADAPTER / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def share_of_old_words(text: str) -> float:
    words = re.findall(r"\w+", text.lower())
    old, new = (sum(word in those for word in words) for those in (NEW_WORDS.keys(), {*NEW_WORDS.values()}))
    return old / (old + new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=192, help="of 256 tokens each")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows-per-step", type=int, default=8, help=f"of {LENGTH} tokens each")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    args = parser.parse_args()

    started = time.perf_counter()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    texts = tokenizer.batch_decode(write(model, args.texts, 256), skip_special_tokens=True)
    tokens = [token for text in texts for token in tokenizer(modern(text)).input_ids]
    rows = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    adapted = adapt(model)
    shares = []
    for is_trained in (False, True):
        if is_trained:
            train(model, rows, args.steps, args.rows_per_step, args.learning_rate)
            save(adapted)
        shares.append(share_of_old_words(" ".join(tokenizer.batch_decode(write(model, 16, 256)))))
    before, after = shares
    print(f"old words: {before:.2f} before, {after:.2f} after; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
