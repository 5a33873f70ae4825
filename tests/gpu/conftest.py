"""What tests on a CUDA device share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Read when cuBLAS is first used: without it, its results may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from offloadzero.memory.arena import allocate_host
from offloadzero.memory.device import find_device
from offloadzero.memory.lanes import Accelerator

MIB = 1024 * 1024


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    made = Accelerator(find_device("cuda"))
    # CUDA loads a kernel at its first launch, and that may wait for the device: not in the middle of a test.
    torch.cuda._sleep(1)
    warm = torch.zeros(1024, device="cuda").fill_(1.0) * 2
    warm.copy_(torch.full_like(warm, 2.0))
    assert torch.equal(warm.cpu(), torch.full((1024,), 2.0))
    assert bool((warm == 2.0).all())
    yield made
    made.asynchronous.synchronize()


@pytest.fixture
def pinned(accelerator: Accelerator) -> Iterator[torch.Tensor]:
    """4 MiB of registered host memory as fp32, zero."""
    buffer = allocate_host(4 * MIB)
    accelerator.pin(buffer, label="a test's buffer")
    yield buffer.view(torch.float32)
    accelerator.asynchronous.synchronize()
    accelerator.unpin(buffer)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
