"""The report of a step that has run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offloadzero.observe.bound import Bound
from offloadzero.observe.collectives import CollectiveCount


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: its wall time, and the seconds for which the computation stood still, by wait.

    It began at `start_s` on time.perf_counter(). `bound` is the least time that its busiest lane needs; None where
    nothing is recorded (`offloadzero.observe`, or the logger `offloadzero.steps` at level INFO). So are `collectives`,
    those that this rank of several has issued from the end of the step before to that of this one.
    """

    step: int
    step_s: float
    waits_s: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    bound: Bound | None = None
    collectives: Mapping[str, CollectiveCount] = field(default_factory=dict)

    @property
    def total_wait_s(self) -> float:
        """Seconds lost in all waits of the step."""
        return sum(self.waits_s.values())

    @property
    def efficiency(self) -> float | None:
        """The overlap efficiency, T_bound / T_step; None without a bound."""
        return None if self.bound is None else self.bound.efficiency(self.step_s)

    @property
    def end_s(self) -> float:
        """The time of its end, on time.perf_counter()."""
        return self.start_s + self.step_s
