"""What the ranks tell each other before they do something together, mostly read values of which each keeps a part.

[Note: ranks say what they read]
In a read each rank sends the others the part that it keeps, so one that reads something else would get a mixture, or,
with another size, end the process inside of gloo. Before each read every rank tells the others what it is about to do,
in numbers of a fixed size, one of them for a text: a departure is an error on all of them, before any value is touched.
Only then do they tell each other the texts. A rank that has all parts goes on, and hears at its next collective of
another one that failed in the read.

[Note: the first rank reads, the others follow]
Some work with all values is done by one rank alone, the writing of a checkpoint say. The first rank does it in
`read_by_first`: its announcement before each read leads the others, which answer until it announces the end, or an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from offloadzero.core.segments import SegmentKind
from offloadzero.errors import RankError, StateError
from offloadzero.ranks.failure_store import is_fake
from offloadzero.ranks.group import Collectives, digest
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

# Of a rank that is in another library's collective nothing tells that it will not come.
_ADVICE = (
    "All ranks must read it, as in state_dict(): one that saves alone waits for the others. Under the Trainer of "
    "transformers, take that of offloadzero.integrations.transformers, or put its CollectiveSaving before your class"
)
_SAVES = "saves"  # the act of a rank that follows the first one, or ends what leads the others
_ENDED, _FAILED = -1, -2  # in the place of a record's number, where the first rank reads no more
_SAID = "what the ranks say"

Read = Callable[[Record, ParamSlot, SegmentKind], object]


class Announcements:
    """Tells the other ranks the next act of this one, and compares it with theirs: [Note: ranks say what they read].

    The caller waits for a state or a gradient.
    """

    def __init__(self, channel: Collectives, records: Sequence[Record]) -> None:
        """Tell it in `channel`, which the calling thread alone uses."""
        self.channel = channel
        self._is_first = channel.spec.rank == 0
        self._records = {record.index: record for record in records}
        self.leads = self._follows = False  # `leads`: this rank reads, and the others follow
        self._has_departed = False

    def announce_read(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> None:
        """Tell the others that a parameter's part of a segment is read next. Raises StateError unless all read it.

        A rank that follows the first one has been told already.
        """
        if not self._follows:
            text = f"reads {slot.name} ({kind.value}){' to save it' if self.leads else ''}"
            number = record.spec.kinds.index(kind) if self.leads else 0
            self._say(text, record.index, slot.index, number, advice="" if self.leads else _ADVICE)

    def announce(self, act: str, *, label: str = "") -> None:
        """Tell the others what this rank does next. Raises StateError unless all do the same.

        `label`: what it is part of, for the error of a collective.
        """
        self._say(act, label=label)

    def read_by_first(self, work: Callable[[], object], read: Read) -> None:
        """Do `work` on the first rank: [Note: the first rank reads, the others follow]. All ranks call this.

        `read` is what the others do at each of its reads. Raises the error of `work`; on the other ranks a RankError
        with its text.
        """
        if not self._is_first:
            self._follow(read)
            return
        self.leads = True
        try:
            try:
                work()
            except BaseException as error:
                if not self._has_departed:  # else the others know already
                    with suppress(RankError):  # then the collective in which the error came has told them
                        self._say(_SAVES, _FAILED)
                        self.channel.texts(f"{type(error).__name__}: {error}", _SAID)
                raise
            self._say(_SAVES, _ENDED)
        finally:
            self.leads = False

    def _follow(self, read: Read) -> None:
        while True:
            index, place, kind = self._say(_SAVES)
            if index == _ENDED:
                return
            if index == _FAILED:
                raise RankError(f"rank {self.channel.members[0]}: {self.channel.texts('', _SAID)[0]}")
            record = self._records[index]
            self._follows = True
            try:
                read(record, record.slots[place], record.spec.kinds[kind])
            finally:
                self._follows = False

    def _say(
        self, act: str, index: int = 0, place: int = 0, kind: int = 0, *, label: str = "", advice: str = ""
    ) -> list[int]:
        """Tell the others the next act. Returns what the first rank reads, the numbers after `act`."""
        label = label or f"what the ranks do ({act})"
        if self.channel.spec.world_size > 1 and is_fake():
            raise StateError(f"{label}: the other ranks' parts are not there in torch's fake process group")
        own = [digest(act), int(self.leads), index, place, kind]
        first, *others = self.channel.by_rank(own, label, advice=advice)
        expected = [digest(_SAVES), 0, 0, 0, 0] if first[1] else first
        if any(other != expected for other in others):
            self._has_departed = True
            texts = zip(self.channel.members, self.channel.texts(act, _SAID), strict=True)
            raise StateError(
                f"{', '.join(f'rank {rank} {text}' for rank, text in texts)} (this is rank {self.channel.rank}): all "
                "ranks must read the same weights and states in the same order, gather the same parameters, and save "
                "together"
            )
        return first[2:]
