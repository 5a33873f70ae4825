"""The fetches of a running engine beside those that a plan has of its steps: the same, in the same places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offloadzero.memory.arena import ALIGN_BYTES, Lease, align_up
from offloadzero.observe.timeline import H2D
from offloadzero.planning.step.fetches import StartedFetch, fetches_in_order, uses_of_micro_batch
from offloadzero.planning.step.work import BACKWARD, FORWARD
from offloadzero.schedule import prefetch
from offloadzero.schedule.prefetch import eviction_order
from offloadzero.streaming.leased_unit import HOME
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_leases import UnitLeases
from tests.cli.test_plan_traffic import forecast
from tests.streaming.test_order_of_use import Wide, start, train_step
from tests.support.cases import each_pair
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


def stack_of(pages: Sequence[int], frozen: Collection[int] = ()) -> Stack:
    """Units of so many pages, some of them frozen."""
    widths = iter([HIDDEN[number] for number in pages])
    model = Stack(lambda: Wide(next(widths)), len(pages))
    for number in frozen:
        model.blocks[number].requires_grad_(False)
    return model


def config_with_room(room: int, accumulation: int, clipping: float, directory: Path) -> dict[str, Any]:
    """On the host, with leases of so many pages."""
    live = {"stage3_max_live_parameters": room * ALIGN_BYTES // 2}
    return merge(
        make_config("host", directory, accumulation=accumulation, clipping=clipping),
        {"zero_optimization": live, "offloadzero": {"units": {"min_leaf_elements": 10**6}}},
    )


PAGES_AND_ROOM = [
    ((1, 5, 5, 5, 5), 15),  # an embedding before blocks
    ((1, 5, 1, 4, 3, 5, 2), 11),
    ((3, 5, 3, 5, 2, 1, 3), 5),
    ((5, 1, 5, 5, 3, 4, 2), 14),
    ((1, 1, 3, 3, 4, 3, 5), 14),
    ((5, 2, 2, 2, 5), 9),  # an embedding and a head that are larger than blocks
]


@pytest.mark.parametrize(
    ("units", "accumulation", "clipping"), each_pair(PAGES_AND_ROOM, [1, 2], [0.0, 0.5]), ids=str
)
def test_an_engine_fetches_where_its_plan_says(
    units: tuple[tuple[int, ...], int],
    accumulation: int,
    clipping: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of units of several sizes, whose holes may be too small, to the very fetch, and as many bytes."""
    expect_as_planned(*units, accumulation, clipping, monkeypatch, tmp_path)


@pytest.mark.parametrize(("pages", "room"), PAGES_AND_ROOM)
def test_another_order_of_eviction_is_the_plans_too(
    pages: tuple[int, ...], room: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is decided in one place: the nearest next use leaves first here."""

    def nearest_first(candidates: Collection[int], distances: Mapping[int, int]) -> list[int]:
        return eviction_order(candidates, distances)[::-1]

    monkeypatch.setattr(prefetch, "eviction_order", nearest_first)
    expect_as_planned(pages, room, 2, 0.0, monkeypatch, tmp_path)


def begun(
    build: Callable[[], Stack], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Started, int]:
    """An engine, what it fetches from now on, and the bytes that its steps are to fetch by the forecast."""
    traffic = forecast(build, config)
    started = Started(monkeypatch)
    fetched = sum(traffic.by_phase[phase].get(H2D, 0) for phase in (FORWARD, BACKWARD))
    return start(build, config), started, fetched


def expect_as_planned(
    pages: tuple[int, ...],
    room: int,
    accumulation: int,
    clipping: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    build = partial(stack_of, pages)
    config = config_with_room(room, accumulation, clipping, tmp_path)
    engine, started, fetched = begun(build, config, monkeypatch)
    executor = engine.optimizer.runtime.executor
    moving = [unit for unit in executor.units if unit.residency is not HOME]
    sizes = {unit.record.index: align_up(unit.num_bytes) for unit in moving}
    assert [size // ALIGN_BYTES for size in sizes.values()] == list(pages)
    uses = uses_of_micro_batch(
        list(sizes), list(reversed(sizes)), trained=sizes.keys(), update_in_backward=not clipping
    )
    arena_bytes = executor.leases.arena.num_bytes
    expected = fetches_in_order(uses, sizes, arena_bytes=arena_bytes, times=accumulation)
    num_bytes = {unit.record.index: unit.num_bytes for unit in moving}
    assert fetched == sum(num_bytes[fetch.unit] for fetch in expected)
    for seed in range(5):
        train_step(engine, seed)
        assert seed < 2 or started.step == expected, f"step {seed}"
    engine.close()


@pytest.mark.parametrize(
    ("pages", "room", "kept", "accumulation", "clipping"),
    [
        ((5, 3, 3, 3, 4, 2, 3), 12, {0, 1, 2}, 1, 0.5),
        ((2, 4, 5, 1, 1, 3, 1), 15, {1, 2, 5}, 1, 0.0),
        ((4, 3, 5, 4, 2, 4, 2), 16, {0, 1, 3, 5, 6}, 2, 0.5),
    ],
)
def test_with_frozen_units_an_engine_settles_to_the_plans_step(
    pages: tuple[int, ...],
    room: int,
    kept: set[int],
    accumulation: int,
    clipping: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Leases of frozen units last, and lie elsewhere after each of the first steps."""
    build = partial(stack_of, pages, frozen=kept)
    config = config_with_room(room, accumulation, clipping, tmp_path)
    engine, started, fetched = begun(build, config, monkeypatch)
    units = engine.optimizer.runtime.executor.units
    by_step = []
    for seed in range(9):
        train_step(engine, seed)
        by_step.append(sum(units[fetch.unit].num_bytes for fetch in started.step))
    engine.close()
    assert by_step[6:] == [fetched] * 3
