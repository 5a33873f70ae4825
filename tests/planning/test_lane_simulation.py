"""Tasks on lanes: small cases by hand, and what must hold of any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offloadzero.planning.step.lanes import Choice, Queue, Tasks, simulate

A, B = Queue("a"), Queue("b")


def test_a_lane_does_one_task_at_a_time_and_waits() -> None:
    tasks = Tasks()
    one = tasks.add(A, 2.0, [])
    two = tasks.add(B, 3.0, [one])
    three = tasks.add(A, 1.0, [])
    both = tasks.join([two, three])
    found = simulate(tasks)
    assert found.starts_s == [0, 2, 2, 5]
    assert found.ends_s == [2, 5, 3, 5]
    assert found.critical_s(both) == {"a": 2, "b": 3}
    assert found.critical_s(both, since_s=1.0) == {"a": 1, "b": 3}


def test_a_queue_keeps_its_order_and_ranks_go_first() -> None:
    tasks = Tasks()
    late = tasks.add(B, 5.0, [])
    head = tasks.add(A, 1.0, [late])
    behind = tasks.add(A, 1.0, [])  # could begin, but stands behind one that cannot
    other = tasks.add(Queue("a", 1), 7.0, [])
    found = simulate(tasks)
    assert [found.starts_s[task] for task in (other, head, behind)] == [0, 7, 8]
    assert found.critical_s(behind) == {"a": 9}


@pytest.mark.parametrize(("asks_after", "ends_s"), [(1.0, 6.0), (3.0, 11.0)])
def test_a_choice_is_made_by_what_has_begun(asks_after: float, ends_s: float) -> None:
    """The update begins after 2 s, has its values after 6, and is home after 10; reading it takes 1."""
    tasks = Tasks()
    asked = tasks.add(Queue("asks"), asks_after, [])
    before = tasks.add(B, 2.0, [])
    update = tasks.add(B, 4.0, [before])
    home = tasks.add(Queue("drive"), 4.0, [update])
    read = tasks.add(A, 1.0, [asked], choice=Choice(asked, update, update, home))
    assert simulate(tasks).ends_s[read] == ends_s


def test_lanes_that_share_slow_each_other_down() -> None:
    def speeds(lanes: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(lanes, 1.0 / len(lanes))

    tasks = Tasks()
    short, long = tasks.add(A, 1.0, []), tasks.add(B, 3.0, [])
    found = simulate(tasks, speeds)
    assert found.ends_s[short] == pytest.approx(2)
    assert found.ends_s[long] == pytest.approx(4)


def test_tasks_that_wait_for_each_other_are_named() -> None:
    tasks = Tasks()
    tasks.add(A, 1.0, [1], "the first")
    tasks.add(A, 1.0, [], "the second")
    with pytest.raises(AssertionError, match="2 tasks wait for each other: the first"):
        simulate(tasks)


def test_a_task_waits_for_earlier_ones_only_once() -> None:
    tasks = Tasks()
    one = tasks.add(A, 1.0, [])
    two = tasks.add(B, 1.0, [one, one, None])
    assert simulate(tasks).ends_s[two] == 2


# Each task: its lane, its seconds, and how far back are those that it waits for.
task = st.tuples(st.integers(0, 3), st.floats(0.0, 10.0), st.lists(st.integers(1, 8), max_size=3))


@given(st.lists(task, min_size=1, max_size=40), st.integers(0, 3), st.floats(0.1, 1.0))
@hypothesis_settings(max_examples=100, deadline=None)
def test_no_faster_than_a_lane_and_no_slower_with_a_faster_one(
    given_tasks: list[tuple[int, float, list[int]]], lane: int, factor: float
) -> None:
    def ends(factors: dict[int, float]) -> list[float]:
        tasks = Tasks()
        for number, (on, seconds, back) in enumerate(given_tasks):
            after = [number - distance for distance in back if distance <= number]
            tasks.add(Queue(str(on)), seconds * factors.get(on, 1.0), after)
        return list(simulate(tasks).ends_s)

    before, after = ends({}), ends({lane: factor})
    busy = [sum(seconds for on, seconds, _ in given_tasks if on == name) for name in range(4)]
    assert max(before) >= max(busy) * (1 - 1e-9)
    assert max(before) <= sum(busy) * (1 + 1e-9)
    for slow_s, fast_s in zip(before, after, strict=True):
        assert fast_s <= slow_s + 1e-9
