"""A model that was built under `zero.Init` and is not offloaded yet: an ordinary one whose large weights are away."""

from __future__ import annotations

import copy
import errno
import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from offloadzero import AioError, StateError, zero
from offloadzero.core import interrupts
from offloadzero.streaming.building.waiting_parameters import SpilledWeight
from tests.engine.built import build, masters, stored_bytes
from tests.support.faults import fails, replaced
from tests.support.tiny import TinyModel, make_engine, settings, tokens


@pytest.fixture(params=["host", "nvme"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> TinyModel:
    with zero.Init(config_dict_or_path=settings(tmp_path, placement=request.param)):
        return build()


def test_a_built_model_evaluates_and_saves(built: TinyModel) -> None:
    plain = build()
    assert all(stored_bytes(p) < 10 for p in built.parameters() if p.numel() >= zero.MIN_SPILL_ELEMENTS)
    assert torch.equal(built(tokens(0)), plain(tokens(0)))
    saved = io.BytesIO()
    torch.save(built.state_dict(), saved)
    saved.seek(0)
    for name, value in torch.load(saved).items():
        assert torch.equal(value, plain.state_dict()[name]), name
    copied = copy.deepcopy(built)
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("number", [1, 2])
def test_ctrl_c_in_a_write_does_not_hold_the_next_one_back(built: TinyModel, number: int) -> None:
    """At a first and a second line of the function that makes the write whole."""
    code, num_lines = SpilledWeight.assign.__code__, 0
    weight = built.blocks[0].up.weight

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        num_lines += frame.f_code is code and event == "line"
        if num_lines == number:
            sys.settrace(None)
            os.kill(os.getpid(), signal.SIGINT)
        return trace

    before = weight.detach().clone()
    # An engine whose backward has failed in this process has left a dead one.
    assert interrupts.held.until() is None
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            weight.data = before * 2
    finally:
        sys.settrace(None)
    assert interrupts.held.until() is None
    assert not interrupts.held.pending
    assert torch.equal(weight, before) or torch.equal(weight, before * 2)


def test_a_built_model_trains_as_any(built: TinyModel) -> None:
    plain = build()
    for model in (built, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(tokens(step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for (name, value), other in zip(built.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(value, other, rtol=1e-5, atol=1e-6), name


def test_what_is_written_to_a_built_model_is_offloaded(built: TinyModel, tmp_path: Path) -> None:
    pretrained = build(seed=7)
    for model in (built, plain := build()):
        model.load_state_dict(pretrained.state_dict())
        for param in model.parameters():
            if param.dim() > 1:
                torch.manual_seed(5)
                nn.init.xavier_uniform_(param)
        model.blocks[0].up.weight.data *= 0.5
        model.blocks[1].up.weight.data = torch.ones_like(model.blocks[1].up.weight)
        with torch.no_grad():
            model.blocks[2].down.weight[3, :7] = 0.25
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    engine = make_engine(settings(tmp_path), built)
    assert all(torch.equal(value, values[name]) for name, value in masters(engine).items())
    engine.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_built_model_changes_its_dtype(built: TinyModel, dtype: torch.dtype) -> None:
    plain = build().to(dtype)
    built.to(dtype)
    assert {param.dtype for param in built.parameters()} == {dtype}
    assert all(stored_bytes(p) < 10 for p in built.parameters() if p.numel() >= zero.MIN_SPILL_ELEMENTS)
    for (name, value), other in zip(built.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_what_a_script_holds_of_a_built_parameter(built: TinyModel, tmp_path: Path) -> None:
    weight = built.emb.weight
    held, value = weight.data, weight.detach().clone()
    weight.data = value + 1
    assert torch.equal(held, value), "the former memory is the holder's"
    assert torch.equal(weight, value + 1)
    taken = weight.data
    engine = make_engine(settings(tmp_path), built)
    with pytest.raises(
        StateError, match=r"Embedding\.weight: this tensor was taken before the model was offloaded"
    ):
        taken.sum()
    assert torch.equal(held, value)
    engine.close()


def test_a_graph_over_a_built_parameter_that_was_written_is_refused(built: TinyModel) -> None:
    loss = built(tokens(0))
    with torch.no_grad():
        built.blocks[0].up.weight.mul_(2)
    with pytest.raises(StateError, match=r"Linear\.weight was updated between its use and the backward"):
        loss.backward()


def test_a_drive_that_fails_names_the_built_parameter(tmp_path: Path) -> None:
    with zero.Init(config_dict_or_path=settings(tmp_path)):
        model = build()
    broken = fails("spill.read", OSError(errno.EIO, os.strerror(errno.EIO)))
    with broken, pytest.raises(AioError, match=r"Embedding\.weight \(nvme\): read .*Input/output error"):
        model.emb.weight.sum()
    cut = replaced("spill.read", lambda *_: 0)
    with cut, pytest.raises(AioError, match="the file ends here"):
        model.emb.weight.sum()


def test_integers_leave_memory_too(tmp_path: Path) -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(5000) % 100, requires_grad=False)

    with zero.Init(config_dict_or_path=settings(tmp_path)):
        module = Quantized()
    assert stored_bytes(module.codes) < 10
    assert torch.equal(module.codes, torch.arange(5000) % 100)


def test_what_cannot_be_given_to_a_parameter_leaves_it(built: TinyModel) -> None:
    weight = built.emb.weight
    value = weight.detach().clone()
    with pytest.raises(RuntimeError):
        weight.data = torch.ones(weight.shape, dtype=torch.int8)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, value)
    weight.data = weight.data.flip(0)
    assert torch.equal(weight, value.flip(0))


def test_what_is_gathered_and_initialized_at_once(tmp_path: Path) -> None:
    """The call has taken the values out again before the block ends."""
    with zero.Init(config_dict_or_path=settings(tmp_path, placement="host")):
        model = build()
        with zero.GatheredParameters(model.emb.weight, modifier_rank=0):
            model.apply(lambda _: None)
            assert stored_bytes(model.emb.weight) < 10
    assert torch.equal(model.emb.weight, build().emb.weight)
    make_engine(settings(tmp_path, placement="host"), model).close()


def test_a_meta_parameter_stays_one(tmp_path: Path) -> None:
    with zero.Init(config_dict_or_path=settings(tmp_path)), torch.device("meta"):
        module = nn.Linear(100, 100)
    assert module.weight.is_meta
    assert type(module.weight) is nn.Parameter


def test_a_forked_child_leaves_the_parents_file(tmp_path: Path) -> None:
    with zero.Init(config_dict_or_path=settings(tmp_path)):
        model = build()
    child = os.fork()
    if not child:
        try:
            model.emb.weight.data.zero_()
        except StateError:
            model.emb.weight.data = torch.zeros(1)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(model.emb.weight, build().emb.weight)
