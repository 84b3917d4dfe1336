"""vLLM on Neuron devices, and on PJRT CPU where there are none: platform plugin, worker and model runner."""

import logging
import os

PLATFORM_VARIABLE = "VLLM_NEURON_RUNNER"
"""1 takes the platform even where another accelerator is visible, 0 never takes it."""


def register() -> str | None:
    """Entry point of ``vllm.platform_plugins``: the platform's class, or None to leave the machine to another."""
    asked = os.environ.get(PLATFORM_VARIABLE)
    if asked == "0" or (asked != "1" and _other_accelerator_visible()):
        return None
    # What nobody who chose this platform can act on: lines of a CUDA without a device, and of Inductor, which is off.
    for name in ("torch.utils.cpp_extension", "vllm.triton_utils.importing"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("vllm.config.vllm").addFilter(_is_of_use)
    return "neuron_runner.platform.NeuronPlatform"


def _is_of_use(record: logging.LogRecord) -> bool:
    return "Inductor compilation was disabled" not in str(record.msg)


def _other_accelerator_visible() -> bool:
    from vllm.platforms import builtin_platform_plugins

    return any(plugin() is not None for name, plugin in builtin_platform_plugins.items() if name != "cpu")
