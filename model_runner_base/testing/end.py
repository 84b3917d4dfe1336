"""Early end of the kit's checks: after a start that fails, or by SIGTERM, as ``timeout`` and CI send it."""

import os
import signal
from threading import current_thread, main_thread
from typing import Any

import pytest

from model_runner_base.testing.order import group_of

_REASON: pytest.StashKey[str] = pytest.StashKey()
_LEFT_OUT: pytest.StashKey[bool] = pytest.StashKey()


def end_checks(config: pytest.Config, reason: str) -> None:
    """Leaves out all further checks of the kit, and fails the run. A vendor's own tests in the session still run."""
    config.stash[_REASON] = reason


def is_left_out(item: pytest.Item) -> bool:
    """Whether a check was not run, as the kit had ended."""
    return item.stash.get(_LEFT_OUT, False)


class EarlyEnd:
    """Plugin that leaves out checks once the kit has ended, and says why at the end of the run."""

    _handler: Any = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Lets SIGTERM end the session after the test in progress, with its table. A second one ends it at once."""

        def stop(*_: Any) -> None:
            self._restore()
            if os.getpid() == process:
                session.shouldstop = "ended by SIGTERM: the table has the checks so far"
            else:  # A forked process has inherited the handler, not the session.
                os.kill(os.getpid(), signal.SIGTERM)

        process = os.getpid()
        # With pytest-xdist only the processes that run tests look at shouldstop.
        runs_tests = not session.config.pluginmanager.has_plugin("dsession")
        if runs_tests and current_thread() is main_thread():
            self._handler = signal.signal(signal.SIGTERM, stop) or signal.SIG_DFL

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _REASON in item.config.stash and group_of(item) is not None:
            item.stash[_LEFT_OUT] = True
            pytest.skip("the kit has ended")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        report.is_left_out = is_left_out(item)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        return ("", "", "") if getattr(report, "is_left_out", False) else None

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._restore()
        if _REASON in session.config.stash and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if reason := terminalreporter.config.stash.get(_REASON, None):
            terminalreporter.write_line(reason)

    def _restore(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None
