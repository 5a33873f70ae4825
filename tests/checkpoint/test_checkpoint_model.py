"""What a checkpoint keeps of a model beside its parameters, and what it refuses to leave out."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadzero import CheckpointError
from offloadzero.checkpoint.module_states import may_overlap
from tests.support.checkpoints import Net, bits, contents, edit_meta, reseal, train, whole_state
from tests.support.tiny import all_states

# --- buffers that stand on unusual memory ---


class NetWith(Net):
    """With one more buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("extra", buffer)


def inference(shape: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


# The memory, as the saving run and the loading one make it, and how the first fills it.
MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "one element, expanded": lambda: torch.zeros(1).expand(5),
    "a row, expanded": lambda: torch.zeros(3, 1, 2).expand(3, 7, 2),
    "an expanded scalar": lambda: torch.zeros(()).expand(2, 3),
    "expanded and transposed": lambda: torch.zeros(3, 1).expand(3, 5).t(),
    "windows": lambda: torch.zeros(11).unfold(0, 3, 1),
    "a slice": lambda: torch.zeros(5, 6)[1::2, ::3],
    "nothing": lambda: torch.zeros(0, 1).expand(0, 4),
    "made in inference mode": lambda: inference((2, 3)),
    "expanded in inference mode": lambda: inference((2, 1)).expand(2, 3),
}


def fill(buffer: torch.Tensor) -> None:
    """Different values in all elements that are not one, in their own memory."""
    with torch.inference_mode():
        memory = buffer.as_strided((buffer.untyped_storage().nbytes() // 4,), (1,), 0)
        memory.copy_(torch.arange(1.0, len(memory) + 1))


@pytest.mark.parametrize("what", MEMORY)
def test_a_buffer_is_restored_in_its_memory(engine_of: Callable[..., Any], tmp_path: Path, what: str) -> None:
    engine = engine_of(NetWith(MEMORY[what]()))
    fill(engine.module.extra)
    engine.save_checkpoint(tmp_path / "saved")
    other = engine_of(NetWith(MEMORY[what]()), seed=1)
    memory = other.module.extra
    other.load_checkpoint(tmp_path / "saved")
    assert other.module.extra is memory
    assert bits(other.module.extra) == bits(engine.module.extra)
    assert train(other, 1) == train(engine, 1)


@pytest.mark.parametrize("what", ["one element, expanded", "a row, expanded", "windows"])
def test_a_value_that_the_memory_cannot_hold_is_refused_before_the_first_write(
    engine_of: Callable[..., Any], tmp_path: Path, what: str
) -> None:
    shape = MEMORY[what]().shape
    engine = engine_of(NetWith(torch.rand(shape)))
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    other = engine_of(NetWith(MEMORY[what]()), seed=1)
    before = whole_state(other)
    with pytest.raises(
        CheckpointError, match=r"buffers\.safetensors: extra has different values in elements"
    ):
        other.load_checkpoint(tmp_path / "saved")
    assert whole_state(other) == before
    train(other, 1)


def test_which_views_may_overlap() -> None:
    """Against the addresses of all elements."""
    base = torch.arange(4096)
    for sizes in ((3, 4), (2, 3, 2), (4, 1), (1,), (), (5, 0), (2, 2, 2, 2)):
        for strides in itertools.product(range(5), repeat=len(sizes)):
            addresses = base.as_strided(sizes, strides).flatten().tolist()
            if len(set(addresses)) != len(addresses):
                assert may_overlap(base.as_strided(sizes, strides)), (sizes, strides)
    for ordinary in (
        base.view(64, 64),
        base.view(64, 64).t(),
        base.view(64, 64)[::2, 1:5],
        base[0],
        base[:0],
    ):
        assert not may_overlap(ordinary)


@pytest.mark.parametrize(
    ("buffer", "what"),
    [
        (lambda: torch.eye(3).to_sparse(), r"extra is of layout torch\.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), r"extra is of layout torch\.sparse_csr"),
        (lambda: torch.empty(3, device="meta"), "extra is on the meta device"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_buffer_without_plain_values_is_refused(
    engine_of: Callable[..., Any], tmp_path: Path, buffer: Callable[[], torch.Tensor], what: str
) -> None:
    engine = engine_of(Net())
    engine.save_checkpoint(tmp_path / "saved", tag="without")
    engine.module.register_buffer("extra", buffer())  # after it: the meta device cannot be moved from
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointError, match=what):
            save(tmp_path / "other")
        assert not (tmp_path / "other").exists()
    train(engine, 1)


# --- parameters that are not the engine's ---


def replace_weight(model: nn.Module) -> None:
    model.blocks[0].weight = nn.Parameter(torch.ones(17, 17))


def add_module(model: nn.Module) -> None:
    model.blocks[1].probe = nn.Linear(3, 3)


def replace_module(model: nn.Module) -> None:
    model.blocks[1] = nn.Linear(17, 17)


def untie(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (replace_weight, r"blocks\.0\.weight \(another one was replaced by it\) \(1 in all\)"),
        (add_module, r"blocks\.1\.probe\.weight, blocks\.1\.probe\.bias \(2 in all\)"),
        (replace_module, r"blocks\.1\.weight \(another.*\), blocks\.1\.bias \(another.*\) \(2 in all\)"),
        (untie, r"head\.weight \(1 in all\)"),
    ],
)
def test_parameters_that_came_after_the_engine_are_refused(
    engine_of: Callable[..., Any], tmp_path: Path, change: Callable[[nn.Module], None], names: str
) -> None:
    engine = engine_of(Net())
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    kept = contents(tmp_path / "saved")
    change(engine.module)
    before = whole_state(engine)
    for use in (
        lambda: engine.save_checkpoint(tmp_path / "saved", tag="other"),
        lambda: engine.save_16bit_model(tmp_path / "saved"),
        lambda: engine.load_checkpoint(tmp_path / "saved"),
        lambda: engine.load_checkpoint(tmp_path / "saved", load_module_strict=False, load_module_only=True),
    ):
        with pytest.raises(
            CheckpointError,
            match=rf"added to the model after its engine was made: {names}.*make a new engine",
        ):
            use()
    assert contents(tmp_path / "saved") == kept
    assert whole_state(engine) == before


@pytest.mark.parametrize(
    "name", ["embed.weight.exp_avg", "embed.weight.scales", "scale.exp_avg", "scale.exp_avg_e2m5"]
)
def test_a_parameter_with_the_name_of_a_state_is_refused(
    engine_of: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    model = Net()
    model._parameters[name] = nn.Parameter(torch.ones(17))  # register_parameter() takes no dots
    engine = engine_of(model)
    with pytest.raises(CheckpointError, match=rf"{name} is a parameter, and by its name a state of "):
        engine.save_checkpoint(tmp_path / "saved", tag="a")
    assert not (tmp_path / "saved").exists()
    engine.save_16bit_model(tmp_path / "weights")


def test_a_parameter_with_the_name_of_another_optimizer_s_state_comes_back(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engines = []
    for seed in range(2):
        model = Net()
        model._parameters["embed.weight.sum"] = nn.Parameter(torch.full((17,), float(seed)))
        model._parameters["scale.exp_avg"] = nn.Parameter(torch.ones(17))
        engines.append(engine_of(model, seed=seed))
    saved, loaded = engines
    # Without the frozen parameter its states are nobody's names.
    saved.save_checkpoint(tmp_path / "saved", tag="a", exclude_frozen_parameters=True)
    loaded.load_checkpoint(tmp_path / "saved", tag="a")
    assert whole_state(loaded)["steps"] == whole_state(saved)["steps"]
    assert all(torch.equal(all_states(loaded)[key], value) for key, value in all_states(saved).items())


def test_frozen_parameters_that_a_checkpoint_was_saved_without_stay_as_the_model_has_them(
    engine_of: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They need no load_module_strict=False, under which others could be missing too; a trained one is missing."""
    caplog.set_level(logging.INFO, "offloadzero.checkpoint")

    def net(scale: float, *, trained: bool = False) -> Net:
        model = Net()
        model.scale = nn.Parameter(torch.full((17,), scale), requires_grad=trained)
        return model

    saved, loaded = engine_of(net(1.0)), engine_of(net(2.0), seed=1)
    train(saved, 1)
    saved.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    loaded.load_checkpoint(tmp_path / "saved")
    assert whole_state(loaded)["steps"] == whole_state(saved)["steps"]
    assert loaded.module.scale.tolist() == [2.0] * 17
    assert torch.equal(loaded.module.embed.weight, saved.module.embed.weight)
    assert "saved without 1 frozen parameters, which stay as they are" in caplog.text
    with pytest.raises(CheckpointError, match="missing scale, "):
        engine_of(net(2.0, trained=True)).load_checkpoint(tmp_path / "saved")


def test_a_frozen_parameter_that_came_later_can_be_left_out(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = engine_of(Net())
    engine.module.probe = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"probe\.weight"):
        engine.save_checkpoint(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)


def test_parameters_that_have_moved_or_gone_are_no_others(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Another name, a second place, or none: the states are still whole."""
    engine = engine_of(Net())
    train(engine, 1)
    engine.module.alias = engine.module.blocks[1]
    engine.module.blocks[1] = nn.Sequential(engine.module.blocks[1])
    del engine.module.scale
    engine.save_checkpoint(tmp_path / "saved")
    other = engine_of(Net(), seed=1)
    other.load_checkpoint(tmp_path / "saved")
    assert all_states(other).keys() == all_states(engine).keys()
    for name, value in all_states(engine).items():
        assert bits(all_states(other)[name]) == bits(value), name


# --- what modules keep themselves ---


class Keeper(nn.Module):
    """Gives a state, and takes any."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, dict) and "refused" in state:
            raise KeyError("refused")
        self.state = state


def keeping(state: Any, name: str = "keeper") -> Net:
    net = Net()
    net.blocks[0].add_module(name, Keeper(state))
    return net


KEPT: list[Any] = [
    None,
    5,
    {"n": 2, "f": 0.1, "text": "\ud800"},
    {1: (2, [3]), (4, None): Counter({5: 6})},
    torch.arange(7, dtype=torch.int16),
    torch.tensor(3.5),
    {
        "history": [torch.arange(3, dtype=torch.bfloat16), None, (torch.empty(0, 2),)],
        7: {"x": torch.ones(2).bool()},
    },
    [None, [None, torch.eye(2)]],
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return (
            type(one) is type(other) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
        )
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("state", KEPT, ids=[f"state {i}" for i in range(len(KEPT))])
def test_extra_state_comes_back(engine_of: Callable[..., Any], tmp_path: Path, state: Any) -> None:
    engine = engine_of(keeping(state))
    engine.save_checkpoint(tmp_path / "saved")
    other = engine_of(keeping("before"), seed=1)
    other.load_checkpoint(tmp_path / "saved", load_module_only=True)
    loaded = other.module.blocks[0].keeper.state
    assert same(loaded, state), loaded
    has_tensors = "tensor" in str(state)
    assert (tmp_path / "saved" / "global_step0" / "extra_state.safetensors").exists() == has_tensors


class Late(torch.nn.Module):
    """Gives None before it has been used, and does not take that."""

    value: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_extra_state(self) -> Any:
        return None if self.value is None else {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["value"]


def test_extra_state_of_a_module_that_does_not_take_its_own_back(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    saved, loaded = Net(), Net()
    for net in (saved, loaded):
        net.blocks[0].add_module("late", Late())
    saved.blocks[0].late.value = 3
    engine_of(saved).save_checkpoint(tmp_path / "saved")
    engine_of(loaded, seed=1).load_checkpoint(tmp_path / "saved", load_module_only=True)
    assert loaded.blocks[0].late.value == 3


class Counting(Net):
    """torch's own way to count what no buffer counts; and it depends on the weights that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0
        self.sum_when_set = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return super().forward(tokens) * (1 + self.num_forwards % 2)

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "n": self.num_forwards,
            "of a weight": self.blocks[1].bias,
            "of its data": self.blocks[1].bias.data,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_forwards = state["n"]
        self.kept = state
        self.sum_when_set = float(self.blocks[1].bias.detach().sum())


def test_a_run_goes_on_with_its_extra_state(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine = engine_of(Counting())
    train(engine, 3)
    bias = engine.module.blocks[1].bias.detach().clone()
    engine.save_checkpoint(tmp_path / "saved")
    other = engine_of(Counting(), seed=1)
    other.load_checkpoint(tmp_path / "saved")
    assert other.module.num_forwards == 3
    assert torch.equal(other.module.kept["of a weight"], bias)
    assert torch.equal(other.module.kept["of its data"], bias)
    assert other.module.sum_when_set == float(bias.sum())  # set when the weights were there
    assert train(other, 3, first=3) == train(engine, 3, first=3)


def cyclic() -> list[Any]:
    items: list[Any] = [1]
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (
            object(),
            r"blocks\.0\.keeper\._extra_state: get_extra_state\(\) of Keeper gives 'object'; a checkpoint",
        ),
        ({"a": [0, b"x"]}, r"_extra_state\['a'\]\[1\]: get_extra_state\(\) of Keeper gives 'bytes'"),
        (cyclic(), "nested more than 100 deep"),
        ([torch.zeros(2, dtype=torch.complex128)], r"_extra_state:0 has dtype torch\.complex128"),
        ((torch.eye(2).to_sparse(),), r"_extra_state:0 is of layout torch\.sparse_coo"),
    ],
    ids=["object", "bytes", "cyclic", "complex", "sparse"],
)
def test_extra_state_that_cannot_be_kept_is_refused_by_its_place(
    engine_of: Callable[..., Any], tmp_path: Path, state: Any, reason: str
) -> None:
    engine = engine_of(keeping(state))
    with pytest.raises(CheckpointError, match=reason):
        engine.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    train(engine, 1)


def test_extra_state_of_one_side_only(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine_of(keeping(1)).save_checkpoint(tmp_path / "one")
    engine_of(Net()).save_checkpoint(tmp_path / "none")
    other = engine_of(keeping(2, "another"))
    for saved, reason in (
        (
            "one",
            r"missing blocks\.0\.another\._extra_state; not in the model: blocks\.0\.keeper\._extra_state",
        ),
        ("none", r"missing blocks\.0\.another\._extra_state; not in the model: nothing"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            other.load_checkpoint(tmp_path / saved)
        other.load_checkpoint(tmp_path / saved, load_module_strict=False)
        assert other.module.blocks[0].another.state == 2


def test_a_state_that_its_module_refuses_changes_nothing(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = engine_of(keeping({"refused": 1}))
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    own = [1, torch.ones(2, requires_grad=True) * 3]
    other = engine_of(keeping(own), seed=1)
    before = whole_state(other)
    with pytest.raises(CheckpointError, match=r"of Keeper refuses blocks\.0\.keeper\._extra_state: KeyError"):
        other.load_checkpoint(tmp_path / "saved")
    assert whole_state(other) == before
    assert same(other.module.blocks[0].keeper.state, own)
    train(other, 1)


def test_descriptions_that_do_not_agree_with_the_tensors(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = engine_of(keeping([torch.ones(2), None]))
    engine.save_checkpoint(tmp_path, tag="a")
    key = "blocks.0.keeper._extra_state"
    for entry, reason in (
        ({"value": [None, None], "tensors": []}, rf"do not agree about {key}:0"),
        ({"value": [None, None], "tensors": ["0", "1"]}, rf"do not agree about {key}:1"),
        ({"value": [3, None], "tensors": ["0"]}, rf"{key} has no place '0' for a tensor"),
        ({"value": [None], "tensors": [0]}, "the places of its tensors are not texts"),
        ({"value": [None]}, "is not a value and the places"),
        ([], "is not a value and the places"),
    ):
        edit_meta(tmp_path / "a", extra_states={key: entry})
        with pytest.raises(CheckpointError, match=reason):
            engine.load_checkpoint(tmp_path)
    edit_meta(tmp_path / "a", extra_states={key: {"value": [None, 4], "tensors": ["0"]}})
    engine.load_checkpoint(tmp_path)
    assert same(engine.module.blocks[0].keeper.state, [torch.ones(2), 4])
    (tmp_path / "a" / "extra_state.safetensors").unlink()
    reseal(tmp_path / "a")
    with pytest.raises(CheckpointError, match="do not agree about"):
        engine.load_checkpoint(tmp_path)


def test_a_file_of_weights_says_that_it_is_without(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine = engine_of(keeping(3))
    with pytest.warns(UserWarning, match=r"safetensors is without blocks\.0\.keeper\._extra_state"):
        engine.save_16bit_model(tmp_path)
