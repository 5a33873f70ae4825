"""Models that several ranks build under `zero.Init`: what each keeps, whose values it is, how departures end."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import offloadzero
from offloadzero import zero
from offloadzero.ranks.shard import kept_elements
from offloadzero.streaming.building.waiting_parameters import SpilledWeight, spilled_weight
from tests.engine.built import stored_bytes
from tests.support.cases import IN_FULL
from tests.support.ranks import Found, run_in_turn, run_ranks
from tests.support.sharded import config_of, digest, engine_of, make_odd_model, said_of, train

NUM_STEPS = 3 if IN_FULL else 2
COMPACT = {"bf16": {"enabled": True}, "offloadzero": {"state_layout": "compact"}}
# By number of ranks.
CASES: dict[int, dict[str, tuple[str, int, dict[str, Any]]]] = {
    2: {
        "host": ("host", 3, {}),
        "compact on nvme": ("nvme", 3, COMPACT),
        "whole at stage 1": ("host", 1, {}),
    },
    3: {"nvme": ("nvme", 3, {}), "bf16 on nvme": ("nvme", 3, {"bf16": {"enabled": True}})},
}


def train_built(rank: int, world_size: int, directory: str) -> dict[str, Any]:
    """By case: losses and weights of a model in parts, and of one that each rank has built whole."""
    found = {}
    for name, (placement, stage, over) in CASES[world_size].items():
        config = config_of(placement, stage, Path(directory), world_size=world_size, **over)
        with zero.Init(config_dict_or_path=config):
            model = make_odd_model(seed=rank)  # the first rank's values are those of all
        is_divided = all(
            getattr(spilled_weight(param), "members", None) == [*range(world_size)]
            for param in model.parameters()
        )
        assert is_divided == (stage == 3), name
        built, *_ = offloadzero.initialize(model=model, config=config)
        whole = engine_of(config, seed=rank)
        runs = []
        for engine in (built, whole):
            losses = train(engine, rank, world_size, num_steps=NUM_STEPS)
            runs.append([losses, digest(dict(engine.module.state_dict()))])
            engine.close()
        found[name] = runs
    return found


@pytest.mark.parametrize("world_size", CASES)
def test_a_model_in_parts_trains_as_one_that_is_whole(tmp_path: Path, world_size: int) -> None:
    by_rank = run_ranks(train_built, world_size, tmp_path / "ranks", world_size, str(tmp_path), timeout_s=120)
    for found in by_rank:
        for name, (built, whole) in found.items():
            assert built == whole, name


class Odd(nn.Module):
    """Parameters of many forms, some with fewer elements than there are ranks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(()))
        self.pair = nn.Parameter(torch.randn(2))
        self.none = nn.Parameter(torch.empty(0))
        self.codes = nn.Parameter(torch.randint(0, 9, (4099,)), requires_grad=False)
        self.flags = nn.Parameter(torch.rand(17) > 0.5, requires_grad=False)
        self.strided = nn.Parameter(torch.randn(70, 61).t())
        self.lin = nn.Linear(61, 71)
        self.tied = nn.Linear(61, 71)
        self.tied.weight = self.lin.weight
        nn.init.constant_(self.lin.bias, 0.5 + seed)
        self.late = nn.Parameter(torch.empty(67, 67))
        nn.init.xavier_uniform_(self.late)


def keep(rank: int, directory: str) -> dict[str, Any]:
    """What a rank keeps of a model, and the values that are read of it."""
    found: dict[str, Any] = {}
    expected = Odd(seed=0)
    for place in ("cpu", "nvme"):
        config = config_of("nvme", 3, Path(directory), world_size=3)
        with zero.Init(config_dict_or_path=config, remote_device=place):
            model = Odd(seed=rank)
        assert model.tied.weight is model.lin.weight
        weights = [spilled_weight(param) for param in model.parameters()]
        found[place] = [[weight.host_bytes, weight.file_bytes] for weight in weights if weight is not None]
        assert all(stored_bytes(param) <= 8 for param in model.parameters())
        for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(param, other), name
        model.lin.to(torch.bfloat16)
        assert torch.equal(model.lin.weight, expected.lin.weight.bfloat16())
        with torch.no_grad():
            model.pair.fill_(rank + 3.0)  # each its own: the first rank's are those of all
            model.late.data = torch.full((3, 1000), rank + 1.0)
        assert model.pair.tolist() == [3.0, 3.0]
        assert torch.equal(model.late, torch.ones(3, 1000))
        with zero.Init(config_dict_or_path=config, dtype=torch.bfloat16), torch.no_grad():
            model = Odd(seed=rank)
            model.apply(lambda module: [p.fill_(rank + 7) for p in module.parameters(recurse=False)] and None)
        assert model.late.dtype == torch.bfloat16
        assert model.late.eq(7).all()
    return found


def test_each_rank_keeps_its_part(tmp_path: Path) -> None:
    sizes = [param.numel() * param.itemsize for param in Odd().parameters()]
    kept = [kept_elements(param.numel(), 3) * param.itemsize for param in Odd().parameters()]
    assert sum(kept) < sum(sizes) / 3 + 16 * len(sizes)
    is_large = [param.numel() >= zero.MIN_SPILL_ELEMENTS for param in Odd().parameters()]
    for found in run_ranks(keep, 3, tmp_path, str(tmp_path)):
        assert found["cpu"] == [[size, 0] for size in kept]
        assert found["nvme"] == [
            [0, -(-size // 4096) * 4096] if large else [size, 0]
            for size, large in zip(kept, is_large, strict=True)
        ]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """One after the other in the same processes, none of which waits for what another never sends."""
    works = gather_and_edit, depart, be_without_memory
    return run_in_turn(works, 2, tmp_path_factory.mktemp("building"))


def gather_and_edit(rank: int, directory: str) -> dict[str, str]:
    """Messages by what was tried."""
    config = config_of("nvme", 3, Path(directory), world_size=2)
    with zero.Init(config_dict_or_path=config):
        model = make_odd_model(seed=rank)
    plain = make_odd_model(seed=0)
    params = [model.wide.weight, model.scale, model.odd]
    for source in (0, 1):
        order = iter(params) if rank else reversed(params)  # as a set of them may have
        with zero.GatheredParameters(order, modifier_rank=source), torch.no_grad():
            assert all(type(param) is nn.Parameter for param in params)
            for param in params:
                param.add_(10 * rank + 1)  # what the other ranks write is lost
            with zero.GatheredParameters(model.scale):
                pass
        with torch.no_grad():
            for param in (plain.wide.weight, plain.scale, plain.odd):
                param.add_(10 * source + 1)
        assert all(stored_bytes(param) < 10 for param in params)
    with zero.GatheredParameters(params):
        assert torch.equal(model.wide.weight, plain.wide.weight)
    messages = {"read only": "", "absent": "", "in the block": ""}
    try:
        with zero.GatheredParameters(params), torch.no_grad():
            if rank == 1:
                model.odd.zero_()
    except offloadzero.StateError as error:
        messages["read only"] = str(error)
    try:
        with zero.GatheredParameters(params, modifier_rank=2):
            pass
    except offloadzero.ConfigError as error:
        messages["absent"] = str(error)
    try:
        with zero.GatheredParameters(params, modifier_rank=1), torch.no_grad():
            model.odd.fill_(rank)
            raise LookupError("of the script")
    except LookupError as error:
        messages["in the block"] = str(error)
    plain.odd.data.fill_(1)
    engine, *_ = offloadzero.initialize(model=model, config=config)
    weights = dict(engine.module.state_dict())
    assert digest(weights) == digest({name: plain.state_dict()[name] for name in weights})
    engine.close()
    return messages


def test_gathered_parameters_of_a_model_in_parts(found: Found) -> None:
    for messages in found["gather_and_edit"]:
        said = "OddModel.odd on ranks [1] changed under GatheredParameters(modifier_rank=None)"
        assert messages["read only"].startswith(said)
        assert messages["absent"] == "modifier_rank = 2: None, or 0 to 1"
        assert messages["in the block"] == "of the script"


def depart(rank: int, directory: str) -> dict[str, str]:
    """What is said where one rank does something else."""
    config = config_of("host", 3, Path(directory), world_size=2)

    def built(make: Callable[[], nn.Module] = make_odd_model) -> nn.Module:
        with zero.Init(config_dict_or_path=config):
            return make()

    def failing() -> nn.Module:
        if rank == 1:
            raise LookupError("no such file")
        return nn.Linear(8, 8)

    found = {"shape": said_of(lambda: built(lambda: nn.Linear(8, 8 + rank)))}
    found["fewer"] = said_of(lambda: built(lambda: nn.Linear(8, 8, bias=rank == 0)))
    found["error"] = said_of(lambda: built(failing))
    model: Any = built()
    found["read"] = said_of(lambda: (model.scale if rank else model.odd).sum())
    found["gathered"] = said_of(zero.GatheredParameters([model.odd, model.scale][rank:]).__enter__)
    for name, modifiers in {"modifiers": (0, 1), "absent": (1, 2), "nobody": (None, -1)}.items():
        enter = zero.GatheredParameters(model.odd, modifier_rank=modifiers[rank]).__enter__
        found[name] = said_of(enter)
    alone = offloadzero.initialize if rank else (lambda **_: model.scale.sum())
    found["started"] = said_of(lambda: alone(model=model, config=config))
    other = (lambda: engine_of(config)) if rank else built
    found["block"] = said_of(other)
    found["configuration"] = said_of((lambda: zero.Init(remote_device="nvme")) if rank else built)
    engine, *_ = offloadzero.initialize(model=model, config=config)
    train(engine, rank, 2, num_steps=1)
    engine.close()
    return found


def test_ranks_that_depart_end_with_an_error_on_all(found: Found) -> None:
    by_rank = found["depart"]
    parts = {
        "shape": "ranks [0]: keep a part of Linear.weight, number 1, (8, 8) float32; ranks [1]: ",
        "fewer": "ranks [0]: keep a part of Linear.bias, number 2, (8,) float32; ranks [1]: end the block",
        "read": "ranks [1]: read OddModel.scale, number ",
        "gathered": "ranks [0]: enter GatheredParameters of 2 parameters (modifier_rank=None); ranks [1]: enter ",
        "modifiers": "parameters (modifier_rank=0); ranks [1]: enter GatheredParameters of 1 ",
        "absent": "parameters (modifier_rank=1); ranks [1]: enter GatheredParameters of 1 ",
        "nobody": "parameters (modifier_rank=None); ranks [1]: enter GatheredParameters of 1 ",
        "started": "ranks [1]: start an engine",
    }
    for rank, said in enumerate(by_rank):
        for name, text in parts.items():
            assert said[name].startswith("StateError: "), said
            assert text in said[name]
            assert f"this is rank {rank}" in said[name]
        assert "no such file" in said["error"]
        assert "at the start of " in said["block"]
        assert "ConfigError: nvme_path = None" in said["configuration"]
    assert by_rank[0]["error"].startswith("RankError")
    assert by_rank[0]["configuration"].startswith("RankError")


def _lend_without_memory(
    failing: nn.Parameter | None, *, after: bool
) -> Callable[[SpilledWeight, nn.Parameter], None]:
    """Make a `lend` that has no memory for one parameter, or, `after` it, for a copy on the device."""
    lend = SpilledWeight.lend

    def lend_or_fail(weight: SpilledWeight, param: nn.Parameter) -> None:
        if param is not failing:
            lend(weight, param)
            return
        if after:
            lend(weight, param)
        raise RuntimeError("no memory")

    return lend_or_fail


def be_without_memory(rank: int, directory: str) -> list[Any]:
    """One rank has too little for the second parameter, or only for a copy of it: what is raised, what stays."""
    config = config_of("host", 3, Path(directory), world_size=2)
    with zero.Init(config_dict_or_path=config):
        model = make_odd_model(seed=rank)
    params = [model.scale, model.odd, model.wide.weight]
    said: list[Any] = []
    for failing in params[1:]:
        for after in (False, True):
            lend = _lend_without_memory(failing if rank == 1 else None, after=after)
            with patch.object(SpilledWeight, "lend", lend):
                said.append(said_of(zero.GatheredParameters(params).__enter__))
            assert all(stored_bytes(param) < 10 for param in params)
            assert model.wide.weight[0, 0] == make_odd_model(seed=0).wide.weight[0, 0]
    return said


def test_a_rank_without_memory_is_an_error_on_all(found: Found) -> None:
    first, second = found["be_without_memory"]
    assert second == ["RuntimeError: no memory"] * 4
    for text in first:
        assert text.startswith("StateError: ")
        assert "ranks [1]: cannot enter GatheredParameters of 3 parameters (modifier_rank=None): Runt" in text


def build_in_a_mesh(rank: int, directory: str) -> list[str]:
    """What `initialize()` says of a model that other ranks have built than the pairs that train it.

    All ranks have built it, and then the two first ones, of different pairs, while the others take a whole one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = config_of("host", 3, Path(directory), world_size=2)
    with zero.Init(config_dict_or_path=config, data_parallel_group=mesh.get_group("dp")):
        model = make_odd_model(seed=rank)
    first = make_odd_model(seed=rank % 2)
    for param, other in zip(model.parameters(), first.parameters(), strict=True):
        assert torch.equal(param, other)
    engine, *_ = offloadzero.initialize(model=model, config=config, mpu=mesh)
    assert torch.equal(engine.module.get_parameter("wide.weight").data, first.wide.weight)
    engine.close()
    said = []
    for group, uses_it in ((None, True), (mesh.get_group("tp"), rank < 2)):
        with zero.Init(config_dict_or_path=config, data_parallel_group=group):
            built = make_odd_model()
        other = built if uses_it else make_odd_model()
        said.append(said_of(functools.partial(offloadzero.initialize, model=other, config=config, mpu=mesh)))
    return said


def test_ranks_of_a_mesh_build_their_part_of_the_model(tmp_path: Path) -> None:
    for rank, (by_all, by_two) in enumerate(run_ranks(build_in_a_mesh, 4, tmp_path, str(tmp_path))):
        allowed = f"the ranks along the data's axis, here {[[0, 2], [1, 3]][rank % 2]}: "
        assert by_all.startswith(f"ConfigError: data_parallel_group = [0, 1, 2, 3]: {allowed}"), by_all
        if rank < 2:
            assert by_two.startswith(f"ConfigError: data_parallel_group = [0, 1]: {allowed}"), by_two
        else:
            assert by_two.startswith(
                f"ConfigError: data_parallel_group = None: {allowed}a parameter of another rank was built"
            ), by_two


NUM_LAYERS = 50
M_MMAP_THRESHOLD = -3  # of malloc.h


def measure_peak(_rank: int, directory: str) -> dict[str, float]:
    """MiB over the start at the most, while a model of 4 MiB a layer is built, and taken over."""
    config = config_of("nvme", 3, Path(directory), world_size=2)
    config["offloadzero"].update(poison_released_leases=False, units={}, update={"chunk_elements": 1 << 18})
    # Each large piece is mapped by itself: holes between pieces in the C library's heap are no part of the model.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)

    def peak_mib() -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
        return int(line.split()[1]) / 1024

    found = {}
    for place in ("cpu", "nvme"):
        with zero.Init(config_dict_or_path=config, remote_device=place):
            nn.Linear(1024, 1024)  # what the first use of torch takes is not the model's
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_mib()
        with zero.Init(config_dict_or_path=config, remote_device=place):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(NUM_LAYERS)))
        found[place] = peak_mib() - before
        if place == "nvme":
            engine, *_ = offloadzero.initialize(model=model, config=config)
            found["engine"] = peak_mib() - before
            engine.close()
        del model
    return found


def test_no_rank_holds_the_model(tmp_path: Path) -> None:
    model_mib = 4 * NUM_LAYERS
    for found in run_ranks(measure_peak, 2, tmp_path, str(tmp_path), timeout_s=100):
        assert found["cpu"] < model_mib / 2 + 12, found  # one layer whole, and its part
        assert found["nvme"] < 20, found
        assert found["engine"] < 40, found  # its buffers are of some whole units
