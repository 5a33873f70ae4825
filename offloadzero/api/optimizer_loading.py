"""Loading an optimizer's state dict: all of it is compared with the optimizer before the first write."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from offloadzero.access.home_access import are_codes_of, expect_codes
from offloadzero.access.weight_access import WeightAccess
from offloadzero.api.optimizer_states import stands_for_another, step_count
from offloadzero.arithmetic.device_math import join_master
from offloadzero.arithmetic.remainders import REMAINDER_DTYPE
from offloadzero.errors import ConfigError
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import AnySpec

_REMAINDER = "master_remainder"  # key of the bits that bf16 lacks of the master weight, in CPUAdam's states

Numbered = Iterable[tuple[int, Record, ParamSlot]]  # the number is the parameter's among those of all groups


@dataclass(frozen=True)
class _SlotLoad:
    """The state of one parameter to be written. Without values it begins anew, as in torch without a state."""

    record: Record
    slot: ParamSlot
    values: Mapping[str, Any]
    step: int

    @property
    def group_index(self) -> int:
        """The index of the parameter's group in the optimizer's param_groups."""
        if self.slot.group_index is None:
            raise AssertionError(f"{self.slot.name} is frozen")
        return self.slot.group_index

    def write(self, weights: WeightAccess, group: Mapping[str, Any]) -> None:
        record, slot, values = self.record, self.slot, self.values
        if not values.keys() - {"master"}:
            weights.states.reset(record, slot, group)
        elif record.codes is not None and "scales" in values and are_codes_of(slot, record.codes, values):
            weights.states.write_codes(record, slot, record.codes, values)
        else:
            for kind in record.spec.states:
                weights.states.write(record, slot, kind, values[kind])
        if "master" in values:
            weights.load_master(record, slot, values["master"])
        elif _REMAINDER in values:
            weights.write(record, slot, join_master(weights.read(record, slot), values[_REMAINDER].cpu()))
        weights.homes.write_step(record, slot, self.step)


@dataclass(frozen=True)
class OptimizerLoad:
    """The states and options that a load writes; all of them fit the optimizer."""

    slots: Sequence[_SlotLoad]
    options: Sequence[Mapping[str, Any]]  # by group

    def apply(self, weights: WeightAccess, groups: Sequence[dict[str, Any]]) -> None:
        """Write the states to their homes and the options into the groups."""
        for load in self.slots:
            load.write(weights, {**groups[load.group_index], **self.options[load.group_index]})
        for group, options in zip(groups, self.options, strict=True):
            group.update(options)


def plan_optimizer_load(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    numbered: Numbered,
    *,
    spec: AnySpec,
    state_layout: str,
    fixed_options: Mapping[str, Any],
) -> OptimizerLoad:
    """Compare a state dict with an optimizer.

    Args:
        groups: the param groups of the optimizer.
        numbered: the trainable parameters of the optimizer.
        spec: the spec of the optimizer.
        state_layout: of its states.
        fixed_options: the options that every group keeps, whatever the dict says.

    Raises:
        ConfigError: names the group or the parameter, and what does not fit.
    """
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise ConfigError("state_dict", sorted(map(str, state_dict)), "the keys state and param_groups")
    options = _options(state_dict["param_groups"], groups, fixed_options=fixed_options)
    then = [{**group, **new} for group, new in zip(groups, options, strict=True)]
    spec.hypers(then, "state_dict", state_layout=state_layout)
    keys = list(chain.from_iterable(saved["params"] for saved in state_dict["param_groups"]))
    states: Mapping[Any, Mapping[str, Any]] = state_dict["state"]
    loads = [
        # torch takes an empty state for none, and some of its states hold None in the place of tensors.
        _planned(record, slot, states.get(keys[number]) or {})
        for number, record, slot in numbered
    ]
    return OptimizerLoad(loads, options)


def _options(
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    *,
    fixed_options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    sizes = [len(group["params"]) for group in saved]
    own_sizes = [len(group["params"]) for group in groups]
    if sizes != own_sizes:
        raise ConfigError("state_dict.param_groups", sizes, f"parameters per group here: {own_sizes}")
    options = [{key: value for key, value in group.items() if key != "params"} for group in saved]
    options = [{**one, **fixed_options} for one in options]
    return copy.deepcopy(options)


def _planned(record: Record, slot: ParamSlot, given: Mapping[str, Any]) -> _SlotLoad:
    # States of another parameter here may be written before they are read: two that have traded places, say.
    values = {key: value.read() if stands_for_another(value, slot) else value for key, value in given.items()}
    if all(value is None for key, value in values.items() if key != "master"):
        master = {key: value for key, value in values.items() if key == "master" and value is not None}
        if master:
            _expect_tensor(record, slot, "master", values)
        return _SlotLoad(record, slot, master, step=0)
    for kind in record.spec.states:
        _expect_tensor(record, slot, kind, values)
    _expect_no_others(record, slot, values)
    if _REMAINDER in values:
        _expect_tensor(record, slot, _REMAINDER, values)
        if (record.dtype, values[_REMAINDER].dtype) != (torch.bfloat16, REMAINDER_DTYPE):
            message = f"{REMAINDER_DTYPE}, of a parameter in bf16; this one is in {record.dtype}"
            raise ConfigError(f"{slot.name}.{_REMAINDER}", values[_REMAINDER].dtype, message)
    if "master" in values:
        _expect_tensor(record, slot, "master", values)
    if record.codes is not None and "scales" in values:
        for name, _, _, shape in record.codes.specs(slot.shape):
            _expect_tensor(record, slot, name, values, shape)
        expect_codes(slot, record.codes, values)
    return _SlotLoad(record, slot, values, _step(record, slot, values))


def _expect_no_others(record: Record, slot: ParamSlot, values: Mapping[str, Any]) -> None:
    """Refuse a state that would be dropped because another optimizer has made it."""
    spec = record.spec
    codes = spec.codes
    known = {"step", "master", _REMAINDER, *spec.state_keys}
    if codes is not None:
        known.update(name for name, *_ in codes.specs(slot.shape))
    for key, value in values.items():
        if key not in known and isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{slot.name}.{key}",
                tuple(value.shape),
                f"a state of {spec.name} has {', '.join(spec.state_keys)}: this is another optimizer's",
            )


def _step(record: Record, slot: ParamSlot, values: Mapping[str, Any]) -> int:
    """Return the number of steps. A state that does not count them has seen one at least."""
    step = _present(record, slot, "step", values) if record.spec.counts_steps else values.get("step", 1)
    return step_count(f"{slot.name}.step", step)


def _present(record: Record, slot: ParamSlot, key: str, values: Mapping[str, Any]) -> Any:
    if values.get(key) is None:
        spec = record.spec
        names = ", ".join(spec.state_keys)
        raise ConfigError(
            f"{slot.name}.{key}", None, f"a state of {spec.name} has {names}; this one {', '.join(values)}"
        )
    return values[key]


def _expect_tensor(
    record: Record, slot: ParamSlot, key: str, values: Mapping[str, Any], shape: torch.Size | None = None
) -> None:
    value = _present(record, slot, key, values)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{slot.name}.{key}", type(value).__name__, "a tensor")
    if value.shape != (slot.shape if shape is None else shape):
        raise ConfigError(f"{slot.name}.{key}", tuple(value.shape), f"shape {tuple(shape or slot.shape)}")
