"""Plugin of pytest that runs vLLM's own scheduler tests without a network, with vLLM's schedulers or with ours.

Unpack the ``tests`` folder of vLLM's source of the installed release. In it, with this folder and the repository in
PYTHONPATH, and with ``SCHEDULERS=ours``, ``SCHEDULERS=rows`` (ours, with rows for a single request, too) or neither:

    python -m pytest --noconftest -p swapped_scheduler tests/v1/core/test_scheduler.py

Models that the tests name are replaced by tiny ones of the same kind.
"""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

BUNDLED_MODEL = Path(__file__).parents[2] / "examples" / "models" / "kjv-2m"
SEEING = {"llava-hf/llava-1.5-7b-hf": "llava", "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2.5-vl"}
"""Families of the kit in place of the models with images."""
LENGTHS = {"facebook/opt-125m": 2048, "facebook/opt-350m": 2048, "llava-hf/llava-1.5-7b-hf": 4096}
"""Longest length of those models."""


def pytest_configure() -> None:
    """Chooses a platform, and replaces the schedulers' names where the tests import them."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    from model_runner_base.testing.platform_choice import choose_platform

    choose_platform("vllm.platforms.cpu.CpuPlatform")
    if (named := os.environ.get("SCHEDULERS")) in ("ours", "rows"):
        from vllm.v1.core.sched import async_scheduler, scheduler

        from model_runner_base.scheduling import AsyncRowScheduler, RowScheduler

        modules: tuple[Any, Any] = (scheduler, async_scheduler)
        # Some tests make a scheduler without ``__init__``.
        bare: dict[str, Any] = {"_rows": None, "late_outputs": {}, "after_update": []}
        attributes = bare | ({"least_rows": 1} if named == "rows" else {})
        modules[0].Scheduler = modules[1].Scheduler = type("Rows", (RowScheduler,), attributes)
        modules[1].AsyncScheduler = type("AsyncRows", (AsyncRowScheduler,), attributes)


@cache
def seeing_model(name: str, directory: Path) -> Path:
    """A model whose images have as many tokens as LLaVA's: 24 x 24 patches."""
    from model_runner_base.testing.images import make_seeing_model

    path = make_seeing_model(SEEING[name], directory).path
    for file in path.glob("*config.json"):
        text = re.sub(r'"(image_size|height|width|shortest_edge)": 32\b', r'"\1": 192', file.read_text())
        file.write_text(re.sub(r'"image_seq_length": 16\b', '"image_seq_length": 576', text))
    return path


@pytest.fixture(scope="session", autouse=True)
def tiny_models() -> Iterator[None]:
    """Puts tiny models, in float32, in place of those that the tests name."""
    from vllm.config import ModelConfig

    init: Any = ModelConfig.__init__
    with TemporaryDirectory() as directory:

        def with_tiny_model(config: ModelConfig, *args: Any, **options: Any) -> None:
            name = options.get("model")
            if name in SEEING:
                options["model"] = str(seeing_model(name, Path(directory)))
            elif name in LENGTHS:
                options["model"] = str(BUNDLED_MODEL)
            if options.get("max_model_len") is None and name in LENGTHS:
                options["max_model_len"] = LENGTHS[name]
            init(config, *args, **options | {"dtype": "float32"})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelConfig, "__init__", with_tiny_model)
            yield
