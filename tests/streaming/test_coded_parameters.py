"""Frozen parameters whose bytes are codes: they stream, and stay what their module's code expects."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadzero
from offloadzero.access.parameter import KeptView
from offloadzero.access.tensor import RemoteTensor
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.streaming.building.coded_parameters import attached_bytes, attached_tensors, move_attached
from tests.support.cases import each_pair
from tests.support.coded import VOCABULARY, CodedModel, Codes, bytes_of
from tests.support.training import PLACEMENTS, assert_same, make_config, one_step, run_engine

STORAGES = {"uint8": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}


def batch(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))


def train(engine: Any, steps: int = 3) -> list[float]:
    return [one_step(engine, batch(step)) for step in range(steps)]


def start(model: nn.Module, tmp_path: Path, placement: str = "nvme", **over: Any) -> Any:
    return offloadzero.initialize(model=model, config=make_config(placement, tmp_path, **over))[0]


def own(**block: Any) -> dict[str, Any]:
    return {"offloadzero": block}


@pytest.mark.parametrize(
    ("storage", "dtype", "checkpoints"), each_pair(STORAGES, ["bf16", "fp16", None], [False, True])
)
def test_codes_stream_as_bytes(storage: str, dtype: str | None, checkpoints: bool, tmp_path: Path) -> None:
    """Also those in the memory of floats, of which a precision would make others."""
    over = own(activation_checkpoints={}) if checkpoints else {}
    make = functools.partial(CodedModel, STORAGES[storage])
    outcomes = {
        placement: run_engine(make, train, make_config(placement, tmp_path, dtype=dtype, **over))
        for placement in PLACEMENTS
    }
    torch.manual_seed(0)
    before = {name: bytes_of(p) for name, p in make().named_parameters() if isinstance(p, Codes)}
    assert len(before) == 4
    for placement, outcome in outcomes.items():
        for name, codes in before.items():  # as floats they may be NaN
            assert torch.equal(outcome.weights.pop(name).reshape(-1).view(torch.uint8), codes), (
                placement,
                name,
            )
    for outcome in outcomes.values():
        assert_same(outcome, outcomes["resident"])
    losses = outcomes["nvme"].losses
    assert len(set(losses)) == len(losses)


def test_the_losses_are_those_of_the_model_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = CodedModel()
    expected = [model(batch(step)).item() for step in range(2)]
    engine = start(model, tmp_path, dtype=None)
    with torch.no_grad():
        assert [engine(batch(step)).item() for step in range(2)] == expected
    engine.close()


def test_a_parameter_keeps_its_class_its_attributes_and_its_bytes(tmp_path: Path) -> None:
    model = CodedModel()
    first, scales, before = model.codes()[0], model.codes()[0].scales, [bytes_of(p) for p in model.codes()]
    engine = start(model, tmp_path)
    train(engine)
    assert isinstance(first, Codes)
    assert type(first).__name__ == "Codes"  # libraries ask by the name
    assert first.scales is scales
    engine.module.to("cpu")  # by the class's own way it would take memory that is not there
    moved = first.to(torch.int16)
    assert not isinstance(moved, Codes)
    assert torch.equal(moved.to(torch.uint8).reshape(-1), before[0])
    shallow = copy.copy(first)
    assert type(shallow) is Codes
    assert shallow.scales is scales
    assert torch.equal(bytes_of(shallow), before[0])
    made = copy.deepcopy(engine.module)
    assert isinstance(made.codes()[0], Codes)
    assert made.codes()[0].scales is not scales
    assert torch.equal(made.codes()[0].scales.scales, scales.scales)
    assert made(batch(0)).item() == engine(batch(0)).item()
    assert all(torch.equal(bytes_of(p), b) for p, b in zip(model.codes(), before, strict=True))
    engine.restore_model()
    assert type(first) is Codes
    assert first.scales is scales
    assert all(torch.equal(bytes_of(p), b) for p, b in zip(model.codes(), before, strict=True))


def test_a_context_that_keeps_codes_past_autograd_keeps_no_memory(tmp_path: Path) -> None:
    """Checkpointed or not: the graph would else hold all codes of the model on the device until backward."""
    engine = start(CodedModel(), tmp_path)
    train(engine, 1)
    loss = engine(batch(0))
    nodes = [loss.grad_fn]
    for node in nodes:
        nodes += [one for one, _ in node.next_functions if one is not None and one not in nodes]
    kept = [node.codes for node in nodes if hasattr(node, "codes")]
    assert len(kept) == 3  # the first product needs no gradient
    away = [codes for codes in kept if type(codes) is not Tensor]  # others are still on the device
    assert away
    assert all(isinstance(codes, RemoteTensor) for codes in away)
    assert not any(isinstance(codes, KeptView) for codes in kept)
    engine.backward(loss)
    engine.step()
    engine.close()


def test_scales_go_to_the_device_and_are_told_beside_the_plan(tmp_path: Path) -> None:
    model = CodedModel()
    scales = model.codes()[0].scales
    assert scales.second is not None
    of_one = [scales.scales, scales.table, scales.second.scales, scales.second.table]
    assert {id(each.tensor) for each in attached_tensors(model.codes()[0])} == {id(one) for one in of_one}
    assert attached_bytes(model) == 4 * sum(one.nbytes for one in of_one)
    engine = start(model, tmp_path)
    table = engine.memory_table()
    assert "scales of coded weights, beside the plan" in table, table
    engine.close()
    move_attached(model, torch.device("meta"))
    assert all(each.tensor.is_meta for codes in model.codes() for each in attached_tensors(codes))


# --- what cannot stream ---


class Shared(nn.Parameter):
    """Its bytes are in an attribute as well."""

    codes: Tensor

    def __new__(cls, data: Tensor) -> Shared:
        made: Shared = torch.Tensor._make_subclass(cls, data, False)
        made.codes = made.data
        return made


class Wrapper(Tensor):
    """Has no memory: it is made of another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [one.inner if isinstance(one, Wrapper) else one for one in args]
        return Wrapper(func(*values)) if func is torch.ops.aten.detach.default else NotImplemented


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda data: Shared(data), ["Shared of CodedLinear", "its attribute codes"]),
        (
            lambda data: nn.Parameter(Wrapper(data), requires_grad=False),
            ["Wrapper of CodedLinear", "made of other"],
        ),
    ],
    ids=["shared", "wrapper"],
)
@pytest.mark.parametrize("uses_init", [False, True], ids=["ordinary", "under Init"])
def test_memory_that_would_stay_is_refused_by_name(
    make: Any, named: list[str], uses_init: bool, tmp_path: Path
) -> None:
    config = make_config("host", tmp_path)
    with offloadzero.zero.Init(config_dict_or_path=config, enabled=uses_init):
        model = CodedModel()
        model.blocks[2].base.weight = make(torch.zeros(8, 4, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"blocks\.2\.base\.weight") as raised:
        offloadzero.initialize(model=model, config=config)
    assert all(text in str(raised.value) for text in [*named, "4 bits"]), raised.value


def test_memory_that_an_object_of_the_module_has_is_refused(tmp_path: Path) -> None:
    """As that of bitsandbytes' int8 weights after their first forward."""
    model = CodedModel()
    base = model.blocks[1].base
    base.state = type("State", (), {})()
    base.state.codes = base.weight.data
    with pytest.raises(ConfigError, match=r"blocks\.1\.base\.weight.*its module's state\.codes"):
        start(model, tmp_path)


def test_a_file_of_codes_without_scales_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = start(CodedModel(), tmp_path)
    losses = train(engine)
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointError, match=r"blocks\.0\.base\.weight and 3 more .* are codes"):
            save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    after = train(engine)
    engine.close()
    torch.manual_seed(0)
    again = start(CodedModel(), tmp_path)
    again.load_checkpoint(tmp_path / "saved", load_module_strict=False)
    assert train(again) == after != losses
    again.close()


class Doubled(nn.Parameter):
    """A parameter with a method of its own, under a name that torch's tensors have, too."""

    def t(self) -> Tensor:
        return torch.Tensor.t(self) * 2


class UsesDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = Doubled(torch.randn(8, 8), requires_grad=False)
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w.t() + self.a(x)).square().mean()


@pytest.mark.parametrize("placement", ["resident", "host", "nvme"])
def test_a_class_of_parameter_keeps_its_own_methods(placement: str, tmp_path: Path) -> None:
    model, x = UsesDoubled(), torch.randn(4, 8)
    expected = model(x).item()
    engine, *_ = offloadzero.initialize(model=model, config=make_config(placement, tmp_path, dtype=None))
    assert engine(x).item() == pytest.approx(expected, rel=1e-6)
    engine.close()


def test_weights_of_8_bit_floats_are_not_cast(tmp_path: Path) -> None:
    """Their module reads them with scales; without the bf16 block they stay as they are."""
    model = UsesDoubled()
    model.w = Doubled(torch.ones(8, 8, dtype=torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConfigError, match=r"w = 'float8_e4m3fn': .*without bf16 and fp16"):
        offloadzero.initialize(model=model, config=make_config("nvme", tmp_path))
