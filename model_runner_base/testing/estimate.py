"""Estimate of how long a run takes: recorded times of every check, scaled by the speed of those that have run.

``durations.json`` has the times on the example device. ``--record-durations`` writes it, as docs/conformance.md says.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from model_runner_base.testing.order import group_of
from model_runner_base.testing.profiles import PROFILES
from model_runner_base.testing.words import counted

FILE = Path(__file__).with_name("durations.json")
SCALED_BY = {"schedules": "schedules", "state_schedules": "schedules", "distributions": "draws"}
"""Option that a group's times grow with."""
TRUST_S = 10.0
"""Recorded seconds of checks after which the measured speed counts as much as the recorded one."""
FIRST_LINE_S = 15.0
"""Time of the first line about the time left, where there is no bar; each further one comes after twice the time."""


def load(file: Path = FILE) -> dict[str, float]:
    """Recorded seconds by group and name of a check."""
    return json.loads(file.read_text()) if file.exists() else {}


def record(times: dict[str, float], file: Path = FILE) -> None:
    """Writes measured times, and keeps those of checks that did not run."""
    merged = load(file) | {name: round(seconds, 2) for name, seconds in times.items()}
    file.write_text(json.dumps(dict(sorted(merged.items())), indent=0) + "\n")


def name_of(item: pytest.Item) -> str:
    """Group and name of a check; only the name of a test that is not the kit's."""
    group = group_of(item)
    return f"{group}::{item.name}" if group else item.name


class Estimate:
    """Recorded time of the checks that are left, and the speed so far."""

    def __init__(self, names: Iterable[str], recorded: dict[str, float], factors: dict[str, float]) -> None:
        """``factors`` are the times' factors by group, for groups that run with other options than were recorded."""
        by_check, by_group = defaultdict(list), defaultdict(list)
        for name, seconds in recorded.items():
            by_check[name.partition("[")[0]].append(seconds)
            by_group[name.partition("::")[0]].append(seconds)
        usual = fmean(recorded.values()) if recorded else 1.0

        def expect(name: str) -> float:
            """The check's time; that of its other cases, of its group, or of all checks where none was recorded."""
            group, check = name.partition("::")[0], name.partition("[")[0]
            others = by_check.get(check) or by_group.get(group) or [usual]
            return recorded.get(name, fmean(others)) * factors.get(group, 1.0)

        self._left = {name: expect(name) for name in names}
        self.total = sum(self._left.values())
        self._expected = self._measured = 0.0

    def done(self, name: str, seconds: float) -> None:
        """Counts a check that has ended."""
        self._expected += self._left.pop(name, 0.0)
        self._measured += seconds

    def leave_out(self, name: str) -> None:
        """Counts a check that is not run."""
        self._left.pop(name, None)

    @property
    def ratio(self) -> float:
        """Measured by recorded time of the checks so far; near 1 while they are few."""
        return (self._measured + TRUST_S) / (self._expected + TRUST_S)

    def left(self) -> float:
        """Estimated seconds that are left."""
        return sum(self._left.values()) * self.ratio


def in_words(seconds: float) -> str:
    """A time as one says it."""
    if seconds < 50:
        return f"about {max(5, round(seconds / 5) * 5)} seconds"
    minutes = max(1, round(seconds / 60))
    return "about a minute" if minutes == 1 else f"about {minutes} minutes"


class RunningTime:
    """Plugin that prints the estimate: at the start, and in a bar or in a line now and then while checks run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._factors = {
            group: config.getoption(by) / getattr(PROFILES["default"], by) for group, by in SCALED_BY.items()
        }
        self._estimate = Estimate([], {}, {})
        self._times: dict[str, float] = {}
        self._ended_well: dict[str, bool] = {}
        self._bar: Progress | None = None
        self._start = monotonic()
        self._next_line, self._last_line = FIRST_LINE_S, ""

    @property
    def _terminal(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = [name_of(item) for item in session.items]
        if not names or self._config.option.collectonly or self._terminal is None:
            return
        self._estimate = Estimate(names, load(), self._factors)
        about = in_words(self._estimate.total)
        self._terminal.write_line(f"{counted(len(names), 'check')}; on the example device {about}")
        self._start = monotonic()
        if self._terminal.isatty and self._config.get_verbosity() < 0:
            self._bar = _bar(Console(file=self._terminal._tw._file, force_terminal=True))
            self._task = self._bar.add_task("", total=len(names), left=about)
            self._bar.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._bar:
            group = Path(nodeid.partition("::")[0]).stem.removeprefix("test_").replace("_", " ")
            self._bar.update(self._task, description=group, refresh=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """The category alone where there is a bar: letters would go through it."""
        if not self._bar or (report.passed and report.when != "call"):
            return None
        if report.failed:
            return "failed" if report.when == "call" else "error", "", ""
        words = {"refusal": "not supported", "not_looked": "not looked"}
        return next((each for name, each in words.items() if getattr(report, name, None)), report.outcome), "", ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        report.check = name_of(item)
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        name = getattr(report, "check", report.nodeid)  # Reports of a crash come from no check.
        if getattr(report, "is_left_out", False):
            self._estimate.leave_out(name)
            return
        self._times[name] = self._times.get(name, 0.0) + report.duration
        self._ended_well[name] = self._ended_well.get(name, True) and report.passed
        if self._bar and report.failed:
            self._bar.console.print(f"FAILS {name}: {report.reason}", style="red", markup=False, highlight=False)
        if report.when == "teardown":
            self._estimate.done(name, self._times[name])
            self._show_time_left()

    def _show_time_left(self) -> None:
        left = f"{in_words(self._estimate.left())} left"
        if self._bar:
            self._bar.update(self._task, advance=1, left=left, refresh=True)
        elif self._terminal and monotonic() - self._start > self._next_line and self._estimate.left() > FIRST_LINE_S:
            self._next_line *= 2
            if left != self._last_line:
                self._last_line = left
                self._terminal.ensure_newline()
                self._terminal.write_line(f"{left}; so far {self._estimate.ratio:.1f} times the example device's time")

    def pytest_sessionfinish(self) -> None:
        if self._bar:
            self._bar.stop()
        if self._config.getoption("record_durations"):
            times = {name: seconds for name, seconds in self._times.items() if self._ended_well[name]}
            record({name: each / self._factors.get(name.partition("::")[0], 1.0) for name, each in times.items()})


def _bar(console: Console) -> Progress:
    """A bar that is drawn between checks alone: while one runs, pytest has the terminal."""
    left = TextColumn("{task.fields[left]}")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), left
    return Progress(*columns, console=console, auto_refresh=False, transient=True)
