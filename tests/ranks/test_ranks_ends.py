"""The end of an engine over several ranks, planned or not: what it leaves behind, what the others are told."""

from __future__ import annotations

import functools
import gc
import os
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offloadzero
from offloadzero.access.home_access import HomeAccess
from offloadzero.api import checkpoints as engine_checkpoints
from offloadzero.engine import runtime
from offloadzero.engine.lifetime import wait_for_collected
from offloadzero.errors import ConfigError, RankError, StateError
from offloadzero.memory.store import TieredStore
from offloadzero.ranks import channel as channels
from offloadzero.ranks import failure_store as stores
from offloadzero.ranks.channel import LOOK_AGAIN_S, Channel
from offloadzero.ranks.failure_store import FailureStore
from offloadzero.ranks.process_groups import Ranks, make_room_for_groups
from offloadzero.ranks.shard import ShardSpec
from tests.support.ranks import Found, run_in_turn
from tests.support.sharded import config_of, engine_of, make_odd_model, said_of, train

TIMEOUT_S = 100.0
MAX_MORE = 4  # threads and descriptors that come and go; an engine's process groups are 21 and 35


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All functions of this file, one after the other in the same processes."""
    works = (
        be_collected,
        start_in_vain,
        use_a_closed_channel,
        wait_for_one_who_does_not_come,
        look_before_many_collectives,
        interrupt_a_save,
        start_with_another_call,
        train_behind_the_default_group,
        start_with_few_descriptors,
        close_behind_another_default_group,
    )
    return run_in_turn(works, 2, tmp_path_factory.mktemp("ends"), timeout_s=TIMEOUT_S)


def resources() -> list[int]:
    """The threads and descriptors of this process."""
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]


def start(rank: int, directory: str, stage: int = 3, **keys: Any) -> offloadzero.Engine:
    """An engine that has trained one step, on all ranks."""
    engine = engine_of(config_of("host", stage, Path(directory), world_size=2), **keys)
    try:
        train(engine, rank, 2, num_steps=1)
        engine.synchronize()
    except offloadzero.OffloadError:
        engine.close()
        raise
    return engine


# --- what it leaves behind ---


def be_collected(rank: int, directory: str) -> dict[str, Any]:
    """What is left of each engine, and what was printed because it could not be raised."""
    left, unraisable = [], []
    hook, sys.unraisablehook = sys.unraisablehook, lambda it: unraisable.append(str(it.exc_value))
    for _ in range(3):
        engine = start(rank, directory)  # whose next fetches are on their way
        del engine
        gc.collect()
        wait_for_collected()
        left.append(resources())
    sys.unraisablehook = hook
    return {"left": left, "unraisable": unraisable}


def test_a_collected_engine_leaves_no_process_groups(found: Found) -> None:
    for said in found["be_collected"]:
        assert said["unraisable"] == []
        (threads, descriptors), *_, last = said["left"]
        assert last[0] - threads < MAX_MORE
        assert last[1] - descriptors < MAX_MORE


def start_in_vain(rank: int, directory: str) -> dict[str, Any]:
    """By the ranks whose start fails at its end: what is said, and what is left each time."""
    found: dict[str, Any] = {}
    move_buffers = runtime._move_buffers

    def fail(*_: Any) -> None:
        raise LookupError("no buffers")

    for name, ranks in {"both": (0, 1), "one": (1,)}.items():
        said, left = [], []
        for _ in range(3):
            runtime._move_buffers = fail if rank in ranks else move_buffers
            try:
                said.append(said_of(lambda: start(rank, directory)))
            finally:
                runtime._move_buffers = move_buffers
            gc.collect()
            wait_for_collected()
            dist.barrier()
            left.append(resources())
        found[name] = [said, left]
    return found


def test_an_engine_that_fails_late_to_start_leaves_no_process_groups(found: Found) -> None:
    for rank, by_name in enumerate(found["start_in_vain"]):
        for name, (said, (first, *_, last)) in by_name.items():
            if name == "both" or rank == 1:
                assert said == ["LookupError: no buffers"] * 3
            else:
                assert all(text.startswith("RankError: ") for text in said)
                assert all("rank 1: LookupError: no buffers" in text for text in said)
            # What the other rank did not come to stays, of each engine: a group that waits in a collective cannot end.
            num_groups = 2 if name == "one" and rank == 0 else 0
            assert last[0] - first[0] < MAX_MORE + 6 * num_groups, name
            assert last[1] - first[1] < MAX_MORE + 10 * num_groups, name


def use_a_closed_channel(rank: int, directory: str) -> list[Any]:
    """What a collective raises whose engine is closed, and its values after that."""
    engine = start(rank, directory)
    ranks = engine._runtime.group
    assert isinstance(ranks, Ranks)
    engine.close()
    values = torch.ones(3)
    said = said_of(lambda: ranks.states.all_reduce(values, "a late read"))
    return [said, values.tolist()]


def test_a_closed_channel_is_not_the_default_group(found: Found) -> None:
    for said, values in found["use_a_closed_channel"]:
        assert said == "StateError: a late read: the all-reduce: the engine of this model is closed"
        assert values == [1.0] * 3


def wait_for_one_who_does_not_come(rank: int, directory: str) -> dict[str, str]:
    """What each collective of gradients raises on the second rank when the first one, which lives, has failed."""
    said = {}
    for name in ("all_reduce", "reduce_scatter"):
        engine = start(rank, directory, stage=2)
        ranks = engine._runtime.group
        assert isinstance(ranks, Ranks)
        if rank == 1:
            failure_store, texts = (
                ranks.failure_store,
                iter([None]),
            )  # the first look is that before the collective
            failure_store.text = lambda *_, texts=texts: next(texts, "it is lost")  # type: ignore[method-assign]
            call = getattr(ranks.gradients, name)
            said[name] = said_of(lambda call=call: call(torch.ones(4), "alone"))  # type: ignore[misc]
            failure_store.report(RuntimeError("the end of this case"))
        dist.barrier()
        said_of(engine.close)
    return said


def test_a_wait_for_any_collective_sees_that_another_rank_has_failed(found: Found) -> None:
    _, second = found["wait_for_one_who_does_not_come"]
    assert second == {
        "all_reduce": "RankError: alone: the all-reduce (rank 1 of 2) is given up: it is lost",
        "reduce_scatter": "RankError: alone: the reduce-scatter (rank 1 of 2) is given up: it is lost",
    }


def look_before_many_collectives(rank: int, directory: str) -> int:
    """How often the store is asked before a hundred collectives."""
    engine = start(rank, directory)
    ranks = engine._runtime.group
    assert isinstance(ranks, Ranks)
    failure_store, asked = ranks.failure_store, 0
    text = failure_store.text

    def count(*given: Any) -> str | None:
        nonlocal asked
        asked += 1
        return text(*given)

    failure_store.text = count  # type: ignore[method-assign]
    begun_s = time.monotonic()
    for _ in range(100):
        ranks.control.all_reduce(torch.zeros(1), "one of many")
    periods = (time.monotonic() - begun_s) / LOOK_AGAIN_S
    engine.close()
    return asked - int(periods)


def test_the_store_is_not_asked_before_each_collective(found: Found) -> None:
    for asked in found["look_before_many_collectives"]:
        assert asked <= 2


def test_a_look_is_of_its_own_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of a rank may wait for others at once: one that had just looked stood for both."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(stores, "is_fake", lambda: False)
    monkeypatch.setattr(stores, "default_process_group_store", lambda: store)
    monkeypatch.setattr(stores, "_numbers", iter((0, 0)))
    here, there = FailureStore(0), FailureStore(1)
    here.look("one wait", [0])
    there.report(RuntimeError("closed"), has_failed=False)
    here.look("one wait", [0])
    with pytest.raises(RankError, match="another wait is given up: rank 1: RuntimeError: closed"):
        here.look("another wait", [1])


def test_a_closed_rank_that_has_done_its_part_ends_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may still pass on what they have from it: that ended a script's last read or save on a slow rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(stores, "is_fake", lambda: False)
    monkeypatch.setattr(stores, "default_process_group_store", lambda: store)
    monkeypatch.setattr(stores, "_numbers", iter((0, 0)))
    monkeypatch.setattr(channels, "tells_each", lambda _: False)
    monkeypatch.setattr(channels, "is_fake", lambda: False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    here, there = FailureStore(0), FailureStore(1)
    there.begun = [7, 1]
    there.report(StateError("it has closed its engine"), has_failed=False)
    other, channel = (Channel(object(), ShardSpec(0, 2), here, is_on_host=True) for _ in range(2))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: SlowWork())
    channel.all_reduce(torch.ones(1), "the last read")
    with pytest.raises(
        RankError, match=r"one more: .* is given up: rank 1: StateError: it has closed its engine"
    ):
        channel.all_reduce(torch.ones(1), "one more")
    other.all_reduce(torch.ones(1), "a read of another channel")


class SlowWork:
    """A collective that is over behind a look at the other ranks."""

    waits = 0

    def wait(self, timeout: Any = None) -> None:
        if not self.waits and timeout is not None:
            self.waits += 1
            time.sleep(timeout.total_seconds())
            raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


NCCL_TEXT = """NCCL error in: /pytorch/NCCLUtils.cpp:77, invalid usage, NCCL version 2.27.3
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "RuntimeError"),
        ("one\ntwo", "one"),
        ("one\nLast error:", "one"),
        (NCCL_TEXT, f"{NCCL_TEXT.splitlines()[0]}: {NCCL_TEXT.splitlines()[-1]}"),
    ],
)
def test_what_is_told_of_an_error_has_the_reason_of_nccl(text: str, line: str) -> None:
    assert stores.first_line(RuntimeError(text)) == line


def test_engines_end_in_the_order_of_their_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of them has another order on each rank."""
    closed: list[int] = []
    weights = SimpleNamespace(in_state_dicts=set())
    engines = [
        SimpleNamespace(number=n, close=functools.partial(closed.append, n), weights=weights)
        for n in (2, 0, 1)
    ]
    monkeypatch.setattr(runtime, "_live", engines)
    runtime._close_at_exit()
    assert closed == [0, 1, 2]


# --- Ctrl-C ---


def interrupt_a_save(rank: int, directory: str) -> dict[str, list[str]]:
    """By where the first rank is when it comes: what the save raises, and a step after it."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    begin_save, read = engine_checkpoints.begin_save, TieredStore.read

    def interrupt_between_two_collectives(*given: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code is HomeAccess.gather.__code__:
            raise KeyboardInterrupt
        return read(*given, **options)

    found = {}
    for name in ("writing", "reading", "waiting"):
        engine, here = start(rank, directory), Path(directory) / name
        if rank == 0 and name == "writing":
            engine_checkpoints.begin_save = interrupt
        elif rank == 0 and name == "reading":
            TieredStore.read = interrupt_between_two_collectives  # type: ignore[method-assign,assignment]
        elif rank == 0:
            timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
        elif name == "waiting":
            wait_for(here)
        try:
            said = [said_of(lambda: engine.save_checkpoint(directory))]  # noqa: B023
        finally:
            engine_checkpoints.begin_save, TieredStore.read = begin_save, read  # type: ignore[method-assign]
        if rank == 0:
            here.touch()
        said.append(said_of(lambda: train(engine, rank, 2, num_steps=1)))  # noqa: B023
        said_of(engine.close)
        found[name] = said
    return found


def wait_for(path: Path) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.05)


def test_ctrl_c_in_a_save_is_raised_as_such_and_told(found: Found) -> None:
    first, second = found["interrupt_a_save"]
    assert first.keys() == second.keys() == {"writing", "reading", "waiting"}
    for name in first:
        (interrupted, *after), (told, *other_after) = first[name], second[name]
        assert interrupted.startswith("KeyboardInterrupt: "), (name, interrupted)
        assert told.startswith("RankError: "), (name, told)
        assert "KeyboardInterrupt" in told, (name, told)
        if name == "writing":  # no rank is in a collective
            assert after == other_after == ["nothing"]
        else:
            assert "nothing" not in [*after, *other_after]
            assert all("KeyboardInterrupt" in text for text in [*after, *other_after])


# --- a start ---


def start_with_another_call(rank: int, directory: str) -> dict[str, str]:
    """By what is wrong on the second rank, before any configuration is read; then all start."""
    said = {}
    config = config_of("host", 3, Path(directory), world_size=2)
    for name in ("mpu", "WORLD_SIZE", "nothing"):
        keys = {"mpu": object()} if name == "mpu" and rank else {}
        if name == "WORLD_SIZE" and rank:
            os.environ[name] = "two"
        try:
            said[name] = said_of(
                lambda: offloadzero.initialize(model=make_odd_model(), config=config, **keys)  # noqa: B023
            )
        finally:
            os.environ.pop("WORLD_SIZE", None)
        gc.collect()
    return said


def test_what_is_wrong_before_the_configuration_is_told_to_the_others(found: Found) -> None:
    first, second = found["start_with_another_call"]
    assert first.pop("nothing") == second.pop("nothing") == "nothing"
    assert second.keys() == {"mpu", "WORLD_SIZE"}
    for name, text in second.items():
        assert text.startswith(f"ConfigError: {name} = ")
        assert f"the start of an engine (rank 0 of 2) is given up: rank 1: {text}" in first[name]


def start_with_few_descriptors(rank: int, directory: str) -> list[Any]:
    """What a start says for whose groups the process has no descriptors, as with some hundred ranks; and the limits."""
    limits = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = resources()[1] + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        said = said_of(lambda: start(rank, directory).close())
        raised, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return [said, few < raised <= soft, kept == hard]


def test_a_start_makes_room_for_the_descriptors_of_its_groups(found: Found) -> None:
    assert found[start_with_few_descriptors.__name__] == [["nothing", True, True]] * 2


def test_ranks_without_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would end the process."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    make_room_for_groups(8)
    assert raised == []
    make_room_for_groups(900)
    assert raised == [(4096, 4096)]
    with pytest.raises(ConfigError, match=r"ulimit -Hn = 4096: .* for 1024 ranks"):
        make_room_for_groups(1024)


def train_behind_the_default_group(rank: int, directory: str) -> str:
    """What a step is told that runs while the script has ended torch's default group."""
    engine = start(rank, directory)

    def is_gone() -> str:
        raise ValueError("Default process group has not been initialized")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", is_gone)
        said = said_of(lambda: train(engine, rank, 2, num_steps=2))
    engine.close()
    return said


def test_the_work_of_an_engine_does_not_ask_the_default_group(found: Found) -> None:
    """Weights are fetched ahead when a script ends the group and then closes its engine: that was torch's error."""
    assert found[train_behind_the_default_group.__name__] == ["nothing"] * 2


def close_behind_another_default_group(rank: int, directory: str) -> dict[str, Any]:
    """What engines say that end when the script has made torch's default group anew, and one of the new group."""
    engine, collected = start(rank, directory), start(rank, directory)
    dist.destroy_process_group()
    store = f"file://{Path(directory).absolute()}/another store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    unraisable: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda it: unraisable.append(str(it.exc_value))
    del collected
    gc.collect()
    wait_for_collected()
    sys.unraisablehook = hook
    said = [said_of(engine.close), said_of(lambda: start(rank, directory).close())]
    return {"said": said, "unraisable": unraisable}


def test_an_engine_ends_behind_a_default_group_that_is_made_anew(found: Found) -> None:
    for ended in found[close_behind_another_default_group.__name__]:
        assert ended == {"said": ["nothing"] * 2, "unraisable": []}
