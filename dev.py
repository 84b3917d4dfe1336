"""Sets up .venv beside this file, then runs one of the project's jobs in it. Needs Python 3.11 and pip, nothing else.

    python3.11 dev.py generate [options]   text from the bundled model, through vLLM
    python3.11 dev.py test [options]       the tests in up to four processes, with pytest's options (-n 0: in one)
    python3.11 dev.py run COMMAND ...      any command of the environment, such as `vllm serve`

Setting up takes a minute or two, and happens again only when pyproject.toml or constraints.txt change.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "installed"
# Whole files, since the tests of one share engines; the longest come first (tests/conftest.py).
SIDE_BY_SIDE = ["-n", "logical", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]


def set_up() -> None:
    """Makes the environment, unless it stands already."""
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(f"Python 3.11 is needed, this is {sys.version.split()[0]}: run python3.11 dev.py")
    print("Setting up .venv ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    constraints = ["--constraint", str(files[1])]
    python = str(BIN / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv", *constraints], check=True)
    install = [str(BIN / "uv"), "pip", "install", "--python", python, *constraints, "--editable", ".[neuron,test]"]
    subprocess.run(install, check=True, cwd=ROOT)
    STAMP.write_text(wanted)


def main(arguments: list[str]) -> None:
    jobs = {
        "generate": [str(BIN / "python"), str(ROOT / "examples" / "generate.py")],
        "test": [str(BIN / "python"), "-m", "pytest", *SIDE_BY_SIDE],
        "run": [],
    }
    if not arguments or arguments[0] not in jobs:
        raise SystemExit(__doc__)
    set_up()
    command = [*jobs[arguments[0]], *arguments[1:]]
    if not command:
        raise SystemExit("run needs a command, such as: run vllm serve examples/models/kjv-2m")
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    # The tests start some fifty processes, each of which would compile vLLM's modules for ten seconds.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if arguments[0] == "test":
        os.chdir(ROOT)
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
