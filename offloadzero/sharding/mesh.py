"""Meshes of ranks: one axis is data-parallel, and along the others the model is divided.

[Note: the axes of a mesh]
ZeRO divides what the ranks of one data-parallel group have in common, so all collectives over gradients and weights
stay in that group. The other axes divide the model itself (tensor parallelism, pipelines), and the model's own code
communicates there. Three things are decided over all of them: the global norm, whether all gradients are finite, and
with that the loss scale. The norm needs to know which parameters are the same on several ranks. Along a pipeline none
are. Along the tensor-parallel axis those are that the model does not mark as divided, and they count on its first
rank alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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

# Megatron's names of axes along which gradients must be added up in other groups than those of the data.
_OTHER_SIZES = (
    "get_context_parallel_world_size",
    "get_expert_model_parallel_world_size",
    "get_sequence_parallel_world_size",
)

_ALLOWED = (
    "a DeviceMesh with the axes dp and tp or pp, or an object with Megatron's get_data_parallel_group() and "
    "get_tensor_model_parallel_rank()"
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
    group, tensor_rank = _of_mesh(mpu) if isinstance(mpu, DeviceMesh) else _of_mpu(mpu)
    # torch sorts the ranks of each group it makes.
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if dist.get_rank() not in ranks:
        raise ConfigError(
            "mpu", type(mpu).__name__, f"a data-parallel group with this rank in it: it has {ranks}"
        )
    if len(ranks) == dist.get_world_size():
        return None
    return MeshConfig(ranks, tensor_rank, source=mpu)


def _of_mesh(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, int]:
    """The data-parallel group of a DeviceMesh, and this rank's place along its tensor-parallel axis."""
    names = mesh.mesh_dim_names or ()
    known = (*_DATA, *_TENSOR, *_PIPELINE)
    if any(name not in known for name in names) or sum(name in _DATA for name in names) != 1:
        raise ConfigError(
            "mpu", f"DeviceMesh with the axes {names}", f"one axis dp, and any of tp and pp: {known}"
        )
    tensor_rank = 0
    for name in names:
        if name in _TENSOR:
            tensor_rank = mesh.get_local_rank(name)
    (data,) = (name for name in names if name in _DATA)
    return mesh.get_group(data), tensor_rank


def _of_mpu(mpu: Any) -> tuple[dist.ProcessGroup, int]:
    """The same of an object with Megatron's methods."""
    data_group = _method(mpu, "get_data_parallel_group")
    tensor_rank = next(filter(None, (_method(mpu, name) for name in _TENSOR_RANK)), None)
    if data_group is None or tensor_rank is None:
        raise ConfigError("mpu", type(mpu).__name__, _ALLOWED)
    for name in _OTHER_SIZES:
        size = _method(mpu, name)
        if size is not None and size() > 1:
            allowed = "1: beside the data's axis those of tensors and pipelines are built"
            raise ConfigError(f"mpu.{name}()", size(), allowed)
    return data_group(), int(tensor_rank())


def _method(mpu: Any, name: str) -> Callable[[], Any] | None:
    method = getattr(mpu, name, None)
    return method if callable(method) else None


def is_divided_by_tensor_parallelism(param: nn.Parameter) -> bool:
    """Whether ranks along the tensor-parallel axis have different parts of a parameter.

    The attributes are Megatron's, the new one and the old one.
    """
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


@dataclass(frozen=True)
class MeshGroups:
    """All groups of a mesh. Each rank makes all of them, in one order."""

    data: list[list[int]]  # by the part of the model that the group trains
    across: list[list[int]]  # by place in the data: ranks that have the whole model together

    def part_of(self, rank: int) -> int:
        """The number of the part of the model that a rank trains."""
        return next(part for part, ranks in enumerate(self.data) if rank in ranks)


def numbers_of(mesh: MeshConfig) -> list[int]:
    """The numbers by which a rank tells its data-parallel group to the others, for `mesh_groups`."""
    return [mesh.data_ranks[0], zlib.crc32(repr(mesh.data_ranks).encode())]


def mesh_groups(by_rank: Sequence[Sequence[int]]) -> MeshGroups:
    """Put the `numbers_of` all ranks together.

    Raises:
        ConfigError: these are not the groups of a mesh. All ranks see that alike.
    """
    parts: dict[int, list[int]] = {}
    for rank, (first, _) in enumerate(by_rank):
        parts.setdefault(first, []).append(rank)
    data = [parts[first] for first in sorted(parts)]
    odd = [
        rank
        for ranks in data
        for rank in ranks
        if list(by_rank[rank]) != numbers_of(MeshConfig(tuple(ranks)))
    ]
    if odd or len({len(ranks) for ranks in data}) > 1:
        firsts = {rank: first for rank, (first, _) in enumerate(by_rank)}
        said = f"data-parallel groups by their first ranks {firsts}" + (
            f", other members on ranks {odd}" if odd else ""
        )
        raise ConfigError("mpu", said, "groups of one size, of which all members name the same ranks")
    return MeshGroups(data, [sorted(ranks) for ranks in zip(*data, strict=True)])
