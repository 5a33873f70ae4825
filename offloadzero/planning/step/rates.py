"""The rates of a machine: the bytes and operations per second of each lane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from offloadzero.observe.timeline import D2H, H2D, LANDING, NVME_READ, NVME_WRITE, UPDATE

NVME_MIXED = "nvme"  # [Note: one drive for both directions]
LINKS, NETWORK, HOST_MEMORY = "links", "network", "host memory"  # [Note: lanes between ranks]
THROUGH_HOST_MEMORY = (H2D, D2H, UPDATE, LANDING, NVME_READ, NVME_WRITE)
FP32, COMPACT = "fp32", "compact"
COPY, DRIVE = "copy", "drive"
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Table = Mapping[str, float]


class Computation(NamedTuple):
    """The rates of a model's computation, in operations per second; on the CPU of its cores' time."""

    forward: float
    backward: float
    core_share: float = 1.0  # of the cores' time in both, that in which they compute


@dataclass(frozen=True)
class Rates:
    """The rates of one machine, in bytes and operations per second. A rate that is None is not known."""

    flops: Table = field(default_factory=dict)  # in a transformer block, by dtype of the parameters
    # In its backward, without what is computed again; where it is not known it is taken for that of `flops`.
    gradient_flops: Table = field(default_factory=dict)
    # Of the cores' time in a block's forward and backward, the part in which they compute; not known: all of it.
    core_shares: Table = field(default_factory=dict)
    update: Table = field(default_factory=dict)  # bytes moved by updates on the host, by state layout
    device_update: Table = field(default_factory=dict)  # the same on the device
    copy: float | None = None  # host memory to host memory, one thread
    landing: float | None = None  # gradients that are measured, all threads
    h2d: float | None = None
    d2h: float | None = None
    nvme_read: float | None = None
    nvme_write: float | None = None
    nvme_mixed: float | None = None
    nvme_cpu_s_per_byte: float | None = None
    # Where the CPU is the device, seconds that computation loses for each byte of a "copy", of the "drive" or of
    # updates, by state layout: [Note: work beside the computation] in cli/plan/beside.py.
    holds: Table = field(default_factory=dict)
    nvme_beside: float | None = None  # part of its rate that the drive has beside it; not known: all
    unit_s: float | None = None  # seconds of Python for each use of a unit
    # Of several ranks, each one's: [Note: lanes between ranks].
    collectives: float | None = None
    links: float | None = None  # each way
    network: float | None = None  # each way
    host_memory: float | None = None
    collective_s: float | None = None  # seconds of a collective beside its bytes; None: they are left out

    def with_computation(self, dtype: str, found: Computation, *, shares_cores: bool) -> Rates:
        """Return these rates with the computation of one model's micro batch in the place of any block's."""
        return replace(
            self,
            flops={**self.flops, dtype: found.forward},
            gradient_flops={**self.gradient_flops, dtype: found.backward},
            core_shares={**self.core_shares, dtype: found.core_share} if shares_cores else self.core_shares,
        )
