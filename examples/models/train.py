"""Trains the bundled model and its draft sibling from text that Debian ships.

The text is the King James Bible (copyright expired) from the packages ``bible-kjv`` and ``bible-kjv-text``:

    apt-get install bible-kjv
    python examples/models/train.py

One byte-level BPE tokenizer serves both models, as speculative decoding needs. Weights are stored in bfloat16, which
halves the files; they are meant to be run in float32. The printed validation loss is over the last book.
"""

import argparse
import json
import math
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCAB_SIZE = 2048
MAX_LENGTH = 1024
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class Size:
    """Name and sizes of one of the two siblings, and the steps of its training."""

    directory: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    steps: int


SIZES = (
    Size("kjv-2m", hidden=192, layers=5, heads=6, kv_heads=2, intermediate=512, steps=2200),
    Size("kjv-draft", hidden=96, layers=2, heads=3, kv_heads=1, intermediate=256, steps=2200),
)


def read_chapters() -> list[str]:
    """The whole text as one string a chapter, one verse a line, without references."""
    command = ["bible", "-l9999", "Genesis1:1-Revelation22:21"]
    out = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    # A chapter is a heading ("Genesis 1"), then one indented, numbered line a verse; brackets mark italics.
    chapters: list[list[str]] = []
    for line in out.splitlines():
        if match := re.match(r"\s+\d+ (.*\S)", line):
            chapters[-1].append(re.sub(r"[\[\]]", "", match[1]))
        elif line.strip():
            chapters.append([])
    if not chapters:
        raise SystemExit("`bible` printed no verses: install the packages bible-kjv and bible-kjv-text")
    return ["\n".join(verses) for verses in chapters]


def make_tokenizer(chapters: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(size: Size) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=MAX_LENGTH,
            rope_theta=10000.0,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )


def train(size: Size, tokens: np.ndarray, held_out: np.ndarray, tokens_per_step: int, peak_rate: float) -> float:
    """Trains one model and saves it; returns its validation loss in nats a token."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = make_model(size).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.95))
    warmup = size.steps // 20

    def rate(step: int) -> float:
        return min(step / warmup, 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / size.steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    progress = tqdm(range(size.steps), desc=size.directory, mininterval=10)
    for step in progress:
        # The last tenth sees full-length sequences; before it short ones cost less attention.
        length = MAX_LENGTH if step > 0.9 * size.steps else 256
        starts = rng.integers(0, len(tokens) - length, tokens_per_step // length)
        batch = torch.from_numpy(np.stack([tokens[s : s + length] for s in starts]))
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)

    model.eval()
    with torch.no_grad():
        rows = torch.from_numpy(held_out[: len(held_out) // 512 * 512].reshape(-1, 512))
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    model.generation_config.do_sample = False
    save(model, HERE / size.directory)
    return float(np.mean(losses))


def save(model: PreTrainedModel, path: Path) -> None:
    """Writes a model in bfloat16, with a config that says float32, in which it is meant to be run."""
    model.to(torch.bfloat16).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--only", choices=[size.directory for size in SIZES], help="train this one alone")
    args = parser.parse_args()

    chapters = read_chapters()
    tokenizer = make_tokenizer(chapters)
    encoded = [[*tokenizer(chapter).input_ids, tokenizer.eos_token_id] for chapter in chapters]
    # Revelation, the last book, has 22 chapters.
    tokens, held_out = (np.concatenate(part).astype(np.int64) for part in (encoded[:-22], encoded[-22:]))
    print(f"{len(tokens):,} training tokens, {len(held_out):,} held out")
    for size in SIZES:
        if args.only in (None, size.directory):
            start = time.perf_counter()
            loss = train(size, tokens, held_out, args.tokens_per_step, args.learning_rate)
            tokenizer.save_pretrained(HERE / size.directory)
            print(f"{size.directory}: validation loss {loss:.3f}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
