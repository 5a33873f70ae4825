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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offloadzero.config import BudgetConfig, OffloadConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.planning.homes import Placement
from offloadzero.planning.memory_plan import Needs, keeps_gradients, plan_memory
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


def segments_of(record: Record) -> list[tuple[int, SegmentKind]]:
    """Return the segments of a record that have a home to choose."""
    kinds = (*record.layout, *([SegmentKind.GRAD] if record.num_trainable else []))
    return [(record.index, kind) for kind in kinds]


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
            for segment in segments_of(record):
                _, kind = segment
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
