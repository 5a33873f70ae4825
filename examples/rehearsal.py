"""A forecast of a large model's seconds, from two small models of the same width, on the same drive and device."""

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
NUM_STEPS = 3  # the first step knows no order of units and fetches none ahead


@dataclass(frozen=True)
class Seconds:
    """The seconds to build a model of so many layers, and those of a step."""

    num_layers: int
    build_s: float
    step_s: float


def extrapolate(fewer: Seconds, more: Seconds, num_layers: int) -> Seconds:
    """Extend a straight line through both; where it falls, return a bound that counts all seconds for each layer."""

    def at(of_fewer: float, of_more: float) -> float:
        if of_more < of_fewer:
            return num_layers * max(of_fewer / fewer.num_layers, of_more / more.num_layers)
        share = (num_layers - fewer.num_layers) / (more.num_layers - fewer.num_layers)
        return of_fewer + share * (of_more - of_fewer)

    return Seconds(num_layers, build_s=at(fewer.build_s, more.build_s), step_s=at(fewer.step_s, more.step_s))


def falling(fewer: Seconds, more: Seconds) -> list[str]:
    """Name the times that fell with more layers: then the machine was too busy."""
    return [
        f"{more.num_layers} layers took {of_more:.2f} s to {what} and {fewer.num_layers} took {of_fewer:.2f} s: the "
        "machine was busy, and the forecast of it is no more than a bound"
        for what, of_fewer, of_more in (
            ("build", fewer.build_s, more.build_s),
            ("step", fewer.step_s, more.step_s),
        )
        if of_more < of_fewer
    ]


def read_seconds(log: Path, num_layers: int) -> Seconds:
    """Return the fastest step but the first: other load makes steps longer and never shorter."""
    start, _, *steps = map(json.loads, log.read_text().splitlines())
    return Seconds(num_layers, start["build_s"], min(row["step_s"] for row in steps))


def rehearse(script: str, options: Sequence[str], num_layers: int) -> Seconds:
    """Train both small models, each in a process of its own, and forecast the seconds of `num_layers`.

    Raises:
        CalledProcessError: one of them failed, and has printed why.
    """
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for count in NUM_LAYERS:
            log = Path(directory, f"{count}.jsonl")
            print(f"rehearsing with {count} layers", flush=True)
            small = ["--layers", str(count), "--steps", str(NUM_STEPS), "--log", str(log)]
            subprocess.run([sys.executable, script, *options, *small], check=True, stdout=subprocess.DEVNULL)
            found.append(read_seconds(log, count))
    for line in falling(*found):
        print(line, flush=True)
    return extrapolate(*found, num_layers)
