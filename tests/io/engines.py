"""File engines for tests, of every backend that works here."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from offloadzero.errors import ConfigError
from offloadzero.io.engine import AioEngine

REPOSITORY = Path(__file__).resolve().parents[2]
BACKENDS = ["io_uring", "native_aio", "aiofiles"]
KERNEL_BACKENDS = ["io_uring", "native_aio"]
FILESYSTEMS = ["disk", "tmpfs"]
MIB = 1 << 20
BLOCK, DEPTH = 16384, 4  # of the engine `shallow`


def make_engine(backend: str, **options: int) -> AioEngine:
    try:
        return AioEngine(backend=backend, **options)
    except ConfigError as refusal:
        if "not available here" in str(refusal):
            pytest.skip(str(refusal))
        raise


def random_bytes(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def aligned(data: bytes | int) -> np.ndarray:
    """A copy of `data`, or so many zeros, on a page boundary."""
    num_bytes = data if isinstance(data, int) else len(data)
    memory = np.zeros(num_bytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    copy = memory[start : start + num_bytes]
    if isinstance(data, bytes):
        copy[:] = np.frombuffer(data, np.uint8)
    return copy


def run_script(script: str, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
