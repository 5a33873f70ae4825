"""Machines that are not at hand: devices, host memory, drives and what joins them, as a file that is written by hand.

[Note: a cluster]
All machines are alike. A rank has one device, its own links and its own way to the host; the host's memory, its cores,
the drives and the machine's network are shared evenly by the ranks of a machine.

[Note: bytes between ranks]
Of k ranks in a group, a on each of k/a machines, an all-gather of B bytes in all brings each machine what it has not
itself, B (1 - a/k), once, spread over its a ranks; these pass it on to each other. So a rank receives B (1/a - 1/k)
through the network and B (1 - 1/a) over the links. No way sends less through the network, and rings that go round all
ranks send little more. A reduce-scatter is the same backwards, an all-reduce both. An all-to-all of B bytes that a rank
sends goes in k equal parts, k - a of them through the network and a - 1 over the links.

A lane's seconds are its bytes over the rate in one direction. That of a machine's network is shared by its ranks, which
are in as many groups of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offloadzero.errors import ConfigError
from offloadzero.observe.collectives import ALL_REDUCE, ALL_TO_ALL
from offloadzero.observe.timeline import COLLECTIVES, LANDING
from offloadzero.planning.hardware import Hardware, Memory, share_of
from offloadzero.planning.result_file import Reader, load_json, parse_json
from offloadzero.planning.step.forecast import COMPACT, FP32, Rates, Step
from offloadzero.planning.step.work import (
    FAR_GRADIENTS,
    HOST_MEMORY,
    LINKS,
    NEAR_GRADIENTS,
    NEAR_WEIGHTS,
    NETWORK,
    OF_TENSORS,
    THROUGH_HOST_MEMORY,
    StepTraffic,
)
from offloadzero.ranks.shard import MAX_RANKS
from offloadzero.update.spec import UpdateForm

FORMAT = "offloadzero.cluster"
FORMAT_VERSION = 1
GB, TB, GIB = 1e9, 1e12, 1 << 30
_DTYPES = ("bf16", "fp16", "fp32")

# By table of the file: its entries, and whether they must be there.
_ENTRIES: Mapping[str, Mapping[str, bool]] = {
    "gpu": {"name": False, "memory_gib": True, "tflops": False, "memory_gb_per_s": True},
    "host": {"memory_gib": True, "gb_per_s": True, "cores": False},
    "pcie": {"to_gpu_gb_per_s": True, "from_gpu_gb_per_s": True, "machine_gb_per_s": False},
    "drives": {
        **dict.fromkeys(("number", "size_gb", "read_gb_per_s", "write_gb_per_s"), True),
        "mixed_gb_per_s": False,
    },
    "links": {"gb_per_s": False},  # True of several devices of a machine
    "network": {"gb_per_s": False},  # True of several machines
}


@dataclass(frozen=True)
class Cluster:
    """So many machines: [Note: a cluster].

    `machine` has the memory and rates of one of them; of links, h2d and d2h they are those of one device, of the
    network those of the machine. Rates in bytes and operations per second.
    """

    num_machines: int
    gpus_per_machine: int
    machine: Hardware
    described: Mapping[str, Any]  # the file
    # Bytes per second each way between host and all devices of a machine; None: each has its own in full.
    machine_link: float | None

    @property
    def num_gpus(self) -> int:
        return self.num_machines * self.gpus_per_machine

    def local_ranks(self, key: str, num_ranks: int) -> int:
        """Return how many of so many ranks are on a machine. Raises ConfigError where machines have different ones."""
        if num_ranks <= self.gpus_per_machine:
            return num_ranks
        if num_ranks > self.num_gpus or num_ranks % self.gpus_per_machine:
            allowed = (
                f"at most {self.gpus_per_machine}, those of a machine, or all of some of the {self.num_machines:,} "
                f"machines, up to {self.num_gpus:,}"
            )
            raise ConfigError(key, num_ranks, allowed)
        return self.gpus_per_machine

    def rank(self, num_local: int) -> Hardware:
        """Return what each of so many ranks of a machine has of it; the memory is the machine's."""
        found = share_of(self.machine, num_local)
        rates, whole = found.rates, self.machine.rates
        network = None if whole.network is None else whole.network / num_local
        ways: dict[str, Any] = {"h2d": rates.h2d, "d2h": rates.d2h}
        of_machine = self.machine_link
        if of_machine is not None:
            ways = {name: min(rate or of_machine, of_machine / num_local) for name, rate in ways.items()}
        return replace(found, rates=replace(rates, network=network, **ways))

    def left_out(self) -> Iterator[str]:
        yield "ranks that are slower than others, or wait for data"
        yield "traffic of others on the network, and switches with less than all their machines can send"
        yield "what the ranks agree on over the network of the hosts, some bytes per unit"
        if self.described.get("collective_us") is None:
            yield "the start of each collective (collective_us)"
        if self.described.get("unit_us") is None:
            yield "Python for each unit (unit_us)"


# --- the file ---


def find_cluster(key: str, path: str) -> Cluster | None:
    """Read the description of a cluster, for a command's argument `key`; None where a file describes none.

    Raises ConfigError for one that is wrong. Whoever reads the file as something else says why it cannot be read.
    """
    try:
        value = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        return None
    return cluster_from_json(key, load_json(key, path, format_name=FORMAT, format_version=FORMAT_VERSION))


def cluster_from_json(key: str, value: Mapping[str, Any]) -> Cluster:
    """Make the cluster of an object in JSON: docs/plan.md says its entries. Raises ConfigError."""
    top = Reader(key, value)
    top.expect(
        "format", "format_version", "machines", "gpus_per_machine", *_ENTRIES, "collective_us", "unit_us"
    )
    tables = {name: top.table(name) for name in _ENTRIES}
    for table in tables.values():
        table.expect(*_ENTRIES[table.name.rpartition(".")[2]])
    num_machines, gpus = _whole(top, "machines"), _whole(top, "gpus_per_machine")
    if num_machines * gpus > MAX_RANKS:
        raise ConfigError(f"{key}.machines", num_machines, f"at most {MAX_RANKS:,} devices in all")
    for name, entries in _ENTRIES.items():
        is_there = name != "drives" or value.get("drives") is not None
        of_several = (name == "links" and gpus > 1) or (name == "network" and num_machines > 1)
        for entry, is_needed in entries.items():
            if ((is_needed and is_there) or of_several) and tables[name].value.get(entry) is None:
                allowed = "a positive number: it is needed for a forecast"
                raise ConfigError(f"{key}.{name}.{entry}", None, allowed)
    rates = _rates(tables, starts_us=top.number("collective_us"), unit_us=top.number("unit_us"))
    return Cluster(
        num_machines,
        gpus,
        _machine(key, tables, rates),
        described=value,
        machine_link=_gb(tables["pcie"], "machine_gb_per_s"),
    )


def _machine(key: str, tables: Mapping[str, Reader], rates: Rates) -> Hardware:
    gpu, host, drives = tables["gpu"], tables["host"], tables["drives"]
    name = gpu.value.get("name", "GPU")
    if not isinstance(name, str):
        raise ConfigError(f"{key}.gpu.name", name, "a name")
    nvme = int((drives.number("number") or 0) * (drives.number("size_gb") or 0) * GB)  # 0: it has none
    memory = Memory(
        host=int((host.number("memory_gib") or 0) * GIB),
        device=int((gpu.number("memory_gib") or 0) * GIB),
        nvme=nvme,
    )
    return Hardware(
        memory, rates, num_cores=host.count("cores") or 1, device=name, adam_form=UpdateForm.TRITON
    )


def _rates(tables: Mapping[str, Reader], *, starts_us: float | None, unit_us: float | None) -> Rates:
    """Return the rates of a machine, of which those of links, h2d and d2h are one device's.

    An update, and a landing, has the speed of the memory that it passes through.
    """
    gpu, host, pcie, drives = tables["gpu"], tables["host"], tables["pcie"], tables["drives"]
    num_drives = drives.number("number") or 0
    of_drives: dict[str, Any] = {
        f"nvme_{what}": None if rate is None else num_drives * rate * GB
        for what in ("read", "write", "mixed")
        for rate in (drives.number(f"{what}_gb_per_s"),)
    }
    of_host, of_gpu = _gb(host, "gb_per_s"), _gb(gpu, "memory_gb_per_s")
    layouts = (FP32, COMPACT)
    return Rates(
        flops=_flops(gpu),
        update={} if of_host is None else dict.fromkeys(layouts, of_host),
        device_update={} if of_gpu is None else dict.fromkeys(layouts, of_gpu),
        landing=of_host,
        h2d=_gb(pcie, "to_gpu_gb_per_s"),
        d2h=_gb(pcie, "from_gpu_gb_per_s"),
        unit_s=0.0 if unit_us is None else unit_us / 1e6,
        links=_gb(tables["links"], "gb_per_s"),
        network=_gb(tables["network"], "gb_per_s"),
        host_memory=of_host,
        collective_s=None if starts_us is None else starts_us / 1e6,
        **of_drives,
    )


def _flops(gpu: Reader) -> dict[str, float]:
    """Return the operations per second by dtype; one number is that of both dtypes of 16 bits."""
    if isinstance(gpu.value.get("tflops"), Mapping):
        table = gpu.table("tflops")
        table.expect(*_DTYPES)
        return {dtype: rate * TB for dtype, rate in gpu.numbers("tflops").items()}
    rate = gpu.number("tflops")
    return {} if rate is None else dict.fromkeys(("bf16", "fp16"), rate * TB)


def _gb(table: Reader, name: str) -> float | None:
    rate = table.number(name)
    return None if rate is None else rate * GB


def _whole(reader: Reader, name: str) -> int:
    found = reader.value.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ConfigError(f"{reader.name}.{name}", found, f"a whole number from 1 to {MAX_RANKS:,}")
    return found


# --- the lanes ---


def between_ranks(kind: str, num_bytes: float, *, num_ranks: int, num_near: int) -> tuple[float, float]:
    """Return the bytes that a rank receives over links and through the network: [Note: bytes between ranks].

    `num_near` ranks of the group are on each machine.
    """
    k, a = num_ranks, num_near
    if kind == ALL_TO_ALL:
        return num_bytes * (a - 1) / k, num_bytes * (k - a) / k
    times = 2 if kind == ALL_REDUCE else 1
    return times * num_bytes * (1 - 1 / a), times * num_bytes * (1 / a - 1 / k)


def on_cluster(step: Step, *, num_local: int, node_ranks: int) -> Step:
    """Return the step with the lanes of a cluster in the place of `collectives`.

    Args:
        num_local: ranks on each machine.
        node_ranks: consecutive ranks that keep copies of weights together; 1: none do.
    """
    groups = {
        NEAR_WEIGHTS: (node_ranks, math.gcd(node_ranks, num_local)),
        **_gradient_groups(step.num_ranks, node_ranks if node_ranks > 1 else num_local, num_local),
    }
    traffic = step.traffic
    by_phase: dict[str, dict[str, int]] = {}
    starts: dict[str, dict[str, int]] = {}
    for phase, lanes in traffic.by_phase.items():
        links = network = 0.0
        starts[phase] = {LINKS: 0, NETWORK: 0}
        for key, count in traffic.collectives.get(phase, {}).items():
            purpose, _, kind = key.partition(" ")
            if purpose in OF_TENSORS:
                num_ranks, num_near = groups.get(purpose, (step.num_ranks, num_local))
                near, far = between_ranks(kind, count.num_bytes, num_ranks=num_ranks, num_near=num_near)
                links, network = links + near, network + far
                starts[phase][LINKS] += count.num_calls if near else 0
                starts[phase][NETWORK] += count.num_calls if far else 0
        by_phase[phase] = {lane: size for lane, size in lanes.items() if lane != COLLECTIVES}
        added = {LINKS: round(links), NETWORK: round(network), HOST_MEMORY: _through_host(traffic, phase)}
        by_phase[phase] |= {lane: size for lane, size in added.items() if size}
    return replace(step, traffic=replace(traffic, by_phase=by_phase, starts=starts))


def _gradient_groups(num_ranks: int, machine_ranks: int, num_local: int) -> dict[str, tuple[int, int]]:
    """Return the ranks of the groups in which gradients go as codes, and those of them on one machine."""
    return {
        NEAR_GRADIENTS: (machine_ranks, math.gcd(machine_ranks, num_local)),
        FAR_GRADIENTS: (num_ranks // machine_ranks, max(1, num_local // machine_ranks)),
    }


def _through_host(traffic: StepTraffic, phase: str) -> int:
    """Return the bytes that a phase reads and writes in the host's memory; a copy or a transfer does one of both."""
    lanes = traffic.by_phase[phase]
    measured_there = traffic.measured_on_device if lanes.get(LANDING) else 0
    return sum(lanes.get(lane, 0) for lane in THROUGH_HOST_MEMORY) - measured_there
