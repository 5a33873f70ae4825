"""The loading of a checkpoint: all of it is compared with the model before the first value is written."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from offloadzero.checkpoint.commits import StoredCommit
from offloadzero.checkpoint.format.json_file import plain_scalar
from offloadzero.checkpoint.format.meta import LossScaleState, Meta
from offloadzero.checkpoint.format.safetensors_file import SafetensorsReader
from offloadzero.checkpoint.module_states import (
    can_hold,
    described_tensors,
    expect_dense,
    may_overlap,
    persistent_buffers,
    settable,
    try_extra_state,
    whole_value,
    write_buffer,
)
from offloadzero.checkpoint.states import States, expect_same_parameters
from offloadzero.checkpoint.stored_states import state_names, write_states
from offloadzero.checkpoint.verify import Checkpoint, StoredTensor
from offloadzero.core.fail_points import through
from offloadzero.core.interrupts import is_interrupt
from offloadzero.errors import CheckpointError
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

log = logging.getLogger("offloadzero.checkpoint")

_SKIP_SCHEDULE = "pass load_lr_scheduler_states=False to leave the schedule out"
WEIGHTS_ALONE = ". It has weights alone: pass load_module_only=True to begin with them"


@dataclass(frozen=True)
class LoadPlan:
    """The values that a load writes, with their places; all of them fit."""

    states: States
    checkpoint: Checkpoint
    slots: Sequence[tuple[Record, ParamSlot]]
    with_states: frozenset[str]  # names of parameters whose states are loaded
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    extra_states: Mapping[str, tuple[nn.Module, Any]] = field(default_factory=dict)  # the values by module

    @torch.no_grad()
    def apply(self) -> None:
        """Write the values to their homes, one parameter in memory at a time."""
        for record, slot in self.slots:
            value = _read(self.checkpoint, slot.name, self.checkpoint.weights[slot.name])
            through("checkpoint.load", self.states.weights.write, slot.name)(record, slot, value)
            if slot.name in self.with_states:
                self._write_states(record, slot)
                self.states.weights.homes.write_step(record, slot, self.checkpoint.meta.steps[slot.name])
        for name, buffer in self.buffers.items():
            write_buffer(buffer, _read(self.checkpoint, name, self.checkpoint.buffers[name]))
        for module, value in self.extra_states.values():
            module.set_extra_state(value)

    def _write_states(self, record: Record, slot: ParamSlot) -> None:
        stored = self.checkpoint.states[slot.name]
        values = {name: _read(self.checkpoint, f"{slot.name}.{name}", of) for name, of in stored.items()}
        write_states(self.states.weights, record, slot, values)


def _read(checkpoint: Checkpoint, name: str, stored: StoredTensor) -> torch.Tensor:
    try:
        with SafetensorsReader(stored.file) as reader:
            return reader.read(name)
    finally:
        checkpoint.directory.expect_same()


def plan_load(states: States, checkpoint: Checkpoint, *, strict: bool, with_states: bool) -> LoadPlan:
    """Compare the checkpoint with the model. CheckpointError names missing, foreign, or misshapen entries.

    Not `strict`: entries that both have are loaded, and must fit. Frozen parameters without which the checkpoint was
    saved are not missing.
    """
    expect_same_parameters(states)
    slots = [(record, slot) for record in states.records for slot in record.slots]
    buffers = persistent_buffers(states.model)
    checkpoint = _with_own_buffers(checkpoint, buffers)
    modules = settable(states.model)
    if with_states:
        _expect_optimizer(checkpoint, states)
    missing, foreign = _differences(checkpoint, slots, buffers, with_states=with_states)
    missing += sorted(modules.keys() - checkpoint.meta.extra_states.keys())
    foreign += sorted(checkpoint.meta.extra_states.keys() - modules.keys())
    frozen = {slot.name for _, slot in slots if not slot.trainable}
    excluded = frozen.intersection(missing, checkpoint.meta.excluded)
    missing = [name for name in missing if name not in excluded]
    if strict and (missing or foreign):
        raise CheckpointError(
            f"{checkpoint.path} does not fit the model: missing {', '.join(missing[:5]) or 'nothing'}; "
            f"not in the model: {', '.join(foreign[:5]) or 'nothing'} ({len(missing)} and {len(foreign)} in all)"
            + ("" if checkpoint.meta.steps or not with_states else WEIGHTS_ALONE)
        )
    if missing:
        log.warning("%s: missing %s; they stay as they are", checkpoint.path, ", ".join(missing[:5]))
    if excluded:
        log.info(
            "%s: saved without %d frozen parameters, which stay as they are", checkpoint.path, len(excluded)
        )
    taken = [(record, slot) for record, slot in slots if slot.name in checkpoint.weights]
    continued = frozenset(
        slot.name
        for record, slot in taken
        if with_states and slot.trainable and _has_states(checkpoint, record, slot)
    )
    for record, slot in taken:
        _check_tensor(slot.name, checkpoint.weights[slot.name], slot.shape, record.dtype)
    shared = {name: buffer for name, buffer in buffers.items() if name in checkpoint.buffers}
    expect_dense(shared)
    for name, buffer in shared.items():
        _check_tensor(name, checkpoint.buffers[name], buffer.shape, buffer.dtype)
        if may_overlap(buffer):
            _check_overlapping(name, buffer, checkpoint)
    extra = {key: (modules[key], value) for key, value in _extra_states(checkpoint) if key in modules}
    for key, (module, value) in extra.items():
        try_extra_state(key, module, value)
    return LoadPlan(states, checkpoint, taken, continued, shared, extra)


def _with_own_buffers(checkpoint: Checkpoint, buffers: Collection[str]) -> Checkpoint:
    """Tell the model's buffers from weights: a folder of weights, of which a checkpoint was made, does not."""
    found = {name: stored for name, stored in checkpoint.weights.items() if name in buffers}
    weights = {name: stored for name, stored in checkpoint.weights.items() if name not in found}
    return replace(checkpoint, weights=weights, buffers={**checkpoint.buffers, **found})


def _extra_states(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, (key, place) in described_tensors(checkpoint.meta.extra_states).items():
        tensors[key][place] = _read(checkpoint, name, checkpoint.extra_tensors[name])
    for key, entry in checkpoint.meta.extra_states.items():
        yield key, whole_value(entry, tensors[key])


def _differences(
    checkpoint: Checkpoint,
    slots: Sequence[tuple[Record, ParamSlot]],
    buffers: Mapping[str, torch.Tensor],
    *,
    with_states: bool,
) -> tuple[list[str], list[str]]:
    """Return the names that only the model has, and those that only the checkpoint has.

    A parameter that was trained may be frozen here: its moments are left alone.
    """
    known = {slot.name for _, slot in slots}
    trainable = [(record, slot) for record, slot in slots if slot.trainable]
    missing = [*(known - set(checkpoint.weights)), *(set(buffers) - set(checkpoint.buffers))]
    foreign = [*(set(checkpoint.weights) - known), *(set(checkpoint.buffers) - set(buffers))]
    if with_states:
        lacking = [(r, slot) for r, slot in trainable if not _has_states(checkpoint, r, slot)]
        missing += [f"{slot.name}.{record.spec.states[0]}" for record, slot in lacking]
    return sorted(missing), sorted(foreign)


def _has_states(checkpoint: Checkpoint, record: Record, slot: ParamSlot) -> bool:
    """Whether a parameter's states are stored, and are those of the member of the optimizer that it has here."""
    return not state_names(record.spec).isdisjoint(checkpoint.states.get(slot.name, ()))


def _check_tensor(name: str, stored: StoredTensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if stored.entry.shape != shape:
        found = tuple(stored.entry.shape)
        raise CheckpointError(
            f"{stored.file}: {name} has the shape {found} here and {tuple(shape)} in the model"
        )
    if stored.entry.dtype != dtype and not (stored.entry.dtype.is_floating_point and dtype.is_floating_point):
        raise CheckpointError(f"{stored.file}: {name} is {stored.entry.dtype} here and {dtype} in the model")


def _check_overlapping(name: str, buffer: torch.Tensor, checkpoint: Checkpoint) -> None:
    stored = checkpoint.buffers[name]
    if not can_hold(buffer, _read(checkpoint, name, stored)):
        raise CheckpointError(
            f"{stored.file}: {name} has different values in elements that are one in the model's memory (an expanded "
            "or overlapping view): register it as .contiguous()"
        )


def _expect_optimizer(checkpoint: Checkpoint, states: States) -> None:
    """Refuse the states of another optimizer."""
    own = states.optimizer
    if checkpoint.meta.steps and checkpoint.spec.name != own:
        raise CheckpointError(
            f"{checkpoint.path}: saved with {checkpoint.spec.name}, the engine has {own}: pass "
            "load_optimizer_states=False to take the weights alone"
        )


# --- values that are no tensors ---


Described = Checkpoint | StoredCommit  # either has a path and its values


def fit_param_groups(present: Sequence[Mapping[str, Any]], checkpoint: Described) -> list[dict[str, Any]]:
    """Return the saved options of each group, with the present types. CheckpointError unless they fit."""
    saved = checkpoint.meta.param_groups
    if len(saved) != len(present):
        raise CheckpointError(
            f"{checkpoint.path}: {len(saved)} param groups were saved, the optimizer has {len(present)}"
        )
    fitted = []
    for index, (own, group) in enumerate(zip(present, saved, strict=True)):
        for key, value in group.items():
            if key == "params" or (key in own and not _same_kind(own[key], value)):
                raise CheckpointError(
                    f"{checkpoint.path}: param_groups[{index}].{key} does not fit the optimizer's"
                )
        tuples = {key: tuple(group[key]) for key in group if isinstance(own.get(key), tuple)}
        # As in torch, a tensor of its own: groups may share the present one.
        tensors = {
            key: torch.full_like(own[key], group[key])
            for key in group
            if isinstance(own.get(key), torch.Tensor) and isinstance(group[key], int | float)
        }
        fitted.append({**group, **tuples, **tensors})
    return fitted


def _same_kind(present: Any, saved: Any) -> bool:
    """Whether `saved` can replace `present`."""
    present = plain_scalar(present)
    if present is None:
        return True
    if isinstance(present, bool):
        return saved is None or isinstance(saved, bool)
    if isinstance(present, dict):
        kinds = {type(key) for key in present}
        return isinstance(saved, dict) and (not kinds or {type(key) for key in saved} <= kinds)
    if isinstance(present, int | float):
        is_number = isinstance(saved, int | float) and not isinstance(saved, bool)
        return is_number and (isinstance(saved, float) or abs(saved) < 2**63)
    for kind in (str, list | tuple):
        if isinstance(present, kind):
            return isinstance(saved, kind)
    return True


def try_schedule(scheduler: Any, checkpoint: Described, *, skip: str = _SKIP_SCHEDULE) -> None:
    """Raise CheckpointError unless the learning-rate schedule takes its saved state. It is not changed.

    `skip`: what to do where only one of the two has a schedule.
    """
    meta = checkpoint.meta
    _check_schedule(scheduler, meta, checkpoint, skip)
    if meta.lr_scheduler is None:
        return
    before = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(copy.deepcopy(meta.lr_scheduler))
    except Exception as error:
        if is_interrupt(error):
            raise
        raise CheckpointError(
            f"{checkpoint.path}: {type(scheduler).__name__} refuses lr_scheduler: {type(error).__name__}: {error}"
        ) from error
    finally:
        scheduler.load_state_dict(before)


def _check_schedule(scheduler: Any, meta: Meta, checkpoint: Described, skip: str) -> None:
    own = schedule_name(scheduler)
    if meta.lr_scheduler is None:
        if own is not None:
            raise CheckpointError(
                f"{checkpoint.path}: saved without a schedule; {own} would begin anew: {skip}, if that is meant"
            )
        return
    saved = meta.lr_scheduler_type or "a schedule"
    if own is None:
        raise CheckpointError(f"{checkpoint.path}: saved with {saved}, the engine has no schedule: {skip}")
    if meta.lr_scheduler_type not in (None, own):
        raise CheckpointError(f"{checkpoint.path}: saved with {saved}, the engine has {own}: {skip}")
    for key, value in scheduler.state_dict().items():
        if key in meta.lr_scheduler and not _same_kind(value, meta.lr_scheduler[key]):
            raise CheckpointError(f"{checkpoint.path}: lr_scheduler.{key} does not fit {own}")


def schedule_name(scheduler: Any) -> str | None:
    """Return the name of a schedule with a state; None for one without, and for None."""
    return type(scheduler).__qualname__ if callable(getattr(scheduler, "state_dict", None)) else None


def loss_scale_state(values: Mapping[str, float]) -> LossScaleState:
    """Return the state of dynamic loss scaling, for the checkpoint."""
    return LossScaleState(float(values["scale"]), int(values["good_steps"]), int(values["hysteresis_left"]))
