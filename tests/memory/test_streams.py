"""The streams that compute: which of them a fence lies on."""

from __future__ import annotations

import pytest

from offloadzero.memory.lanes import Accelerator
from tests.simulated.device import SimulatedDevice


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_memory_is_not_written_while_a_stream_of_an_earlier_step_reads_it(num_steps: int) -> None:
    """Steps without gradients wait for nothing: the stream's work may still lie before it when they are over."""
    simulation = SimulatedDevice(slow=["other"])
    accelerator, other = Accelerator(simulation), simulation.new_stream("other")
    with simulation.dispatching():
        weights = simulation.allocate(4096).fill_(7)
        with simulation.launching_on(other):
            accelerator.join_streams()
            accelerator.note_stream()
            read = weights.clone()
        for _ in range(num_steps):
            accelerator.end_step()
        accelerator.join_streams()
        weights.fill_(8)
        simulation.synchronize()
        assert set(read.tolist()) == {7}
    simulation.close()


def test_a_stream_is_forgotten_when_it_has_done_its_work() -> None:
    simulation = SimulatedDevice()
    accelerator, other = Accelerator(simulation), simulation.new_stream("other")
    with simulation.dispatching():
        memory = simulation.allocate(4096)
        with simulation.launching_on(other):
            accelerator.note_stream()
            memory.fill_(7)
        num_fences = []
        for _ in range(3):
            accelerator.end_step()
            simulation.synchronize()
            num_fences.append(len(accelerator.fence()))
        assert num_fences == [2, 2, 1]
    simulation.close()
