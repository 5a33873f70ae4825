"""The largest differences of every script with us from plain torch: `python -m tests.scripts [NAME ...]`.

OFFLOADZERO_TEST_STEPS=50 for the long form. Prints Markdown.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings

import torch

from tests.scripts.common import (
    NUM_STEPS,
    Result,
    Script,
    offloaded,
    reference,
    run,
    worst_relative_difference,
)
from tests.scripts.test_scripts import SCRIPTS


def largest_difference(ours: Result, plain: Result) -> float:
    """Of any weight or note."""
    pairs = [(ours.weights.get(k), v) for k, v in plain.weights.items()]
    pairs += [(ours.notes.get(k), v) for k, v in plain.notes.items()]
    found = [
        float((a.double() - b.double()).abs().max()) if a is not None else float("inf") for a, b in pairs
    ]
    return max((x if x == x else float("inf") for x in found), default=0.0)


def compare(script: Script, placement: str) -> str:
    """The cells of one row."""
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        plain = reference(script)
        try:
            ours = run(script, offloaded(placement, directory))
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:90]} | |"
    losses = worst_relative_difference(ours.losses, plain.losses)
    norms = worst_relative_difference(ours.grad_norms, plain.grad_norms)
    return f"{100 * losses:.4f} % | {norms:.1e} | {largest_difference(ours, plain):.1e}"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or list(SCRIPTS)
    print(f"{NUM_STEPS} steps, fp32, clipped in every step\n")
    print("| script | placement | loss, largest relative | grad_norm, largest relative | weights, largest |")
    print("| --- | --- | --- | --- | --- |")
    for name in names:
        for placement in ("host", "nvme"):
            print(f"| {name} | {placement} | {compare(SCRIPTS[name][0], placement)} |", flush=True)


if __name__ == "__main__":
    main()
