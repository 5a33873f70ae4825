"""Every order of the device path removed, one at a time: what the checker and what the numbers say of it.

[Note: mutations]
The list is read from the code (removals.py): each fence, each wait, each `last_use`, each ticket of an `after` or of an
`AllOf`, each reference that is held for a transfer. A mutant is the package without that one, in a process of its own
(forked from one that has imported torch), on which those runs of tests/simulated/small_runs.py are made that come to
its place. It is caught by the checker when a run has a race that the package itself does not have, by the numbers when
a run gives others (or ends in an error, or does not end). What no run of one process comes to is left to those of
several ranks in tests/simulated/ranks_runs.py, which take longer.

`python -m tests.simulated.mutations` prints the table; arguments select places by a part of their name, `--list` prints
them only, `--runs=NAME` (a beginning, once or more) makes these runs alone, `--workers=N` says how many at a time.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import logging
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from typing import Any

from tests.simulated import reached
from tests.simulated.forks import Say, forked
from tests.simulated.reached import OF_RANKS, Place
from tests.simulated.removals import ROOT, Mutation, changes, mutations, parse

SEEDS = (0, 1, 2)
# A run takes one or two, of several ranks some more.
RUN_S = float(os.environ.get("OFFLOADZERO_TEST_HANG_S", "120"))
OPTIONS = ("--list", "--runs=", "--workers=")
MORE_RUNS = 2  # of a mutant that the checker has caught, for the numbers

# What nothing would be wrong without, by key: why.
REDUNDANT: dict[str, str] = {
    "memory/tickets.py unfinished: as if ticket.done()": "then the wait below it waits: nothing comes early, but the "
    "update's thread stands still",
    "memory/tickets.py unfinished: no ticket.wait()": "done() has looked before: what is lost is an error, which the "
    "engine has on record",
    "memory/lanes.py order_compute_after: no ticket.wait()": "what comes here are writes of states to files, which no "
    "computation reads; the unit's next update and every read of states wait for them by themselves",
    "update/staging.py read_ahead: as if self._free[0].users.done()": "memory() waits for the slot's users: without "
    "the look the update's thread would do so in backward, where other work may come",
    "activations/store.py __del__: AllOf without copy.sent.written": "one lane writes all inputs, in their "
    "order: who gets the place writes after the one that had it",
    "activations/input_homes.py fetch: after without self.sent.copied": "needed only by a backward on a stream on "
    "which nothing was computed for two steps, of a graph from before them: the fence of a fetch covers all others",
}

# What one rank would not need, by key: the runs of several ranks are made although one process comes there, too.
FOR_RANKS = {"update/pipeline.py _update_on_device: after without previous"}

# What only the numbers show, by key: why the checker sees no race.
NUMBERS_ALONE: dict[str, str] = {
    "step/coordinator.py _wait_begun: no job.ticket.wait_fulfilled()": "what is read too early is which updates were "
    "applied: a Python object, no memory that is followed",
    "step/coordinator.py step: no self._changes.wait_updatable(gradient.record.index)": "without it the same wait "
    "comes inside the step, where an interrupt leaves half of one: an error, no race",
    "step/coordinator.py _wait_decided: no self._last.decided.wait()": "what is read too early is the loss scale and "
    "the number of skipped steps: Python numbers",
    "step/coordinator.py _wait_last_landed: no gradient.landed.wait()": "what is read too early is the norms: Python "
    "numbers",
    "activations/input_homes.py release: as if entry.users.done()": "a home in use is not given back, and more "
    "memory is taken: no race",
    "activations/input_homes.py release: no entry.users.wait()": "as the line before it",
    "streaming/unit_changes.py is_updated: as if unit.updated.done()": "what comes of it is whether a script is told "
    "that the last updates are given up",
    "streaming/executor.py _meet_others: as if self._decided.done()": "what comes too early is a forward behind a "
    "step that is refused: how far a script gets before it is told",
    "streaming/executor.py _meet_others: no self._decided.wait()": "as the line before it",
    "access/home_access.py read_step: no self._changes.update_ticket(record.index).wait()": "what is read too early is "
    "a count of updates: a Python number",
    "access/home_access.py write: nothing of AllOf [self._begin_write(record, slot, segments[kind], parts[kind]) "
    "for kind in parts]": "without its elements the list writes nothing: the weight keeps its old value, in good order",
}


# --- the package of a process ---


def _install(codes: Mapping[str, ast.Module]) -> None:
    """The package of this process, which is yet to be imported, has these files."""
    compiled = {}
    for file, tree in codes.items():
        path = str(ROOT / "offloadzero" / file)
        compiled[path] = compile(ast.fix_missing_locations(tree), path, "exec")
    get_code = SourceFileLoader.get_code

    def get(loader: SourceFileLoader, name: str) -> Any:
        return compiled.get(loader.path) or get_code(loader, name)

    SourceFileLoader.get_code = get  # type: ignore[method-assign]


def _mutated(mutation: Mutation) -> dict[str, ast.Module]:
    tree = parse(mutation.file)
    change = next(change for found, change in changes(mutation.file, tree) if found == mutation)
    change()
    return {mutation.file: tree}


def _marked(places: Iterable[Place]) -> dict[str, ast.Module]:
    """The files with a note before each of these statements."""
    lines: dict[str, set[int]] = {}
    for file, line in places:
        lines.setdefault(file, set()).add(line)
    trees = {file: parse(file) for file in lines}
    for file, tree in trees.items():
        for node in list(ast.walk(tree)):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    setattr(node, name, list(_with_notes(file, block, lines[file])))
    return trees


def _with_notes(file: str, block: Iterable[ast.stmt], lines: set[int]) -> Iterator[ast.stmt]:
    for statement in block:
        if statement.lineno in lines:
            yield ast.copy_location(ast.parse(f"{_NOTE}({file!r}, {statement.lineno})").body[0], statement)
        yield statement


_NOTE = "_reached_by_a_run"


# --- what the runs say ---


@dataclass
class Reference:
    """What the package as it is gives in one run."""

    digest: str
    races: list[str]  # signatures
    reached: set[Place]

    @property
    def is_whole(self) -> bool:
        """Whether it has numbers; else its digest is an error, and would show nothing of a mutant."""
        return len(self.digest) == hashlib.sha256().digest_size * 2


@dataclass
class _Referring:
    """Makes runs of the package as it is."""

    names: Sequence[str]
    places: Sequence[Place]
    found: dict[str, Reference] = field(default_factory=dict)

    def work(self, say: Say) -> None:
        with _failing_aloud(say):
            _install(_marked(self.places))
            setattr(builtins, _NOTE, reached.note)
            runs = _import_runs()
            for name in self.names:
                reached.PLACES.clear()
                digest, races = runs.run(name)
                say([name, digest, sorted(map(signature, races)), sorted(reached.PLACES)])

    def hear(self, said: Any) -> None:
        if isinstance(said, dict):
            raise AssertionError(said["failed"])
        name, digest, races, places = said
        self.found[name] = Reference(digest, races, {(file, line) for file, line in places})

    def goes_on(self, *, was_killed: bool) -> bool:
        if was_killed or len(self.found) < len(self.names):
            raise AssertionError(f"after {list(self.found)} of {self.names} the package itself did not go on")
        return False


def references(names: Sequence[str], places: Sequence[Place], *, at_once: int) -> dict[str, Reference]:
    """What the package as it is gives, by run. The processes that fork ranks run nothing else: see `warm_up`."""
    kinds = (
        [name for name in names if name.startswith(OF_RANKS)],
        [name for name in names if not name.startswith(OF_RANKS)],
    )
    parts = [_Referring(kind[part::at_once], places) for kind in kinds for part in range(at_once)]
    found: dict[str, Reference] = {}
    for part in forked(parts, at_once=at_once, silence_s=2 * RUN_S):
        found.update(part.found)
    broken = [f"{name}: {found[name].digest}" for name in names if not found[name].is_whole]
    if broken:
        raise AssertionError(f"runs of the package as it is that do not end: {broken}")
    return {name: found[name] for name in names}


@dataclass
class Verdict:
    """What became of a mutant."""

    mutation: Mutation
    runs: list[tuple[str, int]]  # yet to make: name, seed
    reference: Mapping[str, Reference]
    races: dict[str, list[str]] = field(default_factory=dict)  # by run
    differing: list[str] = field(default_factory=list)  # runs
    failed: str = ""

    def work(self, say: Say) -> None:
        with _failing_aloud(say):
            _install(_mutated(self.mutation))
            runs = _import_runs()
            watch = _Watch(say, runs)
            for name, seed in self.runs:
                watch.begin(name)
                digest, races = runs.run(name, seed=seed)
                say(self._said(name, digest, races))
                if self._is_clear:
                    break
            os._exit(0)  # whatever threads it has left

    def _said(self, name: str, digest: str, races: Sequence[str]) -> dict[str, Any]:
        known = self.reference[name]
        new = [race for race in races if signature(race) not in known.races]
        said = {"run": name, "races": new, "differs": digest != known.digest}
        self.hear(said)
        return said

    def hear(self, said: Any) -> None:
        if "failed" in said:
            self.failed = said["failed"]
            return
        name = said["run"]
        self.runs = self.runs[1:]
        if said["races"]:
            self.races[name] = said["races"]
        if said["differs"] and name not in self.differing:
            self.differing.append(name)

    @property
    def _is_clear(self) -> bool:
        """The checker has caught it, and the numbers have or had their chance."""
        return bool(self.races) and (bool(self.differing) or len(self.races) > MORE_RUNS)

    def goes_on(self, *, was_killed: bool) -> bool:
        if was_killed:
            self.failed = "killed: it said nothing any more"
        return bool(self.runs) and not self.failed and not self._is_clear

    @property
    def is_caught(self) -> bool:
        return bool(self.races or self.differing)


class _Watch:
    """Ends a process whose run does not end, with the races so far: others of its runs come in the next one."""

    def __init__(self, say: Say, runs: _Runs) -> None:
        self._say = say
        self._runs = runs
        self._name = ""
        self._begun = threading.Event()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def begin(self, name: str) -> None:
        self._name = name
        self._begun.set()

    def _watch(self) -> None:
        self._begun.wait()
        while self._begun.is_set():
            self._begun.clear()
            self._begun.wait(RUN_S)
        self._say({"run": self._name, "races": self._runs.races(), "differs": True})
        os._exit(0)


@contextmanager
def _failing_aloud(say: Say) -> Iterator[None]:
    try:
        yield
    except BaseException:
        say({"failed": traceback.format_exc()[-2000:]})


class _Runs:
    """The runs, with the package of this process."""

    def __init__(self, of_one: Any, of_ranks: Any) -> None:
        self._of_one = of_one
        self._of_ranks = of_ranks
        self.names = [*of_one.RUNS, *of_ranks.RUNS, *of_ranks.ENDING]

    def run(self, name: str, *, seed: int = 0) -> tuple[str, list[str]]:
        """The digest of all numbers of a run, or its error, and the races in it."""
        runs = self._of_ranks if name.startswith(OF_RANKS) else self._of_one
        told: tuple[str, list[str]] = runs.run(name, seed=seed)
        return told

    def races(self) -> list[str]:
        """Those so far of a run that does not end; several ranks keep theirs."""
        found: list[str] = self._of_one.Running.races()
        return found


def _import_runs() -> _Runs:
    logging.disable(logging.CRITICAL)
    from tests.simulated import ranks_runs, small_runs

    return _Runs(small_runs, ranks_runs)


def signature(race: str) -> str:
    """A race without addresses, sizes and lines."""
    words = [word for word in race.replace("(", " ").split() if not any(c.isdigit() for c in word)]
    return " ".join(words)


def judge(
    mutants: Iterable[Mutation], reference: Mapping[str, Reference], *, at_once: int
) -> Iterator[Verdict]:
    """Each in the runs that come to its place; one that is known to be redundant is not looked for with other luck."""
    verdicts = []
    for mutation in mutants:
        names = _runs_at(mutation, reference)
        seeds = SEEDS[:1] if mutation.key in REDUNDANT else SEEDS
        verdicts.append(Verdict(mutation, [(name, seed) for seed in seeds for name in names], reference))
    ended: dict[Mutation, Verdict] = {}
    waiting = iter([verdict.mutation for verdict in verdicts])
    following = next(waiting, None)
    for verdict in forked(verdicts, at_once=at_once, silence_s=2 * RUN_S):
        ended[verdict.mutation] = verdict
        while following in ended:
            yield ended[following]
            following = next(waiting, None)


def _runs_at(mutation: Mutation, reference: Mapping[str, Reference]) -> list[str]:
    """Those that come to its place; of several ranks only where no other does, or where these need the order."""
    place = (mutation.file, mutation.statement)
    names = [name for name, known in reference.items() if place in known.reached]
    if mutation.key in FOR_RANKS:
        return [name for name in names if name.startswith(OF_RANKS)]
    return [name for name in names if not name.startswith(OF_RANKS)] or names


def warm_up() -> None:
    """Import what is no part of the package, before any thread is started: the mutants share it.

    Forwards have all of it. A backward would end those of the mutants: with the first one a torch for CUDA starts
    autograd's threads, without a GPU also, as tensors have been fake by then, and a fork behind that can run none.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import pytest  # noqa: F401
    import torch
    import torch.distributed

    from tests.simulated.dispatch import Dispatch
    from tests.simulated.machine import Machine
    from tests.simulated.memory import DeviceMemory
    from tests.support.models import Stack, features

    torch.set_num_threads(1)
    machine = Machine()
    memory = DeviceMemory(machine)
    model = Stack().bfloat16()
    with Dispatch(machine, memory):
        for param in model.parameters():
            param.data = memory.take(param.nbytes).view(param.dtype).view(param.shape)
        for num_rows in (2, 3):
            model(features(0, rows=num_rows))
    machine.close()


# --- the table ---


def outcome(verdict: Verdict, *, is_reached: bool) -> str:
    """What the table says of the checker; what is wrong with the list begins with capitals."""
    why = REDUNDANT.get(verdict.mutation.key)
    if verdict.failed:
        return f"FAILED: {verdict.failed}"
    if why is not None and verdict.is_caught:
        return f"NOT REDUNDANT: {'; '.join([*verdict.races, *verdict.differing])}"
    if not is_reached:
        return "NO RUN COMES HERE"
    if why is not None:
        return f"redundant: {why}"
    if verdict.races:
        return "; ".join(f"{name} ({len(races)})" for name, races in verdict.races.items())
    if not verdict.differing:
        return "NOT CAUGHT"
    unseen = NUMBERS_ALONE.get(verdict.mutation.key)
    return f"no: {unseen}" if unseen is not None else "NOT SEEN BY THE CHECKER, and not listed with a reason"


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 if a mutant is neither caught by the checker nor listed with why not, or is and is caught."""
    selected = [argument for argument in arguments if not argument.startswith("--")]
    unknown = [part for part in arguments if part.startswith("--") and not part.startswith(OPTIONS)]
    if unknown:
        print(f"{' '.join(unknown)}: the options are {', '.join(OPTIONS)}; what else is given selects places")
        return 2
    chosen = [m for m in mutations() if not selected or any(part in str(m) for part in selected)]
    if "--list" in arguments:
        print("\n".join(map(str, chosen)))
        return 0
    only = tuple(argument.removeprefix("--runs=") for argument in arguments if argument.startswith("--runs="))
    workers = [
        argument.removeprefix("--workers=") for argument in arguments if argument.startswith("--workers=")
    ]
    at_once = int(workers[-1]) if workers else len(os.sched_getaffinity(0))
    warm_up()
    names = [name for name in run_names() if not only or name.startswith(only)]
    reference = references(names, [(m.file, m.statement) for m in chosen], at_once=at_once)
    for name, known in reference.items():
        print(f"# {name}: {known.digest[:16]} {len(known.races)} known races")
    return _print_table(chosen, reference, at_once=at_once)


def _print_table(chosen: Sequence[Mutation], reference: Mapping[str, Reference], *, at_once: int) -> int:
    print("| place | checker | numbers |\n| --- | --- | --- |")
    counts: Counter[str] = Counter()
    by_numbers: list[str] = []
    for verdict in judge(chosen, reference, at_once=at_once):
        mutation = verdict.mutation
        place = mutation.file, mutation.statement
        said = outcome(verdict, is_reached=any(place in known.reached for known in reference.values()))
        print(f"| {mutation} | {said} | {'; '.join(verdict.differing) or 'no'} |", flush=True)
        is_wrong = said[:2].isupper()
        kind = "wrong" if is_wrong else "redundant" if mutation.key in REDUNDANT else "caught"
        counts[kind] += 1
        counts["checker"] += bool(verdict.races)
        counts["both"] += bool(verdict.races and verdict.differing)
        if verdict.differing and not verdict.races:
            by_numbers.append(mutation.key)
    print(
        f"{len(chosen)} mutants: {counts['checker']} by the checker ({counts['both']} of them by the numbers as well), "
        f"{len(by_numbers)} by the numbers alone, {counts['redundant']} redundant, {counts['wrong']} wrong"
    )
    for key in by_numbers:
        print(f"by the numbers alone: {key} ({NUMBERS_ALONE.get(key, 'NOT LISTED')})")
    return int(counts["wrong"] > 0)


def run_names() -> list[str]:
    """Of all runs. They import the package, of which a mutant has its own: told by a process."""
    (told,) = forked([_Naming()], at_once=1, silence_s=2 * RUN_S)
    return told.names


@dataclass
class _Naming:
    names: list[str] = field(default_factory=list)

    def work(self, say: Say) -> None:
        say(_import_runs().names)

    def hear(self, said: Any) -> None:
        self.names = said

    def goes_on(self, *, was_killed: bool) -> bool:
        del was_killed
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
