"""The plugin of pytest that runs the tests of an allow-list."""

import gc
import multiprocessing
import signal
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from model_runner_base.testing.upstream.allow_list import AllowList, TestFile, matching
from model_runner_base.testing.upstream.overrides import Overrides, tolerance_of
from model_runner_base.testing.upstream.schedulers import schedulers_of
from model_runner_base.testing.upstream.servers import end, tree_of

AGAIN = 30
"""Seconds after which the error of a time limit is raised once more. vLLM gives a server half of them to end."""
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
"""Words in the commands of processes that serve this one to its end: Python's, and torch's."""


class AllowedTests:
    """Chooses tests, and changes what they run with."""

    def __init__(self, allowed: AllowList, root: Path, overrides: Overrides, time_limit: int) -> None:
        self._files = {root / "tests" / path: (path, file) for path, file in allowed.files.items()}
        self._overrides = overrides
        self._time_limit = time_limit
        self._not_ours = {process.pid for process in psutil.Process().children()}
        self.not_run: dict[str, dict[str, str]] = {}
        """Reasons by file and test."""
        self.collected: Counter[str] = Counter()
        """Numbers of tests by file, before any are left out."""

    def pytest_configure(self, config: pytest.Config) -> None:
        for argument in config.option.file_or_dir:
            if Path(argument.partition("::")[0]).absolute() not in self._files:
                raise pytest.UsageError(f"{argument} is no file of the list: choose among those with --files and -k")
        config.addinivalue_line("filterwarnings", "ignore")
        self._overrides.install()

    def path_of(self, node: pytest.Item | pytest.Collector) -> str:
        """The path of a test's file, as the list has it."""
        return self._files[node.path][0]

    def _file(self, node: pytest.Item | pytest.Collector) -> TestFile:
        return self._files[node.path][1]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """Imports a file as the list says."""
        if not isinstance(collector, pytest.Module) or collector.path not in self._files:
            return (yield)
        from vllm.platforms import current_platform

        file = self._file(collector)
        with self._overrides.of(file), schedulers_of(file), ExitStack() as stack:
            for question in file.import_as:
                stack.enter_context(mock.patch.object(type(current_platform), question, lambda *args: True))
            # Raised again where pytest collects the file's tests, and reports it.
            with suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
                for name, value in file.attributes.items():
                    setattr(collector.obj, name, value)
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Puts the list's parameters in place of a test's own."""
        parameters = self._file(metafunc.definition).parameters
        function: Any = metafunc
        parametrize = function.parametrize

        def changed(names: Any, values: Any, *args: Any, **named: Any) -> None:
            name = names if isinstance(names, str) else ",".join(names)
            parametrize(names, parameters.get(name, values), *args, **named)

        function.parametrize = changed

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out tests that the list does not run, and marks those that may fail."""
        if (conftest := sys.modules.get("tests.conftest")) is not None:
            self._overrides.change_reference(conftest.HfRunner)
        if (utils := sys.modules.get("tests.utils")) is not None:
            self._overrides.change_servers(utils.RemoteOpenAIServer)
        found: set[tuple[str, str]] = set()
        left: list[pytest.Item] = []
        for item in items:
            file, path = self._file(item), self.path_of(item)
            self.collected[path] += 1
            if file.schedulers:
                # There is no engine whose memory must be free before the next test.
                item.add_marker("skip_global_cleanup")
            test = item.nodeid.partition("::")[2]
            if (pattern := matching(file.not_run, test)) is not None:
                self.not_run.setdefault(path, {})[test] = file.not_run[pattern]
                left.append(item)
            elif (pattern := matching(file.expected, test)) is not None:
                item.add_marker(pytest.mark.xfail(reason=file.expected[pattern]))
            if pattern is not None:
                found.add((path, pattern))
        self._check_patterns(found)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]

    def _check_patterns(self, found: set[tuple[str, str]]) -> None:
        for path, file in self._files.values():
            for pattern in [*file.not_run, *file.expected]:
                if path in self.collected and (path, pattern) not in found:
                    raise pytest.UsageError(f"the list's entry {pattern!r} of {path} names no test of this vLLM")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        file = self._file(item)
        with self._overrides.of(file), schedulers_of(file), tolerance_of(file):
            result = yield
        if nextitem is None or nextitem.path != item.path:
            end_engines(self._not_ours)
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        """Limits the time of the innermost call: an error in pytest's own code would end the run."""
        with ends_after(self._time_limit):
            return (yield)

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


def end_engines(others: Collection[int] = ()) -> None:
    """Ends processes of engines and servers that a file's tests have left: they would keep the device.

    Errors may still refer to them. ``others`` are ids of processes that are not the tests'.
    """
    with suppress(TimeoutError), ends_after(60):
        gc.collect()  # Engines end as they are deleted.
    left = [process for process in multiprocessing.active_children() if process.pid not in others]
    pids = {process.pid for process in left if process.pid is not None}
    pids |= {child.pid for child in psutil.Process().children() if child.pid not in others and _is_work(child)}
    trees = [process for pid in pids for process in tree_of(pid)]
    for process in left:
        process.terminate()
    for process in left:
        process.join(10)
        process.kill()
        process.join(10)
    end(trees)


def _is_work(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return not any(words in command for words in HELPERS)


@contextmanager
def ends_after(seconds: int) -> Iterator[None]:
    """Raises an error in a block that takes longer. It is raised again later, as some code goes on after an error: a
    callback of an event loop, or the end of an object."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
