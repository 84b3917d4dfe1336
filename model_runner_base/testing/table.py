"""Results by promise: rows gathered from pytest's reports, and the table at the end."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any

import pytest
from pydantic import ValidationError
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from model_runner_base.testing.precision import PRECISION, NotLooked

FAILED: pytest.StashKey[bool] = pytest.StashKey()
"""Whether a check failed, or ended with a refusal in its middle, for the fixtures that clean up after it."""

HOOKS = ("_cache_device_properties", "load_model", "profile_run", "capture_model")
"""Methods of a runner that are named where one raises an error in an engine's start."""
START = str(Path(__file__).with_name("engine.py")), "start"
"""File and name of the function that starts an engine."""

_TORCHS_OWN = re.compile(
    r"^Could not run '\w+::|not implemented for '|not currently implemented for the|no fallback function|[Mm]eta tensor"
)
"""Messages of torch about an operator that a device lacks. Those are failures, not refusals: in a server the error
would end the engine in the middle of a step."""


def refusal(error: BaseException) -> str | None:
    """The device's own words if the error says that something is not supported, else None."""
    from model_runner_base.errors import UnsupportedConfigError

    text = " ".join(_words(error).split())
    is_refusal = isinstance(error, UnsupportedConfigError | NotImplementedError) or (
        isinstance(error, ValueError) and "not supported" in text.lower()
    )
    # A hook that was never written raises NotImplementedError without a message: that is not a refusal.
    return text if is_refusal and text and not _TORCHS_OWN.search(text) else None


def _words(error: BaseException) -> str:
    """An error's message; of pydantic's, the messages of what it found, without its inputs and links."""
    if isinstance(error, ValidationError):
        return "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    return str(error)


@dataclass
class TableRow:
    """Results of one promise's cases."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    """One line each, the smallest case first."""
    refusals: list[str] = field(default_factory=list)
    not_looked: list[str] = field(default_factory=list)
    """Why cases could not be looked at."""
    num_counted: int = 0
    """Tokens that were compared and whose margin exceeds what rounding moves; of ``num_compared``."""
    num_compared: int = 0

    def result(self) -> str:
        total = self.passed + len(self.failures) + len(self.refusals) + len(self.not_looked)
        if not total:  # Skipped, or the run was interrupted.
            return "not run"
        if self.failures:
            return "FAILS" if total == 1 else f"FAILS {len(self.failures)} of {total}"
        if self.refusals:
            return "not supported" if not self.passed else f"not supported {len(self.refusals)} of {total}"
        if self.not_looked:
            return "not looked" if not self.passed else f"not looked {len(self.not_looked)} of {total}"
        return "passes" if total == 1 else f"passes {total} cases"

    def reason(self) -> str:
        counted = f"{self.num_counted} of {self.num_compared} tokens counted"
        return next(iter([*self.failures, *self.refusals, *self.not_looked, *[counted] * bool(self.num_compared)]), "")


class PromiseTable:
    """Gathers the rows; a check's cases run from small to large, so the first failure is the smallest."""

    def __init__(self, config: pytest.Config) -> None:
        self.rows: dict[tuple[str, str], TableRow] = {}
        self._worker = config.getoption("worker")
        self._file: Path | None = config.getoption("results")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        report.promise = _promise(item)
        report.case = item.callspec.id if hasattr(item, "callspec") else ""
        report.refusal = report.reason = report.not_looked = None
        report.counts = PRECISION.num_counted, PRECISION.num_compared
        if call.when != "setup":
            PRECISION.begin()
        if call.excinfo is not None and report.failed:
            if isinstance(call.excinfo.value, NotLooked):
                report.not_looked = " ".join(str(call.excinfo.value).split())
            else:
                report.refusal = refusal(call.excinfo.value)
            report.reason = _describe(call.excinfo.value)
        elif call.when == "call" and report.passed and report.counts[1] and not report.counts[0]:
            report.not_looked = f"rounding in {PRECISION.name} may change each of the {report.counts[1]} tokens"
        words = report.refusal or report.not_looked
        if words is not None:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, words)
        has_ended_early = report.failed or (words is not None and call.when == "call")
        item.stash[FAILED] = item.stash.get(FAILED, False) or has_ended_early
        return report

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if getattr(report, "refusal", None) is not None:
            return "not supported", "u", "NOT SUPPORTED"
        if getattr(report, "not_looked", None) is not None:
            return "not looked", "n", "NOT LOOKED"
        return None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if getattr(report, "is_left_out", False):
            return
        row = self.rows.setdefault(report.promise, TableRow())
        # A sentence about tokens begins with the model's name, which is the case as a rule.
        is_named = not report.case or str(report.reason).startswith(f"{report.case},")
        case = "" if is_named else f"[{report.case}] "
        if report.refusal is not None:
            row.refusals.append(case + report.refusal)
        elif getattr(report, "not_looked", None) is not None:
            row.not_looked.append(case + report.not_looked)
        elif report.failed:
            row.failures.append(case + report.reason)
        elif report.when == "call" and report.passed:
            row.passed += 1
            num_counted, num_compared = getattr(report, "counts", (0, 0))
            row.num_counted += num_counted
            row.num_compared += num_compared
        self._write()

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fails the run of a device that refuses everything: it has kept no promise."""
        self._write()
        if exitstatus == 0 and self.rows and not any(row.passed for row in self.rows.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        console = Console(file=terminalreporter._tw._file, width=max(150, terminalreporter._tw.fullwidth))
        console.print(self.render())

    def _write(self) -> None:
        """Writes the results' file, so that a run that is killed leaves the rows so far."""
        if self._file is not None:
            whole = self._file.with_name(f"{self._file.name}.new")
            whole.write_text(json.dumps(self.as_records(), indent=1))
            whole.replace(self._file)

    def as_records(self) -> list[dict[str, str]]:
        """The table's rows for programs, with the keys group, promise, result and reason."""
        return [
            {"group": group, "promise": promise, "result": row.result(), "reason": row.reason()}
            for (group, promise), row in self.rows.items()
        ]

    def render(self) -> Table:
        dtype = "" if PRECISION.is_exact else f" in {PRECISION.name}"
        table = Table(title=f"Conformance of {self._worker}{dtype}", title_justify="left", box=SIMPLE, padding=(0, 1))
        for name in ("group", "promise", "result", "smallest case, or the device's words"):
            table.add_column(name, overflow="fold")
        styles = {"FAILS": "bold red", "not": "yellow", "passes": "green"}
        shown: dict[str, str] = {}
        for (group, promise), row in self.rows.items():
            result, reason = row.result(), row.reason()
            style = styles[result.split()[0]]
            # A device that does not start fails everywhere, for one reason.
            what = re.sub(r"^\[[^]]*\] ", "", reason)
            if what and not result.startswith("passes") and shown.setdefault(what, promise) != promise:
                reason = f"as: {shown[what]}"
            table.add_row(group, promise, f"[{style}]{result}[/]", reason.replace("[", r"\["))
        return table


def _promise(item: pytest.Item) -> tuple[str, str]:
    """Group and promise of a check."""
    group = item.path.stem.removeprefix("test_").replace("_", " ")
    documentation = getattr(getattr(item, "function", None), "__doc__", None)
    name = getattr(item, "originalname", None) or item.name
    text = (documentation or name.removeprefix("test_").replace("_", " ")).strip().splitlines()[0]
    return group, text.removesuffix(".")


def _describe(error: BaseException) -> str:
    """One line: what is wrong, and the smallest example that hypothesis found."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0] if isinstance(error, AssertionError) else f"{type(error).__name__}: {lines[0]}"
    frames = extract_tb(error.__traceback__)
    if any((frame.filename, frame.name) == START for frame in frames):
        hooks = [frame.name for frame in frames if frame.name in HOOKS]
        text = f"the engine does not start{f', in {hooks[-1]}' if hooks else ''}: {text}"
    notes = [note for note in getattr(error, "__notes__", []) if "alsifying example" in note]
    return " ".join([text, *(re.sub(r"\s+", " ", note) for note in notes[:1])])
