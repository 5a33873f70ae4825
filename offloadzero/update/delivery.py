"""The delivery of new parameters from their update straight to the lease that waits for them.

[Note: delivery]
A unit whose parameters live on NVMe is fetched for the next forward as soon as there is a lease for it, often
before its update has begun. Then the update copies the new parameters of each chunk into that lease while they
are in pinned memory anyway: the drive is spared the read of what it has just been sent, and the forward waits for
the arithmetic, not for the write-back. If the update turns out not to touch the whole unit (a parameter without a
gradient, a step that is skipped), or has begun already, the fetch reads the file as ever, after the update. So does
that of a unit with frozen parameters, which no update touches whole.

[Note: what delivery is not for]
A unit whose parameters live in host memory is fetched when its update is done, whole. Delivered by chunk, its copy
to the device would run beside its own Adam instead of beside the next unit's. That shortens a step by one unit's
copy, H, and no more: from the second unit on the copy hides behind the Adam of the unit after it either way,
whichever of the two is the slower. A step of N equal units copies each to the device twice, T >= 2 N H (N H where
all stay through backward), so the gain is at most 1 / 2N of it, with 32 blocks 1.6 %, whatever the rates, and less
where Adam or the computation is the bound: a 7B model in bf16 at 50 GB/s has H = 8 ms, and its Adam alone moves 182
GB, 0.9 s at 200 GB/s. Against that stands what one call of the kernel for a whole unit saves: a block of 200M
parameters would be 50 chunks again, each a turn through Python and a copy of its own of 8 MB, a quarter of what a
link wants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offloadzero.memory.tickets import Promise, Ticket


class Delivery:
    """Parameters [0, num_elements) of a record, asked for before they are computed.

    `copy` starts to copy a chunk that begins at an element of the record to its destination.
    """

    def __init__(self, copy: Callable[[int, torch.Tensor], Ticket], *, num_elements: int) -> None:
        self._copy = copy
        self._num_elements = num_elements
        self._stop = 0  # [0, stop) is on its way
        self.copies: list[Ticket] = []

    def put(self, start: int, params: torch.Tensor) -> Ticket:
        """Start to copy the parameters from `start` on, shape (n,), in host memory, read until the ticket is done."""
        copied = self._copy(start, params)
        self.copies.append(copied)
        if start == self._stop:
            self._stop += params.numel()
        return copied

    @property
    def is_complete(self) -> bool:
        """Whether all parameters were given; certain once the update's ticket is fulfilled."""
        return self._stop >= self._num_elements


class UpdateTicket(Promise):
    """The ticket of one record's update. Fulfilled when the new values are known, done when they are home."""

    _has_begun = False
    _delivery: Delivery | None = None

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def ask(self, delivery: Delivery) -> bool:
        """Ask for delivery of the new parameters; return False when it is too late for that."""
        with self._lock:
            if self._has_begun or self._latch.is_set:
                return False
            self._delivery = delivery
            return True

    def begin(self) -> Delivery | None:
        """Begin the update (on the pipeline's thread); return the delivery that was asked for, if any."""
        with self._lock:
            self._has_begun = True
            return self._delivery
