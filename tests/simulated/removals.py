"""The places of the package where the device's work is ordered, read from its code, each with what removes it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("memory", "streaming", "access", "activations", "step", "update", "arithmetic")
# Waits for the file engine's own transfers, which the checker takes as they are; the device itself.
# Times of events, which order nothing: tests/observe/test_device_time.py.
LEFT_OUT = {
    "memory/nvme.py",
    "memory/checksums.py",
    "memory/device.py",
    "memory/device_clock.py",
    "access/script_collectives.py",  # waits for what a script sends itself
}
WAITS = {
    "join_streams",
    "order_compute",
    "order_compute_after",
    "synchronize",
    "wait",
    "wait_event",
    "wait_fulfilled",
    "wait_updatable",
}
HELD = {"EndedCell": 2}  # the argument that only keeps memory, by class: its place
MARKS = {"fence", "launched", "computed"}  # what was launched so far
NOTES = {"_computing"}  # lists of those that are waited for


@dataclass(frozen=True)
class Mutation:
    """One order that is taken away: the number of the node in its file, in the order of ast.walk."""

    file: str
    line: int
    column: int
    what: str
    function: str
    statement: int  # the line at which the statement begins that it is a part of
    rank: int = 0  # of several at one place
    number: int = 1  # of those with the same words in the same function

    @property
    def key(self) -> str:
        """Its place without the line."""
        return f"{self.file} {self._words}"

    @property
    def _words(self) -> str:
        return f"{self.function}: {self.what}" + (f" ({self.number})" if self.number > 1 else "")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self._words}"


def files() -> list[str]:
    """Those of the package that may order the device's work."""
    package = ROOT / "offloadzero"
    found = [str(path.relative_to(package)) for name in PACKAGES for path in (package / name).rglob("*.py")]
    return sorted(set(found) - LEFT_OUT)


def mutations() -> list[Mutation]:
    """All of them, in the order of the code."""
    return [mutation for file in files() for mutation, _ in changes(file, parse(file))]


def parse(file: str) -> ast.Module:
    return ast.parse((ROOT / "offloadzero" / file).read_text())


def changes(file: str, tree: ast.Module) -> Iterator[tuple[Mutation, Callable[[], None]]]:
    """Each mutation of a file with the call that applies it to `tree`."""
    numbers: Counter[str] = Counter()
    for function, statement, node in _nodes_in_functions(tree):
        for rank, (what, change) in enumerate(_changes_of(node, function)):
            mutation = Mutation(file, node.lineno, node.col_offset, what, function, statement, rank)
            numbers[mutation.key] += 1
            yield replace(mutation, number=numbers[mutation.key]), change


def _nodes_in_functions(
    tree: ast.AST, function: str = "", statement: int = 0
) -> Iterator[tuple[str, int, Any]]:
    """Each with its function and the line of its statement."""
    for child in ast.iter_child_nodes(tree):
        inner = child.name if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else function
        line = child.lineno if isinstance(child, ast.stmt) else statement
        if isinstance(child, (ast.Expr, ast.Call, ast.Assign)):
            yield function, line, child
        yield from _nodes_in_functions(child, inner, line)


def _changes_of(
    node: ast.Expr | ast.Call | ast.Assign, function: str
) -> Iterator[tuple[str, Callable[[], None]]]:
    if isinstance(node, ast.Assign):
        if isinstance(node.value, ast.List) and ast.unparse(node.targets[0]) == "after":
            yield from _elements("after", node.value)
        return
    if isinstance(node, ast.Expr):
        if (
            isinstance(node.value, ast.Call)
            and _name(node.value) in WAITS
            and not _waits_for_call(node.value)
        ):
            func = node.value.func  # what makes the ticket still runs
            rest = (
                func.value if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call) else None
            )
            yield f"no {ast.unparse(node.value)}", _setter(node, "value", rest or ast.Constant(None))
        elif isinstance(node.value, ast.Call) and _appends_to(node.value) in NOTES:
            yield f"no {ast.unparse(node.value)}", _setter(node, "value", ast.Constant(None))
        return
    name = _name(node)
    for keyword in node.keywords:
        if isinstance(keyword.value, ast.Call) and _name(keyword.value) in MARKS:
            continue  # comes by itself
        if keyword.arg == "fence" and not _is_none(keyword.value):
            yield f"no fence={ast.unparse(keyword.value)}", _setter(keyword, "value", _nothing())
        elif keyword.arg == "last_use":
            yield f"no last_use={ast.unparse(keyword.value)}", _setter(keyword, "value", _finished())
        elif keyword.arg in ("after", "readers"):
            yield from _elements(keyword.arg, keyword.value)
        elif keyword.arg == "held":
            yield f"not held: {ast.unparse(keyword.value)}", _setter(keyword, "value", ast.Constant(None))
    if name == "fence" and isinstance(node.func, ast.Attribute) and not node.args:
        yield f"no {ast.unparse(node)}", _becomes(node, _nothing())
    elif name in MARKS and not node.args:
        yield f"no {ast.unparse(node)}", _becomes(node, _finished())
    elif name == "AllOf":
        yield from _elements(name, node.args[0])
    elif name == "done" and not node.args and function != "done":
        yield f"as if {ast.unparse(node)}", _becomes(node, ast.Constant(True))
    elif name in HELD:
        place = HELD[name]
        yield f"not held: {ast.unparse(node.args[place])}", _item_setter(node.args, place, ast.Constant(None))


def _waits_for_call(wait: ast.Call) -> bool:
    """Whether what it waits for is made right there, from tickets that are mutated by themselves."""
    func = wait.func
    return (
        isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Call)
        and _name(func.value) in {"AllOf", *MARKS}
    )


def _elements(name: str, given: ast.expr) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each element of a list that is written out is left out; one that is not is empty."""
    if not isinstance(given, (ast.List, ast.Tuple)):
        yield f"nothing of {name} {ast.unparse(given)}", _becomes(given, _nothing())
        return
    for element in given.elts:
        if isinstance(element, ast.Call) and _name(element) in MARKS:
            continue  # comes by itself
        yield f"{name} without {ast.unparse(element)}", lambda element=element: given.elts.remove(element)


def _name(call: ast.Call) -> str:
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _appends_to(call: ast.Call) -> str:
    """The name of the attribute that something is appended to."""
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Attribute):
        return func.value.attr
    return ""


def _nothing() -> ast.expr:
    return ast.Tuple([], ast.Load())


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _finished() -> ast.expr:
    return ast.parse("__import__('offloadzero.memory.tickets', fromlist=['x']).FINISHED", mode="eval").body


def _setter(node: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _item_setter(items: list[Any], place: int, value: Any) -> Callable[[], None]:
    return lambda: items.__setitem__(place, value)


def _becomes(node: Any, value: Any) -> Callable[[], None]:
    """An expression in place of another one, which keeps its place in the tree."""

    def change() -> None:
        node.__class__ = value.__class__
        node.__dict__ = {**{k: v for k, v in node.__dict__.items() if k.startswith(("line", "col", "end_"))}}
        for name, of_value in ast.iter_fields(value):
            setattr(node, name, of_value)

    return change
