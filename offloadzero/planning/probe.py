"""The memory, cores and limits of this machine.

[Note: memory that can be taken]
MemAvailable is the kernel's estimate of the bytes that can be taken without swapping. A control group (a container, a
systemd unit) may allow less, and a process beyond that is killed, or beyond memory.high held up until it hardly moves,
so the smallest of all counts. A group's file cache is a part of its usage that the kernel gives back when memory is
short, so it counts as free. Each group above limits as well. So does RLIMIT_AS (`ulimit -v`), all that is mapped.

All of this is less what this process holds itself. A plan is of a process that has not begun: to it what this one holds
is free, but for the pages of files (torch's libraries), which count as free already.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from offloadzero.limits import SPARED_CORES

_UNLIMITED = 1 << 60  # version 1 of the interface has no word for it: the largest multiple of a page
_ROOT = Path("/")
# The files of limits, that of the usage, and the prefix of names in memory.stat where children count.
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    2: (("memory.max", "memory.high"), "memory.current", ""),
}


def cores_beside_launching(usable: Sequence[int]) -> tuple[int, ...]:
    """The CPUs for updates beside a device with streams: all but the first ones, as many as SPARED_CORES says.

    A device waits whenever the launching thread does; updates on all cores would push that thread aside for
    milliseconds. Of few cores none can be spared: the result is then empty, which means any.
    """
    spared = max((spared for cores, spared in SPARED_CORES.items() if len(usable) >= cores), default=0)
    return tuple(usable[spared:]) if spared else ()


def available_host_bytes(*, root: Path = _ROOT) -> int:
    """The memory that can be taken now: [Note: memory that can be taken]. `root` is where /proc and /sys are."""
    limits = (cgroup_free_bytes(root=root), _free_addresses(root))
    return min([_mem_available(root), *(limit for limit in limits if limit is not None)])


def host_bytes_before(*, root: Path = _ROOT) -> int:
    """The memory that a process finds which begins when this one has ended: [Note: memory that can be taken]."""
    return available_host_bytes(root=root) + _held_bytes(root)


def _held_bytes(root: Path) -> int:
    """The memory of this process that is no file's."""
    lines = (root / "proc/self/status").read_text().splitlines()
    sizes = (line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return sum(int(size) * 1024 for _, size, _ in sizes)


def _free_addresses(root: Path) -> int | None:
    """The bytes that this process may still map (RLIMIT_AS); None: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    lines = (root / "proc/self/status").read_text().splitlines()
    mapped = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize:"))
    return max(0, limit - mapped)


def cgroup_free_bytes(*, root: Path = _ROOT) -> int | None:
    """The bytes that the control groups of this process leave it; None where none of them has a limit."""
    return min(_free_by_group(root), default=None)


def usable_cores(*, root: Path = _ROOT) -> float:
    """The cores that this process may use, or the number that the time of its control groups is worth."""
    num_cores, of_groups = float(len(os.sched_getaffinity(0))), cgroup_cores(root=root)
    return num_cores if of_groups is None else min(num_cores, of_groups)


def cgroup_cores(*, root: Path = _ROOT) -> float | None:
    """The cores that the time of this process's control groups is worth; None where none of them limits it."""
    return min(_quotas(root), default=None)


def free_disk_bytes(directory: Path) -> int:
    """The free space of the filesystem that a directory is on, or would be made on. Raises OSError."""
    space = os.statvfs(nearest_directory(directory))
    return space.f_bavail * space.f_frsize


def nearest_directory(directory: Path) -> Path:
    """Return the path itself, or the existing directory in which it would be made."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def memlock_bytes() -> int | None:
    """The bytes that this process may lock in memory (RLIMIT_MEMLOCK); None: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")


def _free_by_group(root: Path) -> Iterator[int]:
    """Yield for each group that limits memory its limit less the usage that cannot be given back."""
    for group, version in _groups(root, "memory"):
        limit_files, usage_file, of_children = _FILES[version]
        limits = [_number(group / file) for file in limit_files]
        limit = min((one for one in limits if one is not None), default=_UNLIMITED)
        usage = _number(group / usage_file)
        if usage is None or limit >= _UNLIMITED:
            continue
        cached = sum(_stat(group, f"{of_children}{name}") for name in ("active_file", "inactive_file"))
        yield max(0, limit - max(0, usage - cached))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Return the directories of this process's group and of those above it, and the version of their interface.

    In a namespace of its own the path may not be visible from here: then only mounted groups count.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # the kernel has no control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / (f"sys/fs/cgroup/{controller}" if controllers else "sys/fs/cgroup")
        version = 1 if controllers else 2
        group = Path(path.lstrip("/"))
        for part in dict.fromkeys((group, *group.parents)):
            yield top / part, version


def _quotas(root: Path) -> Iterator[float]:
    """Yield for each group that limits the processor its time in a period over the period."""
    for group, version in _groups(root, "cpu"):
        try:
            if version == 1:
                words = [(group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
            else:
                words = (group / "cpu.max").read_text().split()
        except OSError:  # the topmost group has no quota
            continue
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            yield int(words[0]) / int(words[1])


def _number(path: Path) -> int | None:
    """Return the number in a file; None for "max", and for a missing file: the topmost group has none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat(group: Path, name: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
