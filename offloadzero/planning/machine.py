"""This machine: its memory, cores and limits, and the description that stands beside a measurement.

A description is read from /proc and /sys; a value that is not readable is None.

[Note: memory that can be taken]
MemAvailable is the kernel's estimate of the bytes that can be taken without swapping. A control group (a container, a
systemd unit) may allow less, and a process beyond that is killed, or beyond memory.high held up until it hardly moves,
so the smallest of all counts. A group's file cache is a part of its usage that the kernel gives back when memory is
short, so it counts as free. Each group above limits as well. So does RLIMIT_AS (`ulimit -v`), all that is mapped.

All of this is less what this process holds itself. A plan is of a process that has not begun: to it what this one holds
is free, but for the pages of files (torch's libraries), which count as free already.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offloadzero.core.constants import SPARED_CORES

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_QUEUE_KEYS = (
    "rotational",
    "scheduler",
    "nr_requests",
    "max_sectors_kb",
    "logical_block_size",
    "physical_block_size",
    "write_cache",
)


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
    mem_available = _sizes(root / "proc/meminfo")["MemAvailable"]
    return min([mem_available, *(limit for limit in limits if limit is not None)])


def host_bytes_before(*, root: Path = _ROOT) -> int:
    """The memory that a process finds which begins when this one has ended: [Note: memory that can be taken]."""
    held = _sizes(root / "proc/self/status")
    # gVisor has neither line.
    return available_host_bytes(root=root) + held.get("RssAnon", 0) + held.get("RssShmem", 0)


def _free_addresses(root: Path) -> int | None:
    """The bytes that this process may still map (RLIMIT_AS); None: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - _sizes(root / "proc/self/status")["VmSize"])


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


def _free_by_group(root: Path) -> Iterator[int]:
    """Yield for each group that limits memory its limit less the usage that cannot be given back."""
    for group, version in _groups(root, "memory"):
        limit_files, usage_file, of_children = _FILES[version]
        limits = [number_in(group / file) for file in limit_files]
        limit = min((one for one in limits if one is not None), default=_UNLIMITED)
        usage = number_in(group / usage_file)
        if usage is None or limit >= _UNLIMITED:
            continue
        stat = _sizes(group / "memory.stat")
        cached = sum(stat.get(f"{of_children}{name}", 0) for name in ("active_file", "inactive_file"))
        yield max(0, limit - max(0, usage - cached))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Return the directories of this process's group and of those above it, and the version of their interface.

    In a namespace of its own the path may not be visible from here: then only mounted groups count.
    """
    for line in (text_in(root / "proc/self/cgroup") or "").splitlines():  # the kernel may have none
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
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        words = " ".join(text_in(group / file) or "" for file in files).split()  # the topmost group has none
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            yield int(words[0]) / int(words[1])


def number_in(path: Path) -> int | None:
    """Return the number in a file; None for another text, "max" say, and for a missing file."""
    text = text_in(path)
    return int(text) if text is not None and text.isdecimal() else None


def text_in(path: Path) -> str | None:
    """Return the text of a small file; None where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _sizes(path: Path) -> dict[str, int]:
    """The bytes by name in a file of lines such as `MemAvailable: 12 kB` or `anon 5`."""
    lines = [line.split() for line in (text_in(path) or "").splitlines()]
    return {
        words[0].rstrip(":"): int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
        for words in lines
        if len(words) > 1 and words[1].isdecimal()
    }


# --- the description beside a measurement ---


def describe_machine() -> dict[str, Any]:
    """Describe the CPU model, the cores this process may use, the bytes of memory, and the kernel."""
    return {
        "cpu": _field("/proc/cpuinfo", r"model name\s*: (.*)") or platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _sizes(Path("/proc/meminfo")).get("MemTotal"),
        "kernel": f"{os.uname().sysname} {os.uname().release}",
        "architecture": os.uname().machine,
        "is_virtual_machine": " hypervisor" in (_field("/proc/cpuinfo", r"flags\s*:(.*)") or ""),
        "load_average": os.getloadavg(),
    }


def describe_versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of Python and of the packages, without importing them."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def describe_path(path: str) -> dict[str, Any]:
    """Describe the filesystem, mount options, space, and the block device under a directory."""
    space, number = os.statvfs(path), _number(os.stat(path).st_dev)
    mount = _mount_of(path, number)
    source = mount["source"]
    if not Path("/sys/dev/block", number).exists() and source and source.startswith("/dev/"):
        with suppress(OSError):
            number = _number(os.stat(source).st_rdev)  # btrfs has device numbers of its own
    return {
        "path": path,
        **mount,
        "total_bytes": space.f_blocks * space.f_frsize,
        "free_bytes": space.f_bavail * space.f_frsize,
        "device": _describe_device(number),
    }


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _mount_of(path: str, number: str) -> dict[str, Any]:
    """Return the mount with the device number of the path, else the one with the longest mount point above it."""
    real = os.path.realpath(path)
    found: tuple[bool, int, dict[str, Any]] = (False, -1, {"filesystem": None, "source": None})
    for line in (text_in(Path("/proc/self/mountinfo")) or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, (filesystem, source, options) = before.split(), after.split(" ", 2)
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if os.path.commonpath((real, point)) != point:
            continue
        key = (fields[2] == number, len(point))
        if key >= found[:2]:
            mount = {"filesystem": filesystem, "source": source, "mount_options": f"{fields[5]},{options}"}
            found = (*key, mount)
    return found[2]


def _describe_device(number: str) -> dict[str, Any] | None:
    """Describe the disk, not the partition; None for filesystems without one (tmpfs, overlay, network)."""
    link = Path("/sys/dev/block", number)
    if not link.exists():
        return None
    disk = link.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    sectors = text_in(disk / "size")
    return {
        "name": disk.name,
        "model": text_in(disk / "device/model"),
        "firmware": text_in(disk / "device/firmware_rev"),
        "num_bytes": int(sectors) * 512 if sectors else None,
        "link_speed": text_in(disk / "device/device/current_link_speed"),
        "link_width": text_in(disk / "device/device/current_link_width"),
        "members": sorted(os.listdir(disk / "slaves")) if (disk / "slaves").is_dir() else [],
        "queue": {key: text_in(disk / "queue" / key) for key in _QUEUE_KEYS},
    }


def _field(path: str, pattern: str) -> str | None:
    match = re.search(pattern, text_in(Path(path)) or "")
    return match[1].strip() if match else None
