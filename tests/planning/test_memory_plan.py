"""The plan: homes by rule, bytes by tier, budgets, and that what is planned is what is reserved."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from offloadzero.config import OffloadConfig, load_config
from offloadzero.config.schema import BudgetConfig, PlacementConfig, PlacementRule, UpdateConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.memory.arena import staggered
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.memory_plan import (
    MemoryPlan,
    first_enough,
    nvme_bytes_with_waiting,
    plan_memory,
)
from offloadzero.planning.placement_rules import idle_rules, place
from offloadzero.planning.update_rules import updates_in_backward
from offloadzero.update.records import Record, make_record
from offloadzero.update.specs.adam import ADAM

PARAM, MASTER, M1, M2, _, GRAD = ADAM.kinds
DEVICE, HOST, NVME = TierName
RECORD_KINDS = (PARAM, MASTER, M1, M2)


def records(
    *sizes: int,
    dtype: torch.dtype = torch.bfloat16,
    names: list[str] | None = None,
    frozen: tuple[int, ...] = (),
    resident: tuple[int, ...] = (),
) -> list[Record]:
    made = []
    for index, size in enumerate(sizes):
        group = None if index in frozen else 0
        record = make_record(
            index,
            names[index] if names else f"layers.{index}",
            dtype,
            [("w", nn.Parameter(torch.zeros(1).expand(size)), group)],
            spec=ADAM,
            resident=index in resident,
        )
        record.grad_dtype = dtype
        made.append(record)
    return made


def rule(units: str = "*", **tiers: str) -> PlacementRule:
    chosen = {SegmentKind(kind): TierName(tier) for kind, tier in tiers.items()}
    return PlacementRule(units=units, tiers=MappingProxyType(chosen))


def everything(tier: str) -> PlacementRule:
    return rule(**dict.fromkeys(("param", "master", "exp_avg", "exp_avg_sq"), tier))


def config(*rules: PlacementRule, ratio: float = 1.0, **keys: Any) -> OffloadConfig:
    return OffloadConfig(
        placement=PlacementConfig(rules=rules, host_update_ratio=ratio),
        **{"nvme_paths": (Path("/nowhere"),), **keys},
    )


# --- what waits for the engine ---


def test_what_waits_on_the_drive_has_its_rest_on_each_rank() -> None:
    """Of n elements each of N ranks keeps n // N and the n % N last ones, in a file of whole blocks."""
    size, num_ranks = 1024 * 1024 - 1, 1024
    made = records(size, 5000)
    in_memory = plan_memory(made, config(everything("host")))
    for stage, sizes in {3: (1023 + 1023, 4 + 904), 1: (size, 5000)}.items():
        of_ranks = config(world_size=num_ranks, zero_stage=stage)
        waiting = [-(-kept * 4 // 4096) * 4096 for kept in sizes]
        assert nvme_bytes_with_waiting(made, in_memory, of_ranks) == sum(waiting)


# --- homes ---


TWO_DTYPES = records(64, 64, 64, names=["layers.0", "layers.0#float32", "layers.1"])
THREE = records(5000, 5000, 5000)
FOUR_RULES = (
    everything("nvme"),
    rule("layers.*", exp_avg="host"),
    rule("layers.1", param="device", exp_avg="device"),
    rule("layers.[2-9]", grad="nvme"),
)
# Units, rules, and of some segments the tiers in which they are, unit by unit; None where a unit has no such segment.
HOMES: dict[str, tuple[list[Record], tuple[PlacementRule, ...], dict[SegmentKind, list[TierName | None]]]] = {
    "without rules": (
        records(5000, 7000),
        (),
        {kind: [DEVICE, DEVICE] for kind in (*RECORD_KINDS, GRAD)},
    ),
    "states are all that the optimizer keeps, and a name of their own wins": (
        records(5000),
        (rule(states="nvme", exp_avg_sq="host"),),
        {PARAM: [DEVICE], MASTER: [NVME], M1: [NVME], M2: [HOST], GRAD: [HOST]},
    ),
    "a later rule for all of them wins": (
        records(5000),
        (rule(exp_avg="host"), rule(states="nvme")),
        {M1: [NVME]},
    ),
    "later rules win segment by segment": (
        THREE,
        FOUR_RULES,
        {
            PARAM: [NVME, DEVICE, NVME],
            M1: [HOST, DEVICE, HOST],
            M2: [NVME, NVME, NVME],
            GRAD: [HOST, HOST, NVME],
        },
    ),
    "the last rule for everything": (THREE, (FOUR_RULES[2], FOUR_RULES[0]), {PARAM: [NVME, NVME, NVME]}),
    "a rule for a unit is for its parameters of every dtype": (
        TWO_DTYPES,
        (rule("layers.0", param="host"), rule("layers.0#float32", exp_avg="nvme")),
        {PARAM: [HOST, HOST, DEVICE], M1: [DEVICE, NVME, DEVICE]},
    ),
    "globs match whole names and case": (
        records(5000, 5000, 5000, names=["layers.1", "layers.10", "Layers.1"]),
        (rule("layers.1", param="nvme"),),
        {PARAM: [NVME, DEVICE, DEVICE]},
    ),
    "the resident unit keeps its parameters on the device": (
        records(5000, 5000, resident=(1,)),
        (everything("nvme"),),
        {PARAM: [NVME, DEVICE], M1: [NVME, NVME]},
    ),
    "a gradient stays on the device only with its whole update": (
        records(5000, 5000),
        (rule("layers.0", exp_avg="host"),),
        {GRAD: [HOST, DEVICE]},
    ),
    "frozen units have parameters only": (
        records(5000, 6000, frozen=(0,)),
        (everything("host"),),
        {PARAM: [HOST, HOST], **{kind: [None, HOST] for kind in (MASTER, M1, M2, GRAD)}},
    ),
    "fp32 parameters have no master": (
        records(5000, dtype=torch.float32),
        (everything("host"),),
        {PARAM: [HOST], MASTER: [None]},
    ),
}


@pytest.mark.parametrize("name", HOMES)
def test_homes(name: str) -> None:
    units, rules, expected = HOMES[name]
    homes = place(units, config(*rules))
    assert {kind: [homes.get((unit.index, kind)) for unit in units] for kind in expected} == expected


def test_a_state_of_another_optimizer_has_no_home() -> None:
    with pytest.raises(
        ConfigError, match=r"offloadzero\.placement\.sum = 'host': states of Adam: exp_avg, exp_avg_sq"
    ):
        place(records(5000), config(rule(sum="host")))
    place(records(5000, frozen=(0,)), config(rule(sum="host")))  # has no states


def test_a_rule_that_matches_no_unit_is_told() -> None:
    found = idle_rules(
        TWO_DTYPES,
        config(rule(param="host"), rule("layer.*", param="nvme"), rule("layers.1", exp_avg="nvme")),
    )
    assert found == [
        "offloadzero.placement: a rule for the units 'layer.*' places nothing: the model has no such unit, it has "
        "layers.0, layers.1"
    ]


@pytest.mark.parametrize(("ratio", "on_device"), [(1.0, []), (0.75, [3]), (0.5, [2, 3]), (0.0, [0, 1, 2, 3])])
def test_the_share_of_the_update_on_the_device(ratio: float, on_device: list[int]) -> None:
    """The last units of the forward first: backward finishes them first."""
    units = records(*[8192] * 4)
    homes = place(units, config(everything("host"), ratio=ratio))
    kinds = (*RECORD_KINDS, GRAD)
    whole = [i for i in range(4) if all(homes[i, kind] is DEVICE for kind in kinds)]
    assert whole == on_device
    assert all(homes[i, kind] is HOST for i in range(4) if i not in on_device for kind in kinds)


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=6), st.floats(0, 1))
@hypothesis_settings(max_examples=100, deadline=None)
def test_the_share_is_never_exceeded(sizes: list[int], ratio: float) -> None:
    units = records(*sizes)
    homes = place(units, config(everything("host"), ratio=ratio))
    moved = sum(unit.num_trainable for unit in units if homes[unit.index, M1] is DEVICE)
    assert moved <= (1 - ratio) * sum(unit.num_trainable for unit in units) + 1e-6


# --- bytes ---


def homes_of(plan: MemoryPlan, tier: TierName) -> dict[str, int]:
    return {
        line.what.removeprefix("home: "): line.num_bytes
        for line in plan.lines
        if line.tier is tier and line.what.startswith("home: ")
    }


COUNT = 40_960  # a multiple of what records are rounded to
PAGE = 4096  # between arrays in host memory that are used in step


@pytest.mark.parametrize(
    ("dtype", "per_parameter"), [(torch.bfloat16, 12), (torch.float16, 14), (torch.float32, 12)]
)
@pytest.mark.parametrize("tier", ["host", "nvme", "device"])
def test_bytes_per_parameter(dtype: torch.dtype, per_parameter: int, tier: str) -> None:
    units = records(COUNT, COUNT, COUNT, dtype=dtype)
    plan = plan_memory(units, config(everything(tier)))
    homes = homes_of(plan, TierName(tier))
    grads = homes.pop("grad", 0)
    apart = PAGE * sum(len(unit.layout) for unit in units) if tier == "host" else 0
    assert sum(homes.values()) == per_parameter * 3 * COUNT + apart
    # On the device the gradient has a home; elsewhere it is consumed as it lands.
    assert grads == (dtype.itemsize * 3 * COUNT if tier == "device" else 0)
    assert not any(homes_of(plan, other) for other in TierName if other.value != tier)


def test_gradients_that_are_kept_have_homes() -> None:
    units = records(COUNT, COUNT)
    plan = plan_memory(units, config(everything("host"), gradient_clipping=1.0))
    assert homes_of(plan, HOST)["grad"] == 2 * (2 * COUNT + PAGE)
    assert plan.kept_grad_bytes == homes_of(plan, HOST)["grad"]
    assert plan.num_host_grads == 0
    assert plan_memory(units, config(everything("device"), gradient_clipping=1.0)).kept_grad_bytes == 0
    wide = records(COUNT, COUNT)
    for record in wide:
        record.grad_dtype = torch.float32
    plan = plan_memory(wide, config(everything("host"), gradient_clipping=1.0))
    assert homes_of(plan, HOST)["grad"] == 2 * (4 * COUNT + PAGE)


def test_the_table_shows_every_byte() -> None:
    units = records(COUNT, 3 * COUNT)
    plan = plan_memory(units, config(everything("nvme"), gradient_clipping=1.0))
    table = plan.table()
    for tier in TierName:
        lines = [line for line in plan.lines if line.tier is tier]
        assert plan.tier_bytes(tier) == sum(line.num_bytes for line in lines)
        assert f"{tier.value:<8}{format_bytes(plan.tier_bytes(tier)):>12}" in table
        for line in lines:
            assert line.what in table
            assert format_bytes(line.num_bytes) in table


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (1 << 50, "1024.00 TiB")],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


# --- buffers ---


def test_unit_leases_take_what_the_device_budget_leaves() -> None:
    units = records(*[COUNT] * 8)
    one = 2 * COUNT
    free = plan_memory(units, config(everything("host")))
    assert free.unit_lease_bytes == 3 * one, "the unit in use and two ahead"
    budget = 10 * one
    bounded = plan_memory(units, config(everything("host"), budgets=BudgetConfig(device=budget)))
    assert bounded.tier_bytes(DEVICE) <= budget
    assert bounded.tier_bytes(DEVICE) > budget - 4096
    generous = plan_memory(units, config(everything("host"), budgets=BudgetConfig(device=10**9)))
    assert generous.unit_lease_bytes == 8 * one, "never more than everything"


def test_what_is_needed_together_fits_together() -> None:
    units = records(*[COUNT] * 6)
    together = [frozenset({0, 1}), frozenset({2, 3, 4, 5})]
    plan = plan_memory(units, config(everything("host"), max_live_parameters=1), together=together)
    assert plan.unit_lease_bytes >= 4 * 2 * COUNT


def test_nothing_streams_when_everything_is_on_the_device() -> None:
    plan = plan_memory(records(COUNT, COUNT), config())
    assert (plan.unit_lease_bytes, plan.device_grad_bytes, plan.num_slots) == (0, 0, 0)
    assert plan.tier_bytes(HOST) == plan.tier_bytes(NVME) == 0


def test_update_slots_hold_what_is_not_in_host_memory() -> None:
    units = records(10 * COUNT)
    update = UpdateConfig(chunk_elements=8192, num_chunks_in_flight=3)
    whole = plan_memory(units, config(everything("nvme"), update=update))
    assert (whole.num_slots, whole.slot_bytes) == (3, 12 * 8192 + 4 * PAGE)
    moments = plan_memory(
        units, config(everything("host"), rule(exp_avg="nvme", exp_avg_sq="device"), update=update)
    )
    assert moments.slot_bytes == 8 * 8192 + 2 * PAGE
    assert plan_memory(units, config(everything("host"), update=update)).num_slots == 0


# --- budgets ---


def test_gradients_move_to_nvme_when_the_host_is_too_small() -> None:
    units = records(*[100 * COUNT] * 6)
    update = UpdateConfig(chunk_elements=4096)
    base = config(everything("nvme"), gradient_clipping=1.0, update=update)
    wanted = plan_memory(units, base)
    assert {wanted.placement[i, GRAD] for i in range(6)} == {HOST}
    one = 2 * 100 * COUNT
    budget = wanted.tier_bytes(HOST) - one
    moved = plan_memory(
        units, config(everything("nvme"), gradient_clipping=1.0, update=update, budgets=BudgetConfig(host=budget))
    )  # fmt: skip
    assert moved.tier_bytes(HOST) <= budget
    on_nvme = [i for i in range(6) if moved.placement[i, GRAD] is NVME]
    assert on_nvme == list(range(6))[-len(on_nvme) :], "the last to be needed go first"
    assert 0 < len(on_nvme) < 6, "no more than needed"
    assert moved.tier_bytes(NVME) == wanted.tier_bytes(NVME) + one * len(on_nvme)


@pytest.mark.parametrize("keys", [{"nvme_paths": ()}, {"gradient_clipping": 0.0}])
def test_they_do_not_move_without_a_path_or_a_home(keys: dict[str, Any]) -> None:
    units = records(*[COUNT] * 6)
    with pytest.raises(BudgetError, match=r"budgets\.host"):
        plan_memory(
            units, config(everything("host"), **{"gradient_clipping": 1.0, **keys}, budgets=BudgetConfig(host=4096))
        )  # fmt: skip


@given(
    st.lists(st.integers(1, 200_000), min_size=1, max_size=5),
    st.lists(st.lists(st.sampled_from(["device", "host", "nvme"]), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(0, 4_000_000),
    st.integers(0, 4_000_000),
    st.booleans(),
)  # fmt: skip
@hypothesis_settings(max_examples=100, deadline=None)
def test_a_plan_is_within_its_budgets_or_refused(
    sizes: list[int], tiers: list[list[str]], device: int, host: int, clips: bool
) -> None:
    names = ("param", "master", "exp_avg", "exp_avg_sq")
    rules = [rule(f"layers.{i}", **dict(zip(names, row, strict=True))) for i, row in enumerate(tiers)]
    units = records(*sizes)
    update = UpdateConfig(chunk_elements=4096)
    free = config(everything("host"), *rules, update=update, gradient_clipping=float(clips))
    plan = plan_memory(units, free)
    homes = sum(sum(homes_of(plan, tier).values()) for tier in TierName)
    assert homes >= 12 * sum(sizes)
    budgets = BudgetConfig(device=device, host=host)
    try:
        bounded = plan_memory(
            units, config(everything("host"), *rules, update=update, gradient_clipping=float(clips), budgets=budgets)
        )  # fmt: skip
    except BudgetError as error:
        refusal = str(error)
    else:
        assert bounded.tier_bytes(DEVICE) <= device
        assert bounded.tier_bytes(HOST) <= host
        return
    assert "What would make it fit" in refusal
    assert "home: param" in refusal


@pytest.mark.parametrize(
    ("home", "budget", "advised"),
    [
        ("host", "host", "segments on nvme, smaller units"),
        ("nvme", "host", "a smaller offloadzero.update.chunk_elements, smaller units"),
        ("device", "device", "parameters or states on host or nvme, smaller units"),
        ("nvme", "device", "smaller units"),
        ("nvme", "nvme", "segments on host, or a larger budget."),
    ],
)
def test_the_advice_names_homes_elsewhere_only_where_the_tier_holds_some(
    home: str, budget: str, advised: str
) -> None:
    with pytest.raises(BudgetError) as caught:
        plan_memory(records(4096), config(everything(home), budgets=BudgetConfig(**{budget: 4096})))
    assert f"What would make it fit: {advised}" in str(caught.value)


# --- second places ---


def second_places(plan: MemoryPlan) -> int:
    return sum(line.num_bytes for line in plan.lines if line.what == "second places")


@pytest.mark.parametrize("versions", [None, True])
def test_states_on_nvme_have_two_places_where_updates_wait_for_the_norm(versions: bool | None) -> None:
    plan = plan_memory(
        records(COUNT, COUNT, frozen=(1,)),
        config(everything("nvme"), gradient_clipping=1.0, versions=versions),
    )
    assert plan.versioned == {0}
    assert second_places(plan) == 12 * COUNT
    assert plan.tier_bytes(NVME) == 2 * 12 * COUNT + 2 * COUNT  # and the frozen weights


@pytest.mark.parametrize(
    ("rules", "keys"),
    [
        ([everything("nvme")], {}),  # updates run in backward
        ([everything("nvme")], {"gradient_clipping": 1.0, "versions": False}),
        ([everything("nvme"), rule(grad="device")], {"gradient_clipping": 1.0}),
        ([everything("nvme"), rule(param="device")], {"gradient_clipping": 1.0}),
        ([everything("host")], {"gradient_clipping": 1.0}),
    ],
)
def test_other_states_have_one_place(rules: list[PlacementRule], keys: dict[str, Any]) -> None:
    plan = plan_memory(records(COUNT), config(*rules, **keys))
    assert not plan.versioned
    assert not second_places(plan)


FREE = 36 * COUNT  # room for a checkpoint, or another training, stays free


@pytest.mark.parametrize(
    ("free", "budget", "has_room"),
    [
        (None, 24 * COUNT - 1, False),
        (None, 24 * COUNT, True),
        (FREE - 1, None, False),
        (FREE, None, True),
        (FREE, 24 * COUNT - 1, False),
    ],
)
def test_without_room_for_two_places_there_is_one(
    free: int | None, budget: int | None, has_room: bool
) -> None:
    """By default; who asks for two is refused if a budget forbids it."""
    keys: dict[str, Any] = {"gradient_clipping": 1.0, "budgets": BudgetConfig(nvme=budget)}
    available = {} if free is None else {NVME: free}
    plan = plan_memory(records(COUNT), config(everything("nvme"), **keys), available=available)
    assert plan.versioned == ({0} if has_room else set())
    assert plan.tier_bytes(NVME) == (24 if has_room else 12) * COUNT
    if budget is not None and not has_room:
        with pytest.raises(BudgetError, match="second places"):
            plan_memory(records(COUNT), config(everything("nvme"), **keys, versions=True))


def test_states_in_host_memory_have_second_places_beside_those_on_nvme() -> None:
    """Where the host has no room for them, only units that are on nvme as a whole have."""
    homes = (everything("nvme"), rule("layers.1", param="host"))
    keys: dict[str, Any] = {"gradient_clipping": 1.0}
    units = records(COUNT, COUNT)
    plan = plan_memory(units, config(*homes, **keys))
    assert plan.versioned == {0, 1}
    assert [line.num_bytes for line in plan.lines if line.what == "second places"] == [
        staggered(2 * COUNT),
        22 * COUNT,
    ]
    budgets = BudgetConfig(host=plan.tier_bytes(HOST) - 1)
    assert plan_memory(units, config(*homes, **keys, budgets=budgets)).versioned == {0}
    available = {HOST: plan.tier_bytes(HOST)}
    assert plan_memory(units, config(*homes, **keys), available=available).versioned == {0}


def test_gradients_that_move_to_nvme_come_before_second_places() -> None:
    """Both have room alone: then there is one place, and no refusal."""
    units = records(*[COUNT] * 4)
    keys: dict[str, Any] = {"gradient_clipping": 1.0, "update": UpdateConfig(chunk_elements=4096)}
    free = plan_memory(units, config(everything("nvme"), **keys))
    host = plan_memory(units, config(everything("nvme"), rule(grad="nvme"), **keys)).tier_bytes(HOST)
    assert host < free.tier_bytes(HOST)
    budgets = BudgetConfig(host=host, nvme=free.tier_bytes(NVME))
    plan = plan_memory(units, config(everything("nvme"), **keys, budgets=budgets))
    assert not plan.versioned
    assert plan.tier_bytes(NVME) <= free.tier_bytes(NVME)


# --- the fewest moves that are enough ---

MOVES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=40
)  # bytes freed, and of new buffers


@given(MOVES, st.integers(0, 900))
def test_it_is_the_one_that_a_search_of_all_finds(moves: list[tuple[int, int]], enough: int) -> None:
    freed = list(accumulate((one for one, _ in moves), initial=0))
    added = list(accumulate((more for _, more in moves), initial=0))
    sizes = [800 - less + more for less, more in zip(freed, added, strict=True)]
    fitting = [number for number, size in enumerate(sizes) if size <= enough]
    expected = fitting[0] if fitting else len(moves) * (sizes[-1] < sizes[0])
    assert first_enough(sizes.__getitem__, freed, enough) == expected


def test_equal_units_take_a_few_plans_whether_or_not_they_fit() -> None:
    asked: list[int] = []

    def size_after(number: int) -> int:
        asked.append(number)
        return 20_000 - number + (5 if number else 0)

    freed = list(range(10_001))
    assert first_enough(size_after, freed, 12_345) == 7_660
    assert len(asked) <= 3
    asked.clear()
    assert first_enough(size_after, freed, 9_000) == 10_000
    assert len(asked) <= 4


# --- when the update may run ---


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"gradient_clipping": 0.0}, True),
        ({"gradient_clipping": 1.0}, False),
        ({"gradient_clipping": 0.0, "fp16": {"enabled": True}}, False),
        ({"gradient_clipping": 0.0, "offloadzero": {"update": {"on_nonfinite": "skip"}}}, False),
        ({"gradient_clipping": 0.0, "offloadzero": {"update": {"in_backward": False}}}, False),
        ({"gradient_clipping": 0.0, "offloadzero": {"update": {"in_backward": True}}}, True),
        ({"gradient_clipping": 0.0, "offloadzero": {"update": {"in_backward": "auto"}}}, True),
    ],
)
def test_updates_in_backward(block: dict[str, Any], expected: bool) -> None:
    assert updates_in_backward(load_config(block)) is expected


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping"),
        ({"gradient_clipping": 0.0, "fp16": {"enabled": True}}, "fp16"),
    ],
)
def test_updates_in_backward_are_refused_where_they_would_not_be_exact(
    block: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        updates_in_backward(load_config({**block, "offloadzero": {"update": {"in_backward": True}}}))
    assert caught.value.key == "offloadzero.update.in_backward"
