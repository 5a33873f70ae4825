"""The numbers in the benchmarks' command lines. No torch at import."""

from __future__ import annotations

import argparse
import re

COUNTS = {"": 1, "K": 10**3, "k": 10**3, "M": 10**6, "m": 10**6, "B": 10**9, "b": 10**9}
BYTES = {"": 1, "GiB": 1 << 30}
_NUMBER = re.compile(r"(\d+\.?\d*)(\D*)")


def _read(text: str, units: dict[str, int], wanted: str) -> int:
    found = _NUMBER.fullmatch(text)
    value = float(found[1]) * units.get(found[2], 0) if found is not None else 0.0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive number, {wanted}")
    return round(value)


def read_count(text: str) -> int:
    """Read `20M`, `7.2B` or a number."""
    return _read(text, COUNTS, "K, M or B behind it: 20M, 7.2B")


def read_gib(text: str) -> int:
    """Read `110GiB` or a number of bytes."""
    return _read(text, BYTES, "GiB behind it or bytes: 110GiB")
