"""Inputs of checkpointed units of which each tensor-parallel rank keeps a part: they are gathered for backward.

[Note: inputs in parts]
The input of a block is the same on all ranks along the tensor-parallel axis, so each of N keeps 1/N of its elements at
home, on any tier, and brings that into its place in the memory of the whole input; an all-gather fills the rest in
(ZeRO-R's P_a, arXiv 1910.02054, section 6.1). Both are one task of the lane that brings inputs back, so the collectives
come in the order in which the fetches were submitted: [Note: collectives in one order] in ranks/channel.py. An
input whose elements N does not divide is kept whole.

That order must follow from the calls alone. What is fetched ahead does: the inputs of the calls before. What needs no
fetch, as the device has it still, is elsewhere a matter of time; here it is the last few inputs.

Where the inputs are not the same after all (parts of a sequence, other random numbers before a block, other data), a
gather would make a mixture. So what each rank has sent home is summed up on the way, whole, and the sum is compared
with the order before each gather: nothing is computed again from such an input. The error is raised where backward
takes the input, at one line on all ranks: if one of them knew it earlier, another could wait for it in a collective of
the model's own.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator

import torch

from offloadzero.config import PARTITION_KEY
from offloadzero.errors import StateError
from offloadzero.memory.lanes import Accelerator
from offloadzero.ranks.group import Collectives, OrderSum

_ROW_WORDS = 512  # 4 KiB
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT_IN_FP64 = (1 << 52) - 1

Copy = Callable[[torch.Tensor, torch.Tensor], None]  # target, source


class InputParts:
    """Divides inputs among the ranks that have the same ones: [Note: inputs in parts]."""

    def __init__(self, gathers: Collectives, orders: Collectives, accelerator: Accelerator) -> None:
        """Gather by `gathers`, after a comparison by `orders`."""
        self.gathers = gathers
        self.accelerator = accelerator
        self.num_sent = 0
        self.order = OrderSum()  # of the gathers
        self._orders = orders

    def divide(self, source: torch.Tensor, label: str, *, is_inside: bool) -> InputPart | None:
        """Return the part that is kept of `source`, device, shape (n,); None: it is kept whole.

        `is_inside`: its home is on the device.
        """
        if source.numel() % self.gathers.spec.world_size:
            return None
        return InputPart(self, label, self.accelerator.copy_inside if is_inside else self.accelerator.copy)

    def departures(self, order: int, bits: int, label: str) -> Iterator[StateError]:
        """Yield the error of ranks that gather something else; all of them get it."""
        channel = self._orders
        by_rank = channel.by_rank_unless_same([order, bits], f"{label}: the comparison of the ranks' inputs")
        if by_rank is None:
            return
        orders, bits_by_rank = zip(*by_rank, strict=True)
        first = channel.members[0]
        if odd := channel.odd_ranks(orders):
            yield StateError(
                f"{label}: tensor-parallel ranks, {[*channel.members]}, compute checkpointed units again in different "
                f"orders: ranks {odd} in another order than rank {first} (this is rank {channel.rank}). All ranks must "
                "run the same forwards and backwards"
            )
            return
        yield StateError(
            f"{label}: {PARTITION_KEY}: an input of this checkpointed unit is not the same on the tensor-parallel "
            f"ranks {[*channel.members]}: ranks {channel.odd_ranks(bits_by_rank)} have another than rank {first}. Each "
            "keeps a part of it, so all must have the same data and random numbers (for dropout outside of the divided "
            "layers), and no part of the sequence of its own: else leave the key out"
        )


class InputPart:
    """This rank's part of one input."""

    def __init__(self, parts: InputParts, label: str, copy: Copy) -> None:
        """Begin without a name. `copy` moves the part on a lane."""
        self._parts = parts
        self._label = label
        self._copy = copy
        self._name = 0  # in the order of the gathers
        self._read_sum: Callable[[], float] | None = None  # of the whole input, once its part has been sent
        self._errors: list[StateError] = []  # of the last gather

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements that are kept of `whole`, shape (n,)."""
        start, stop = self._parts.gathers.spec.kept_range(whole.numel())
        return whole[start:stop]

    def was_submitted(self, source: torch.Tensor) -> None:
        """Count it as the next one that is sent, in the order of the calls."""
        parts = self._parts
        parts.num_sent += 1
        self._name = zlib.crc32(f"{parts.num_sent} {self._label} {source.numel()} {source.dtype}".encode())

    def send(self, source: torch.Tensor, target: torch.Tensor, part: torch.Tensor) -> None:
        """Copy the part of `source` to its home, or on the way there."""
        self._read_sum = self._parts.accelerator.read_later(_sum_of_bits(source))  # on the stream of the lane
        self._copy(target, part)

    def fetch(self) -> Copy:
        """Count a fetch as the next one; return the call that makes the input whole."""
        order = self._parts.order
        order.note(self._name)
        return functools.partial(self._gather, order.value)

    def _gather(self, order: int, target: torch.Tensor, kept: torch.Tensor) -> None:
        """Fill `target`, shape (n,), on the lane's thread, unless other ranks have another input."""
        if self._read_sum is None:
            raise AssertionError(f"{self._label}: its part was not sent")
        self._errors = [*self._parts.departures(order, int(self._read_sum()), self._label)]
        if self._errors:
            return
        self._copy(self.of(target), kept)
        self._parts.gathers.all_gather(target, f"{self._label} activation")

    def expect_fetched(self) -> None:
        """Raise StateError where the last fetch has found another input on other ranks."""
        for error in self._errors:
            raise error


def _sum_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """Return a number of 52 bits, int64, that other values than those of `flat`, shape (n,), have by chance only.

    So have the same ones in another order, but for changes inside of some 4 KiB.
    """
    is_aligned = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
    words = flat.view(_WORDS[8 if is_aligned else flat.itemsize])
    num_rows = words.numel() // _ROW_WORDS
    rows, rest = words.tensor_split([num_rows * _ROW_WORDS])
    factors = 2 * torch.arange(num_rows, device=flat.device) + 1
    total = (rows.view(num_rows, _ROW_WORDS).sum(1) * factors).sum() + rest.sum()
    return total & _EXACT_IN_FP64
