"""Runs that are continued from crash images: `python -m tests.durable.imaged CASES.json` prints what was wrong."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offloadzero.api.checkpoints import EngineCheckpoints
from offloadzero.checkpoint import partial as partial_folders
from offloadzero.memory.nvme import NvmeTier
from offloadzero.update.commits import Commits
from offloadzero.update.records import Record
from tests.durable.crash_images import SWAP, Images, Recorder
from tests.durable.killed import find_plain, run_children
from tests.durable.runs import KINDS, NUM_STEPS, digest, make, train_step

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """A run that is recorded from step `first` on, and `num_images` of it."""

    seed: int
    kind: str
    directory: str
    first: int
    num_images: int
    planted: str = ""  # a bug of the package, by name
    moments: str = "any"  # or "unnamed": before the first commit gets its name; "named": when that lasts


def _plant(name: str) -> None:
    """Have the bug in this process."""
    if name == "no fdatasync":
        NvmeTier.sync = lambda _: None  # type: ignore[method-assign]
    elif name == "updates before the commit":
        Commits.after = lambda _, update: update  # type: ignore[method-assign]
        _let_updates_come_first()
    elif name == "present place written":
        Record.makes_next_version = False  # type: ignore[assignment, method-assign]
    elif name == "no fsync of names":
        partial_folders.sync_directory = lambda _: None


def _let_updates_come_first() -> None:
    """Have the first commit wait for the updates of the next step, as on a slow drive."""
    commit, sync = EngineCheckpoints.commit, NvmeTier.sync
    numbers, is_updated = itertools.count(), threading.Event()

    def commit_updated(checkpoints: EngineCheckpoints, *given: Any) -> None:
        checkpoints._runtime.synchronize()
        if next(numbers):
            is_updated.set()
        commit(checkpoints, *given)

    def sync_late(tier: NvmeTier) -> None:
        assert is_updated.wait(30)
        sync(tier)

    EngineCheckpoints.commit, NvmeTier.sync = commit_updated, sync_late  # type: ignore[method-assign]


def train_to(case: Case, directory: Path, stop: int) -> None:
    """Go on with the run, or begin it."""
    kind = KINDS[case.kind]
    engine = make(kind, directory)
    state = engine.resume()
    for number in range(0 if state is None else state["next"], stop):
        train_step(engine, kind, number)
    engine.close()


def look(case: Case, image: Path, _: int, say: Say) -> None:
    """Say at which step the run is continued, and its digest then."""
    engine = make(KINDS[case.kind], image)
    state = engine.resume()
    say(f"{0 if state is None else state['next']} {digest(engine)}")
    engine.close()


def run_case(case: Case) -> dict[str, Any]:
    """Record the run, and continue it from images. Returns what was wrong."""
    top = Path(case.directory)
    top.mkdir(parents=True)
    run, base, trace = top / "run", top / "base", top / "trace"
    run.mkdir()
    (plain,) = find_plain(KINDS[case.kind], top / "plain")
    if case.first:
        assert run_children(1, top, lambda *_: train_to(case, run, case.first)) == [0], _error(top)
    shutil.copytree(run, base)

    def record(*_: object) -> None:
        _plant(case.planted)
        recorder = Recorder(run)
        with recorder.recording():
            train_to(case, run, NUM_STEPS)
        trace.write_bytes(pickle.dumps(recorder.events))

    assert run_children(1, top, record) == [0], _error(top)
    events = pickle.loads(trace.read_bytes())
    swap_bytes = (run / SWAP).stat().st_size if (run / SWAP).exists() else 0
    images, draw = Images(base, events, swap_bytes=swap_bytes), random.Random(case.seed)
    moments: Sequence[int] = range(1, len(events) + 1)
    if case.moments != "any":
        moments = [images.moment_of_commit(is_named=case.moments == "named")]
    wrong: list[str] = []
    steps: Counter[int] = Counter()
    for number in range(case.num_images):
        image = top / f"image {number}"
        moment = draw.choice(moments)
        oldest, newest = images.make(image, moment, draw)
        (top / "log-0").unlink(missing_ok=True)
        codes = run_children(1, top, partial(look, case, image))
        event = [str(part)[:60] for part in events[moment - 1]]
        what = f"image {number} before event {moment} of {len(events)}, {event}"
        if codes != [0]:
            wrong.append(f"{what}: {codes} {_error(top)}")
            continue
        step, found = (top / "log-0").read_text().split()
        steps[int(step)] += 1
        if found != plain[int(step)]:
            wrong.append(f"{what}: at step {step} with other values")
        if not oldest <= int(step) <= newest:
            wrong.append(f"{what}: at step {step}, not {oldest} to {newest}")
        shutil.rmtree(image)
    if not wrong:
        shutil.rmtree(top)
    return {**asdict(case), "wrong": wrong, "steps": dict(steps), "kinds": Counter(e[0] for e in events)}


def _error(top: Path) -> str:
    path = top / "error-0"
    text = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    return text


def main() -> None:
    """Run the cases of the file."""
    for given in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run_case(Case(**given))), flush=True)


if __name__ == "__main__":
    main()
