"""What CUDA refuses, or answers otherwise than the CPU, the simulated device does, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offloadzero.arithmetic import device_math
from offloadzero.errors import ConfigError
from offloadzero.io.registration import memory_of
from offloadzero.native import kernels
from tests.simulated.device import SimulatedDevice, simulated
from tests.simulated.placing import MixedDevicesError


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    with simulated(monkeypatch) as made:
        yield made


def test_host_code_gets_no_device_memory(device: SimulatedDevice) -> None:
    """It would take the address, and end the process."""
    there = device.allocate(4096).view(torch.float32)
    there.fill_(1.0)
    assert not there.is_cpu
    for use in (kernels.sq_norm, lambda tensor: kernels.accumulate(torch.zeros(1024), tensor)):
        with pytest.raises(ConfigError, match="must be a contiguous CPU tensor"):
            use(there)
    with pytest.raises(ConfigError, match="must be in host memory"):
        memory_of(there, must_be_writable=True)
    with pytest.raises(TypeError, match="can't convert"):
        there.numpy()
    for here in (there.cpu(), there.to("cpu")):
        assert here.is_cpu
        assert here.numpy().sum() == kernels.sq_norm(here) == 1024
    assert there.numpy(force=True).sum() == 1024


def test_an_operation_of_the_package_is_on_one_device(device: SimulatedDevice) -> None:
    there, here = device.allocate(4096).view(torch.float32), torch.ones(1024)
    there.copy_(here)  # a copy may go from one to the other
    assert (there + here).sum().item() == 2048  # so may a script's, whose inputs are the host's here
    with pytest.raises(MixedDevicesError, match=r"device_math\.py accumulate: aten\.add_"):
        device_math.accumulate(there, here)
    device_math.accumulate(there, torch.tensor(1.0))  # a number
    device_math.accumulate(there, here.to(device.torch_device))
    assert there.sum().item() == 3072


def test_what_is_made_for_the_device_is_there(device: SimulatedDevice) -> None:
    there = device.allocate(64)
    for named in (device.torch_device, there.device):
        made = torch.ones(3, device=named, requires_grad=True)
        assert device.memory.holds(made)
        assert made.requires_grad
        assert made.tolist() == [1.0] * 3
        assert made.device is device.torch_device
    for on_host in (torch.ones(3), torch.ones(3, device="cpu")):
        assert not device.memory.holds(on_host)
    empty = torch.empty(3, device=device.torch_device)
    assert empty.isnan().all()


def test_an_event_that_is_recorded_again_is_the_later_one(device: SimulatedDevice) -> None:
    """Also to who has kept it from before. A stream that was told to wait for it waits for the earlier one."""
    stream, other = device.current_stream(), device.new_stream("other")
    event = device.record(stream, timed=True)
    earlier = event.point
    other.wait_event(event)
    assert device.record(other, timed=True, again=event) is event
    assert event.point is not earlier
    event.synchronize()  # behind its own first record
    assert earlier.is_reached
    first = device.record(stream, timed=True)
    first.synchronize()
    assert device.elapsed_s(event, first) > 0
    with pytest.raises(AssertionError, match="not made alike"):
        device.record(stream, again=event)


def test_an_event_without_times_has_none(device: SimulatedDevice) -> None:
    first, last = (device.record(device.current_stream(), timed=timed) for timed in (True, False))
    last.synchronize()
    with pytest.raises(AssertionError, match="made without"):
        device.elapsed_s(first, last)


def test_nothing_runs_for_a_thread_whose_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the thread goes on: else a stream that is slow would have run by then, and shown nothing."""
    with simulated(monkeypatch, slow=["other"]) as device:
        other = device.new_stream("other")
        for _ in range(100):
            other.launch(lambda: None)
        device.record(device.current_stream()).synchronize()
        assert len(other.tasks) == 100
