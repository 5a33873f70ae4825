"""Every optimizer under the engine: the same bits wherever its states live, near torch's own, through checkpoints.

The runs are those of tests/support/parity.py, which does the same for AdamW at greater length. One entry of KINDS, one
of `REFERENCES` in tests/support/training.py, and an optimizer is in all tests of this file.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero import zero
from offloadzero.arithmetic import device_math
from offloadzero.arithmetic.torch_steps import FP32_SCRATCH_BYTES
from offloadzero.checkpoint import states
from offloadzero.checkpoint.format.meta import Meta
from offloadzero.config import load_config
from offloadzero.config.keys import OWN_KEYS
from offloadzero.config.schema import OPTIMIZERS
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.optim import CPULion
from offloadzero.planning import engine_plan
from offloadzero.update import spec as optimizer_spec
from offloadzero.update.spec import AnySpec, UpdateForm
from offloadzero.update.specs import SPECS, spec_of_type
from tests.support.parity import Case, run_case
from tests.support.tiny import TinyModel, all_states, make_engine, settings, tokens
from tests.support.tiny import train as train_tiny
from tests.support.training import (
    PLACEMENTS,
    REFERENCES,
    Config,
    Outcome,
    assert_same,
    merge,
)

NUM_STEPS = int(os.environ.get("OFFLOADZERO_TEST_OPTIMIZER_STEPS", "3"))  # between placements
NUM_PLAIN_STEPS = 20
PLAIN_TOLERANCE = 0.002


@dataclass(frozen=True)
class Kind:
    """An optimizer: in the JSON, and as torch has it. Weights decay in every run."""

    type: str
    own_params: dict[str, Any]
    states: tuple[str, ...]
    make: Callable[..., torch.optim.Optimizer]  # one that offload() takes, with the same params
    foreign_option: tuple[str, Any]  # an argument that it does not have

    @property
    def params(self) -> dict[str, Any]:
        return {**self.own_params, "weight_decay": 0.1}

    @property
    def spec(self) -> AnySpec:
        return spec_of_type(self.type)

    @property
    def block(self) -> Config:
        return {"optimizer": {"type": self.type, "params": self.params}}


KINDS = {
    kind.type: kind
    for kind in (
        Kind("AdamW", {"lr": 1e-3}, ("exp_avg", "exp_avg_sq"), torch.optim.AdamW, ("momentum", 0.9)),
        Kind("Lion", {"lr": 1e-4, "betas": [0.9, 0.98]}, ("exp_avg",), CPULion, ("eps", 1e-8)),
        Kind(
            "Adagrad",
            {"lr": 5e-3, "lr_decay": 0.01, "initial_accumulator_value": 1e-4},
            ("sum",),
            torch.optim.Adagrad,
            ("betas", [0.9, 0.99]),
        ),
        Kind(
            "SGD",
            {"lr": 0.02, "momentum": 0.9, "dampening": 0.1},
            ("momentum_buffer",),
            torch.optim.SGD,
            ("eps", 1e-8),
        ),
    )
}
OTHERS = {
    name: kind for name, kind in KINDS.items() if name != "AdamW"
}  # tests/engine/test_parity.py has the rest of it
any_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
other_kind = pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)


def placement_of(name: str, kind: Kind) -> Any:
    """A placement of tests/support/training.py, with the states of another optimizer in the place of Adam's."""
    homes = PLACEMENTS[name]
    if isinstance(homes, str):
        return homes
    adams = ("exp_avg", "exp_avg_sq")
    return [
        {key: tier for key, tier in rule.items() if key not in adams}
        | {state: rule[adam] for state, adam in zip(kind.states, adams, strict=False) if adam in rule}
        for rule in homes
    ]


def config_over(kind: Kind, placement: str, **over: Any) -> Config:
    """What makes tests/support/parity.py's configuration one of `kind`."""
    base = {**kind.block, "offloadzero": {"placement": placement_of(placement, kind)}}
    return merge(base, over)


def run(kind: Kind, case: Case, placement: str, directory: Path, **over: Any) -> Outcome:
    return run_case(case, placement, directory, num_steps=NUM_STEPS, **config_over(kind, placement, **over))


# --- the numbers ---

CASES = [Case(1, 0.0, False), Case(2, 0.5, True)]


@other_kind
@pytest.mark.parametrize("case", CASES, ids=str)
def test_placement_changes_no_bit(kind: Kind, case: Case, tmp_path: Path) -> None:
    """Updates in backward without clipping; in the other case clipping, accumulation and activation checkpoints."""
    expected = run(kind, case, "resident", tmp_path)
    for placement in ("host", "nvme", "mixed"):
        assert_same(run(kind, case, placement, tmp_path), expected)


@other_kind
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_placement_changes_no_bit_of_other_dtypes(kind: Kind, dtype: str, tmp_path: Path) -> None:
    over: Config = {"bf16": {"enabled": False}}
    if dtype == "fp16":
        over["fp16"] = {"enabled": True, "loss_scale": 128.0}
    case = Case(1, 0.5, False)
    expected = run(kind, case, "resident", tmp_path, **over)
    assert_same(run(kind, case, "mixed", tmp_path, **over), expected)


@other_kind
def test_states_and_weights_are_those_of_torch_in_fp32(kind: Kind, tmp_path: Path) -> None:
    """Of single precision only the order of additions differs, in gradients of a few thousand terms."""
    torch.manual_seed(1)
    model, plain = TinyModel(), TinyModel()
    plain.load_state_dict(model.state_dict())
    its = REFERENCES[kind.type](plain.parameters(), **kind.params)
    config = settings(tmp_path, placement="nvme", bf16=None, **kind.block)
    ours, optimizer = offloadzero.offload(model, kind.make(model.parameters(), **kind.params), config)
    for step in range(4):
        for net, stepped in ((ours, optimizer), (plain, its)):
            net(tokens(step)).backward()
            stepped.step()
            stepped.zero_grad()
    for (name, expected), param in zip(plain.named_parameters(), ours.parameters(), strict=True):
        for state in kind.states:
            torch.testing.assert_close(
                optimizer.state[param][state], its.state[expected][state], rtol=1e-4, atol=1e-6
            )
        torch.testing.assert_close(
            zero.safe_get_full_fp32_param(param), expected.data, rtol=1e-3, atol=1e-5, msg=name
        )
    optimizer.close()


# --- the update on a device ---

LAYOUTS = [(torch.bfloat16, torch.int16), (torch.float16, torch.float32), (torch.float32, None)]


def buffers_of(
    kind: Kind, param_dtype: torch.dtype, master_dtype: torch.dtype | None, grad_dtype: torch.dtype
) -> dict[SegmentKind, Tensor]:
    """Every magnitude, zeros of both signs, subnormal numbers, infinities and NaN among them."""
    count = 3000
    generator = torch.Generator().manual_seed(3)

    def values(seed_scale: float) -> Tensor:
        exponents = torch.randint(-140, 10, (count,), generator=generator)
        made = torch.ldexp(torch.randn(count, generator=generator) * seed_scale, exponents)
        made[:6] = torch.tensor([0.0, -0.0, 1e-42, -1e-42, 1.0, -1.0])
        return made

    weights, grad = values(1.0), values(1.0).to(grad_dtype)
    weights[100:200], grad[100:150] = -0.0, -0.0
    grad[150:200] = 0.0
    grad[200:203] = torch.tensor([math.inf, -math.inf, math.nan]).to(grad_dtype)
    buffers = {SegmentKind.PARAM: torch.empty(count, dtype=param_dtype), SegmentKind.GRAD: grad}
    if master_dtype is not None:
        buffers[SegmentKind.MASTER] = torch.empty(count, dtype=master_dtype)
    device_math.split_master(weights, buffers[SegmentKind.PARAM], buffers.get(SegmentKind.MASTER))
    for state in kind.states:
        buffers[SegmentKind(state)] = values(1.0) if kind.type != "Adagrad" else values(1.0).abs()
        buffers[SegmentKind(state)][100:150] = 0.0 if kind.type == "Adagrad" else -0.0
    return buffers


@other_kind
@pytest.mark.parametrize("dtypes", LAYOUTS, ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_torch_operations_give_the_kernels_bits(kind: Kind, dtypes: Any, grad_dtype: torch.dtype) -> None:
    """In pieces, in scratch that is full of NaN; but for the sign and the payload of a NaN."""
    compare_forms(kind, {}, dtypes, grad_dtype)


@pytest.mark.parametrize("options", [{"nesterov": True, "dampening": 0.0}, {"momentum": 0.0}], ids=str)
def test_torch_operations_of_other_momenta(options: dict[str, Any]) -> None:
    compare_forms(KINDS["SGD"], options, LAYOUTS[0], torch.bfloat16)


def compare_forms(kind: Kind, options: dict[str, Any], dtypes: Any, grad_dtype: torch.dtype) -> None:
    config = load_config(kind.block).optimizer
    assert config is not None
    hyper = kind.spec.hyper({**config.params, **options}, "group")
    native = buffers_of(kind, *dtypes, grad_dtype)
    ours = {name: value.clone() for name, value in native.items()}
    scratch = torch.full((5 * 128 * FP32_SCRATCH_BYTES + 100,), 0xFF, dtype=torch.uint8)
    for step in (1, 2):
        kind.spec.step(native, hyper=hyper, step=step, grad_scale=0.37, num_threads=1)
        kind.spec.step(ours, hyper=hyper, step=step, grad_scale=0.37, form=UpdateForm.TORCH, scratch=scratch)
        lost = device_math.join_master(native[SegmentKind.PARAM], native.get(SegmentKind.MASTER)).isnan()
        for name, expected in native.items():
            mine, nan = ours[name], lost if not expected.is_floating_point() else expected.isnan()
            if expected.is_floating_point():
                assert torch.equal(mine.isnan(), nan), name
            same = mine.view(torch.uint8).view(mine.numel(), -1) == expected.view(torch.uint8).view(
                mine.numel(), -1
            )
            assert bool((same.all(1) | nan).all()), (name, step)


UPDATED = {**{name: (kind, "fp32") for name, kind in KINDS.items()}, "compact": (KINDS["AdamW"], "compact")}


@pytest.mark.parametrize("name", UPDATED)
def test_records_on_a_device_are_updated_in_the_planned_scratch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch operations, in pieces: the bits of the kernels."""
    kind, layout = UPDATED[name]

    def trained() -> tuple[list[float], dict[str, Tensor], str]:
        engine = make_engine(settings(placement="device", state_layout=layout, **kind.block))
        losses = train_tiny(engine, num_steps=3)
        found = losses, all_states(engine), engine.memory_table()
        assert engine.optimizer.runtime.store.device.free_bytes == 0
        engine.close()
        return found

    losses, resident, table = trained()
    assert "update scratch" not in table
    monkeypatch.setattr(engine_plan, "device_form", lambda *_: UpdateForm.TORCH)
    monkeypatch.setattr(optimizer_spec, "SCRATCH_ELEMENTS", 4096)
    other_losses, other_states, other_table = trained()
    assert re.search(r"update scratch +" + ("48\\.00 KiB" if layout == "fp32" else ""), other_table)
    assert other_losses == losses
    for state, expected in resident.items():
        assert torch.equal(other_states[state], expected), state


@other_kind
def test_the_form_of_an_optimizer_without_a_fused_kernel(kind: Kind) -> None:
    assert kind.spec.choose_form(torch.device("cpu")).form is UpdateForm.NATIVE
    choice = kind.spec.choose_form(torch.device("cuda"))
    assert (choice.form, choice.reason) == (UpdateForm.TORCH, f"{kind.type} has no fused kernel")


# --- checkpoints and state dicts ---


@other_kind
def test_a_checkpoint_continues_with_the_same_bits(kind: Kind, tmp_path: Path) -> None:
    """Written from NVMe, read into host memory, and into other units."""
    first, second = (tmp_path / name for name in ("first", "second"))
    for directory in (first, second):
        directory.mkdir()
    engine = make_engine(settings(first, **kind.block))
    train_tiny(engine, num_steps=2)
    engine.save_checkpoint(first)
    expected = [train_tiny(engine, num_steps=2, first_seed=2), engine.optimizer.state_dict()]
    engine.close()
    meta = json.loads((first / "global_step2" / "meta.json").read_text())
    assert meta["optimizer"] == kind.type
    engine = make_engine(settings(second, placement="host", units={"min_leaf_elements": 10}, **kind.block))
    engine.load_checkpoint(first)
    found = [train_tiny(engine, num_steps=2, first_seed=2), engine.optimizer.state_dict()]
    assert found[0] == expected[0]
    assert_same_states(found[1], expected[1])
    engine.close()


def assert_same_states(one: Any, other: Any) -> None:
    assert one["state"].keys() == other["state"].keys()
    for number, values in one["state"].items():
        assert values.keys() == other["state"][number].keys()
        for name, value in values.items():
            assert torch.equal(value, other["state"][number][name]), (number, name)


@any_kind
def test_a_checkpoint_of_another_optimizer_gives_its_weights_only(kind: Kind, tmp_path: Path) -> None:
    other = next(candidate for name, candidate in KINDS.items() if name != kind.type)
    saving = make_engine(settings(placement="host", **kind.block))
    train_tiny(saving, num_steps=1)
    saving.save_checkpoint(tmp_path)
    weights = {name: value.clone() for name, value in saving.module.state_dict().items()}
    saving.close()
    engine = make_engine(settings(placement="host", **other.block))
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    message = (
        f"saved with {kind.spec.name}, the engine has {other.spec.name}: pass load_optimizer_states=False"
    )
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
    engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert all(torch.equal(value, weights[name]) for name, value in engine.module.state_dict().items())
    engine.close()


@pytest.mark.parametrize("name", [None, "Adam", "Ada"])
def test_a_checkpoint_names_its_optimizer_and_an_unknown_one_is_refused(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = states.encode_meta

    def encode_otherwise(meta: Meta) -> bytes:
        values = json.loads(encode(meta))
        del values["optimizer"]
        return json.dumps(values if name is None else {**values, "optimizer": name}).encode()

    monkeypatch.setattr(states, "encode_meta", encode_otherwise)
    engine = make_engine(settings(placement="host"))
    train_tiny(engine, num_steps=1)
    engine.save_checkpoint(tmp_path)
    saved = copy.deepcopy(engine.optimizer.state_dict())
    train_tiny(engine, num_steps=1)
    if name != "Adam":
        known = ", ".join(spec.name for spec in SPECS)
        reason = rf"optimizer = 'Ada'; this package knows {known}\." if name else "optimizer is missing"
        with pytest.raises(CheckpointError, match=rf"meta\.json: {reason}"):
            engine.load_checkpoint(tmp_path)
    else:
        engine.load_checkpoint(tmp_path)
        assert_same_states(engine.optimizer.state_dict(), saved)
    engine.close()


@other_kind
def test_state_dicts_go_to_torch_and_back(kind: Kind, tmp_path: Path) -> None:
    """And training goes on with the same numbers: in this engine from either, in torch within rounding."""
    torch.manual_seed(1)
    model = TinyModel()
    initial = copy.deepcopy(model.state_dict())
    config = settings(tmp_path, placement="nvme", bf16=None, **kind.block)
    model, optimizer = offloadzero.offload(model, kind.make(model.parameters(), **kind.params), config)
    take_steps(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["state"][0]) == set(kind.spec.state_keys)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = take_steps(model, optimizer, range(3, 5))
    optimizer.close()

    plain = TinyModel()
    plain.load_state_dict(weights)
    its = REFERENCES[kind.type](plain.parameters(), **kind.params)
    its.load_state_dict(copy.deepcopy(saved))
    torchs = copy.deepcopy(its.state_dict())
    assert take_steps(plain, its, range(3, 5)) == pytest.approx(expected, rel=1e-4)

    for state_dict in (saved, torchs):
        again = TinyModel()
        again.load_state_dict(initial)
        again, optimizer = offloadzero.offload(again, kind.make(again.parameters(), **kind.params), config)
        again.load_state_dict(weights)
        optimizer.load_state_dict(state_dict)
        assert take_steps(again, optimizer, range(3, 5)) == expected
        optimizer.close()


def take_steps(model: nn.Module, optimizer: Any, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(tokens(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_sgd_without_momentum_takes_what_torch_saves_of_it(tmp_path: Path) -> None:
    """No state, or one without a tensor; training goes on as torch's does, also when a script sets a momentum."""
    torch.manual_seed(1)
    model, plain = TinyModel(), TinyModel()
    plain.load_state_dict(model.state_dict())
    its = torch.optim.SGD(plain.parameters(), lr=0.05)
    config = settings(tmp_path, placement="nvme", bf16=None)
    ours, optimizer = offloadzero.offload(model, torch.optim.SGD(model.parameters(), lr=0.05), config)
    losses = [take_steps(plain, its, range(2)), take_steps(ours, optimizer, range(2))]
    saved = its.state_dict()
    assert not any(saved["state"].values())
    optimizer.load_state_dict(saved)
    without_tensors = {number: {"momentum_buffer": None} for number in saved["param_groups"][0]["params"]}
    optimizer.load_state_dict({**saved, "state": without_tensors})  # as older versions of torch have it
    for stepped in (its, optimizer):
        stepped.param_groups[0].update(momentum=0.9, nesterov=True)
    losses = [
        losses[0] + take_steps(plain, its, range(2, 5)),
        losses[1] + take_steps(ours, optimizer, range(2, 5)),
    ]
    optimizer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@other_kind
def test_states_are_read_written_and_begun_anew(kind: Kind, tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path, **kind.block))
    fresh = copy.deepcopy(engine.optimizer.state_dict())
    train_tiny(engine, num_steps=2)
    param = next(engine.module.parameters())
    for name in kind.states:
        value = zero.safe_get_full_optimizer_state(param, name)
        assert value is not None
        assert bool(value.any())
        zero.safe_set_full_optimizer_state(param, value * 2, name)
        assert torch.equal(engine.optimizer.state[param][name], value * 2)
        engine.optimizer.state[param][name].mul_(0.5)
        assert torch.equal(zero.safe_get_full_optimizer_state(param, name), value)
    allowed = f"optim_state_key = 'velocity': allowed: {', '.join(kind.states)}$"
    with pytest.raises(ConfigError, match=allowed):
        zero.safe_get_full_optimizer_state(param, "velocity")
    engine.optimizer.load_state_dict({**engine.optimizer.state_dict(), "state": {}})
    assert_same_states(
        {
            "state": {
                n: {k: s[k] for k in kind.states if k in s}
                for n, s in engine.optimizer.state_dict()["state"].items()
            }
        },
        {"state": {n: {k: s[k] for k in kind.states if k in s} for n, s in fresh["state"].items()}},
    )
    engine.close()


# --- what is refused ---


@other_kind
def test_what_has_no_meaning_is_refused(kind: Kind, tmp_path: Path) -> None:
    """The model is as it was."""

    def refused(message: str, *, over: Config | None = None, **own: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            make_engine(merge(settings(tmp_path, **kind.block, **own), over or {}))

    refused(
        rf"offloadzero\.state_layout = 'compact': {kind.type} has the fp32 layout only",
        state_layout="compact",
    )
    key, value = kind.foreign_option
    arguments = ", ".join(OPTIMIZERS[kind.type])
    refused(
        rf"optimizer\.params\.{key} = {re.escape(str(value))}: {kind.type} takes {arguments}$",
        over={"optimizer": {"params": {key: value}}},
    )
    foreign = next(s for other in KINDS.values() for s in other.states if s not in kind.states)
    refused(
        rf"offloadzero\.placement\.{foreign} = 'nvme': states of {kind.type}: {', '.join(kind.states)}$",
        placement={foreign: "nvme"},
    )


@other_kind
def test_torch_optimizers_that_are_refused(kind: Kind, tmp_path: Path) -> None:
    model = TinyModel()
    config = settings(tmp_path, **kind.block)
    with pytest.raises(ConfigError, match=r"optimizer\.param_groups\[0\]\.maximize = True: allowed: False"):
        offloadzero.offload(model, kind.make(model.parameters(), **kind.params, maximize=True), config)
    stepped = kind.make(model.parameters(), **kind.params)
    model(tokens(0)).backward()
    stepped.step()
    with pytest.raises(ConfigError, match="it has states already: pass a new optimizer"):
        offloadzero.offload(model, stepped, config)

    class Mine(kind.make):  # type: ignore[name-defined,misc]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    with pytest.raises(ConfigError, match="its own step would never run"):
        offloadzero.offload(model, Mine(model.parameters(), **kind.params), config)
    with pytest.raises(ConfigError, match=r"optimizer = 'NAdam': allowed: torch\.optim\.Adam, .*CPUAdam"):
        offloadzero.offload(model, torch.optim.NAdam(model.parameters()), config)


def test_options_that_the_first_step_would_refuse_are_refused_at_the_start() -> None:
    model = TinyModel()
    groups = [{"params": list(model.parameters()), "betas": (0.9,)}]
    with pytest.raises(ConfigError, match=r"optimizer\.param_groups\[0\]\.betas = \(0\.9,\): two numbers"):
        make_engine(settings(placement="host"), model, model_parameters=groups)
    make_engine(settings(placement="host"), model).close()  # it was not taken over


def test_states_that_torch_makes_before_the_first_step(tmp_path: Path) -> None:
    """As they were made they are begun in their homes, and their memory is free; changed ones are refused."""
    config = settings(tmp_path)
    model = TinyModel()
    params = {"lr": 0.1, "initial_accumulator_value": 0.3}
    changed = torch.optim.Adagrad(model.parameters(), **params)
    changed.state[model.emb.weight]["sum"][3, 4] = 0.5
    with pytest.raises(ConfigError, match="it has states already: pass a new optimizer"):
        offloadzero.offload(model, changed, config)
    origin = torch.optim.Adagrad(model.parameters(), **params)
    model, optimizer = offloadzero.offload(model, origin, config)
    assert not origin.state
    for param in model.parameters():
        assert torch.equal(optimizer.state[param]["sum"], torch.full(param.shape, 0.3))
    optimizer.close()


@other_kind
def test_a_state_dict_of_another_optimizer_is_refused(kind: Kind, tmp_path: Path) -> None:
    other = KINDS["AdamW"] if len(kind.states) == 1 and kind.states[0] != "exp_avg" else None
    values = {"velocity": torch.zeros(1)} if other is None else {"exp_avg": torch.zeros(1), "step": 1}
    engine = make_engine(settings(tmp_path, **kind.block))
    state_dict = copy.deepcopy(engine.optimizer.state_dict())
    state_dict["state"][1] = values
    message = f"a state of {kind.type} has {', '.join(kind.spec.state_keys)}; this one {', '.join(values)}"
    with pytest.raises(ConfigError, match=message):
        engine.optimizer.load_state_dict(state_dict)
    engine.close()


# --- the tables agree ---


def test_what_the_configuration_knows_has_a_spec_and_the_other_way_round() -> None:
    assert [name for spec in SPECS for name in spec.types] == list(OPTIMIZERS)
    named = {state.value for spec in SPECS for state in spec.states}
    fixed = {"param", "master", "states", "scales", "grad"}
    assert OWN_KEYS["offloadzero.placement"].keys() == named | fixed
    # tests/optim/test_muon.py has what takes parameters whole.
    specs = {s.name: s.states for s in SPECS if not s.takes_whole}
    assert {kind.spec.name: kind.states for kind in KINDS.values()} == specs
