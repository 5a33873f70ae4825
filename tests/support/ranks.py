"""Several ranks over gloo on this machine: each a process of its own, which finds the others through a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import script_environment
from tests.support.warm import run_warm

Work = Callable[..., Any]  # of one rank: what it gives back is JSON
Found = dict[str, list[Any]]  # what each rank's function of that name gives, by rank
END_WITHIN_S = 20.0  # after the timeout of the group

TORCHRUN = """
import multiprocessing
from torch.distributed.run import main

multiprocessing.set_forkserver_preload(["tests.support.framework_server"])
main()
"""


class RanksError(Exception):
    """Some ranks have failed; `texts` has the traceback of each, None of one that has not."""

    def __init__(self, texts: list[str | None]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts) if text))
        self.texts = texts


def run_ranks(
    work: Work,
    world_size: int,
    directory: Path,
    *given: Any,
    timeout_s: float = 60.0,
    own_interpreter: bool = False,
    forks: bool = False,
) -> list[Any]:
    """What `work(rank, *given)` gives on each of so many ranks. Raises RanksError.

    `own_interpreter`: the last rank starts Python itself, as all do under torchrun, so that sets of strings have
    another order there. `forks`: they are forks of this process, which has made no process group, and have what it
    has imported. Otherwise the ranks are forked from a process that has imported what ranks use, and nothing else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    contexts = [multiprocessing.get_context("fork" if forks else "forkserver")] * world_size
    if not forks:
        contexts[0].set_forkserver_preload(["tests.support.rank_server"])
    if own_interpreter:
        contexts[-1] = multiprocessing.get_context("spawn")
    processes: list[Any] = [
        context.Process(target=_run, args=(work, rank, world_size, directory, timeout_s, given), daemon=True)
        for rank, context in enumerate(contexts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s + END_WITHIN_S)
    texts: list[str | None] = []
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
            process.join()
            texts.append(f"it hangs; {_text(directory, rank)}")
        else:
            texts.append(_text(directory, rank) if process.exitcode else None)
    if any(texts):
        raise RanksError(texts)
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def run_in_turn(works: Sequence[Work], world_size: int, directory: Path, *, timeout_s: float = 60.0) -> Found:
    """What `work(rank, directory)` gives of each of `works`, one after the other in the same processes."""
    begun_s = time.monotonic()
    by_rank = run_ranks(
        _in_turn, world_size, directory / f"{world_size} ranks", works, str(directory), timeout_s=timeout_s
    )
    assert time.monotonic() - begun_s < timeout_s
    return {work.__name__: [of_rank[work.__name__] for of_rank in by_rank] for work in works}


def run_torchrun(
    script: Path, *words: object, cwd: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone --nproc-per-node 2 SCRIPT WORDS`, whose ranks have transformers and others imported.

    By `--run-path` its agent starts processes of multiprocessing, and each runs the script as its `__main__`. Raises
    subprocess.TimeoutExpired.
    """
    options = ["--standalone", "--nproc-per-node=2", "--start-method=forkserver", "--run-path"]
    command = [sys.executable, "-c", TORCHRUN, *options, str(script), *map(str, words)]
    return run_warm(command, cwd=cwd, env=script_environment(), timeout_s=timeout_s)


def _in_turn(rank: int, works: Sequence[Work], directory: str) -> dict[str, Any]:
    return {work.__name__: work(rank, directory) for work in works}


def _text(directory: Path, rank: int) -> str:
    path = directory / f"rank-{rank}.txt"
    return path.read_text() if path.exists() else "it has said nothing"


def _run(
    work: Work, rank: int, world_size: int, directory: Path, timeout_s: float, given: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory.absolute()}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        result = work(rank, *given)
        (directory / f"rank-{rank}.json").write_text(json.dumps(result))
        dist.destroy_process_group()
    except BaseException:
        (directory / f"rank-{rank}.txt").write_text(traceback.format_exc())
        raise
