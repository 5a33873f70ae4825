"""Checkpoints that DeepSpeed has written with ZeRO's stages 1, 2 or 3, of any number of ranks.

[Note: DeepSpeed's files]
A checkpoint is a directory. `mp_rank_00_model_states.pt` has the model's weights as they trained, buffers, counters,
and `param_shapes`: for each parameter group the trained parameters with their shapes, in the order in which their
elements lie one after another in the flat tensors of the optimizer. Under stage 3 each rank has such a file,
`zero_pp_rank_N_mp_rank_00_model_states.pt`, without the weights. `zero_pp_rank_N_mp_rank_00_optim_states.pt` (or
`bf16_zero_...`) of each rank has its parts of the flat tensors: fp32 masters, and the states of the wrapped optimizer.

Stages 1 and 2 (`single_partition_of_fp32_groups`): the parts of all ranks together are a group's flat tensor. Between
parameters and at the end there may be padding (`param_alignment_paddings`).

Stage 3 (`fp32_flat_groups`): each parameter is divided by itself, into parts of ceil(elements / ranks), the last ones
cut; a rank's parts of all parameters lie one after another, through its flat tensors, which divide them by
`sub_group_size`. A frozen parameter's parts are in `frozen_param_fragments`.

The order of the stages' code is that of deepspeed/utils/zero_to_fp32.py, whose result for the masters is the same.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from offloadzero.checkpoint.convert.stored_model import StoredModel
from offloadzero.checkpoint.format.file_tensor import FileExtent, FileTensor
from offloadzero.checkpoint.format.json_file import encode_plain, plain_scalar
from offloadzero.checkpoint.format.meta import LossScaleState, Meta
from offloadzero.checkpoint.format.torch_file import Foreign, TorchFile
from offloadzero.checkpoint.verify import OpenDirectory
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.update.spec import AnySpec
from offloadzero.update.specs import SPECS

_MODEL_STATES = "_model_states.pt"
_FILE = re.compile(
    r"(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_00_(?P<kind>model|optim)_states\.pt", re.ASCII
)
_MASTER = "fp32"
# What a file of model states has beside the client_state, which DeepSpeed puts among it.
_OWN_KEYS = frozenset(
    (
        *(
            "module",
            "buffer_names",
            "param_shapes",
            "shared_params",
            "frozen_param_shapes",
            "frozen_param_fragments",
        ),
        *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    )
)


def is_deepspeed(path: Path) -> bool:
    """Whether a directory has a file of DeepSpeed's model states."""
    try:
        return any(name.endswith(_MODEL_STATES) for name in os.listdir(path))
    except OSError:
        return False


def read_deepspeed(path: Path) -> StoredModel:
    """Return the weights, masters, states and counters of a checkpoint. CheckpointError for one that is not whole.

    Every file is checked against its archive's checksums, and each of its parts must be as long as the shapes say.
    """
    models, optimizers = _files(path)
    try:
        return _read(path, models, optimizers)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} is not laid out as DeepSpeed does: {type(error).__name__}: {error}"
        ) from error


def _files(path: Path) -> tuple[list[TorchFile], list[TorchFile]]:
    """Return the files of model states and of optimizer states, by rank."""
    ranks: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for name in sorted(os.listdir(path)):
        match = _FILE.fullmatch(name)
        if match is not None:
            files, rank = ranks[match["kind"]], int(match["rank"] or 0)
            if rank in files:
                raise CheckpointError(f"{path} has the files of two saves: {files[rank].name} and {name}")
            files[rank] = path / name
        elif name.endswith("_states.pt"):
            raise CheckpointError(
                f"{path / name} is of a model in parts (tensor, pipeline or expert parallel): those are not converted"
            )
    if not ranks["optim"]:
        raise CheckpointError(
            f"{path} has no *_optim_states.pt: it was saved without ZeRO, and torch.load() reads the weights in it"
        )
    if (path / "offloaded_tensors").exists():
        raise CheckpointError(
            f"{path / 'offloaded_tensors'}: states that DeepSpeed had on NVMe are not converted"
        )
    for files in ranks.values():
        if sorted(files) != list(range(len(files))):
            raise CheckpointError(f"{path} has the states of ranks {sorted(files)} alone")
    models, optimizers = ([TorchFile(files[rank]) for rank in sorted(files)] for files in ranks.values())
    return models, optimizers


# --- the flat tensors of each rank ---


@dataclass(frozen=True)
class _Flat:
    """A flat tensor in a file."""

    extent: FileExtent
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return self.extent.num_bytes // self.dtype.itemsize


@dataclass(frozen=True)
class _Rank:
    """What one rank's optimizer has, group by group (under stage 3: sub-group by sub-group)."""

    flats: Mapping[str, Sequence[_Flat]]  # by "fp32" and the names of the states
    steps: Sequence[int | None]


def _rank(file: TorchFile, key: str, base: Any) -> _Rank:
    """Read the masters under `key`, and the states of the wrapped optimizer, `base`."""
    saved = file.values["optimizer_state_dict"]
    masters = [_flat(file, tensor, f"{key}[{i}]") for i, tensor in enumerate(saved[key])]
    # A list where DeepSpeed's "elastic_checkpoint" was set.
    by_group = dict(enumerate(base)) if isinstance(base, list) else base["state"]
    states = [by_group.get(group, {}) for group in range(len(masters))]
    kinds = [
        {name for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 1}
        for state in states
    ]
    flats = {
        kind: [_flat(file, state[kind], f"{kind}[{i}]") for i, state in enumerate(states)]
        for kind in sorted(set.intersection(*kinds) if kinds else set())
    }
    steps = [state.get("step", saved.get("base_optimizer_state_step")) for state in states]
    return _Rank({_MASTER: masters, **flats}, [None if step is None else int(step) for step in steps])


def _flat(file: TorchFile, tensor: torch.Tensor, name: str) -> _Flat:
    return _Flat(file.extent(tensor, name), tensor.dtype)


def _cut(flats: Sequence[_Flat], start: int, num_elements: int) -> Iterator[FileExtent]:
    """Yield where elements [start, start + num_elements) of flat tensors that lie one after another are."""
    begin, stop = 0, start + num_elements
    for flat in flats:
        first, last = max(start, begin), min(stop, begin + flat.num_elements)
        if first < last:
            size = flat.dtype.itemsize
            yield FileExtent(
                flat.extent.file, flat.extent.offset + (first - begin) * size, (last - first) * size
            )
        begin += flat.num_elements


@dataclass(frozen=True)
class _Place:
    """Where a parameter's elements lie: in ranges of flat tensors that are taken one after another."""

    name: str
    shape: torch.Size
    group: int  # whose step count it has
    # The flat tensors by (rank, group), the first element in them, and how many.
    ranges: Sequence[tuple[Sequence[tuple[int, int]], int, int]]

    def tensor(self, ranks: Sequence[_Rank], kind: str, name: str) -> FileTensor:
        extents: list[FileExtent] = []
        for flats, start, num_elements in self.ranges:
            extents += _cut([ranks[rank].flats[kind][group] for rank, group in flats], start, num_elements)
        dtype = ranks[0].flats[kind][self.group].dtype
        found = sum(extent.num_bytes for extent in extents) // dtype.itemsize
        if found != self.shape.numel():
            raise CheckpointError(
                f"{extents[0].file if extents else name}: {name} has {found} elements of {self.shape.numel()}"
            )
        return FileTensor(name, dtype, self.shape, tuple(extents))


def _places_in_groups(
    path: Path, shapes: Sequence[Mapping[str, torch.Size]], paddings: Any, ranks: Sequence[_Rank]
) -> Iterator[_Place]:
    """Yield the places under stages 1 and 2. CheckpointError where groups are longer than their parameters."""
    if any(len(rank.flats[_MASTER]) != len(shapes) for rank in ranks):
        raise CheckpointError(f"{path}: the parameters are of {len(shapes)} groups, and the states of others")
    for group, of_group in enumerate(shapes):
        start = 0
        flats = [(rank, group) for rank in range(len(ranks))]
        for index, (name, shape) in enumerate(of_group.items()):
            yield _Place(name, shape, group, [(flats, start, shape.numel())])
            start += shape.numel() + (paddings[group][index] if paddings else 0)
        total = sum(rank.flats[_MASTER][group].num_elements for rank in ranks)
        # The end is padded to a multiple of twice the ranks, or is not, or is in part.
        align = 2 * len(ranks)
        if -(-start // align) != -(-total // align):
            raise CheckpointError(f"{path}: group {group} has {total} elements, and its parameters {start}")


def _places_in_ranks(
    path: Path, shapes: Sequence[Mapping[str, torch.Size]], ranks: Sequence[_Rank]
) -> Iterator[_Place]:
    """Yield the places under stage 3. CheckpointError where ranks have other lengths than their parameters' parts."""
    ends = list(accumulate(flat.num_elements for flat in ranks[0].flats[_MASTER]))
    start = 0
    for name, shape in ((name, shape) for of_group in shapes for name, shape in of_group.items()):
        num_elements = shape.numel()
        part = math.ceil(num_elements / len(ranks))
        parts = [max(0, min(part, num_elements - rank * part)) for rank in range(len(ranks))]
        ranges = [
            ([(rank, group) for group in range(len(ends))], start, parts[rank]) for rank in range(len(ranks))
        ]
        yield _Place(name, shape, next((i for i, end in enumerate(ends) if start < end), 0), ranges)
        start += part
    for rank, of_rank in enumerate(ranks):
        total = sum(flat.num_elements for flat in of_rank.flats[_MASTER])
        if total != start:
            raise CheckpointError(
                f"{path}: rank {rank} has {total} elements, and its parts of the parameters {start}"
            )


# --- the whole ---


def _read(path: Path, models: Sequence[TorchFile], optimizers: Sequence[TorchFile]) -> StoredModel:
    values = models[0].values
    saved = [file.values["optimizer_state_dict"] for file in optimizers]
    in_parts = "fp32_flat_groups" in saved[0]
    key, base = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if in_parts
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    ranks = [_rank(file, key, file.values["optimizer_state_dict"][base]) for file in optimizers]
    _expect_all_ranks(path, saved[0]["partition_count"], len(ranks), len(models) if in_parts else None)
    shapes = values["param_shapes"]
    paddings = saved[0].get("param_alignment_paddings")
    places = list(
        _places_in_ranks(path, shapes, ranks)
        if in_parts
        else _places_in_groups(path, shapes, paddings, ranks)
    )
    trained = {place.name: place.tensor(ranks, _MASTER, place.name) for place in places}
    spec, left_out = _spec(ranks, values["ds_config"])
    meta, also_left_out = _meta(values, saved[0], base, spec, len(shapes))
    steps: dict[str, int] = {}
    states: dict[str, Sequence[FileTensor]] = {}
    for place in places:
        if spec is None:
            break
        step = ranks[0].steps[place.group]
        steps[place.name] = meta.global_steps - meta.skipped_steps if step is None else step
        states[place.name] = [place.tensor(ranks, kind, f"{place.name}.{kind}") for kind in spec.states]
    frozen = _frozen_parts(models) if in_parts else _frozen_whole(models[0], trained)
    stage = "3" if in_parts else "1 or 2"
    return StoredModel(
        description=f"a checkpoint of DeepSpeed's ZeRO stage {stage} at step {meta.global_steps}, ranks: {len(ranks)}",
        directory=OpenDirectory(path),
        tag=path.name,
        meta=replace(meta, steps=steps),
        weights={**trained, **frozen},
        states=states,
        buffers=_buffers(models[0]),
        left_out=[*left_out, *also_left_out],
    )


def _expect_all_ranks(path: Path, partition_count: Any, num_ranks: int, num_models: int | None) -> None:
    expected = max(partition_count) if isinstance(partition_count, list) else partition_count
    if expected != num_ranks or num_models not in (None, expected):
        raise CheckpointError(
            f"{path} was saved by {expected} ranks, and the states of {min(num_ranks, num_models or num_ranks)} are "
            "there, or those of another save as well"
        )


def _spec(ranks: Sequence[_Rank], config: Mapping[str, Any]) -> tuple[AnySpec | None, list[str]]:
    """Return the optimizer whose states each rank has, and the names of the others; None: none here has them.

    Its type in the configuration decides, if that has one: DeepSpeed's Lion keeps Adam's second moments, unused.
    """
    kinds = set.intersection(*(set(rank.flats) for rank in ranks)) - {_MASTER}
    kind = (config.get("optimizer") or {}).get("type")
    found = [spec for spec in SPECS if kind in spec.types and kinds >= set(spec.states)]
    found += [spec for spec in SPECS if kinds == set(spec.states)]
    return (found[0], sorted(kinds - set(found[0].states))) if found else (None, sorted(kinds))


def _meta(
    values: Mapping[str, Any], saved: Mapping[str, Any], base: str, spec: AnySpec | None, num_groups: int
) -> tuple[Meta, list[str]]:
    """Return counters, groups, schedule and client state; and the names of what cannot be kept without pickle."""
    groups = saved[base]["param_groups"] if isinstance(saved[base], dict) else [{}] * num_groups
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "step") and _is_plain(value)}
        for group in groups
    ]
    client = {key: value for key, value in values.items() if key not in _OWN_KEYS}
    unkept = [f"client_state[{key!r}]" for key, value in client.items() if not _is_plain(value)]
    if isinstance(saved[base], list):
        unkept.append("param_groups, which an elastic_checkpoint is without")
    schedule = values["lr_scheduler"]
    if not _is_plain(schedule):
        unkept.append("lr_scheduler")
    meta = Meta(
        global_steps=int(values["global_steps"]),
        micro_steps=0,  # as after DeepSpeed's own load
        skipped_steps=int(values["skipped_steps"]),
        param_groups=groups,
        client_state={key: plain_scalar(value) for key, value in client.items() if _is_plain(value)},
        loss_scale=_loss_scale(saved.get("loss_scaler")),
        lr_scheduler=schedule if _is_plain(schedule) else None,
        optimizer="Adam" if spec is None else spec.name,
    )
    return meta, unkept


def _is_plain(value: Any) -> bool:
    try:
        encode_plain(plain_scalar(value), "")
    except ConfigError:
        return False
    return True


def _loss_scale(scaler: Any) -> LossScaleState | None:
    """Return the state of a DynamicLossScaler: deepspeed/runtime/fp16/loss_scaler.py."""
    if not isinstance(scaler, Foreign) or not hasattr(scaler, "cur_iter"):
        return None
    state: Any = vars(scaler)
    good_steps = int(state["cur_iter"]) - int(state["last_overflow_iter"]) - 1
    return LossScaleState(float(state["cur_scale"]), good_steps, int(state["cur_hysteresis"]))


def _whole(file: TorchFile, name: str, tensor: torch.Tensor) -> FileTensor:
    return FileTensor(name, tensor.dtype, tensor.shape, (file.extent(tensor, name),))


def _buffers(file: TorchFile) -> dict[str, FileTensor]:
    module = file.values["module"]
    return {name: _whole(file, name, module[name]) for name in file.values["buffer_names"] if name in module}


def _frozen_whole(file: TorchFile, trained: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return the weights that are no trained ones, no other names of these, and no buffers."""
    others = {*trained, *file.values["buffer_names"], *dict(file.values["shared_params"])}
    return {
        name: _whole(file, name, tensor)
        for name, tensor in file.values["module"].items()
        if name not in others
    }


def _frozen_parts(files: Sequence[TorchFile]) -> dict[str, FileTensor]:
    """Return the frozen weights, of which each rank has a part; the last ones are padded."""
    frozen = {}
    for name, shape in (files[0].values["frozen_param_shapes"] or {}).items():
        parts = [(file, file.values["frozen_param_fragments"][name]) for file in files]
        flats = [_flat(file, tensor, name) for file, tensor in parts]
        extents = tuple(_cut(flats, 0, shape.numel()))
        if sum(extent.num_bytes for extent in extents) != shape.numel() * flats[0].dtype.itemsize:
            raise CheckpointError(f"{files[0].path}: {name} is cut short")
        frozen[name] = FileTensor(name, flats[0].dtype, shape, extents)
    return frozen
