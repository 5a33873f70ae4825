"""Copies of an offloaded model: resident ones that work without us, or an error that says how to make one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import offloadzero
from offloadzero import OffloadError
from tests.scripts.common import (
    LM,
    Result,
    Wrap,
    adamw,
    assert_close,
    assert_matches,
    offloaded,
    run,
    start,
    tokens,
    weights_of,
)
from tests.support.tiny import run_bare_script, settings

Copy = Callable[[nn.Module], nn.Module]


def _through(save: Callable[[Any, Any], None], load: Callable[[Any], Any]) -> Copy:
    def copied(model: nn.Module) -> nn.Module:
        buffer = io.BytesIO()
        save(model, buffer)
        buffer.seek(0)
        return load(buffer)

    return copied


COPIES: dict[str, Copy] = {
    "copy.deepcopy": copy.deepcopy,
    "torch.save": _through(torch.save, lambda buffer: torch.load(buffer, weights_only=False)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "AveragedModel": lambda model: AveragedModel(model).module,
    "state_dict": lambda model: _from_state_dict(model.state_dict()),
    "saved state_dict": lambda model: _from_state_dict(
        _through(torch.save, lambda buffer: torch.load(buffer, weights_only=True))(model.state_dict())
    ),
}
ALWAYS = ("state_dict", "saved state_dict")  # these may not be refused


def _from_state_dict(state: Any) -> nn.Module:
    model = LM(tied=True)
    model.load_state_dict(state)
    return model


def steps(model: nn.Module, optimizer: Any, first: int, num_steps: int = 3) -> list[float]:
    losses = []
    for step in range(first, first + num_steps):
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("placement", ["host", "nvme", "stage 1"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_resident_and_on_its_own(how: str, placement: str, tmp_path: Path) -> None:
    """It has the weights of that moment, trains with torch's AdamW, and outlives the offloaded model."""

    def script(wrap: Wrap) -> Result:
        model, optimizer = start(wrap, LM(tied=True))
        losses = steps(model, optimizer, 0)
        made = COPIES[how](model)
        at_once = weights_of(made)
        losses += steps(model, optimizer, 3)
        assert_close(weights_of(made), at_once, "the copy's weight")
        end = weights_of(model)
        wrap.close()
        assert type(made.emb.weight) is nn.Parameter
        assert made.head.weight is made.emb.weight
        for name, value in made.state_dict().items():
            assert type(value) is Tensor, name
        losses += steps(made, adamw(made), 100)
        return Result(
            losses, [], end, {**at_once, **{f"trained {k}": v for k, v in weights_of(made).items()}}
        )

    expected = run(script, Wrap())
    try:
        found = run(script, offloaded(placement, tmp_path, clipping=0.0))
    except OffloadError as error:
        assert how not in ALWAYS, error  # noqa: PT017
        assert "state_dict" in str(error), "says how"  # noqa: PT017
    else:
        assert_matches(found, expected)


def test_a_copy_made_before_the_first_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = weights_of(LM())
    torch.manual_seed(0)
    wrap = offloaded("host", tmp_path, clipping=0.0)
    model, _ = start(wrap)
    try:
        made = copy.deepcopy(model)
    except OffloadError as error:
        assert "state_dict" in str(error), "says how"  # noqa: PT017
    else:
        assert_close(weights_of(made), values, "weight")
    wrap.close()


@pytest.mark.parametrize("part", ["blocks.1", "emb", "norm"])
def test_a_copy_of_a_part(part: str, tmp_path: Path) -> None:
    wrap = offloaded("host", tmp_path, clipping=0.0)
    model, optimizer = start(wrap)
    steps(model, optimizer, 0)
    values = {k.removeprefix(part + "."): v for k, v in weights_of(model).items() if k.startswith(part + ".")}
    try:
        made = copy.deepcopy(model.get_submodule(part))
    except OffloadError as error:
        assert "state_dict" in str(error), "says how"  # noqa: PT017
    else:
        assert_close(weights_of(made), values, "weight")
    finally:
        wrap.close()


def test_a_copy_of_a_parameter_is_an_ordinary_one(tmp_path: Path) -> None:
    wrap = offloaded("host", tmp_path, clipping=0.0)
    model, optimizer = start(wrap)
    steps(model, optimizer, 0)
    value = weights_of(model)["blocks.0.up.weight"]
    param = model.blocks[0].up.weight
    for made in (
        copy.deepcopy(param),
        nn.Parameter(param.detach().clone()),
        nn.Parameter(param.data.clone()),
    ):
        assert type(made) is nn.Parameter
        assert torch.equal(made.detach(), value)
        (made**2).sum().backward()
        torch.testing.assert_close(made.grad, 2 * value)
    wrap.close()


def test_a_saved_state_dict_loads_where_we_are_not_installed(tmp_path: Path) -> None:
    wrap = offloaded("host", tmp_path, clipping=0.0)
    model, optimizer = start(wrap)
    steps(model, optimizer, 0)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    total = sum(float(value.double().sum()) for value in weights_of(model).values())
    wrap.close()
    script = """
        import sys, torch
        state = torch.load(sys.argv[1], weights_only=True)
        assert not any(name.startswith("offloadzero") for name in sys.modules)
        assert all(type(value) is torch.Tensor for value in state.values())
        print(sum(float(value.double().sum()) for value in state.values()))
    """
    # By an interpreter of its own: those of run_script have the package.
    done = run_bare_script(script, tmp_path / "weights.pt")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(total, abs=1e-9)


def test_a_saved_state_dict_holds_no_more_than_its_values(tmp_path: Path) -> None:
    """A view of a large buffer would be saved whole."""
    wrap = offloaded("host", tmp_path, clipping=0.0)
    model, optimizer = start(wrap)
    steps(model, optimizer, 0)
    num_bytes = sum(value.nbytes for value in weights_of(model).values())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert len(buffer.getvalue()) < num_bytes + 20_000
    one = io.BytesIO()
    torch.save(model.blocks[0].norm.weight.detach(), one)
    assert len(one.getvalue()) < 5_000
    wrap.close()


class _Tied(nn.Module):
    """Tied across units, and within one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.blocks[2].again = self.blocks[2].weight
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("placement", ["device", "nvme"])
def test_tied_weights_share_a_copy_as_they_share_memory(placement: str, tmp_path: Path) -> None:
    """Who writes files looks at that."""
    model = _Tied()

    def shared() -> set[frozenset[str]]:
        names: dict[int, set[str]] = {}
        for name, value in model.state_dict().items():
            names.setdefault(value.untyped_storage().data_ptr(), set()).add(name)
        return {frozenset(group) for group in names.values()}

    expected = shared()
    assert len(expected) < len(model.state_dict())
    config = settings(tmp_path, placement=placement, bf16=None, optimizer=None)
    _, optimizer = offloadzero.offload(model, adamw(model), config)
    assert shared() == expected
    state = model.state_dict()
    state["head.weight"].fill_(2.0)
    assert float(state["emb.weight"].mean()) == float(model.emb.weight.mean()) == 2.0
    state["emb.weight"].fill_(3.0)
    assert float(state["head.weight"].mean()) == float(model.head.weight.mean()) == 3.0
    reused = model.state_dict(destination=state)
    model.emb.weight.data.fill_(4.0)
    assert float(model.state_dict(destination=reused)["head.weight"].mean()) == 4.0
    optimizer.close()


def test_a_tied_model_of_transformers_is_saved_as_without_us(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    load_file = pytest.importorskip("safetensors.torch").load_file
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(tmp_path / "plain")
    config = settings(tmp_path, placement="host", bf16=None, optimizer=None)
    _, optimizer = offloadzero.offload(model, adamw(model), config)
    model.save_pretrained(tmp_path / "offloaded")
    optimizer.close()
    plain, saved = (tmp_path / which / "model.safetensors" for which in ("plain", "offloaded"))
    assert saved.stat().st_size == plain.stat().st_size
    expected, values = load_file(plain), load_file(saved)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


def test_weights_after_close(tmp_path: Path) -> None:
    """The model has its weights or says that it has none: no other numbers."""
    wrap = offloaded("host", tmp_path, clipping=0.0)
    model, optimizer = start(wrap)
    steps(model, optimizer, 0)
    values = weights_of(model)
    with torch.no_grad():
        loss = model(tokens(50)).item()
    wrap.close()
    reads: list[Callable[[], Any]] = [
        lambda: weights_of(model),
        lambda: {name: p.detach().clone() for name, p in model.named_parameters()},
        lambda: {name: p.data.clone() for name, p in model.named_parameters()},
    ]
    for read in reads:
        try:
            found = read()
        except OffloadError:
            continue
        assert_close(found, values, "weight")
    try:
        with torch.no_grad():
            again = model(tokens(50)).item()
    except OffloadError:
        return
    assert again == pytest.approx(loss, rel=1e-6)
