"""Host memory that the system does not lock: the error says what it was, how much, and what helps."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero.errors import OffloadError
from offloadzero.memory import device as devices
from offloadzero.memory.device import CudaDevice
from tests.simulated.device import SimulatedDevice, simulated
from tests.tiny import make_engine, settings, tokens


class Refusing:
    """A CUDA runtime that locks nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.asked.append((address, num_bytes, flags))
        return 2

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return {2: "out of memory"}[status]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    refusing = Refusing()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    return refusing


@pytest.mark.parametrize("limit", [8192, resource.RLIM_INFINITY])
def test_memory_that_is_not_locked_is_named(
    limit: int, runtime: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.resource, "getrlimit", lambda _what: (limit, limit))
    buffer = torch.empty(12345, dtype=torch.uint8)
    with pytest.raises(OffloadError) as caught:
        CudaDevice(torch.device("cuda", 0)).pin(buffer, label="the host arena")
    assert runtime.asked == [(buffer.data_ptr(), 12345, 1)]
    said = str(caught.value)
    assert said.startswith(
        "the host arena: 12,345 bytes could not be page-locked (cudaHostRegister: out of memory, error 2; "
    )
    assert f"is {'8,192 bytes' if limit == 8192 else 'unlimited'})" in said
    for help_ in ("ulimit", "offloadzero.placement", "offloadzero.budgets.host", '"pin_memory": false'):
        assert help_ in said


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("what", ["the host arena", "activation checkpoints"])
def test_an_engine_that_cannot_lock_its_memory_says_which(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = CudaDevice(torch.device("cuda", 0))
    pinned: list[str] = []

    def pin(_device: SimulatedDevice, buffer: torch.Tensor, *, label: str) -> None:
        pinned.append(label)
        if what in label:
            cuda.pin(buffer, label=label)

    def unpin(_device: SimulatedDevice, _buffer: torch.Tensor) -> None:
        pass

    monkeypatch.setattr(SimulatedDevice, "pin", pin)
    monkeypatch.setattr(SimulatedDevice, "unpin", unpin)
    keys: dict[str, Any] = {"activation_checkpoints": {"tier": "host"}} if "activation" in what else {}

    def train() -> None:
        engine = make_engine(settings(tmp_path, placement="host", **keys))
        try:
            engine.backward(engine(tokens(0, batch=4, length=33)))
        finally:
            engine.close()

    with simulated(monkeypatch), pytest.raises(OffloadError, match=f"{what}.*bytes could not be page-locked"):
        train()
    assert pinned[0] == "the host arena"
