"""Architectures of vLLM's registry on one device: a row for each tiny checkpoint, and the names of all others."""

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import vllm.model_executor.models.registry
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging as hf_logging

from model_runner_base.testing.architectures import (
    CONFIGS,
    LATENT,
    LATENT_LATER,
    LATER,
    REFUSED,
    UNEQUAL_HEADS,
    WINDOW,
    hf,
)
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.engine import Engines, greedy
from model_runner_base.testing.images import FAMILIES, make_seeing_model, picture
from model_runner_base.testing.models import make_checkpoint
from model_runner_base.testing.recurrent_architectures import RECURRENT
from model_runner_base.testing.swept_architectures import SWEPT
from model_runner_base.testing.table import refusal

COUNT = 12
PROMPTS = random_prompts(0, [5, 33, 90, 150])
"""Shorter and longer than a step's 64 tokens, and than windows of 40."""
OVERRIDES = {"mimo-v2": {"sliding_window_size": WINDOW}}
"""Fields of a config that vLLM reads and transformers does not write, by configuration."""
STYLES = {"equal": "green", "refused": "yellow", "not compared": "dim", "different": "bold red", "error": "bold red"}
_registry: Any = vllm.model_executor.models.registry


@dataclass(frozen=True)
class Checkpoint:
    """A tiny checkpoint, and prompts for it."""

    path: Path
    inputs: Sequence[Any]
    reference: Callable[[], Sequence[list[int]]]
    """Function that returns the tokens of HF transformers after each prompt."""
    options: dict[str, Any]
    """Options of its engine."""

    @property
    def architecture(self) -> str:
        # Not from config.json, in which some releases of transformers have it for the text model alone.
        (name,) = hf.AutoConfig.from_pretrained(self.path).architectures
        return str(name)


@dataclass(frozen=True)
class TableRow:
    """Result for one configuration, and why."""

    architecture: str
    configuration: str
    result: str
    reason: str = ""


def of_text(name: str, directory: Path) -> Checkpoint:
    """A model of text, by its name in ``architectures.py`` or ``recurrent_architectures.py``."""
    model = make_checkpoint(name, directory)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    options = {"hf_overrides": OVERRIDES[name]} if name in OVERRIDES else {}
    return Checkpoint(model.path, inputs, lambda: [model.greedy(prompt, COUNT) for prompt in PROMPTS], options)


def of_images(name: str, directory: Path) -> Checkpoint:
    """A model of images, by its name in ``images.py``."""
    model = make_seeing_model(name, directory)
    see = model.placeholder
    asked = [
        ("no picture here", []),
        (f"look at this: {see} and say what it is", [picture(2, 40, 24)]),
        (f"{see} and {see}: which is larger?", [picture(1, 32, 32), picture(3, 64, 48)]),
    ]
    inputs = [{"prompt": text} | ({"multi_modal_data": {"image": images}} if images else {}) for text, images in asked]
    options = {"skip_tokenizer_init": False, "max_model_len": None, **model.limits}
    return Checkpoint(
        model.path, inputs, lambda: [model.greedy(text, images, COUNT)[1] for text, images in asked], options
    )


def cases(directory: Path) -> dict[str, Callable[[], Checkpoint]]:
    """Makers of the checkpoints that this release of transformers has classes for."""
    texts = CONFIGS | LATER | LATENT | LATENT_LATER | UNEQUAL_HEADS | SWEPT | RECURRENT | REFUSED
    made: dict[str, Callable[[], Checkpoint]] = {name: partial(of_text, name, directory / "text") for name in texts}
    return made | {f"{name}, images": partial(of_images, name, directory / "images") for name in FAMILIES}


def result_of(name: str, make: Callable[[], Checkpoint], engines: Engines) -> TableRow:
    """Serves one checkpoint."""
    try:
        checkpoint = make()
    except Exception as error:
        return TableRow("", name, "not compared", f"no checkpoint: {_first_line(error)}")
    row = partial(TableRow, checkpoint.architecture, name)
    wanted: Sequence[list[int]] = ()
    lack = ""
    try:  # Before the engine, since vLLM's Transformers backend changes classes of transformers.
        wanted = checkpoint.reference()
    except Exception as error:
        lack = f"no reference: {_first_line(error)}"
    try:
        llm = engines.get(checkpoint.path, **checkpoint.options)
        outputs = llm.generate(checkpoint.inputs, greedy(COUNT), use_tqdm=False)
    except Exception as error:
        words = refusal(error)
        return row("refused", _inner(words)) if words else row("error", _first_line(error))
    finally:
        engines.close()
    if lack:
        return row("not compared", lack)
    for number, (want, output) in enumerate(zip(wanted, outputs, strict=True)):
        got = list(output.outputs[0].token_ids)
        if got != want:
            place = next((i for i, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), len(got))
            return row("different", f"prompt {number}, from token {place} on")
    return row("equal")


def _inner(words: str) -> str:
    """Message of an error that pydantic, which checks vLLM's configs, has put into one of its own."""
    return words.rpartition("Value error, ")[2].partition(" [type=")[0]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def rows_of(engines: Engines, text: str) -> Iterator[TableRow]:
    """Yields a row for each configuration whose name contains ``text``, with a bar."""
    with tempfile.TemporaryDirectory() as directory:
        chosen = {name: make for name, make in cases(Path(directory)).items() if text in name}
        bar = tqdm(chosen.items(), unit="model", dynamic_ncols=True)
        for name, make in bar:
            bar.set_postfix_str(name)
            yield result_of(name, make, engines)


def untried(rows: Sequence[TableRow]) -> list[str]:
    """Architectures of vLLM's registry that generate text and have no row."""
    names = {*_registry._TEXT_GENERATION_MODELS, *_registry._MULTIMODAL_MODELS, *_transformers_backend()}
    return sorted(names - {row.architecture for row in rows})


def _transformers_backend() -> dict[str, Any]:
    return getattr(_registry, "_TRANSFORMERS_SUPPORTED_MODELS", {})


def sweep(worker: str, text: str) -> int:
    """Prints the table; returns the exit status: 2 if nothing was chosen, or not all of it ran."""
    logging.captureWarnings(True)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    rows: list[TableRow] = []
    is_whole = True
    try:
        for row in rows_of(Engines(worker, enforce_eager=True), text):
            rows.append(row)
    except KeyboardInterrupt:  # What ran until then is shown.
        is_whole = False
    table = Table(title=f"vLLM's registry, and transformers {hf.__version__}", title_justify="left", box=SIMPLE)
    for column in ("architecture", "configuration", "result", "why"):
        table.add_column(column, overflow="fold")
    for row in rows:
        reason = row.reason.replace("[", r"\[")
        table.add_row(row.architecture, row.configuration, f"[{STYLES[row.result]}]{row.result}[/]", reason)
    console = Console(width=150)
    console.print(table)
    counts = Counter(row.result for row in rows)
    console.print(", ".join(f"{count} {result}" for result, count in counts.items()) or "nothing chosen")
    if not text:
        others = untried(rows)
        console.print(f"{len(others)} of the registry not compared: {', '.join(others)}", style="dim")
    if not rows or not is_whole:
        return 2
    return int(bool(counts["different"] or counts["error"]))
