"""What the machine has (floor 4)."""

from __future__ import annotations

from pathlib import Path

import torch


def available_bytes(device: torch.device | str) -> int:
    """Memory that can be taken now: of the host without swapping, or of a CUDA device."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")
