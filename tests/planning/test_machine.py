"""What the machine has: limits of control groups of both versions, on trees of files that look like /proc and /sys."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from offloadzero.planning.machine import (
    available_host_bytes,
    cgroup_free_bytes,
    free_disk_bytes,
    host_bytes_before,
    memlock_bytes,
    usable_cores,
)

GIB = 1 << 30


def machine(root: Path, *, available: int, groups: str, files: dict[str, str]) -> Path:
    """A root with /proc and /sys/fs/cgroup."""
    texts = {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {available // 1024} kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def unified(path: str, *, limit: str, usage: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{path}memory.max": f"{limit}\n",
        f"{path}memory.current": f"{usage}\n",
        f"{path}memory.stat": f"anon 5\nactive_file {cached // 4}\ninactive_file {cached - cached // 4}\n",
    }


def test_without_a_limit_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    root = machine(
        tmp_path, available=20 * GIB, groups="0::/user\n", files=unified("user/", limit="max", usage=5)
    )
    assert cgroup_free_bytes(root=root) is None
    assert available_host_bytes(root=root) == 20 * GIB


def test_a_limit_of_a_group_counts_when_it_is_lower(tmp_path: Path) -> None:
    files = unified("user/run/", limit=str(8 * GIB), usage=3 * GIB, cached=2 * GIB)
    root = machine(tmp_path, available=20 * GIB, groups="0::/user/run\n", files=files)
    assert available_host_bytes(root=root) == 7 * GIB, "the file cache is given back"
    (root / "proc/meminfo").write_text(f"MemAvailable: {6 * GIB // 1024} kB\n")
    assert available_host_bytes(root=root) == 6 * GIB


def test_what_this_process_holds_is_free_for_the_next_one(tmp_path: Path) -> None:
    """Its pages of files are free already, by the kernel and by a group alike."""
    files = unified("run/", limit=str(8 * GIB), usage=3 * GIB, cached=2 * GIB)
    root = machine(tmp_path, available=20 * GIB, groups="0::/run\n", files=files)
    status = "VmRSS:\t 900000 kB\nRssAnon:\t  524288 kB\nRssFile:\t  300000 kB\nRssShmem:\t 1048576 kB\n"
    (root / "proc/self/status").write_text(status)
    assert host_bytes_before(root=root) == 7 * GIB + 3 * GIB // 2
    (root / "proc/meminfo").write_text(f"MemAvailable: {6 * GIB // 1024} kB\n")
    assert host_bytes_before(root=root) == 6 * GIB + 3 * GIB // 2
    (root / "proc/self/status").write_text("VmSize:\t 950000 kB\nVmRSS:\t 900000 kB\n")  # gVisor has no more
    assert host_bytes_before(root=root) == 6 * GIB


def test_a_group_that_holds_processes_up_is_a_limit(tmp_path: Path) -> None:
    files = unified("user/", limit=str(8 * GIB), usage=GIB) | {"user/memory.high": f"{5 * GIB}\n"}
    root = machine(tmp_path, available=20 * GIB, groups="0::/user\n", files=files)
    assert available_host_bytes(root=root) == 4 * GIB
    (root / "sys/fs/cgroup/user/memory.max").write_text("max\n")
    assert available_host_bytes(root=root) == 4 * GIB
    (root / "sys/fs/cgroup/user/memory.high").write_text("max\n")
    assert cgroup_free_bytes(root=root) is None


def test_a_group_above_limits_as_well(tmp_path: Path) -> None:
    files = {
        **unified("user/run/", limit=str(8 * GIB), usage=GIB),
        **unified("user/", limit=str(5 * GIB), usage=4 * GIB),
    }
    root = machine(tmp_path, available=20 * GIB, groups="0::/user/run\n", files=files)
    assert available_host_bytes(root=root) == GIB


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = unified("", limit=str(GIB), usage=2 * GIB)
    assert available_host_bytes(root=machine(tmp_path, available=GIB, groups="0::/\n", files=files)) == 0


def test_version_one_with_its_word_for_no_limit(tmp_path: Path) -> None:
    def files(limit: int) -> dict[str, str]:
        return {
            "memory/a/memory.limit_in_bytes": f"{limit}\n",
            "memory/a/memory.usage_in_bytes": f"{3 * GIB}\n",
            "memory/a/memory.stat": f"cache 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": f"{9 * GIB}\n",
        }

    groups = "5:cpu,cpuacct:/b\n4:memory:/a\n0::/\n"
    root = machine(tmp_path, available=20 * GIB, groups=groups, files=files(4 * GIB))
    assert available_host_bytes(root=root) == 3 * GIB
    machine(tmp_path, available=20 * GIB, groups=groups, files=files(9223372036854771712))
    assert available_host_bytes(root=root) == 20 * GIB


def test_what_a_process_may_map_is_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ulimit -v` a model fitted of which the first large mapping was refused."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6 * GIB, 8 * GIB))
    root = machine(tmp_path, available=20 * GIB, groups="0::/\n", files={})
    held = GIB // 2
    status = f"VmSize:\t {2 * GIB // 1024} kB\nRssAnon:\t {held // 1024} kB\nRssShmem:\t 0 kB\n"
    (root / "proc/self/status").write_text(status)
    assert available_host_bytes(root=root) == 4 * GIB
    assert host_bytes_before(root=root) == 4 * GIB + held
    (root / "proc/self/status").write_text(status.replace(str(2 * GIB // 1024), str(7 * GIB // 1024)))
    assert available_host_bytes(root=root) == 0
    machine(tmp_path, available=3 * GIB, groups="0::/\n", files={})
    (root / "proc/self/status").write_text(status)
    assert available_host_bytes(root=root) == 3 * GIB


def test_a_path_that_is_not_seen_from_a_namespace(tmp_path: Path) -> None:
    files = {"memory.max": f"{2 * GIB}\n", "memory.current": f"{GIB}\n"}
    root = machine(tmp_path, available=20 * GIB, groups="0::/../outside\n", files=files)
    assert available_host_bytes(root=root) <= GIB


def test_cores_are_those_of_the_affinity_or_of_the_time_that_groups_give(tmp_path: Path) -> None:
    num_cores = len(os.sched_getaffinity(0))
    files = {"user/run/cpu.max": "max 100000\n", "user/cpu.max": "50000 100000\n"}
    root = machine(tmp_path, available=GIB, groups="0::/user/run\n", files=files)
    assert usable_cores(root=root) == 0.5
    (root / "sys/fs/cgroup/user/cpu.max").write_text(f"{100_000 * (num_cores + 1)} 100000\n")
    assert usable_cores(root=root) == num_cores
    files = {"cpu/a/cpu.cfs_quota_us": "25000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}
    root = machine(tmp_path, available=GIB, groups="5:cpu,cpuacct:/a\n4:memory:/b\n", files=files)
    assert usable_cores(root=root) == 0.25
    (root / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(root=root) == num_cores
    assert 0 < usable_cores() <= num_cores


def test_this_machine_has_something() -> None:
    assert 0 < available_host_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memlock_bytes()
    assert limit is None or limit >= 0


def test_the_space_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    found = free_disk_bytes(tmp_path / "a" / "b")
    assert found == pytest.approx(space.f_bavail * space.f_frsize, rel=0.05)
