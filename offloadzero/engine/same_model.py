"""What ranks compare when an engine starts: the same model, configuration and homes on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from offloadzero.checkpoint.module_states import write_buffer
from offloadzero.config import OffloadConfig
from offloadzero.config.schema import ObserveConfig
from offloadzero.errors import ConfigError
from offloadzero.planning.homes import Placement
from offloadzero.ranks.group import Group
from offloadzero.ranks.mesh import expect_whole_gradient
from offloadzero.streaming.building.spill import is_in_parts, spilled_weight
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


def agree_on_buffers(group: Group, model: nn.Module) -> None:
    """Overwrite the model's buffers with those of the first rank. Buffers without values (meta) are passed over.

    Raises ConfigError on all ranks where some have other buffers: no values would fit then.
    """
    if group.is_alone:
        return
    _expect_same_buffers(group, model)
    places = [(module, name) for module in model.modules() for name in module._buffers]
    done: dict[
        int, torch.Tensor
    ] = {}  # the replacement of a buffer, by its id: several modules may share one
    for module, name in places:
        buffer = module._buffers[name]
        if buffer is None or buffer.device.type == "meta":
            continue
        if id(buffer) not in done:
            done[id(buffer)] = _agreed(group, buffer)
        module._buffers[name] = done[id(buffer)]


def _expect_same_buffers(group: Group, model: nn.Module) -> None:
    facts = [
        f"{name} {tuple(buffer.shape)} {buffer.dtype} {buffer.layout}{' meta' * (buffer.device.type == 'meta')}"
        for name, buffer in model.named_buffers(remove_duplicate=False)
    ]
    odd = group.departures(of_all={}, of_part={"buffers": repr(facts)})["buffers"]
    if odd:
        allowed = (
            "the same names, shapes and dtypes on all ranks, whose first values are those of rank "
            f"{group.control.members[0]}: ranks {odd} have others"
        )
        raise ConfigError("buffers", ", ".join(facts), allowed)


def _agreed(group: Group, buffer: torch.Tensor) -> torch.Tensor:
    """Return the buffer with the first rank's values. A sparse one whose values differ is replaced, not written."""
    is_dense = buffer.layout is torch.strided
    shown = buffer.detach() if is_dense else buffer.detach().to_dense()
    own = shown.to("cpu", copy=True).contiguous()
    agreed = own.clone()
    group.agree(agreed)
    if is_dense:
        with torch.no_grad():
            write_buffer(buffer, agreed)
        return buffer
    return buffer if torch.equal(own, agreed) else agreed.to_sparse(layout=buffer.layout).to(buffer.device)


def expect_same_model(group: Group, config: OffloadConfig, records: Sequence[Record]) -> None:
    """Raise ConfigError unless all ranks have the same configuration, and those of a group the same units.

    In a mesh also for a parameter whose gradients tensor-parallel ranks have in parts. And for one that was
    built in parts over other ranks than those of the engine.
    """
    if group.is_alone:
        return
    _expect_built_by_these(group, [slot for record in records for slot in record.slots])
    if config.mesh is not None:
        for slot in (slot for record in records for slot in record.trainable_slots):
            expect_whole_gradient(slot.name, slot.param)
    units = [(record.name, record.dtype, [_facts(slot) for slot in record.slots]) for record in records]
    configuration, model = repr(_of_all_ranks(config)), repr(units)
    for name, odd in group.departures(
        of_all={"configuration": configuration}, of_part={"model": model}
    ).items():
        if odd:
            first = group.control.members[0] if name == "model" else 0
            allowed = f"the same on all ranks: ranks {odd} have another than rank {first}"
            raise ConfigError(name, f"that of rank {group.control.rank}", allowed)


def expect_same_homes(group: Group, placement: Placement) -> None:
    """Raise ConfigError unless "auto" has chosen the same homes on all ranks, which fetch in an order of them."""
    homes = repr(sorted((index, kind.value, tier.value) for (index, kind), tier in placement.items()))
    odd = group.departures(of_all={"homes": homes}, of_part={})["homes"]
    if odd:
        allowed = (
            f"homes by name: ranks {odd}, on another device or with another torch, choose others than rank 0"
        )
        raise ConfigError("offloadzero.placement", "auto", allowed)


def _expect_built_by_these(group: Group, slots: Sequence[ParamSlot]) -> None:
    """All ranks are asked, so that each one raises an error of its own, and none is told of another's first."""
    own = [*group.control.members]
    others = {slot.name: members for slot in slots if (members := _built_by(slot)) not in (None, own)}
    if not group.is_on_some(bool(others)):
        return
    name, members = next(iter(others.items()), ("a parameter of another rank", None))
    allowed = (
        f"the ranks along the data's axis, here {own}: {name} was built under "
        "zero.Init(data_parallel_group=...) over others"
    )
    raise ConfigError("data_parallel_group", members, allowed)


def _built_by(slot: ParamSlot) -> list[int] | None:
    """Return the ranks that keep this parameter in parts since it was built; None where each one keeps it whole."""
    weight = spilled_weight(slot.param)
    return None if weight is None or weight.members is None else [*weight.members]


def _facts(slot: ParamSlot) -> tuple[object, ...]:
    """The facts of a parameter that all ranks must share: those in parts are gathered in the dtype that they have."""
    in_parts = (slot.param.dtype,) if is_in_parts(slot.param) else ()
    return slot.name, slot.shape, slot.group_index, *in_parts


def _of_all_ranks(config: OffloadConfig) -> OffloadConfig:
    """The configuration without the values that may differ from rank to rank."""
    return replace(
        config,
        update=replace(config.update, num_threads=None, cores=()),
        observe=ObserveConfig(),
        steps_per_print=None,
        device=None,
        mesh=None,
        notices=(),
        warnings=(),
        nvme_paths=(),
    )
