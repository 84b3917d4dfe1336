"""Benchmarks of the host's part of a step, on a device that takes no time. Importing this package chooses the example
device's platform for the process, since modules that import vLLM's engine ask for it."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from model_runner_base.testing.platform_choice import choose_platform

choose_platform("examples.plain_device.PlainPlatform")
