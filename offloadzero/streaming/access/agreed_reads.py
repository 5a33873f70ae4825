"""What the ranks tell each other before they read values of which each keeps a part.

[Note: ranks say what they read]
In a read each rank sends the others the part that it keeps, so one that reads something else would get a mixture, or,
with another size, end the process inside of gloo. Before each read every rank tells the others what it is about to do,
in numbers of a fixed size: a departure is an error on all of them, before any value is touched. A rank that has all
parts goes on, and hears at its next collective of another one that failed in the read.

[Note: the first rank reads, the others follow]
Some work with all values is done by one rank alone, the writing of a checkpoint say. The first rank does it in
`read_by_first`: its announcement before each read leads the others, which answer until it announces the end, or an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from offloadzero.core.segments import SegmentKind
from offloadzero.errors import RankError, StateError
from offloadzero.memory.tickets import Failures
from offloadzero.observe.clock import StepClock
from offloadzero.ranks.failure_store import is_fake
from offloadzero.ranks.group import Group
from offloadzero.streaming.access.collective_acts import BlockAct
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

# The next act of a rank: a read, by the record's number, of its own or one that leads the others, a BlockAct, or one of
_ENDED, _FAILED, _FOLLOWS, _NORMS, _LOADS = -1, -2, -3, -7, -8

Read = Callable[[Record, ParamSlot, SegmentKind], object]


class Announcements:
    """Tells the other ranks the next act of this one, and compares it with theirs."""

    def __init__(
        self, group: Group, records: Sequence[Record], *, clock: StepClock, failures: Failures
    ) -> None:
        self._channel = group.states
        self._is_first = group.is_first
        self._is_alone = group.is_alone
        self._records = records
        self._clock = clock
        self._failures = failures
        self._leads = self._follows = False
        self._has_departed = False

    def announce_read(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> None:
        """Tell the others that a parameter's part of a segment is read next. Raises StateError unless all read it.

        The caller waits for a state or a gradient; a rank that follows the first one has been told already.
        """
        if not self._follows:
            self._say(record.index, slot.index, _kinds(record).index(kind))

    def announce_block(self, act: BlockAct, num_params: int, modifier: int, *, label: str) -> None:
        """Tell the others an act on gathered parameters. Raises StateError unless all do the same.

        The caller waits for a state.
        """
        self._say(act, num_params, modifier, label=label)

    def announce_gradient_norms(self, num_records: int) -> None:
        """Tell the others that the norms of so many units' gradients are read next. Raises StateError unless all do.

        The caller waits for a gradient.
        """
        self._say(_NORMS, num_records)

    def announce_load(self) -> None:
        """Tell the others that a checkpoint is loaded next: what is agreed on then has the sizes of nothing else.

        Raises StateError on all ranks unless all of them do.
        """
        if not self._is_alone:
            with self._clock.waiting("state access"), self._failures.handed_over():
                self._say(_LOADS)

    def read_by_first(self, work: Callable[[], None], read: Read) -> None:
        """Do `work` on the first rank: [Note: the first rank reads, the others follow]. All ranks call this.

        `read` is what the others do at each of its reads. Raises the error of `work`; on the other ranks a RankError
        with its text.
        """
        if not self._is_first:
            self._follow(read)
            return
        self._leads = True
        try:
            try:
                work()
            except BaseException as error:
                if not self._has_departed:  # else the others know already
                    with suppress(RankError):  # then the collective in which the error came has told them
                        self._give_up(f"{type(error).__name__}: {error}".encode())
                raise
            self._say(_ENDED)
        finally:
            self._leads = False

    def _give_up(self, why: bytes) -> None:
        self._say(_FAILED, num_said=len(why))
        said = torch.tensor(list(why), dtype=torch.uint8, device="cpu")
        self._channel.broadcast(said, "what the first rank says")

    def _follow(self, read: Read) -> None:
        while True:
            index, place, kind, num_said = self._say(_FOLLOWS)
            if index == _ENDED:
                return
            if index == _FAILED:
                said = torch.empty(num_said, dtype=torch.uint8, device="cpu")
                self._channel.broadcast(said, "what the first rank says")
                raise RankError(
                    f"rank {self._channel.members[0]}: {bytes(said.tolist()).decode(errors='replace')}"
                )
            record = self._records[index]
            self._follows = True
            try:
                read(record, record.slots[place], record.spec.kinds[kind])
            finally:
                self._follows = False

    def _say(
        self,
        what: int,
        place: int = 0,
        kind: int = 0,
        *,
        num_said: int = 0,
        label: str | None = None,
    ) -> list[int]:
        """Tell the others the next act: [Note: ranks say what they read]. Returns that of the first rank."""
        own = [what, place, kind, num_said, int(self._leads)]
        if self._is_alone:
            return own[:-1]
        act = label or f"what the ranks do ({self._text(*own)})"
        if is_fake():
            raise StateError(f"{act}: the other ranks' parts are not there in torch's fake process group")
        by_rank = self._channel.by_rank(own, act)
        first, *others = by_rank
        fitting = [_FOLLOWS, 0, 0, 0, 0] if first[-1] else first
        if first[0] == _FOLLOWS or any(other != fitting for other in others):
            texts = [
                f"rank {rank} {self._text(*words)}"
                for rank, words in zip(self._channel.members, by_rank, strict=True)
            ]
            self._has_departed = True
            raise StateError(
                f"{', '.join(texts)} (this is rank {self._channel.rank}): all ranks must read the same weights "
                "and states in the same order, gather the same parameters, and save together"
            )
        return first[:-1]

    def _text(self, what: int, place: int, kind: int, _: int, leads: int) -> str:
        """Describe an act in an error message."""
        if what in (_FOLLOWS, _ENDED, _FAILED):
            return "saves"
        if what == _LOADS:
            return "loads a checkpoint"
        if what == _NORMS:
            return f"asks for the norms of the gradients of {place} units"
        if what < 0:
            return BlockAct(what).text(place, kind)
        record = self._records[what]
        name = f"{record.slots[place].name} ({_kinds(record)[kind].value})"
        return f"reads {name}{' to save it' if leads else ''}"


def _kinds(record: Record) -> list[SegmentKind]:
    """The kinds of segments that ranks read together, by the numbers that they tell each other."""
    return [*record.spec.kinds, SegmentKind.GRAD]
