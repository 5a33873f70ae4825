"""Muon: torch.optim.Muon's bits in every placement, beside AdamW, by DeepSpeed's JSON, through checkpoints."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.api.optimizer_checks import expect_whole_parameters
from offloadzero.arithmetic import device_math
from offloadzero.config import load_config
from offloadzero.config.schema import MeshConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.engine.planned_model import ModelPlanner
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.ranks.shard import ShardSpec
from offloadzero.update.records import all_ranges, make_record
from offloadzero.update.specs.muon import MOMENTUM_BUFFER, MUON
from tests.support.matrices import batch_of, matrices, split, take_steps
from tests.support.tiny import settings

pytestmark = pytest.mark.skipif(not MUON.classes, reason="torch.optim.Muon is there since torch 2.9")

PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": "host",
    "nvme": "nvme",
    "mixed": [
        {"param": "host", "momentum_buffer": "nvme"},
        {"units": "blocks.1", "states": "device", "param": "nvme"},
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "torch's defaults": {},
    "others": {
        "nesterov": False,
        "ns_steps": 3,
        "adjust_lr_fn": "match_rms_adamw",
        "momentum": 0.8,
        "weight_decay": 0.0,
    },
}
MUON_BLOCK = {
    "optimizer": {
        "type": "Muon",
        "params": {"lr": 0.02, "adam_lr": 2e-3, "momentum": 0.9, "weight_decay": 0.1, "ns_method": "gram"},
    }
}


def config_of(directory: Path, placement: Any, **keys: Any) -> dict[str, Any]:
    keys = {"bf16": None, "units": {"min_leaf_elements": 500}, **keys}
    return settings(directory, placement=placement, **keys)


# --- the numbers ---


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("loop", [{}, {"micro_batches": 2}, {"max_norm": 0.5}], ids=str)
def test_fp32_has_torchs_bits_wherever_its_states_live(
    loop: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, weights and momenta, also with gradients that are added up.

    Where torch clips them, it takes the norms of remote ones one by one, and the norm may differ in its last bit.
    """
    plain = matrices()
    its = torch.optim.Muon(plain.parameters(), lr=0.02, **options)
    expected = take_steps(plain, [its], range(3), **loop)
    weights: list[Tensor] = [param.detach() for param in plain.parameters()]
    momenta: list[Tensor] = [its.state[param]["momentum_buffer"] for param in plain.parameters()]
    for name, placement in PLACEMENTS.items():
        model = matrices()
        muon = torch.optim.Muon(model.parameters(), lr=0.02, **options)
        model, optimizer = offloadzero.offload(model, muon, config_of(tmp_path, placement))
        losses = take_steps(model, [optimizer], range(3), **loop)
        mine = [param.detach().clone() for param in model.parameters()]
        my_momenta = [optimizer.state[param]["momentum_buffer"].clone() for param in model.parameters()]
        optimizer.close()
        if "max_norm" in loop and name == "device":
            assert losses == pytest.approx(expected, rel=1e-3)
            expected, weights, momenta = losses, mine, my_momenta
        assert losses == expected, name
        assert all(map(torch.equal, mine, weights)), name
        assert all(map(torch.equal, my_momenta, momenta)), name


SHAPES = [(1, 511), (511, 1), (33, 65), (65, 33), (64, 64)]
LAYOUTS = [(torch.bfloat16, torch.int16), (torch.float16, torch.float32), (torch.float32, None)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", LAYOUTS, ids=str)
def test_a_step_is_torchs_of_the_fp32_master_weights(shape: tuple[int, int], dtypes: Any) -> None:
    """Of parameters in any dtype, with gradients in that dtype, in scratch that is full of NaN."""
    generator = torch.Generator().manual_seed(4)
    param_dtype, master_dtype = dtypes
    weights = nn.Parameter(torch.randn(shape, generator=generator))
    its = torch.optim.Muon([weights], lr=0.02)
    buffers = {
        SegmentKind.PARAM: torch.empty(shape, dtype=param_dtype),
        MOMENTUM_BUFFER: torch.zeros(shape),
    }
    if master_dtype is not None:
        buffers[SegmentKind.MASTER] = torch.empty(shape, dtype=master_dtype)
    device_math.split_master(
        weights.detach().flatten(),
        buffers[SegmentKind.PARAM].view(-1),
        buffers[SegmentKind.MASTER].view(-1) if master_dtype is not None else None,
    )
    scratch = torch.full((MUON.step_scratch_bytes(torch.Size(shape)),), 0xFF, dtype=torch.uint8)
    hyper = MUON.hyper(its.param_groups[0], "group")
    for step in (1, 2, 3):
        grad = torch.randn(shape, generator=generator).to(param_dtype)
        weights.grad = grad.float() * 0.37
        its.step()
        buffers[SegmentKind.GRAD] = grad
        MUON.step(buffers, hyper=hyper, step=step, grad_scale=0.37, scratch=scratch)
        master = buffers.get(SegmentKind.MASTER)
        found = device_math.join_master(buffers[SegmentKind.PARAM], master)
        assert torch.equal(found.view(shape), weights)
        assert torch.equal(buffers[MOMENTUM_BUFFER], its.state[weights]["momentum_buffer"])


def test_the_spec_needs_scratch_of_no_caller() -> None:
    shape = torch.Size((5, 3))
    buffers = {kind: torch.ones(shape) for kind in (SegmentKind.PARAM, SegmentKind.GRAD, MOMENTUM_BUFFER)}
    group = torch.optim.Muon([nn.Parameter(torch.ones(shape))]).param_groups[0]
    MUON.step(buffers, hyper=MUON.hyper(group, "group"), step=1, grad_scale=1.0)
    assert bool((buffers[SegmentKind.PARAM] != 1).all())


@pytest.mark.parametrize("bf16", [None, {"enabled": True}], ids=["fp32", "bf16"])
def test_deepspeeds_json_trains_matrices_by_muon_and_the_rest_by_adamw(bf16: Any, tmp_path: Path) -> None:
    """The same bits in every placement, with clipping and accumulation; in fp32 near torch's two optimizers."""
    plain = matrices(mixed=True)
    its = [
        torch.optim.Muon(split(plain)[0], lr=0.02, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(split(plain)[1], lr=2e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
    ]
    expected = take_steps(plain, its, range(4), mixed=True, micro_batches=2, max_norm=0.5)
    outcomes = []
    placements: dict[str, Any] = {
        **PLACEMENTS,
        "of both": {"states": "nvme", "momentum_buffer": "host", "exp_avg": "host"},
    }
    for name, placement in placements.items():
        config = config_of(
            tmp_path, placement, bf16=bf16, gradient_accumulation_steps=2, gradient_clipping=0.5, **MUON_BLOCK
        )
        engine, optimizer, *_ = offloadzero.initialize(model=matrices(mixed=True), config=config)
        assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, 2e-3]
        losses = []
        for seed in range(8):
            loss = engine(batch_of(seed, mixed=True))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        state = copy.deepcopy(optimizer.state_dict()["state"])
        assert sorted({*map(frozenset, ({*one} - {"master"} for one in state.values()))}, key=len) == [
            {"momentum_buffer"},
            {"exp_avg", "exp_avg_sq", "step"},
        ]
        weights = {key: value.clone() for key, value in engine.module.state_dict().items()}
        outcomes.append((name, losses, weights, state))
        engine.close()
    _, losses, weights, states = outcomes[0]
    for name, other_losses, other_weights, other_states in outcomes[1:]:
        assert other_losses == losses, name
        assert all(torch.equal(other_weights[key], value) for key, value in weights.items()), name
        assert_same_states(other_states, states)
    if bf16 is None:
        # Only AdamW's rounding and the norm's differ; the iteration in bf16 makes 2^-8 of a last bit at times.
        assert [loss / 2 for loss in losses] == pytest.approx(expected, rel=2e-3)


def assert_same_states(one: dict[int, dict[str, Tensor]], other: dict[int, dict[str, Tensor]]) -> None:
    assert one.keys() == other.keys()
    for number, values in one.items():
        assert values.keys() == other[number].keys()
        for name, value in values.items():
            assert torch.equal(value, other[number][name]), (number, name)


def test_muon_and_adamw_in_a_list_are_what_the_json_names(tmp_path: Path) -> None:
    """In either order, under initialize() too; schedules of both go on, and neither steps by itself any more."""
    config = config_of(tmp_path, "nvme")
    losses = []
    for order in (1, -1):
        model = matrices(mixed=True)
        muons, others = split(model)
        pair: list[Any] = [
            torch.optim.Muon(muons, lr=0.02, momentum=0.9),
            torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
        ]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in pair]
        model, optimizer = offloadzero.offload(model, pair[::order], config)
        losses.append([])
        for seed in range(3):
            losses[-1] += take_steps(model, [optimizer], range(seed, seed + 1), mixed=True)
            for schedule in schedules:
                schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 / 8, 2e-3 / 8])
        for one in pair:
            with pytest.raises(offloadzero.StateError, match=r"the states of this .* were offloaded"):
                one.step()
        optimizer.close()
    model = matrices(mixed=True)
    engine, optimizer, *_ = offloadzero.initialize(model=model, config={**config, **MUON_BLOCK})
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses.append([])
    for seed in range(3):
        loss = engine(batch_of(seed, mixed=True))
        engine.backward(loss)
        engine.step()
        schedule.step()
        losses[-1].append(loss.item())
    engine.close()
    assert losses[0] == losses[1] == losses[2]


def test_a_parameter_says_itself_whose_it_is_and_groups_keep_their_options(tmp_path: Path) -> None:
    model = matrices(mixed=True)
    model.square.weight.use_muon = False
    model.up.requires_grad_(False)
    named = {id(param): name for name, param in model.named_parameters()}
    decayed = [param for param in model.parameters() if param.ndim > 1]
    rest = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 0.5}]
    config = config_of(tmp_path, "host", **MUON_BLOCK)
    engine, optimizer, *_ = offloadzero.initialize(model=model, config=config, model_parameters=groups)
    found = [
        ([named[id(p)] for p in group["params"]], group["use_muon"], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    muons = [f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in (1, 3)]
    frozen_too = ["up.weight"]  # a group may hold a frozen one
    assert found[0] == ([*muons, *frozen_too, "row.weight"], True, 0.02, 0.1)
    assert found[1] == (["embed.weight", "square.weight"], False, 2e-3, 0.1)
    assert found[2][1:] == (False, 0.5, 0.0)
    before = model.up.weight.clone()
    loss = engine(batch_of(0, mixed=True))
    engine.backward(loss)
    engine.step()
    assert torch.equal(model.up.weight, before)
    assert {record.spec.name for record in optimizer.runtime.records} == {"Muon", "Adam"}
    engine.close()


# --- checkpoints, state dicts, plans ---


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    """Written from NVMe, read into host memory, and into other units; a weight that changed sides is missing."""

    def engine_in(name: str, placement: str, **keys: Any) -> offloadzero.Engine:
        directory = tmp_path / name
        directory.mkdir()
        config = config_of(directory, placement, bf16={"enabled": True}, **keys, **MUON_BLOCK)
        return offloadzero.initialize(model=matrices(mixed=True), config=config)[0]

    def train(engine: offloadzero.Engine, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            loss = engine(batch_of(seed, mixed=True))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engine = engine_in("first", "nvme")
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    expected = train(engine, range(2, 4)), copy.deepcopy(engine.optimizer.state_dict()["state"])
    engine.close()
    meta = json.loads((tmp_path / "global_step2" / "meta.json").read_text())
    assert meta["optimizer"] == "Muon"
    engine = engine_in("second", "host", units={"min_leaf_elements": 1})
    engine.load_checkpoint(tmp_path)
    assert train(engine, range(2, 4)) == expected[0]
    assert_same_states(engine.optimizer.state_dict()["state"], expected[1])
    engine.close()
    model = matrices(mixed=True)
    model.square.weight.use_muon = False
    (tmp_path / "third").mkdir()
    config = config_of(tmp_path / "third", "host", bf16={"enabled": True}, **MUON_BLOCK)
    engine, *_ = offloadzero.initialize(model=model, config=config)
    with pytest.raises(CheckpointError, match=r"missing square\.weight\.exp_avg; not in the model: nothing"):
        engine.load_checkpoint(tmp_path)
    engine.close()


def test_state_dicts_go_to_torch_and_back(tmp_path: Path) -> None:
    model = matrices()
    config = config_of(tmp_path, "nvme")
    model, optimizer = offloadzero.offload(model, torch.optim.Muon(model.parameters(), lr=0.02), config)
    take_steps(model, [optimizer], range(2))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(dict(model.state_dict()))
    expected = take_steps(model, [optimizer], range(2, 4))
    optimizer.close()
    plain = matrices(seed=2)
    plain.load_state_dict(weights)
    its = torch.optim.Muon(plain.parameters(), lr=1.0)
    its.load_state_dict(saved)
    torchs = copy.deepcopy(its.state_dict())
    assert take_steps(plain, [its], range(2, 4)) == expected
    again = matrices(seed=3)
    again, optimizer = offloadzero.offload(again, torch.optim.Muon(again.parameters(), lr=1.0), config)
    again.load_state_dict(weights)
    optimizer.load_state_dict(torchs)
    assert take_steps(again, [optimizer], range(2, 4)) == expected
    optimizer.close()


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_the_plan_is_what_the_engine_reserves(placement: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, placement, bf16={"enabled": True}, **MUON_BLOCK)
    planned = ModelPlanner(matrices(mixed=True)).plan(load_config(config), available={}).plan
    engine, optimizer, *_ = offloadzero.initialize(model=matrices(mixed=True), config=config)
    reserved = optimizer.reserved_bytes()
    assert {tier.value: planned.tier_bytes(tier) for tier in TierName} == reserved
    # 2 bytes of parameter, 2 of remainder and 4 of momentum for an element of a matrix, but for padding.
    of_muon = [record for record in optimizer.runtime.records if record.spec is MUON]
    for record in of_muon:
        assert {dtype for dtype, num in record.layout.values() if num != record.num_trainable} == set()
        sizes = {kind: dtype.itemsize for kind, (dtype, _) in record.layout.items()}
        assert sizes == {SegmentKind.PARAM: 2, SegmentKind.MASTER: 2, MOMENTUM_BUFFER: 4}
    engine.close()


def test_budgets_and_auto_know_the_states(tmp_path: Path) -> None:
    """A host budget that holds what auto puts there, and the rest on NVMe: the same losses."""
    expected: list[float] | None = None
    for own in (
        {"placement": "device"},
        {"placement": "auto", "budgets": {"device": "2MiB", "host": "1MiB"}},
    ):
        config = config_of(tmp_path, **own)  # type: ignore[arg-type]
        model = matrices()
        model, optimizer = offloadzero.offload(model, torch.optim.Muon(model.parameters(), lr=0.02), config)
        losses = take_steps(model, [optimizer], range(3))
        optimizer.close()
        expected = expected or losses
        assert losses == expected


# --- the layout ---


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("resident", [False, True])
def test_each_matrix_lies_whole_in_one_shard_and_on_the_grid_of_files(
    world_size: int, resident: bool
) -> None:
    shapes = [(65, 33), (33, 65), (1, 511), (300, 7), (64, 64), (33, 33)]
    params = [(f"w{n}", nn.Parameter(torch.empty(s)), 0) for n, s in enumerate(shapes)]
    frozen = ("frozen", nn.Parameter(torch.empty(5, 5)), None)
    kept: list[str] = []
    for rank in range(world_size):
        record = make_record(
            0,
            "unit",
            torch.bfloat16,
            [*params, frozen],
            spec=MUON,
            shard=ShardSpec(rank, world_size),
            resident=resident,
        )
        assert [slot.offset for slot in record.slots] == sorted(slot.offset for slot in record.slots)
        assert [slot.index for slot in record.slots] == list(range(len(shapes) + 1))
        assert record.slots[-1].name == "frozen"
        assert record.slots[-1].offset >= record.num_trainable
        ranges = [part for part in all_ranges(record) if part.start < part.stop]
        for part in ranges:
            assert part.shape is not None
            assert part.stop - part.start == part.shape.numel()
            assert part.start % 2048 == 0
        chunks = list(record.chunks(0, record.kept_trainable, 4096))
        assert [start for start, _ in chunks] == [part.start for part in ranges]
        assert all(
            stop % 2048 == 0 and stop - start <= record.most_chunk_elements(1) for start, stop in chunks
        )
        assert len(chunks) == record.num_chunks(4096)
        kept += [
            slot.name for slot, (a, b) in zip(record.trainable_slots, record.kept_parts, strict=True) if a < b
        ]
    assert sorted(kept) == sorted(name for name, _, _ in params)


# --- what is refused ---


def test_what_muon_cannot_train_is_refused_by_name(tmp_path: Path) -> None:
    """The model is as it was."""

    class Filters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Conv1d(3, 5, 3)

    def refused(
        message: str, params: dict[str, Any] | None = None, model: nn.Module | None = None, **own: Any
    ) -> None:
        config = config_of(tmp_path, own.pop("placement", "host"), **own)
        config["optimizer"] = {"type": "Muon", "params": params or {}}
        with pytest.raises(ConfigError, match=message):
            offloadzero.initialize(model=model or matrices(mixed=True), config=config)

    refused(
        r"filters\.weight\.shape = \(5, 3, 3\): Muon updates matrices: set `use_muon = False`",
        model=Filters(),
    )
    refused(
        "state_layout = 'compact': Muon has the fp32 layout only",
        state_layout="compact",
        bf16={"enabled": True},
    )
    refused("optimizer.params.dampening = 0.1: Muon takes lr, muon_lr, adam_lr", {"dampening": 0.1})
    refused(
        "per_head_muon = True: Muon of each attention head by itself is not built", {"per_head_muon": True}
    )
    refused(
        r"placement\.sum = 'nvme': states of Adam: exp_avg, exp_avg_sq; states of Muon: momentum_buffer",
        placement={"sum": "nvme"},
    )
    refused("optimizer.params.lr = 'auto'", {"lr": "auto"})
    model = matrices()
    group = {"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}
    for key, value in {
        "adjust_lr_fn": "mine",
        "ns_steps": 100,
        "ns_coefficients": (1.0, 2.0),
        "momentum": -1.0,
    }.items():
        with pytest.raises(ConfigError, match=key):
            MUON.hyper({**group, key: value}, "group")


def test_other_lists_of_optimizers_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "host")
    model = matrices(mixed=True)
    muons, others = split(model)
    muon, adamw = torch.optim.Muon(muons), torch.optim.AdamW(others)
    for pair in ([muon, muon], [adamw, adamw], [muon, adamw, adamw], []):
        with pytest.raises(ConfigError, match="one, or a Muon and an AdamW"):
            offloadzero.offload(model, pair, config)
    handle = adamw.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks"):
        offloadzero.offload(model, [muon, adamw], config)
    handle.remove()
    model(batch_of(0, mixed=True)).backward()
    adamw.step()
    with pytest.raises(ConfigError, match="'AdamW': it has states already: pass a new optimizer"):
        offloadzero.offload(model, [muon, adamw], config)


def test_a_group_stays_with_the_optimizer_that_has_its_states(tmp_path: Path) -> None:
    model = matrices(mixed=True)
    muons, others = split(model)
    pair = [torch.optim.Muon(muons), torch.optim.AdamW(others)]
    model, optimizer = offloadzero.offload(model, pair, config_of(tmp_path, "host"))
    saved = optimizer.state_dict()
    changed = {**saved, "param_groups": [dict(group) for group in saved["param_groups"]]}
    changed["param_groups"][0]["use_muon"] = False
    changed["param_groups"][0].update(betas=(0.9, 0.9), decoupled_weight_decay=True)
    message = r"param_groups\[0\] was Muon's when the model was offloaded, and is Adam's now"
    with pytest.raises(offloadzero.StateError, match="state_dict." + message):
        optimizer.load_state_dict(changed)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0].update(changed["param_groups"][0], params=muons)
    model(batch_of(0, mixed=True)).backward()
    with pytest.raises(offloadzero.StateError, match="optimizer." + message):
        optimizer.step()
    optimizer.close()


def test_tensor_parallel_ranks_have_no_whole_matrices(tmp_path: Path) -> None:
    config = load_config(config_of(tmp_path, "host"))
    for tensor_size in (None, 2):
        meshed = replace(config, mesh=MeshConfig((0, 1), tensor_size=tensor_size))
        with pytest.raises(ConfigError, match="a mesh without tensor parallelism for Muon"):
            expect_whole_parameters(MUON, meshed)
    expect_whole_parameters(MUON, replace(config, mesh=MeshConfig((0, 1), tensor_size=1)))
