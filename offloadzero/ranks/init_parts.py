"""The ranks that build one model together under `zero.Init`, each of which keeps a part of every parameter.

[Note: parameters in parts]
The shards of a rank are parts of units, whose layout is known only when the model is whole. So until then each
parameter is divided by itself: of n elements each of N ranks keeps n // N, and the n % N last ones are kept by all, so
that nothing is padded and a parameter of fewer elements than there are ranks is whole on each. When the engine takes
the model over, the parameters are gathered one at a time and cut anew: a rank never has more whole than one unit.

The values are those of one rank: the first one scatters its own, and with them each rank has what it is to keep. A
parameter crosses the network once for that. To compare the ranks' values first would spare it where all have drawn the
same random numbers, but a sum over the values that cannot be wrong takes longer than to send them.

Each act (a parameter is divided, or gathered; the block ends; an engine starts) is named before it is done, and the
names are compared: ranks that build different models, or of which one alone reads a parameter, end in an error on all
of them and not in a wait for what the others never send.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from offloadzero.errors import RankError, StateError
from offloadzero.ranks.channel import Channel
from offloadzero.ranks.group import digest
from offloadzero.ranks.process_groups import make_building_channel
from offloadzero.ranks.shard import kept_elements

_blocks = itertools.count()  # numbers of the blocks of this process, which their ranks enter in one order


class BuildingRanks:
    """The ranks of one block of `zero.Init`, as long as one of its parameters is in parts."""

    def __init__(self, members: Sequence[int] | None) -> None:
        """Join the others; `members` are the ranks that build the same, None: all. Raises RankError, ConfigError."""
        self.channel = make_building_channel(members)
        self.number = next(_blocks)
        self._numbers = itertools.count(1)
        # No reference cycle: the groups go with the last parameter, on each rank when it comes to that.
        weakref.finalize(self, self.channel.close).atexit = False

    @property
    def members(self) -> list[int]:
        """The ranks, in their order."""
        return [*self.channel.members]

    @property
    def size(self) -> int:
        """The number of the ranks."""
        return self.channel.spec.world_size

    def next_number(self) -> int:
        """A number for a parameter, the same on all ranks."""
        return next(self._numbers)

    def announce(self, act: str) -> None:
        """Say what this rank is about to do. Raises StateError on all ranks unless all say the same."""
        label = f"zero.Init: {act}"
        if self.channel.by_rank_unless_same([digest(act)], label) is None:
            return
        by_text: dict[str, list[int]] = {}
        for rank, text in zip(self.channel.members, self.channel.texts(act, label), strict=True):
            by_text.setdefault(text, []).append(rank)
        acts = "; ".join(f"ranks {ranks}: {text}" for text, ranks in by_text.items())
        raise StateError(
            f"zero.Init: the ranks do different things ({acts}; this is rank {self.channel.rank}). Until the engine "
            "has the model all ranks must build the same modules, and read and write the same parameters in one order"
        )

    def report(self, error: BaseException) -> None:
        """Tell the others of an error in the block: those that wait for this rank stop with its text."""
        if not isinstance(error, RankError):  # else another rank has told it
            self.channel.report(error)


class ValueParts:
    """The parts of one parameter's value, of which its `SpilledWeight` keeps this rank's. All ranks call the same."""

    def __init__(self, ranks: BuildingRanks, value: torch.Tensor, *, name: str, source: int = 0) -> None:
        """Tell the others that a part is kept of `value`, as the rank at place `source` has it."""
        self.ranks = ranks
        self._name = name
        self._dtype = value.dtype
        number = ranks.next_number()
        what = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        ranks.announce(f"keep a part of {name}, number {number}, {what}{_of_rank(source)}")
        self.label = f"{name}, number {number}"
        self.place = ranks.number, number  # in the order in which all ranks have made them

    def of_another(self, value: torch.Tensor) -> ValueParts:
        """The parts of another value of the same parameter."""
        return ValueParts(self.ranks, value, name=self._name)

    def kept_shape(self, shape: torch.Size) -> torch.Size:
        """The shape of one part of a value."""
        return torch.Size((kept_elements(shape.numel(), self.ranks.size),))

    def announce_write(self, *, source: int) -> None:
        """Tell the others that the value becomes that of the rank at place `source`."""
        self.ranks.announce(f"write {self.label}{_of_rank(source)}")

    def divide(self, value: torch.Tensor, *, source: int) -> torch.Tensor:
        """Return this rank's part of the value, host, that the rank at place `source` has.

        The others' values are not used. The part has shape (kept_elements,): the rank's own elements, then the rest
        that all ranks keep.
        """
        channel, flat = self.ranks.channel, value.contiguous().reshape(-1)
        num_own, num_rest = divmod(flat.numel(), self.ranks.size)
        kept = torch.empty(num_own + num_rest, dtype=flat.dtype, device="cpu")
        divided, rest = flat.tensor_split([num_own * self.ranks.size])
        kept[num_own:] = rest
        if num_own:
            start, stop = channel.spec.kept_range(divided.numel())
            kept[:num_own] = divided[start:stop]  # in torch's fake group nobody sends
            own, whole = kept[:num_own].view(torch.uint8), divided.view(torch.uint8)
            channel.scatter(own, whole, self._name, source=source)
        channel.broadcast(kept[num_own:], self._name, source=source)
        return kept

    def read(self, kept: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Tell the others that the value is read, and return it, a new host tensor."""
        whole = self._new_whole(shape)  # first: a rank without memory has told nothing
        self.ranks.announce(f"read {self.label}")
        return self._fill(whole, kept, self.ranks.channel)

    def gather(self, kept: torch.Tensor, shape: torch.Size, channel: Channel | None) -> torch.Tensor:
        """Return the value, of which each rank gives its part, over the block's channel if None."""
        return self._fill(self._new_whole(shape), kept, channel or self.ranks.channel)

    def _new_whole(self, shape: torch.Size) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device="cpu")  # in torch's fake group nobody sends

    def _fill(self, whole: torch.Tensor, kept: torch.Tensor, channel: Channel) -> torch.Tensor:
        """Fill `whole` with the value of which each rank gives its part."""
        num_own = whole.numel() // self.ranks.size
        divided, rest = whole.view(-1).tensor_split([num_own * self.ranks.size])
        rest.copy_(kept[num_own:])
        if num_own:
            start, stop = channel.spec.kept_range(divided.numel())
            divided[start:stop] = kept[:num_own]
            channel.all_gather(divided, self._name)
        return whole


def _of_rank(source: int) -> str:
    """Say whose value it is: what ranks scatter that do not agree on it would be a mixture."""
    return f", as rank {source} has it" if source else ""
