"""Turns of the tests that take long: all come round, and the lists name files that exist."""

import pytest
import turns
from lane import ROOT

LISTS = (turns.IN_THIRDS, turns.IN_QUARTERS, turns.WHOLE_IN_THIRDS)


def test_the_lists_name_files_once() -> None:
    names = [name for each in LISTS for name in each]
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(names) == len(set(names)) and set(names) <= files


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_each_case_has_one_turn(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [f"case {number}" for number in range(7)]
    due, listed = [], []
    for commit in range(100, 100 + parts):
        monkeypatch.setattr(turns, "_commit", lambda commit=commit: commit)
        due += [case for case in cases if turns.is_due(case, parts)]
        listed += turns.due_of(cases, parts)
    assert sorted(due) == sorted(listed) == cases
    monkeypatch.setattr(turns, "_commit", lambda: None)
    assert turns.due_of(cases, parts) == [case for case in cases if turns.is_due(case, parts)] == cases
