"""Engines on the second of two devices, and on both: everything of an engine's goes to the device it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.memory.device import CudaDevice
from offloadzero.memory.lanes import Lane
from offloadzero.memory.tickets import Failures
from tests.simulated.backward import Backward
from tests.simulated.checked import checked
from tests.simulated.device import SimulatedDevice, simulated
from tests.simulated.machine import WrongDeviceError
from tests.support.models import CheckpointedStack, TiedLM, features, tokens
from tests.support.training import Config, assert_same, make_config, run_engine, snapshot

NAMES = ("cuda:0", "cuda:1")


@contextmanager
def two_devices(patch: pytest.MonkeyPatch, way: Backward) -> Iterator[list[SimulatedDevice]]:
    with ExitStack() as stack:
        stack.enter_context(checked())
        yield [
            stack.enter_context(simulated(patch, seed, backward=way, name=name))
            for seed, name in enumerate(NAMES)
        ]


def on(name: str, config: Config) -> Config:
    return {**config, "offloadzero": {**config["offloadzero"], "device": name}}


def steps(engine: Any, make_input: Any) -> Iterator[float]:
    """A micro batch each."""
    for seed in range(3):
        loss = engine(make_input(seed))
        engine.backward(loss)
        engine.step()
        yield loss.item()


@pytest.mark.parametrize(
    ("placement", "way"),
    [("resident", Backward.OTHER_STREAM), *(("mixed", way) for way in Backward)],
)
def test_two_engines_take_turns(
    placement: str, way: Backward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(placement, tmp_path, clipping=0.5)
    forms = [(CheckpointedStack, features), (TiedLM, tokens)]
    expected = [run_engine(make, lambda e, i=give: list(steps(e, i)), config) for make, give in forms]
    with two_devices(monkeypatch, way):
        engines, running = [], []
        for name, (make_model, make_input) in zip(NAMES, forms, strict=True):
            torch.manual_seed(0)
            engine, *_ = offloadzero.initialize(model=make_model(), config=on(name, config))
            engines.append(engine)
            running.append(steps(engine, make_input))
        losses = list(zip(*running, strict=True))
        found = [snapshot(engine, [pair[i] for pair in losses]) for i, engine in enumerate(engines)]
        for engine in engines:
            engine.close()
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("placement", ["resident", "mixed"])
def test_the_other_device_stays_idle(placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(placement, tmp_path)
    expected = run_engine(TiedLM, lambda engine: list(steps(engine, tokens)), config)
    with two_devices(monkeypatch, Backward.THREAD) as (first, second):
        found = run_engine(TiedLM, lambda engine: list(steps(engine, tokens)), on("cuda:1", config))
        assert not first.machine.counts
        assert first.memory.peak_bytes == 0
        assert second.machine.counts["launches"] > 0
    assert_same(found, expected)


def test_what_belongs_to_the_other_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instrument: on CUDA some of this would go unnoticed."""
    with simulated(monkeypatch, name=NAMES[0]) as first, simulated(monkeypatch, name=NAMES[1]) as second:
        ours, theirs = first.machine.new_stream("ours"), second.machine.new_stream("theirs")
        here, there = first.allocate(8), second.allocate(8)
        for wrong in (
            lambda: first.launching_on(theirs).__enter__(),
            lambda: first.record(theirs),
            lambda: ours.wait_event(theirs.record()),
            lambda: first.copy(here, there),
            lambda: here.add_(there),
        ):
            with pytest.raises(WrongDeviceError):
                wrong()


@dataclass
class FakeStream:
    """A stream of torch's as far as its device goes."""

    device: torch.device

    def synchronize(self) -> None:
        """Nothing is outstanding."""


class FakeEvent:
    """An event of torch's: it is recorded on the device of its stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self._cuda.used.append(("record", stream.device.index))

    def synchronize(self) -> None:
        """It is reached."""


class FakeCuda:
    """torch.cuda as far as the device interface calls it: notes on which device each call acts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.used: list[tuple[str, int]] = []
        self.events: list[dict[str, Any]] = []  # by what each was made with
        for name in ("get_device_name", "mem_get_info", "Stream", "current_stream", "synchronize"):
            patch.setattr(torch.cuda, name, self._explicit(name))
        patch.setattr(torch.accelerator, "synchronize", self._explicit("synchronize"))
        patch.setattr(torch.accelerator, "get_memory_info", self._explicit("get_memory_info"))
        patch.setattr(torch.cuda, "is_current_stream_capturing", self._implicit("capturing", False))
        patch.setattr(torch.cuda, "device", self._device)
        patch.setattr(torch.cuda, "stream", self._stream)
        patch.setattr(torch.cuda, "Event", self._event)
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch, "empty", self._empty)
        self.cudaHostRegister = self._implicit("cudaHostRegister", 0)
        self.cudaHostUnregister = self._implicit("cudaHostUnregister", 0)

    def _explicit(self, name: str) -> Any:
        def call(device: Any = None) -> tuple[int, int]:
            self.used.append((name, self.current if device is None else torch.device(device).index))
            return 1, 1

        return call

    def _implicit(self, name: str, result: Any) -> Any:
        def call(*_: Any) -> Any:
            self.used.append((name, self.current))
            return result

        return call

    def _empty(self, *_: Any, device: Any = None, **__: Any) -> None:
        self.used.append(("empty", torch.device(device).index))

    @contextmanager
    def _stream(self, stream: FakeStream | None) -> Iterator[None]:
        """As torch's: with None nothing happens."""
        with nullcontext() if stream is None else self._device(stream.device):
            yield

    def _event(self, **how: Any) -> FakeEvent:
        self.events.append(how)
        return FakeEvent(self)

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before


def test_cuda_is_told_the_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is another one: nothing is left to it."""
    buffer = torch.zeros(4096, dtype=torch.uint8)
    device = CudaDevice(torch.device("cuda", 1))
    with monkeypatch.context() as patch:
        cuda = FakeCuda(patch)
        for call in (
            device.name,
            lambda: device.new_stream("lane"),
            device.current_stream,
            lambda: device.allocate(8),
            lambda: device.pin(buffer, label="buffer"),
            lambda: device.unpin(buffer),
            device.synchronize,
            device.free_bytes,
            device.check_not_capturing,
        ):
            num_before = len(cuda.used)
            call()
            assert [index for _, index in cuda.used[num_before:]] == [1], cuda.used[num_before:]
        assert cuda.current == 0


def test_what_a_lane_launches_goes_to_its_streams_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current device is the first one, whichever an engine has."""
    device = CudaDevice(torch.device("cuda", 1))
    stream: Any = FakeStream(torch.device("cuda", 1))
    with monkeypatch.context() as patch:
        cuda = FakeCuda(patch)
        patch.setattr(device, "new_stream", lambda _name: stream)
        launched_on: list[int] = []
        lane = Lane("copies", Failures(), device)
        lane.submit(lambda: launched_on.append(cuda.current)).wait()
        lane.close()
        assert launched_on == [1]
        assert cuda.used == [("record", 1)]
        assert cuda.current == 0


def test_who_waits_for_an_event_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads in the background that spin would take the cores from the one that launches."""
    device = CudaDevice(torch.device("cuda", 1))
    stream: Any = FakeStream(torch.device("cuda", 1))
    with monkeypatch.context() as patch:
        cuda = FakeCuda(patch)
        first = device.record(stream)
        timed = device.record(stream, timed=True)
        assert cuda.events == [
            {"enable_timing": False, "blocking": True},
            {"enable_timing": True, "blocking": True},
        ]
        assert device.record(stream, timed=True, again=timed) is timed is not first
        assert len(cuda.events) == 2
        assert cuda.used == [("record", 1)] * 3
