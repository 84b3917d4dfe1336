"""The real `vllm serve`, in a process of its own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from model_runner_base.testing.server import started


@contextmanager
def served(model: Path, *arguments: str, **environment: str) -> Iterator[str]:
    """Starts the server, yields its base URL when it answers, and ends it."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *arguments]
    with TemporaryDirectory() as folder, started(command, os.environ | environment, Path(folder) / "log") as url:
        yield url
