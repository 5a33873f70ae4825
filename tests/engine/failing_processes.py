"""Processes whose files fail or that are interrupted: the cases, and what becomes of each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.tiny import run_script

PATIENCE_S = 30.0

# Runs each case of the JSON file argv[1] in a child of its own; writes what became of it to argv[2].
ZYGOTE = """
import atexit, errno, gc, json, os, signal, sys, threading, time, traceback
import torch
import torch._dynamo  # else every child would spend a second on it in its first optimizer
import offloadzero, offloadzero.api.engine
from offloadzero.errors import AioError
from tests.support.tiny import make_engine, settings, tokens, train

cases = json.load(open(sys.argv[1]))
results = {}
gc.collect()
gc.freeze()  # else a child's collector writes to, and so copies, what all of them share


def make(case, **keys):
    keys.setdefault("gradient_clipping", case.get("clipping", 0.0))
    keys.setdefault("gradient_accumulation_steps", case.get("accumulation", 1))
    config = settings(case["directory"], placement=case["placement"], update={"chunk_elements": 4096}, **keys)
    engine = make_engine(config)
    return engine, engine.optimizer.runtime.store.nvme.engine


def eio(case):
    engine, aio = make(case)
    num_micro = case.get("accumulation", 1)
    train(engine, num_steps=2 * num_micro)
    engine.synchronize()
    before, writes, submit = aio.stats()["blocks"], [], aio.write

    def write(*arguments, **keys):
        writes.append(1)
        if case["last_write"] and len(writes) == 2 * num_writes:
            aio.inject("errno", 1, errno.EIO)  # all that is left to begin
        return submit(*arguments, **keys)

    num_writes = 0
    aio.write = write
    train(engine, num_steps=num_micro)
    engine.synchronize()
    num_writes = len(writes)
    num_blocks = aio.stats()["blocks"] - before
    if not case["last_write"]:
        aio.inject("errno", 1 + round(case["fraction"] * (num_blocks - 1)), errno.EIO)
    train(engine, num_steps=num_micro)
    finish(case, engine)


def finish(case, engine):
    print("TRAINED", flush=True)
    if case["ending"] == "close":
        engine.close()
    elif case["ending"] == "sleep":
        time.sleep(0.3)


def interrupted(case):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine, aio = make(case)
    train(engine, num_steps=1)
    for nth in range(1, 2000):
        aio.inject("delay", nth, 5)  # the training thread is caught waiting, not only computing
    threading.Timer(case["after_s"], lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    train(engine, num_steps=100_000)


def in_child(case):
    os.dup2(os.open(case["output"], os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    {"eio": eio, "interrupted": interrupted}[case["kind"]](case)


for case in cases:
    started_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        if case["kind"] == "eio" and case["quick"]:
            # What the interpreter does at the end of a script, without the second it takes to take torch apart.
            try:
                in_child(case)
                status = 0
            except BaseException:
                traceback.print_exc()
                status = 1
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(status)
        in_child(case)
        sys.exit()
    status = None
    while status is None and time.monotonic() - started_s < float(sys.argv[3]):
        done, raw = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(raw)
        else:
            time.sleep(0.005)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    results[case["name"]] = {
        "status": status,
        "duration_s": time.monotonic() - started_s,
        "output": open(case["output"]).read(),
        "files": os.listdir(case["directory"]),
    }
    json.dump(results, open(sys.argv[2], "w"))
"""

PLACEMENTS: dict[str, Any] = {
    "everything": {"placement": "nvme"},
    "parameters": {
        "placement": {"param": "nvme", "master": "host", "exp_avg": "host", "exp_avg_sq": "host"},
    },
    "states": {
        "placement": {"param": "host", "master": "host", "exp_avg": "nvme", "exp_avg_sq": "host"},
    },
    "gradients": {
        "placement": {
            "param": "host", "master": "host", "exp_avg": "host", "exp_avg_sq": "host", "grad": "nvme",
        },
        "clipping": 1.0,
        "accumulation": 2,
    },
}  # fmt: skip
# Of a step's blocks. Their number is not always the same: what was read ahead may be read again.
EACH = 1 if "OFFLOADZERO_TEST_EXHAUSTIVE" in os.environ else 2
EVERY_NTH = [n / 21 for n in range(20)][:: 1 if EACH == 1 else 3]
SOME_NTH = [n / 6 for n in range(6)][::EACH]


def eio_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for what, keys in PLACEMENTS.items():
        for clipping in (0.0, 1.0) if what != "gradients" else (1.0,):
            for number, fraction in enumerate(EVERY_NTH if what == "everything" else SOME_NTH):
                ending = ("close", "exit")[number % 2]
                name = f"{what}-{fraction:.2f}-{'clipped-' if clipping else ''}{ending}"
                cases.append(
                    {**keys, "kind": "eio", "name": name, "what": what, "fraction": fraction,
                     "clipping": clipping, "ending": ending, "quick": len(cases) % 13 != 0, "last_write": False}
                )  # fmt: skip
    return cases


# Only the update of the last step fails, nothing follows it, and close() is never called.
LAST_WRITE_CASES = [
    {**PLACEMENTS["states"], "kind": "eio", "name": f"last-write-{clipping}-{ending}", "what": "states",
     "clipping": clipping, "ending": ending, "quick": False, "last_write": True}
    for clipping in (0.0, 1.0)
    for ending in ("exit", "sleep")
]  # fmt: skip
INTERRUPTED_CASES = [
    {**PLACEMENTS[what], "kind": "interrupted", "name": f"{what}-{clipping}-{after_s}", "after_s": after_s,
     "clipping": clipping}
    for what in ("everything", "states")
    for clipping in (0.0, 1.0)
    for after_s in ((0.05, 0.3) if EACH == 1 else (0.3 if clipping else 0.05,))
]  # fmt: skip

Result = dict[str, Any]


def run_cases(cases: list[dict[str, Any]], folder: Path) -> dict[str, Result]:
    for number, case in enumerate(cases):
        case["directory"] = str(folder / f"nvme{number}")
        case["output"] = str(folder / f"output{number}")
        os.mkdir(case["directory"])
    (folder / "cases.json").write_text(json.dumps(cases))
    # Far more than it takes; a hang is found, and ended, case by case.
    done = run_script(ZYGOTE, folder / "cases.json", folder / "results.json", PATIENCE_S, timeout_s=600)
    assert done.returncode == 0, done.stderr
    results: dict[str, Result] = json.loads((folder / "results.json").read_text())
    assert len(results) == len(cases)
    return results
