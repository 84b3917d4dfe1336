"""The pytest plugin: options, and nothing else unless ``--worker`` is given.

Nothing here imports vLLM: pytest loads the plugin on every start, and vLLM must not ask for its platform before
``--platform`` is in place.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("model_runner_base", "conformance kit of model_runner_base")
    group.addoption("--worker", metavar="CLASS", help="the worker under test, such as my_package.MyWorker")
    group.addoption("--platform", metavar="CLASS", help="its platform, where no installed plugin of vLLM names it")
    group.addoption("--eager", action="store_true", help="start every engine with enforce_eager=True")
    group.addoption(
        "--engine-options",
        type=_options,
        default={},
        metavar="JSON",
        help="options of every engine, as of vllm.LLM; those of a check come first",
    )
    group.addoption(
        "--dtype",
        metavar="NAME",
        help="dtype of every engine, such as bfloat16; by default float32, or the platform's first where it has none",
    )
    group.addoption(
        "--kit-profile",
        choices=["smoke", "default", "full"],
        default="default",
        help="smoke: the first case of each check; full: every architecture and more random cases. The kit's command "
        "also takes it as --profile",
    )
    group.addoption("--all-architectures", action="store_true", help="every architecture, not only the main ones")
    group.addoption("--results", type=Path, metavar="FILE", help="write the table to this file, as JSON")
    group.addoption("--record-durations", action="store_true", help="record the checks' times for the kit's estimate")
    group.addoption("--no-shrinking", action="store_true", help="report failing cases as found, not the smallest")
    group.addoption(
        "--schedules", type=int, metavar="N", help="random schedules of each architecture (15): fewer find less"
    )
    group.addoption("--draws", type=int, metavar="N", help="tokens drawn for each distribution (2000): fewer show less")
    group.addoption("--ranks", type=int, default=1, metavar="N", help="devices of this machine: 2 to check two ranks")
    group.addoption("--stages", type=int, default=1, metavar="N", help="devices: 2 to check two pipeline stages")
    group.addoption("--replicas", type=int, default=1, metavar="N", help="devices: 2 to check two replicas")
    group.addoption(
        "--soak",
        type=int,
        default=0,
        metavar="N",
        help="requests of the soak and of each drafter, and a twentieth as many schedules",
    )


def _options(text: str) -> dict[str, Any]:
    options = json.loads(text)
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object of vllm.LLM's options")
    return options


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Sets up environment and platform before anything of the user's is imported: a conftest.py may import vLLM."""
    options = early_config.known_args_namespace
    if options.worker is None:
        return
    # One process, so that checks can look into the engine.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Tensors are tiny: torch's threads cost more than they save, fifty times as much on a busy machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if options.platform is not None:
        from model_runner_base.testing.platform_choice import choose_platform

        try:
            choose_platform(options.platform)
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("worker") is None:
        if config.getoption("platform") is not None:
            raise pytest.UsageError("--platform goes with --worker: name the worker under test too")
        return
    from vllm.platforms import current_platform

    from model_runner_base.testing.precision import PRECISION

    # Before what computes sizes by it.
    PRECISION.choose(
        config.getoption("dtype"), config.getoption("engine_options"), list(current_platform.supported_dtypes)
    )
    from model_runner_base.testing import fixtures
    from model_runner_base.testing.end import EarlyEnd
    from model_runner_base.testing.estimate import RunningTime
    from model_runner_base.testing.explanation import Explanations
    from model_runner_base.testing.profiles import apply_profile
    from model_runner_base.testing.table import PromiseTable

    apply_profile(config)
    config.pluginmanager.register(fixtures, "model_runner_base.testing.fixtures")
    config.pluginmanager.register(Explanations(config), "model_runner_base.testing.explanation")
    config.pluginmanager.register(PromiseTable(config), "model_runner_base.testing.table")
    config.pluginmanager.register(RunningTime(config), "model_runner_base.testing.estimate")
    config.pluginmanager.register(EarlyEnd(), "model_runner_base.testing.end")
