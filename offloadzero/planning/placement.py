"""`"placement": "auto"`: the home of every segment from the bytes that each tier may use.

[Note: which segments earn a fast tier]
All segments start on the slowest tier there is: NVMe when a directory is configured, else the host. Then they move up
in one fixed order, the most traffic saved per byte first, as far as the tier above has room:

1. Whole records to the device. That saves two fetches of the parameters and one copy of the gradient per micro batch,
   and the update of the record leaves the host's memory and processor. All segments or none: the update runs on the
   device only when all of it is there, and parameters alone gain nothing, since a unit lease keeps them just as well
   and can be lent to another unit.
2. To the host, parameters: the drive reads each twice per micro batch and writes it once per step. Then gradients that
   are kept until the step: written once per micro batch, read once for each further one and once by the update. Then
   master weights and moments: read and written once per step.

Records move in the order of the forward, where each costs the same. The first are updated last and needed first: where
their update runs on the device, or their state is in host memory, the host works on the others during the end of
backward and the beginning of the next forward. The other way round it would idle while backward is in the last units,
and the next forward would wait for it at its first unit.

[Note: found by halves]
`plan_memory` tells whether a number of moves fits; its plan includes all that the placement needs: the leases of
the units that remain, `units.prefetch_units` ahead of the one in use, and every buffer. So no record displaces the
room for fetching the others in time. First the records for the device are counted, then the segments for the host.

All moves are tried first, then halves. Every placement that fits a budget also fits a larger one, so where two searches
differ for the first time, the one with the larger budget goes on with the faster half: with more of a budget no segment
moves to a slower tier. (More on the device leaves less for the host to hold, so that is true of the second search as
well.) Buffers are as large as the largest unit that needs them. Where a move frees more than it takes, a faster
placement may fit than the one that is found; one that fits is found whenever the slowest or the fastest does.

`"placement": "auto"` by time: of the placements that the budgets allow, the one with the shortest forecast step.

[Note: found by time]
The order of [Note: which segments earn a fast tier] saves the most traffic for each byte of a fast tier, wherever the
traffic goes. What a step waits for is the lane that has too much of it at that time: where backward computes for long,
reads of parameters hide behind it, while states are read and written beside a short forward, say. So other orders are
tried, each filled up to the budgets as that one is: parameters, gradients and states in any order, from the first unit
or from the last, and fewer units updated on the device, which leaves more of its budget for leases and so for fetches
that run further ahead.

One choice after the other is changed, as long as the forecast gets shorter by more than WORTH: the first order is left
only for what a simulation can tell from it. Steps are 5 to 10 % off their forecasts, and of placements that were
forecast within 2 % of each other the one by bytes was up to 12 % faster (benchmarks/auto_placement.md). A search looks
at some twenty placements, and at those near the best again.
What the configuration fixes, budgets and directories, stays as it is, and so do all numbers of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import inf
from typing import TYPE_CHECKING

from offloadzero.config import BudgetConfig, OffloadConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import BudgetError
from offloadzero.observe.texts import duration_text
from offloadzero.planning.memory_plan import MemoryPlan, Needs, plan_memory
from offloadzero.planning.model.trace import MicroBatchTrace
from offloadzero.planning.placement_rules import Placement
from offloadzero.planning.step.work import Uses, used_elements
from offloadzero.planning.update_rules import keeps_gradients
from offloadzero.ranks.shard import keeps_params_on_device
from offloadzero.update.records import Record

if TYPE_CHECKING:  # typing has it from Python 3.11 on
    from typing_extensions import Unpack

# States get 1/2 of the free bytes of a device without a budget: the need of activations is not known before the first
# step, and too little for them ends the run, while too little for states costs time. A budget replaces this guess.
FREE_DEVICE_PARTS = 2
# Of a host without a budget 9/10: pinned pages cannot be swapped, and the data loader and file caches need some.
FREE_HOST_TENTHS = 9
# Of the host's bytes 1/2 where activation checkpoints go through host memory and their size shows in the first step.
ACTIVATION_PARTS = 2


@dataclass(frozen=True)
class Filling:
    """An order of moves to faster tiers. The defaults are those of [Note: which segments earn a fast tier].

    `to_host` orders the segments: a state's kind counts as STATES. `device_share` is of the records that the device has
    room for: what it leaves is for unit leases where the device has a budget.
    """

    to_host: tuple[SegmentKind, ...] = (SegmentKind.PARAM, SegmentKind.GRAD, SegmentKind.STATES)
    last_on_device: bool = False  # the records that the forward uses last go to the device first
    last_in_host: bool = False  # the same for the host
    device_share: float = 1.0


BY_BYTES = Filling()


@dataclass(frozen=True)
class _Limits:
    """The bytes for the plan."""

    device: int
    host: int
    device_alone: int  # of the device when nothing is in host memory


def _without_spare_places(config: OffloadConfig) -> OffloadConfig:
    """Return the configuration with one place for each segment, unless two are asked for: homes are chosen first."""
    return config if config.versions else replace(config, versions=False)


def choose_placement(
    records: Sequence[Record],
    config: OffloadConfig,
    available: Mapping[TierName, int],
    *,
    filling: Filling = BY_BYTES,
    **needs: Unpack[Needs],
) -> Placement:
    """Choose the home of every segment: [Note: which segments earn a fast tier].

    When no placement fits, the result is the one nearest to that, and its plan names the missing bytes.

    Args:
        available: bytes that can be taken now of the host, and of the device unless its memory is the host's. They
            stand in for the budgets that `config` does not have.
        filling: the order of the moves.
        needs: `together`, `form` and `num_checkpointed`, as `plan_memory` takes them.
    """
    config = _without_spare_places(config)
    limits = _limits(config, available)
    moves = _Moves(records, config, filling)
    unbounded = replace(
        config,
        budgets=BudgetConfig(),
        # A plan with a device budget does not use them.
        max_live_parameters=config.max_live_parameters if config.budgets.device is None else None,
    )

    def num_bytes(tier: TierName, num_on_device: int, num_in_host: int) -> int:
        placement = moves.placement(num_on_device, num_in_host)
        return plan_memory(records, unbounded, placement=placement, **needs).tier_bytes(tier)

    if num_bytes(TierName.DEVICE, len(records), 0) <= limits.device_alone:
        return moves.placement(len(records), 0)
    on_device = _most(len(records), lambda num: num_bytes(TierName.DEVICE, num, 0) <= limits.device)
    on_device = int(on_device * filling.device_share)
    in_host = _most(moves.num_to_host, lambda num: num_bytes(TierName.HOST, on_device, num) <= limits.host)
    return moves.placement(on_device, in_host)


def describe_placement(records: Sequence[Record], placement: Placement) -> str:
    """Say how many units are on each tier."""
    tiers = [
        {placement[r.index, kind] for kind in r.spec.kinds if (r.index, kind) in placement} for r in records
    ]
    on_device = [r for r, found in zip(records, tiers, strict=True) if all(tier.is_device for tier in found)]
    on_nvme = sum(any(tier.is_file for tier in found) for found in tiers)
    num_params = sum(record.num_params for record in records)
    share = sum(record.num_params for record in on_device) / max(num_params, 1)
    text = (
        f"{len(on_device)} of {len(records)} units updated on the device ({100 * share:.0f} % of the parameters), "
        f"{len(records) - len(on_device) - on_nvme} in host memory"
    )
    return text + (f", {on_nvme} wholly or partly on nvme" if on_nvme else "")


class _Moves:
    """The moves to faster tiers in their order: [Note: which segments earn a fast tier]."""

    def __init__(self, records: Sequence[Record], config: OffloadConfig, filling: Filling) -> None:
        self._slowest = TierName.NVME if config.nvme_paths else TierName.HOST
        self._params_stay = config.is_of_several and keeps_params_on_device(config.zero_stage)
        self._keeps_gradients = keeps_gradients(config)
        self._records = _in_order(records, last_first=filling.last_on_device)
        of_host = _in_order(records, last_first=filling.last_in_host)
        segments = {
            SegmentKind.PARAM: [(record.index, SegmentKind.PARAM) for record in of_host],
            SegmentKind.GRAD: [(r.index, SegmentKind.GRAD) for r in of_host if r.num_trainable],
            SegmentKind.STATES: [
                (r.index, kind) for r in of_host for kind in r.layout if kind != SegmentKind.PARAM
            ],
        }
        if not self._keeps_gradients:
            del segments[SegmentKind.GRAD]
        if self._params_stay:
            del segments[SegmentKind.PARAM]
        to_host = [segment for kind in filling.to_host for segment in segments.get(kind, ())]
        self._position = {segment: position for position, segment in enumerate(to_host)}
        self.num_to_host = len(to_host)

    def placement(self, num_on_device: int, num_in_host: int) -> dict[tuple[int, SegmentKind], TierName]:
        """Return the homes after so many moves of records to the device and of segments of the others to the host."""
        placement: dict[tuple[int, SegmentKind], TierName] = {}
        for number, record in enumerate(self._records):
            for kind in (*record.layout, *([SegmentKind.GRAD] if record.num_trainable else [])):
                segment = record.index, kind
                stays = kind is SegmentKind.PARAM and (record.resident or self._params_stay)
                if number < num_on_device or stays:
                    placement[segment] = TierName.DEVICE
                elif kind is SegmentKind.GRAD and not self._keeps_gradients:
                    placement[segment] = TierName.HOST  # the gradient is consumed there as it lands
                elif self._position[segment] < num_in_host:
                    placement[segment] = TierName.HOST
                else:
                    placement[segment] = self._slowest
        return placement


def _in_order(records: Sequence[Record], *, last_first: bool) -> list[Record]:
    """Return the records in the order of the forward, or in that of backward.

    The resident records come first: all of the forward needs them.
    """
    return sorted(
        records, key=lambda record: (not record.resident, -record.index if last_first else record.index)
    )


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """Return the most of `count` moves that fit: [Note: found by halves]. 0 if none do."""
    if fits(count):
        return count
    least, most = 0, count - 1
    while least < most:
        middle = (least + most + 1) // 2
        if fits(middle):
            least = middle
        else:
            most = middle - 1
    return least


def _limits(config: OffloadConfig, available: Mapping[TierName, int]) -> _Limits:
    device, host = config.budgets.device, config.budgets.host
    if TierName.DEVICE in available:
        free_device = device_alone = available[TierName.DEVICE] // FREE_DEVICE_PARTS
        free_host = available[TierName.HOST] * FREE_HOST_TENTHS // 10
    else:  # one memory, counted once
        device_alone = available[TierName.HOST] // FREE_DEVICE_PARTS
        half = device_alone // 2
        free_device = half if host is None else max(0, device_alone - host)
        free_host = half if device is None else max(0, device_alone - device)
    host = free_host if host is None else host
    inputs = config.activation_checkpoints
    if inputs is not None and not inputs.tier.is_device and inputs.input_bytes is None:
        host //= ACTIVATION_PARTS
    return _Limits(
        device=free_device if device is None else device,
        host=host,
        device_alone=device_alone if device is None else device,
    )


NUM_SHOWN = 3  # placements that are slower
WORTH = 0.05  # the share by which another order must be faster: [Note: found by time]
DEVICE_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
_NAMES = {SegmentKind.PARAM: "parameters", SegmentKind.GRAD: "gradients", SegmentKind.STATES: "states"}


def trace_by_size(
    records: Sequence[Record], config: OffloadConfig, *, uses: Uses, num_tokens: int
) -> MicroBatchTrace:
    """Return a micro batch of so many tokens as far as sizes tell, before the model has been called.

    Its operations are 2 for each parameter and token in the forward, 4 in backward, and 2 more where a forward is run
    again. Attention is left out, and so are the inputs of checkpointed units, which are the same for each plan. Of
    experts all are counted, though a token reaches a few.
    """
    forward_flops = 2 * num_tokens * used_elements(records, uses)
    recomputed = forward_flops if config.activation_checkpoints is not None else 0
    return MicroBatchTrace(
        num_tokens=num_tokens,
        forward_flops=forward_flops,
        backward_flops=2 * forward_flops + recomputed,
        kept_bytes=0,
        peak_bytes=0,
    )


@dataclass(frozen=True)
class Tried:
    """A filling and the seconds of its step."""

    filling: Filling
    seconds: float
    homes: frozenset[tuple[tuple[int, SegmentKind], TierName]]

    def text(self) -> str:
        return f"{filling_text(self.filling)}: {duration_text(self.seconds)}"


@dataclass(frozen=True)
class FoundPlacement:
    """The placement that was chosen, and what was tried: that one first, the others from the fastest to the slowest.

    Others may be faster by no more than WORTH.
    """

    placement: Placement
    tried: tuple[Tried, ...]

    def lines(self, num_tokens: int) -> Iterator[str]:
        """Yield sentences about the choice and the others; none where nothing was tried."""
        if not self.tried:
            return
        best, *others = self.tried
        is_shortest = not others or best.seconds <= others[0].seconds
        rank = "the shortest of" if is_shortest else f"no more than {WORTH:.1%} above the shortest of"
        yield (
            f"auto, by the simulated step with {num_tokens:,} tokens in a micro batch, without attention: "
            f"{best.text()}, {rank} {len(self.tried)} placements."
        )
        if others:
            shown = "; ".join(one.text() for one in others[:NUM_SHOWN])
            more = len(others) - NUM_SHOWN
            yield f"{'slower' if is_shortest else 'others'}: {shown}" + (
                f"; {more} more, up to {duration_text(others[-1].seconds)}." if more > 0 else "."
            )


def filling_text(filling: Filling) -> str:
    order = ", then ".join(_NAMES[kind] for kind in filling.to_host)
    text = f"to the host {order}"
    if filling.last_in_host:
        text += ", the last units first"
    units = "the last units" if filling.last_on_device else "the first units"
    if filling.device_share == 0.0:
        return f"{text}; updates on the host alone"
    share = "" if filling.device_share == 1.0 else f", {filling.device_share:.0%} of those that have room"
    return f"{text}; updates on the device of {units}{share}"


def fastest_placement(
    records: Sequence[Record],
    config: OffloadConfig,
    available: Mapping[TierName, int],
    *,
    seconds_of: Callable[[MemoryPlan], float],
    **needs: Unpack[Needs],
) -> FoundPlacement:
    """Choose the home of every segment by the simulated step: [Note: found by time].

    When no placement fits, the result is that of `choose_placement`, and nothing was tried.

    Args:
        seconds_of: forecasts a step with a plan.
        available, needs: those of `choose_placement`.
    """
    config = _without_spare_places(config)
    placements: dict[Filling, Placement] = {}
    found: dict[Filling, Tried] = {}
    known: dict[frozenset[tuple[tuple[int, SegmentKind], TierName]], float] = {}

    def tried(filling: Filling) -> Tried:
        if filling not in found:
            placement = choose_placement(records, config, available, filling=filling, **needs)
            placements[filling] = placement
            homes = frozenset(placement.items())
            if homes not in known:
                known[homes] = planned_seconds(placement)
            found[filling] = Tried(filling, known[homes], homes)
        return found[filling]

    def planned_seconds(placement: Placement) -> float:
        try:
            plan = plan_memory(records, config, placement=placement, **needs)
        except BudgetError:
            return inf
        return seconds_of(plan)

    kinds = [kind for kind in BY_BYTES.to_host if kind is not SegmentKind.GRAD or keeps_gradients(config)]
    first = best = tried(replace(BY_BYTES, to_host=tuple(kinds)))
    if best.seconds == inf:
        return FoundPlacement(placements[first.filling], ())
    is_better = True
    while is_better:
        is_better = False
        for changes in _changes(kinds):
            for filling in changes(best.filling):
                other = tried(filling)
                if other.seconds < best.seconds * (1 - WORTH):
                    best, is_better = other, True
    return FoundPlacement(placements[best.filling], _ranked(best, found.values()))


_Changes = Callable[[Filling], Iterator[Filling]]


def _changes(kinds: Sequence[SegmentKind]) -> tuple[_Changes, ...]:
    """Return the choices that are changed in turn. Gradients that are not kept have no home to choose."""

    def orders(filling: Filling) -> Iterator[Filling]:
        for order in permutations(kinds):
            yield replace(filling, to_host=order)

    def shares(filling: Filling) -> Iterator[Filling]:
        for share in DEVICE_SHARES:
            yield replace(filling, device_share=share)

    def sides(filling: Filling) -> Iterator[Filling]:
        yield replace(filling, last_on_device=not filling.last_on_device)
        yield replace(filling, last_in_host=not filling.last_in_host)

    return orders, shares, sides


def _ranked(best: Tried, found: Collection[Tried]) -> tuple[Tried, ...]:
    """Return the best one, then the others in the order of their time; of equal placements the first."""
    by_homes: dict[object, Tried] = {best.homes: best}
    for one in found:
        by_homes.setdefault(one.homes, one)
    others = [one for one in by_homes.values() if one is not best and one.seconds < inf]
    return (best, *sorted(others, key=lambda one: one.seconds))
