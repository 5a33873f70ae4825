"""Tensors of state dicts are read when their bytes are asked for, and are dropped with their holders."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor
from torch.distributed import checkpoint as dcp

import offloadzero
from offloadzero.access.home_access import HomeAccess
from offloadzero.engine.lifetime import EngineState, wait_for_collected
from offloadzero.errors import ConfigError, StateError
from tests.support.tiny import make_engine, settings, tokens, train


class Reads:
    """The values that were read from their homes: how many, and how many of them were in memory at once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.most_alive = 0
        self._alive: list[weakref.ref[Tensor]] = []

    def note(self, name: str, value: Tensor) -> None:
        self._alive = [one for one in self._alive if one() is not None]
        self._alive.append(weakref.ref(value))
        self.names.append(name)
        self.most_alive = max(self.most_alive, len(self._alive))


@contextmanager
def counted() -> Iterator[Reads]:
    reads, read = Reads(), HomeAccess.read

    def noted(self: HomeAccess, record: Any, slot: Any, kind: Any) -> Tensor:
        value = read(self, record, slot, kind)
        reads.note(slot.name, value)
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HomeAccess, "read", noted)
        yield reads


@pytest.fixture(params=["nvme", "host", "device"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[offloadzero.Engine]:
    (tmp_path / "states").mkdir()
    engine = make_engine(settings(tmp_path / "states", placement=request.param))
    train(engine, num_steps=1)
    yield engine
    if engine.optimizer.runtime.state is EngineState.OPEN:
        engine.close()
    assert not list((tmp_path / "states").glob("*.bin"))


def through_torch(value: Any, directory: Path, **options: Any) -> Any:
    torch.save(value, directory / "file.pt", **options)
    return torch.load(directory / "file.pt", weights_only=True)


def through_safetensors(value: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    tied = {name: tensor.clone() for name, tensor in value.items() if name == "head.weight"}
    save_file({**value, **tied}, directory / "file.safetensors")
    return load_file(directory / "file.safetensors")


def through_dcp(value: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    dcp.save(dict(value), checkpoint_id=directory / "dcp", no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in value.items()}
    dcp.load(loaded, checkpoint_id=directory / "dcp", no_dist=True)
    return loaded


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "torch.save": through_torch,
    "torch.save, legacy": lambda value, d: through_torch(value, d, _use_new_zipfile_serialization=False),
    "pickle": lambda value, _: pickle.loads(pickle.dumps(value)),
    "another process": lambda value, _: pickle.loads(bytes(ForkingPickler.dumps(value))),
    "deepcopy": lambda value, _: copy.deepcopy(value),
    "safetensors": through_safetensors,
    "torch.distributed.checkpoint": through_dcp,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_has_the_values(engine: offloadzero.Engine, way: str, tmp_path: Path) -> None:
    state = engine.module.state_dict()
    values = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    gone = WAYS[way](state, tmp_path)
    assert gone.keys() == state.keys() >= values.keys()
    for name, value in values.items():
        assert type(gone[name]) is Tensor
        assert gone[name].device.type == "cpu"
        assert torch.equal(gone[name], value)
    if way in ("torch.save", "deepcopy"):
        assert gone["emb.weight"].data_ptr() == gone["head.weight"].data_ptr() or way == "deepcopy"


def test_a_dict_by_itself_reads_nothing(engine: offloadzero.Engine) -> None:
    with counted() as reads:
        state, states = engine.module.state_dict(), engine.optimizer.state_dict()
        few = {f"model.{name}": tensor.contiguous() for name, tensor in state.items() if "norm" not in name}
        assert sum(tensor.numel() * tensor.element_size() for tensor in few.values())
        assert len({tensor.untyped_storage().data_ptr() for tensor in few.values()}) == len(few) - 1  # tied
        assert states["state"][0]["exp_avg"].shape == next(iter(engine.module.parameters())).shape
    assert reads.names == []


def test_torch_saves_one_value_after_the_other(engine: offloadzero.Engine) -> None:
    with counted() as reads:
        torch.save(engine.module.state_dict(), io.BytesIO())
        assert sorted(set(reads.names)) == sorted(reads.names)  # each once
        assert len(reads.names) == len(list(engine.module.parameters()))
        assert reads.most_alive <= 2
        torch.save(engine.optimizer.state_dict(), io.BytesIO())
        assert reads.most_alive <= 4  # a parameter with its master, before the one


def test_a_shard_is_dropped_with_its_holder(engine: offloadzero.Engine, tmp_path: Path) -> None:
    state = engine.module.state_dict()
    state.pop("head.weight")
    names = list(state)
    with counted() as reads:
        for number, name in enumerate(names):
            save_file({name: state.pop(name).contiguous()}, tmp_path / f"{number}.safetensors")
        assert reads.names == names
        assert reads.most_alive <= 2


@pytest.mark.parametrize("end", ["close", "restore_model"])
def test_an_engine_that_ends_leaves_values_to_their_holders(
    end: str, engine: offloadzero.Engine, tmp_path: Path
) -> None:
    state, states = engine.module.state_dict(), engine.optimizer.state_dict()["state"][0]
    expected = copy.deepcopy((dict(state), dict(states)))
    getattr(engine, end)()
    for found, values in zip((state, states), expected, strict=True):
        assert all(torch.equal(found[name], value) for name, value in values.items())
    loaded = through_torch(state, tmp_path)
    assert all(torch.equal(loaded[name], value) for name, value in expected[0].items())


def test_a_dict_holds_its_engine(tmp_path: Path) -> None:
    def make() -> tuple[dict[str, Tensor], Tensor]:
        engine = make_engine(settings(tmp_path, placement="nvme"))
        train(engine, num_steps=1)
        return engine.module.state_dict(), engine.module.state_dict()["emb.weight"].clone()

    state, expected = make()
    gc.collect()
    assert torch.equal(state["emb.weight"], expected)
    del state
    gc.collect()
    wait_for_collected()
    assert not list(tmp_path.glob("*.bin"))


def test_a_use_before_an_update_has_no_backward_after_it(engine: offloadzero.Engine) -> None:
    """The graph has no copy of the value: a wrong gradient would come of the new one."""
    value = engine.module.state_dict()["blocks.0.up.weight"]
    other = torch.ones(value.shape, dtype=value.dtype, requires_grad=True)
    (other * value).sum().backward()
    assert torch.equal(other.grad, value.clone())
    loss = (other * value).sum()
    train(engine, num_steps=1)
    with pytest.raises(
        StateError, match=r"blocks\.0\.up\.weight: a tensor of state_dict\(\) was updated between"
    ):
        loss.backward()


def test_states_that_trade_places_are_loaded_as_torchs(engine: offloadzero.Engine) -> None:
    state_dict = engine.optimizer.state_dict()
    states, expected = state_dict["state"], copy.deepcopy(state_dict["state"])
    one, other = [number for number, state in states.items() if state["exp_avg"].shape == torch.Size([145])][
        :2
    ]
    states[one], states[other] = states[other], states[one]
    engine.optimizer.load_state_dict(state_dict)
    now = engine.optimizer.state_dict()["state"]
    for key in ("exp_avg", "exp_avg_sq", "master"):
        assert torch.equal(now[one][key], expected[other][key])
        assert torch.equal(now[other][key], expected[one][key])


def test_tied_weights_go_through_save_model(engine: offloadzero.Engine, tmp_path: Path) -> None:
    save_model(engine.module, str(tmp_path / "file.safetensors"))
    loaded = load_file(tmp_path / "file.safetensors")
    values = engine.module.state_dict()
    assert loaded.keys() in (values.keys() - {"head.weight"}, values.keys() - {"emb.weight"})
    assert all(torch.equal(values[name], value) for name, value in loaded.items())


def test_memory_that_was_asked_for_follows_every_write(engine: offloadzero.Engine, tmp_path: Path) -> None:
    state = engine.optimizer.state_dict()["state"][0]
    state["step"].data_ptr()
    with pytest.raises(ConfigError, match="a whole number of steps"):
        state["step"].fill_(1.5)
    state["exp_avg"].data_ptr()
    engine.optimizer.state_dict()["state"][0]["exp_avg"].fill_(0.25)
    save_file({key: state[key] for key in ("step", "exp_avg")}, tmp_path / "file.safetensors")
    loaded = load_file(tmp_path / "file.safetensors")
    assert float(loaded["step"]) == 1.0
    assert bool((loaded["exp_avg"] == 0.25).all())


def test_an_engine_closes_between_backward_and_its_step(engine: offloadzero.Engine) -> None:
    state = engine.module.state_dict()
    engine.backward(engine(tokens(3)))
    engine.close()
    with pytest.raises(StateError, match="has already updated its weights: call step"):
        state["blocks.0.up.weight"].clone()
