"""Four ranks of which one is killed at a chosen moment, and how the others end.

Run as a program it plays one case after another, each rank a forked child: `python -m tests.ranks.killed FILE`, a
JSON list of cases. Each child's output goes to `DIRECTORY/rank-N.txt`; the ends of all are printed as JSON.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import offloadzero
from tests.support.sharded import VOCABULARY, config_of, digest, engine_of

WORLD_SIZE = 4
NUM_STEPS = 4
PHASES = ("start", "build", "forward", "backward", "step", "save", "close")


@dataclass(frozen=True)
class Case:
    """One run. The victim dies `num_calls` Python calls into a phase, or after `delay_s` where that is 0."""

    directory: str
    victim: int
    phase: str
    occurrence: int  # of the phase
    num_calls: int
    delay_s: float
    stage: int
    has_port: bool  # rank 0 holds the store, else a file is it
    timeout_s: float  # of the process groups
    port: int = 0  # of that store, chosen right before the start: others take ports meanwhile

    def rank_file(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return Path(self.directory) / f"rank-{rank}.txt"

    def raised_file(self, rank: int) -> Path:
        """Holds when an error has ended a rank's script."""
        return Path(self.directory) / f"rank-{rank}-raised"


class Death:
    """Of the victim, inside of a phase; at its end at the latest."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case = case
        self._is_victim = rank == case.victim
        self._num_begun: Counter[str] = Counter()
        self._num_left = case.num_calls

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """One occurrence of a phase."""
        case, number = self._case, self._num_begun[phase]
        self._num_begun[phase] += 1
        if not self._is_victim or (phase, number) != (case.phase, case.occurrence):
            yield
            return
        if case.num_calls:
            sys.setprofile(self._count)
        else:
            timer = threading.Timer(case.delay_s, die)
            timer.daemon = True
            timer.start()
        yield
        die()

    def _count(self, *_: Any) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            die()


def die() -> None:
    """As by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


def join_others(case: Case, rank: int) -> None:
    where = f"tcp://127.0.0.1:{case.port}" if case.port else f"file://{case.directory}/store"
    offloadzero.init_distributed(
        "gloo",
        init_method=where,
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=case.timeout_s),
    )


def state_digest(engine: Any) -> str:
    """Of every weight and optimizer state."""
    states = engine.optimizer.state_dict()["state"]
    named = {f"{number} {key}": value for number, one in states.items() for key, value in one.items()}
    text = repr(sorted(digest({**engine.module.state_dict(), **named}).items()))
    return hashlib.sha256(text.encode()).hexdigest()


def train(case: Case, rank: int) -> None:
    """An ordinary script, which saves after each step."""
    death = Death(case, rank)
    with death.during("start"):
        join_others(case, rank)
    directory = Path(case.directory)
    with death.during("build"):
        engine: Any = engine_of(config_of("nvme", case.stage, directory / "swap", world_size=WORLD_SIZE))
    for step in range(NUM_STEPS):
        seed = WORLD_SIZE * step + rank
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
        with death.during("forward"):
            loss = engine(tokens)
        with death.during("backward"):
            engine.backward(loss)
        with death.during("step"):
            engine.step()
        state = {"number": step, "digest": state_digest(engine)}
        with death.during("save"):
            engine.save_checkpoint(directory / "saved", client_state=state)
        if rank == 0:
            with (directory / "committed").open("a") as file:
                file.write(f"{step}\n")
    with death.during("close"):
        engine.close()


def become(case: Case, rank: int) -> None:
    """The rest of this process is a rank: errors and exit handlers take their course."""
    output = os.open(case.rank_file(rank), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        train(case, rank)
    except BaseException:
        case.raised_file(rank).write_text(str(time.monotonic()))  # one clock for all processes
        raise


def free_port() -> int:
    """One that nobody has just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@dataclass(frozen=True)
class End:
    """Of one rank."""

    pid: int
    status: int | None  # as waitpid says; None: it has hung
    after_s: float  # the victim's death, as the next one
    raised_s: float | None  # when an error has ended its script


def watch(case: Case, pids: list[int], *, within_s: float) -> list[End]:
    """Wait for all; one that lives `within_s` after the victim's death, or after the start, is asked for its stacks."""
    ends: dict[int, tuple[int | None, float]] = {}
    begun_s, victim = time.monotonic(), case.victim
    while len(ends) < len(pids):
        since_s = ends[victim][1] if victim in ends else begun_s + within_s
        for rank, pid in enumerate(pids):
            if rank in ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[rank] = status, time.monotonic()
            elif time.monotonic() > since_s + within_s:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ends[rank] = None, time.monotonic()
        time.sleep(0.01)
    died_s = ends[victim][1]
    raised = [case.raised_file(rank) for rank in range(len(pids))]
    raised_s = [float(path.read_text()) - died_s if path.exists() else None for path in raised]
    return [End(pid, ends[rank][0], ends[rank][1] - died_s, raised_s[rank]) for rank, pid in enumerate(pids)]


def main() -> None:
    """Play all cases."""
    torch.set_num_threads(1)
    played = []
    for values in json.loads(Path(sys.argv[1]).read_text()):
        case = Case(**values)
        if case.has_port:
            case = replace(case, port=free_port())
        (Path(case.directory) / "swap").mkdir(parents=True)
        pids = []
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                become(case, rank)
                return
            pids.append(pid)
        ends = watch(case, pids, within_s=5 * case.timeout_s)
        played.append([asdict(end) for end in ends])
    print(json.dumps(played))


if __name__ == "__main__":
    main()
