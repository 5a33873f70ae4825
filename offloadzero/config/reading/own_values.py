"""Readers of values that the `offloadzero` block alone has."""

from __future__ import annotations

import os
import re

from offloadzero.config.reading.parse import is_auto, read_bool, read_enum, read_int, read_str
from offloadzero.core.segments import TierName
from offloadzero.errors import ConfigError

TIERS = tuple(tier.value for tier in TierName)

_STEPS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?", re.ASCII)


def read_tier(key: str, value: object) -> TierName:
    """Read the name of a tier. Raises ConfigError."""
    return TierName(read_enum(key, value, TIERS))


def read_bool_or_auto(key: str, value: object) -> bool | None:
    """Read a boolean, or "auto" as None. Raises ConfigError."""
    if is_auto(value):
        return None
    try:
        return read_bool(key, value)
    except ConfigError as error:
        raise ConfigError(key, value, f"{error.allowed}, auto") from None


def read_multiple(key: str, value: object, *, of: int) -> int:
    """Read a positive multiple of a number. Raises ConfigError."""
    number = read_int(key, value, minimum=of)
    if number % of:
        raise ConfigError(key, value, f"a multiple of {of}")
    return number


def read_cores(key: str, value: object) -> tuple[int, ...]:
    """Read a list of CPUs that this process may use, sorted. Raises ConfigError."""
    usable = os.sched_getaffinity(0)
    if not isinstance(value, list) or not value:
        raise ConfigError(key, value, "a list of at least one CPU number")
    cores = {read_int(f"{key}[{index}]", core, minimum=0) for index, core in enumerate(value)}
    if not usable.issuperset(cores):
        raise ConfigError(key, value, f"some of the CPUs this process may use: {sorted(usable)}")
    return tuple(sorted(cores))


def read_steps(key: str, value: object) -> tuple[tuple[int, int], ...]:
    """Read one step, a range such as "3-5", or a list of them, as first and last steps. Raises ConfigError."""
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_read_step_range(key, entry) for entry in entries)


def _read_step_range(key: str, value: object) -> tuple[int, int]:
    allowed = 'steps from 1 on: [3, 4], "10-12"'
    if isinstance(value, str):
        match = _STEPS.fullmatch(value)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(key, value, allowed)
        return first, last
    step = read_int(key, value, minimum=1)
    return step, step


def read_device(key: str, value: object) -> str:
    """Read the name of a device. Raises ConfigError."""
    text = read_str(key, value)
    if _DEVICE.fullmatch(text) is None:
        raise ConfigError(key, value, "allowed cpu, cuda, cuda:N")
    return text
