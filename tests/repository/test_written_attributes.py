"""What a step hands on is written by its own methods alone, which say what happens to it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from offloadzero.step.record_gradient import RecordGradient

PACKAGE = Path(__file__).parents[2] / "offloadzero"
ATTRIBUTES = {field.name for field in fields(RecordGradient)} | {"home", "device_home"}
# By the file of their class: attributes that no other file of the package writes.
OWN = {
    "step/record_gradient.py": ATTRIBUTES,
    "step/param_grad.py": {"contribution", "is_dropped", "is_seen", "taken_in"},
    "step/job.py": {"applied", "decided", "decision", "grad_scale", "is_closed", "ranges", "refused"},
    "memory/tickets.py": {"first", "given_up", "stop", "stop_was_raised", "threads", "was_raised"},
    "engine/lifetime.py": {"_abort", "_others_wait", "_parts"},
}
CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"}


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns or deletes, and the object of a call that changes it."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        yield from node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        yield node.func.value


@functools.cache
def written_of_others(text: str) -> set[str]:
    """The attributes of objects other than `self` that a file writes, and those whose contents it changes."""
    found = set()
    todo = [target for node in ast.walk(ast.parse(text)) for target in targets(node)]
    while todo:
        target = todo.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            todo += target.elts
        elif isinstance(target, (ast.Starred, ast.Subscript)):
            todo.append(target.value)
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
            found.add(target.attr)
    return found


@pytest.mark.parametrize("own_file", OWN)
def test_attributes_are_written_in_their_own_file(own_file: str) -> None:
    """Those of a record's gradient have names that other rooms use for theirs: `step/` alone is looked at."""
    room = PACKAGE / "step" if OWN[own_file] is ATTRIBUTES else PACKAGE
    files = [path for path in room.rglob("*.py") if path != PACKAGE / own_file]
    assert len(files) > 10
    found = {
        str(path.relative_to(PACKAGE)): written_of_others(path.read_text()) & OWN[own_file] for path in files
    }
    assert {name: attributes for name, attributes in found.items() if attributes} == {}
    text = (PACKAGE / own_file).read_text()
    assert not [name for name in OWN[own_file] - ATTRIBUTES if f"self.{name}" not in text]


@pytest.mark.parametrize(
    "text",
    [
        "gradient.landed = done = Promise()",
        "state.lease, state.flat = None, flat",
        "state.arrived.append(number)",
        "gradient.sq_norms[place] = sq_norm",
        "del state.waiting[:2]",
        "factor = state.factors.pop(number, 1.0)",
    ],
)
def test_a_write_from_elsewhere_is_seen(text: str) -> None:
    assert written_of_others(text) & ATTRIBUTES
