"""`"placement": "auto"`: what moves up first, that budgets hold and more never hurts, and that it is invisible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import offloadzero
from offloadzero import zero
from offloadzero.activations import store as activations
from offloadzero.config import OffloadConfig, load_config
from offloadzero.config.schema import (
    ActivationConfig,
    BatchConfig,
    BudgetConfig,
    PlacementConfig,
    UnitConfig,
    UpdateConfig,
)
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import BudgetError
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.engine_plan import expect_room
from offloadzero.planning.machine import cores_beside_launching
from offloadzero.planning.memory_plan import MemoryPlan, plan_memory
from offloadzero.planning.placement import choose_placement, describe_placement
from offloadzero.planning.placement_rules import Placement
from offloadzero.update.records import Record, make_record
from offloadzero.update.specs.adam import ADAM
from tests.planning.test_memory_plan import records
from tests.support.models import Stack, features
from tests.support.tiny import TinyModel
from tests.support.tiny import tokens as token_ids
from tests.support.training import assert_same, make_config, merge, run_engine

PARAM, MASTER, M1, M2, SCALES, GRAD = ADAM.kinds
DEVICE, HOST, NVME = TierName
STATES = (MASTER, M1, M2)
SPEED = {DEVICE: 2, HOST: 1, NVME: 0}
MIB, GIB = 1 << 20, 1 << 30
COUNT = 40_960  # a multiple of what records are rounded to
PLENTY = {DEVICE: 1 << 50, HOST: 1 << 50}


def auto(device: int | None = None, host: int | None = None, **keys: Any) -> OffloadConfig:
    base: dict[str, Any] = {
        "placement": PlacementConfig(auto=True),
        "budgets": BudgetConfig(device=device, host=host),
        "nvme_paths": (Path("/nowhere"),),
        "update": UpdateConfig(chunk_elements=4096, num_chunks_in_flight=3),
    }
    return OffloadConfig(**{**base, **keys})


def unbounded(config: OffloadConfig) -> OffloadConfig:
    return replace(config, budgets=BudgetConfig())


def all_in(units: Sequence[Record], tier: TierName) -> dict[tuple[int, SegmentKind], TierName]:
    kinds = {unit.index: [*unit.layout, *([GRAD] if unit.num_trainable else [])] for unit in units}
    return {(index, kind): tier for index, found in kinds.items() for kind in found}


def on_device(units: Sequence[Record], placement: Placement) -> list[int]:
    """Records that are wholly on the device."""
    device = all_in(units, DEVICE)
    return [u.index for u in units if all(placement[s] is DEVICE for s in device if s[0] == u.index)]


def choose(units: Sequence[Record], config: OffloadConfig) -> tuple[Placement, MemoryPlan]:
    placement = choose_placement(units, config, PLENTY)
    return placement, plan_memory(units, config, placement=placement)


# --- what moves first ---


def test_whole_records_move_to_the_device_in_the_order_of_the_forward() -> None:
    units = records(*[COUNT] * 8)
    record_bytes = 14 * COUNT  # bf16 parameter and gradient, 16-bit remainder, two fp32 moments
    leases = 3 * 2 * COUNT + 2 * 2 * COUNT  # the unit in use and two ahead; two gradients
    for num in range(6):
        placement, plan = choose(units, auto(leases + num * record_bytes, GIB))
        assert on_device(units, placement) == list(range(num))
        assert {placement[i, kind] for i in range(num, 8) for kind in (PARAM, *STATES, GRAD)} == {HOST}
        assert plan.unit_lease_bytes == 3 * 2 * COUNT
        almost, _ = choose(units, auto(leases + num * record_bytes - 1, GIB))
        assert on_device(units, almost) == list(range(num - 1))


def test_the_resident_unit_comes_first() -> None:
    units = records(*[COUNT] * 3, resident=(2,))
    placement, _ = choose(units, auto(26 * COUNT, GIB))
    assert on_device(units, placement) == [2]


def test_parameters_move_to_the_host_before_gradients_before_states() -> None:
    units = records(*[COUNT] * 12)
    config = auto(10 * COUNT, 0, gradient_clipping=1.0)
    smallest = plan_memory(units, unbounded(config), placement=all_in(units, NVME)).tier_bytes(HOST)
    seen = []
    for host in range(smallest, smallest + 14 * 12 * COUNT, COUNT):
        placement, plan = choose(units, replace(config, budgets=BudgetConfig(10 * COUNT, host)))
        assert plan.tier_bytes(HOST) <= host
        in_host = [kind for (_, kind), tier in placement.items() if tier is HOST]
        seen.append((in_host.count(PARAM), in_host.count(GRAD), sum(map(in_host.count, STATES))))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, 0, 0), (12, 12, 36))
    assert {params for params, grads, _ in seen if grads} == {12}
    assert {grads for _, grads, states in seen if states} == {12}
    assert len({params for params, _, _ in seen}) > 10
    assert len({states for _, _, states in seen}) > 30


def test_gradients_without_a_home_land_in_host_memory() -> None:
    units = records(*[COUNT] * 4)
    placement, plan = choose(units, auto(10 * COUNT, 13 * COUNT))
    assert {placement[i, GRAD] for i in range(4)} == {HOST}
    assert {placement[i, M1] for i in range(4)} == {NVME}
    assert not plan.grads_have_homes


def test_nvme_is_not_used_without_a_path() -> None:
    units = records(*[COUNT] * 4)
    placement, plan = choose(units, auto(26 * COUNT, GIB, nvme_paths=()))
    assert NVME not in placement.values()
    assert plan.tier_bytes(NVME) == 0
    with pytest.raises(BudgetError, match=r"budgets\.host(.|\n)*home: exp_avg "):
        choose(units, auto(26 * COUNT, MIB // 4, nvme_paths=()))


@pytest.mark.parametrize(("device", "host", "tier"), [(0, GIB, DEVICE), (GIB, 0, HOST), (0, 0, DEVICE)])
def test_what_cannot_fit_is_refused_with_the_table_of_the_smallest_placement(
    device: int, host: int, tier: TierName
) -> None:
    units = records(*[100 * COUNT] * 200)
    config = auto(device, host, gradient_clipping=1.0)
    smallest = unbounded(replace(config, max_live_parameters=0 if tier is DEVICE else None))
    needed = plan_memory(units, smallest, placement=all_in(units, NVME)).tier_bytes(tier)
    with pytest.raises(BudgetError, match=rf"budgets\.{tier.value}: (.|\n)*home: exp_avg_sq") as caught:
        choose(units, config)
    assert f"{tier.value}: {format_bytes(needed)} are needed, 0 B are allowed" in str(caught.value)
    assert "What would make it fit" in str(caught.value)


@pytest.mark.parametrize(
    ("device", "host", "paths", "expected"),
    [
        (0, GIB, ("/nowhere",), "smaller units (offloadzero.units.patterns), or a larger budget"),
        (
            GIB // 1024,
            0,
            ("/nowhere",),
            "a smaller offloadzero.update.chunk_elements, smaller units (offloadzero.units.patterns), "
            "or a larger budget",
        ),
        (
            GIB // 1024,
            0,
            (),
            "a directory on a drive (offloadzero.nvme_path), which auto then uses, "
            "smaller units (offloadzero.units.patterns), or a larger budget",
        ),
    ],
)
def test_a_refusal_advises_nothing_that_auto_has_done(
    device: int, host: int, paths: tuple[str, ...], expected: str
) -> None:
    """It advised segments on nvme where all were there, and where there was no directory to put them into."""
    with pytest.raises(BudgetError) as caught:
        choose(records(*[COUNT] * 4), auto(device, host, nvme_paths=tuple(map(Path, paths))))
    assert str(caught.value).endswith(f"What would make it fit: {expected}.")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (None, "What would make it fit: smaller units (offloadzero.units.patterns)."),
        (
            GIB,
            "What would make it fit: less of what auto may fill (offloadzero.budgets.host), "
            "or smaller units (offloadzero.units.patterns).",
        ),
    ],
)
def test_a_machine_with_too_little_is_told_what_auto_may_fill(budget: int | None, expected: str) -> None:
    units = records(*[COUNT] * 4)
    plan = choose(units, auto(10 * COUNT, GIB))[1]
    with pytest.raises(BudgetError) as caught:
        expect_room(plan, {HOST: 4096, DEVICE: GIB}, auto(10 * COUNT, budget))
    assert str(caught.value).endswith(expected)


def test_a_budget_of_nvme_is_kept_by_refusing() -> None:
    units = records(*[COUNT] * 4)
    config = replace(auto(), budgets=BudgetConfig(device=26 * COUNT, host=20 * COUNT, nvme=4096))
    with pytest.raises(BudgetError, match=r"budgets\.nvme"):
        choose(units, config)
    generous = replace(config, budgets=BudgetConfig(device=26 * COUNT, host=GIB, nvme=0))
    assert choose(units, generous)[1].tier_bytes(NVME) == 0


# --- what stands in for a budget ---


@pytest.mark.parametrize("num", [12, 64])
def test_half_of_a_free_device_and_nine_tenths_of_the_host(num: int) -> None:
    units = records(*[COUNT] * num)
    placement = choose_placement(units, auto(), {DEVICE: 10 * MIB, HOST: 10 * MIB})
    plan = plan_memory(units, auto(), placement=placement)
    assert 5 * MIB - 14 * COUNT < plan.tier_bytes(DEVICE) <= 5 * MIB
    assert plan.tier_bytes(HOST) <= 9 * MIB
    assert num == 12 or plan.tier_bytes(HOST) > 9 * MIB - 4 * COUNT
    assert (plan.tier_bytes(NVME) > 0) == (num == 64)


def test_memory_that_is_device_and_host_at_once_is_counted_once() -> None:
    units = records(*[COUNT] * 16)
    whole = plan_memory(units, auto(), placement=all_in(units, DEVICE)).tier_bytes(DEVICE)
    for budgets in ({}, {"device": whole // 4}, {"host": whole // 4}):
        config = auto(**budgets)
        placement = choose_placement(units, config, {HOST: whole})
        plan = plan_memory(units, config, placement=placement)
        assert plan.tier_bytes(DEVICE) + plan.tier_bytes(HOST) <= whole // 2
        assert plan.tier_bytes(NVME) > 0
    everything = choose_placement(units, auto(), {HOST: 2 * whole})
    assert set(everything.values()) == {DEVICE}


def test_checkpoints_of_activations_find_room_in_the_host() -> None:
    units = records(*[COUNT] * 32)
    config = auto(40 * COUNT, 200 * COUNT)
    _, full = choose(units, config)
    assert full.tier_bytes(HOST) > 190 * COUNT
    for tier, expected in ((DEVICE, 200), (HOST, 100), (NVME, 100)):
        _, plan = choose(units, replace(config, activation_checkpoints=ActivationConfig(tier=tier)))
        assert (expected - 10) * COUNT < plan.tier_bytes(HOST) <= expected * COUNT


def test_max_live_parameters_are_the_leases_where_no_budget_is() -> None:
    units = records(*[COUNT] * 16)
    config = auto(max_live_parameters=5 * COUNT)
    plan = plan_memory(units, config, placement=choose_placement(units, config, {DEVICE: 4 * MIB, HOST: GIB}))
    assert plan.unit_lease_bytes == 2 * 5 * COUNT
    assert 2 * MIB - 14 * COUNT < plan.tier_bytes(DEVICE) <= 2 * MIB
    # A device budget is shared between units and leases without them.
    budget = (10 + 4 * 14) * COUNT
    assert choose(units, auto(budget, GIB, max_live_parameters=100 * COUNT)) == choose(
        units, auto(budget, GIB)
    )


# --- properties ---


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Record], OffloadConfig, list[frozenset[int]]]:
    """Units of any size, dtype, layout; trained, frozen or both; some needed together."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    compact = dtype is torch.bfloat16 and draw(st.booleans())
    units = []
    for index in range(draw(st.integers(1, 7))):
        groups = draw(st.sampled_from([(0,), (0,), (0,), (None,), (0, None)]))
        params = []
        for number, group in enumerate(groups):
            size = draw(st.one_of(st.sampled_from([1, 511, 4097]), st.integers(1, 100_000)))
            params.append((f"w{number}", nn.Parameter(torch.zeros(1).expand(size)), group))
        name, resident = f"layers.{index}", draw(st.integers(0, 5)) == 0
        units.append(make_record(index, name, dtype, params, spec=ADAM, resident=resident, compact=compact))
    config = auto(
        gradient_clipping=float(draw(st.booleans())),
        batch=BatchConfig(gradient_accumulation_steps=draw(st.integers(1, 2))),
        units=UnitConfig(prefetch_units=draw(st.integers(1, 4))),
        update=UpdateConfig(chunk_elements=65_536 if compact else draw(st.sampled_from([4096, 65_536]))),
        max_live_parameters=draw(st.sampled_from([None, None, 0, 100_000])),
        nvme_paths=draw(st.sampled_from([(), (Path("/nowhere"),)])),
    )
    for unit in units:
        unit.grad_dtype = draw(st.sampled_from([dtype, torch.float32]))
    groups_of_units = st.lists(st.frozensets(st.integers(0, len(units) - 1)), max_size=2)
    return units, config, draw(groups_of_units)


SHARES = st.floats(-0.05, 1.05)


def between(case: Any, device_share: float, host_share: float) -> tuple[int, int]:
    """Bytes (device, host): 0 is what working buffers alone need there, 1 is everything that could be there."""
    units, config, together = case
    slow = NVME if config.nvme_paths else HOST
    small, in_host, in_device = (
        plan_memory(units, config, together=together, placement=resident_aware(units, tier))
        for tier in (slow, HOST, DEVICE)
    )
    device = small.tier_bytes(DEVICE), in_device.tier_bytes(DEVICE)
    host = small.tier_bytes(HOST), in_host.tier_bytes(HOST)
    shares = ((device, device_share), (host, host_share))
    one, other = (max(0, int(low + share * (high - low))) for (low, high), share in shares)
    return one, other


@given(cases(), SHARES, SHARES)
@hypothesis_settings(max_examples=100, deadline=None)
def test_budgets_hold_and_the_choice_is_the_same_each_time(
    case: Any, device_share: float, host_share: float
) -> None:
    units, config, together = case
    device, host = between(case, device_share, host_share)
    config = replace(config, budgets=BudgetConfig(device=device, host=host))
    placement = choose_placement(units, config, PLENTY, together=together)
    assert placement.keys() == all_in(units, DEVICE).keys()
    assert placement == choose_placement(list(units), config, PLENTY, together=together)
    tiers = {DEVICE, HOST, NVME if config.nvme_paths else HOST}
    assert set(placement.values()) <= tiers
    for unit in units:
        assert not unit.resident or placement[unit.index, PARAM] is DEVICE
    plans = [
        lambda homes=homes: plan_memory(units, config, together=together, placement=homes)
        for homes in (placement, resident_aware(units, DEVICE), *(resident_aware(units, t) for t in tiers))
    ]
    try:
        plan = plans[0]()
    except BudgetError:
        for other in plans[1:]:  # then neither do the simple ones fit
            with pytest.raises(BudgetError):
                other()
    else:
        assert plan.tier_bytes(DEVICE) <= device
        assert plan.tier_bytes(HOST) <= host


def resident_aware(units: Sequence[Record], tier: TierName) -> dict[tuple[int, SegmentKind], TierName]:
    stays = {(unit.index, PARAM): DEVICE for unit in units if unit.resident}
    return {**all_in(units, tier), **stays}


@given(cases(), SHARES, SHARES, SHARES, SHARES)
@hypothesis_settings(max_examples=100, deadline=None)
def test_more_of_a_budget_never_moves_a_segment_to_a_slower_tier(
    case: Any, device_share: float, host_share: float, other_device_share: float, other_host_share: float
) -> None:
    units, config, together = case
    one, other = between(case, device_share, host_share), between(case, other_device_share, other_host_share)
    few, many = ({DEVICE: choice(one[0], other[0]), HOST: choice(one[1], other[1])} for choice in (min, max))

    def check(
        one: tuple[OffloadConfig, Mapping[TierName, int]], other: tuple[OffloadConfig, Mapping[TierName, int]]
    ) -> None:
        few, many = (choose_placement(units, *given, together=together) for given in (one, other))
        slower = [segment for segment in few if SPEED[many[segment]] < SPEED[few[segment]]]
        assert not slower

    budgets = [BudgetConfig(device=given[DEVICE], host=given[HOST]) for given in (few, many)]
    check(*((replace(config, budgets=given), PLENTY) for given in budgets))
    check(*((config, {DEVICE: 2 * given[DEVICE], HOST: given[HOST] * 10 // 9}) for given in (few, many)))
    check(*((config, {HOST: 2 * sum(given.values())}) for given in (few, many)))


@given(cases(), SHARES)
@hypothesis_settings(max_examples=60, deadline=None)
def test_as_many_records_as_fit_are_on_the_device(case: Any, device_share: float) -> None:
    """Against every number of records tried, where the bytes never fall as more of them are on the device.

    (Units that are there together need less room when some of them are resident.)
    """
    units, config, together = case
    config = replace(config, max_live_parameters=config.max_live_parameters or 0)
    free = 2 * between((units, config, together), device_share, 0)[0]
    order = sorted(units, key=lambda unit: (not unit.resident, unit.index))

    def device_bytes(num: int) -> int:
        homes = {**resident_aware(units, HOST), **all_in(order[:num], DEVICE)}
        return plan_memory(units, config, together=together, placement=homes).tier_bytes(DEVICE)

    needed = [device_bytes(num) for num in range(len(units) + 1)]
    assume(needed == sorted(needed))
    fitting = [num for num, num_bytes in enumerate(needed) if num_bytes <= free // 2]
    placement = choose_placement(units, config, {DEVICE: free, HOST: GIB}, together=together)
    first = order[: max(fitting, default=0)]
    wholly = on_device(units, placement)
    assert wholly == [u.index for u in units if u in first or (u.resident and not u.num_trainable)]


@given(cases())
@hypothesis_settings(max_examples=50, deadline=None)
def test_everything_is_on_the_device_when_it_fits(case: Any) -> None:
    units, config, together = case
    needed = plan_memory(units, config, placement=all_in(units, DEVICE)).tier_bytes(DEVICE)

    def choose_with(num_bytes: int) -> set[TierName]:
        budgets = BudgetConfig(device=num_bytes, host=0)
        return set(
            choose_placement(units, replace(config, budgets=budgets), PLENTY, together=together).values()
        )

    assert choose_with(needed) == {DEVICE}
    if any(not unit.resident or unit.num_trainable for unit in units):
        assert choose_with(needed - 1) != {DEVICE}


# --- the configuration ---


def test_auto_is_a_placement_and_wins_over_the_offload_blocks() -> None:
    config = load_config({"offloadzero": {"placement": "auto", "budgets": {"device": "1GiB"}}})
    assert config.placement == PlacementConfig(auto=True)
    blocks = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "ratio": 0.3},
    }
    both = load_config({"zero_optimization": blocks, "offloadzero": {"placement": "auto"}})
    assert both.placement == PlacementConfig(auto=True)
    assert both.nvme_paths == (Path("/tmp"),)
    assert any("ratio change nothing" in line for line in both.notices)
    assert not any("ratio" in line for line in config.notices)


# --- the engine ---


def loop(engine: Any) -> list[float]:
    losses = []
    make_input = token_ids if isinstance(engine.module, TinyModel) else features
    for seed in range(3 * engine.gradient_accumulation_steps()):
        loss = engine(make_input(seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def engine_config(
    directory: Path, placement: str, budgets: Mapping[str, int], **options: Any
) -> dict[str, Any]:
    own = {"budgets": dict(budgets), "update": {"chunk_elements": 4096, "num_chunks_in_flight": 3}}
    return merge(make_config(placement, directory, **options), {"offloadzero": own})


def planned(make_model: Any, config: dict[str, Any]) -> MemoryPlan:
    engine, *_ = offloadzero.initialize(model=make_model(), config=config)
    plan: MemoryPlan = engine.optimizer.runtime.plan
    engine.close()
    return plan


def stack() -> nn.Module:
    return Stack(num_blocks=12)


def tied() -> nn.Module:
    return TinyModel(num_blocks=8)


@pytest.mark.parametrize(
    ("make_model", "options"),
    [
        (stack, {}),
        (tied, {"clipping": 0.5, "accumulation": 2}),
        (stack, {"dtype": "fp16"}),
        (tied, {"dtype": None}),
    ],
    ids=["fp32 states", "tied, clipping, accumulation", "fp16", "tied, fp32"],
)
def test_the_numbers_are_those_of_the_resident_run(
    tmp_path: Path, make_model: Any, options: dict[str, Any]
) -> None:
    resident = run_engine(make_model, loop, make_config("resident", tmp_path, **options))
    smallest = planned(make_model, make_config("nvme", tmp_path, **options))
    largest = planned(make_model, make_config("resident", tmp_path, **options))
    hosted = planned(make_model, engine_config(tmp_path, "nvme", {}, **options))
    device, host = smallest.tier_bytes(DEVICE), hosted.tier_bytes(HOST)
    room, states = largest.tier_bytes(DEVICE) - device, smallest.tier_bytes(NVME)
    mixes = set()
    for device_share, host_share in ((0.0, 0.0), (0.0, 0.4), (0.5, 0.05), (0.7, 1.0), (1.0, 0.0)):
        budgets = {"device": int(device + device_share * room), "host": int(host + host_share * states)}
        config = engine_config(tmp_path, "auto", budgets, **options)
        plan = planned(make_model, config)
        mixes.add(frozenset(plan.placement.items()))
        if device_share == 0.5:
            assert {tier for (_, kind), tier in plan.placement.items() if kind is not GRAD} == set(TierName)
            wholly = [i for i in range(8) if {plan.placement[i, k] for k in (PARAM, M1, GRAD)} == {DEVICE}]
            assert 2 < len(wholly) < 8
        assert_same(run_engine(make_model, loop, config), resident)
    assert len(mixes) == 5


def test_it_works_with_activation_checkpoints_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 1)
    budgets = {"device": 40_000, "host": 400_000}
    config = engine_config(tmp_path, "auto", budgets)
    resident = run_engine(stack, loop, make_config("resident", tmp_path))
    assert planned(stack, config).tier_bytes(HOST) > 380_000, "the states alone would take all of it"
    config = merge(config, {"offloadzero": {"activation_checkpoints": {"tier": "host"}}})
    assert_same(run_engine(stack, loop, config), resident)


def test_without_budgets_a_small_model_is_resident_and_the_table_says_so(tmp_path: Path) -> None:
    engine, *_ = offloadzero.initialize(model=Stack(), config=make_config("auto", tmp_path))
    assert (
        "placement auto: 6 of 6 units updated on the device (100 % of the parameters), 0 in host memory"
        in (engine.memory_table())
    )
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_the_table_counts_units_and_parameters() -> None:
    units = records(3 * COUNT, COUNT, COUNT, COUNT)
    homes = {
        **all_in(units[:1], DEVICE),
        **all_in(units[1:3], HOST),
        **all_in(units[3:], NVME),
        (3, M1): HOST,
    }
    assert describe_placement(units, homes) == (
        "1 of 4 units updated on the device (50 % of the parameters), 2 in host memory, 1 wholly or partly on nvme"
    )


def test_under_init_parameters_wait_on_nvme_when_there_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path | None] = []

    def spill(*_: object, directory: Path | None, **__: object) -> None:
        places.append(directory)

    monkeypatch.setattr(zero, "spill", spill)
    for config, expected in (
        (make_config("auto", tmp_path), tmp_path),
        ({"offloadzero": {"placement": "auto"}}, None),
    ):
        with zero.Init(config_dict_or_path=config):
            TinyModel(width=80)
        assert set(places) == {expected}
        places.clear()


def test_the_thread_that_launches_keeps_a_core() -> None:
    assert cores_beside_launching(range(2)) == cores_beside_launching(range(3)) == ()
    assert cores_beside_launching([0, 3, 4, 9]) == (3, 4, 9)
    assert cores_beside_launching(range(16)) == tuple(range(2, 16))
