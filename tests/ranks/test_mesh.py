"""Which ranks share the data, as a DeviceMesh or Megatron's `mpu` says it; what is no mesh; one rank of a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import offloadzero
from offloadzero import zero
from offloadzero.config import load_config
from offloadzero.config.schema import MeshConfig
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import ModelPlanner
from offloadzero.errors import ConfigError
from offloadzero.ranks.mesh import (
    MeshGroups,
    find_mesh,
    is_divided_by_tensor_parallelism,
    mesh_groups,
    numbers_of,
)
from tests.support import meshes

RANK, WORLD_SIZE = 5, 8


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sixth of eight ranks; the others are not there."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    dist.init_process_group("fake", rank=RANK, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


class Megatron:
    """An `mpu`; `more` are the answers of further methods."""

    def __init__(self, group: Any, tensor_name: str = "get_tensor_model_parallel_rank", **more: int) -> None:
        self.get_data_parallel_group = lambda: group
        for name, answer in {tensor_name: 1, **more}.items():
            setattr(self, name, lambda answer=answer: answer)


@pytest.mark.usefixtures("fake_ranks")
def test_the_place_in_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert find_mesh(mesh) == MeshConfig((5, 7), tensor_rank=1, pipeline_rank=1, tensor_size=2)
    mesh_of_two = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "pp"))
    assert find_mesh(mesh_of_two) == MeshConfig((1, 5), pipeline_rank=1, tensor_size=1)
    assert find_mesh(init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))) is None
    assert find_mesh(init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp", "tp"))) is None
    assert find_mesh(None) is None
    group = mesh.get_group("dp")
    for name in ("get_tensor_model_parallel_rank", "get_model_parallel_rank", "get_slice_parallel_rank"):
        assert find_mesh(Megatron(group, name)) == MeshConfig((5, 7), tensor_rank=1)
    for name in ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank"):
        mpu = Megatron(group, **{name: 3})
        assert find_mesh(mpu) == MeshConfig((5, 7), tensor_rank=1, pipeline_rank=3)
    for name in (
        "get_tensor_model_parallel_world_size",
        "get_model_parallel_world_size",
        "get_slice_parallel_world_size",
    ):
        assert find_mesh(Megatron(group, **{name: 4})) == MeshConfig((5, 7), tensor_rank=1, tensor_size=4)


@pytest.mark.usefixtures("fake_ranks")
def test_what_is_no_mesh_that_is_built() -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(
        ConfigError, match=r"mpu = .*the axes \('dp', 'cp'\).*: one axis dp, and any of tp and pp"
    ):
        find_mesh(mesh)
    with pytest.raises(ConfigError, match=r"mpu = .*one axis dp, and any of tp and pp"):
        find_mesh(init_device_mesh("cpu", (8,)))
    descending = DeviceMesh("cpu", [[0, 5], [2, 3], [4, 1], [6, 7]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigError, match=r"mpu = .*ranks that ascend along dp"):
        find_mesh(descending)
    group = mesh.get_group("dp")
    with pytest.raises(ConfigError, match=r"mpu\.get_context_parallel_world_size\(\) = 2: 1: "):
        find_mesh(Megatron(group, get_context_parallel_world_size=2))
    with pytest.raises(
        ConfigError, match="mpu = 'object': a DeviceMesh with the axes dp and tp or pp, or an object"
    ):
        find_mesh(object())
    with pytest.raises(ConfigError, match="a data-parallel group with this rank in it"):
        find_mesh(Megatron(dist.new_group([0, 1])))


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(ConfigError, match="mpu = 'object': None: there is no process group"):
        find_mesh(object())


def said(*groups: tuple[int, ...]) -> list[list[int]]:
    """What the ranks of these groups, each with the next tensor-parallel place, say, by rank."""
    by_rank = {
        rank: numbers_of(MeshConfig(group, place)) for place, group in enumerate(groups) for rank in group
    }
    return [by_rank[rank] for rank in sorted(by_rank)]


def test_groups_of_a_mesh() -> None:
    groups = mesh_groups(said((0, 2), (1, 3)))
    assert groups == MeshGroups(data=[[0, 2], [1, 3]], across=[[0, 1], [2, 3]], tensor=[[0, 1], [2, 3]])
    assert [groups.part_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert mesh_groups(said((0,), (1,))) == MeshGroups(data=[[0], [1]], across=[[0, 1]], tensor=[[0, 1]])
    assert mesh_groups(said((3, 5), (0, 4), (1, 2))).data == [[3, 5], [0, 4], [1, 2]]


def test_the_number_of_a_part_is_that_of_its_place_and_not_of_its_ranks() -> None:
    def part_at(rank: int, shape: tuple[int, int]) -> MeshConfig:
        """Of a mesh of so many stages and places in each, whose ranks go along the pipeline first."""
        tensor_rank, pipeline_rank = divmod(rank, shape[0])
        return MeshConfig((rank,), tensor_rank, pipeline_rank)

    groups = mesh_groups([numbers_of(part_at(rank, (2, 3))) for rank in range(6)])
    assert groups.data == [[0], [2], [4], [1], [3], [5]]
    assert groups.tensor == [[0, 2, 4], [1, 3, 5]]
    reversed_places = [numbers_of(MeshConfig((rank,), tensor_rank=1 - rank)) for rank in range(2)]
    assert mesh_groups(reversed_places).data == [[1], [0]]


def test_groups_of_no_mesh() -> None:
    places = [numbers_of(MeshConfig((0, 1), tensor_rank=rank)) for rank in range(2)]
    with pytest.raises(ConfigError, match=r"another place on ranks \[1\]"):
        mesh_groups(places)
    with pytest.raises(ConfigError, match="groups of one size, whose members name the same ranks"):
        mesh_groups(said((0, 2), (1,)))
    by_rank = said((0, 2), (1, 3))
    by_rank[3] = numbers_of(MeshConfig((2, 3), tensor_rank=1))
    with pytest.raises(ConfigError, match=r"other members or another place on ranks (\[1, 2, 3\]|\[1, 3\])"):
        mesh_groups(by_rank)


def test_parts_at_one_place_are_refused() -> None:
    """As of a mesh whose axis tp was left out: replicated parameters would count twice."""
    by_rank = [numbers_of(MeshConfig(ranks)) for ranks in ((0, 2), (1, 3))] * 2
    said = r"pipeline rank 0 and tensor-parallel rank 0 on ranks \[0, 2\] and \[1, 3\].*all of its axes dp, tp and pp"
    with pytest.raises(ConfigError, match=said):
        mesh_groups(by_rank)


def test_the_attributes_of_a_divided_parameter() -> None:
    param = nn.Parameter(torch.ones(1))
    assert not is_divided_by_tensor_parallelism(param)
    for name in ("tensor_model_parallel", "model_parallel"):
        marked = nn.Parameter(torch.ones(1))
        setattr(marked, name, True)
        assert is_divided_by_tensor_parallelism(marked)


@pytest.mark.usefixtures("fake_ranks")
def test_one_rank_of_a_mesh_keeps_its_part_of_its_group(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "dp"))
    config = meshes.config_of("host", 3, tmp_path, num_ranks=4)
    with zero.Init(config_dict_or_path=config, data_parallel_group=mesh.get_group("dp")):
        model = meshes.make_model()
    engine, *_ = offloadzero.initialize(model=model, config=config, mpu=mesh)
    names = ("dp_world_size", "mp_world_size", "world_size", "global_rank", "mpu")
    assert [getattr(engine, name) for name in names] == [4, 2, 8, RANK, mesh]
    assert (engine.get_data_parallel_rank(), engine.get_tensor_parallel_rank()) == (1, 1)
    assert engine.train_batch_size() == 2 * meshes.GLOBAL_BATCH
    assert "rank 1 of 4, stage 3: homes " in engine.memory_table()
    engine.close()


@pytest.mark.usefixtures("fake_ranks")
def test_gradients_that_are_parts_of_a_sum_are_refused(tmp_path: Path) -> None:
    """Those of a norm under Megatron's sequence parallelism, which it adds up after backward."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model[1].weight.sequence_parallel = True
    config = meshes.config_of("host", 1, tmp_path, num_ranks=2)
    with pytest.raises(ConfigError, match=r"1\.weight\.sequence_parallel = True: False: .*register_hook"):
        offloadzero.initialize(model=model, config=config, mpu=mesh)
    model[1].weight.sequence_parallel = False
    offloadzero.initialize(model=model, config=config, mpu=mesh)[0].close()


# --- inputs of checkpointed units in parts ---

PARTITIONED = {"activation_checkpointing": {"partition_activations": True}}


def partitioned_config(directory: Path, **activations: Any) -> dict[str, Any]:
    """With blocks that are recomputed; without `activations` of our own nothing is."""
    own = {"activation_checkpoints": activations} if activations else {}
    config = meshes.config_of("host", 1, directory, num_ranks=2, offloadzero=own, **PARTITIONED)
    del config["train_batch_size"]
    return config


def start(directory: Path, mpu: Any, **activations: Any) -> Any:
    config = partitioned_config(directory, **activations)
    return offloadzero.initialize(model=meshes.make_model(), config=config, mpu=mpu)[0]


@pytest.mark.usefixtures("fake_ranks")
def test_one_of_two_tensor_parallel_ranks_plans_half_of_the_inputs(tmp_path: Path) -> None:
    for names, shape in ((("tp", "dp"), (2, 4)), (("pp", "dp", "tp"), (2, 2, 2))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for tier, host, nvme in (("host", 2 * 8192, 0), ("nvme", 4 * 8192, 2 * 8192)):
            engine = start(tmp_path, mesh, tier=tier, input_bytes=16384)
            inputs = engine._runtime.plan.inputs
            assert (inputs.host, inputs.nvme, inputs.kept_bytes) == (host, nvme, 8192)
            assert inputs.device == (2 if tier == "host" else 3) * 16384
            engine.close()


@pytest.mark.usefixtures("fake_ranks")
def test_inputs_are_in_parts_where_there_are_ranks_that_have_the_same(tmp_path: Path) -> None:
    key = r"activation_checkpointing\.partition_activations = "
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    with pytest.warns(UserWarning, match=rf"{key}true has no effect: it is for inputs of blocks"):
        start(tmp_path, mesh).close()
    nothing = rf"{key}true has no effect: .* offloadzero\.activation_checkpoints .* and here is"
    without = {
        "one": [init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "pp"))],
        "none": [None, init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))],
    }
    for number, mpus in without.items():
        for mpu in mpus:
            with pytest.warns(UserWarning, match=f"{nothing} {number}"):
                engine = start(tmp_path, mpu, tier="host")
            assert engine._runtime.config.num_input_parts == 1
            engine.close()
    with pytest.raises(ConfigError, match=rf"{key}True: needs get_tensor_model_parallel_world_size\(\)"):
        start(tmp_path, Megatron(mesh.get_group("dp")), tier="host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(tmp_path, mesh, tier="device").close()


def test_a_plan_is_of_no_mesh(tmp_path: Path) -> None:
    """Nor is offload()."""
    model = meshes.make_model()
    partitioned = partitioned_config(tmp_path, tier="host", input_bytes=16384)
    whole = {key: value for key, value in partitioned.items() if key != "activation_checkpointing"}
    plans = [
        ModelPlanner(model).plan(load_config(config, world_size=2), available={TierName.HOST: 1 << 30})
        for config in (partitioned, whole)
    ]
    assert plans[0].plan.inputs == plans[1].plan.inputs
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"partition_activations = true has no effect: .*and here is none"):
        offloadzero.offload(model, optimizer, partitioned)[1].close()
