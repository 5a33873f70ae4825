"""Homes on files, for tests that drive the NVMe tier by itself."""

from __future__ import annotations

import torch

from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.tiers import Extent, Home


def file_home(tier: NvmeTier, offset: int, num_bytes: int, *, label: str = "x") -> Home:
    """A range of the files, of bytes."""
    extent = Extent(offset, num_bytes)
    return Home(label=label, dtype=torch.uint8, num_elements=num_bytes, backing=tier, place=extent)
