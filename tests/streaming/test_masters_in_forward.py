"""A forward that writes its own weights, in reduced precision: masters follow, alike in every placement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offloadzero
from tests.support.cases import IN_FULL, each_pair
from tests.support.models import Block, Stack, features
from tests.support.training import make_config

NUM_STEPS = 4 if IN_FULL else 3


def zero_some(weight: Tensor) -> None:
    weight.view(-1)[::3] = 0.0


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda weight: weight.mul_(0.5),
    "clamp_": lambda weight: weight.clamp_(-0.1, 0.1),
    "zeros": zero_some,
    "same bits": lambda weight: weight.mul_(1.0),
}


class Writes(Block):
    """Before its use."""

    write: Callable[[Tensor], Any]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            type(self).write(self.up.weight)
        return super().forward(x)


def run(name: str, placement: str, directory: Path, **over: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and fp32 masters."""
    kind = type("Writing", (Writes,), {"write": staticmethod(WRITES[name])})
    torch.manual_seed(0)
    config = make_config(placement, directory, lr=1e-3, clipping=1.0, **over)
    engine, *_ = offloadzero.initialize(model=Stack(kind), config=config)
    losses = []
    for seed in range(NUM_STEPS):
        loss = engine(features(seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    masters = {
        name: offloadzero.zero.safe_get_full_fp32_param(param)
        for name, param in engine.module.named_parameters()
    }
    for key, param in engine.module.named_parameters():
        assert (
            torch.equal(masters[key].to(param.dtype), param.detach().cpu()) or param.dtype == torch.bfloat16
        )
    engine.close()
    return losses, masters


FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": None, "fp16": {"enabled": True, "loss_scale": 8.0}},
    "compact": {"dtype": "bf16", "offloadzero": {"state_layout": "compact"}},
    "fp32": {"dtype": None},
}


@functools.cache
def on_the_device(name: str, form: str) -> tuple[list[float], dict[str, Tensor]]:
    losses, masters = run(name, "resident", Path(), **FORMS[form])
    assert all(value.isfinite().all() for value in masters.values())
    return losses, masters


@pytest.mark.parametrize(("name", "form", "placement"), each_pair(WRITES, FORMS, ["host", "mixed", "nvme"]))
def test_masters_follow_in_every_placement(name: str, form: str, placement: str, tmp_path: Path) -> None:
    losses, masters = on_the_device(name, form)
    others, found = run(name, placement, tmp_path, **FORMS[form])
    assert others == losses
    for key, value in masters.items():
        assert torch.equal(found[key], value), key


def test_what_a_forward_clamps_goes_on_learning(tmp_path: Path) -> None:
    """Elements that a write leaves alone keep the low bits of their masters: bf16 alone has no room for such steps."""
    clamp: Callable[[Tensor], Any] = lambda weight: weight.clamp_(-10.0, 10.0)  # noqa: E731
    WRITES["far"] = clamp
    try:
        for placement in ("resident", "nvme"):
            _, written = run("far", placement, tmp_path, dtype="bf16")
            _, same = run("same bits", placement, tmp_path, dtype="bf16")
            assert all(torch.equal(written[key], same[key]) for key in same)
            low = written["blocks.0.up.weight"].view(torch.int32) & 0xFFFF
            assert int(low.count_nonzero()) > 0.9 * low.numel()
    finally:
        del WRITES["far"]
