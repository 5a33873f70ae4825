"""Every order of the device path removed, one at a time: what the checker and what the numbers say of it.

[Note: mutations]
The list is read from the code: each fence, each wait, each `last_use`, each ticket of an `after` or of an `AllOf`, each
reference that is held for a transfer. A mutant is the package without that one, in a process of its own (forked from
one that has imported torch), on which the runs of tests/simulated/small_runs.py are made. It is caught by the checker
when a run has a race that the package itself does not have, by the numbers when a run gives others.

`python -m tests.simulated.mutations` prints the table; arguments select places by a part of their name.
"""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILES = (
    "memory/lanes.py",
    "memory/store.py",
    "streaming/executor.py",
    "streaming/unit_fetches.py",
    "streaming/gradients.py",
    "streaming/param_grad.py",
    "streaming/activations.py",
    "streaming/activation_homes.py",
    "streaming/stepping.py",
    "streaming/weights.py",
    "optim/update.py",
    "optim/delivery.py",
    "optim/staging.py",
)
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
_SCRIPTS = ("script", "torch")
_ACTIVATIONS = ("activations",)
RUNS_OF = {  # where the others do not come: how the runs' names begin
    "streaming/activations.py": _ACTIVATIONS,
    "streaming/activation_homes.py": _ACTIVATIONS,
    "streaming/param_grad.py": _SCRIPTS,
    "streaming/weights.py": _SCRIPTS,
}
TIMEOUT_S = 150.0
MORE_RUNS = 1  # of a mutant that the checker has caught, for the numbers


@dataclass(frozen=True)
class Mutation:
    """One order that is taken away: the number of the node in its file, in the order of ast.walk."""

    file: str
    line: int
    column: int
    what: str
    function: str
    rank: int = 0  # of several at one place

    @property
    def key(self) -> str:
        """Its place without the line."""
        return f"{self.file} {self.function}: {self.what}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.what}"


# What nothing would be wrong without, by key: why.
_OTHER_BRANCH = "the other branch orders the stream, too"
_BEHIND = "its device memory was given up behind the copy home, and the fetch is behind that"
REDUNDANT: dict[str, str] = {
    "streaming/executor.py wait_updates: no unit.updated.wait()": "who reads a state waits for its update by himself",
    "streaming/executor.py _complete_fetch: as if unit.fetched.done()": _OTHER_BRANCH,
    "streaming/activations.py load: as if cell.fetched.done()": _OTHER_BRANCH,
    "streaming/activations.py load: no order_compute_after(cell.fetched)": "the host has seen it done (the second one)",
    "streaming/activation_homes.py fetch: after without self.copied": _BEHIND,
    "streaming/activation_homes.py release: as if entry.users.done()": "only what is done is released (the first one)",
    "streaming/activation_homes.py release: no entry.users.wait()": "only what is done is released",
    "streaming/gradients.py _begin: no order_compute_after(state.free)": "forward has waited for the same update",
    "optim/staging.py read_ahead: as if self._free[0].users.done()": "memory() waits for the slot's users",
}


@dataclass
class Verdict:
    """What became of a mutant, by run."""

    races: dict[str, list[str]] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    hung: bool = False
    failed: str = ""


def mutations() -> list[Mutation]:
    """All of them, in the order of the code."""
    return [mutation for file in FILES for mutation, _ in _changes(file, _parse(file))]


def _parse(file: str) -> ast.Module:
    return ast.parse((ROOT / "offloadzero" / file).read_text())


def _changes(file: str, tree: ast.Module) -> Iterator[tuple[Mutation, Callable[[], None]]]:
    """Each mutation of a file with the call that applies it to `tree`."""
    for function, node in _nodes_in_functions(tree):
        for rank, (what, change) in enumerate(_changes_of(node, function)):
            yield Mutation(file, node.lineno, node.col_offset, what, function, rank), change


def _nodes_in_functions(tree: ast.AST, function: str = "") -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(tree):
        inner = child.name if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else function
        if isinstance(child, (ast.Expr, ast.Call)):
            yield function, child
        yield from _nodes_in_functions(child, inner)


def _changes_of(node: ast.Expr | ast.Call, function: str) -> Iterator[tuple[str, Callable[[], None]]]:
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


# --- one mutant ---


def install(mutation: Mutation) -> None:
    """The package of this process, which is yet to be imported, is without `mutation`."""
    tree = _parse(mutation.file)
    change = next(change for found, change in _changes(mutation.file, tree) if found == mutation)
    change()
    ast.fix_missing_locations(tree)
    path = str(ROOT / "offloadzero" / mutation.file)
    code = compile(tree, path, "exec")
    get_code = SourceFileLoader.get_code

    def get(loader: SourceFileLoader, name: str) -> Any:
        return code if loader.path == path else get_code(loader, name)

    SourceFileLoader.get_code = get  # type: ignore[method-assign]


def judge(mutation: Mutation | None, reference: dict[str, Any], runs: Iterable[str] = ()) -> Verdict:
    """Run a mutant (None: the package as it is) in a process of its own; `reference` has what is not its doing."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.setpgid(0, 0)
        with os.fdopen(writing, "w") as pipe:
            _in_child(
                mutation,
                reference,
                list(runs),
                lambda line: (pipe.write(json.dumps(line) + "\n"), pipe.flush()),
            )
        os._exit(0)
    os.close(writing)
    verdict = Verdict()
    text, ended = _read(reading, deadline_s=time.monotonic() + TIMEOUT_S)
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for line in text.splitlines():
        _enter(verdict, json.loads(line))
    verdict.hung = not ended
    return verdict


def _enter(verdict: Verdict, line: dict[str, Any]) -> None:
    if "failed" in line:
        verdict.failed = line["failed"]
        return
    if line["races"]:
        verdict.races[line["run"]] = line["races"]
    if line["differs"]:
        verdict.differing.append(line["run"])


def _read(descriptor: int, *, deadline_s: float) -> tuple[str, bool]:
    text = b""
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        while (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([pipe], [], [], left_s)[0]:
                more = pipe.read(1 << 16)
                if not more:
                    return text.decode(), True
                text += more
    return text[: text.rfind(b"\n") + 1].decode(), False


def _in_child(
    mutation: Mutation | None, reference: dict[str, Any], runs: list[str], say: Callable[[Any], Any]
) -> None:
    try:
        if mutation is not None:
            install(mutation)
        import logging

        from tests.simulated import small_runs

        logging.disable(logging.CRITICAL)
        has_raced, differs = 0, False
        for name in (run for run in small_runs.RUNS if not runs or run.startswith(tuple(runs))):
            digest, races = small_runs.run(name)
            if mutation is None:
                reference[name] = (digest, sorted(map(signature, races)))
                say({"run": name, "races": races, "differs": "", "digest": digest})
                continue
            expected, known = reference[name]
            new = [race for race in races if signature(race) not in known]
            say({"run": name, "races": new, "differs": digest if digest != expected else ""})
            has_raced, differs = has_raced + bool(new or has_raced), differs or digest != expected
            if has_raced > MORE_RUNS or (has_raced and differs):
                return
    except BaseException:
        say({"failed": traceback.format_exc()[-2000:]})


def signature(race: str) -> str:
    """A race without addresses, sizes and lines."""
    words = [word for word in race.replace("(", " ").split() if not any(c.isdigit() for c in word)]
    return " ".join(words)


def references(runs: Iterable[str] = ()) -> dict[str, Any]:
    """What the package as it is gives."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        found: dict[str, Any] = {}
        _in_child(
            None,
            found,
            list(runs),
            lambda line: print(line["failed"], file=sys.stderr) if "failed" in line else 0,
        )
        with os.fdopen(writing, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writing)
    text, ended = _read(reading, deadline_s=time.monotonic() + 2 * TIMEOUT_S)
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return dict(json.loads(text))


def warm_up() -> None:
    """Import what is no part of the package, before any thread is started: the mutants share it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import pytest  # noqa: F401
    import torch

    from tests.models import Stack, features
    from tests.simulated.dispatch import Dispatch
    from tests.simulated.machine import Machine
    from tests.simulated.memory import DeviceMemory

    torch.set_num_threads(1)
    machine = Machine()
    memory = DeviceMemory(machine)
    model = Stack().bfloat16()
    with Dispatch(machine, memory):
        for param in model.parameters():
            param.data = memory.take(param.nbytes).view(param.dtype).view(param.shape)
        for num_rows in (2, 3):
            model(features(0, rows=num_rows)).backward()
    machine.close()


def main(selected: list[str]) -> int:
    """Print the table; 1 if something is neither caught nor known to be redundant, or is known to be and is not."""
    chosen = [m for m in mutations() if not selected or any(part in str(m) for part in selected)]
    if "--list" in selected:
        print("\n".join(map(str, mutations())))
        return 0
    warm_up()
    reference = references()
    num_wrong = 0
    for name, (digest, races) in reference.items():
        print(f"# {name}: {digest[:16]} {len(races)} known races")
    print("| place | checker | numbers |\n| --- | --- | --- |")
    counts = [0, 0, 0]
    for mutation in chosen:
        verdict = judge(mutation, reference, RUNS_OF.get(mutation.file, ()))
        checker = "; ".join(f"{name} ({len(races)})" for name, races in verdict.races.items())
        if verdict.hung:
            checker = f"hang {checker}"
        numbers = "; ".join(verdict.differing)
        why = REDUNDANT.get(mutation.key, "")
        if why and not checker:
            checker = f"redundant: {why}"
        num_wrong += bool(verdict.failed) or not checker
        print(f"| {mutation} | {checker or 'NOT CAUGHT'} | {numbers or 'no'} | {verdict.failed}", flush=True)
        counts = [counts[0] + 1, counts[1] + bool(verdict.races), counts[2] + bool(verdict.differing)]
    print(f"{counts[0]} mutants, {counts[1]} caught by the checker, {counts[2]} by the numbers")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
