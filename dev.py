"""Sets up an environment in this folder, then runs one of the project's jobs in it. Needs Python 3.11 and pip alone.

    python3.11 dev.py generate [options]   text from the bundled model, through vLLM
    python3.11 dev.py rank [options]       sentences by how close they are to a query, with the bundled embedding model
    python3.11 dev.py test [options]       the tests in up to four processes, with pytest's options (-n 0: in one)
    python3.11 dev.py test --quick         a test of each kind, about five minutes; --full: those that take turns, too
    python3.11 dev.py check                style and types, by ruff and mypy, and the docs, by mkdocs
    python3.11 dev.py docs                 the docs as a site, served on this machine; --build: built only
    python3.11 dev.py run COMMAND ...      any command of the environment, such as `vllm serve`

The environment is .venv, whose vLLM is the last one with torch_xla. `--lane newest` before the job takes .venv-newest,
with the newest vLLM that the project is tested on. Setting up takes a minute or two, and happens again only when
pyproject.toml or the lane's files under constraints/ change.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# Whole files, since the tests of one share engines; the longest come first (tests/conftest.py).
SIDE_BY_SIDE = ["-n", "logical", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]

BUILD_DOCS = "mkdocs build --strict --quiet"
CHECK = (
    "ruff check . && ruff format --check . && mypy model_runner_base gpu_runner neuron_runner benchmarks docs_build && "
    + BUILD_DOCS
)


@dataclass(frozen=True)
class Lane:
    """An environment: one vLLM, and what goes with it."""

    name: str
    folder: str
    vllm: str
    extras: str
    minutes: int
    """The tests take about so long on two cores."""
    overrides: str | None = None
    """A file of dependencies that are not to be as their dependents say."""

    @property
    def bin(self) -> Path:
        return ROOT / self.folder / "bin"

    @property
    def constraints(self) -> Path:
        return ROOT / "constraints" / f"{self.name}.txt"

    def set_up(self) -> None:
        """Makes the environment, unless it is up to date."""
        override = [ROOT / "constraints" / self.overrides] if self.overrides else []
        files = (ROOT / "pyproject.toml", self.constraints, *override)
        wanted = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        stamp = ROOT / self.folder / "installed"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        if sys.version_info[:2] != (3, 11):
            raise SystemExit(f"Python 3.11 is needed, this is {sys.version.split()[0]}: run python3.11 dev.py")
        show_progress(0, f"Making {self.folder}")
        subprocess.run([sys.executable, "-m", "venv", str(ROOT / self.folder)], check=True)
        python, constraints = str(self.bin / "python"), ["--constraint", str(self.constraints)]
        show_progress(1, "Installing uv")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv", *constraints], check=True)
        show_progress(2, "Installing vLLM and torch, which takes a minute or two")
        install = [str(self.bin / "uv"), "pip", "install", "--quiet", "--python", python, *constraints]
        for path in override:
            install += ["--override", str(path)]
        environment = {**os.environ, "VLLM_VERSION_OVERRIDE": self.vllm}
        subprocess.run([*install, "--editable", f".[{self.extras}]"], check=True, cwd=ROOT, env=environment)
        stamp.write_text(wanted)
        show_progress(3, f"{self.folder} is ready")


def show_progress(done: int, what: str, total: int = 3) -> None:
    """Shows a bar on the error stream with what is done now; lines where that is no terminal."""
    begin, end = ("\r\033[K", "" if done < total else "\n") if sys.stderr.isatty() else ("", "\n")
    bar = "█" * (10 * done // total)
    print(f"{begin}|{bar:<10}| {done}/{total} {what}", end=end, file=sys.stderr, flush=True)


LANES = {
    lane.name: lane
    for lane in (
        Lane("0.16", ".venv", "0.16.0", "neuron,test", 40),
        Lane("newest", ".venv-newest", "0.33.0", "newest,test", 20, "newest-overrides.txt"),
    )
}
"""The first is the default."""


def main(arguments: list[str]) -> None:
    lane = next(iter(LANES.values()))
    if arguments[:1] == ["--lane"]:
        if arguments[1:2] == [] or arguments[1] not in LANES:
            raise SystemExit(f"--lane needs one of {', '.join(LANES)}")
        lane, arguments = LANES[arguments[1]], arguments[2:]
    jobs = {
        "generate": [str(lane.bin / "python"), str(ROOT / "examples" / "generate.py")],
        "rank": [str(lane.bin / "python"), str(ROOT / "examples" / "rank.py")],
        "test": [str(lane.bin / "python"), "-m", "pytest", *SIDE_BY_SIDE],
        "check": ["sh", "-c", CHECK],
        "docs": ["mkdocs", "serve", "--strict"],
        "run": [],
    }
    if not arguments or arguments[0] not in jobs:
        raise SystemExit(__doc__)
    lane.set_up()
    command = BUILD_DOCS.split() if arguments == ["docs", "--build"] else [*jobs[arguments[0]], *arguments[1:]]
    if not command:
        raise SystemExit("run needs a command, such as: run vllm serve examples/models/kjv-2m")
    environment = {**os.environ, "PATH": f"{lane.bin}{os.pathsep}{os.environ.get('PATH', '')}"}
    environment["NO_MKDOCS_2_WARNING"] = "1"  # The theme's notice of a release that constraints/ leave out.
    # The tests start some fifty processes, each of which would compile vLLM's modules for ten seconds.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if arguments[0] in ("test", "check", "docs"):
        os.chdir(ROOT)
    if arguments == ["test"]:
        print(f"Lane {lane.name} on two cores: about {lane.minutes} minutes, with --quick 5", flush=True)
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
