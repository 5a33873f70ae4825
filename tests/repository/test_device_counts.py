"""What the package asks of a device in a step stays as little as it is: counts of `benchmarks/device_counts.py`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulated.counting import COPIES, DEVICE_WAITS, LAUNCHES, TEMPORARY_BYTES, THREAD_WAITS, counting
from tests.simulated.device import simulated

ROOT = Path(__file__).resolve().parents[2]
NUM_PARAMS, NUM_UNITS = 40, 8  # of the model that is counted
# Gradients, which are small here, are copied to their place together, and the padding is made zero.
IN_BACKWARD = 2 * NUM_UNITS
ADDING = NUM_PARAMS + NUM_UNITS  # each by itself, where micro batches add up
NORMS = NUM_PARAMS + 2 * NUM_UNITS  # in fp64, squared, summed up

# Launches of a step, with updates of records on the device in torch's operations, 29 each; and copies.
CASES = {
    ("host", "in backward"): (IN_BACKWARD, 3 * NUM_UNITS),
    ("host", "clipping"): (IN_BACKWARD, 3 * NUM_UNITS),
    ("host", "accumulation 3"): (IN_BACKWARD + 2 * ADDING + 3, 9 * NUM_UNITS),
    ("host", "checkpoints on nvme"): (IN_BACKWARD, 5 * NUM_UNITS),
    ("nvme", "in backward"): (IN_BACKWARD, 3 * NUM_UNITS),
    ("nvme", "clipping"): (IN_BACKWARD, 3 * NUM_UNITS),
    ("nvme", "accumulation 3"): (IN_BACKWARD + 2 * ADDING + 3, 9 * NUM_UNITS),
    ("nvme", "checkpoints on host"): (IN_BACKWARD, 5 * NUM_UNITS),
    ("device states", "in backward"): (IN_BACKWARD + NORMS + 29 * NUM_UNITS, 0),
    ("device states", "clipping"): (IN_BACKWARD + NORMS + 29 * NUM_UNITS, 0),
    ("device states", "accumulation 3"): (IN_BACKWARD + 2 * ADDING + NORMS + 3 + 29 * NUM_UNITS, 0),
    ("device states", "checkpoints on nvme, planned"): (IN_BACKWARD + NORMS + 29 * NUM_UNITS, 2 * NUM_UNITS),
    ("auto", "clipping"): (IN_BACKWARD + 12 + 2 * 29, 2 * NUM_UNITS),
    ("auto", "accumulation 3"): (IN_BACKWARD + 2 * ADDING + 12 + 3 + 2 * 29, 6 * NUM_UNITS),
    ("auto", "checkpoints on nvme, planned"): (IN_BACKWARD + 12 + 2 * 29, 4 * NUM_UNITS),
}


@pytest.fixture
def device_counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.undo()  # the package's own bound on what waits
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("device_counts")


@pytest.mark.parametrize(("placement", "variant"), CASES)
def test_a_step_asks_for_no_more(placement: str, variant: str, device_counts: Any) -> None:
    launches, copies = CASES[placement, variant]
    found = device_counts.count(placement, variant, num_steps=2)
    counts = found["counts"]
    assert found["units"] == NUM_UNITS
    assert counts[DEVICE_WAITS] == 0
    assert counts[TEMPORARY_BYTES] == 0
    assert 0 < counts[LAUNCHES] <= launches, found["places"]
    if placement == "device states":  # updated in torch's operations, or nothing would be counted of them
        assert any("arithmetic/torch_steps.py" in place for place in found["places"]), found["places"]
    assert counts[COPIES] <= copies, found["places"]
    assert bool(counts[COPIES]) == bool(copies)
    num_micro_batches = 3 if variant == "accumulation 3" else 1
    # For the fetch in forward, for that in backward, for an update.
    assert counts[THREAD_WAITS] <= 3 * num_micro_batches * NUM_UNITS
    if "checkpoints" not in variant or "planned" in variant:
        assert found["first"] == 0


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the package: its own, not what it runs for a script."""
    from offloadzero.arithmetic import device_math
    from offloadzero.memory.lanes import Accelerator

    with counting() as counts, simulated(monkeypatch) as device:
        accelerator = Accelerator(device)
        grad = accelerator.allocate(4 * 1000).view(torch.float32)
        assert counts.of == {TEMPORARY_BYTES: 4000}
        counts.clear()
        grad.zero_()
        assert float((grad * 2 + 1).sum()) == 1000  # the script's: this file
        assert counts.of == {}
        parts = ((0, 500), (500, 1000))
        scratch = accelerator.allocate(device_math.norm_scratch_bytes(parts))
        counts.clear()
        assert device_math.sq_norms(grad, parts, scratch=scratch) == [0.0, 0.0]
        assert counts.of == {DEVICE_WAITS: 1, LAUNCHES: 4}
        assert {place for _, place in counts.places} == {"arithmetic/device_math.py sq_norms_in_pieces"}
        counts.clear()
        device_math.sq_norms(grad, parts)
        assert (
            counts.of[TEMPORARY_BYTES] == scratch.numel()
        )  # of a factory, which torch would ask on a device
        counts.clear()
        device.synchronize()
        host = torch.empty(1000)
        accelerator.copy(host, grad)
        assert counts.of[COPIES] == 1
        assert counts.of[LAUNCHES] == 0
