"""Times in the form that people read."""

from __future__ import annotations


def duration_text(seconds: float) -> str:
    """Return a time with three digits: 430 us, 1.25 ms, 2.5 s."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
