"""Times and sizes in the form that people read."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def duration_text(seconds: float) -> str:
    """Return a time with three digits: 430 us, 1.25 ms, 2.5 s."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def size_text(num_bytes: float) -> str:
    """Return a size in the largest binary unit that leaves at least 1: 4 GiB, 1.5 MiB, 512 B."""
    for power in range(len(_UNITS) - 1, 0, -1):
        size = 1024**power
        if abs(num_bytes) >= size:
            digits = ".3g" if num_bytes < 999.5 * size else ".0f"
            return f"{num_bytes / size:{digits}} {_UNITS[power]}"
    return f"{num_bytes:.0f} B"


def format_bytes(num_bytes: int) -> str:
    """Return a size of a table: two digits behind the point, and a binary unit."""
    value = float(num_bytes)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def count_text(count: int) -> str:
    return f"{count / 1e9:,.3f} billion" if count >= 1e8 else f"{count:,}"


def time_text(seconds: float) -> str:
    """Return the time of a step, long ones in whole seconds."""
    return duration_text(seconds) if seconds < 1000 else f"{seconds:,.0f} s"


def years_text(years: float) -> str:
    """Return years, or the days of less than one: 2.5 years, 12.0 days."""
    return f"{years:,.1f} years" if years >= 1 else f"{years * 365.25:,.1f} days"


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
