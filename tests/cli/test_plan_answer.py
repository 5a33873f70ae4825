"""Does it fit, and if not, what would: random shapes, configurations, budgets and machines."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import offloadzero
from offloadzero.cli.plan.answer import Planner, Question, building_notes, in_memory
from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.engine import planned_model
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.memory.nvme import STRIPE_BYTES
from offloadzero.memory.swap_file import MARK_BYTES, SwapFile, remove_stale_files
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.engine_plan import MAX_BUDGET, memory_with, needed, with_keys
from offloadzero.planning.hardware import Memory, drive_bytes
from offloadzero.planning.model.shapes import ModelSource, read_model
from offloadzero.streaming.building.waiting_parameters import file_bytes
from offloadzero.update.spec import UpdateForm
from tests.planning.planners import PLENTY, planner_of
from tests.support.mapped import in_place_bytes
from tests.support.tiny import TinyModel, settings, train

NUM_EXAMPLES = int(os.environ.get("OFFLOADZERO_PLAN_EXAMPLES", "8"))
PAGE = 4096
CAMPAIGN: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),  # shrinking plans for minutes
}
MIB = 1 << 20


SHAPES = ("llama:64/3/4/101", "llama:32/1/1/900", "gpt:64/2/2/300", "gpt:128/4/4/50")

DEEP = "gpt:32/12/2/50"  # whose activations are more than its parameters


@functools.cache
def asker(model: str) -> tuple[Planner, list[Memory]]:
    """One for each model, which traces it once; the list holds the machine of the moment."""
    machine = [PLENTY]
    question = Question(
        model=read_model(model),
        memory_of=lambda config: machine[0] if config.nvme_paths else replace(machine[0], nvme=None),
        form_of=lambda _: UpdateForm.NATIVE,
        sequence=512 if model == DEEP else 16,
    )
    return Planner(question), machine


def planner(memory: Memory, *, model: str = SHAPES[0]) -> Planner:
    found, machine = asker(model)
    machine[0] = memory
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, Any], Memory]:
    """A shape, a configuration, and a machine that may be smaller or larger than what it needs."""
    model = draw(st.sampled_from(SHAPES))
    placement = draw(st.sampled_from(["device", "host", "auto", {"states": "host"}]))
    keys: dict[str, Any] = {
        "placement": placement,
        "gradient_clipping": draw(st.sampled_from([0.0, 1.0])),
        "gradient_accumulation_steps": draw(st.sampled_from([1, 3])),
        "train_micro_batch_size_per_gpu": draw(st.sampled_from([1, 2, 6])),
        "update": {"chunk_elements": draw(st.sampled_from([65_536, 1 << 20]))},
        "bf16": draw(st.sampled_from([{"enabled": True}, None])),
    }
    size = st.integers(0, 1 << draw(st.integers(16, 26)))
    budgets = {tier: draw(size) for tier in ("device", "host", "nvme") if draw(st.integers(0, 3)) == 0}
    if budgets:
        keys["budgets"] = budgets
    if draw(st.booleans()):
        keys["activation_checkpoints"] = {"tier": draw(st.sampled_from(["device", "host"]))}
    has_device = draw(st.booleans())
    memory = Memory(host=draw(size), device=draw(size) if has_device else None, nvme=draw(size))
    directory = "/tmp" if draw(st.booleans()) else None
    return model, settings(directory, **keys), memory


@given(cases())
@hypothesis_settings(max_examples=NUM_EXAMPLES, **CAMPAIGN)
def test_what_does_not_fit_gets_a_change_that_does(case: tuple[str, dict[str, Any], Memory]) -> None:
    model, source, memory = case
    asked = planner(memory, model=model)
    verdict = asked.verdict(source)
    if verdict.fits:
        answer = asked.answer(source)
        has = {
            TierName.HOST: memory.host,
            TierName.DEVICE: memory.device or 0,
            TierName.NVME: memory.nvme or 0,
        }
        needs = {tier: answer.planned.plan.tier_bytes(tier) for tier in TierName}
        if memory.device is None:
            needs = {
                TierName.HOST: needs[TierName.HOST] + needs[TierName.DEVICE],
                TierName.NVME: needs[TierName.NVME],
            }
        assert all(needs[tier] <= has[tier] for tier in needs)
        return
    change = asked.smallest_change(source)
    assert change.keys or change.more
    changed = with_keys(source, change.keys)
    enough = planner(memory_with(memory, change.more), model=model)
    assert enough.verdict(changed).fits, change.text()
    for tier, size in change.more.items():  # no byte more than it takes
        less = planner(memory_with(memory, {**change.more, tier: size - 1}), model=model)
        is_auto = load_config(changed).placement.auto  # places by what there is
        assert is_auto or not less.verdict(changed).fits


@given(cases(), st.sampled_from(["device", "host", "nvme"]))
@hypothesis_settings(max_examples=NUM_EXAMPLES // 2, **CAMPAIGN)
def test_a_budget_is_raised_to_the_byte(case: tuple[str, dict[str, Any], Memory], tier: str) -> None:
    """On a machine that has everything a budget is the only thing to change, and a page less is refused."""
    model, source, _ = case
    own = {key: value for key, value in source["offloadzero"].items() if key != "budgets"}
    source = {**source, "offloadzero": {**own, "budgets": {tier: 0}}}
    asked = planner(replace(PLENTY, device=1 << 44), model=model)
    if asked.verdict(source).fits:
        return
    change = asked.smallest_change(source)
    key = f"offloadzero.budgets.{tier}"
    assert list(change.keys) == [key]
    assert not change.more
    value = change.keys[key]
    assert isinstance(value, int)
    assert value % PAGE == 0
    assert asked.verdict(with_keys(source, {key: value})).fits
    assert not asked.verdict(with_keys(source, {key: value - PAGE})).fits


def test_a_search_plans_on_one_cut_and_asks_for_few_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates that cut the model alike share its records; a refusal says how large a budget must be."""
    cuts: list[Any] = []
    cut_units = planned_model.cut_units
    monkeypatch.setattr(
        planned_model, "cut_units", lambda *args, **keys: cuts.append(keys) or cut_units(*args, **keys)
    )
    asked = planner_of(DEEP, sequence=16)
    budgets = {"device": "1KiB", "host": "1KiB", "nvme": "1KiB"}
    source = settings(tmp_path, placement={"states": "nvme"}, budgets=budgets)
    plans: list[Any] = []
    plan = asked.plan
    monkeypatch.setattr(asked, "plan", lambda *args, **keys: plans.append(args) or plan(*args, **keys))
    assert set(asked.smallest_change(source).keys) == {f"offloadzero.budgets.{tier}" for tier in budgets}
    assert len(cuts) == 1
    assert len(plans) <= 2 + 3 * len(budgets)


def test_the_engine_takes_the_change(tmp_path: Path) -> None:
    """What the engine refuses it trains with after the change that was named."""
    asked = planner_of(ModelSource("", TinyModel), sequence=8)
    for keys in (
        {"budgets": {"host": "64KiB"}},
        {"placement": "auto", "budgets": {"host": "1KiB", "device": "1KiB"}},
    ):
        source = settings(tmp_path, **{"placement": "host", **keys})
        with pytest.raises(BudgetError):
            offloadzero.initialize(model=TinyModel(), config=source)
        change = asked.smallest_change(source)
        assert not change.more
        engine, *_ = offloadzero.initialize(model=TinyModel(), config=with_keys(source, change.keys))
        assert len(train(engine, num_steps=2)) == 2
        engine.close()


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (TierName.DEVICE, {"offloadzero.activation_checkpoints": {}}),  # with the fewest leases already
        (TierName.HOST, {"offloadzero.placement": "auto"}),
    ],
)
def test_changes_by_what_is_short(tier: TierName, expected: dict[str, Any], tmp_path: Path) -> None:
    """One byte too little on the device costs computation first, on the host a slower tier."""
    source = settings(tmp_path, placement="host", train_micro_batch_size_per_gpu=1)
    source["zero_optimization"]["stage3_max_live_parameters"] = 0
    plenty = replace(PLENTY, device=1 << 44)
    answer = planner(plenty, model=DEEP).answer(source)
    has = needed(answer.planned.plan, answer.beside, plenty)[tier] - 1
    memory = replace(plenty, device=has) if tier is TierName.DEVICE else replace(plenty, host=has)
    asked = planner(memory, model=DEEP)
    assert asked.verdict(source).short == {tier: 1}
    assert asked.smallest_change(source).keys == expected


def test_a_change_names_no_key_that_has_its_value(tmp_path: Path) -> None:
    """It named `"placement": "auto"` beside the directory, where that was the placement."""
    keys: dict[str, Any] = {
        "placement": "auto",
        "train_micro_batch_size_per_gpu": 1,
        "activation_checkpoints": {},
    }
    source = settings(**keys, update={"chunk_elements": 4096})
    with_drive = with_keys(source, {"offloadzero.nvme_path": str(tmp_path), "offloadzero.placement": "nvme"})
    answer = planner(PLENTY, model=DEEP).answer(with_drive)
    host = needed(answer.planned.plan, answer.beside, PLENTY)[TierName.HOST]
    change = planner(replace(PLENTY, host=host + MIB), model=DEEP).smallest_change(source)
    assert change.keys == {"offloadzero.nvme_path": "offload-files"}


def test_fewer_leases_make_room_for_activations(tmp_path: Path) -> None:
    source = settings(
        tmp_path, placement="host", train_micro_batch_size_per_gpu=1, units={"prefetch_units": 6}
    )
    plenty = replace(PLENTY, device=1 << 44)
    answer = planner(plenty, model=DEEP).answer(source)
    largest = max(record.param_bytes for record in answer.planned.records if not record.resident)
    has = needed(answer.planned.plan, answer.beside, plenty)[TierName.DEVICE] - 2 * largest
    change = planner(replace(PLENTY, device=has), model=DEEP).smallest_change(source)
    assert change.keys == {"offloadzero.budgets.device": (has - answer.beside.device) // PAGE * PAGE}


def test_a_budget_is_raised_beside_the_one_change_that_needs_it(tmp_path: Path) -> None:
    """A budget of the device that is too small, on a device that is too small for the activations as well."""
    source = settings(
        tmp_path, placement="host", train_micro_batch_size_per_gpu=1, budgets={"device": "1KiB"}
    )
    plenty = replace(PLENTY, device=1 << 44)
    asked = planner(plenty, model=DEEP)
    enough = asked.smallest_change(source).keys
    checkpointed = with_keys(source, {"offloadzero.activation_checkpoints": {}})
    with_checkpoints = asked.smallest_change(checkpointed).keys
    answer = asked.answer(with_keys(checkpointed, with_checkpoints))
    has = needed(answer.planned.plan, answer.beside, plenty)[TierName.DEVICE]
    asked = planner(replace(PLENTY, device=has), model=DEEP)
    assert not asked.verdict(with_keys(source, enough)).fits
    change = asked.smallest_change(source)
    assert change.keys == {"offloadzero.activation_checkpoints": {}, **with_checkpoints}
    assert not change.more


@pytest.mark.parametrize("tokens", [8, None])
def test_a_change_that_is_no_configuration_is_none(tokens: int | None) -> None:
    """Nothing is repeated here that could be checkpointed, and the compact layout wants whole blocks of elements."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 500))

    source = settings(placement="host", train_micro_batch_size_per_gpu=2, update={"chunk_elements": 409_600})
    memory = Memory(host=300_000)
    asked = planner_of(ModelSource("", build), memory, sequence=tokens)
    with pytest.raises(ConfigError, match="chunk_elements"):
        asked.answer(with_keys(source, {"offloadzero.state_layout": "compact"}))
    change = asked.smallest_change(source)
    assert change.more
    enough = Planner(replace(asked.question, memory_of=lambda _: memory_with(memory, change.more)))
    assert enough.verdict(with_keys(source, change.keys)).fits


def test_more_memory_is_the_last_resort_and_the_figure_is_in_the_text(tmp_path: Path) -> None:
    asked = planner(Memory(host=10_000, device=10_000, nvme=10_000))
    change = asked.smallest_change(settings(tmp_path))
    assert set(change.more) <= set(TierName)
    assert change.more
    assert f"{change.more[TierName.NVME]:,} bytes) more of nvme" in change.text()


def test_a_model_that_takes_no_tokens_is_planned_without_activations(tmp_path: Path) -> None:
    from tests.support.models import Stack

    answer = planner_of(ModelSource("", Stack), sequence=8).answer(settings(tmp_path))
    assert answer.trace is None
    assert answer.untraced.startswith("Stack: ")
    assert answer.verdict.fits
    unasked = planner_of(ModelSource("", Stack)).answer(settings(tmp_path))
    assert unasked.untraced == "no --sequence is given"


def test_mistakes_are_those_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"offloadzero\.placement"):
        planner(PLENTY).answer(settings(placement="nowhere"))


@pytest.mark.parametrize("placement", [{"param": "nvme", "states": "host"}, "auto", "nvme"])
def test_parameters_that_wait_on_the_drive_are_counted_there(placement: Any, tmp_path: Path) -> None:
    """They wait in fp32, and their home may be half of that, or in memory."""
    directory = tmp_path / "swap"
    source = settings(directory, placement=placement)
    directory.mkdir()
    answer = planner(PLENTY, model="llama:256/2/4/1000").answer(source)
    build = read_model("llama:256/2/4/1000").build

    with offloadzero.zero.Init(config_dict_or_path=source):
        model = build()
    waiting = sum(file_bytes(model.parameters()).values())
    num_bytes = 4 * sum(param.numel() for param in build().parameters())
    assert waiting == pytest.approx(num_bytes, rel=0.01)
    planned = answer.planned.plan.tier_bytes(TierName.NVME)
    assert answer.waiting_bytes >= max(waiting, planned)
    if placement != "nvme":  # whose states are more than what waits
        assert answer.waiting_bytes == pytest.approx(num_bytes, rel=0.4)
        assert planned < waiting
    engine, *_ = offloadzero.initialize(model=model, config=source)
    engine.close()
    unasked = planner(PLENTY, model=SHAPES[0]).answer(settings(directory, placement="host"))
    assert unasked.waiting_bytes == 0


@pytest.mark.parametrize("placement", ["nvme", "host"])
@pytest.mark.parametrize("has", [1 << 40, 40 * MIB])
def test_a_whole_model_that_takes_more_than_training_is_said(
    placement: str, has: int, tmp_path: Path
) -> None:
    """A training that was found to fit was killed while its script built the model without zero.Init."""
    source = settings(tmp_path, placement=placement, gradient_clipping=0.0, update={"chunk_elements": 4096})
    question = planner(replace(PLENTY, host=has), model="llama:256/24/4/1000").question
    found = Planner(replace(question, process_bytes=MIB)).answer(source)
    whole = MIB + 4 * found.planned.num_parameters
    said = [line for line in building_notes(found) if "without zero.Init" in line]
    if placement == "host":  # whose states are more than the model is
        assert not said
        return
    assert found.verdict.fits
    text = f"before that: {format_bytes(whole)} with Python and torch, {format_bytes(has)} are available"
    too_few = f", {format_bytes(whole - has)} too few: it cannot be built so" if has < whole else ""
    assert said == [f"Built without zero.Init the whole model is in host memory {text}{too_few}."]


def test_what_can_be_built_in_no_way_does_not_fit(tmp_path: Path) -> None:
    """The largest model was one of which both ways were said to be impossible."""
    model = "llama:256/24/4/1000"
    source = settings(tmp_path, placement="nvme", gradient_clipping=0.0, update={"chunk_elements": 4096})
    found = planner(PLENTY, model=model).answer(source)
    takes, waiting, whole = (
        needed(found.planned.plan, found.beside, PLENTY),
        found.waiting_bytes,
        found.whole_bytes,
    )
    assert takes[TierName.NVME] < waiting
    assert takes[TierName.HOST] < whole
    for host, nvme, short in (
        (whole, takes[TierName.NVME], {}),
        (takes[TierName.HOST], waiting, {}),
        (whole - 1, waiting - 1, {TierName.NVME: 1}),
    ):
        memory = replace(PLENTY, host=host, nvme=nvme)
        assert planner(memory, model=model).answer(source).verdict.short == short


def test_auto_leaves_room_for_python_on_a_small_machine(tmp_path: Path) -> None:
    """It takes nine tenths of the host: where Python takes more than the last one, both together did not fit."""
    memory = Memory(host=200 * MIB, device=80 * MIB, nvme=1 << 30)
    asked = planner_of("llama:256/24/2/300", memory, sequence=16, process_bytes=60 * MIB)
    answer = asked.answer(settings(tmp_path, placement="auto", gradient_clipping=1.0))
    assert 120 * MIB < answer.planned.plan.tier_bytes(TierName.HOST) <= 140 * MIB
    assert answer.verdict.fits


# --- drives ---


def test_drives_hold_files_of_equal_size(tmp_path: Path) -> None:
    assert drive_bytes(()) is None
    assert drive_bytes([tmp_path], free=lambda _: 100 * MIB + MARK_BYTES) == 100 * MIB
    both = drive_bytes([tmp_path / "a", tmp_path / "b"], free=lambda _: 100 * MIB + MARK_BYTES)
    assert both == 2 * ((50 * MIB - MARK_BYTES // 2) // STRIPE_BYTES * STRIPE_BYTES), (
        "they share one filesystem"
    )
    assert drive_bytes([tmp_path], free=lambda _: 0) == 0


def test_what_a_killed_run_left_is_free_for_the_next_one(tmp_path: Path) -> None:
    def free(_: Path) -> int:
        return 100 * MIB + MARK_BYTES

    paths = [tmp_path]
    left, used = SwapFile(tmp_path), SwapFile(tmp_path)
    try:
        for file in (left, used):
            os.pwrite(file.descriptor, bytes(MIB), MARK_BYTES)
            os.fsync(file.descriptor)
        assert drive_bytes(paths, free=free) == 100 * MIB, "their processes live"
        os.close(left.descriptor)
        left.descriptor = -1
        assert drive_bytes(paths, free=free) == 101 * MIB + MARK_BYTES
        (tmp_path / "again").symlink_to(tmp_path)
        almost_two_stripes = 2 * (2 * STRIPE_BYTES + MARK_BYTES) - 2 - (MIB + MARK_BYTES)
        both = drive_bytes([tmp_path, tmp_path / "again"], free=lambda _: almost_two_stripes)
        assert both == 2 * STRIPE_BYTES, "a directory of two names has the file once"
        assert remove_stale_files(tmp_path) == [left.path], (
            "looking has not unlocked the other one, nor removed it"
        )
        assert drive_bytes(paths, free=free) == 100 * MIB
    finally:
        left.remove()
        used.remove()


def test_keys_are_set_in_a_copy() -> None:
    source = {"a": {"b": 1}, "c": 2}
    assert with_keys(source, {"a.b": 3, "a.d.e": 4, "c": None, "f": []}) == {
        "a": {"b": 3, "d": {"e": 4}},
        "c": None,
        "f": [],
    }
    assert source == {"a": {"b": 1}, "c": 2}
    assert (
        load_config(
            with_keys(settings(placement="host"), {"offloadzero.budgets.host": MAX_BUDGET})
        ).budgets.host
        == MAX_BUDGET
    )


@pytest.mark.parametrize(
    ("stage", "placement", "has_directory", "short"),
    [
        (3, "device", True, TierName.DEVICE),
        (3, "host", True, TierName.HOST),
        (3, "host", False, TierName.HOST),
        (3, "nvme", True, TierName.HOST),
        (2, "device", True, TierName.DEVICE),
        (1, {"states": "host"}, True, TierName.HOST),
    ],
)
def test_several_ranks_are_told_that_auto_fits(
    stage: int, placement: Any, has_directory: bool, short: TierName, tmp_path: Path
) -> None:
    source = settings(
        tmp_path if has_directory else None,
        placement=placement,
        zero_optimization={"stage": stage},
        gradient_clipping=1.0,
        update={"chunk_elements": 65_536},
        state_layout="compact",
    )
    plenty = replace(PLENTY, device=1 << 44)

    def asked(memory: Memory) -> Planner:
        question = Question(
            model=read_model("llama:256/8/4/101"),
            memory_of=lambda config: memory if config.nvme_paths else replace(memory, nvme=None),
            form_of=lambda _: UpdateForm.TORCH,
            num_ranks=2,
        )
        return Planner(question)

    taken = asked(plenty).answer(source).planned.plan.tier_bytes(short)
    memory = replace(plenty, **{short.value: taken // 2 if short.is_device else taken - 2 * MIB})
    change = asked(memory).smallest_change(source)
    assert change.keys == {"offloadzero.placement": "auto"}
    assert not change.more
    assert asked(memory).verdict(with_keys(source, change.keys)).fits


@pytest.mark.parametrize("kind", ["Llama", "Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("mode", ["auto", "in_place", "copy"])
def test_frozen_weights_that_are_read_in_place_take_nothing_of_the_drive(
    mode: str, kind: str, tmp_path: Path
) -> None:
    """Experts are in the files one by one, and in the model as one parameter, which is in no file."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    more = {
        "Llama": {},
        "Mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    }
    config = getattr(transformers, f"{kind}Config")(vocab_size=101, **sizes, **more[kind])
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    made.bfloat16().save_pretrained(tmp_path / "model")
    source = settings(tmp_path, frozen_weights=mode)
    question = planner(PLENTY).question
    model = replace(read_model(str(tmp_path / "model")), adapter_rank=4)
    answer = Planner(replace(question, model=model)).answer(source)
    with offloadzero.zero.Init(config_dict_or_path=source):
        real = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    # PEFT takes experts for linear, too.
    linear = "all-linear" if kind == "Llama" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = peft.get_peft_model(real, peft.LoraConfig(r=4, target_modules=linear))
    engine, *_ = offloadzero.initialize(model=adapted, config=source)
    planned = answer.planned
    assert planned.plan.table() == engine.optimizer.runtime.plan.table()
    assert planned.in_place_bytes == in_place_bytes(engine)
    assert (planned.in_place_bytes > 0) == (mode != "copy")
    said = f"{format_bytes(planned.in_place_bytes)} of frozen weights count as read in place, from the model's own"
    assert any(line.startswith(said) for line in building_notes(answer)) == (mode != "copy")
    if kind == "Llama":  # merged experts wait in the dtype in which they are made
        assert (answer.waiting_bytes < planned.in_place_bytes) == (mode != "copy")
    engine.close()


def test_what_a_directory_in_memory_holds_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files in /dev/shm a model of twice the memory fitted: half of it there, which is the same memory."""
    source = settings(tmp_path, placement="nvme")
    on_drive = planner(PLENTY).answer(source)
    on_host, on_nvme = (
        needed(on_drive.planned.plan, on_drive.beside, PLENTY)[tier]
        for tier in (TierName.HOST, TierName.NVME)
    )
    memory = Memory(host=on_host + on_nvme - 1, nvme=on_nvme)
    assert planner(memory).verdict(source).fits
    filesystems = {str(tmp_path): "tmpfs"}
    monkeypatch.setattr(
        "offloadzero.cli.plan.answer.describe_path", lambda path: {"filesystem": filesystems[path]}
    )
    asked = Planner(replace(planner(memory).question, in_memory=in_memory))
    answer = asked.answer(source)
    assert answer.verdict.short == {TierName.HOST: 1}
    said = f"In memory, and on no drive: {tmp_path} (tmpfs). The host's bytes have what lives there."
    assert said in building_notes(answer)
    planner(memory_with(memory, {TierName.HOST: 1}))
    assert asked.verdict(source).fits
    planner(memory)
    filesystems[str(tmp_path)] = "ext4"
    assert asked.verdict(source).fits
