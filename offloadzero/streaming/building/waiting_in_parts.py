"""Parameters of which each rank keeps a part while the model is built.

[Note: parameters in parts] in ranks/init_parts.py says which. Such a parameter is a spilled one whose value is nowhere
whole. A read gathers it from all ranks, a write gives all ranks the value of the first: all of them do it together.
Small ones are divided too, so that each parameter of the model is the first rank's from the start; their parts stay in
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from offloadzero.errors import ConfigError, OffloadError, RankError, StateError
from offloadzero.ranks.init_parts import BuildingRanks, ValueParts
from offloadzero.streaming.building.waiting_parameters import SpilledWeight, can_spill, spilled_weight, wear


def spill_divided(
    param: nn.Parameter, *, name: str, directory: Path | None, ranks: BuildingRanks, source: int = 0
) -> None:
    """Leave this rank's part of the parameter's value, as the rank at place `source` has it. All ranks call this."""
    parts = ValueParts(ranks, param.data, name=name, source=source)
    wear(param, SpilledWeight(param, param.data, name=name, directory=directory, parts=parts, source=source))


class Lent(NamedTuple):
    """A parameter in parts that is whole for a while."""

    param: nn.Parameter
    weight: SpilledWeight
    parts: ValueParts
    at_entry: torch.Tensor | None  # the value, where it must not change


def _in_parts(params: Iterable[nn.Parameter]) -> Iterator[Lent]:
    """Those of the parameters that are in parts."""
    for param in params:
        weight = spilled_weight(param)
        if weight is not None and weight.parts is not None:
            yield Lent(param, weight, weight.parts, None)


class LentParameters:
    """Parameters in parts that are whole inside a block of `GatheredParameters`: all ranks enter and leave it.

    Their weights keep the parts, so that a block that changes nothing sends nothing at its end.
    """

    def __init__(self, modifier_rank: int | None) -> None:
        """`modifier_rank`: the rank, in its group, whose changes all ranks get; None: changes are an error."""
        self._modifier_rank = modifier_rank
        self._lent: list[Lent] = []

    def lend(self, params: Iterable[nn.Parameter]) -> None:
        """Make parameters in parts whole, in whatever order they are given. `put_back` undoes it after an error.

        Raises:
            ConfigError: there is no rank `modifier_rank`.
            StateError: the ranks gather different things, or one has no memory for them.
        """
        # A set has another order on each rank.
        found = sorted(_in_parts(params), key=lambda each: each.parts.place)
        for ranks, of_ranks in itertools.groupby(found, key=lambda each: each.parts.ranks):
            self._lend_all(ranks, [*of_ranks])

    def _lend_all(self, ranks: BuildingRanks, found: Sequence[Lent]) -> None:
        what = f"GatheredParameters of {len(found)} parameters (modifier_rank={self._modifier_rank})"
        ranks.announce(f"enter {what}")
        if self._modifier_rank is not None and not 0 <= self._modifier_rank < ranks.size:
            raise ConfigError("modifier_rank", self._modifier_rank, f"None, or 0 to {ranks.size - 1}")
        try:
            for each in found:
                self._lend(each)
        except (StateError, RankError):  # on all ranks
            raise
        except Exception as error:  # too little memory, say, while the others announce their next act
            with suppress(OffloadError):
                ranks.announce(f"cannot enter {what}: {type(error).__name__}")
            raise
        ranks.announce(f"have entered {what}")

    def _lend(self, each: Lent) -> None:
        self._lent.append(each)  # first: an error may find it whole
        each.weight.lend(each.param)
        if self._modifier_rank is None:
            self._lent[-1] = each._replace(at_entry=each.param.data.clone())

    def put_back(self) -> None:
        """Leave the parts as they were, without the other ranks."""
        for each in self._lent:
            if can_spill(each.param):
                wear(each.param, each.weight)
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
        for param, weight, parts, at_entry in self._lent:
            parts.ranks.announce(f"leave {parts.label}")
            has_changed = can_spill(param) and at_entry is not None and not torch.equal(param.data, at_entry)
            (ranks,) = parts.ranks.channel.ranks_where([has_changed], f"whether {weight.name} has changed")
            if ranks:
                names.append(f"{weight.name} on ranks {ranks}")
        return names

    def _divide(self, source: int) -> list[str]:
        while self._lent:
            param, weight, parts, _ = self._lent[0]
            if not can_spill(param):  # code inside the block has divided it
                weight.drop()
            elif (param.shape, param.dtype) == (weight.shape, weight.dtype):
                weight.write(param.data, source=source)
                wear(param, weight)
            else:
                spill_divided(
                    param, name=weight.name, directory=weight.directory, ranks=parts.ranks, source=source
                )
                weight.drop()
            del self._lent[0]
        return []


def announce_start(params: Iterable[nn.Parameter]) -> None:
    """Tell the ranks that have built the model together that an engine starts with it.

    Raises StateError on all of them where one is about to do something else, a read say.
    """
    for ranks in dict.fromkeys(each.parts.ranks for each in _in_parts(params)):
        ranks.announce("start an engine")
