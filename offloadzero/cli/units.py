"""Sizes and times in the form that people write and read."""

from __future__ import annotations

import re

from offloadzero.errors import ConfigError

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(s|sec|min|h)?", re.ASCII)
_UNIT_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, None: 1.0}


def read_seconds(key: str, text: str, *, minimum: float) -> float:
    """Read "90", "60s", "1.5min" or "1h". Raises ConfigError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(key, text, 'a time such as "60s" or "2min"')
    seconds = float(match[1]) * _UNIT_S[match[2]]
    if seconds < minimum:
        raise ConfigError(key, text, f"at least {minimum:g} s")
    return seconds


def years_text(years: float) -> str:
    """Return years, or the days of less than one: 2.5 years, 12.0 days."""
    return f"{years:,.1f} years" if years >= 1 else f"{years * 365.25:,.1f} days"


def size_text(num_bytes: float) -> str:
    """Return a size in the largest binary unit that leaves at least 1: 4 GiB, 1.5 MiB, 512 B."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return (
                f"{num_bytes / size:.3g} {unit}"
                if num_bytes < 999.5 * size
                else f"{num_bytes / size:.0f} {unit}"
            )
    return f"{num_bytes:.0f} B"
