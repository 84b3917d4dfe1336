"""vLLM on Neuron devices, and on PJRT CPU where there are none: platform plugin, worker and model runner."""

import logging
import os

PLATFORM_VARIABLE = "VLLM_NEURON_RUNNER"
"""1 takes the platform whatever else is there, 0 never takes it."""


def register() -> str | None:
    """Entry point of ``vllm.platform_plugins``: the platform's class, or None to leave the machine to another."""
    if not _takes_the_machine():
        return None
    # Silences lines that a user of this platform can do nothing about: CUDA has no device, and Inductor is off.
    for name in ("torch.utils.cpp_extension", "vllm.triton_utils.importing"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("vllm.config.vllm").addFilter(_is_of_use)
    return "neuron_runner.platform.NeuronPlatform"


def _takes_the_machine() -> bool:
    """Whether the user asks for this platform, a Neuron device is there, or no other platform has a device."""
    asked = os.environ.get(PLATFORM_VARIABLE)
    if asked in ("0", "1"):
        return asked == "1"
    from neuron_runner.environment import neuron_device_present
    from neuron_runner.plugins import other_plugin_that_answers

    other = other_plugin_that_answers()
    if not neuron_device_present():
        return other is None and not _other_accelerator_visible()
    if other is not None:
        logging.getLogger(f"vllm.{__name__}").warning(
            "A Neuron device is here, and the platform plugin %s answers too: set VLLM_PLUGINS to the one that you "
            "want, or %s=0 to leave the device to the other.",
            other,
            PLATFORM_VARIABLE,
        )
    return True


def _is_of_use(record: logging.LogRecord) -> bool:
    return "Inductor compilation was disabled" not in str(record.msg)


def _other_accelerator_visible() -> bool:
    from vllm.platforms import builtin_platform_plugins

    return any(plugin() is not None for name, plugin in builtin_platform_plugins.items() if name != "cpu")
