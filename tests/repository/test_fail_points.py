"""The fail points of the package: each is passed and used, what is put there runs there, and without one it is free."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from offloadzero.core.fail_points import Point, through
from tests.support.faults import replaced

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "offloadzero"
# What runs once for each parameter.
OF_PARAMETERS = ("streaming/hooks.py", "step/gradient_hook.py", "step/collect.py", "step/record_gradient.py")


@functools.cache
def calls_of_through() -> list[tuple[str, ast.Call]]:
    return [
        (str(file.relative_to(PACKAGE)), node)
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "through"
    ]


def test_each_point_is_passed_in_the_package_and_used_by_a_test() -> None:
    passed = {ast.literal_eval(call.args[0]) for _, call in calls_of_through()}
    assert passed == set(get_args(Point))
    tests = "".join(file.read_text() for file in TESTS.rglob("*.py") if file != Path(__file__))
    assert [point for point in sorted(passed) if f'"{point}"' not in tests] == []


def test_no_parameter_passes_a_point_and_the_package_does_not_listen() -> None:
    assert not {file for file, _ in calls_of_through()} & set(OF_PARAMETERS)
    listens = [file for file in PACKAGE.rglob("*.py") if "listening(" in file.read_text()]
    assert listens == [PACKAGE / "core" / "fail_points.py"]


def test_delays_and_faults_are_put_at_points() -> None:
    """What a point offers is not replaced behind its back, but by planted bugs and by what simulates it."""
    behind = {call.args[1].attr for _, call in calls_of_through() if isinstance(call.args[1], ast.Attribute)}
    private = "|".join(name for name in behind if name.startswith("_"))
    pattern = re.compile(rf'setattr\([^()]*"(?:{private})"')
    assert pattern.search('monkeypatch.setattr(Lane, "_launch", slow)')
    files = [file.relative_to(TESTS) for file in TESTS.rglob("*.py") if file != Path(__file__)]
    found = {str(file) for file in files if pattern.search((TESTS / file).read_text())}
    assert {file for file in found if not file.startswith("simulated/")} == {"races/test_planted_races.py"}


def double(number: int) -> int:
    return 2 * number


def test_without_a_listener_the_work_is_what_it_was() -> None:
    assert through("lane.launch", double, "fetch") is double


def test_what_is_put_at_a_point_runs_there_and_only_there() -> None:
    def more(work: Callable[[int], int], number: int) -> int:
        return work(number) + 1

    with replaced("lane.launch", more, about="fetch"):
        assert through("lane.launch", double, "fetch")(4) == 9
        assert through("lane.launch", double, "landing") is double
        assert through("landing.merge", double, "fetch") is double
    assert through("lane.launch", double, "fetch") is double


def test_later_listeners_are_around_earlier_ones() -> None:
    def adding(name: str) -> Callable[..., str]:
        return lambda work, text: f"{name}({work(text)})"

    first, second = (replaced("landing.merge", adding(name)) for name in ("first", "second"))
    with first, second:
        assert through("landing.merge", str)("work") == "second(first(work))"
    first, second = (replaced("landing.merge", adding(name)) for name in ("first", "second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert through("landing.merge", str)("work") == "second(work)"
    second.__exit__(None, None, None)
    assert through("landing.merge", str) is str
