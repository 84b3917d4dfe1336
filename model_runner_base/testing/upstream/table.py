"""Results of vLLM's tests by file, and the table at the end."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from model_runner_base.testing.upstream.plugin import AllowedTests


@dataclass
class FileResults:
    """Results of one file's tests."""

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Last lines of errors by test: tests that must pass."""
    expected: dict[str, str] = field(default_factory=dict)
    """Reasons by test: those that failed as the list expects."""
    better: list[str] = field(default_factory=list)
    """Tests that passed, although the list lets them fail."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons by test: those that skip themselves."""
    not_run: dict[str, str] = field(default_factory=dict)
    """Reasons by test: those that the list leaves out."""
    left_out: int = 0
    """Number of tests without a result: options such as ``-k`` leave them out, or the run ended before them."""

    def count(self) -> int:
        """Number of tests with a result."""
        return self.passed + sum(len(tests) for tests in (self.failed, self.expected, self.skipped, self.not_run))


class ResultTable:
    """Gathers the results; a file without a passed test counts as failed."""

    def __init__(self, allowed: AllowedTests, root: Path, file: Path | None) -> None:
        self._allowed = allowed
        self._root = root / "tests"
        self._file = file
        self.files: dict[str, FileResults] = {}

    def _of(self, nodeid: str) -> tuple[FileResults, str]:
        path, _, test = nodeid.partition("::")
        return self.files.setdefault(path.removeprefix("tests/"), FileResults()), test

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._of(report.nodeid)[0].failed["(import)"] = _last_line(report)
        elif report.skipped:
            self._of(report.nodeid)[0].skipped["(all)"] = _reason(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        results, test = self._of(report.nodeid)
        if report.failed:
            results.failed.setdefault(test, _last_line(report))
        elif report.skipped and hasattr(report, "wasxfail"):
            results.expected[test] = report.wasxfail
        elif report.skipped:
            results.skipped[test] = _reason(report)
        elif report.when == "call":
            results.passed += 1
            if hasattr(report, "wasxfail"):
                results.better.append(test)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for path, tests in self._allowed.not_run.items():
            if path in self.files:
                self.files[path].not_run = tests
        for path, results in self.files.items():
            results.left_out = max(0, self._allowed.collected[path] - results.count())
            if not results.passed and not results.failed:
                reason = next(iter((results.skipped | results.expected).values()), "")
                results.failed["(all)"] = f"no test passed: {reason}"
        if any(results.failed for results in self.files.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._file is not None:
            self._file.write_text(json.dumps({path: asdict(r) for path, r in self.files.items()}, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        table = Table(box=SIMPLE, title="vLLM's tests on this device")
        table.add_column("file", overflow="fold")
        for name in ("passed", "failed", "expected", "skipped", "not run"):
            table.add_column(name, justify="right")
        for path, results in sorted(self.files.items()):
            counts = (results.expected, results.skipped, results.not_run)
            failed = f"[red]{len(results.failed)}[/red]" if results.failed else ""
            table.add_row(path, str(results.passed), failed, *(str(len(tests) or "") for tests in counts))
        console = Console(file=terminalreporter._tw._file, width=None, highlight=False)
        console.print(table)
        for path, results in sorted(self.files.items()):
            for test, words in results.failed.items():
                console.print(f"FAILS {path}::{test}: {words}", markup=False, soft_wrap=True)
            for test in results.better:
                console.print(f"passes, although it may fail: {path}::{test}", markup=False, soft_wrap=True)


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines() or [""]
    return lines[0 if crash is not None else -1][:300]


def _reason(report: Any) -> str:
    words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(words).removeprefix("Skipped: ")
