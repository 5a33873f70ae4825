"""The names of a record's segments and of the tiers they live on, which the whole package uses."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class TierName(str, Enum):
    """A place with a capacity and a bandwidth. Each is one of the three below: [Note: what is asked of a tier]."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    @property
    def is_device(self) -> bool:
        """Whether kernels that are launched on the device address the tier."""
        return self is TierName.DEVICE

    @property
    def is_host_memory(self) -> bool:
        """Whether code on the host addresses the tier. Copies between it and the device then need no staging."""
        return self is TierName.HOST

    @property
    def is_file(self) -> bool:
        """Whether nothing addresses the tier: what lives there is read into host memory and written from it."""
        return self is TierName.NVME


class SegmentKind(str):
    """The name of one contiguous piece of a record: one of those below, or a state of the optimizer.

    States have the names of torch's state dicts: `SegmentKind("exp_avg")`. A name is one object, however it is made, so
    names may be compared with `is`.
    """

    __slots__ = ()

    PARAM: ClassVar[SegmentKind]
    MASTER: ClassVar[SegmentKind]
    SCALES: ClassVar[SegmentKind]  # the scales of the compact layout
    GRAD: ClassVar[SegmentKind]
    STATES: ClassVar[SegmentKind]  # in rules of placement: the master and every state of the optimizer
    _known: ClassVar[dict[str, SegmentKind]] = {}

    def __new__(cls, name: str) -> SegmentKind:
        """The object of that name."""
        return cls._known.setdefault(name, super().__new__(cls, name))

    @property
    def value(self) -> str:
        """The name."""
        return str(self)


SegmentKind.PARAM = SegmentKind("param")
SegmentKind.MASTER = SegmentKind("master")
SegmentKind.SCALES = SegmentKind("scales")
SegmentKind.GRAD = SegmentKind("grad")
SegmentKind.STATES = SegmentKind("states")
