"""The parity matrix: `python -m tests.support.parity [--write]`.

Losses, final weights and optimizer states are bitwise equal wherever the states live, and near plain PyTorch
(fp32 master weights, torch.optim.AdamW, clip_grad_norm_) on the same batches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.training import (
    PLACEMENTS,
    Config,
    Outcome,
    differences,
    make_config,
    one_step,
    run_engine,
    run_plain,
    snapshot,
    worst_relative_difference,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import gpt_model  # noqa: E402

NUM_STEPS = 20  # bitwise, between placements
NUM_PLAIN_STEPS = 50  # against plain PyTorch
SIZE = gpt_model.GPTSize(num_layers=4, width=32, num_heads=4)
SEQ_LEN = 16
BATCH_SIZE = 2
PLAIN_TOLERANCE = 0.002
DOCUMENT = ROOT / "docs" / "how-it-works.md"
BEGIN, END = "<!-- parity:begin -->", "<!-- parity:end -->"


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    accumulation: int
    clipping: float
    checkpointing: bool


@dataclass(frozen=True)
class Row:
    """What was found: the differences by placement, and the worst loss difference from plain PyTorch."""

    case: Case
    differences: dict[str, list[str]]
    worst_plain: float


CASES = tuple(Case(*values) for values in itertools.product((1, 3), (0.0, 1.0), (False, True)))


@functools.cache
def _text() -> gpt_model.Text:
    return gpt_model.Text(gpt_model.read_files(gpt_model.stdlib_sources(), max_bytes=200_000))


def batches(num: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same `num` batches of bytes every time."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(num):
        yield _text().batch(batch_size=BATCH_SIZE, seq_len=SEQ_LEN, generator=generator)


def make_model(case: Case) -> gpt_model.GPT:
    """A GPT with a tied head."""
    return gpt_model.GPT(SIZE, seq_len=SEQ_LEN, checkpoint_activations=case.checkpointing)


def train(engine: Any, case: Case, num_steps: int, at_steps: dict[int, Outcome] | None = None) -> list[float]:
    """The losses; `at_steps[i]` becomes the state after i steps for the i that are in it."""
    losses = []
    for index, (tokens, targets) in enumerate(batches(num_steps * case.accumulation), start=1):
        losses.append(one_step(engine, tokens, targets))
        step, rest = divmod(index, case.accumulation)
        if at_steps is not None and rest == 0 and step in at_steps:
            at_steps[step] = snapshot(engine, losses)
    return losses


def case_config(case: Case, placement: str, directory: Path | str, **over: Any) -> Config:
    """The configuration of a row."""
    return make_config(placement, directory, clipping=case.clipping, accumulation=case.accumulation, **over)


def run_case(
    case: Case, placement: str, directory: Path | str, *, num_steps: int = NUM_STEPS, **over: Any
) -> Outcome:
    """One training."""
    config = case_config(case, placement, directory, **over)
    return run_engine(lambda: make_model(case), lambda engine: train(engine, case, num_steps), config)


@functools.cache
def _plain_losses(accumulation: int, clipping: float, num_steps: int) -> tuple[float, ...]:
    """Plain PyTorch's, with which the engine's are compared whether it checkpoints activations or not."""
    case = Case(accumulation, clipping, checkpointing=False)
    config = case_config(case, "resident", "")
    build = functools.partial(make_model, case)
    return tuple(run_plain(build, lambda engine: train(engine, case, num_steps), config).losses)


def run_row(
    case: Case,
    directory: Path | str,
    *,
    num_steps: int = NUM_STEPS,
    num_plain_steps: int = NUM_PLAIN_STEPS,
    placements: Iterable[str] = PLACEMENTS,
) -> Row:
    """The placements against the resident one, and that one against plain PyTorch."""
    reference = Outcome([], {}, {})
    at_steps = {num_steps: reference}
    config = case_config(case, "resident", directory)
    build = functools.partial(make_model, case)
    resident = run_engine(build, lambda engine: train(engine, case, num_plain_steps, at_steps), config)
    plain = _plain_losses(case.accumulation, case.clipping, num_plain_steps)
    found = {
        placement: differences(run_case(case, placement, directory, num_steps=num_steps), at_steps[num_steps])
        for placement in placements
    }
    return Row(case, found, worst_relative_difference(resident.losses, plain))


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    placements = list(PLACEMENTS)
    lines = [
        f"| accumulation | clipping | checkpointing | {' | '.join(placements)} | vs plain PyTorch |",
        "| --- " * (4 + len(placements)) + "|",
    ]
    for row in rows:
        cells = ["equal" if not row.differences[name] else "DIFFERS" for name in placements]
        case = row.case
        clipping = str(case.clipping) if case.clipping else "off"
        checkpointing = "on" if case.checkpointing else "off"
        lines.append(
            f"| {case.accumulation} | {clipping} | {checkpointing} | {' | '.join(cells)} "
            f"| {100 * row.worst_plain:.4f} % |"
        )
    return "\n".join(lines)


def explanation() -> str:
    """The sentences below the table."""
    size = gpt_model.num_params(SIZE, seq_len=SEQ_LEN)
    return (
        f"A GPT of {SIZE.num_layers} blocks and {size:,} parameters in bf16, on the CPU. *equal*: losses, weights and\n"
        f"both moments are bitwise those of the run with everything on the device, over {NUM_STEPS} steps. Last\n"
        f"column: largest relative difference of the loss from plain PyTorch in any of {NUM_PLAIN_STEPS} steps."
    )


def write_document(text: str) -> None:
    """Replace the block between the marks."""
    head, rest = DOCUMENT.read_text().split(BEGIN)
    _, tail = rest.split(END)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def main() -> int:
    """Print the table; exit status 1 if a cell differs or the loss is off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/how-it-works.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small gain nothing from a second one
    with tempfile.TemporaryDirectory() as directory:
        rows = [run_row(case, directory) for case in CASES]
    text = f"{table(rows)}\n\n{explanation()}"
    print(text)
    for row in rows:
        for placement, found in row.differences.items():
            for line in found[:5]:
                print(f"{row.case} {placement}: {line}", file=sys.stderr)
    if arguments.write:
        write_document(text)
    good = all(not any(row.differences.values()) and row.worst_plain <= PLAIN_TOLERANCE for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
