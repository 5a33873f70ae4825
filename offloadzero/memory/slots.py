"""Equal slots of an address space, one for each owner as long as there are enough.

[Note: a slot each]
Pieces of mixed sizes that come and go leave holes: the number of free bytes says little about the pieces that still
fit. So an owner packs its pieces into a slot that no other owner uses, and as many owners as there are slots find room
whatever came before, if the pieces of each, rounded up to the alignment, fit in one slot. An owner beyond that number,
or one with more than a slot's bytes, gets free bytes of any slot.
"""

from __future__ import annotations

from offloadzero.memory.arena import Holes, align_up


class Slots:
    """Offsets in equal slots: [Note: a slot each]. An owner is a number of the caller's choice. Not thread-safe."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_bytes = num_slots * slot_bytes
        self._slot_bytes = slot_bytes
        self._slots = [Holes(slot_bytes) for _ in range(num_slots)]
        self._slot_of: dict[int, int] = {}  # by owner, as long as its slot holds a piece

    @property
    def free_bytes(self) -> int:
        """The free bytes in all slots together."""
        return sum(slot.num_bytes for slot in self._slots)

    @property
    def largest_bytes(self) -> int:
        """The largest free piece in any slot."""
        return max((slot.largest_bytes for slot in self._slots), default=0)

    def take(self, owner: int, num_bytes: int) -> int | None:
        """Take `num_bytes` in the owner's slot, or in an unused one, which is then the owner's; return the offset."""
        own = self._slot_of.get(owner)
        offset = self._take_in(own, num_bytes) if own is not None else None
        if offset is not None:
            return offset
        unused = (i for i, slot in enumerate(self._slots) if slot.num_bytes == self._slot_bytes)
        index = next(unused, None)
        offset = self._take_in(index, num_bytes) if index is not None else None
        if index is not None and offset is not None:
            self._slot_of[owner] = index
        return offset

    def take_anywhere(self, num_bytes: int) -> int | None:
        """Take `num_bytes` in the first slot that has them, of any owner; return the offset."""
        offsets = (self._take_in(index, num_bytes) for index in range(len(self._slots)))
        return next((offset for offset in offsets if offset is not None), None)

    def give(self, offset: int, num_bytes: int) -> None:
        """Free a piece again."""
        index, start = divmod(offset, self._slot_bytes)
        self._slots[index].give(start, align_up(num_bytes))
        if self._slots[index].num_bytes == self._slot_bytes:
            self._slot_of = {owner: slot for owner, slot in self._slot_of.items() if slot != index}

    def _take_in(self, index: int, num_bytes: int) -> int | None:
        offset = self._slots[index].take(align_up(num_bytes))
        return None if offset is None else index * self._slot_bytes + offset
