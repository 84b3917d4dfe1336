"""Trains the bundled embedding model, which finds verses by parts and rewordings of them.

    apt-get install bible-kjv
    python examples/models/train_embed.py

Its layers begin as the first two of `kjv-2m`. A pair is a verse and a part of its words, some left out, in the words of
today, without capitals; the other verses of a step are wrong answers (InfoNCE). Vectors are means over all tokens,
which the files of sentence-transformers say, so vLLM reads them from there. Weights are stored in bfloat16, and meant
to be run in float32. It prints how many verses of the last book, which was held out, are found first of all of them.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from train import read_chapters, save
from train_adapter import modern
from transformers import AutoTokenizer, LlamaModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
BASE = HERE / "kjv-2m"
MODEL = HERE / "kjv-embed"
LAYERS = 2
MAX_LENGTH = 256
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
"""Modules in the format of sentence-transformers."""


def query_of(verse: str, rng: random.Random) -> str:
    """A part of a verse's words, some of them left out, in the words of today."""
    words = re.findall(r"[\w']+", modern(verse).lower())
    count = min(len(words), max(4, round(len(words) * rng.uniform(0.3, 0.8))))
    start = rng.randint(0, len(words) - count)
    kept = [word for word in words[start : start + count] if rng.random() < 0.75]
    if rng.random() < 0.5:
        middle = len(kept) // 2
        kept = kept[middle:] + kept[:middle]
    return " ".join(kept or words)


def encode(model: LlamaModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> Tensor:
    """Normalised vectors [texts, hidden] of texts, cut to ``length`` tokens: means over their tokens."""
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt")
    mask = batch.attention_mask.unsqueeze(-1)
    states = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def share_found(model: LlamaModel, tokenizer: PreTrainedTokenizerBase, verses: Sequence[str]) -> float:
    """Share of queries whose verse is the first of all ``verses``."""
    rng = random.Random(1)
    queries = encode(model, tokenizer, [query_of(verse, rng) for verse in verses], MAX_LENGTH)
    found = (queries @ encode(model, tokenizer, verses, MAX_LENGTH).T).argmax(1)
    return float((found == torch.arange(len(verses))).float().mean())


def train(
    model: LlamaModel, tokenizer: PreTrainedTokenizerBase, verses: Sequence[str], args: argparse.Namespace
) -> None:
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, args.steps, pct_start=0.1)
    progress = tqdm(range(args.steps), desc=MODEL.name, mininterval=10)
    for _ in progress:
        chosen = rng.sample(verses, args.pairs)
        queries = encode(model, tokenizer, [query_of(verse, rng) for verse in chosen], 32)
        scores = queries @ encode(model, tokenizer, chosen, 48).T / args.temperature
        right = torch.arange(len(chosen))
        loss = (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def save_embedder(model: LlamaModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE)  # Another, which no call has told to pad or to cut.
    model.config.max_position_embeddings = tokenizer.model_max_length = MAX_LENGTH
    tokenizer.chat_template = None
    save(model, MODEL)
    tokenizer.save_pretrained(MODEL)
    pooling = {"word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": True}
    (MODEL / "1_Pooling").mkdir(exist_ok=True)
    for name, content in {"modules": MODULES, "1_Pooling/config": pooling}.items():
        (MODEL / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pairs", type=int, default=128, help="a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--temperature", type=float, default=0.05)
    args = parser.parse_args()

    started = time.perf_counter()
    torch.manual_seed(0)
    chapters = read_chapters()
    # Revelation, the last book, has 22 chapters.
    verses, held_out = ("\n".join(part).splitlines() for part in (chapters[:-22], chapters[-22:]))
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = LlamaModel.from_pretrained(BASE, dtype=torch.float32, num_hidden_layers=LAYERS)
    before = share_found(model, tokenizer, held_out)
    train(model, tokenizer, verses, args)
    after = share_found(model.eval(), tokenizer, held_out)
    save_embedder(model)
    print(
        f"found first of {len(held_out)}: {before:.2f} before, {after:.2f} after; {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
