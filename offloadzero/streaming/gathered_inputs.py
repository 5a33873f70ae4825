"""Inputs of checkpointed units of which each tensor-parallel rank keeps a part: they are gathered for backward.

[Note: inputs in parts]
The input of a block is the same on all ranks along the tensor-parallel axis, so each of N keeps 1/N of its elements at
home, on any tier, and brings that into its place in the memory of the whole input; an all-gather fills the rest in
(ZeRO-R's P_a, arXiv 1910.02054, section 6.1). Both are one task of the lane that brings inputs back, so the collectives
come in the order in which the fetches were submitted: [Note: collectives in one order] in sharding/ranks.py. An input
whose elements N does not divide is kept whole.

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
from dataclasses import dataclass, field

import torch

from offloadzero.config import PARTITION_KEY
from offloadzero.errors import StateError
from offloadzero.memory.lanes import Accelerator, Fence, LaneTicket
from offloadzero.memory.transfer import Fetcher, Sender
from offloadzero.sharding.comparing import OrderSum
from offloadzero.sharding.ranks import Ranks
from offloadzero.streaming.activation_homes import InputCopy, InputHomes, InputSpace

_ROW_WORDS = 512  # 4 KiB
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT_IN_FP64 = (1 << 52) - 1


class GatheredHomes(InputHomes):
    """The transfers of inputs that the ranks keep in parts: [Note: inputs in parts]."""

    goes_by_order = True

    def __init__(
        self,
        space: InputSpace,
        *,
        sender: Sender,
        fetcher: Fetcher,
        ranks: Ranks,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(space, sender=sender, fetcher=fetcher)
        if ranks.activations is None or ranks.activation_orders is None:
            raise AssertionError("no ranks have the same inputs")
        self._gathers, self._orders = ranks.activations, ranks.activation_orders
        self._accelerator = accelerator
        self._num_sent = 0
        self._order = OrderSum()

    def send(self, source: torch.Tensor, label: str, *, call: int) -> InputCopy:
        """Start the copy of this rank's part of `source`, device, shape (n,), an input of the call of this number."""
        spec, num_elements = self._gathers.spec, source.numel()
        if num_elements % spec.world_size:
            return super().send(source, label, call=call)
        start, stop = spec.kept_range(num_elements)
        sums: list[Callable[[], float]] = []

        def copy(target: torch.Tensor, part: torch.Tensor) -> None:
            sums.append(self._accelerator.read_later(_sum_of_bits(source)))
            self._copy(target, part)

        home, sent = self.sender.submit(
            source[start:stop],
            lambda: self.space.take(source.dtype, stop - start, label, call=call),
            label=label,
            copy=copy,
        )
        self._num_sent += 1
        name = zlib.crc32(f"{self._num_sent} {label} {num_elements} {source.dtype}".encode())
        return _GatheredCopy(self, home, sent, label, gathered_by=self, name=name, sums=sums)

    def note(self, name: int) -> int:
        """Count a gather as the next one; return the sum over the order until then."""
        self._order.note(name)
        return self._order.value

    def gather(self, copied: _GatheredCopy, order: int, target: torch.Tensor, kept: torch.Tensor) -> None:
        """Fill `target`, shape (n,), on the lane's thread, unless other ranks have another input."""
        (read_sum,) = copied.sums
        copied.errors[:] = self._departures(order, int(read_sum()), copied.label)
        if copied.errors:
            return
        start, stop = self._gathers.spec.kept_range(target.numel())
        self._copy(target[start:stop], kept)
        self._gathers.all_gather(target, f"{copied.label} activation")

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        is_inside = self.space.tier.is_device
        (self._accelerator.copy_inside if is_inside else self._accelerator.copy)(target, source)

    def _departures(self, order: int, bits: int, label: str) -> Iterator[StateError]:
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
                f"orders: ranks {odd} in another than rank {first}, and this is rank {channel.rank}. All ranks must "
                "run the same forwards and backwards"
            )
            return
        yield StateError(
            f"{label}: {PARTITION_KEY}: an input of this checkpointed unit is not the same on the tensor-parallel "
            f"ranks {[*channel.members]}: ranks {channel.odd_ranks(bits_by_rank)} have another than rank {first}. Each "
            "keeps a part of it, so all must have the same data and random numbers (for dropout outside of the divided "
            "layers), and no part of the sequence of its own: else leave the key out"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _GatheredCopy(InputCopy):
    """This rank's part of one input in its home."""

    gathered_by: GatheredHomes
    name: int  # of the input in the order of the gathers
    sums: list[Callable[[], float]]  # reads the sum of the whole input, once its part has been sent
    errors: list[StateError] = field(default_factory=list)  # of the last gather

    def fetch(self, target: torch.Tensor, fence: Fence) -> LaneTicket:
        """Fill `target`, device, shape (n,), of the whole input, which may be written behind `fence`."""
        order = self.gathered_by.note(self.name)
        return self.homes.fetcher.submit(
            self.home,
            target,
            after=[self.sent.copied, self.sent.written],
            fence=fence,
            label=self.label,
            copy=functools.partial(self.gathered_by.gather, self, order),
        )

    def expect_fetched(self) -> None:
        """Raise StateError where the last fetch has found another input on other ranks."""
        for error in self.errors:
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
