"""The tutorial followed word by word: its files and changes make examples/acme_device, and what it prints is printed.

A vendor who copies a block that is out of date would be stuck in the middle of the page.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from lane import ROOT
from test_plain_device import code_lines

PAGE = (ROOT / "docs" / "new_device" / "tutorial.md").read_text()
BLOCK = re.compile(r"(?:^`(\S+)`\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@\n((?:[ +-].*\n|\n)+)", re.MULTILINE)
COPY = re.compile(r"^cp (?:-r )?(examples/.+) acme/", re.MULTILINE)
STEP = re.compile(r"^## (\d)\. ", re.MULTILINE)
Files = dict[str, str]

WITHOUT_INSTALLING = {"PYTHONDONTWRITEBYTECODE": "1", "VLLM_LOGGING_LEVEL": "INFO", "COLUMNS": "200"}


def steps() -> Iterator[Files]:
    """Files of the package after each step."""
    files: Files = {}
    for number, text in enumerate(re.split(STEP, PAGE)[2::2], start=1):
        assert re.split(STEP, PAGE)[2 * number - 1] == str(number)
        for name, language, contents in BLOCK.findall(text.partition("\n## ")[0]):
            if name:
                assert name not in files, f"{name} is written twice"
                files[name] = contents
            elif language == "diff":
                change(files, contents)
            for paths in COPY.findall(contents):
                files |= copied(paths.split())
        yield dict(files)


def change(files: Files, diff: str) -> None:
    """Applies a unified diff of one file; every line that it shows must be there, at its place."""
    old, new = re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)$", diff, re.MULTILINE)
    assert old == new
    lines, moved = files[old].splitlines(), 0
    for start, body in HUNK.findall(diff):
        shown = body.splitlines()
        before = [line[1:] for line in shown if not line.startswith("+")]
        after = [line[1:] for line in shown if not line.startswith("-")]
        place = int(start) - 1 + moved
        assert lines[place : place + len(before)] == before, f"{old} has other lines at {start}"
        lines[place : place + len(before)] = after
        moved += len(after) - len(before)
    files[old] = "\n".join(lines) + "\n"


def copied(paths: list[str]) -> Files:
    """Files of the example that a command of the page copies: at ``paths``, and in folders there."""
    found = [file for path in paths for file in (ROOT / path, *(ROOT / path).rglob("*")) if file.is_file()]
    files = [file for file in found if "__pycache__" not in file.parts]
    return {str(file.relative_to(ROOT / "examples" / "acme_device")): file.read_text() for file in files}


def install(files: Files, folder: Path) -> dict[str, str]:
    """Writes a package, and what pip would note of it; returns the environment in which it is installed."""
    for name, contents in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(contents)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    (group, points), *_ = project["entry-points"].items()
    notes = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (notes / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in points.items())]))
    return os.environ | WITHOUT_INSTALLING | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run(environment: dict[str, str], *arguments: str | Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def extracts() -> list[str]:
    """Parts of files that the page shows, and has copied."""
    return [contents for name, language, contents in BLOCK.findall(PAGE) if language == "python" and not name]


def printed() -> list[str]:
    """Texts that the page says are printed."""
    return [contents for _, language, contents in BLOCK.findall(PAGE) if language == "text"]


@pytest.mark.once
def test_the_last_step_is_the_example() -> None:
    folder = ROOT / "examples" / "acme_device"
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    *_, last = steps()
    assert last == {str(path.relative_to(folder)): path.read_text() for path in paths if ".egg-info" not in str(path)}
    assert all(any(extract in contents for contents in last.values()) for extract in extracts())


@pytest.mark.once
def test_lines_of_code(tmp_path: Path) -> None:
    """An eager device has at most 60 lines in all, one with graphs and a kernel 150 lines of code."""
    counts = []
    for number, files in enumerate(steps(), start=1):
        install(files, tmp_path / str(number))
        counts.append(sum(map(code_lines, (tmp_path / str(number) / "acme_device").glob("*.py"))))
    eager = [contents for name, contents in next(steps()).items() if name.startswith("acme_device/")]
    assert sum(contents.count("\n") for contents in eager) <= 60
    assert counts[2] <= 150
    assert counts == [int(count) for count in re.findall(r"^\| \[\d\..*\| (\d+) \|$", PAGE, re.MULTILINE)]


@pytest.mark.once
def test_the_first_step_runs(tmp_path: Path) -> None:
    environment = install(next(steps()), tmp_path)
    assert run(environment, tmp_path / "generate.py").count(printed()[0]) == 1


@pytest.mark.once
def test_the_last_step_runs(tmp_path: Path) -> None:
    """Text as before, from graphs and the kernel; a cache of the device's own memory; the kit's first row."""
    *_, last = steps()
    environment = install(last, tmp_path)
    output = run(environment, tmp_path / "generate.py")
    text, _, sizes = printed()
    assert all(output.count(part.rstrip("\n")) == 1 for part in (text, sizes)), output[-4000:]
    (tokens,) = re.findall(r"GPU KV cache size: ([\d,]+) tokens", output)
    assert int(tokens.replace(",", "")) > 700_000
    # Steps of encoder-decoder models read other tables than those of models of text.
    some = "test_one_request and llama or transcription and test_answers"
    kit = ["-m", "model_runner_base.testing", "acme_device.worker.AcmeWorker", "-k", some]
    row, *_ = printed()[1].splitlines()
    assert " ".join(row.split()) in " ".join(run(environment, *kit).split())
