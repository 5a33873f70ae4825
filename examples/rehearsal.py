"""Seconds that a large model will take, from two small ones of the same width, on the same drive and device."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# More blocks than the leases hold at once: each further block then costs what the one before it did.
NUM_LAYERS = (6, 10)
NUM_STEPS = 3  # the first knows no order of units and fetches none ahead


@dataclass(frozen=True)
class Seconds:
    """Of building a model of so many layers, and of a step."""

    num_layers: int
    build_s: float
    step_s: float


def extrapolate(fewer: Seconds, more: Seconds, num_layers: int) -> Seconds:
    """A straight line through both."""
    share = (num_layers - fewer.num_layers) / (more.num_layers - fewer.num_layers)
    return Seconds(
        num_layers,
        build_s=fewer.build_s + share * (more.build_s - fewer.build_s),
        step_s=fewer.step_s + share * (more.step_s - fewer.step_s),
    )


def read_seconds(log: Path, num_layers: int) -> Seconds:
    """Of the fastest step but the first: what else the machine does makes steps longer and never shorter."""
    start, _, *steps = map(json.loads, log.read_text().splitlines())
    return Seconds(num_layers, start["build_s"], min(row["step_s"] for row in steps))


def rehearse(script: str, options: Sequence[str], num_layers: int) -> Seconds:
    """Train both small models, each in a process of its own, and say what `num_layers` will take.

    Raises:
        CalledProcessError: one of them failed, and has said why.
    """
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for count in NUM_LAYERS:
            log = Path(directory, f"{count}.jsonl")
            print(f"rehearsing with {count} layers", flush=True)
            small = ["--layers", str(count), "--steps", str(NUM_STEPS), "--log", str(log)]
            subprocess.run([sys.executable, script, *options, *small], check=True, stdout=subprocess.DEVNULL)
            found.append(read_seconds(log, count))
    return extrapolate(*found, num_layers)
