"""What the engine asks torch about a CUDA device, with an allocator and a driver of the test's."""

from __future__ import annotations

import pytest
import torch

from offloadzero.memory.device import CudaDevice

GIB = 1 << 30


def test_memory_that_the_allocator_keeps_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine has no room for the very arena that the one before it has given back."""
    asked: list[torch.device] = []
    stats: dict[str, int] = {}

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 30 * GIB, 139 * GIB

    def memory_stats(device: torch.device) -> dict[str, int]:
        asked.append(device)
        return stats

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    device = CudaDevice(torch.device("cuda", 1))
    assert device.free_bytes() == 30 * GIB  # torch has not begun to count
    assert set(asked) == {torch.device("cuda", 1)}
    stats |= {
        "reserved_bytes.all.current": 108 * GIB,
        "active_bytes.all.current": 5 * GIB,
        "inactive_split_bytes.all.current": 3 * GIB,  # beside tensors that live: nobody gets these
    }
    assert device.free_bytes() == 130 * GIB
