"""How a process joins the others that train one model with it: its place, their groups, and that all start the same.

What is imported inside of functions loads torch.distributed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from offloadzero.checkpoint.module_states import write_buffer
from offloadzero.config import OffloadConfig, settle_partition
from offloadzero.config.schema import MeshConfig, ObserveConfig
from offloadzero.core import launch
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.core.torch_private import sharder_of
from offloadzero.errors import ConfigError
from offloadzero.memory.device import device_of_rank, make_current
from offloadzero.memory.tickets import Failures
from offloadzero.planning.placement_rules import Placement
from offloadzero.ranks.group import Group, digest, machine
from offloadzero.ranks.mesh import expect_whole_gradient
from offloadzero.ranks.shard import consecutive_groups, keeps_params_on_device
from offloadzero.streaming.building.coded_parameters import attached_in
from offloadzero.streaming.building.waiting_parameters import is_in_parts, spilled_weight
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

if TYPE_CHECKING:
    from offloadzero.ranks.process_groups import Ranks

log = logging.getLogger("offloadzero")

_NUM_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # read by the driver when a process first uses the device
MOST_QUEUES = 32


# --- a process's place, before it makes an engine ---


def telling_others() -> AbstractContextManager[None]:
    """Tell an error of the block, in which an engine starts, to the other ranks, which wait for this one in theirs."""
    # One rank runs nothing behind the block: an error there would come when the engine is whole and nobody has it.
    return nullcontext() if launch.group_size() == 1 else _telling_others()


@contextmanager
def _telling_others() -> Iterator[None]:
    from offloadzero.ranks.failure_store import FailureStore

    before = FailureStore.latest()
    try:
        yield
    except BaseException as error:
        failure_store = FailureStore.latest()
        if failure_store is None or failure_store is before:  # the start has not come as far as making one
            failure_store = FailureStore(torch.distributed.get_rank())
        failure_store.report(error)
        raise


def join_group(model: object) -> tuple[int, int]:
    """Return this rank and the number of ranks, which all start an engine with `model` now.

    Raises:
        ConfigError: a launcher says that there are several ranks, and not which this is; DistributedDataParallel or
            FSDP is around the model or a module of it.
        StateError: the ranks have built the model together, and another is about to do something else with it.
    """
    with telling_others():  # where there is a group already
        rank, world_size = launch.join_group()
    if isinstance(model, nn.Module):
        with telling_others():
            _expect_unwrapped(model, world_size)
    if world_size > 1 and isinstance(model, nn.Module):
        from offloadzero.streaming.building.waiting_in_parts import announce_start

        announce_start(model.parameters())
    return rank, world_size


def _expect_unwrapped(model: nn.Module, world_size: int) -> None:
    for name, module in model.named_modules():
        path = f"model.{name}" if name else "model"
        if isinstance(module, nn.parallel.DistributedDataParallel) and (world_size > 1 or not name):
            allowed = f"the module in it, {path}.module: its gradients are averaged over the ranks here"
            raise ConfigError(path, type(module).__name__, allowed)
        sharder = sharder_of(module)
        if sharder is not None:
            allowed = (
                "the model without it: ranks divide the parameters themselves at zero_optimization.stage 3"
            )
            raise ConfigError(path, sharder, allowed)


def config_of_rank(
    config: OffloadConfig, rank: int, world_size: int, mesh: MeshConfig | None = None
) -> OffloadConfig:
    """Return the configuration of one rank: each computes on its own GPU, and only the first one reports on the run.

    `world_size` is the number of ranks that train the same part of the model. Raises ConfigError where the
    configuration is for another number, or divides inputs and `mesh` does not say which ranks have the same ones.
    """
    if config.world_size != world_size:
        allowed = f"{world_size}: load_config(..., world_size={world_size}) makes it for so many ranks"
        raise ConfigError("config.world_size", config.world_size, allowed)
    config = settle_partition(replace(config, mesh=mesh))
    if not config.is_of_several:
        return config
    config = replace(config, device=device_of_rank(config.device, launch.launched_local_rank()))
    return config if rank == 0 else replace(config, observe=ObserveConfig(), steps_per_print=None)


# --- the groups ---


def join_ranks(device: torch.device, config: OffloadConfig, failures: Failures) -> Ranks:
    """Join the ranks of torch's default process group, which are told of the first one of `failures`.

    Raises ConfigError for settings not built over several.
    """
    expect_built(config)
    shared_queues = expect_own_queues(device, launch.group_size())
    make_current(device)
    from offloadzero.ranks.process_groups import make_ranks

    wire = config.zero_plus_plus
    ranks = make_ranks(
        device,
        mesh=config.mesh,
        node_ranks=wire.node_ranks,
        reduces_codes=wire.quantized_gradients,
        divides_inputs=config.partition_activations,
        commits=config.durable > 0,
    )
    failures.tell_others(lambda error, has_failed: ranks.failure_store.report(error, has_failed=has_failed))
    for warning in filter(None, (shared_queues, _apart(ranks))):
        if ranks.is_first:
            log.warning("%s", warning)
    return ranks


def _apart(ranks: Ranks) -> str:
    """Return a warning where ranks that count as a machine are on several ones, or "". All ranks call this."""
    near = ranks.near_weights or ranks.near_gradients
    if near is None:
        return ""
    by_rank = ranks.control.by_rank_unless_same([digest(machine())], "which ranks are on a machine")
    if by_rank is None:
        return ""
    size = near.spec.world_size
    groups = consecutive_groups(ranks.control.spec, size)
    odd = next((members for members in groups if len({by_rank[rank][0] for rank in members}) > 1), None)
    if odd is None:
        return ""
    return (
        f"ZeRO++ takes {size} consecutive ranks for one machine, and ranks {odd} are on several: what was to stay "
        "within a machine goes over the network. Start the ranks of a machine one after the other (torchrun does, "
        "mpirun --map-by slot, srun --distribution=block)"
    )


def expect_own_queues(device: torch.device, world_size: int) -> str:
    """Refuse a single hardware queue for all of a GPU's streams; return a warning where streams may share one, or "".

    Weights are gathered and gradients reduced by different threads, each in its own order, so one rank may launch them
    in another order than the next. In one queue what waits for the first holds the second back: on one rank the gather
    behind what waits for a reduction, on the next the other way round, and neither goes on.
    """
    if device.type != "cuda" or world_size == 1:
        return ""
    value = os.environ.get(_NUM_QUEUES)
    if value == "1":
        raise ConfigError(
            _NUM_QUEUES,
            1,
            f"{MOST_QUEUES} where several ranks train: with one queue they could wait for each other",
        )
    if value == str(MOST_QUEUES):
        return ""
    return (
        f"{_NUM_QUEUES} is {value or 'not set'}: streams of an engine share hardware queues, and ranks could wait for "
        f"each other; set it to {MOST_QUEUES} before the script starts"
    )


def expect_built(config: OffloadConfig) -> None:
    """Refuse settings that would not be right over several ranks."""
    several = f"over {config.world_size} ranks" if config.mesh is None else "in a mesh of ranks"
    wire = config.zero_plus_plus
    if config.mesh is not None and wire.node_ranks > 1:
        raise ConfigError("zero_optimization.zero_hpz_partition_size", wire.node_ranks, f"{several}: 1")
    if config.mesh is not None and wire.quantized_gradients:
        raise ConfigError("zero_optimization.zero_quantized_gradients", True, f"{several}: false")
    if config.mesh is not None and config.placement.auto:
        raise ConfigError(
            "offloadzero.placement", "auto", f"homes by name: {several} the choice is not built"
        )
    rules = () if config.placement.auto else config.placement.rules
    tiers = {rule.tiers.get(SegmentKind.PARAM, TierName.DEVICE) for rule in rules}
    if keeps_params_on_device(config.zero_stage) and tiers - {TierName.DEVICE}:
        (tier_name, *_) = sorted(tier.value for tier in tiers - {TierName.DEVICE})
        allowed = f"{several} device, or zero_optimization.stage 3: stages 1 and 2 keep all parameters on each device"
        raise ConfigError("offloadzero.placement.param", tier_name, allowed)
    if config.mesh is not None and config.placement.host_update_ratio < 1.0:
        ratio = config.placement.host_update_ratio
        raise ConfigError("zero_optimization.offload_optimizer.ratio", ratio, f"{several}: 1.0")


# --- what all ranks must have in common ---


def agree_on_buffers(group: Group, model: nn.Module) -> None:
    """Overwrite the model's buffers, and the scales of coded weights, with those of the first rank.

    Buffers without values (meta) are passed over.

    Raises ConfigError on all ranks where some have other buffers: no values would fit then.
    """
    if group.is_alone:
        return
    _expect_same_buffers(group, model)
    places = [(module, name) for module in model.modules() for name in module._buffers]
    # The replacement of a buffer, by its id: several modules may share one.
    done: dict[int, torch.Tensor] = {}
    for module, name in places:
        buffer = module._buffers[name]
        if buffer is None or buffer.device.type == "meta":
            continue
        if id(buffer) not in done:
            done[id(buffer)] = _agreed(group, buffer)
        module._buffers[name] = done[id(buffer)]
    for _, (holder, name, tensor) in attached_in(model):
        setattr(holder, name, _agreed(group, tensor))


def _expect_same_buffers(group: Group, model: nn.Module) -> None:
    beside = ((name, each.tensor) for name, each in attached_in(model))
    facts = [
        f"{name} {tuple(buffer.shape)} {buffer.dtype} {buffer.layout}{' meta' * (buffer.device.type == 'meta')}"
        for name, buffer in (*model.named_buffers(remove_duplicate=False), *beside)
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
