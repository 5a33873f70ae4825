"""`"placement": "auto"` against every fixed placement that fits the same budgets, in turns.

    python benchmarks/auto_placement.py --directory /mnt/nvme [--cases NAME ...] [--rounds 5]

Each case is a model, its work and budgets. `offloadzero plan` is asked which placements fit, and measures this machine
where nobody has. Those that fit and both ways of "auto", by time and by bytes, take turns (turns.py). Exit status 1
where "auto" by time is more than 5 % slower than the fastest fixed placement.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import turns  # noqa: E402
from turns import Batches, Contender, Result, Trainer  # noqa: E402

LIMIT = 1.05  # "auto" by time over the fastest fixed placement
SEED = 0
BY_TIME, BY_BYTES = "auto", "auto by bytes"
FIXED: dict[str, Any] = {
    "device": "device",
    "host": "host",
    "nvme": "nvme",
    "param device, rest host": {"param": "device", "grad": "host", "states": "host"},
    "param device, rest nvme": {"param": "device", "grad": "nvme", "states": "nvme"},
    "states nvme, rest host": {"param": "host", "grad": "host", "states": "nvme"},
    "param nvme, rest host": {"param": "nvme", "grad": "host", "states": "host"},
    "grad host, rest nvme": {"param": "nvme", "grad": "host", "states": "nvme"},
}
PLACEMENTS: dict[str, Any] = {BY_TIME: "auto", BY_BYTES: "auto", **FIXED}


@dataclass(frozen=True)
class Case:
    """A model, its work in a step, and the memory that it may take."""

    shape: str
    tokens: tuple[int, int]  # micro batch, sequence
    device: str
    host: str
    clipping: float = 0.0
    micro_batches: int = 1
    layout: str = "fp32"

    def config(self, placement: str, directory: str) -> dict[str, Any]:
        """Return the JSON with one of PLACEMENTS."""
        own: dict[str, Any] = {
            "device": "cpu",
            "nvme_path": directory,
            "placement": PLACEMENTS[placement],
            "budgets": {"device": self.device, "host": self.host},
            "state_layout": self.layout,
        }
        if placement == BY_TIME:
            own["placement_tokens"] = self.tokens[0] * self.tokens[1]
        return {
            "train_micro_batch_size_per_gpu": self.tokens[0],
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "offloadzero": own,
        }


SMALL, DEEP, WIDE = "llama:1024/8/8/4096", "llama:768/24/6/8192", "gpt:1536/8/12/8192"
CASES = {
    "a third in memory": Case(SMALL, (1, 256), "300MiB", "600MiB"),
    "states alone too large": Case(SMALL, (1, 256), "300MiB", "1100MiB", clipping=1.0),
    "many small units": Case(DEEP, (1, 256), "300MiB", "1GiB", clipping=1.0),
    "little to compute": Case(WIDE, (1, 16), "600MiB", "1GiB", clipping=1.0),
    "accumulated": Case(SMALL, (1, 128), "300MiB", "1200MiB", clipping=1.0, micro_batches=3),
    "compact": Case(WIDE, (1, 128), "700MiB", "1GiB", layout="compact"),
    "nearly all in memory": Case(SMALL, (1, 128), "400MiB", "1800MiB"),
    "room for all": Case(DEEP, (1, 64), "4GiB", "4GiB", clipping=1.0),
}


def plan(case: Case, placement: str, directory: str) -> dict[str, Any]:
    """Return the answer of `offloadzero plan`; its key "fits" says whether the placement does."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(case.config(placement, directory), file)
        file.flush()
        command = [sys.executable, "-m", "offloadzero", "plan", "--model", case.shape, "--config", file.name]
        command += ["--sequence", str(case.tokens[1]), "--json", "-"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"offloadzero plan ended with {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def make_trainer(case: Case, placement: str, directory: Path) -> Trainer:
    import torch

    import offloadzero
    from offloadzero.planning.model.shapes import read_shape

    shape = read_shape("model", case.shape)
    assert shape is not None
    config = case.config(placement, str(directory))
    torch.manual_seed(SEED)
    with offloadzero.zero.Init(config_dict_or_path=config):
        model = shape.build()
    engine, *_ = offloadzero.initialize(model=model, config=config)

    def step(batches: Batches) -> Any:
        for tokens, _ in batches:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return Trainer(step, finish=engine.synchronize)


def serve(case: Case, placement: str, directory: Path) -> None:
    channel = turns.take_channel()
    import torch

    import offloadzero
    from offloadzero.planning.model.shapes import read_shape

    shape = read_shape("model", case.shape)
    assert shape is not None
    trainer = make_trainer(case, placement, directory)
    generator = torch.Generator().manual_seed(SEED)

    def next_batches() -> Batches:
        tokens = [
            torch.randint(0, shape.vocabulary, case.tokens, generator=generator)
            for _ in range(case.micro_batches)
        ]
        return [(each, each) for each in tokens]

    turns.serve(channel, trainer, next_batches, version=f"offloadzero {offloadzero.__version__}")


def measure(name: str, args: argparse.Namespace, folder: Path) -> tuple[list[str], bool, list[str]]:
    """Return the rows of a case, whether "auto" is fast enough, and the lines on the machine."""
    case = CASES[name]
    plans = {placement: plan(case, placement, str(folder)) for placement in PLACEMENTS}
    fitting = [placement for placement, answer in plans.items() if answer["fits"]]
    forecast = {placement: plans[placement]["forecast"]["seconds"] for placement in fitting}
    print(f"{name}: {', '.join(f'{one} {seconds:.2f} s' for one, seconds in forecast.items())}", flush=True)

    def start(placement: str) -> Contender:
        command = [sys.executable, __file__, "--directory", str(folder), "--cases", name]
        return Contender(placement, command, folder, environments=[{"OMP_WAIT_POLICY": "passive"}])

    turn_options = argparse.Namespace(
        contenders=fitting, rounds=args.rounds, steps=args.steps, warmup=args.warmup
    )
    results = turns.measure(turn_options, start)
    is_fast, rows = compare(name, results, forecast)
    return rows, is_fast, turns.environment_lines(results, folder)


def compare(
    name: str, results: Mapping[str, Result], forecast: Mapping[str, float]
) -> tuple[bool, list[str]]:
    """Return whether "auto" by time is within the limit of the fastest fixed placement, and the rows of the table."""
    fixed = {placement: result.median_s for placement, result in results.items() if placement in FIXED}
    best_s = min(fixed.values())
    rows = [
        f"| {name if placement == BY_TIME else ''} | {placement} | {result.median_s:.3f} "
        f"| {min(result.step_s):.3f} - {max(result.step_s):.3f} | {result.median_s / best_s:.2f} "
        f"| {forecast[placement]:.3f} |"
        for placement, result in results.items()
    ]
    losses = {tuple(result.losses) for result in results.values()}
    if len(losses) != 1:
        sys.exit(f"{name}: the losses of the placements differ")
    return results[BY_TIME].median_s <= LIMIT * best_s, rows


def main() -> int:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True, type=Path, help="on the drive; made if it is missing")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per placement and round")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps after a placement's start")
    parser.add_argument("--worker", choices=list(PLACEMENTS), help=argparse.SUPPRESS)
    parser.add_argument("--nvme-path", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(CASES[args.cases[0]], args.worker, args.nvme_path)
        return 0
    args.directory.mkdir(parents=True, exist_ok=True)
    rows, slow, machine = list[str](), list[str](), list[str]()
    for name in args.cases:
        with tempfile.TemporaryDirectory(dir=args.directory, prefix="auto-") as folder:
            found, is_fast, machine = measure(name, args, Path(folder))
        rows += found
        slow += [] if is_fast else [name]
    head = ["case", "placement", "median s/step", "min - max", "over the fastest fixed", "forecast s"]
    print("\n".join([*machine, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *rows]))
    print(
        f"\nauto by time is within {LIMIT - 1:.0%} of the fastest fixed placement"
        + (f", but in: {', '.join(slow)}" if slow else ".")
    )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
