"""Runs the checks on one worker; the package's docstring says how."""

import argparse
import os
import sys
from pathlib import Path

import pytest

import model_runner_base.testing

CHECKS = Path(__file__).parent / "checks"
PLUGIN = "model_runner_base.testing.plugin"
PROFILES = ("smoke", "default", "full")
WITHOUT_NOISE = [
    # The table has every failure; pytest's own list would repeat them.
    "-rN",
    # This module and the package above it are imported before pytest could rewrite their assertions: they have none.
    "-Wignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning",
    # Of libraries that vLLM imports, once for each use.
    "-Wignore::DeprecationWarning",
]


def main(arguments: list[str]) -> int:
    """Runs pytest; returns its exit status: 0 if every promise is kept, or refused with a message; 1 if one is broken,
    or none is kept."""
    parser = argparse.ArgumentParser(
        prog="python -m model_runner_base.testing",
        description=model_runner_base.testing.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("worker", help="the worker's class, such as my_package.MyWorker")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        default="default",
        help="smoke: the first case of each check; full: every architecture and more random cases",
    )
    known, options = parser.parse_known_args(arguments)
    # Reads no settings of the project in the current directory, and leaves no files in it.
    surroundings = ["-c", os.devnull, "--rootdir", str(CHECKS), "-p", "no:cacheprovider"]
    defaults = ["-p", PLUGIN, "-q", "--show-capture=no", "--tb=short", *WITHOUT_NOISE]
    chosen = ["--worker", known.worker, "--kit-profile", known.profile]
    return pytest.main([*surroundings, *defaults, *chosen, *options], plugins=[AllChecks()])


class AllChecks:
    """Plugin that adds the kit's checks, unless files are named among the options."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config, args: list[str]) -> None:
        known = early_config.known_args_namespace
        if not known.file_or_dir:
            args.append(str(CHECKS))
            known.file_or_dir = [str(CHECKS)]  # Otherwise pytest reads a conftest.py of the current directory.


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
