"""Tests of the installed vLLM: its source distribution, fetched by pip, whose ``tests`` folder is kept in a cache."""

import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from filelock import FileLock


class SourceError(Exception):
    """Reason for which there are no tests, and what to do, in a line."""


def installed_release() -> str:
    """Release of the installed vLLM, such as 0.16.0: its version without the suffix of a build."""
    return version("vllm").partition("+")[0]


def source_of(release: str, cache: Path, own: Path, given: Path | None = None) -> Path:
    """A folder with vLLM's ``tests`` in it.

    Args:
        release: which vLLM.
        cache: folder in which unpacked tests are kept, for all runs.
        own: folder of this run, in which a given source distribution is unpacked.
        given: a source distribution, or a folder with vLLM's source. None: the cache, or else pip's index.

    Raises:
        SourceError: there are none.
    """
    if given is None:
        return _cached(release, cache, own)
    if not given.is_dir():
        return _unpacked(given, release, own)
    if not (given / "tests" / "v1").is_dir():
        raise SourceError(f"{given} has no tests/v1: --source needs the source of vLLM {release}")
    return given


def _cached(release: str, cache: Path, own: Path) -> Path:
    """The folder in the cache. It is filled if there is none, and never replaced: other runs may use it."""
    folder = cache / release
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{release}.lock"):
        if not folder.is_dir():
            unpacked = _unpacked(_download(release, cache, own), release, own)
            partial = cache / f"{release}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # Left by a run that was killed.
            shutil.move(unpacked, partial)
            os.replace(partial, folder)
    return folder


def _unpacked(archive: Path, release: str, own: Path) -> Path:
    """Unpacks a source distribution, and returns the folder that has ``tests`` in it."""
    folder = own / "unpacked"
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(folder, members=_tests(tar), filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise SourceError(f"{archive} is no source distribution of vLLM that can be read: {error}") from error
    roots = list(folder.glob("*"))
    if len(roots) != 1 or roots[0].name != f"vllm-{release}" or not (roots[0] / "tests" / "v1").is_dir():
        raise SourceError(f"{archive} is not the source distribution of vLLM {release}, the installed one")
    return roots[0]


def _tests(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Members of vLLM's source in its ``tests`` folder."""
    return (member for member in tar if PurePosixPath(member.name).parts[1:2] == ("tests",))


def _download(release: str, cache: Path, own: Path) -> Path:
    """Fetches vLLM's source distribution by pip, and returns its path."""
    folder = own / "fetched"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", f"{__package__}.fetch", release, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SourceError(
            f"pip did not fetch the source distribution of vLLM {release} ({reason}), and {cache} does not "
            "have it yet: give that file, or a folder with vLLM's source, as --source"
        )
    return next(folder.iterdir())
