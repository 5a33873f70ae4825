"""`"placement": "auto"` by time: of the placements that the budgets allow, the one with the shortest forecast step.

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

from offloadzero.config import OffloadConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import BudgetError
from offloadzero.observe.texts import duration_text
from offloadzero.planning.hardware import Hardware
from offloadzero.planning.homes import Placement
from offloadzero.planning.memory_plan import MemoryPlan, Needs, keeps_gradients, plan_memory
from offloadzero.planning.model.trace import MicroBatchTrace
from offloadzero.planning.placement import BY_BYTES, Filling, choose_placement
from offloadzero.planning.step.forecast import Step, plan_step
from offloadzero.planning.step.work import Uses, used_elements
from offloadzero.update.records import Record

if TYPE_CHECKING:  # typing has it from Python 3.11 on
    from typing_extensions import Unpack

NUM_SHOWN = 3  # placements that are slower
WORTH = 0.05  # the share by which another order must be faster: [Note: found by time]
DEVICE_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
_NAMES = {SegmentKind.PARAM: "parameters", SegmentKind.GRAD: "gradients", SegmentKind.STATES: "states"}


class StepTimer:
    """Simulates a step with one plan or another of the same records, before the model has been called.

    Operations follow from the sizes: 2 for each parameter and token in the forward, 4 in backward, and 2 more where a
    forward is run again. Attention is left out, and so are the inputs of checkpointed units, which are the same for
    each plan. Of experts all are counted, though a token reaches a few.
    """

    def __init__(
        self,
        records: Sequence[Record],
        config: OffloadConfig,
        *,
        uses: Uses,
        hardware: Hardware,
        num_tokens: int,
    ) -> None:
        """Prepare for micro batches of `num_tokens`."""
        self._records, self._config, self._uses, self._hardware = records, config, uses, hardware
        forward_flops = 2 * num_tokens * used_elements(records, uses)
        recomputed = forward_flops if config.activation_checkpoints is not None else 0
        self._trace = MicroBatchTrace(
            num_tokens=num_tokens,
            forward_flops=forward_flops,
            backward_flops=2 * forward_flops + recomputed,
            kept_bytes=0,
            peak_bytes=0,
        )

    def seconds(self, plan: MemoryPlan) -> float:
        """Return the seconds of a step with a plan; inf: a rate is not known."""
        found = self._hardware.simulated(self._step(plan))
        return inf if found is None else found.seconds

    def unknown(self, plan: MemoryPlan) -> tuple[str, ...]:
        """Return the lanes of a step with a plan whose rates are not known."""
        return self._hardware.forecast(self._step(plan)).unknown

    def _step(self, plan: MemoryPlan) -> Step:
        return plan_step(self._records, plan, self._config, uses=self._uses, trace=self._trace)


@dataclass(frozen=True)
class Tried:
    """A filling and the seconds of its step."""

    filling: Filling
    seconds: float
    homes: frozenset[tuple[tuple[int, SegmentKind], TierName]]

    def text(self) -> str:
        """Return both in words."""
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
    """Say in which order the tiers are filled."""
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
