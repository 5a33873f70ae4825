"""`offloadzero doctor` on this machine, and on the files of others."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offloadzero.cli import doctor, main
from offloadzero.cli.doctor import Drive, Facts, Severity, check
from offloadzero.memory.device import pci_address


def test_it_tells_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main.main(["doctor", str(tmp_path), "--device", "cpu", "--json", str(tmp_path / "out.json")])
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    facts = result["facts"]
    assert facts["usable_cores"] == len(os.sched_getaffinity(0))
    assert facts["max_open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    (drive,) = facts["drives"]
    free = os.statvfs(tmp_path)
    assert abs(drive["free_bytes"] - free.f_bavail * free.f_frsize) < 1 << 30
    assert set(facts["products_per_s"]) == {"bf16", "fp32"}
    assert min(facts["products_per_s"].values()) > 0
    assert status == int(any(one["severity"] == "hurts" for one in result["findings"]))
    for one in result["findings"]:
        assert f"{one['severity']}: {one['what']}" in shown
        assert one["mend"] is None or f"mend: {one['mend']}" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "the file that tries O_DIRECT is gone"


def test_limits_of_this_process_are_found() -> None:
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200));"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20));"
        "from offloadzero.cli.main import main; sys.exit(main(['doctor', '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "hurts: this process may open 200 files" in done.stdout
    locks = (
        "CapEff:" in (status := Path("/proc/self/status").read_text())
        and int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16) >> 14
        & 1
    )  # CAP_IPC_LOCK
    uses_uring = "file engine io_uring" in done.stdout
    assert ("ulimit -l unlimited" in done.stdout) == (uses_uring and not locks)


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["doctor", "--device", "cpu", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["format"] == "offloadzero.doctor"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["--device", "cuda:77"], "cuda:77"),
        (["--json", "nowhere/x.json"], "nowhere/x.json"),
    ],
)
def test_mistakes_of_the_user(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_files_of_another_machine(tmp_path: Path) -> None:
    for name, text in {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "proc/sys/vm/overcommit_memory": "2\n",
        "proc/sys/kernel/io_uring_disabled": "1\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
        "dev/nvidia3": "",
        "sys/bus/pci/devices/0000:41:00.0/current_link_width": "4\n",
        "sys/bus/pci/devices/0000:41:00.0/max_link_width": "16\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = doctor.find_facts([], "cpu", with_rates=False, root=tmp_path)
    assert (facts.huge_pages, facts.overcommit, facts.io_uring_disabled) == ("never", 2, 1)
    assert facts.has_gpu_node
    assert facts.group_free_bytes is None
    assert facts.group_cores == 1.5
    assert doctor.link_width("0000:41:00.0", root=tmp_path) == (4, 16)
    assert doctor.link_width("0000:42:00.0", root=tmp_path) is None
    assert pci_address(torch.device("cpu")) is None


def test_rates_are_measured_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from offloadzero.cli.plan import measure

    asked: list[list[Path]] = []

    def rates(paths: list[Path], *, time_s: float) -> dict[str, float]:
        assert time_s == 10.0
        asked.append(paths)
        return {"nvme_read": 0.5e9, "nvme_write": 3e9}

    monkeypatch.setattr(measure, "drive_rates", rates)
    main.main(["doctor", str(tmp_path), "--device", "cpu"])
    assert not asked
    assert main.main(["doctor", str(tmp_path), "--device", "cpu", "--measure"]) == 1
    assert asked == [[tmp_path]]
    assert "can read 0.50 GB/s" in capsys.readouterr().out


# --- what hurts on a machine, from facts alone ---


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
    assert "0.2 GB/s" not in found.costs
    (found,) = check(replace(GOOD, drives=(drive,)))
    assert "0.2 GB/s" in found.costs


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
