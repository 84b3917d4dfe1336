"""Gathers what a CUDA host without network lacks for ``benchmarks.gpu``: vLLM without kernels, and a few wheels.

    python -m gpu_runner.testing.wheels [FOLDER] [--python 3.12]

Run where there is network. FOLDER (``.whl``, which git ignores) is then carried to the host and unpacked there:

    python3 -m pip install --no-index --no-deps --target .site FOLDER/*.whl
    PYTHONPATH=.site python3 -m benchmarks.gpu

The host is taken to have torch, Triton, transformers, NumPy and what these bring, and the widespread packages of an
image for machine learning (aiohttp, attrs, cloudpickle, einops, jinja2, numba, pillow, prometheus-client, protobuf,
psutil, py-cpuinfo, pyyaml, regex, requests, scipy, sentencepiece, six, tiktoken, tqdm, typer). PACKAGES is what is left
of the modules that an engine in one process was seen to import. Its transformers may be newer than vLLM takes, so the
pinned one comes along with its tokenizers and huggingface_hub; on ``--target`` they hide the host's. xgrammar is left
out for its size: kernels.py stands in for its names, and structured output does not work there.
"""

import argparse
import csv
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.16.0"
LIMIT = 60_000_000
"""Largest number of bytes of the folder."""

PACKAGES = """
    transformers tokenizers huggingface-hub
    pydantic pydantic-core annotated-types typing-inspection pydantic-extra-types pycountry
    msgspec pyzmq cachetools cbor2 blake3 pybase64 gguf partial-json-parser diskcache
    openai httpx2 httpcore2 sniffio jiter distro openai-harmony
    fastapi starlette opentelemetry-api python-multipart
    mistral-common jsonschema jsonschema-specifications referencing rpds-py
    lm-format-enforcer interegular llguidance compressed-tensors depyf astor dill
""".split()
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 38, 36, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
"""Platform tags that pip accepts. It compares them as they are: a newer tag does not include the older ones."""


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints" / "0.16.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def download(folder: Path, python: str) -> None:
    pins = pinned()
    wanted = [f"{name}=={pins[name]}" if name in pins else name for name in PACKAGES]
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, *platforms, "--dest", str(folder), *wanted]
    subprocess.run(command, check=True)


def build_vllm(folder: Path) -> None:
    """Builds vLLM without kernels. Its version would read 0.16.0+empty, which installers then call inconsistent."""
    uv = str(Path(sys.executable).with_name("uv"))
    with tempfile.TemporaryDirectory() as installed:
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--target", installed, "--python", sys.executable]  # noqa: RUF005
            + ["--no-deps", "--no-binary", "vllm", f"vllm=={VERSION}"],
            env={**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION},
            check=True,
        )
        pack(Path(installed), folder / f"vllm-{VERSION}-py3-none-any.whl")


def pack(installed: Path, wheel: Path) -> None:
    """Packs an installed pure package as a wheel again."""
    metadata = f"vllm-{VERSION}.dist-info"
    left_out = {"RECORD", "INSTALLER", "REQUESTED", "uv_build.json", "uv_cache.json"}
    files = [path for top in ("vllm", metadata) for path in sorted((installed / top).rglob("*")) if path.is_file()]
    if binaries := [path.name for path in files if path.suffix == ".so"]:
        raise SystemExit(f"vLLM was built with kernels ({', '.join(binaries)}): clear uv's cache of it and run again")
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in files:
            name = path.relative_to(installed).as_posix()
            if "__pycache__" in name or (name.startswith(metadata) and path.name in left_out):
                continue
            archive.write(path, name)
            rows.writerow([name, "", ""])
        rows.writerow([f"{metadata}/RECORD", "", ""])
        archive.writestr(f"{metadata}/RECORD", record.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".whl")
    parser.add_argument("--python", default="3.12", help="the host's version")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for old in args.folder.glob("*.whl"):
        old.unlink()
    build_vllm(args.folder)
    download(args.folder, args.python)
    sizes = {wheel.name: wheel.stat().st_size for wheel in args.folder.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:7.2f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:7.2f} MB in {len(sizes)} wheels")
    if total > LIMIT:
        raise SystemExit(f"that is more than {LIMIT / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
