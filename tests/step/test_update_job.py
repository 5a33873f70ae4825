"""A record's job in a step: however it ends, its ticket says so and its buffer comes back once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offloadzero.memory.arena import Arena, BufferPool
from offloadzero.memory.tickets import FINISHED, Failures, Promise, Ticket
from offloadzero.native.hyper import AdamHyper
from offloadzero.step.job import Account, UpdateJob
from offloadzero.step.record_gradient import Borrowed, RecordGradient
from offloadzero.update.records import Record, make_record
from offloadzero.update.specs.adam import ADAM

SIZES = (5, 3)
HYPERS = (AdamHyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0),)


def make_job(
    *, present: frozenset[int], before: Ticket = FINISHED
) -> tuple[UpdateJob, BufferPool, torch.Tensor]:
    """A job whose gradient is in the one buffer of a pool."""
    record = make_small_record()
    pool = BufferPool(
        [Arena("host", torch.zeros(4096, dtype=torch.uint8)).lease(64, "one")], failures=Failures()
    )
    gradient = RecordGradient(record, present=present, passing=Borrowed(pool.take(), pool))
    flat = gradient.in_memory()
    assert flat is not None
    return UpdateJob(gradient, Account(7, HYPERS), before=before), pool, flat


def make_small_record() -> Record:
    params = [(f"p{i}", nn.Parameter(torch.zeros(size)), 0) for i, size in enumerate(SIZES)]
    return make_record(0, "unit", torch.bfloat16, params, spec=ADAM)


def test_a_job_that_begins_takes_the_step_of_what_has_a_gradient() -> None:
    job, pool, flat = make_job(present=frozenset({1}))
    job.begin(grad_scale=0.5)
    assert [slot.step for slot in job.record.slots] == [0, 1]
    (part,) = job.ranges
    assert (part.start, part.step) == (job.record.slots[1].offset, 1)
    assert part.stop >= part.start + SIZES[1]  # padding takes part, too
    assert isinstance(job.grad, torch.Tensor)
    assert job.grad.data_ptr() == flat.data_ptr()
    assert (job.grad_scale, job.hypers) == (0.5, HYPERS)
    assert len(pool._free) == 0


ENDS: dict[str, Callable[[UpdateJob], None]] = {
    "read": UpdateJob.release_gradient,
    "cancelled": UpdateJob.cancel,
    "failed": lambda job: job.fail(OSError("no such drive")),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_buffer_comes_back_once(end: str) -> None:
    job, pool, _ = make_job(present=frozenset({0, 1}))
    ENDS[end](job)
    job.release_gradient()
    assert len(pool._free) == 1
    assert job.ticket.done() is (end != "read")
    assert [slot.step for slot in job.record.slots] == [0, 0]
    if end == "failed":
        with pytest.raises(OSError, match="no such drive"):
            job.ticket.wait()


def test_a_job_that_has_not_begun_has_no_gradient_to_read() -> None:
    job, _, _ = make_job(present=frozenset({0}))
    with pytest.raises(AssertionError, match="the update of unit has not begun"):
        _ = job.grad


def test_a_step_that_is_skipped_is_not_over_before_the_one_before_it() -> None:
    """What that one has written may not be home yet, and a fetch asks the last ticket only."""
    before = Promise()
    job, _, _ = make_job(present=frozenset({0}), before=before)
    job.cancel()
    assert not job.ticket.done()
    before.fulfil()
    assert job.ticket.done()
