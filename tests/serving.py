"""The real `vllm serve`, in a process of its own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model_runner_base.testing.server import started


def block_files(role: str, directory: Path) -> dict[str, Any]:
    """Config of the connector of ``examples/prefill_and_decode``."""
    return {
        "kv_connector": "BlockFiles",
        "kv_connector_module_path": "block_files",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"directory": str(directory)},
    }


@contextmanager
def served(model: Path, *arguments: str, **environment: str) -> Iterator[str]:
    """Starts the server, yields its base URL when it answers, and ends it."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *arguments]
    with TemporaryDirectory() as folder, started(command, os.environ | environment, Path(folder) / "log") as url:
        yield url
