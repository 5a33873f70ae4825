"""Trainings recorded bit by bit: `python -m tests.support.recorded_runs --write FILE`, later `--compare FILE`.

Twelve are of one process, and twelve of two ranks.

A change that must not change what is computed is made between the two. The file has the losses, the norm and a hash of
every weight and optimizer state. Bits depend on torch and on the CPU, so both are in it, and another one's is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import sharded
from tests.support.parity import Case, run_case
from tests.support.ranks import run_ranks
from tests.support.training import Outcome, merge, snapshot

COMPACT = {"offloadzero": {"state_layout": "compact"}}
IN_BACKWARD = {"offloadzero": {"update": {"in_backward": True}}}

# Placement, layout, and what the parity matrix varies: accumulation, clipping, activation checkpoints.
RUNS: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "device": ("resident", Case(1, 1.0, False), {}),
    "device compact": ("resident", Case(3, 1.0, True), COMPACT),
    "host": ("host", Case(1, 0.0, False), {}),
    "host clipping": ("host", Case(1, 1.0, False), {}),
    "host clipping accumulation": ("host", Case(3, 1.0, False), {}),
    "host checkpointing in backward": ("host", Case(1, 0.0, True), IN_BACKWARD),
    "host compact": ("host", Case(1, 1.0, False), COMPACT),
    "nvme": ("nvme", Case(1, 0.0, False), {}),
    "nvme clipping accumulation": ("nvme", Case(3, 1.0, False), {}),
    "nvme clipping checkpointing": ("nvme", Case(1, 1.0, True), {}),
    "nvme compact accumulation": ("nvme", Case(3, 0.0, False), COMPACT),
    "mixed": ("mixed", Case(3, 1.0, True), {}),
}
NUM_STEPS = 8


@dataclass(frozen=True)
class RanksRun:
    """A training of `sharded.OddModel` by two ranks."""

    placement: str
    stage: int
    accumulation: int = 1
    over: dict[str, Any] = field(default_factory=dict)  # keys of the configuration


BF16 = {"bf16": {"enabled": True}}
CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
UNCLIPPED = {"gradient_clipping": 0.0}
RANKS_RUNS: dict[str, RanksRun] = {
    "2 ranks, stage 1, device": RanksRun("resident", 1),
    "2 ranks, stage 1, host, accumulation": RanksRun("host", 1, 3),
    "2 ranks, stage 1, nvme": RanksRun("nvme", 1, 1, UNCLIPPED),
    "2 ranks, stage 2, host": RanksRun("host", 2, 1, BF16),
    "2 ranks, stage 2, nvme, accumulation": RanksRun("nvme", 2, 3),
    "2 ranks, stage 3, device, accumulation": RanksRun("resident", 3, 3),
    "2 ranks, stage 3, host": RanksRun("host", 3, 1, UNCLIPPED),
    "2 ranks, stage 3, host, wire of fp32": RanksRun(
        "host", 3, 2, {**BF16, "communication_data_type": "fp32"}
    ),
    "2 ranks, stage 3, nvme, accumulation": RanksRun("nvme", 3, 3),
    "2 ranks, stage 3, nvme, compact": RanksRun("nvme", 3, 1, merge(BF16, COMPACT)),
    "2 ranks, stage 3, host, codes": RanksRun("host", 3, 1, {**BF16, "zero_optimization": CODED}),
    "2 ranks, stage 3, nvme, codes and near copies": RanksRun(
        "nvme", 3, 2, {**BF16, "zero_optimization": {**CODED, "zero_hpz_partition_size": 2}}
    ),
}
ALL_RUNS = (*RUNS, *RANKS_RUNS)


def record(names: Sequence[str] = ALL_RUNS, *, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """What the runs give, as JSON has it."""
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in filter(RUNS.__contains__, names):
            placement, case, over = RUNS[name]
            runs[name] = _digest(run_case(case, placement, directory, num_steps=num_steps, **over))
        of_ranks = [*filter(RANKS_RUNS.__contains__, names)]
        if of_ranks:
            files = Path(directory)
            by_rank = run_ranks(
                _record_rank, 2, files / "ranks", of_ranks, str(files), num_steps, timeout_s=300
            )
            runs.update(
                {name: {f"rank {rank}": one[name] for rank, one in enumerate(by_rank)} for name in of_ranks}
            )
    return {"machine": _machine(), "num_steps": num_steps, "runs": runs}


def _record_rank(rank: int, names: Sequence[str], directory: str, num_steps: int) -> dict[str, Any]:
    found = {}
    for name in names:
        run = RANKS_RUNS[name]
        config = sharded.config_of(
            run.placement, run.stage, Path(directory), world_size=2, accumulation=run.accumulation, **run.over
        )
        engine = sharded.engine_of(config, seed=rank)
        losses = sharded.train(engine, rank, 2, num_steps=num_steps)
        found[name] = _digest(snapshot(engine, losses))
        engine.close()
    return found


def _machine() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _digest(outcome: Outcome) -> dict[str, Any]:
    states = {
        f"{number}.{name}": value
        for number, tensors in outcome.states.items()
        for name, value in tensors.items()
    }
    return {
        "losses": [loss.hex() for loss in outcome.losses],
        "norm": None if outcome.norm is None else outcome.norm.hex(),
        "weights": {name: _hash(value) for name, value in outcome.weights.items()},
        "states": {name: _hash(value) for name, value in states.items()},
    }


def _hash(tensor: Tensor) -> str:
    value = torch.as_tensor(tensor).detach().cpu().contiguous()
    header = f"{value.dtype} {tuple(value.shape)} ".encode()
    return hashlib.sha256(header + value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Every place in which two records differ."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [place]
    return [
        difference
        for key in sorted(before.keys() | after.keys())
        for difference in differences(before.get(key), after.get(key), f"{place}/{key}")
    ]


def main() -> int:
    """Write a record, or compare with one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--compare", type=Path, metavar="FILE")
    args = parser.parse_args()
    now = record()
    if args.write is not None:
        args.write.write_text(json.dumps(now, indent=1))
        print(f"{len(now['runs'])} runs recorded")
        return 0
    found = differences(json.loads(args.compare.read_text()), now)
    print("\n".join(f"differs: {place}" for place in found) or f"{len(now['runs'])} runs, bitwise equal")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
