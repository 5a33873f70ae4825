"""The names of a record's segments and of the tiers they live on, which the whole package uses."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class TierName(str, Enum):
    """A place with a capacity and a bandwidth."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


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
