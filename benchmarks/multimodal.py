"""Cost of an image: its encoder as graphs on the device against eagerly on the host; and text requests meanwhile.

    python -m benchmarks.multimodal [--layers 4] [--images 1 4] [--repeats 5]

LLaVA with random weights in float32 on openxla (PJRT CPU): CLIP's large tower for images of 336 pixels a side (patches
of 14, hidden 1,024, 16 heads, MLP 4,096) with few layers, of which the last is not used; 576 rows an image; a text
model of hidden 512 and 2 layers. One engine serves both sides, which take turns: the host keeps a copy of the tower as
it was loaded. `encode` is the encoder alone, from pixels to rows in the pool. `beside` is 48 steps of seven requests
that decode, in whose midst a request arrives: by how much its arrival makes them longer in all, and the longest step.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams

from benchmarks.report import make_parser, show_tables, take_turns
from model_runner_base.multimodal.towers.encoder_graphs import EAGER
from model_runner_base.multimodal.towers.placement import copied, towers_of
from model_runner_base.testing.engine import runner_of, shut_down
from model_runner_base.testing.processed import TEXT, hf, special_tokenizer
from neuron_runner.metrics import CompilationCount

SIDE, PATCH, ROWS = 336, 14, 576
NUM_STEPS, NUM_TEXTS = 48, 7
BUCKETS = {
    "num_batched_tokens_buckets": [64, 640, 4 * ROWS],
    "num_seqs_buckets": [8],
    "context_length_buckets": [1024],
    "warm_up": "full",
}


@contextmanager
def llava(num_layers: int) -> Iterator[Path]:
    """A checkpoint without weights."""
    tokenizer = special_tokenizer("<image>")
    text = TEXT | {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_hidden_layers": 2}
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_attention_heads=16,
            num_hidden_layers=num_layers,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=hf.LlamaConfig(**text | {"max_position_embeddings": 4096}, architectures=["LlamaForCausalLM"]),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=ROWS,
        architectures=["LlavaForConditionalGeneration"],
    )
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        processor.save_pretrained(directory)
        yield Path(directory)


class Server:
    """An engine whose encoder runs either way."""

    def __init__(self, model: Path) -> None:
        kept: list[Any] = []

        def keeping(model: Any) -> Any:
            towers = towers_of(model)
            kept.extend(map(copied, towers))
            return towers

        with mock.patch("model_runner_base.multimodal.tile_graphs.towers_of", keeping):
            self.llm = LLM(
                str(model),
                load_format="dummy",
                dtype="float32",
                max_model_len=1024,
                max_num_seqs=8,
                max_num_batched_tokens=4 * ROWS,
                block_size=32,
                kv_cache_memory_bytes=1 << 28,
                enable_prefix_caching=False,
                mm_processor_cache_gb=0,
                limit_mm_per_prompt={"image": 1},
                additional_config={"neuron_config": BUCKETS},
            )
        self.runner = runner_of(self.llm)
        names = self.runner.model._tower_model_names
        on_device = dict(zip(names, towers_of(self.runner.model), strict=True))
        self._sides = {
            "graphs": (self.runner.encoder._graphs, on_device),
            "eager": (EAGER, dict(zip(names, kept, strict=True))),
        }
        self._numbers = count()

    def choose(self, side: str) -> None:
        self.runner.encoder._graphs, towers = self._sides[side]
        for name, tower in towers.items():
            setattr(self.runner.model, name, tower)

    def encode(self, side: str, items: list[Any]) -> None:
        """Runs the encoder alone, from pixels on the host to rows in the pool."""
        self.choose(side)
        encoder = self.runner.encoder
        step: Any = SimpleNamespace(encoder_inputs={"a": range(len(items))}, orphans=())
        encoder.run(step, {"a": SimpleNamespace(items=items)})
        encoder.give_up([item.identifier for item in items])
        self.runner.device_ops.synchronize()

    def item(self) -> Any:
        """An image as the processor makes it."""
        prompt: Any = self.llm.input_processor.input_preprocessor.preprocess(self.prompt_with_image())
        data = prompt["mm_kwargs"]["image"][0]
        place = prompt["mm_placeholders"]["image"][0]
        return SimpleNamespace(identifier=f"item-{next(self._numbers)}", data=data, modality="image", mm_position=place)

    def prompt_with_image(self) -> Any:
        pixels = np.random.default_rng(next(self._numbers)).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        return {"prompt": "<image> what is it?", "multi_modal_data": {"image": Image.fromarray(pixels)}}

    def decode_beside(self, arriving: Callable[[], Any] | None) -> list[float]:
        """Milliseconds of each of ``NUM_STEPS`` steps of requests that decode; what arrives makes one token."""
        engine = self.llm.llm_engine
        for _ in range(NUM_TEXTS):
            params = SamplingParams(temperature=0, max_tokens=2 * NUM_STEPS, ignore_eos=True)
            engine.add_request(f"text-{next(self._numbers)}", "a b c d e f g", params)
        for _ in range(8):
            engine.step()
        times = []
        for step in range(NUM_STEPS):
            if step == NUM_STEPS // 4 and arriving is not None:
                params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
                engine.add_request(f"new-{next(self._numbers)}", arriving(), params)
            start = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - start) * 1e3)
        while engine.has_unfinished_requests():
            engine.step()
        return times


def encode_table(server: Server, numbers: list[int], repeats: int) -> list[dict[str, Any]]:
    """Rows of the table, one for each number of images."""
    rows = []
    for number in numbers:
        items = [server.item() for _ in range(number)]
        sides = {side: partial(server.encode, side, items) for side in ("eager", "graphs")}
        times = take_turns(sides, repeats)
        figures = {f"{side}_ms": median(of) for side, of in times.items()}
        rows.append({"images": number, **figures, "ratio": figures["eager_ms"] / figures["graphs_ms"]})
    return rows


def beside_table(server: Server, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table, one for each thing that arrives."""
    words = {"prompt_token_ids": [*range(10, 90)] * 7 + [*range(10, 30)]}
    arrivals: dict[str, tuple[str, Callable[[], Any] | None]] = {
        "nothing": ("graphs", None),
        "580 tokens of text": ("graphs", lambda: words),
        "an image, by graphs": ("graphs", server.prompt_with_image),
        "an image, eagerly": ("eager", server.prompt_with_image),
    }
    runs: dict[str, list[list[float]]] = {name: [] for name in arrivals}
    for _ in range(1 + repeats):
        for name, (side, arriving) in arrivals.items():
            server.choose(side)
            runs[name].append(server.decode_beside(arriving))
    alone = [sum(times) for times in runs["nothing"][1:]]
    rows = []
    for name, of in runs.items():
        more = [sum(times) - base for times, base in zip(of[1:], alone, strict=True)]
        rows.append(
            {
                "arriving": name,
                "median_step_ms": median(median(times) for times in of[1:]),
                "longest_step_ms": median(max(times) for times in of[1:]),
                "longer_in_all_ms": median(more),
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the tower")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 4], help="at a time, four at most")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # What is measured lies in the engine.
    with llava(args.layers) as model:
        server = Server(model)
        try:
            before = CompilationCount.now()
            tables = {
                "encode": encode_table(server, args.images, args.repeats),
                "beside": beside_table(server, args.repeats),
            }
            assert CompilationCount.now() == before, "something was compiled after warm-up"
        finally:
            del server
            shut_down()
    show_tables(tables, as_json=False)
    if args.json:
        print(json.dumps(tables))


if __name__ == "__main__":
    main()
