"""The answer whether a plan fits a machine, and the smallest change of the configuration with which it would.

[Note: the smallest change]
Changes are tried in one order, and the first that fits is the answer: the cheapest comes first, and no two are named
where one is enough.

1. A budget of the configuration that is too small, raised to the byte, where the machine has as much.
2. A budget of the device that leaves room for activations: fewer leases and fewer records there.
3. Activation checkpoints, then smaller micro batches: they cost computation, and only where activations are too large.
4. `"placement": "auto"`: slower tiers for segments that do not fit the faster ones; first with the directories that are
   configured, then with one.
5. The `compact` layout of the states: other numbers, so it comes after everything that leaves them alone.
6. Shorter chunks of the update, then several of these together.
7. More memory. The amount is given for the configuration that lacks least.

A budget of the configuration may be too small beside one of the others: then both are named. A configuration that is
invalid, checkpoints of a model without blocks, say, is no candidate.

Every change is planned again before it is named: the named configuration is accepted.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

from offloadzero.config import BudgetConfig, OffloadConfig
from offloadzero.core.constants import COMPACT_CHUNK_MULTIPLE
from offloadzero.core.segments import TierName
from offloadzero.errors import BudgetError
from offloadzero.memory.arena import ALIGN_BYTES, align_up
from offloadzero.planning.memory_plan import MemoryPlan, format_bytes

NVME_PATH = "offload-files"  # where no directory is configured
SMALL_CHUNK = COMPACT_CHUNK_MULTIPLE  # elements; the fp32 layout accepts it, too
MAX_BUDGET = 1 << 60
ENOUGH = "The smallest budgets that are enough"
MAX_BESIDE_BUDGETS = (
    2  # steps that are tried together with raised budgets: a search of its own for each of them
)

Keys = Mapping[str, object]  # dotted keys of the JSON and their new values
Source = Mapping[str, Any]  # the JSON
More = Mapping[TierName, int]  # bytes that a machine would have in addition


@dataclass(frozen=True)
class Memory:
    """Free bytes by tier, before Python and torch are loaded.

    `device` None: its memory is the host's. `nvme` None: nothing is known of drives.
    """

    host: int
    device: int | None = None
    nvme: int | None = None


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
        """Whether the run can start."""
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
    """Compare a plan with a machine."""
    has = {TierName.DEVICE: memory.device, TierName.HOST: memory.host, TierName.NVME: memory.nvme or 0}
    short = {}
    for tier, num_bytes in needed(plan, beside, memory).items():
        lacking = num_bytes - (has[tier] or 0)
        if lacking > 0:
            short[tier] = lacking
    return Verdict(short=short)


def memory_with(memory: Memory, more: More) -> Memory:
    """Return a machine with so many more bytes."""
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


def smallest_change(
    source: Source,
    config: OffloadConfig,
    load: Callable[[Source], OffloadConfig],
    verdict_of: Callable[[Source, More], Verdict],
    *,
    refusal_of: Callable[[Source], BudgetError | None],
    can_be_compact: bool,
    has_activations: bool = True,
    device_room: int | None = None,
) -> Change:
    """Return the first change that fits: [Note: the smallest change].

    Args:
        config: the configuration that `source` holds.
        load: reads a JSON as `source` was read.
        verdict_of: plans a JSON and judges it on a machine that has so many more bytes.
        refusal_of: the refusal of a JSON whose own budgets are too small; None where they are enough.
        can_be_compact: whether optimizer and dtype have the compact layout.
        has_activations: whether activations are known, so that fewer of them are a change.
        device_room: bytes of a device that activations leave; None where that is not known.
    """
    budgets = budget_keys(source, config, refusal_of)
    least: tuple[int, Keys] | None = None
    steps = list(_steps(config, can_be_compact=can_be_compact, has_activations=has_activations))
    if device_room is not None and (config.budgets.device is None or device_room < config.budgets.device):
        steps.insert(0, {"offloadzero.budgets.device": device_room})
    raised_beside = partial(_raised_beside, source, load, verdict_of, refusal_of)
    for keys in _candidates(steps, budgets, raised_beside):
        verdict = verdict_of(with_keys(source, keys), {})
        if verdict.fits:
            return Change(keys)
        if not verdict.refusal:
            lacking = sum(verdict.short.values())
            if least is None or lacking < least[0]:
                least = lacking, keys
    if least is None:
        raise AssertionError("budgets that were raised are refused")
    return Change(least[1], _lacking(with_keys(source, least[1]), verdict_of))


def _lacking(source: Source, verdict_of: Callable[[Source, More], Verdict]) -> More:
    """The bytes that a machine lacks. "auto" uses a share of all there is: with more it may want more."""
    more: dict[TierName, int] = {}
    while not (verdict := verdict_of(source, more)).fits:
        if verdict.refusal:
            raise AssertionError(f"refused with more memory: {verdict.refusal}")
        for tier, num_bytes in verdict.short.items():
            more[tier] = more.get(tier, 0) + num_bytes
    return more


def budget_keys(
    source: Source, config: OffloadConfig, refusal_of: Callable[[Source], BudgetError | None]
) -> Keys:
    """Raise each budget that is too small to the least with which the engine plans on a machine of any size."""

    def refusal_with(budgets: Mapping[TierName, int]) -> BudgetError | None:
        return refusal_of(with_keys(source, _keys_of(budgets)))

    return _keys_of(least_budgets(config.budgets, refusal_with))


def _keys_of(budgets: Mapping[TierName, int]) -> Keys:
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
    keys = ", ".join(f"{key} = {size}" for key, size in _keys_of(budgets).items())
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


def _raised_beside(
    source: Source,
    load: Callable[[Source], OffloadConfig],
    verdict_of: Callable[[Source, More], Verdict],
    refusal_of: Callable[[Source], BudgetError | None],
    keys: Keys,
) -> Keys:
    """Raise the budgets that are too small when `keys` are set: these may be others than without the keys."""
    changed = with_keys(source, keys)
    verdict = verdict_of(changed, {})
    if not verdict.refusal or verdict.is_mistake:
        return {}
    return budget_keys(changed, load(changed), refusal_of)


def _candidates(
    steps: Sequence[Keys], budgets: Keys, raised_beside: Callable[[Keys], Keys]
) -> Iterator[Keys]:
    """Yield the candidates of [Note: the smallest change]: the budgets, then each step alone, then two, then more.

    The budgets are one of these changes, as they have to fit the others. The first candidate is one that the engine
    plans: without a budget to raise it is the configuration itself, for a machine that has more.
    """
    yield budgets
    for count in range(1, len(steps) + 1):
        yield from _combined(steps, count)
        if 1 < count <= MAX_BESIDE_BUDGETS + 1:
            yield from _with_budgets(_combined(steps, count - 1), raised_beside)
    yield from _with_budgets([_joined(steps)], raised_beside)
    yield {**_joined(steps), **budgets}


def _combined(steps: Sequence[Keys], count: int) -> Iterator[Keys]:
    for chosen in combinations(steps, count):
        if len({name for keys in chosen for name in keys}) == sum(map(len, chosen)):  # no key twice
            yield _joined(chosen)


def _with_budgets(candidates: Iterable[Keys], raised_beside: Callable[[Keys], Keys]) -> Iterator[Keys]:
    for keys in candidates:
        raised = raised_beside(keys)
        if raised:
            yield {**keys, **raised}


def _joined(steps: Iterable[Keys]) -> Keys:
    return {name: value for keys in steps for name, value in keys.items()}


def _steps(config: OffloadConfig, *, can_be_compact: bool, has_activations: bool) -> Iterator[Keys]:
    if has_activations and config.activation_checkpoints is None:
        yield {"offloadzero.activation_checkpoints": {}}
    batch = config.batch
    if has_activations and batch.micro_batch_size is not None:
        for size in _smaller(batch.micro_batch_size):
            of_rank = batch.micro_batch_size * batch.gradient_accumulation_steps
            yield {
                "train_batch_size": of_rank * config.world_size,
                "train_micro_batch_size_per_gpu": size,
                "gradient_accumulation_steps": of_rank // size,
            }
    yield from _auto(config)
    if can_be_compact and config.state_layout != "compact":
        yield {"offloadzero.state_layout": "compact"}
    if config.update.chunk_elements > SMALL_CHUNK:
        yield {"offloadzero.update.chunk_elements": SMALL_CHUNK}


def _auto(config: OffloadConfig) -> Iterator[Keys]:
    auto: Keys = {} if config.placement.auto else {"offloadzero.placement": "auto"}
    if auto:
        yield auto
    if not config.nvme_paths:
        yield {**auto, "offloadzero.nvme_path": NVME_PATH}


def _smaller(micro: int) -> Iterator[int]:
    """Return the largest proper divisor and 1: of many sizes two are tried."""
    if micro > 1:
        half = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        yield from dict.fromkeys((half, 1))
