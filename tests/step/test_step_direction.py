"""A step flows one way: no object of it calls, or writes into, one by which it is called.

[Note: the direction of a step]
Steps are traced on all threads. An object is an instance of a class of the rooms below, wherever its methods come from:
a ticket's `wait()` is inherited. A function that was defined in a method, a callback say, is code of that method's
object, whoever calls it. There is an edge from one class to another where a method of the first calls a method of the
second, or sets an attribute of an instance; what it calls on the way, plain functions and other rooms, does not matter.
Making an object is no edge, and what one thread has put into a queue for another begins there anew. So a job that is
handed on is no circle, and one that is reported back is: a call of an object that, directly or not, has called who
reports.

Edges between instances of one class say nothing: the forward of a site runs inside another's.

`python -m tests.step.test_step_direction` prints the edges.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from offloadzero.step.coordinator import StepCoordinator
from offloadzero.step.decider import Decider
from tests.repository.test_import_floors import find_circle
from tests.support.plain_form import clip, engine_config, make_model, offloaded
from tests.support.tiny import make_engine, tokens

DOC = Path(__file__).parents[2] / "docs" / "architecture.md"
ROOMS = ("step", "streaming", "access", "activations", "update", "arithmetic")
MAKING = {"__init__", "__post_init__"}


def in_rooms(name: object) -> bool:
    return isinstance(name, str) and name.startswith(tuple(f"offloadzero.{room}." for room in ROOMS))


def owner(frame: FrameType) -> object | None:
    """The object whose method, one of its own or inherited, or whose callback, runs in `frame`."""
    code = frame.f_code
    if "self" not in code.co_varnames[:1] + code.co_freevars:
        return None
    found: object = frame.f_locals.get("self")
    return found if in_rooms(type(found).__module__) else None


def source(frame: FrameType | None) -> tuple[str, str] | None:
    """The class that calls from `frame`, and the function; a plain function of the rooms if no object is behind it."""
    plain = None
    while frame is not None:
        found = owner(frame)
        if found is not None:
            return type(found).__name__, frame.f_code.co_name
        if in_rooms(frame.f_globals.get("__name__")):
            plain = f"{str(frame.f_globals['__name__']).rpartition('.')[2]}.py", frame.f_code.co_name
        frame = frame.f_back
    return plain


@dataclass
class Trace:
    """Edges between classes, each with an example."""

    edges: dict[tuple[str, str], str] = field(default_factory=dict)
    is_on: bool = False

    def note(self, frame: FrameType | None, target: object, what: str) -> None:
        found = source(frame)
        if found is not None and found[0] != type(target).__name__:
            self.edges.setdefault((found[0], type(target).__name__), f"{found[1]}: {what}")

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.is_on and event == "call":
            called = owner(frame)
            if called is not None and frame.f_code.co_name not in MAKING:
                self.note(frame.f_back, called, f"{frame.f_code.co_name}()")

    def noting_writes(self) -> Callable[[object, str, object], None]:
        """A `__setattr__`."""

        def set_attribute(target: object, name: str, value: object) -> None:
            object.__setattr__(target, name, value)
            if self.is_on:
                self.note(sys._getframe(1), target, f"sets {name}")

        return set_attribute

    @property
    def circle(self) -> list[str]:
        graph: dict[str, set[str]] = {}
        for caller, called in self.edges:
            graph.setdefault(caller, set()).add(called)
        return find_circle(graph)

    @property
    def report(self) -> str:
        return "\n".join(f"{a} -> {b}  ({example})" for (a, b), example in sorted(self.edges.items()))


def room_classes() -> Iterator[type]:
    """Those whose instances can be written into, of the modules that a step has loaded."""
    for name in [name for name in sys.modules if in_rooms(name)]:
        for found in vars(sys.modules[name]).values():
            is_own = isinstance(found, type) and found.__module__ == name
            if is_own and found.__setattr__ is object.__setattr__:
                yield found


@contextmanager
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Engines made inside are traced while `is_on`."""
    trace = Trace()
    for found in room_classes():
        monkeypatch.setattr(found, "__setattr__", trace.noting_writes())
    outer = sys.getprofile()
    gc.disable()  # what is collected in the midst of a call is not called by it
    threading.setprofile(trace.profile)
    sys.setprofile(trace.profile)
    try:
        yield trace
    finally:
        sys.setprofile(outer)
        threading.setprofile(None)  # type: ignore[arg-type]
        gc.enable()


# --- what is traced


def steps_of_an_engine(
    trace: Trace, directory: Path, placement: str, *, accumulation: int = 1, **keys: Any
) -> None:
    config = engine_config(
        placement, directory, bf16={"enabled": True}, gradient_accumulation_steps=accumulation, **keys
    )
    engine = make_engine(config, make_model())
    trace.is_on = True
    try:
        for seed in range(2 * accumulation):
            engine.backward(engine(tokens(seed)))
            engine.step()
        engine.get_global_grad_norm()
        engine.zero_grad()
        engine.optimizer.runtime.synchronize()
    finally:
        trace.is_on = False
        engine.close()


def steps_in_plain_form(trace: Trace, directory: Path, placement: str) -> None:
    """Gradients that a script clips, edits, swaps, drops and makes zero."""
    with offloaded(placement, directory) as (model, optimizer):
        trace.is_on = True
        for step in range(3):
            for micro in range(2):
                model(tokens(2 * step + micro)).backward()
            clip(model)
            up, down = model.blocks[0].up.weight, model.blocks[1].up.weight
            up.grad, down.grad = down.grad.clone(), up.grad.clone()
            model.blocks[2].down.bias.grad = None
            model.norm.weight.grad = torch.ones_like(model.norm.weight)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        optimizer.runtime.synchronize()
        trace.is_on = False


Script = Callable[[Trace, Path], None]
SCRIPTS: dict[str, Script] = {
    "host, in backward": lambda trace, path: steps_of_an_engine(trace, path, "host"),
    "mixed, in backward": lambda trace, path: steps_of_an_engine(trace, path, "mixed"),
    "nvme, at the step": lambda trace, path: steps_of_an_engine(
        trace, path, "nvme", accumulation=2, gradient_clipping=1.0
    ),
    "resident, at the step": lambda trace, path: steps_of_an_engine(
        trace, path, "resident", gradient_clipping=1.0
    ),
    "plain form": lambda trace, path: steps_in_plain_form(trace, path, "mixed"),
    "plain form, nvme": lambda trace, path: steps_in_plain_form(trace, path, "nvme"),
}


def drawn() -> dict[str, list[str]]:
    """Who calls whom in the drawing of docs/architecture.md, line by line."""
    lines = re.findall(r"^(?:\w+)? +([\w.]+) +--> (.+)$", DOC.read_text(), re.MULTILINE)
    return {caller: called.split(", ") for caller, called in lines}


def traced(name: str, directory: Path) -> Trace:
    with pytest.MonkeyPatch.context() as patch, tracing(patch) as trace:
        SCRIPTS[name](trace, directory)
    return trace


@pytest.fixture(scope="module")
def trace_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trace]:
    """Each script is traced once."""
    return functools.cache(lambda name: traced(name, tmp_path_factory.mktemp("traced")))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_flows_one_way(name: str, trace_of: Callable[[str], Trace]) -> None:
    trace = trace_of(name)
    assert trace.circle == [], trace.report
    assert len(trace.edges) > 30
    drawing = drawn()
    classes = {*drawing, *(called for line in drawing.values() for called in line)}
    assert [
        (caller, called)
        for caller, called in trace.edges
        if {caller, called} <= classes and called not in drawing.get(caller, ())
    ] == []
    if name == "plain form":
        return
    # The stages, so that the trace has seen them.
    for edge in (
        ("gradient_hook.py", "GradientCollector"),
        ("gradient_hook.py", "StepCoordinator"),
        ("StepCoordinator", "Landing"),
        ("UpdatePipeline", "UpdateJob"),
        ("UpdateJob", "RecordGradient"),
    ):
        assert edge in trace.edges, trace.report


def test_each_edge_that_is_drawn_is_traced(trace_of: Callable[[str], Trace]) -> None:
    seen = {edge for name in SCRIPTS for edge in trace_of(name).edges}
    assert [
        (caller, called)
        for caller, line in drawn().items()
        for called in line
        if (caller, called) not in seen
    ] == []


def test_each_calls_only_what_is_drawn_below_it() -> None:
    drawing = drawn()
    places = {caller: place for place, caller in enumerate(drawing)}
    assert len(places) > 15
    assert [
        (caller, called)
        for caller, line in drawing.items()
        for called in line
        if places.get(called, len(places)) <= places[caller]
    ] == []


# --- what the test would see


def calls_back(coordinator: StepCoordinator) -> None:
    assert coordinator.loss_scale == 1.0


def writes_back(coordinator: StepCoordinator) -> None:
    coordinator.policy = coordinator.policy


@pytest.mark.parametrize("reports", [calls_back, writes_back])
def test_a_report_to_who_has_handed_on_is_a_circle(
    reports: Callable[[StepCoordinator], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as a gradient has landed the coordinator hears of it, which has sent it."""
    decide_one = Decider.decide_one
    begin_window = StepCoordinator.begin_window
    coordinators: list[StepCoordinator] = []

    def known(coordinator: StepCoordinator) -> None:
        coordinators.append(coordinator)
        begin_window(coordinator)

    def reporting(decider: Decider, job: Any) -> bool:
        reports(coordinators[0])
        return decide_one(decider, job)

    monkeypatch.setattr(StepCoordinator, "begin_window", known)
    monkeypatch.setattr(Decider, "decide_one", reporting)
    assert set(traced("host, in backward", tmp_path).circle) == {"StepCoordinator", "Landing"}


if __name__ == "__main__":
    for name in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"# {name}\n{traced(name, Path(folder)).report}\n")
