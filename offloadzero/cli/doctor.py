"""`offloadzero doctor`: the properties of this machine that slow training down, and the commands that mend them."""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from offloadzero.cli.output import check_output, show_result
from offloadzero.planning.machine import (
    MEMORY_FILESYSTEMS,
    cgroup_cores,
    cgroup_free_bytes,
    describe_machine,
    describe_path,
    describe_versions,
    memlock_bytes,
    number_in,
    text_in,
)

FORMAT = "offloadzero.doctor"
FORMAT_VERSION = 1
ROOT = Path("/")
HURTS = 1
REGISTERED = 64 << 20


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what of this machine will hurt, and what mends it",
        description="Looks at cores, memory, limits, the file engine, the device and the drives under the given "
        "directories, and says what costs speed or room and the command that mends it.",
    )
    parser.add_argument(
        "directories",
        nargs="*",
        metavar="DIR",
        help="for offloaded states: the nvme_path of the configuration",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: CUDA where there is one)"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure each drive, in ten seconds and with up to 8 GiB of writes to a file that is removed",
    )
    parser.add_argument("--json", metavar="FILE", help="everything, - for standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status: 0, or 1 if something hurts. Raises OffloadError."""
    from offloadzero.cli.bench.nvme import check_directories

    check_output("--json", args.json)
    check_directories(args.directories)
    facts = find_facts(args.directories, args.device, with_rates=args.measure)
    found = check(facts)
    result = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "findings": [asdict(one) for one in found],
        "facts": asdict(facts),
    }
    show_result(lines_of(facts, found), args.json, result)
    return HURTS if any(one.severity is Severity.HURTS for one in found) else 0


def machine_lines(facts: Facts) -> list[str]:
    lines = [
        f"{facts.device or 'the CPU'} as the device, {facts.usable_cores} cores with {facts.isa} kernels, "
        f"{facts.memory_bytes / 2**30:.1f} GiB of memory, file engine {facts.file_engine}"
    ]
    for drive in facts.drives:
        line = f"{drive.path}: {drive.filesystem}, {drive.direct_reason}, {drive.free_bytes / 2**30:.1f} GiB free"
        if drive.read_bytes_per_s is not None and drive.write_bytes_per_s is not None:
            line += f", {drive.read_bytes_per_s / 1e9:.2f} GB/s read, {drive.write_bytes_per_s / 1e9:.2f} GB/s written"
        lines.append(line)
    return lines


def lines_of(facts: Facts, found: Sequence[Finding]) -> list[str]:
    lines = machine_lines(facts)
    for one in found:
        lines += ["", f"{one.severity.value}: {one.what}", f"    {one.costs}"]
        if one.mend is not None:
            lines.append(f"    mend: {one.mend}")
    return lines if found else [*lines, "", "Nothing was found that hurts."]


def find_facts(
    directories: Sequence[str], device_name: str | None, *, with_rates: bool, root: Path = ROOT
) -> Facts:
    """Collect the facts of this machine. `root` is where /proc, /sys and /dev are."""
    import torch

    from offloadzero.io.engine import AioEngine
    from offloadzero.memory.device import find_device, pci_address
    from offloadzero.native import kernels

    device = find_device(device_name)
    machine = describe_machine()
    with AioEngine() as engine:
        drives = [find_drive(path, engine, with_rates=with_rates) for path in directories]
        backend, reason = engine.backend.value, engine.reason
        registers = engine.register_parts(torch.empty(REGISTERED, dtype=torch.uint8)) == REGISTERED
    products = {}
    if device.free_bytes() is None:  # the CPU is the device
        from offloadzero.cli.plan.measure import products_per_s

        products = {"bf16": products_per_s(torch.bfloat16), "fp32": products_per_s(torch.float32)}
    return Facts(
        usable_cores=len(os.sched_getaffinity(0)),
        machine_cores=os.cpu_count() or 1,
        isa=kernels.active_isa().value,
        memory_bytes=machine["memory_bytes"],
        group_free_bytes=cgroup_free_bytes(root=root),
        memlock_bytes=memlock_bytes(),
        registers=registers,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        huge_pages=chosen(text_in(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        overcommit=number_in(root / "proc/sys/vm/overcommit_memory"),
        file_engine=backend,
        file_engine_reason=reason,
        io_uring_disabled=number_in(root / "proc/sys/kernel/io_uring_disabled"),
        device=device.name(),
        has_gpu_node=any((root / "dev").glob("nvidia[0-9]*")),
        link_width=link_width(pci_address(device.torch_device), root=root),
        is_virtual=machine["is_virtual_machine"],
        group_cores=cgroup_cores(root=root),
        products_per_s=products,
        load=os.getloadavg()[0],
        drives=drives,
        details={"machine": machine, "versions": describe_versions("offloadzero", "torch", "numpy")},
    )


def find_drive(path: str, engine: Any, *, with_rates: bool) -> Drive:
    from offloadzero.cli.bench.traffic import ScratchFile

    described = describe_path(path)
    disk = described["device"]
    with closing(ScratchFile(path)) as scratch, scratch.open(engine) as file:
        direct, reason = file.direct, file.direct_reason
    rates = {}
    if with_rates:
        from offloadzero.cli.plan.measure import drive_rates

        rates = drive_rates([Path(path)], time_s=10.0)
    return Drive(
        path=path,
        filesystem=described["filesystem"],
        direct=direct,
        direct_reason=reason,
        rotational=None if disk is None else {"0": False, "1": True}.get(disk["queue"]["rotational"]),
        free_bytes=described["free_bytes"],
        read_bytes_per_s=rates.get("nvme_read"),
        write_bytes_per_s=rates.get("nvme_write"),
    )


def link_width(address: str | None, *, root: Path = ROOT) -> tuple[int, int] | None:
    """Return the lanes of the PCIe link of the device at an address, now and at most; None where unknown."""
    if address is None:
        return None
    place = root / "sys/bus/pci/devices" / address
    now, most = number_in(place / "current_link_width"), number_in(place / "max_link_width")
    return None if not now or not most else (now, most)


def chosen(text: str | None) -> str | None:
    """Return the chosen word of a kernel file such as "always [madvise] never"."""
    return None if text is None or "[" not in text else text.split("[")[1].split("]")[0]


# --- what it says of the facts: decisions without effects ---

MIB, GIB = 1 << 20, 1 << 30
FEW_CORES = 4  # one core launches, one copies, and updates and landings have the rest
FEW_FILES = 1024  # zero.Init holds a file for each large parameter until the model is offloaded
SLOW_DRIVE = 1e9  # bytes per second
SLOW_PRODUCTS = 0.5  # of the speed in fp32
# The bytes of a step with everything on the drive, per parameter: its states both ways, and the parameter for forward
# and backward. This is the fp32 layout; the compact one has 5.06 bytes of states.
BYTES_PER_PARAM = {"read": 12 + 2 * 2, "write": 12}
FAST_ISA = ("avx2", "avx512")
OF_CONTAINERS = ("overlay", "aufs")
OVER_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "ceph")


class Severity(str, Enum):
    """The cost of a finding."""

    HURTS = "hurts"  # a step takes longer, or less fits
    NOTE = "note"  # a fact; nothing mends it, or only at larger sizes


@dataclass(frozen=True)
class Finding:
    what: str
    costs: str
    mend: str | None  # a command, or words where no command does it
    severity: Severity = Severity.HURTS


@dataclass(frozen=True)
class Drive:
    """A directory for offloaded states, and the drive under it."""

    path: str
    filesystem: str | None
    direct: bool  # transfers bypass the page cache
    direct_reason: str
    rotational: bool | None
    free_bytes: int
    read_bytes_per_s: float | None = None  # None: not measured
    write_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Facts:
    usable_cores: int  # by this process, by its affinity
    machine_cores: int
    isa: str
    memory_bytes: int
    group_free_bytes: int | None  # the bytes that control groups leave this process; None: no limit
    memlock_bytes: int | None  # None: no limit
    registers: bool  # whether the file engine may register a buffer of 64 MiB
    max_open_files: int
    huge_pages: str | None  # "always", "madvise" or "never"; None: the kernel has none
    overcommit: int | None  # /proc/sys/vm/overcommit_memory
    file_engine: str  # the backend in use
    file_engine_reason: str
    io_uring_disabled: int | None  # /proc/sys/kernel/io_uring_disabled
    device: str | None  # its name; None: the CPU is the device
    has_gpu_node: bool  # the kernel has an NVIDIA device, whether torch sees it or not
    link_width: tuple[int, int] | None = None  # lanes of the device's PCIe link: now, and at most
    is_virtual: bool = False  # a virtual machine
    group_cores: float | None = None  # that the time of control groups is worth; None: no limit
    # Operations per second in the products of a layer's forward and backward, by dtype, where the CPU is the device.
    products_per_s: Mapping[str, float] = field(default_factory=dict)
    load: float = 0.0  # processes that wanted a core in the last minute
    drives: Sequence[Drive] = ()
    details: Mapping[str, Any] = field(default_factory=dict)  # for the JSON only


def check(facts: Facts) -> list[Finding]:
    """Return all findings, those that hurt first."""
    found = [*_of_device(facts), *_of_cores(facts), *_of_memory(facts), *_of_files(facts)]
    for drive in facts.drives:
        found += _of_drive(drive, is_virtual=facts.is_virtual)
    return sorted(found, key=lambda one: one.severity is Severity.NOTE)


def _of_device(facts: Facts) -> Iterator[Finding]:
    if facts.device is None and facts.has_gpu_node:
        yield Finding(
            "the machine has an NVIDIA GPU, and torch does not find it",
            "everything is computed on the CPU",
            "a build of torch with CUDA (pytorch.org/get-started); nvidia-smi says whether the driver runs",
        )
    elif facts.device is None:
        yield Finding(
            "there is no GPU",
            "the CPU is the device, and offloading saves it memory",
            None,
            Severity.NOTE,
        )
    fp32 = facts.products_per_s.get("fp32", 0.0)
    for dtype, rate in facts.products_per_s.items():
        if rate < SLOW_PRODUCTS * fp32:
            yield Finding(
                f"the CPU multiplies matrices in {dtype} at {rate / 1e9:.3g} GFLOP/s, in fp32 at {fp32 / 1e9:.3g}: it "
                f"has no instructions for {dtype} that torch uses",
                f"forward and backward in {dtype} take {fp32 / rate:.3g} times as long as in fp32",
                f'"{dtype}": {{"enabled": false}} in the configuration trains in fp32, whose parameters and gradients '
                "have twice the bytes",
            )
    if facts.link_width is not None and facts.link_width[0] < facts.link_width[1]:
        now, most = facts.link_width
        yield Finding(
            f"{facts.device} has {now} of its {most} PCIe lanes",
            f"parameters and gradients move at {now / most:.0%} of the speed",
            "another slot of the mainboard, or its firmware's settings for the slot",
        )


def _of_cores(facts: Facts) -> Iterator[Finding]:
    if facts.isa not in FAST_ISA:
        yield Finding(
            f"updates run as {facts.isa} code: neither AVX2 nor AVX-512",
            "updates on the host take several times as long",
            "a CPU (or a virtual machine's CPU model) with AVX2; unset OFFLOADZERO_ISA if it is set",
        )
    if facts.usable_cores < facts.machine_cores:
        yield Finding(
            f"this process may use {facts.usable_cores} of {facts.machine_cores} cores",
            "updates, landings and copies share them",
            f"taskset --cpu-list 0-{facts.machine_cores - 1} COMMAND, or docker run --cpuset-cpus",
        )
    if facts.group_cores is not None and facts.group_cores < facts.usable_cores:
        yield Finding(
            f"a control group gives this process the time of {facts.group_cores:.3g} of its {facts.usable_cores} cores",
            "threads on all of them use it up early in each period, and the training thread stands still with them",
            "docker run --cpus N, systemd-run -p CPUQuota=N00%, or the limit of the job",
        )
    elif facts.usable_cores == facts.machine_cores and facts.usable_cores < FEW_CORES:
        yield Finding(
            f"there are {facts.usable_cores} cores",
            "updates and the thread that launches get in each other's way",
            None,
            Severity.NOTE,
        )
    if facts.load > facts.usable_cores:
        yield Finding(
            f"{facts.load:.1f} processes have wanted {facts.usable_cores} cores in the last minute",
            "steps and measurements take longer than on an idle machine; where the CPU is the device, many times "
            "longer, while threads wait for each other: start it with OMP_WAIT_POLICY=passive or OMP_NUM_THREADS=1",
            None,
            Severity.NOTE,
        )


def _of_memory(facts: Facts) -> Iterator[Finding]:
    if facts.group_free_bytes is not None and facts.group_free_bytes < 0.9 * facts.memory_bytes:
        yield Finding(
            f"a control group leaves {facts.group_free_bytes / GIB:.1f} GiB of {facts.memory_bytes / GIB:.1f} GiB",
            "less fits the host, and what goes beyond is killed; plans keep to it",
            "docker run --memory SIZE, systemd-run -p MemoryMax=SIZE, or the limit of the job",
        )
    if facts.huge_pages == "never":
        yield Finding(
            "huge pages are off",
            "updates and copies miss the TLB with every page of 4 KiB",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if facts.overcommit == 2:
        yield Finding(
            "vm.overcommit_memory is 2",
            "memory that is reserved and not yet used counts as used, so less fits",
            "sudo sysctl vm.overcommit_memory=0",
        )


def _of_files(facts: Facts) -> Iterator[Finding]:
    if facts.file_engine != "io_uring":
        mend = (
            "sudo sysctl kernel.io_uring_disabled=0"
            if facts.io_uring_disabled
            else (
                "in a container a seccomp profile that allows io_uring (docker run --security-opt "
                "seccomp=FILE); else a kernel of 5.10 or later"
            )
        )
        yield Finding(
            f"the file engine is {facts.file_engine}: {facts.file_engine_reason}",
            "transfers to and from drives cost more time of the cores",
            mend,
        )
    elif facts.memlock_bytes is not None and not facts.registers:  # some users may lock more than the limit
        yield Finding(
            f"this process may lock {facts.memlock_bytes / MIB:,.0f} MiB in memory (RLIMIT_MEMLOCK)",
            "the file engine's buffers are not registered, and each transfer pins its pages anew",
            "ulimit -l unlimited (memlock in /etc/security/limits.conf; docker run --ulimit memlock=-1)",
        )
    if facts.max_open_files < FEW_FILES:
        yield Finding(
            f"this process may open {facts.max_open_files} files",
            "a model of many large parameters cannot be built under zero.Init on nvme",
            "ulimit -n 65536",
        )


def _of_drive(drive: Drive, *, is_virtual: bool) -> Iterator[Finding]:
    at = drive.path
    if drive.filesystem in MEMORY_FILESYSTEMS:
        yield Finding(
            f"{at} is in memory ({drive.filesystem})",
            "what is offloaded there takes the memory that it is to spare",
            "name a directory on a drive",
        )
        return
    if drive.filesystem in OVER_A_NETWORK:
        yield Finding(
            f"{at} is on another machine ({drive.filesystem})",
            "states move at the speed of the network",
            "name a directory on a drive of this machine",
        )
    if drive.filesystem in OF_CONTAINERS:
        yield Finding(
            f"{at} is in the container's own layer ({drive.filesystem})",
            "first writes copy whole files, and space is that of the image store",
            "mount a directory of the host: docker run --volume /mnt/nvme:/mnt/nvme",
        )
    if not drive.direct:
        yield Finding(
            f"{at}: transfers go through the page cache ({drive.direct_reason})",
            "every byte is copied once more, and the cache takes memory that the host tier needs",
            "a directory on ext4 or xfs",
        )
    if drive.rotational and drive.read_bytes_per_s is None:
        asks = "offloadzero bench nvme, or --measure, tells what this one gives"
        yield Finding(
            f"{at} is on a disk that says it rotates",
            f"a virtual machine's disk says so of any drive behind it; {asks}"
            if is_virtual
            else f"such disks give 0.2 GB/s; {asks}",
            None if is_virtual else "name a directory on an NVMe drive",
            Severity.NOTE if is_virtual else Severity.HURTS,
        )
    yield from _slow(drive)


def _slow(drive: Drive) -> Iterator[Finding]:
    for what, rate in (("read", drive.read_bytes_per_s), ("write", drive.write_bytes_per_s)):
        if rate is None or rate >= SLOW_DRIVE:
            continue
        seconds = BYTES_PER_PARAM[what] * 1e9 / rate
        yield Finding(
            f"{drive.path}: the drive can {what} {rate / 1e9:.2f} GB/s",
            f"with everything on it that is {seconds:.0f} s of a step for each billion parameters, in the fp32 layout",
            'a faster drive, several (a directory on each), or "state_layout": "compact"',
        )
