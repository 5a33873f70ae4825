"""Host memory that the system does not lock: the error says what it was, how much, and what helps."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadzero.errors import OffloadError
from offloadzero.memory import device as devices
from offloadzero.memory import pages
from offloadzero.memory.arena import allocate_host
from offloadzero.memory.device import CudaDevice
from tests.simulated.device import SimulatedDevice, simulated
from tests.support.tiny import make_engine, settings, tokens


class Refusing:
    """A CUDA runtime that locks nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.last_error = 0  # until it is asked for, as by the check of a launch

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.asked.append((address, num_bytes, flags))
        self.last_error = 2
        return 2

    def cudaHostUnregister(self, _address: int) -> int:  # noqa: N802
        self.last_error = 713
        return 713

    def launch(self, *_size: int, device: torch.device) -> torch.Tensor:
        """In the place of a kernel on the device: its check raises what is left of an earlier call."""
        assert device == torch.device("cuda", 0)
        status, self.last_error = self.last_error, 0
        if status:
            raise RuntimeError(f"CUDA error {status}")
        return torch.empty(1)

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return {2: "out of memory"}[status]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    refusing = Refusing()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    launching = SimpleNamespace(**{**vars(torch), "zeros": refusing.launch})
    monkeypatch.setattr(devices, "torch", launching)
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


def test_a_refusal_does_not_come_back_at_the_next_kernel(runtime: Refusing) -> None:
    """A script that does without pinning after it would otherwise get the error at its first launch."""
    device, buffer = CudaDevice(torch.device("cuda", 0)), torch.empty(12345, dtype=torch.uint8)
    with pytest.raises(OffloadError, match="could not be page-locked"):
        device.pin(buffer, label="the host arena")
    runtime.launch(1, device=device.torch_device)
    with pytest.raises(OffloadError, match="cudaHostUnregister failed: error 713"):
        device.unpin(buffer)
    runtime.launch(1, device=device.torch_device)


class Granting:
    """A CUDA runtime that locks what it is asked to, and notes how many pages there were by then."""

    def __init__(self) -> None:
        self.pages: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:  # noqa: N802
        self.pages.append(num_present_pages(address, num_bytes))
        return 0


def num_present_pages(address: int, num_bytes: int) -> int:
    """Pages of the process's memory that it has been given, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    present = ctypes.create_string_buffer(-(-num_bytes // mmap.PAGESIZE))
    assert libc.mincore(address, num_bytes, present) == 0, ctypes.get_errno()
    return sum(page & 1 for page in present.raw)


NUM_PAGES = 64


@pytest.fixture
def granting(monkeypatch: pytest.MonkeyPatch) -> Granting:
    granting = Granting()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: granting)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    return granting


def test_pages_are_there_before_they_are_locked(granting: Granting) -> None:
    """Else the driver would have each of them made, on one thread."""
    buffer = allocate_host(NUM_PAGES * mmap.PAGESIZE)
    assert num_present_pages(buffer.data_ptr(), buffer.nbytes) < NUM_PAGES
    CudaDevice(torch.device("cuda", 0)).pin(buffer, label="the host arena")
    assert granting.pages == [NUM_PAGES]


@pytest.mark.usefixtures("granting")
def test_pages_are_made_by_a_thread_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them at once, each a range of its own."""
    ranges: list[tuple[int, int]] = []
    all_there = threading.Barrier(4)

    def madvise(address: int, num_bytes: int, _advice: int) -> int:
        ranges.append((address, address + num_bytes))
        all_there.wait(timeout=20)
        return 0

    monkeypatch.setattr(pages, "_libc", SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(4)))
    buffer = allocate_host(NUM_PAGES * mmap.PAGESIZE)
    CudaDevice(torch.device("cuda", 0)).pin(buffer, label="the host arena")
    start, share = buffer.data_ptr(), buffer.nbytes // 4
    assert sorted(ranges) == [(start + i * share, start + (i + 1) * share) for i in range(4)]


@pytest.mark.usefixtures("granting")
def test_the_log_says_how_long_pinning_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_bytes, took_s = 25_000_000 // mmap.PAGESIZE * mmap.PAGESIZE, 0.5
    times = iter([7.0, 7.0 + took_s])
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    with caplog.at_level(logging.INFO, logger="offloadzero.device"):
        CudaDevice(torch.device("cuda", 0)).pin(allocate_host(num_bytes), label="the host arena")
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "the host arena: pinned 0.0 GB in 0.5 s, 2000 s per 100 GB"


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


def test_memory_of_inputs_that_is_not_locked_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that goes on with smaller batches has the whole budget for them."""

    def pin(_device: SimulatedDevice, _buffer: torch.Tensor, *, label: str) -> None:
        if "activation" in label:
            raise OffloadError(f"{label}: refused")

    monkeypatch.setattr(SimulatedDevice, "pin", pin)
    monkeypatch.setattr(SimulatedDevice, "unpin", lambda *_: None)
    with simulated(monkeypatch):
        engine = make_engine(settings(tmp_path, placement="host", activation_checkpoints={"tier": "host"}))
        before = engine.reserved_bytes()
        for seed in range(2):
            with pytest.raises(OffloadError, match="refused"):
                engine(tokens(seed, batch=4, length=33))
        assert engine.reserved_bytes() == before
        with torch.no_grad():
            assert engine(tokens(2)).isfinite()
        engine.close()


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(pages.mmap, "mmap", Mapping)
    assert bytes(pages.map_pages(2 * mmap.PAGESIZE)) == bytes(2 * mmap.PAGESIZE)
