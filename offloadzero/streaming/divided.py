"""Parameters of which each rank keeps a part while the model is built.

[Note: parameters in parts] in sharding/building.py says which. Such a parameter is a spilled one whose value is nowhere
whole. A read gathers it from all ranks, a write gives all ranks the value of the first: all of them do it together.
Small ones are divided too, so that each parameter of the model is the first rank's from the start; their parts stay in
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from offloadzero.errors import ConfigError, OffloadError, RankError, StateError
from offloadzero.interrupts import UninterruptedThroughout
from offloadzero.parameters.weight import restore_parameter
from offloadzero.sharding.building import BuildingRanks, divide, gather
from offloadzero.sharding.ranks import Channel
from offloadzero.sharding.shard_spec import kept_elements
from offloadzero.streaming.spill import SpilledWeight, can_spill, spilled_weight, wear
from offloadzero.torch_private import set_data


class DividedWeight(SpilledWeight):
    """The value of one parameter, of which this rank keeps a part."""

    def __init__(
        self,
        param: nn.Parameter,
        value: torch.Tensor,
        *,
        name: str,
        directory: Path | None,
        ranks: BuildingRanks,
        source: int = 0,
    ) -> None:
        """Keep this rank's part of `value` as the rank at place `source` has it. All ranks call this."""
        self.ranks = ranks
        number = ranks.next_number()
        what = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        ranks.announce(f"keep a part of {name}, number {number}, {what}{_of_rank(source)}")
        self.label = f"{name}, number {number}"
        self.place = ranks.number, number  # in the order in which all ranks have made them
        own = divide(ranks.channel, value.detach().to("cpu"), name, source=source)
        super().__init__(param, value, name=name, directory=directory, kept=own)

    @property
    def members(self) -> list[int]:  # type: ignore[override]
        """The ranks that have the value together, in the order of their parts."""
        return self.ranks.members

    @property
    def file_bytes(self) -> int:
        """The bytes of this rank's part on the drive; 0 when it is in memory."""
        return self._file_bytes(self._kept_shape.numel())

    @property
    def _kept_shape(self) -> torch.Size:
        return torch.Size((kept_elements(self.shape.numel(), self.ranks.size),))

    def _stored(self) -> torch.Tensor:
        """Gather the value, as all ranks do here."""
        kept, whole = self._kept(self._kept_shape), self._new_whole()
        self.ranks.announce(f"read {self.label}")
        gather(self.ranks.channel, kept, whole, self.name)
        return whole

    def _new_whole(self) -> torch.Tensor:
        """Make the host tensor into which the parts come: zeros, as nobody sends in torch's fake group."""
        return torch.zeros(self.shape, dtype=self.dtype, device="cpu")

    def read_to_write(self) -> torch.Tensor:
        """Return the value on the parameter's device, in memory of its own."""
        return self.read()

    def write(self, value: torch.Tensor, *, source: int = 0) -> None:
        """Replace the value by the one that the rank at place `source` gives. All ranks call this."""
        with UninterruptedThroughout():
            self.ranks.announce(f"write {self.label}{_of_rank(source)}")
            own = divide(self.ranks.channel, value.detach().to("cpu"), self.name, source=source)
            self._num_writes += 1
            self._replace(own)

    def _like(self, param: nn.Parameter, value: torch.Tensor) -> SpilledWeight:
        return DividedWeight(param, value, name=self.name, directory=self.directory, ranks=self.ranks)

    def bring_home(self, param: nn.Parameter) -> None:  # noqa: ARG002
        """Take this rank's part into memory; the drive gets its space back."""
        file, self._value, self._file = self._file, self._kept(self._kept_shape), None
        if file is not None:  # last: an interrupt may come with any call
            file.close()

    def take(self, param: nn.Parameter, channel: Channel | None) -> torch.Tensor:
        """Return the value, a new host tensor, and give it up. The parameter is then an ordinary one of NaN.

        `channel`: of the engine that takes it, over the same ranks, which have found that they take the same; None:
        that of the block.
        """
        value = self._new_whole()
        gather(channel or self.ranks.channel, self._kept(self._kept_shape), value, self.name)
        restore_parameter(param)
        placeholder = torch.full((), float("nan"), device="cpu").to(self.dtype)
        set_data(param, placeholder.to(self.device).expand(self.shape))
        self.drop()
        return value


def _of_rank(source: int) -> str:
    """Say whose value it is: what ranks scatter that do not agree on it would be a mixture."""
    return f", as rank {source} has it" if source else ""


def spill_divided(
    param: nn.Parameter, *, name: str, directory: Path | None, ranks: BuildingRanks, source: int = 0
) -> None:
    """Leave this rank's part of the parameter's value, as the rank at place `source` has it. All ranks call this."""
    wear(
        param,
        DividedWeight(param, param.data, name=name, directory=directory, ranks=ranks, source=source),
    )


def divided_weight(param: torch.Tensor) -> DividedWeight | None:
    """Return the weight object of a parameter in parts; None if it is not in parts."""
    weight = spilled_weight(param)
    return weight if isinstance(weight, DividedWeight) else None


class LentParameters:
    """Parameters in parts that are whole inside a block of `GatheredParameters`: all ranks enter and leave it.

    Their weights keep the parts, so that a block that changes nothing sends nothing at its end.
    """

    def __init__(self, modifier_rank: int | None) -> None:
        """`modifier_rank`: the rank, in its group, whose changes all ranks get; None: changes are an error."""
        self._modifier_rank = modifier_rank
        self._lent: list[tuple[nn.Parameter, DividedWeight, torch.Tensor | None]] = []

    def lend(self, params: Iterable[nn.Parameter]) -> None:
        """Make parameters in parts whole, in whatever order they are given. `put_back` undoes it after an error.

        Raises:
            ConfigError: there is no rank `modifier_rank`.
            StateError: the ranks gather different things, or one has no memory for them.
        """
        found = [(weight, param) for param in params if (weight := divided_weight(param)) is not None]
        found.sort(key=lambda each: each[0].place)  # a set of parameters has another order on each rank
        for ranks, of_ranks in itertools.groupby(found, key=lambda each: each[0].ranks):
            self._lend_all(ranks, [*of_ranks])

    def _lend_all(self, ranks: BuildingRanks, found: Sequence[tuple[DividedWeight, nn.Parameter]]) -> None:
        what = f"GatheredParameters of {len(found)} parameters (modifier_rank={self._modifier_rank})"
        ranks.announce(f"enter {what}")
        if self._modifier_rank is not None and not 0 <= self._modifier_rank < ranks.size:
            raise ConfigError("modifier_rank", self._modifier_rank, f"None, or 0 to {ranks.size - 1}")
        try:
            for weight, param in found:
                self._lend(weight, param)
        except (StateError, RankError):  # on all ranks
            raise
        except Exception as error:  # too little memory, say, while the others announce their next act
            with suppress(OffloadError):
                ranks.announce(f"cannot enter {what}: {type(error).__name__}")
            raise
        ranks.announce(f"have entered {what}")

    def _lend(self, weight: DividedWeight, param: nn.Parameter) -> None:
        self._lent.append((param, weight, None))  # first: an error may find it whole
        weight.lend(param)
        if self._modifier_rank is None:
            self._lent[-1] = (param, weight, param.data.clone())

    def put_back(self) -> None:
        """Leave the parts as they were, without the other ranks."""
        for param, weight, _ in self._lent:
            if can_spill(param):
                wear(param, weight)
        self._lent = []

    def take_back(self, *, after: BaseException | None) -> list[str]:
        """Divide what the block has changed. Returns the names of parameters that must not have changed, on any rank.

        `after`: the error that ends the block, which is more than one that comes of it here.
        """
        try:
            return self._changed() if self._modifier_rank is None else self._divide(self._modifier_rank)
        except OffloadError:
            if after is None:
                raise
            return []
        finally:
            self.put_back()

    def _changed(self) -> list[str]:
        names = []
        for param, weight, at_entry in self._lent:
            weight.ranks.announce(f"leave {weight.label}")
            has_changed = can_spill(param) and at_entry is not None and not torch.equal(param.data, at_entry)
            ranks = weight.ranks.told(has_changed, f"whether {weight.name} has changed")
            if ranks:
                names.append(f"{weight.name} on ranks {ranks}")
        return names

    def _divide(self, source: int) -> list[str]:
        while self._lent:
            param, weight, _ = self._lent[0]
            if not can_spill(param):  # code inside the block has divided it
                weight.drop()
            elif (param.shape, param.dtype) == (weight.shape, weight.dtype):
                weight.write(param.data, source=source)
                wear(param, weight)
            else:
                spill_divided(
                    param, name=weight.name, directory=weight.directory, ranks=weight.ranks, source=source
                )
                weight.drop()
            del self._lent[0]
        return []


def announce_start(params: Iterable[nn.Parameter]) -> None:
    """Tell the ranks that have built the model together that an engine starts with it.

    Raises StateError on all of them where one is about to do something else, a read say.
    """
    weights = filter(None, map(divided_weight, params))
    for ranks in dict.fromkeys(weight.ranks for weight in weights):
        ranks.announce("start an engine")
