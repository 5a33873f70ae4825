"""`save_checkpoint(wait=False)` of two ranks in a durable run: the bits of a save that waits, and errors on both."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from offloadzero.checkpoint.verify import open_checkpoint
from offloadzero.errors import AioError, CheckpointError, RankError, StateError
from offloadzero.memory.tiers import SAVE_PRIORITY
from offloadzero.ranks import channel, process_groups
from tests.durable.runs import KINDS, Kind, digest, make, train_step
from tests.support.checkpoints import bits
from tests.support.faults import delays, fails, replaced
from tests.support.ranks import RanksError, run_ranks
from tests.support.sharded import said_of

STAGE_3 = KINDS["two ranks stage 3"]
SAVING: dict[str, Kind] = {
    "stage 3": STAGE_3,
    "stage 3 compact": Kind(top=STAGE_3.top, own={"state_layout": "compact"}, num_ranks=2),
    "stage 1": KINDS["two ranks stage 1"],  # whose parameters have one place: the call waits
    "stage 0": Kind(top={"zero_optimization": {"stage": 0}}, num_ranks=2),
}


def take_steps(engine: Any, kind: Kind, first: int, stop: int) -> None:
    for number in range(first, stop):
        train_step(engine, kind, number)


def saves_both_ways(rank: int, kind: Kind, directory: str) -> list[Any]:
    """The digests of both runs at their ends, and whether each checkpoint was there when its call returned."""
    del rank
    found = []
    for wait in (True, False):
        run, saved = Path(directory) / f"run-{wait}", Path(directory) / f"saved-{wait}"
        engine = make(kind, run)
        engine.resume()
        take_steps(engine, kind, 0, 3)
        with delays("checkpoint.write", 0.01):
            engine.save_checkpoint(saved, client_state={"at": 3}, wait=wait)
            was_there = (saved / "global_step3").exists()
            take_steps(engine, kind, 3, 6)
            engine.save_checkpoint(saved, tag="second", wait=wait)  # waits for the one before
            assert (saved / "global_step3" / "manifest.json").exists()
            engine.finish_saving()
        take_steps(engine, kind, 6, 7)  # commits go on
        at_end = digest(engine)
        engine.close()
        engine = make(kind, run)
        assert engine.resume() == {"next": 7}
        assert digest(engine) == at_end
        engine.close()
        found.append((at_end, was_there))
    return found


def contents_of(checkpoint: Path) -> dict[str, Any]:
    open_checkpoint(checkpoint)
    tensors = {
        name: (tensor.dtype, tensor.shape, bits(tensor))
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return {**tensors, **json.loads((checkpoint / "meta.json").read_text()), "saved_unix_ns": 0}


@pytest.mark.parametrize("name", SAVING)
def test_training_goes_on_and_the_checkpoint_is_that_of_a_save_that_waits(name: str, tmp_path: Path) -> None:
    by_rank = run_ranks(saves_both_ways, 2, tmp_path / "ranks", SAVING[name], str(tmp_path))
    for (waited, _), (went_on, _) in by_rank:
        assert waited == went_on
    assert by_rank[0][1][1] == (name == "stage 1")
    for tag in ("global_step3", "second"):
        assert contents_of(tmp_path / "saved-False" / tag) == contents_of(tmp_path / "saved-True" / tag)
    assert (tmp_path / "saved-False" / "latest").read_text() == "second"


def no_space(rank: int, directory: str) -> None:
    engine = make(STAGE_3, Path(directory) / "run")
    engine.resume()
    take_steps(engine, STAGE_3, 0, 2)
    saved = Path(directory) / "saved"
    error = OSError(errno.ENOSPC, "No space left on device")
    with fails("checkpoint.write", error, about="blocks.0.up.weight"):  # which the first rank alone writes
        engine.save_checkpoint(saved, wait=False)
        take_steps(engine, STAGE_3, 2, 4)
        expected = r"nothing was saved" if rank == 0 else r"rank 0: CheckpointError: .*nothing was saved"
        with pytest.raises(CheckpointError if rank == 0 else RankError, match=expected):
            engine.finish_saving()
    assert [entry.name for entry in saved.iterdir()] == []
    take_steps(engine, STAGE_3, 4, 5)
    engine.save_checkpoint(saved, wait=False)
    engine.close()  # waits for it
    assert (saved / "global_step5" / "manifest.json").exists()


def no_read(rank: int, directory: str) -> None:
    engine = make(STAGE_3, Path(directory) / "run")
    engine.resume()
    take_steps(engine, STAGE_3, 0, 2)

    def read(work: Callable[..., Any], *given: Any, priority: int, label: str) -> Any:
        if rank == 1 and priority == SAVE_PRIORITY:
            raise AioError(
                operation="read", path="drive", offset=0, num_bytes=1, errno=errno.EIO, label=label
            )
        return work(*given, priority=priority, label=label)

    with replaced("nvme.read", read):
        engine.save_checkpoint(Path(directory) / "saved", wait=False)
        with pytest.raises(AioError if rank == 1 else RankError, match="Input/output error"):
            engine.finish_saving()
    with pytest.raises((AioError, RankError), match="Input/output error"):
        take_steps(engine, STAGE_3, 2, 4)


def no_memory(rank: int, directory: str) -> None:
    """The other rank cannot allocate what the first one waits for."""
    engine = make(STAGE_3, Path(directory) / "run")
    engine.resume()
    take_steps(engine, STAGE_3, 0, 2)
    allocate = torch.empty

    def empty(*given: Any, **options: Any) -> torch.Tensor:
        if rank == 1 and threading.current_thread().name == "offloadzero-save":
            raise MemoryError("none is left")
        return allocate(*given, **options)

    with patch.object(torch, "empty", empty):
        engine.save_checkpoint(Path(directory) / "saved", wait=False)
        with pytest.raises(MemoryError if rank == 1 else RankError, match="none is left"):
            engine.finish_saving()
    with pytest.raises((MemoryError, RankError), match="none is left"):
        take_steps(engine, STAGE_3, 2, 4)
    engine.close()


@pytest.mark.parametrize("work", [no_space, no_read, no_memory])
def test_an_error_on_one_rank_is_told_on_both(work: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(work, 2, tmp_path / "ranks", str(tmp_path))


def slow_drive(rank: int, directory: str) -> None:
    del rank
    with patch.object(process_groups, "timeout_of_process_group", lambda: timedelta(seconds=5)):
        engine = make(STAGE_3, Path(directory) / "run")
    engine.resume()
    take_steps(engine, STAGE_3, 0, 1)
    saved = Path(directory) / "saved"
    with delays("checkpoint.write", 6.0, about="blocks.0.up.weight"):
        engine.save_checkpoint(saved, wait=False)
        take_steps(engine, STAGE_3, 1, 2)
        engine.finish_saving()
    assert (saved / "global_step1" / "manifest.json").exists()
    take_steps(engine, STAGE_3, 2, 4)
    engine.close()


def test_a_drive_may_stand_still_for_longer_than_the_groups_timeout(tmp_path: Path) -> None:
    run_ranks(slow_drive, 2, tmp_path / "ranks", str(tmp_path))


def part(rank: int, directory: str) -> dict[str, str]:
    """What is said where one rank alone saves, or takes a micro batch more while a checkpoint is written."""
    kind = Kind(top={**STAGE_3.top, "managed_gradient_accumulation": False}, num_ranks=2)
    said = {}
    for name in ("saves", "micro batch"):
        engine = make(kind, Path(directory) / name)
        engine.resume()

        def go(engine: Any = engine, name: str = name) -> None:
            take_steps(engine, kind, 0, 2)
            if name != "saves" or rank == 0:
                engine.save_checkpoint(Path(directory) / "saved", wait=False)
            for number in range(2):
                for _ in range(2 if name != "saves" and rank == 1 and number == 1 else 1):
                    engine.backward(engine(torch.zeros(2, 5, dtype=torch.int64), uses_rare=False))
                engine.step()
            engine.synchronize()

        with patch.object(channel, "WAITED_S", 0.0), delays("checkpoint.write", 0.1):
            said[name] = said_of(go)
        with suppress(StateError, RankError):
            engine.close()
    return said


def test_ranks_that_depart_get_an_error_and_do_not_end_inside_of_gloo(tmp_path: Path) -> None:
    acts = {
        "saves": "saves a checkpoint in the background",
        "micro batch": "asks whether the checkpoint is there",
    }
    for said in run_ranks(part, 2, tmp_path / "ranks", str(tmp_path)):
        for name, act in acts.items():
            assert f"rank 0 waits in what the ranks do ({act}" in said[name]
            assert ", which rank 1 has not called: both would wait forever. All ranks must" in said[name]


def killed(rank: int, directory: str) -> None:
    engine = make(STAGE_3, Path(directory) / "run")
    engine.resume()
    take_steps(engine, STAGE_3, 0, 2)
    engine.save_checkpoint(Path(directory) / "saved", tag="first")

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with replaced("checkpoint.write", kill, about="blocks.1.up.weight"):
        engine.save_checkpoint(Path(directory) / "saved", tag="second", wait=False)
        take_steps(engine, STAGE_3, 2, 4)
        engine.finish_saving()
    raise AssertionError(f"rank {rank} goes on")


def goes_on(rank: int, directory: str) -> None:
    del rank
    engine = make(STAGE_3, Path(directory) / "run")
    state = engine.resume()
    assert state == {"next": 2}
    engine.save_checkpoint(Path(directory) / "saved", tag="second", wait=False)
    engine.close()


def test_a_killed_rank_leaves_the_checkpoint_before_and_no_half_one(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="RankError"):  # the other one has ended by itself
        run_ranks(killed, 2, tmp_path / "ranks", str(tmp_path))
    assert not (tmp_path / "saved" / "second").exists()
    assert (tmp_path / "saved" / "latest").read_text() == "first"
    open_checkpoint(tmp_path / "saved" / "first")
    run_ranks(goes_on, 2, tmp_path / "again", str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["first", "latest", "second"]
    assert (
        contents_of(tmp_path / "saved" / "second").keys() == contents_of(tmp_path / "saved" / "first").keys()
    )
