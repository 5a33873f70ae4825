"""The memory of one engine: planned, placed and held against what the machine has, before anything is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from offloadzero.config import BudgetConfig, OffloadConfig
from offloadzero.core.segments import TierName
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.memory.device import Device
from offloadzero.planning.fastest_placement import StepTimer, fastest_placement
from offloadzero.planning.fit import budgets_text, least_budgets
from offloadzero.planning.hardware import Hardware, describe, kept_hardware
from offloadzero.planning.machine import available_host_bytes
from offloadzero.planning.memory_plan import (
    MemoryPlan,
    Needs,
    advice,
    format_bytes,
    keeps_gradients,
    plan_memory,
)
from offloadzero.planning.placement import choose_placement
from offloadzero.planning.step.work import Uses
from offloadzero.ranks.group import Group
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES, AnySpec, UpdateForm, device_form

log = logging.getLogger("offloadzero.planning")

GOES_BY_BYTES = '"placement": "auto" goes by bytes: '


def plan_engine(
    records: Sequence[Record],
    config: OffloadConfig,
    together: Sequence[Sequence[int]],
    device: Device,
    *,
    spec: AnySpec,
    num_checkpointed: int,
    movable_bytes: int,
    uses: Uses,
    group: Group,
) -> MemoryPlan:
    """Plan the memory of an engine on this machine.

    `movable_bytes` are those of parameters in host memory, which the arenas replace. Of a `group` it has what the rank
    with the least memory has. Raises BudgetError: the budgets, or the machine, have too little.
    """
    available = _available(device, movable_bytes=movable_bytes, num_local_ranks=group.local_world_size)
    # It also waits for all: a rank that looks later would find what others have left.
    available = dict(zip(available, group.least([*available.values()]), strict=True))
    hardware = _measured(config, device) if goes_by_time(config) else None

    def make(config: OffloadConfig, hardware: Hardware | None = None) -> MemoryPlan:
        return plan_records(
            records,
            config,
            together=together,
            available=available,
            form=device_form(spec, device.torch_device),
            num_checkpointed=num_checkpointed,
            uses=uses,
            hardware=hardware,
        )

    try:
        plan = make(config, hardware)
    except BudgetError as error:
        enough = least_budgets(config.budgets, lambda budgets: _refusal(make, config, budgets))
        raise BudgetError(f"{error}\n{budgets_text(enough)}") from None
    for line in plan.choice:
        if line.startswith(GOES_BY_BYTES) and group.is_first:
            log.warning("%s", line)
    expect_room(plan, available, config)
    return plan


def _refusal(
    make: Callable[[OffloadConfig], MemoryPlan], config: OffloadConfig, budgets: Mapping[TierName, int]
) -> BudgetError | None:
    """Return the refusal of a configuration with these budgets; None where they are enough."""
    sizes = {tier.value: size for tier, size in budgets.items()}
    try:
        make(replace(config, budgets=BudgetConfig(**sizes)))
    except BudgetError as error:
        return error
    return None


def plan_records(
    records: Sequence[Record],
    config: OffloadConfig,
    *,
    together: Sequence[Sequence[int]],
    available: Mapping[TierName, int],
    form: UpdateForm,
    num_checkpointed: int,
    uses: Uses | None = None,
    hardware: Hardware | None = None,
) -> MemoryPlan:
    """Plan the memory of a model that is cut into `records`, whose gradients get the dtype in which they add up.

    With `uses` and `hardware` "auto" goes by time where the configuration says how many tokens a micro batch has.
    `available` is by tier; the other arguments are those of `plan_memory`. Raises BudgetError.
    """
    wanted = DTYPES[config.precision.grad_accum_dtype]
    for record in records:
        # With one micro batch per step nothing is added up: the parameter's dtype holds the gradient exactly.
        record.grad_dtype = wanted if wanted is not None and keeps_gradients(config) else record.dtype
    needs: Needs = {"together": together, "form": form, "num_checkpointed": num_checkpointed}
    placement, choice, timer = None, tuple[str, ...](), None
    if config.placement.auto and hardware is not None and uses is not None and goes_by_time(config):
        num_tokens = config.placement_tokens or 0
        timer = StepTimer(records, config, uses=uses, hardware=hardware, num_tokens=num_tokens)
        seconds_of = partial(_seconds_where_there_is_room, timer, available)
        found = fastest_placement(records, config, available, seconds_of=seconds_of, **needs)
        placement, choice = found.placement, tuple(found.lines(num_tokens))
    elif config.placement.auto:
        placement = choose_placement(records, config, available, **needs)
        if config.is_of_several and config.placement_tokens is not None:
            choice = (f"{GOES_BY_BYTES}a step of several ranks is not simulated.",)
    plan = plan_memory(records, config, placement=placement, **needs)
    if timer is not None and not choice and timer.unknown(plan):
        lanes = ", ".join(timer.unknown(plan))
        choice = (f"{GOES_BY_BYTES}no rate of {lanes} is known of this machine.",)
    return replace(plan, choice=choice)


def _seconds_where_there_is_room(
    timer: StepTimer, available: Mapping[TierName, int], plan: MemoryPlan
) -> float:
    """Time a plan; inf where the machine has less than it takes, though the budgets have as much."""
    if any(sum(needs.values()) > free for _, needs, free in _needs_by_memory(plan, available)):
        return inf
    return timer.seconds(plan)


def goes_by_time(config: OffloadConfig) -> bool:
    """Whether "auto" goes by time where the machine has been measured: one process, with tokens that are given."""
    return config.placement.auto and config.placement_tokens is not None and not config.is_of_several


def _measured(config: OffloadConfig, device: Device) -> Hardware | None:
    """Return this machine as `offloadzero plan` has measured it; None, and a line in the log, where it has not."""
    try:
        found = kept_hardware(describe(device, config.nvme_paths))
        why = "this machine has not been measured"
    except (ConfigError, OSError, RuntimeError) as error:  # a damaged file, or no home to look in
        found, why = None, f"what was measured of this machine is not used: {error}"
    if found is None:
        command = "`offloadzero plan --model SPEC --config FILE --hardware probe`"
        log.warning("%s%s. %s does that once", GOES_BY_BYTES, why, command)
    return found


def _available(device: Device, *, movable_bytes: int, num_local_ranks: int) -> dict[TierName, int]:
    """Bytes that are free, by tier; a device that shares the host's memory has no entry.

    `movable_bytes` are those of parameters in host memory: they are freed as the arenas fill. The ranks of a machine
    share its memory.
    """
    available = {TierName.HOST: available_host_bytes() // num_local_ranks + movable_bytes}
    free_bytes = device.free_bytes()
    if free_bytes is not None:
        available[TierName.DEVICE] = free_bytes
    return available


def expect_room(plan: MemoryPlan, available: Mapping[TierName, int], config: OffloadConfig) -> None:
    """Raise BudgetError when the machine has less than is planned; `available` is by tier."""
    for tiers, needs, free in _needs_by_memory(plan, available):
        needed = sum(needs.values())
        if needed > free:
            parts = " and ".join(f"{tier.value} {format_bytes(size)}" for tier, size in needs.items())
            added = f" ({parts}: the memory of this device is the host's)" if len(needs) > 1 else ""
            raise BudgetError(
                f"{tiers[0].value}: {format_bytes(needed)} are needed{added}, {format_bytes(free)} are available\n"
                f"{plan.table()}\n{advice(plan, tiers, config, of_machine=True)}"
            )


def _needs_by_memory(
    plan: MemoryPlan, available: Mapping[TierName, int]
) -> Iterator[tuple[tuple[TierName, ...], dict[TierName, int], int]]:
    """Yield the tiers in each memory, the bytes by tier that a plan takes of it, and those that are free there."""
    both = (TierName.HOST, TierName.DEVICE)
    for tiers in [(tier,) for tier in both] if TierName.DEVICE in available else [both]:
        needs = {tier: plan.tier_bytes(tier) for tier in tiers if plan.tier_bytes(tier)}
        yield tiers, needs, available[tiers[0]]
