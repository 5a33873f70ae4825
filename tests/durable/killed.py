"""Runs that are killed and started again until they end: `python -m tests.durable.killed CASES.json` prints the ends.

Each life is a fork of this process, which has imported torch and nothing has run in it: one process, or one of each
rank. It is killed at a call to the system that changes files or makes them last, at a fail point, at a Python call
(each counted from the start or from the first step), or after a time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # else every child would spend a second on it in its first optimizer
import torch.distributed as dist

from offloadzero.checkpoint.verify import open_checkpoint
from tests.durable.runs import KINDS, NUM_STEPS, SAVED, Kind, digest, make, plain_digests, train_step
from tests.support.faults import delays, replaced

Kill = tuple[str, str, int]  # how, since when it is counted or at which point, after how many
NO_KILL: Kill = ("none", "", 0)
POINTS = (
    "nvme.write",
    "nvme.read",
    "nvme.sync",
    "lane.launch",
    "update.stage",
    "update.compute",
    "step.step",
)
LIFE_S = 60.0
FILE_EVENTS = ("open", "os", "fcntl", "shutil")


@dataclass(frozen=True)
class Case:
    """A run, which is killed `num_kills` times."""

    seed: int
    kind: str
    directory: str
    num_kills: int


def draw_kill(draw: random.Random) -> Kill:
    """What kills a life."""
    how = draw.choice(("call", "call", "call", "point", "point", "python", "timer"))
    since = draw.choice(("start", "train", "train"))
    if how == "point":
        name = draw.choice(POINTS)
        return how, name, 1 + int(draw.random() ** 2 * (12 if name in ("nvme.sync", "step.step") else 150))
    if how == "call":
        return how, since, 1 + int(draw.random() * (60 if since == "start" else 220))
    if how == "python":
        return how, since, 1 + int(draw.random() * (60_000 if since == "start" else 25_000))
    return how, since, 1 + int(draw.random() * (600 if since == "start" else 250))  # ms


class Killer:
    """Kills this process when it has counted so many."""

    def __init__(self, how: str, since: str, number: int) -> None:
        self.how, self.since, self._left = how, since, number
        self._counts = False
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count one."""
        if self._counts:
            self._left -= 1  # of threads that meet here one may be lost, which is as good a place
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def begin(self, phase: str) -> None:
        """Count from here on, if this is the phase."""
        if self.how == "point" or phase != self.since:
            self._counts = self._counts or self.how == "point"
            return
        self._counts = True
        if self.how == "timer":
            threading.Timer(self._left / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif self.how == "call":
            sys.addaudithook(lambda event, _: event.split(".")[0] in FILE_EVENTS and self.count())
            for name in ("fsync", "fdatasync", "pwrite", "ftruncate"):
                setattr(os, name, self._counted(getattr(os, name)))
        elif self.how == "python":
            threading.setprofile(self._on_call)
            sys.setprofile(self._on_call)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keys: Any) -> Any:
            self.count()
            result = call(*arguments, **keys)
            self.count()
            return result

        return counted

    def _on_call(self, _: Any, event: str, __: Any) -> None:
        if event == "call":
            self.count()

    def points(self) -> AbstractContextManager[None]:
        """In which each work at its fail point is counted, before and after it."""
        if self.how != "point":
            return nullcontext()
        return replaced(self.since, lambda work, *given, **keys: self._counted(work)(*given, **keys))  # type: ignore[arg-type]


def live(case: Case, kill: Kill, say: Callable[[str], None], *, looks: bool) -> None:
    """One life: to the end of the run unless it is killed."""
    kind, killer = KINDS[case.kind], Killer(*kill)
    slower = delays("checkpoint.write", 0.003) if kind.saves else nullcontext()
    with killer.points(), slower:
        killer.begin("start")
        engine = make(kind, case.directory)
        state = engine.resume()
        first = 0 if state is None else state["next"]
        say(f"resumed {first} {digest(engine) if looks else ''}")
        killer.begin("train")
        for number in range(first, NUM_STEPS):
            train_step(engine, kind, number)
            say(f"stepped {number + 1}")
        say(f"end {digest(engine)}")
        engine.close()
        for tag in kind.saves:
            open_checkpoint(Path(case.directory) / SAVED / f"step{tag}")


# --- processes ---


def _child(rank: int, num_ranks: int, directory: Path, work: Callable[[Callable[[str], None]], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(directory / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        torch.set_num_threads(1)
        if num_ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            dist.init_process_group(
                "gloo",
                init_method=f"file://{directory / 'store'}",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=LIFE_S),
            )
        work(lambda line: os.write(log, f"{line}\n".encode()) and None)
        if num_ranks > 1:
            dist.destroy_process_group()
    except BaseException:
        (directory / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def run_children(
    num_ranks: int,
    directory: Path,
    work: Callable[[int, Callable[[str], None]], None],
    *,
    rest_s: float = 0.0,
) -> list[int | None]:
    """The exit codes by rank, None: it hung. Where one is killed, the others have `rest_s` to go on, as under torchrun.

    What `work(rank, say)` says goes to `log-RANK` in the directory, and its traceback to `error-RANK`.
    """
    (directory / "store").unlink(missing_ok=True)
    pids = [_child(rank, num_ranks, directory, partial(work, rank)) for rank in range(num_ranks)]
    codes: dict[int, int] = {}
    deadline_s = time.monotonic() + LIFE_S
    hangs = False
    while len(codes) < num_ranks:
        for rank, pid in enumerate(pids):
            if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
                if codes[rank]:
                    deadline_s = min(deadline_s, time.monotonic() + rest_s)
        if time.monotonic() > deadline_s:
            hangs = hangs or not any(codes.values())
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return [None if hangs else codes[rank] for rank in range(num_ranks)]


def find_plain(kind: Kind, directory: Path) -> list[list[str]]:
    """The digests of an undisturbed run that is not durable, by rank."""
    directory.mkdir(parents=True, exist_ok=True)

    def work(_: int, say: Callable[[str], None]) -> None:
        say(" ".join(plain_digests(kind, directory)))

    codes = run_children(kind.num_ranks, directory, work)
    assert not any(codes), (codes, [path.read_text() for path in directory.glob("error-*")])
    return [(directory / f"log-{rank}").read_text().split() for rank in range(kind.num_ranks)]


@dataclass
class Life:
    """One life of a run."""

    kill: Kill
    victims: Sequence[int]  # ranks
    looks: bool  # at what is found when it begins
    rest_s: float  # that the others have when one is killed


def draw_life(draw: random.Random, num_ranks: int, *, is_last: bool) -> Life:
    """The next life of a run."""
    kill = NO_KILL if is_last else draw_kill(draw)
    one = [draw.randrange(num_ranks)]
    victims = one if draw.random() < 0.7 else list(range(num_ranks))
    return Life(kill, victims, looks=draw.random() < 0.7, rest_s=draw.choice((0.0, 0.0, 0.02, 0.3)))


def run_case(case: Case, plain: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Kill and start the run again until it has ended. Returns what was wrong, and how often it was killed."""
    num_ranks, draw = KINDS[case.kind].num_ranks, random.Random(case.seed)
    directory = Path(case.directory)
    directory.mkdir(parents=True)
    lives: list[Life] = []
    wrong: list[str] = []
    num_seen = num_killed = 0  # the steps that some life has taken
    while not wrong and len(lives) <= case.num_kills:
        life = draw_life(draw, num_ranks, is_last=len(lives) == case.num_kills)
        lives.append(life)

        def work(rank: int, say: Callable[[str], None], life: Life = life) -> None:
            live(case, life.kill if rank in life.victims else NO_KILL, say, looks=life.looks)

        codes = run_children(num_ranks, directory, work, rest_s=life.rest_s)
        num_killed += -signal.SIGKILL in codes
        wrong = [*_wrong_ends(life, codes, directory), *_wrong_values(case, num_seen, directory, plain)]
        for rank in range(num_ranks):
            log = directory / f"log-{rank}"
            steps = [int(line.split()[1]) for line in _lines(log) if line.startswith("stepped")]
            num_seen = max(num_seen, *steps, 0)
            log.unlink(missing_ok=True)
            (directory / f"error-{rank}").unlink(missing_ok=True)
    if not wrong:
        shutil.rmtree(directory)
    return {
        **asdict(case),
        "wrong": wrong,
        "lives": [asdict(life) for life in lives],
        "num_killed": num_killed,
    }


def _wrong_ends(life: Life, codes: Sequence[int | None], directory: Path) -> Iterator[str]:
    """A life ends by its kill or as it should; when another rank is killed an error is as it should be."""
    if None in codes:
        yield "it hangs"
    if life.kill == NO_KILL and any(codes):
        yield f"the last life ended with {codes}"
    if -signal.SIGKILL in codes and len(codes) > 1:
        return
    for rank, code in enumerate(codes):
        if code not in (0, -signal.SIGKILL):
            error = directory / f"error-{rank}"
            yield f"rank {rank} ended with {code}: {error.read_text() if error.exists() else ''}"


def _wrong_values(
    case: Case, num_seen: int, directory: Path, plain: Sequence[Sequence[str]]
) -> Iterator[str]:
    # When step() returns that begins a commit, the one before is made.
    kind = KINDS[case.kind]
    most_lost = 2 * int(kind.own.get("durable", 1)) - 1
    # While a checkpoint is saved no commit is made. One that begins when another ends leaves no time for any.
    begun = [0, *(step for step in kind.saves if step < num_seen)]
    oldest = begun[-2] if len(begun) > 1 else num_seen
    for rank, digests in enumerate(plain):
        for what, value, *looked in map(str.split, _lines(directory / f"log-{rank}")):
            if what == "resumed" and int(value) < min(oldest, num_seen - most_lost):
                yield f"rank {rank}: resumed at {value}, had seen {num_seen}"
            if what == "resumed" and looked and looked[0] != digests[int(value)]:
                yield f"rank {rank}: resumed at {value} with other values"
            if what == "end" and value != digests[-1]:
                yield f"rank {rank}: ended with other values"


def _lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def main() -> None:
    """Run the cases of the file."""
    plain: dict[str, Any] = {}
    for given in json.loads(Path(sys.argv[1]).read_text()):
        case = Case(**given)
        if case.kind not in plain:
            plain[case.kind] = find_plain(
                KINDS[case.kind], Path(case.directory).parent / f"plain {case.kind}"
            )
        print(json.dumps(run_case(case, plain[case.kind])), flush=True)


if __name__ == "__main__":
    main()
