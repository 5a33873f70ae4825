"""What ranks do together before they train."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import offloadzero
from offloadzero.core import launch
from offloadzero.engine import join
from offloadzero.ranks import process_groups as of_ranks
from offloadzero.ranks.channel import Channel
from offloadzero.ranks.process_groups import Ranks, make_building_channel, make_ranks
from tests.simulated.collectives import ON_DEVICE
from tests.support.ranks import run_ranks
from tests.support.sharded import GLOBAL_BATCH, config_of
from tests.support.text import text_batch, text_model

NUM_RANKS, NUM_LOCAL, NUM_STEPS = 4, 2, 2
ALL_CODES = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": NUM_LOCAL,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 3": (3, {}),
    "ZeRO++": (3, {"zero_optimization": ALL_CODES}),
}


def kinds_of(ranks: Ranks, noted: set[tuple[int, str]]) -> set[str]:
    """The kinds in channels of devices, by the channel's name."""
    names = {id(getattr(ranks, name)): name for name in ON_DEVICE}
    return {f"{names[channel]} {kind}" for channel, kind in noted if channel in names}


def start_and_train(rank: int, directory: str) -> dict[str, Any]:
    """By case: the kinds of collectives at the start, those of two steps, and what is counted before them."""
    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_LOCAL)
    noted: set[tuple[int, str]] = set()
    run: Callable[..., None] = Channel._run

    def note(channel: Channel, kind: str, *given: Any) -> None:
        noted.add((id(channel), kind))
        run(channel, kind, *given)

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "_run", note)
        for case, (stage, over) in CASES.items():
            noted.clear()
            config = config_of("host", stage, Path(directory), world_size=GLOBAL_BATCH, **over)
            engine, *_ = offloadzero.initialize(model=text_model(), config=config)
            ranks = engine._runtime.group  # type: ignore[union-attr]
            at_start, counted = kinds_of(ranks, noted), set(engine.collectives())
            noted.clear()
            for step in range(NUM_STEPS):
                engine.backward(engine(*text_batch(NUM_RANKS * step + rank, 1)))
                engine.step()
            engine.synchronize()
            kinds = {"start": at_start, "steps": kinds_of(ranks, noted), "counted": counted}
            found[case] = {name: sorted(of_name) for name, of_name in kinds.items()}
            engine.close()
    return found


def test_no_kind_of_collective_comes_first_while_ranks_train(tmp_path: Path) -> None:
    """NCCL connects ranks at the first collective of a kind: on threads that run beside kernels they may wait."""
    for found in run_ranks(start_and_train, NUM_RANKS, tmp_path, str(tmp_path), timeout_s=120):
        sets = {case: {name: set(kinds[name]) for name in kinds} for case, kinds in found.items()}
        for case, kinds in sets.items():
            assert kinds["steps"] <= kinds["start"], case
            assert not {key for key in kinds["counted"] if key.split()[0] in ON_DEVICE}, case
        assert sets["stage 0"]["steps"] == {"gradients all-reduce"}
        assert sets["stage 1"]["steps"] == {"gradients reduce-scatter", "updates all-gather"}
        assert sets["ZeRO++"]["steps"] >= {
            "near_weights all-gather",
            "near_gradients all-to-all",
            "far_gradients all-to-all",
        }


class Communicator:
    """Stands for that of NCCL's default group, of which torch splits off groups if a device is bound to that one."""

    num_splits = 0

    def perform_nocolor_split(self, _device: torch.device) -> None:
        """Count what a rank does that is not in a new group. NCCL's waits for all ranks of the default one."""
        self.num_splits += 1


def make_groups_on_the_host(rank: int) -> dict[str, Any]:
    """Make those of each rank alone, where the script has bound its device to the default group."""
    default, communicator = distributed_c10d._get_default_group(), Communicator()
    device = torch.device("cuda", rank)
    default.bound_device_id = device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_get_split_source", lambda _group: communicator)
        channel = make_building_channel([rank])
    bound, default.bound_device_id = default.bound_device_id, None
    members = [*channel.members]
    channel.close()
    return {"splits": communicator.num_splits, "is bound": bound == device, "members": members}


def test_groups_of_some_ranks_on_the_host_split_no_communicator(tmp_path: Path) -> None:
    """init_process_group(device_id=...): ranks that were not in such a group waited in NCCL for those that were."""
    for rank, found in enumerate(run_ranks(make_groups_on_the_host, 2, tmp_path)):
        assert found == {"splits": 0, "is bound": True, "members": [rank]}


def backends_by_device(_: int) -> dict[str, list[str]]:
    """The backends of the groups that ranks make for a device, by its type. The groups themselves are gloo's."""
    found: dict[str, list[str]] = {}
    new_group, noted = dist.new_group, set[str]()

    def note(members: Any, *, backend: str, timeout: Any) -> Any:
        noted.add(backend)
        return new_group(members, backend="gloo", timeout=timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", note)
        patch.setattr(of_ranks, "_begin_one_by_one", lambda *_: None)
        for kind in ("cpu", "cuda", "xpu"):
            noted.clear()
            make_ranks(torch.device(kind, 0)).close()
            found[kind] = sorted(noted)
    return found


def test_groups_of_devices_have_the_backend_of_these(tmp_path: Path) -> None:
    """Each device but the CPU got NCCL's, which knows CUDA alone."""
    expected = {"cpu": ["gloo"], "cuda": ["gloo", "nccl"], "xpu": ["gloo", "xccl"]}
    assert run_ranks(backends_by_device, 2, tmp_path) == [expected] * 2


def test_the_default_group_has_the_backend_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, backend in ((None, "gloo"), ("cuda", "nccl"), ("xpu", "xccl")):
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)  # noqa: B023
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)  # noqa: B023
        assert launch._backend(None, 2) == backend
        assert launch._backend(None, 1) == "gloo"


def warned(rank: int, directory: str) -> list[list[str]]:
    """What the log warns of where ranks of two machines come one after the other, and where they alternate."""
    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_LOCAL)
    found = []
    for machines in ((0, 0, 1, 1), (0, 1, 0, 1)):
        records = list[str]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(join, "machine", lambda number=machines[rank]: f"machine {number}", raising=False)
            patch.setattr(join.log, "warning", lambda text, *given: records.append(text % given))  # noqa: B023
            config = config_of(
                "host", 3, Path(directory), world_size=GLOBAL_BATCH, zero_optimization=ALL_CODES
            )
            offloadzero.initialize(model=text_model(), config=config)[0].close()
        found.append([text for text in records if "ZeRO++" in text])
    return found


def test_ranks_that_count_as_a_machine_and_are_on_several_are_told(tmp_path: Path) -> None:
    """The numbers are the same; what was to stay within a machine went over the network, and nothing said so."""
    first, *others = run_ranks(warned, NUM_RANKS, tmp_path, str(tmp_path), timeout_s=120)
    assert first[0] == []
    (text,) = first[1]
    assert "2 consecutive ranks for one machine, and ranks [0, 1] are on several" in text
    assert others == [[[], []]] * 3


def begins_alone(rank: int, world_size: int, directory: str) -> str:  # noqa: ARG001
    """Rank 0 starts an engine that rank 1 never starts, and is interrupted there."""
    if rank == 1:
        time.sleep(6)
        return "never came"
    model = torch.nn.Linear(64, 64)
    timer = threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        offloadzero.offload(model, torch.optim.AdamW(model.parameters()), {"zero_optimization": {"stage": 2}})
    except KeyboardInterrupt:
        return "left"
    return "started"


def test_the_wait_for_a_rank_that_never_starts_can_be_left(tmp_path: Path) -> None:
    assert run_ranks(begins_alone, 2, tmp_path / "ranks", 2, str(tmp_path)) == ["left", "never came"]
