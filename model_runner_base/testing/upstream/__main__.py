"""Runs vLLM's own tests on one worker; the package's docstring says how."""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import model_runner_base.testing.upstream
from model_runner_base.testing.upstream.allow_list import AllowList, ListError, read_list, shipped_list
from model_runner_base.testing.upstream.device import add_to_path, check_worker, install
from model_runner_base.testing.upstream.source import SourceError, installed_release, source_of

NEEDED = ("pytest", "pytest_asyncio", "tblib", "rich", "PIL")
"""Modules that the extra brings, for this command."""


def main(arguments: list[str]) -> int:
    """Runs pytest; returns its exit status: 0 if every test that must pass does, 1 if one fails, 2 if there is nothing
    to run, or an error in what was given."""
    known, options = _parser().parse_known_args(arguments)
    if not_installed := [name for name in NEEDED if find_spec(name) is None]:
        print(f'{not_installed[0]} is missing: pip install "model-runner-base[testing]"', file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="upstream-tests-") as folder:
        _set_environment(Path(folder))
        try:
            release = installed_release()
            allowed = read_list(shipped_list(release))
            if known.list is not None:
                allowed = allowed.joined(read_list(known.list))
            root = source_of(release, _cache(), Path(folder) / "source", known.source).resolve()
            missing = [path for path in allowed.files if not (root / "tests" / path).is_file()]
            if missing:
                raise ListError(f"vLLM {release} has no tests/{missing[0]}, which the list names")
        except (ListError, SourceError) as error:
            print(error, file=sys.stderr)
            return 2
        if known.platform:
            install(known.platform, known.worker, Path(folder))
        elif (advice := check_worker(known.worker)) is not None:
            print(advice, file=sys.stderr)
            return 2
        return _run(known, options, allowed, root, Path(folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m model_runner_base.testing.upstream",
        description=model_runner_base.testing.upstream.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("worker", help="the worker's class, such as my_package.MyWorker")
    parser.add_argument("--platform", metavar="CLASS", help="its platform, where no installed plugin of vLLM names it")
    parser.add_argument("--list", type=Path, metavar="FILE", help="a list of your own, whose entries go before ours")
    parser.add_argument("--source", type=Path, help="vLLM's source distribution or source, if pip cannot fetch it")
    parser.add_argument("--files", default="", metavar="TEXT", help="only files whose path contains TEXT")
    parser.add_argument("--dtype", default="float32", help="dtype of every engine")
    parser.add_argument("--engine-options", type=json.loads, default={}, metavar="JSON", help="options of every engine")
    parser.add_argument(
        "--time-limit", type=int, default=300, metavar="S", help="seconds that a test takes at most (300)"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the table to this file, as JSON")
    return parser


def _cache() -> Path:
    """Folder of unpacked tests, next to what vLLM keeps."""
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / "upstream_tests"


def _set_environment(folder: Path) -> None:
    """Sets what libraries read as they are imported: nothing is downloaded."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_CACHE"] = str(folder / "hub")
    os.environ["VLLM_ASSETS_CACHE"] = str(folder / "assets")
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Tests start ``vllm serve``: the one of this Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _run(known: Any, options: list[str], allowed: AllowList, root: Path, folder: Path) -> int:
    import pytest

    from model_runner_base.testing.upstream.overrides import Overrides
    from model_runner_base.testing.upstream.plugin import AllowedTests
    from model_runner_base.testing.upstream.stand_ins import fill_assets, fill_hub
    from model_runner_base.testing.upstream.table import ResultTable

    fill_hub(folder / "hub", allowed.models, allowed.adapters)
    fill_assets(folder / "assets")
    files = [str(root / "tests" / path) for path in allowed.files if known.files in path]
    if not files:
        print(f"the list has no file whose path contains {known.files!r}", file=sys.stderr)
        return 2
    results = known.results and known.results.absolute()
    os.chdir(root)
    add_to_path(root)
    tests = AllowedTests(
        allowed, root, Overrides(known.dtype, allowed.defaults, known.engine_options), known.time_limit
    )
    surroundings = ["-c", os.devnull, "--rootdir", str(root), "-p", "no:cacheprovider"]
    surroundings += ["--continue-on-collection-errors", "-q", "--show-capture=no", "--tb=short"]
    for warning in ("PytestAssertRewriteWarning", "PytestDeprecationWarning"):  # Shown before our plugin filters.
        surroundings += ["-W", f"ignore::pytest.{warning}"]
    plugins = [tests, ResultTable(tests, root, results)]
    status = pytest.main([*surroundings, *options, *files], plugins=plugins)
    return 2 if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED) else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
