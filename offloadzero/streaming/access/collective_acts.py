"""Acts of all ranks together on parameters that a script has gathered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

_NOBODY = -(1 << 62)  # the number of modifier_rank=None, which no other has


class Place(NamedTuple):
    """A parameter and its record."""

    record: Record
    slot: ParamSlot


class Block(Protocol):
    """The block of a script in which parameters are gathered."""

    modifier_rank: int | None

    @property
    def places(self) -> Sequence[Place]:
        """The parameters, in the order of the model."""

    def commit(self, indices: Collection[int] | None = None) -> None:
        """Write what was written into the parameters of these records, None: of all, before a forward uses them."""


class BlockAct(IntEnum):
    """An act of all ranks; negative, where the number of a record says that it is read."""

    ENTERS = -4
    LEAVES = -5
    COMPUTES = -6

    @staticmethod
    def number_of(modifier_rank: int | None) -> int:
        """The number by which ranks tell each other who may write."""
        return _NOBODY if modifier_rank is None else modifier_rank

    def text(self, num_params: int, modifier: int) -> str:
        """Describe the act in an error message; `modifier` is a `number_of`."""
        modifier_rank = None if modifier == _NOBODY else modifier
        verb = {
            BlockAct.ENTERS: "enters",
            BlockAct.LEAVES: "leaves",
            BlockAct.COMPUTES: "begins a forward inside",
        }
        return f"{verb[self]} GatheredParameters of {num_params} parameters (modifier_rank={modifier_rank})"
