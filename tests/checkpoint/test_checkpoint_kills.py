"""kill -9 while a checkpoint is written: the last one that was saved is whole, and what is left is cleared away.

OFFLOADZERO_TEST_KILLS of them (200 for the campaign): half at a random time, half at a random call to the system.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offloadzero import CheckpointError
from offloadzero.checkpoint.format.names import IS_LATEST, LOCK, parse_unfinished
from offloadzero.checkpoint.latest import list_checkpoints
from offloadzero.checkpoint.partial import not_ours
from offloadzero.checkpoint.verify import open_checkpoint
from tests.support.checkpoints import contents, small_engine, state_digest
from tests.support.tiny import run_script

NUM_KILLS = int(os.environ.get("OFFLOADZERO_TEST_KILLS", "6"))
FIRST_SEED = int(os.environ.get("OFFLOADZERO_TEST_FIRST_SEED", "0"))
KILLS_PER_DIRECTORY = 3  # the later ones come while leftovers of the earlier are cleared away
FOREIGN = {
    "data/x.bin": b"mine",
    ".x.123.partial/y": b"mine",
    "global_step5": b"mine",
    "best.replaced/z": b"mine",
}

# Runs each case of the JSON file argv[1] in a child of its own, until it is killed. One that is killed at a call writes
# how many there were; a copy of its directory is kept.
ZYGOTE = """
import json, os, shutil, signal, sys, time, traceback
import torch
import torch._dynamo  # else every child would spend a second on it in its first optimizer
from tests.support.checkpoints import save_numbered, small_engine, train

cases = json.load(open(sys.argv[1]))


def child(case, ready):
    log = os.open(case["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    engine = small_engine(case["scratch"], seed=case["seed"])
    train(engine, 1)
    os.write(ready, b"!")
    calls = -1

    def hook(event, arguments):
        nonlocal calls
        if calls >= 0 and event.split(".")[0] in ("open", "os", "fcntl"):
            calls += 1
            if calls == case["call"]:
                os.kill(os.getpid(), signal.SIGKILL)

    if case["call"]:
        sys.addaudithook(hook)
    for number in range(case["first"], case["first"] + 1000):
        if os.getppid() != parent:
            return  # nobody is left to kill it
        if number == case["first"] + case["saves_before"]:
            calls = 0
        train(engine, 1, first=number)
        tag = "best" if number % 2 else f"step{number}"
        save_numbered(engine, case["directory"], tag, number)
        os.write(log, f"{number} {tag}\\n".encode())


for case in cases:
    reading, ready = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            child(case, ready)
        except BaseException:
            with open(case["log"] + ".error", "w") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(1)
    os.close(ready)
    os.read(reading, 1)
    os.close(reading)
    deadline_s = time.monotonic() + (20.0 if case["call"] else case["delay_s"])
    while time.monotonic() < deadline_s and os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.001)
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    shutil.copytree(case["directory"], case["copy"], symlinks=True)
"""


def make_cases(tmp_path: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_KILLS):
        draw = random.Random(seed)
        number = seed // KILLS_PER_DIRECTORY
        directory = tmp_path / f"saved{number}"
        if not directory.exists():
            for name, data in FOREIGN.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(data)
        cases.append(
            {
                "seed": seed,
                "directory": str(directory),
                "scratch": str(tmp_path),
                "copy": str(tmp_path / f"copy{seed}"),
                "log": str(tmp_path / f"log{seed}"),
                "first": 1000 * seed,
                # A save makes 26 to 70 of these calls.
                "call": draw.randrange(1, 130) if seed % 2 else 0,
                "saves_before": draw.choice([0, 0, 1, 2]),
                "delay_s": draw.random() * 0.3,
            }
        )
    return cases


def committed(cases: list[dict[str, Any]], case: dict[str, Any]) -> dict[str, int]:
    """Tag -> number of what was saved by the case and by those before it in its directory; the last is the latest."""
    saved: dict[str, int] = {}
    for other in cases:
        log = Path(other["log"])
        if other["directory"] == case["directory"] and other["seed"] <= case["seed"] and log.exists():
            for line in log.read_text().splitlines():
                number, tag = line.split()
                saved.pop(tag, None)
                saved[tag] = int(number)
    return saved


def test_a_kill_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    cases = make_cases(tmp_path)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = run_script(ZYGOTE, tmp_path / "cases.json", timeout_s=60 + 2.0 * NUM_KILLS)
    assert done.returncode == 0, done.stderr
    engine = small_engine(tmp_path, seed=10_000)
    left: Counter[str] = Counter()
    for case in cases:
        what = f"seed {case['seed']}: killed at call {case['call']}, or after {case['delay_s']:.3f} s"
        error = Path(case["log"] + ".error")
        assert not error.exists(), f"{what}: {error.read_text()}"
        check_after_kill(engine, Path(case["copy"]), committed(cases, case), what)
        left.update(left_behind(Path(case["copy"])))
        if case["seed"] % KILLS_PER_DIRECTORY == KILLS_PER_DIRECTORY - 1 or case is cases[-1]:
            check_next_save(engine, Path(case["directory"]), what)
    engine.close()
    print(f"{NUM_KILLS} kills left behind: {dict(left)}")
    assert left["partial"] >= NUM_KILLS // 6  # else they were no kills while saving


def left_behind(directory: Path) -> set[str]:
    """What a kill in the middle of a save is to be seen by."""
    found = [unfinished for path in directory.iterdir() if (unfinished := parse_unfinished(path.name))]
    ours = [path for path in directory.iterdir() if not_ours(path) is None]
    kinds = {unfinished.kind for unfinished in found if unfinished.stem != "latest"}
    kinds |= {"latest.partial" for unfinished in found if unfinished.stem == "latest"}
    kinds |= {"lock" for path in ours if (path / LOCK).exists()}
    if sum((path / IS_LATEST).exists() for path in ours) > 1:
        kinds.add("two marked")
    return kinds


def check_after_kill(engine: Any, directory: Path, saved: dict[str, int], what: str) -> None:
    latest = list(saved.values())[-1] if saved else None
    path, state = load_latest(engine, directory, may_be_missing=latest is None, what=what)
    if latest is None:  # the first one may just have got its name
        assert path is None or state["number"] % 1000 < 1000, what
    else:
        # The save that was killed may have been the next, and may have come to its end.
        assert path is not None, what
        assert state["number"] >= latest, f"{what}: {state['number']} instead of {latest}"
    if path is not None:
        assert state_digest(engine) == state["digest"], what
    for tag, number in saved.items():
        _, state = engine.load_checkpoint(directory, tag=tag)
        assert state["number"] >= number, f"{what}: {tag}"
        assert state_digest(engine) == state["digest"], f"{what}: {tag}"
    assert_foreign(directory, what)


def load_latest(engine: Any, directory: Path, *, may_be_missing: bool, what: str) -> Any:
    tag = None
    if may_be_missing and not (directory / "latest").exists() and list_checkpoints(directory):
        # Killed in its first save, when the checkpoint had its name and there was no `latest` yet.
        with pytest.raises(CheckpointError, match=r"latest is missing\. '.*' \(step .* is intact") as raised:
            engine.load_checkpoint(directory)
        tag = str(raised.value).split("'")[1]
    try:
        return engine.load_checkpoint(directory, tag=tag)
    except CheckpointError as error:
        raise AssertionError(what) from error


def check_next_save(engine: Any, directory: Path, what: str) -> None:
    engine.save_checkpoint(directory, tag="next", client_state={"number": -1})
    assert engine.load_checkpoint(directory)[1] == {"number": -1}
    names = {path.name for path in directory.iterdir()}
    assert not [name for name in names if parse_unfinished(name) is not None], what
    foreign = {name.split("/")[0] for name in FOREIGN}
    for name in names - foreign - {"latest"}:
        open_checkpoint(directory / name)
        assert not (directory / name / ".lock").exists(), f"{what}: {name}"
        assert (directory / name / "is_latest").exists() == (name == "next"), f"{what}: {name}"
    assert_foreign(directory, what)


def assert_foreign(directory: Path, what: str) -> None:
    found = contents(directory)
    assert {name: found.get(name) for name in FOREIGN} == FOREIGN, what
