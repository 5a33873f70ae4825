"""The command `offloadzero plan` for a small model on a machine that is described, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offloadzero.planning.hardware import Hardware, Memory
from tests.planning.test_time_model import KNOWN
from tests.support.tiny import settings

MIB, GIB = 1 << 20, 1 << 30
SHAPE = "llama:64/3/4/101"
MACHINE = Hardware(Memory(host=8 * GIB, nvme=8 * GIB), KNOWN, num_cores=4, process_bytes=300 * MIB)


def write(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def words(
    tmp_path: Path, *more: str, machine: Hardware | str = MACHINE, model: str = SHAPE, **keys: Any
) -> list[str]:
    """A plan's command; `machine` may be what stands for the file of one."""
    config = write(tmp_path / "config.json", settings(tmp_path, **keys))
    hardware = machine if isinstance(machine, str) else write(tmp_path / "machine.json", machine.to_json())
    return ["plan", "--model", model, "--config", config, "--hardware", hardware, "--sequence", "16", *more]


# Fixtures: what words() with their arguments prints, on standard error where the user is mistaken; the same as JSON.
PlanText = Callable[..., str]
PlanJson = Callable[..., dict[str, Any]]
