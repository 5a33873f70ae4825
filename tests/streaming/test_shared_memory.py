"""Parameters that share memory: offloaded each has a home of its own, so what would drift apart is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.errors import ConfigError
from tests.support.plain_form import make_optimizer, plain_config
from tests.support.tiny import TinyModel, make_engine, settings, tokens


def make_model() -> TinyModel:
    torch.manual_seed(1)
    return TinyModel(width=16, num_blocks=3)


def offload(model: nn.Module, directory: Path) -> offloadzero.OffloadedOptimizer:
    return offloadzero.offload(model, make_optimizer(model), plain_config("host", directory))[1]


def by_data(model: Any) -> None:
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data


def a_row(model: Any) -> None:
    model.norm.bias = nn.Parameter(model.blocks[0].up.weight.data[3])


def transposed(model: Any) -> None:
    model.blocks[1].down.weight = nn.Parameter(model.blocks[0].up.weight.data.t())


def of_numpy(model: Any) -> None:
    """Two storages, one memory."""
    array = np.zeros(16, dtype=np.float32)
    model.norm.weight.data, model.norm.bias.data = torch.from_numpy(array), torch.from_numpy(array)


def last_of_one_and_first_of_the_other(model: Any) -> None:
    flat = torch.zeros(31)
    model.norm.weight.data, model.norm.bias.data = flat[:16], flat[15:]


def a_column(model: Any) -> None:
    both = torch.zeros(16, 17)
    model.norm.bias = nn.Parameter(both[:, 5])
    model.norm.weight = nn.Parameter(both[3, :16])


def frozen_and_trained(model: Any) -> None:
    by_data(model)
    model.blocks[0].up.weight.requires_grad_(False)


OVERLAPS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "by data": (by_data, "blocks.1.up.weight", "blocks.0.up.weight"),
    "a row": (a_row, "norm.bias", "blocks.0.up.weight"),
    "transposed": (transposed, "blocks.1.down.weight", "blocks.0.up.weight"),
    "of numpy": (of_numpy, "norm.bias", "norm.weight"),
    "one element": (last_of_one_and_first_of_the_other, "norm.bias", "norm.weight"),
    "a column and a row": (a_column, "norm.weight", "norm.bias"),
    "one of them frozen": (frozen_and_trained, "blocks.1.up.weight", "blocks.0.up.weight"),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_parameters_with_an_element_in_common_are_refused(name: str, tmp_path: Path) -> None:
    share, *names = OVERLAPS[name]
    model = make_model()
    share(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"shares memory with .*assigning the Parameter itself") as caught:
        offload(model, tmp_path)
    assert all(one in str(caught.value) for one in names)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize("turn", range(3))
def test_of_many_the_first_of_the_model_is_named(turn: int, tmp_path: Path) -> None:
    """Wherever in memory they lie."""
    model = make_model()
    weights = [block.up.weight for block in model.blocks]
    memory = torch.zeros(3, *weights[0].shape)
    for at, weight in enumerate(weights):
        weight.data = memory[(at + turn) % 3]
    for at, block in enumerate(model.blocks):
        block.register_buffer("seen", weights[at].data[0])
        block.register_buffer("again", weights[at].data)
    refusal = r"blocks\.0\.seen.*shares memory with the parameter blocks\.0\.up\.weight"
    with pytest.raises(ConfigError, match=refusal):
        offload(model, tmp_path)


def test_of_two_parameters_the_later_of_the_model_is_refused(tmp_path: Path) -> None:
    for order in (1, -1):
        model = make_model()
        memory = torch.zeros(31)
        places = [memory[:16], memory[15:]][::order]
        model.norm.weight.data, model.norm.bias.data = places
        with pytest.raises(ConfigError, match=r"norm\.bias.*shares memory with norm\.weight"):
            offload(model, tmp_path)


def test_the_way_that_the_refusal_names(tmp_path: Path) -> None:
    model = make_model()
    by_data(model)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    optimizer = offload(model, tmp_path)
    assert model.blocks[1].up.weight is model.blocks[0].up.weight
    optimizer.close()


def views_of_one_buffer(model: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())


def interleaved(model: Any) -> None:
    both = torch.stack([model.norm.weight.data, model.norm.bias.data], dim=1).contiguous()
    model.norm.weight.data, model.norm.bias.data = both.unbind(1)


def losses_of(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for seed in range(4):
        loss = model(tokens(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("share", [views_of_one_buffer, interleaved])
def test_elements_of_their_own_in_one_buffer_train_as_in_torch(
    share: Callable[[Any], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_model()
    expected = losses_of(plain, make_optimizer(plain))
    model = make_model()
    share(model)
    with caplog.at_level(logging.INFO, "offloadzero"):
        optimizer = offload(model, tmp_path)
    assert "views of a larger buffer" in caplog.text
    assert losses_of(model, optimizer) == pytest.approx(expected, rel=1e-5)
    optimizer.restore_model()
    caplog.clear()
    with caplog.at_level(logging.INFO, "offloadzero"):
        offload(model, tmp_path).close()  # a restored model is an ordinary one
    assert "larger buffer" not in caplog.text


def test_a_slice_of_a_larger_buffer_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    model.norm.bias.data = torch.zeros(3000)[:16]
    with caplog.at_level(logging.INFO, "offloadzero"):
        offload(model, tmp_path).close()
    assert "norm.bias: views of a larger buffer" in caplog.text


def test_frozen_parameters_may_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody trains them: an evaluation's numbers are those of torch."""
    model = make_model()
    by_data(model)
    expected = model(tokens(0)).item()
    with caplog.at_level(logging.INFO, "offloadzero"):
        engine = make_engine(settings(tmp_path, placement="host", bf16=None, optimizer=None), model)
    assert "blocks.0.up.weight and 1 more parameters: views of a larger buffer" in caplog.text
    with torch.no_grad():
        assert engine(tokens(0)).item() == pytest.approx(expected, rel=1e-6)
    engine.close()


def test_a_buffer_over_a_trained_parameter_is_refused(tmp_path: Path) -> None:
    model = make_model()
    model.norm.register_buffer("shift", model.norm.bias.data[2:4], persistent=False)
    with pytest.raises(
        ConfigError, match=r"'norm\.shift': a buffer that shares memory with .* norm\.bias would"
    ):
        offload(model, tmp_path)
    model.norm.bias.requires_grad_(False)
    offload(model, tmp_path).close()


GIVES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "the parameter": lambda p: p,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "a view of data": lambda p: p.data.view(-1).view(p.shape),
    "a view in a graph": lambda p: p.view(-1).view(p.shape),
    "a slice in a graph": lambda p: p[:],
}


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
@pytest.mark.parametrize("give", GIVES.values(), ids=GIVES)
def test_data_of_another_parameter_of_an_offloaded_model(
    give: Callable[[nn.Parameter], torch.Tensor], placement: str, tmp_path: Path
) -> None:
    """In torch both would be one from there on; here it is an error, and nothing has changed."""
    model = TinyModel(width=64, num_blocks=2)
    engine = make_engine(settings(tmp_path, placement=placement), model)
    first, second = (block.up.weight for block in model.blocks)
    before = second.detach().clone()
    with pytest.raises(
        ConfigError,
        match=r"blocks\.1\.up\.weight\.data = .* would share memory with blocks\.0\.up\.weight",
    ):
        second.data = give(first)
    assert torch.equal(second, before)
    second.data = give(second)
    assert torch.equal(second, before)
    second.data = give(first).clone()
    assert torch.equal(second, first)
    assert second.grad is None
    engine.close()


@pytest.mark.parametrize("give", GIVES.values(), ids=GIVES)
def test_a_model_built_under_init(give: Callable[[nn.Parameter], torch.Tensor], tmp_path: Path) -> None:
    """Placeholders share nothing; the memory of one parameter cannot be given to another."""
    config = settings(tmp_path, placement="nvme")
    with offloadzero.zero.Init(config_dict_or_path=config):
        model, other = (TinyModel(width=64, num_blocks=2) for _ in range(2))
    engine = make_engine(config, model)
    engine.close()
    with pytest.raises(
        ConfigError, match=r"Linear\.weight\.data = .* would share memory with Linear\.weight"
    ):
        other.blocks[1].up.weight.data = give(other.blocks[0].up.weight)
    other.blocks[1].up.weight.data = other.blocks[0].up.weight.data.clone()
    make_engine(config, other).close()
