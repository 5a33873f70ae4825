"""What hurts on a machine, from facts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offloadzero.cli.doctor import Drive, Facts, Severity, check

GIB = 1 << 30
DRIVE = Drive("/mnt/nvme", "xfs", True, "O_DIRECT", False, 500 * GIB, 6e9, 4e9)
GOOD = Facts(
    usable_cores=16,
    machine_cores=16,
    isa="avx512",
    memory_bytes=128 * GIB,
    group_free_bytes=None,
    memlock_bytes=None,
    registers=True,
    max_open_files=65536,
    huge_pages="madvise",
    overcommit=0,
    file_engine="io_uring",
    file_engine_reason="the kernel allows it",
    io_uring_disabled=0,
    device="NVIDIA H200",
    has_gpu_node=True,
    link_width=(16, 16),
    load=0.3,
    drives=(DRIVE,),
)


def test_nothing_hurts_on_a_good_machine() -> None:
    assert check(GOOD) == []
    assert check(replace(GOOD, group_free_bytes=120 * GIB, huge_pages="always", isa="avx2")) == []
    assert check(replace(GOOD, products_per_s={"bf16": 5e10, "fp32": 8e10})) == []
    assert check(replace(GOOD, memlock_bytes=8 << 20)) == [], "root may lock more"
    assert check(replace(GOOD, drives=(replace(DRIVE, rotational=True),))) == [], "it was measured"


def test_a_virtual_disk_may_be_fast_whatever_it_says() -> None:
    drive = replace(DRIVE, rotational=True, read_bytes_per_s=None)
    (found,) = check(replace(GOOD, is_virtual=True, drives=(drive,)))
    assert found.severity is Severity.NOTE


@pytest.mark.parametrize(
    ("changed", "what", "mend"),
    [
        ({"device": None}, "does not find it", "CUDA"),
        ({"link_width": (4, 16)}, "4 of its 16 PCIe lanes", "slot"),
        ({"isa": "scalar"}, "neither AVX2 nor AVX-512", "AVX2"),
        ({"usable_cores": 2}, "2 of 16 cores", "taskset --cpu-list 0-15"),
        ({"group_cores": 4.0}, "the time of 4 of its 16 cores", "--cpus"),
        ({"group_free_bytes": 16 * GIB}, "leaves 16.0 GiB of 128.0 GiB", "MemoryMax"),
        ({"huge_pages": "never"}, "huge pages are off", "transparent_hugepage/enabled"),
        ({"overcommit": 2}, "overcommit_memory is 2", "sysctl vm.overcommit_memory=0"),
        ({"file_engine": "native_aio", "io_uring_disabled": 2}, "native_aio", "io_uring_disabled=0"),
        ({"file_engine": "aiofiles"}, "aiofiles", "seccomp"),
        ({"memlock_bytes": 8 << 20, "registers": False}, "lock 8 MiB", "ulimit -l unlimited"),
        (
            {"products_per_s": {"bf16": 2e9, "fp32": 8e10}},
            "bf16 at 2 GFLOP/s, in fp32 at 80",
            '"bf16": {"enabled": f',
        ),
        ({"max_open_files": 256}, "open 256 files", "ulimit -n"),
    ],
)
def test_each_thing_that_hurts_is_found_alone(changed: dict[str, object], what: str, mend: str) -> None:
    (found,) = check(replace(GOOD, **changed))  # type: ignore[arg-type]
    assert found.severity is Severity.HURTS
    assert what in found.what
    assert found.mend is not None
    assert mend in found.mend


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"filesystem": "tmpfs"}, "in memory"),
        ({"filesystem": "nfs4"}, "another machine"),
        ({"filesystem": "overlay"}, "container's own layer"),
        ({"direct": False, "direct_reason": "O_DIRECT: EINVAL"}, "page cache (O_DIRECT: EINVAL)"),
        ({"rotational": True, "read_bytes_per_s": None}, "rotates"),
        ({"read_bytes_per_s": 0.5e9}, "can read 0.50 GB/s"),
        ({"write_bytes_per_s": 0.5e9}, "can write 0.50 GB/s"),
    ],
)
def test_each_thing_of_a_drive_is_found_alone(changed: dict[str, object], what: str) -> None:
    (found,) = check(replace(GOOD, drives=(DRIVE, replace(DRIVE, **changed))))  # type: ignore[arg-type]
    assert found.severity is Severity.HURTS
    assert what in found.what
    assert found.mend is not None


def test_a_slow_drive_says_how_long_a_step_takes() -> None:
    """fp32 layout: 12 bytes of states each way, the parameter twice."""
    slow = replace(DRIVE, read_bytes_per_s=0.5e9, write_bytes_per_s=0.25e9)
    read, written = check(replace(GOOD, drives=(slow,)))
    assert "32 s of a step" in read.costs
    assert "48 s of a step" in written.costs


def test_what_nothing_mends_is_a_note_and_comes_last() -> None:
    facts = replace(
        GOOD, usable_cores=2, machine_cores=2, device=None, has_gpu_node=False, load=5.0, huge_pages="never"
    )
    found = check(facts)
    assert [one.severity.value for one in found] == ["hurts", "note", "note", "note"]
    assert all(one.mend is None for one in found[1:])
