"""`offloadzero doctor`: the properties of this machine that slow training down, and the commands that mend them."""

from __future__ import annotations

import argparse
import json
import os
import resource
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offloadzero.cli.checkup import Drive, Facts, Finding, Severity, check
from offloadzero.cli.output import check_output, print_lines, save_json
from offloadzero.planning.machine import (
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
    from offloadzero.cli.bench.scratch import check_directories

    if args.json != "-":
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
    if args.json == "-":
        print_lines([json.dumps(result, indent=1, allow_nan=False)])
    else:
        print_lines(lines_of(facts, found))
        if args.json:
            save_json(args.json, result)
    return HURTS if any(one.severity is Severity.HURTS for one in found) else 0


def lines_of(facts: Facts, found: Sequence[Finding]) -> list[str]:
    """Return the findings as lines of text."""
    lines = [
        f"{facts.device or 'the CPU'} as the device, {facts.usable_cores} cores with {facts.isa} kernels, "
        f"{facts.memory_bytes / 2**30:.1f} GiB of memory, file engine {facts.file_engine}"
    ]
    for drive in facts.drives:
        line = f"{drive.path}: {drive.filesystem}, {drive.direct_reason}, {drive.free_bytes / 2**30:.1f} GiB free"
        if drive.read_bytes_per_s is not None and drive.write_bytes_per_s is not None:
            line += f", {drive.read_bytes_per_s / 1e9:.2f} GB/s read, {drive.write_bytes_per_s / 1e9:.2f} GB/s written"
        lines.append(line)
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
    """Collect the facts of the drive under a directory."""
    from offloadzero.cli.bench.scratch import scratch_files

    described = describe_path(path)
    disk = described["device"]
    with scratch_files([path]) as files, engine.open(files[0].path) as file:
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
