"""The example device, one of whose hooks never returns, and holds the GIL."""

import ctypes
import os
from pathlib import Path
from typing import Any

from examples.plain_device import PlainModelRunner, PlainWorker


def say(what: str) -> None:
    """Writes a file for the test: the hook has begun on this rank."""
    Path(os.environ["SAYS_IN"], what).touch()


def hold(hook: str, rank: int) -> None:
    if os.environ.get("HELD_HOOK") == hook:
        say(f"{hook}{rank}")
        ctypes.PyDLL(None).sleep(600)


class HeldModelRunner(PlainModelRunner):
    def load_model(self) -> None:
        hold("load_model", self.vllm_config.parallel_config.rank)
        super().load_model()

    def capture_model(self) -> None:
        hold("capture_model", self.vllm_config.parallel_config.rank)
        super().capture_model()


class HeldWorker(PlainWorker):
    model_runner_cls = HeldModelRunner

    def execute_model(self, scheduler_output: Any) -> Any:
        hold("execute_model", self.rank)
        return super().execute_model(scheduler_output)
