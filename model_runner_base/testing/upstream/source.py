"""Tests of the installed vLLM: its source distribution, fetched by pip, whose ``tests`` folder is kept in a cache."""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory


class SourceError(Exception):
    """Reason for which there are no tests, and what to do, in a line."""


def installed_release() -> str:
    """Release of the installed vLLM, such as 0.16.0: its version without the suffix of a build."""
    return version("vllm").partition("+")[0]


def source_of(release: str, cache: Path, given: Path | None = None) -> Path:
    """A folder with vLLM's ``tests`` in it.

    Args:
        release: which vLLM.
        cache: folder in which unpacked tests are kept.
        given: a source distribution, or a folder with vLLM's source. None: the cache, or else pip's index.

    Raises:
        SourceError: there are none.
    """
    if given is not None and given.is_dir():
        if not (given / "tests" / "v1").is_dir():
            raise SourceError(f"{given} has no tests/v1: --source needs the source of vLLM {release}")
        return given
    folder = cache / release
    if given is None and folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache) as scratch:
        archive = given or _download(release, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(unpacked, members=_tests(tar), filter="data")
        except (OSError, tarfile.TarError) as error:
            raise SourceError(f"{archive} is no source distribution of vLLM that can be read: {error}") from error
        roots = list(unpacked.glob("*"))
        if len(roots) != 1 or roots[0].name != f"vllm-{release}" or not (roots[0] / "tests" / "v1").is_dir():
            raise SourceError(f"{archive} is not the source distribution of vLLM {release}, the installed one")
        if folder.is_dir():
            shutil.rmtree(folder)
        os.replace(roots[0], folder)
    return folder


def _tests(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Members of vLLM's source in its ``tests`` folder."""
    return (member for member in tar if PurePosixPath(member.name).parts[1:2] == ("tests",))


def _download(release: str, folder: Path) -> Path:
    """Fetches vLLM's source distribution by pip, and returns its path."""
    command = [sys.executable, "-m", f"{__package__}.fetch", release, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SourceError(
            f"pip did not fetch the source distribution of vLLM {release} ({reason}), and {folder.parent} does not "
            "have it yet: give that file, or a folder with vLLM's source, as --source"
        )
    return next(folder.iterdir())
