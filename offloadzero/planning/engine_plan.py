"""The memory of one engine: planned, placed and held against what the machine has, before anything is taken."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from offloadzero.config import BudgetConfig, OffloadConfig
from offloadzero.core.segments import TierName
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.memory.arena import ALIGN_BYTES, align_up
from offloadzero.memory.device import Device
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.hardware import Hardware, Memory, describe, drive_bytes, kept_hardware
from offloadzero.planning.machine import available_host_bytes
from offloadzero.planning.memory_plan import (
    MemoryPlan,
    Needs,
    advice,
    plan_memory,
)
from offloadzero.planning.placement import choose_placement, fastest_placement, trace_by_size
from offloadzero.planning.step.forecast import plan_step
from offloadzero.planning.step.work import Uses
from offloadzero.planning.update_rules import keeps_gradients, versioned_records
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
    arriving_bytes: int,
    uses: Uses,
    group: Group,
) -> MemoryPlan:
    """Plan the memory of an engine on this machine.

    `movable_bytes` are those of parameters in host memory, which the arenas replace; `arriving_bytes` of tensors that
    come to the device beside the plan. Of a `group` it has what the rank with the least memory has. Raises BudgetError:
    the budgets, or the machine, have too little.
    """
    available = _available(
        device,
        movable_bytes=movable_bytes,
        num_local_ranks=group.local_world_size,
        directories=config.nvme_paths,
    )
    if TierName.DEVICE in available:
        available[TierName.DEVICE] -= arriving_bytes
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
    if config.versions is None and not plan.versioned and group.is_first:
        wanted = versioned_records(records, config, plan.placement)
        if wanted:
            log.info(
                "the updates of %d units begin when backward has ended: second places of their states, which let them "
                "begin in it, do not fit (offloadzero.versions, offloadzero.budgets)",
                len(wanted),
            )
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
    placement, choice = None, tuple[str, ...]()
    trace = None
    if goes_by_time(config) and hardware is not None and uses is not None:
        num_tokens = config.placement_tokens or 0
        trace = trace_by_size(records, config, uses=uses, num_tokens=num_tokens)

        def seconds_of(plan: MemoryPlan) -> float:
            """Simulate a step; inf where a rate is not known, or the machine has less than the budgets."""
            if any(sum(needs.values()) > free for _, needs, free in _needs_by_memory(plan, available)):
                return inf
            step = plan_step(records, plan, config, uses=uses, trace=trace)
            simulation = hardware.simulated(step)
            return inf if simulation is None else simulation.seconds

        found = fastest_placement(records, config, available, seconds_of=seconds_of, **needs)
        placement, choice = found.placement, tuple(found.lines(num_tokens))
    elif config.placement.auto:
        placement = choose_placement(records, config, available, **needs)
        if config.is_of_several and config.placement_tokens is not None:
            choice = (f"{GOES_BY_BYTES}a step of several ranks is not simulated.",)
    plan = plan_memory(records, config, placement=placement, available=available, **needs)
    if trace is not None and not choice and hardware is not None and uses is not None:
        unknown = hardware.forecast(plan_step(records, plan, config, uses=uses, trace=trace)).unknown
        if unknown:
            choice = (f"{GOES_BY_BYTES}no rate of {', '.join(unknown)} is known of this machine.",)
    return replace(plan, choice=choice)


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


def _available(
    device: Device, *, movable_bytes: int, num_local_ranks: int, directories: Sequence[Path]
) -> dict[TierName, int]:
    """Bytes that are free, by tier; a device that shares the host's memory has no entry.

    `movable_bytes` are those of parameters in host memory: they are freed as the arenas fill. The ranks of a machine
    share its memory, and the drives of the `directories`, of whose files each has a part.
    """
    available = {TierName.HOST: available_host_bytes() // num_local_ranks + movable_bytes}
    free_bytes = device.free_bytes()
    if free_bytes is not None:
        available[TierName.DEVICE] = free_bytes
    nvme = drive_bytes(directories)
    if nvme is not None:
        available[TierName.NVME] = nvme // num_local_ranks
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


MAX_BUDGET = 1 << 60
ENOUGH = "The smallest budgets that are enough"

Keys = Mapping[str, object]  # dotted keys of the JSON and their new values
Source = Mapping[str, Any]  # the JSON
More = Mapping[TierName, int]  # bytes that a machine would have in addition


@dataclass(frozen=True)
class Beside:
    """Bytes that a run takes beside the plan, by tier.

    On the device they are activations and the model's buffers; elsewhere inputs that leave it and whose size the
    configuration does not give; on the host Python and torch themselves, holes in the C library's heap, and files of
    directories in its memory. What waits on the drives while the model is built counts where nothing else is possible.
    """

    device: int = 0
    host: int = 0
    nvme: int = 0
    holes: int = 0  # on the host, where activations are in its memory
    files: int = 0  # on the host, of directories that are no drive's
    waiting: int = 0  # on nvme, beyond what training takes of it


@dataclass(frozen=True)
class Verdict:
    """The result for one configuration: `refusal` is the engine's own text, `short` the missing bytes by tier.

    `is_mistake`: the configuration itself is refused, and no budget would change that.
    """

    refusal: str = ""
    short: Mapping[TierName, int] = field(default_factory=dict)
    is_mistake: bool = False

    @property
    def fits(self) -> bool:
        return not self.refusal and not self.short


@dataclass(frozen=True)
class Change:
    """Keys to set, and bytes by tier that the machine would need in addition."""

    keys: Keys
    more: More = field(default_factory=dict)

    def text(self) -> str:
        """Return the change as text, with figures that are large enough when they are typed in."""
        parts = [f"{key} = {json.dumps(value)}" for key, value in self.keys.items()]
        parts += [
            f"{format_bytes(size)} ({size:,} bytes) more of {tier.value}" for tier, size in self.more.items()
        ]
        return ", ".join(parts)


def needed(plan: MemoryPlan, beside: Beside, memory: Memory) -> dict[TierName, int]:
    """Return the bytes of the run by the machine's tiers: those of a CPU as the device are the host's."""
    device = plan.tier_bytes(TierName.DEVICE) + beside.device
    host = plan.tier_bytes(TierName.HOST) + beside.host + beside.holes + beside.files
    nvme = plan.tier_bytes(TierName.NVME) + beside.nvme + beside.waiting
    if memory.device is None:
        return {TierName.HOST: host + device, TierName.NVME: nvme}
    return {TierName.DEVICE: device, TierName.HOST: host, TierName.NVME: nvme}


def judge(plan: MemoryPlan, beside: Beside, memory: Memory) -> Verdict:
    has = {TierName.DEVICE: memory.device, TierName.HOST: memory.host, TierName.NVME: memory.nvme or 0}
    short = {}
    for tier, num_bytes in needed(plan, beside, memory).items():
        lacking = num_bytes - (has[tier] or 0)
        if lacking > 0:
            short[tier] = lacking
    return Verdict(short=short)


def memory_with(memory: Memory, more: More) -> Memory:
    device = None if memory.device is None else memory.device + more.get(TierName.DEVICE, 0)
    drive = more.get(TierName.NVME)
    nvme = (memory.nvme or 0) + drive if drive else memory.nvme
    return Memory(host=memory.host + more.get(TierName.HOST, 0), device=device, nvme=nvme)


def with_keys(source: Source, keys: Keys) -> dict[str, Any]:
    """Return a copy of the JSON with dotted keys set; missing objects on the way are made."""
    changed: dict[str, Any] = copy.deepcopy(dict(source))
    for key, value in keys.items():
        *path, last = key.split(".")
        place = changed
        for part in path:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = value
    return changed


def budget_keys(budgets: Mapping[TierName, int]) -> Keys:
    return {f"offloadzero.budgets.{tier.value}": size for tier, size in budgets.items()}


def least_budgets(
    budgets: BudgetConfig, refusal_of: Callable[[Mapping[TierName, int]], BudgetError | None]
) -> dict[TierName, int]:
    """Raise those of the `budgets` that are too small, each to the least with which a plan is made.

    One follows the other, with those before it as they are by then and with any amount of those after it: so all
    of them together are enough. `refusal_of` gets all that are given, and returns None where they are enough.
    """
    sizes = (budgets.device, budgets.host, budgets.nvme)
    given = {tier: size for tier, size in zip(TierName, sizes, strict=True) if size is not None}
    settled = dict.fromkeys(given, MAX_BUDGET)
    raised: dict[TierName, int] = {}
    for tier, budget in given.items():

        def refusal_with(size: int, tier: TierName = tier) -> BudgetError | None:
            return refusal_of({**settled, tier: size})

        settled[tier] = budget
        refusal = refusal_with(budget)
        if refusal is not None:
            settled[tier] = raised[tier] = _least(tier, budget, refusal, refusal_with)
    return raised


def budgets_text(budgets: Mapping[TierName, int]) -> str:
    """Return the line of a refusal that names the budgets that are enough: keys and values that can be typed in."""
    keys = ", ".join(f"{key} = {size}" for key, size in budget_keys(budgets).items())
    return f"{ENOUGH}: {keys}."


def _least(
    tier: TierName, too_small: int, refusal: BudgetError, refusal_of: Callable[[int], BudgetError | None]
) -> int:
    """Return the least multiple of a page above `too_small` that is enough; more always is.

    A refusal names what its plan takes, most often the least there is: so the figure is tried first, then a page less.
    """
    low, high = too_small // ALIGN_BYTES, max(1, align_up(too_small) // ALIGN_BYTES)
    high = max(high, align_up(refusal.needed.get(tier.value, 0)) // ALIGN_BYTES)
    while (found := refusal_of(high * ALIGN_BYTES)) is not None:
        low, high = high, max(2 * high, align_up(found.needed.get(tier.value, 0)) // ALIGN_BYTES)
        if high * ALIGN_BYTES > MAX_BUDGET:
            raise AssertionError("no budget is enough")
    middle = high - 1
    while high - low > 1:
        if refusal_of(middle * ALIGN_BYTES) is None:
            high = middle
        else:
            low = middle
        middle = (low + high) // 2
    return high * ALIGN_BYTES
