"""Fail points: the places where a test makes work slow, lets it fail, or watches it.

[Note: fail points]
Lanes, files and the stages of a step work on threads of their own. A missing wait shows only when one of them is slow,
a lost error only when one fails, and neither can be brought about from outside at the right time. So the package offers
points to tests, as FreeBSD's kernel and Rust's `fail` crate do. Where a piece of work begins, the called function is
passed `through` a point, and a listener may put another function in its place, on the thread that works:

    event = through("lane.launch", self._launch, self.name)(task, fence)

There is no listener outside of tests, and then a point costs one call and one comparison. Points lie where a lane, a
file or a unit works, and not where a parameter does: hooks and the collection of gradients have none. The file engine
has faults of its own, below Python: csrc/aio/faults.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

Point = Literal[
    "lane.launch",  # A lane runs a task; `about` is the lane's name.
    "nvme.read",  # Bytes of the swap files begin to move; `about` is the tier.
    "nvme.write",
    "nvme.sync",  # What was written is made to last; `about` is the tier.
    "nvme.reserve",  # Space is reserved for a unit that comes home; `about` is the tier.
    "spill.read",  # Bytes of a parameter that waits in a file of its own move; `about` is its name.
    "spill.write",
    "step.begin_backward",  # A backward brings its first gradient, on autograd's thread.
    "step.step",  # The script asks for the step.
    "landing.merge",  # An arrived gradient is added to the one at home; `about` is the record's name.
    "landing.measure",  # The norms of a gradient are taken, and it is put away; `about` is the record's name.
    "decider.decide_one",  # It is decided whether a job of backward is applied; `about` is its record's name.
    "decider.decide",  # It is decided whether a step is applied.
    "update.stage",  # The states of a chunk begin to be read; `about` is the record's name.
    "update.compute",  # A chunk is updated; `about` is the record's name.
    "gradient.store",  # A gradient that a script has assigned comes home; `about` is the parameter's name.
    "checkpoint.write",  # Bytes of a tensor are written; `about` is its name.
    "checkpoint.commit",  # A whole checkpoint takes its name; `about` is its tag.
    "checkpoint.point",  # `latest` is written; `about` is the tag.
    "checkpoint.check",  # A file is compared with the manifest; `about` is its name.
    "checkpoint.read",  # Bytes are read; `about` is the tensor's name, or "the header".
    "checkpoint.load",  # A weight is written to its home; `about` is its name.
]
Work = TypeVar("Work", bound=Callable[..., Any])
Listener = Callable[[Point, Callable[..., Any], object], Callable[..., Any]]

_listeners: tuple[Listener, ...] = ()


def through(point: Point, work: Work, about: object = None) -> Work:
    """Return the function to call at `point`: `work`, or the one that listeners put in its place.

    `about` says whose work it is.
    """
    if not _listeners:
        return work
    for listener in _listeners:
        work = listener(point, work, about)  # type: ignore[assignment]
    return work


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Ask `listener` at every point, on all threads; it is given the result of the listeners before it."""
    global _listeners
    _listeners += (listener,)
    try:
        yield
    finally:
        _listeners = tuple(each for each in _listeners if each is not listener)
