"""Trains a toy vision model: a LLaVA of a million parameters, which names shape, colour and place in a picture.

    python examples/models/train_seeing.py

Pictures and answers are made during training, so no data is needed; it takes some minutes of two CPU cores. It prints
the share of right answers about pictures that were not trained on. Weights are stored in bfloat16, and meant to be run
in float32.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from train import save
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

MODEL = Path(__file__).parent / "shapes"
PICTURES = MODEL / "pictures"
SIZE, PATCH = 48, 8
IMAGE, END = "<image>", "<|end|>"
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 220, 50),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("on the left", "in the middle", "on the right")
QUESTIONS: dict[str, Callable[[str, str, str], str]] = {
    "What is in the picture?": lambda colour, shape, place: f"A {colour} {shape} {place}.",
    "Which colour is it?": lambda colour, shape, place: colour.capitalize() + ".",
    "Which shape is it?": lambda colour, shape, place: f"A {shape}.",
    "Where is it?": lambda colour, shape, place: place.capitalize() + ".",
}


def draw(colour: str, shape: str, place: str, rng: random.Random) -> Image.Image:
    """A picture of one shape, about half as high as the picture, on a dark ground."""
    picture = Image.new("RGB", (SIZE, SIZE), tuple(rng.randrange(70) for _ in range(3)))
    pen, half = ImageDraw.Draw(picture), rng.uniform(9, 12)
    x = SIZE * (0.26 + 0.24 * PLACES.index(place)) + rng.uniform(-1, 1)
    y = SIZE / 2 + rng.uniform(-4, 4)
    fill = tuple(max(0, min(255, value + rng.randrange(-20, 21))) for value in COLOURS[colour])
    box = (x - half, y - half, x + half, y + half)
    if shape == "circle":
        pen.ellipse(box, fill)
    elif shape == "square":
        pen.rectangle(box, fill)
    elif shape == "triangle":
        pen.polygon(((x, y - half), (x - half, y + half), (x + half, y + half)), fill)
    else:
        third = half / 3
        pen.rectangle((x - half, y - third, x + half, y + third), fill)
        pen.rectangle((x - third, y - half, x + third, y + half), fill)
    return picture


def ask(rng: random.Random) -> tuple[Image.Image, str, str]:
    """A picture, a question and its answer."""
    what = rng.choice([*COLOURS]), rng.choice(SHAPES), rng.choice(PLACES)
    question = rng.choice([*QUESTIONS])
    return draw(*what, rng), question, QUESTIONS[question](*what)


def make_processor() -> "transformers.LlavaProcessor":
    bpe = ByteLevelBPETokenizer()
    texts = [
        f"{q} {answer(c, s, p)}" for q, answer in QUESTIONS.items() for c in COLOURS for s in SHAPES for p in PLACES
    ]
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=[END], show_progress=False)
    tokenizer = transformers.Qwen2TokenizerFast(
        tokenizer_object=bpe._tokenizer, unk_token=None, eos_token=END, pad_token=END
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        "{{ '" + IMAGE + "' if c['type'] == 'image' else c['text'] }}{% endfor %}{% endif %}{% endfor %}"
    )
    images = transformers.CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    return transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def make_model(processor: "transformers.LlavaProcessor") -> LlavaForConditionalGeneration:
    tokenizer = processor.tokenizer
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=(len(tokenizer) + 15) // 16 * 16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
    )
    image_token = tokenizer.convert_tokens_to_ids(IMAGE)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        image_seq_length=(SIZE // PATCH) ** 2,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def make_batch(
    processor: "transformers.LlavaProcessor", count: int, rng: random.Random
) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of the model, and the right next token at each place of an answer, -100 elsewhere."""
    asked = [ask(rng) for _ in range(count)]
    texts = [f"{IMAGE}{question} {answer}{END}" for _, question, answer in asked]
    inputs = processor(text=texts, images=[picture for picture, _, _ in asked], return_tensors="pt", padding=True)
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, (_, _, answer) in enumerate(asked):
        length = int(inputs["attention_mask"][row].sum())
        num_answer = len(processor.tokenizer(f" {answer}{END}").input_ids)
        labels[row, length - num_answer : length] = inputs["input_ids"][row, length - num_answer : length]
    return dict(inputs), labels[:, 1:]


def train(
    model: LlavaForConditionalGeneration,
    processor: "transformers.LlavaProcessor",
    num_steps: int,
    rows: int,
    peak_rate: float,
) -> None:
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rate, num_steps, pct_start=0.1)
    progress = tqdm(range(num_steps), desc=MODEL.name, mininterval=10)
    for _ in progress:
        inputs, labels = make_batch(processor, rows, rng)
        logits = model(**inputs).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


@torch.no_grad()
def share_right(model: LlavaForConditionalGeneration, processor: "transformers.LlavaProcessor", count: int) -> float:
    """Share of right greedy answers to questions about pictures from another seed."""
    rng, right = random.Random(1), 0
    for _ in range(count):
        picture, question, answer = ask(rng)
        inputs = processor(text=[f"{IMAGE}{question}"], images=[picture], return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        text = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += text.strip() == answer
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows-per-step", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    args = parser.parse_args()

    started = time.perf_counter()
    torch.manual_seed(0)
    processor = make_processor()
    model = make_model(processor)
    train(model, processor, args.steps, args.rows_per_step, args.learning_rate)
    save(model.eval(), MODEL)
    processor.save_pretrained(MODEL)
    PICTURES.mkdir(exist_ok=True)
    rng = random.Random(2)
    for colour, shape, place in (
        ("red", "circle", PLACES[0]),
        ("blue", "triangle", PLACES[2]),
        ("yellow", "cross", PLACES[1]),
    ):
        draw(colour, shape, place, rng).save(PICTURES / f"{colour}-{shape}.png")
    share = share_right(model.float(), processor, 200)
    num = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num / 1e6:.2f}M parameters; {share:.3f} of 200 answers right; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
