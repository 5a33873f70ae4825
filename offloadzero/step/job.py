"""The jobs of a step, one for each record, handed on from stage to stage, and the account of what became of it.

[Note: what an interrupted step leaves]
`step()` first does all that waits or may raise, and this changes nothing; then it hands the gradients over, which is
done as a whole. So a step was taken or it was not. Where gradients are applied at the step, a backward that did not
end, or a gradient that is not finite, has changed no state: `zero_grad()` drops the gradients and training goes on.

Where they are applied in backward, an interrupt that comes after the first update has begun waits for the end of that
backward, and `step()` closes the step. After a second interrupt, or a gradient that is not finite, some units may have
taken the step and others not. Training cannot go on from that state. It can be read and saved, and the error says which
units are which; a checkpoint that is loaded replaces it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from offloadzero.errors import OffloadError
from offloadzero.memory.tickets import FINISHED, AllOf, Promise, Ticket, unfinished
from offloadzero.step.record_gradient import RecordGradient, end_trial
from offloadzero.step.step_decision import StepDecision
from offloadzero.update.commits import Committed
from offloadzero.update.pipeline import RecordUpdate
from offloadzero.update.spec import Hyper

Hypers = Sequence[Hyper]  # by group index

MAX_NAMES = 12  # units named in a message


def names_text(names: Sequence[str]) -> str:
    """Return the names of units for a message."""
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


@dataclass(eq=False)
class Account:
    """One step: its hyperparameters, and the units that it has updated: [Note: what an interrupted step leaves]."""

    step: int
    hypers: Hypers = ()
    applied: list[str] = field(default_factory=list)  # units that backward has updated, by name
    refused: OffloadError | None = None  # the error for which backward updates no more units
    landed_sq_norms: list[float] = field(default_factory=list)  # of gradients whose update is to be tried
    is_closed: bool = False  # step() has come after the backward that updates

    def close(self) -> None:
        """Note that step() has come after the backward that updates."""
        self.is_closed = True

    def note_applied(self, name: str) -> None:
        """Note that backward updates the unit of that name."""
        self.applied.append(name)

    def refuse(self, error: OffloadError | None) -> None:
        """Let backward update no more units, because of `error`; None: nothing stands against them."""
        self.refused = error


@dataclass
class TrialCount:
    """Counts the trials since the last decision. On the pipeline's thread."""

    num_begun: int = 0

    def take(self) -> int:
        """Return the number, and begin anew."""
        num_begun, self.num_begun = self.num_begun, 0
        return num_begun


class Trial(RecordUpdate):
    """An update that is tried before its step is decided: [Note: versions] in update/pipeline.py.

    Whoever may change what it has read gives it up: the script, another backward, the decision. It is over then, or its
    ticket says when.
    """

    is_trial = True

    def __init__(
        self,
        gradient: RecordGradient,
        account: Account,
        *,
        before: Ticket,
        grad_scale: float,
        count: TrialCount,
    ) -> None:
        """Make a trial with the factor `grad_scale`, which `count` counts; the rest is as for `UpdateJob`."""
        super().__init__(gradient.record, account.hypers, before=before)
        self.gradient = gradient
        self.account = account
        self.grad_scale = grad_scale
        self._count = count
        self._lock = threading.Lock()
        self.is_given_up = False
        self.has_begun = False
        self._num_edits = 0

    def may_begin(self) -> bool:
        """Begin, unless it was given up or a script writes the states just now. On the pipeline's thread."""
        with self._lock, self.record.edits.reading() as reads:
            if self.is_given_up:
                return False
            self._grad = self.gradient.for_update()
            # The place that it would write. While a commit is counted it becomes the present one.
            is_kept = self.record.committed is Committed.NEXT and self.record.commits.counted.done()
            if reads is None or self._grad is None or not self.gradient.is_full or is_kept:
                self._end()
                return False
            self.before = AllOf([self.before, *reads])  # the record's last trial writes where this one will
            reads.append(self.ticket)  # a script's write comes after it
            self._num_edits = self.record.edits.num_begun
            counts = [self.record.spec.counts_update(hyper) for hyper in self.hypers]
            self.ranges = [replace(r, step=r.step + counts[r.group_index]) for r in self.gradient.ranges()]
            self.has_begun = True
            self._count.num_begun += 1
            return True

    def give_up(self) -> Ticket:
        """Let no job adopt it from now on. Returns the ticket of the end of what it reads and writes."""
        with self._lock:
            self._end()
        return self.ticket

    def _end(self) -> None:
        if not self.has_begun and not self.is_given_up:
            self.ticket.fulfil()
        self.is_given_up = True

    def has_done(self, job: RecordUpdate) -> bool:
        """Whether what it has written is what `job` would write."""
        return (
            self.has_begun
            and not self.is_given_up
            and self.ticket.is_fulfilled
            and self._num_edits == self.record.edits.num_begun
            and (self.hypers, self.ranges, self.grad_scale) == (job.hypers, job.ranges, job.grad_scale)
        )


class UpdateJob(RecordUpdate):
    """Applies a record's gradient once it is home.

    The coordinator makes it. The stage that has it last ends it: `begin` hands it to the update, `cancel` and `fail`
    are the end. A fetch of the unit waits for its ticket.
    """

    def __init__(self, gradient: RecordGradient, account: Account, *, before: Ticket) -> None:
        """Make a job, as `RecordUpdate` says; its gradient is known when it begins."""
        super().__init__(gradient.record, account.hypers, before=before)
        self.gradient = gradient
        self.account = account

    def begin(self, *, grad_scale: float) -> None:
        """Begin the update: its parameters take the step, with the gradient as it is now."""
        self.record.commits.counted.wait()  # or the commit of the step before would have the counts of this one
        counts = [self.record.spec.counts_update(hyper) for hyper in self.hypers]
        for slot in self.gradient.present_slots:
            slot.step += counts[slot.group_index or 0]
        self._grad = self.gradient.for_update()
        if self._grad is None:
            raise AssertionError(f"{self.record.name} has no gradient")
        self.ranges = self.gradient.ranges()
        self.grad_scale = grad_scale
        trial = self.gradient.trial
        if trial is not None and trial.has_done(self):
            self.adopted = trial.ticket
        ended = end_trial(self.gradient)
        if self.record.makes_next_version:  # which is where the trial has written
            self.before = AllOf([self.before, ended])

    def release_gradient(self) -> None:
        self.gradient.release()

    def cancel(self) -> None:
        """End the job without an update: the values are those before the step."""
        end_trial(self.gradient)
        self.release_gradient()
        self.ticket.fulfil(unfinished(self.before))

    def fail(self, error: BaseException) -> None:
        """End the job with an error."""
        self.ticket.fail(error)
        self.release_gradient()


class StepJobs:
    """The jobs of one step, in the records' order, and the decision over them."""

    def __init__(
        self,
        account: Account,
        jobs: Sequence[UpdateJob] = (),
        *,
        before: Ticket = FINISHED,
        reads: Ticket = FINISHED,
        order: Sequence[int] | None = None,
        writes: int = 0,
    ) -> None:
        """Take the jobs of a step.

        Args:
            before: done when the step before has been decided: a step with nothing to decide comes after it.
            reads: done when the weights before the step have been read.
            order: of the records, in which they are updated if all of them are; None: nothing is left to decide.
            writes: the sum of the values that scripts had written when the step was taken.
        """
        self.account = account
        self.writes = writes
        self.jobs = tuple(jobs)
        self.reads = reads
        self._order = order or ()
        self.decided = Promise()
        if order is None:
            self.decided.fulfil(unfinished(before))
        self.decision: StepDecision | None = None  # None: each job was decided by itself, as it landed

    def decide(self, decision: StepDecision) -> None:
        """Take the decision over all of them."""
        self.decision = decision

    def in_order(self) -> list[UpdateJob]:
        """The jobs, in the order in which they are updated; first those that have nothing left to do."""
        by_record = {job.record.index: job for job in self.jobs}
        return sorted((by_record[index] for index in self._order), key=lambda job: job.adopted is None)

    @property
    def gradients(self) -> list[RecordGradient]:
        """The gradients with which the step was taken."""
        return [job.gradient for job in self.jobs]

    def sq_norms(self) -> list[float]:
        """The squared norms of all gradients that have landed."""
        return [sq_norm for job in self.jobs for sq_norm in job.gradient.sq_norms_by_slot()]
