"""The job of one record in one step, handed on from stage to stage: landing, update, home."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offloadzero.memory.store import Segment
from offloadzero.memory.tickets import FINISHED, Promise, Ticket, unfinished
from offloadzero.step.account import Account, Hypers
from offloadzero.step.record_gradient import RecordGradient
from offloadzero.step.step_decision import StepDecision
from offloadzero.update.delivery import UpdateTicket
from offloadzero.update.records import UpdateRange


class UpdateJob:
    """Applies a record's gradient once it is home: a RecordUpdate.

    The coordinator makes it. The stage that has it last ends it: `begin` hands it to the update, `cancel` and `fail`
    are the end. A fetch of the unit waits for its ticket.
    """

    def __init__(self, gradient: RecordGradient, account: Account, *, before: Ticket) -> None:
        """Make a job. `before`: done when what the update before this one has made is home, and on all ranks."""
        self.gradient = gradient
        self.before = before
        self.record = gradient.record
        self.account = account
        self.ticket = UpdateTicket()
        # Known when the job begins:
        self.ranges: Sequence[UpdateRange] = ()
        self.grad_scale = 1.0
        self._grad: torch.Tensor | Segment | None = None

    @property
    def hypers(self) -> Hypers:
        """The hyperparameters, by group index."""
        return self.account.hypers

    @property
    def grad(self) -> torch.Tensor | Segment:
        """The gradient in memory, or its segment on NVMe."""
        if self._grad is None:
            raise AssertionError(f"the update of {self.record.name} has not begun")
        return self._grad

    def begin(self, *, grad_scale: float) -> None:
        """Begin the update: its parameters take the step, with the gradient as it is now."""
        counts = [self.record.spec.counts_update(hyper) for hyper in self.hypers]
        for slot in self.gradient.present_slots:
            slot.step += counts[slot.group_index or 0]
        in_memory = self.gradient.in_memory()
        self._grad = in_memory if in_memory is not None else self.gradient.home
        if self._grad is None:
            raise AssertionError(f"{self.record.name} has no gradient")
        self.ranges = self.gradient.ranges()
        self.grad_scale = grad_scale

    def release_gradient(self) -> None:
        """Give back the gradient's memory: it has been read, or will not be."""
        self.gradient.release()

    def cancel(self) -> None:
        """End the job without an update: the values are those before the step."""
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
        """The jobs, in the order in which they are updated."""
        by_record = {job.record.index: job for job in self.jobs}
        return [by_record[index] for index in self._order]

    @property
    def gradients(self) -> list[RecordGradient]:
        """The gradients with which the step was taken."""
        return [job.gradient for job in self.jobs]

    def sq_norms(self) -> list[float]:
        """The squared norms of all gradients that have landed."""
        return [sq_norm for job in self.jobs for sq_norm in job.gradient.sq_norms_by_slot()]
