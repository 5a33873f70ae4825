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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # else every child would spend a second on it in its first optimizer
import torch.distributed as dist

from offloadzero.core.fail_points import listening
from tests.durable.runs import KINDS, NUM_STEPS, Kind, digest, make, plain_digests, train_step

NO_KILL = ("none", "", 0)
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


def draw_kill(draw: random.Random) -> tuple[str, str, int]:
    """What kills a life: how, since when it is counted or at which point, and after how many."""
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

    def _on_call(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.count()

    def listener(self, point: str, work: Callable[..., Any], about: object) -> Callable[..., Any]:
        """For fail points: one is counted before its work and after."""
        if self.how != "point" or point != self.since:
            return work
        return self._counted(work)


def live(case: Case, kill: tuple[str, str, int], say: Callable[[str], None], *, looks: bool) -> None:
    """One life: to the end of the run unless it is killed."""
    kind, killer = KINDS[case.kind], Killer(*kill)
    with listening(killer.listener):
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
    """The exit codes by rank. Where one is killed, the others have `rest_s` to go on, as under torchrun."""
    (directory / "store").unlink(missing_ok=True)
    pids = [
        _child(rank, num_ranks, directory, lambda say, rank=rank: work(rank, say))
        for rank in range(num_ranks)
    ]
    codes: list[int | None] = [None] * num_ranks
    deadline_s = time.monotonic() + LIFE_S
    while None in codes:
        for rank, pid in enumerate(pids):
            if codes[rank] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
                if codes[rank]:
                    deadline_s = min(deadline_s, time.monotonic() + rest_s)
        if time.monotonic() > deadline_s:
            for pid, code in zip(pids, codes, strict=True):
                if code is None:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return codes


def find_plain(kind: Kind, directory: Path) -> list[list[str]]:
    """The digests of an undisturbed run that is not durable, by rank."""
    directory.mkdir(parents=True, exist_ok=True)

    def work(rank: int, say: Callable[[str], None]) -> None:
        say(" ".join(plain_digests(kind, directory)))

    codes = run_children(kind.num_ranks, directory, work)
    assert not any(codes), (codes, [path.read_text() for path in directory.glob("error-*")])
    return [(directory / f"log-{rank}").read_text().split() for rank in range(kind.num_ranks)]


def run_case(case: Case, plain: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Kill and start the run again until it has ended. Returns what was wrong, and how often it was killed."""
    kind, draw = KINDS[case.kind], random.Random(case.seed)
    directory = Path(case.directory)
    directory.mkdir(parents=True)
    kills: list[Any] = []
    wrong: list[str] = []
    seen = 0  # steps that some life has taken
    num_killed = 0
    # The commit before is made when step() returns that begins one.
    most_lost = 2 * int(kind.own.get("durable", 1)) - 1
    while True:
        kill = NO_KILL if len(kills) >= case.num_kills else draw_kill(draw)
        victims = [draw.randrange(kind.num_ranks)] if draw.random() < 0.7 else list(range(kind.num_ranks))
        looks, rest_s = draw.random() < 0.7, draw.choice((0.0, 0.0, 0.02, 0.3))
        kills.append((*kill, victims))
        for rank in range(kind.num_ranks):
            (directory / f"log-{rank}").unlink(missing_ok=True)

        def work(rank: int, say: Callable[[str], None]) -> None:
            live(case, kill if rank in victims else NO_KILL, say, looks=looks)

        codes = run_children(kind.num_ranks, directory, work, rest_s=rest_s)
        num_killed += -signal.SIGKILL in codes
        for rank, code in enumerate(codes):
            error = directory / f"error-{rank}"
            of_other = kind.num_ranks > 1 and -signal.SIGKILL in codes
            if error.exists() and not of_other:
                wrong.append(f"life {len(kills)}, rank {rank}: {error.read_text()}")
            elif code not in (0, -signal.SIGKILL) and not of_other:
                wrong.append(f"life {len(kills)}, rank {rank} ended with {code}")
            error.unlink(missing_ok=True)
            log = directory / f"log-{rank}"
            for line in log.read_text().splitlines() if log.exists() else ():
                what, value, *looked = line.split()
                if what == "resumed":
                    if seen - int(value) > most_lost:
                        wrong.append(f"life {len(kills)}, rank {rank}: resumed at {value}, had seen {seen}")
                    if looked and looked[0] != plain[rank][int(value)]:
                        wrong.append(f"life {len(kills)}, rank {rank}: resumed at {value} with other values")
                elif what == "end" and value != plain[rank][-1]:
                    wrong.append(f"life {len(kills)}, rank {rank}: ended with other values")
        for rank in range(kind.num_ranks):
            log = directory / f"log-{rank}"
            lines = log.read_text().splitlines() if log.exists() else []
            seen = max([seen, *(int(line.split()[1]) for line in lines if line.startswith("stepped"))])
        if wrong or (not any(codes) and kill == NO_KILL) or len(kills) > case.num_kills + 3:
            break
    if not wrong:
        shutil.rmtree(directory)
    return {**asdict(case), "wrong": wrong, "kills": kills, "num_killed": num_killed}


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
