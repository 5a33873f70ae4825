"""What a durable run needs of its last commit, as updates and writes see it.

[Note: durable runs]
A durable run can be continued from its files, whenever it ends: by kill -9, a power failure, or as it should. After
each step, or each so many, a commit says what the states are then. Those on NVMe are not copied for it. Their segments
have two places: an update reads the present one and writes the next one, then they are exchanged, and the commit notes
which one is present and is made when the drive has it (fdatasync). All else that training has is written beside it:
states in memory, without frozen weights, which the model has; buffers, counters, the schedule, random states, what the
script adds. So a commit costs no bytes on NVMe beyond these, and one step is lost at most.

What a commit needs is not written before the next one is made. That is all the order there is:

- A step's updates begin when the commit of the step before is made, on all ranks (`Commits.complete`): then no place
  belongs to an older one. The commit is made in the background, while the next forward runs.
- A step counts its updates (`ParamSlot.step`) when that commit has taken the counts (`Commits.counted`).
- A script's write comes after the commit, and where the present place belongs to it, after a copy of all of that into
  the next one (`Committed`). An update that follows writes where it reads, as a run does that is not durable: the
  other place belongs to the commit.

Of several ranks each has commits of its own. It keeps the one before until all ranks have the new one, so there always
is one that all have.
"""

from __future__ import annotations

from enum import Enum

from offloadzero.memory.tickets import FINISHED, AllOf, Ticket, unfinished


class Committed(Enum):
    """The place of a record's segments that belongs to the last commit, and may not be written."""

    NONE = "none"
    PRESENT = "present"
    NEXT = "next"

    def flipped(self) -> Committed:
        """The same when the two places have been exchanged."""
        return {Committed.PRESENT: Committed.NEXT, Committed.NEXT: Committed.PRESENT}.get(self, self)


class Commits:
    """The last commit of a run, for all of its records: [Note: durable runs]. Of a run that is not durable, none."""

    def __init__(self) -> None:
        self.counted: Ticket = FINISHED  # the counts of the last step are taken
        self.complete: Ticket = FINISHED  # the commit is made, on all ranks

    def after(self, update: Ticket) -> Ticket:
        """Return the ticket of what a record's next update comes after: its last `update`, and the commit."""
        complete = unfinished(self.complete)
        return update if complete is FINISHED else AllOf([update, complete])

    def begin(self, counted: Ticket, complete: Ticket) -> None:
        """Note the next commit. On the script's thread, between two steps."""
        self.counted, self.complete = counted, complete
