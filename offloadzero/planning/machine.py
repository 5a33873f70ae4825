"""The description of the machine of a measurement: CPU, memory, kernel, versions, filesystem, block device.

Everything is read from /proc and /sys; a value that is not readable is None.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

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


def describe_machine() -> dict[str, Any]:
    """Describe the CPU model, the cores this process may use, the bytes of memory, and the kernel."""
    return {
        "cpu": _field("/proc/cpuinfo", r"model name\s*: (.*)") or platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(_field("/proc/meminfo", r"MemTotal:\s*(\d+) kB") or 0) * 1024 or None,
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
    status = os.stat(path)
    space = os.statvfs(path)
    mount = _mount_of(path, status.st_dev)
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    source = mount.get("source")
    if not Path("/sys/dev/block", number).exists() and source and source.startswith("/dev/"):
        number = _device_number(source) or number  # btrfs has device numbers of its own
    return {
        "path": path,
        **mount,
        "total_bytes": space.f_blocks * space.f_frsize,
        "free_bytes": space.f_bavail * space.f_frsize,
        "device": _describe_device(number),
    }


def _mount_of(path: str, device: int) -> dict[str, Any]:
    """Return the mount with the device number of the path, else the one with the longest mount point above it."""
    real = os.path.realpath(path)
    number = f"{os.major(device)}:{os.minor(device)}"
    found: tuple[bool, int, dict[str, Any]] = (False, -1, {"filesystem": None, "source": None})
    for line in (_text("/proc/self/mountinfo") or "").splitlines():
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


def _device_number(source: str) -> str | None:
    try:
        device = os.stat(source).st_rdev
    except OSError:
        return None
    return f"{os.major(device)}:{os.minor(device)}"


def _describe_device(number: str) -> dict[str, Any] | None:
    """Describe the disk, not the partition; None for filesystems without one (tmpfs, overlay, network)."""
    link = Path("/sys/dev/block", number)
    if not link.exists():
        return None
    disk = link.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    sectors = _text(str(disk / "size"))
    return {
        "name": disk.name,
        "model": _text(str(disk / "device/model")),
        "firmware": _text(str(disk / "device/firmware_rev")),
        "num_bytes": int(sectors) * 512 if sectors else None,
        "link_speed": _text(str(disk / "device/device/current_link_speed")),
        "link_width": _text(str(disk / "device/device/current_link_width")),
        "members": sorted(os.listdir(disk / "slaves")) if (disk / "slaves").is_dir() else [],
        "queue": {key: _text(str(disk / "queue" / key)) for key in _QUEUE_KEYS},
    }


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _field(path: str, pattern: str) -> str | None:
    match = re.search(pattern, _text(path) or "")
    return match[1].strip() if match else None
