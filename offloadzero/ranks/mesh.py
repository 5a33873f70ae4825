"""Meshes of ranks: one axis is data-parallel, and along the others the model is divided.

[Note: the axes of a mesh]
ZeRO divides what the ranks of one data-parallel group have in common, so all collectives over gradients and weights
stay in that group. The other axes divide the model itself (tensor parallelism, pipelines), and the model's own code
communicates there. Three things are decided over all of them: the global norm, whether all gradients are finite, and
with that the loss scale. The norm needs to know which parameters are the same on several ranks. Along a pipeline none
are. Along the tensor-parallel axis those are that the model does not mark as divided, and they count on its first
rank alone.

[Note: numbers of parts]
A checkpoint has a directory for each part of the model, by its number. So the number must say the same part in each
run, whichever ranks train it there: the stages of the pipeline come one after the other, and in each of them the places
along the tensor-parallel axis.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offloadzero.config.schema import MeshConfig
from offloadzero.errors import ConfigError

_DATA = ("dp", "data_parallel")  # names of the axis of a DeviceMesh
_TENSOR = ("tp", "tensor_parallel")
_PIPELINE = ("pp", "pipeline_parallel")

# Megatron's names for one thing, the newest first, and DeepSpeed's.
_TENSOR_RANK = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
_TENSOR_SIZE = (
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_model_parallel_world_size",
)
_PIPELINE_RANK = ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank")

# Megatron's names of axes along which gradients must be added up in other groups than those of the data.
_OTHER_SIZES = (
    "get_context_parallel_world_size",
    "get_expert_model_parallel_world_size",
    "get_sequence_parallel_world_size",
)

_ALLOWED = (
    "a DeviceMesh with the axes dp and tp or pp, or an object with Megatron's get_data_parallel_group() and "
    "get_tensor_model_parallel_rank(), and with get_pipeline_model_parallel_rank() where there are stages"
)


def find_mesh(mpu: Any) -> MeshConfig | None:
    """Return this rank's place as a DeviceMesh or Megatron's `mpu` says it; None where all ranks are data-parallel.

    Raises:
        ConfigError: `mpu` does not say it, or has axes that are not built.
    """
    if mpu is None:
        return None
    if not dist.is_initialized():
        raise ConfigError(
            "mpu", type(mpu).__name__, "None: there is no process group (torchrun starts the ranks)"
        )
    group, place = _of_mesh(mpu) if isinstance(mpu, DeviceMesh) else _of_mpu(mpu)
    # torch sorts the ranks of each group it makes.
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if dist.get_rank() not in ranks:
        raise ConfigError(
            "mpu", type(mpu).__name__, f"a data-parallel group with this rank in it: it has {ranks}"
        )
    if len(ranks) == dist.get_world_size():
        return None
    if isinstance(mpu, DeviceMesh):
        _expect_ascending(mpu, ranks)
    return MeshConfig(ranks, *place, source=mpu)


class _Place(NamedTuple):
    """A rank's place along the axes that divide the model."""

    tensor_rank: int
    pipeline_rank: int
    tensor_size: int | None


def _of_mesh(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, _Place]:
    """The data-parallel group of a DeviceMesh, and this rank's places along the axes of tensors and of the pipeline."""
    names = mesh.mesh_dim_names or ()
    known = (*_DATA, *_TENSOR, *_PIPELINE)
    if any(name not in known for name in names) or sum(name in _DATA for name in names) != 1:
        raise ConfigError(
            "mpu", f"DeviceMesh with the axes {names}", f"one axis dp, and any of tp and pp: {known}"
        )
    tensor_rank, pipeline_rank = (
        next((mesh.get_local_rank(name) for name in names if name in axis), 0)
        for axis in (_TENSOR, _PIPELINE)
    )
    (data,) = (name for name in names if name in _DATA)
    tensor_size = next((mesh.size(dim) for dim, name in enumerate(names) if name in _TENSOR), 1)
    return mesh.get_group(data), _Place(tensor_rank, pipeline_rank, tensor_size)


def _expect_ascending(mesh: DeviceMesh, ranks: Sequence[int]) -> None:
    """Refuse a mesh in which this rank's place along dp is not that in its group: others beside it had other data."""
    places = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False))
    if [place for name, place in places.items() if name in _DATA] != [ranks.index(dist.get_rank())]:
        said = f"DeviceMesh with the ranks {mesh.mesh.tolist()}"
        raise ConfigError("mpu", said, "ranks that ascend along dp, as in those of init_device_mesh()")


def _of_mpu(mpu: Any) -> tuple[dist.ProcessGroup, _Place]:
    """The same of an object with Megatron's methods."""
    data_group = _method(mpu, "get_data_parallel_group")
    tensor_rank, tensor_size, pipeline_rank = (
        next(filter(None, (_method(mpu, name) for name in names)), None)
        for names in (_TENSOR_RANK, _TENSOR_SIZE, _PIPELINE_RANK)
    )
    if data_group is None or tensor_rank is None:
        raise ConfigError("mpu", type(mpu).__name__, _ALLOWED)
    for name in _OTHER_SIZES:
        size = _method(mpu, name)
        if size is not None and size() > 1:
            allowed = "1: beside the data's axis those of tensors and pipelines are built"
            raise ConfigError(f"mpu.{name}()", size(), allowed)
    return data_group(), _Place(
        int(tensor_rank()),
        0 if pipeline_rank is None else int(pipeline_rank()),
        None if tensor_size is None else int(tensor_size()),
    )


def _method(mpu: Any, name: str) -> Callable[[], Any] | None:
    method = getattr(mpu, name, None)
    return method if callable(method) else None


def is_divided_by_tensor_parallelism(param: nn.Parameter) -> bool:
    """Whether ranks along the tensor-parallel axis have different parts of a parameter.

    The attributes are Megatron's, the new one and the old one.
    """
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


def expect_whole_gradient(name: str, param: nn.Parameter) -> None:
    """Raise ConfigError for a parameter that each tensor-parallel rank uses with its part of the sequence.

    Megatron marks them, and adds up their gradients along that axis when backward is over. The engine has sent them on
    by then, each rank another one, and the ranks would drift apart.
    """
    if getattr(param, "sequence_parallel", False):
        allowed = (
            "False: its gradients are parts of a sum over the tensor-parallel ranks. Add them up in a hook, "
            "param.register_hook(...) before initialize(), and take the mark away"
        )
        raise ConfigError(f"{name}.sequence_parallel", True, allowed)


@dataclass(frozen=True)
class MeshGroups:
    """All groups of a mesh. Each rank makes all of them, in one order."""

    data: list[list[int]]  # by the part of the model that the group trains: [Note: numbers of parts]
    across: list[list[int]]  # by place in the data: ranks that have the whole model together
    # Those of them that have one stage together: they differ along the tensor-parallel axis.
    tensor: list[list[int]]

    def part_of(self, rank: int) -> int:
        """The number of the part of the model that a rank trains."""
        return next(part for part, ranks in enumerate(self.data) if rank in ranks)


def numbers_of(mesh: MeshConfig) -> list[int]:
    """The numbers by which a rank tells its place to the others, for `mesh_groups`."""
    return [
        mesh.pipeline_rank,
        mesh.tensor_rank,
        mesh.data_ranks[0],
        zlib.crc32(repr(mesh.data_ranks).encode()),
    ]


def mesh_groups(by_rank: Sequence[Sequence[int]]) -> MeshGroups:
    """Put the `numbers_of` all ranks together.

    Raises:
        ConfigError: these are not the groups of a mesh. All ranks see that alike.
    """
    parts: dict[int, list[int]] = {}
    for rank, (_, _, first, _) in enumerate(by_rank):
        parts.setdefault(first, []).append(rank)
    data = sorted(parts.values(), key=lambda ranks: [*by_rank[ranks[0]]])
    places = [tuple(by_rank[ranks[0]][:2]) for ranks in data]
    odd = [
        rank
        for ranks, place in zip(data, places, strict=True)
        for rank in ranks
        if [*by_rank[rank]] != [*place, *numbers_of(MeshConfig(tuple(ranks)))[2:]]
    ]
    if odd or len({len(ranks) for ranks in data}) > 1:
        firsts = {rank: first for rank, (_, _, first, _) in enumerate(by_rank)}
        said = f"data-parallel groups by their first ranks {firsts}" + (
            f", other members or another place on ranks {odd}" if odd else ""
        )
        allowed = "groups of one size, whose members name the same ranks and the same place on the other axes"
        raise ConfigError("mpu", said, allowed)
    _expect_places_of_their_own(data, places)
    stages: dict[int, list[list[int]]] = {}
    for ranks, (pipeline_rank, _) in zip(data, places, strict=True):
        stages.setdefault(pipeline_rank, []).append(ranks)
    tensor = [sorted(ranks) for stage in stages.values() for ranks in zip(*stage, strict=True)]
    return MeshGroups(data, [sorted(ranks) for ranks in zip(*data, strict=True)], tensor)


def any_groups(mesh: MeshConfig, rank: int, world_size: int) -> MeshGroups:
    """Return groups of a mesh in which `rank` has its place, and any other ranks have theirs."""
    others = [other for other in range(world_size) if other not in mesh.data_ranks]
    across = [rank, *others[: world_size // len(mesh.data_ranks) - 1]]
    tensor = [rank, *others[: (mesh.tensor_size or 1) - 1]]
    return MeshGroups([[*mesh.data_ranks]], [sorted(across)], [sorted(tensor)])


def _expect_places_of_their_own(data: Sequence[Sequence[int]], places: Sequence[tuple[int, ...]]) -> None:
    """Raise ConfigError where `mpu` has left an axis out: the norm, say, would count some parameters twice."""
    for (one, place), (other, next_place) in itertools.pairwise(zip(data, places, strict=True)):
        if place == next_place:
            pipeline_rank, tensor_rank = place
            said = f"pipeline rank {pipeline_rank} and tensor-parallel rank {tensor_rank} on ranks {one} and {other}"
            allowed = (
                "another place for each part of the model: a DeviceMesh with all of its axes dp, tp and pp, or an "
                "object with Megatron's get_tensor_model_parallel_rank() and get_pipeline_model_parallel_rank()"
            )
            raise ConfigError("mpu", said, allowed)
