"""Memory of the host that this process may use: the machine's, or what its control groups (cgroups) allow.

Docker, Kubernetes, systemd and Slurm limit memory by control groups, and end a process that takes more.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

NAMES = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    "v2": ("memory.max", "memory.current", ("active_file", "inactive_file")),
}
"""Files of the limit and of the usage, and counts of cached files, for each version of control groups."""


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Free and total bytes; ``root`` is where ``proc`` and ``sys`` are mounted."""
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for folder, version in _groups(root):
        limit_file, usage_file, cached = NAMES[version]
        try:
            limit, usage = int((folder / limit_file).read_text()), int((folder / usage_file).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # No limit ("max"), or no such group in this container.
        if limit < machine.total:
            # A checkpoint that was read stays cached, and counts as usage, until something else needs the memory.
            used = usage - sum(int(counts.get(name, 0)) for name in cached)
            free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """Folders, and versions, of the process's control groups for memory: its own, and all that contain it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # No Linux.
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            version = "v2" if number == "0" else "v1"
            mounted = root / "sys/fs/cgroup" / ("" if version == "v2" else "memory")
            own = mounted / path.lstrip("/")
            # A container sees its own group as the mounted one, and perhaps a path of the host's.
            yield from ((folder, version) for folder in (own, *own.parents) if folder.is_relative_to(mounted))
