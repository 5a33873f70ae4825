"""The fetches of a running engine beside those that a plan has of its steps: the same, in the same places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offloadzero.memory.arena import ALIGN_BYTES, Lease, align_up
from offloadzero.planning.step_fetches import StartedFetch, UseOfUnit, fetches_in_order
from offloadzero.streaming.leased_unit import HOME
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_leases import UnitLeases
from tests.streaming.test_order_of_use import Wide, start, train_step
from tests.support.models import Stack
from tests.support.training import make_config, merge

HIDDEN = {1: 40, 2: 80, 3: 120, 4: 160, 5: 200}  # of a residual layer in bf16, by its pages


class Started:
    """The fetches that an engine has started since its last step ended, by the number of uses before them.

    Each arrives at once, as what is on its way counts as there in a plan.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step: list[StartedFetch] = []
        self._so_far: list[StartedFetch] = []
        self._num_uses = 0  # that have begun in this step
        self._is_between = True  # no use goes on
        for kind, name in (
            (ResidencyPolicy, "begin_use"),
            (ResidencyPolicy, "end_use"),
            (ResidencyPolicy, "finish_step"),
            (UnitLeases, "start_fetch"),
        ):
            monkeypatch.setattr(kind, name, self._noting(getattr(self, name), getattr(kind, name)))

    @staticmethod
    def _noting(note: Any, do: Any) -> Any:
        def noted(subject: Any, *arguments: Any, **options: Any) -> Any:
            note(subject, *arguments)
            done = do(subject, *arguments, **options)
            if note.__name__ == "start_fetch":
                arguments[0].fetched.wait()
            return done

        return noted

    def begin_use(self, policy: ResidencyPolicy, index: int) -> None:
        self._num_uses += index != policy.current
        self._is_between = False

    def end_use(self, policy: ResidencyPolicy, index: int) -> None:
        if index == policy.current:
            self._is_between = True
            # The last unit of the forward is the first of backward: its two uses are one for the engine.
            self._num_uses += index == policy.streamed[-1]

    def finish_step(self, _policy: ResidencyPolicy) -> None:
        self.step, self._so_far = self._so_far, []
        self._num_uses, self._is_between = 0, True

    def start_fetch(self, _leases: UnitLeases, unit: Any, _lease: Lease) -> None:
        start = self._num_uses if self._is_between else self._num_uses - 1
        self._so_far.append(StartedFetch(start, unit.record.index))


def uses_of_step(units: list[int], num_micro: int, *, in_backward: bool) -> Iterator[UseOfUnit]:
    for micro in range(num_micro):
        stale = in_backward and micro == num_micro - 1
        yield from (UseOfUnit(unit) for unit in units)
        yield from (UseOfUnit(unit, completes=True, makes_stale=stale) for unit in reversed(units))


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["in_backward", "at_step"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("pages", "room"),
    [
        ((1, 5, 5, 5, 5), 15),  # an embedding before blocks
        ((1, 5, 1, 4, 3, 5, 2), 11),
        ((3, 5, 3, 5, 2, 1, 3), 5),
        ((5, 1, 5, 5, 3, 4, 2), 14),
        ((1, 1, 3, 3, 4, 3, 5), 14),
        ((5, 2, 2, 2, 5), 9),  # an embedding and a head that are larger than blocks
    ],
)
def test_an_engine_fetches_where_its_plan_says(
    pages: tuple[int, ...],
    room: int,
    accumulation: int,
    clipping: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of units of several sizes, whose holes may be too small, to the very fetch."""
    widths = iter([HIDDEN[number] for number in pages])
    live = {"stage3_max_live_parameters": room * ALIGN_BYTES // 2}
    config = merge(
        make_config("host", tmp_path, accumulation=accumulation, clipping=clipping),
        {"zero_optimization": live, "offloadzero": {"units": {"min_leaf_elements": 10**6}}},
    )
    started = Started(monkeypatch)
    engine: Any = start(lambda: Stack(lambda: Wide(next(widths)), len(pages)), config)
    executor = engine.optimizer.runtime.executor
    sizes = {u.record.index: align_up(u.num_bytes) for u in executor.units if u.residency is not HOME}
    assert [size // ALIGN_BYTES for size in sizes.values()] == list(pages)
    uses = list(uses_of_step(list(sizes), accumulation, in_backward=not clipping))
    expected = fetches_in_order(uses, sizes, arena_bytes=executor.leases.arena.num_bytes)
    for seed in range(5):
        train_step(engine, seed)
        assert seed < 2 or started.step == expected, f"step {seed}"
    engine.close()
