"""What second places on the drive give and cost: clipping, durable runs, checkpoints in the background.

python benchmarks/versions.py --directory /mnt/nvme [--params 650M] [--turns 2] [--modes waits tried ...]
                              [--before CHECKOUT]

A Llama of random weights, all of it on NVMe but gradients that are kept, which are in host memory; one sequence of 64
tokens a step, so that the drive binds. Each turn is a process of its own for each mode, one after another. A step's
time is that of the loop; the last one waits until all is home. A drive's rate is another one every few minutes: each
process measures the mixed rate of records that are read and written before its first step and behind its last one,
and `bound_s` is what the bytes of a step take at the mean of the two. `--before` is a checkout, with compiled modules,
of the library as it was before there were second places (fef3458): each mode that it has is run with it too, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import offloadzero
from offloadzero.cli.bench.traffic import (
    RandomMemory,
    ScratchFile,
    Traffic,
    Workload,
    WriteAllowance,
    chunk_segments,
    pump,
)
from offloadzero.io.engine import AioEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from llama_model import Llama, num_params, size_with

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arguments import read_count

TOKENS, NEVER, ALWAYS, SOMETIMES = 64, 1e9, 1e-3, 1e4
BITES_AT, GROWS = 5, 1e6  # the step whose loss is larger by this factor under SOMETIMES, of ten
MODES: dict[str, dict[str, Any]] = {
    "waits": {"gradient_clipping": NEVER, "versions": False},
    "tried": {"gradient_clipping": NEVER, "versions": True},
    "bites": {"gradient_clipping": ALWAYS, "versions": True},
    "bites in one of ten": {"gradient_clipping": SOMETIMES, "versions": True},
    "durable": {"gradient_clipping": NEVER, "durable": True},
    "in backward": {"gradient_clipping": 0.0},
    "durable, in backward": {"gradient_clipping": 0.0, "durable": True},
    "saves at once": {"gradient_clipping": NEVER, "versions": True, "wait": True},
    "saves in the background": {"gradient_clipping": NEVER, "versions": True, "wait": False},
}
# Without second places a step whose clipping bites is one that waits, as any with clipping is.
BEFORE = ("waits", "bites", "bites in one of ten", "in backward", "saves at once")


def moved_gb() -> tuple[float, float]:
    """Read and written by this process's drives so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]) / 1e9, int(counts["write_bytes"]) / 1e9


class Yardstick:
    """What the drive gives mixed traffic now: the states of four million parameters each, read and written back."""

    NUM_BYTES, SLOTS, CHUNK = 4 << 30, 3, 4 << 20  # of the file, records in flight, elements

    def __init__(self, directory: Path) -> None:
        self._file, self._segments = ScratchFile(str(directory)), chunk_segments(self.CHUNK)
        record_bytes = sum(size for _, size in self._segments)
        self._memory = RandomMemory(self.SLOTS * record_bytes)
        with AioEngine() as engine:
            target = self._file.open(engine)
            for offset in range(0, self.NUM_BYTES, record_bytes):
                engine.write(target, self._memory.bytes[:record_bytes], offset=offset).wait()
            self._file.num_bytes = offset + record_bytes

    def gbps(self, seconds: float = 3.0) -> float:
        with AioEngine() as engine:
            workload = Workload(
                [self._file],
                Traffic.MIXED,
                segments=self._segments,
                num_slots=self.SLOTS,
                memory=self._memory,
            )
            deadline_s = time.monotonic() + 4 * seconds
            allowance = WriteAllowance(self.NUM_BYTES * 100)
            target = [self._file.open(engine)]
            count = pump(engine, target, workload, allowance, seconds=seconds, deadline_s=deadline_s)
        return (count.bytes_read + count.bytes_written) / count.seconds / 1e9


def run(args: argparse.Namespace) -> dict[str, Any]:
    own = dict(MODES[args.mode])
    if args.is_before:
        own.pop("versions", None)
    clipping, wait = own.pop("gradient_clipping"), own.pop("wait", None)
    kinds = ("param", "master", "exp_avg", "exp_avg_sq")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "offloadzero": {
            "device": "cpu",
            "placement": [{"units": "*", **dict.fromkeys(kinds, "nvme"), "grad": "host"}],
            "nvme_path": str(args.directory / "files"),
            "activation_checkpoints": {},
            "state_layout": args.state_layout,
            **own,
        },
    }
    yardstick = Yardstick(args.directory)
    torch.manual_seed(0)
    size = size_with(args.params)
    with offloadzero.zero.Init(config_dict_or_path=config):
        model = Llama(size)
    engine = offloadzero.initialize(model=model, config=config)[0]
    tokens = torch.randint(0, size.vocab_size, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    step_s, losses, save_s, drive_gbps = [], [], None, [yardstick.gbps()]
    for step in range(args.steps):
        if step == 1:
            before, cpu_s = moved_gb(), time.process_time()
        begun_s = time.monotonic()
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        grows = clipping == SOMETIMES and step % 10 == BITES_AT
        engine.backward(loss * GROWS if grows else loss)
        engine.step()
        if step == args.steps - 1:
            engine.synchronize()
        step_s.append(round(time.monotonic() - begun_s, 2))
        losses.append(loss.item())
        if step == 2 and wait is not None:
            save_begun_s = time.monotonic()
            engine.save_checkpoint(args.directory / "saved", **({} if args.is_before else {"wait": wait}))
            save_s = round(time.monotonic() - save_begun_s, 2)
    after, cpu_s = moved_gb(), time.process_time() - cpu_s
    if not args.is_before:
        engine.finish_saving()
    end_s = time.monotonic()
    drive_gbps.append(yardstick.gbps())
    engine.close()
    moved = sum(after) - sum(before)
    bound_s = moved / (args.steps - 1) / statistics.mean(drive_gbps)
    return {
        "mode": args.mode,
        "library": str(Path(offloadzero.__file__).parents[1]),
        "params": num_params(size),
        "step_s": step_s,
        "median_s": statistics.median(step_s[2:-1]),
        "mean_s": round(statistics.mean(step_s[2:-1]), 2),
        "drive_gbps": [round(rate, 2) for rate in drive_gbps],
        "bound_s": round(bound_s, 2),
        "cpu_s": round(cpu_s / (args.steps - 1), 2),
        "read_gb": round((after[0] - before[0]) / (args.steps - 1), 2),
        "written_gb": round((after[1] - before[1]) / (args.steps - 1), 2),
        **({} if save_s is None else {"save_s": save_s, "saved_after_s": round(end_s - save_begun_s, 2)}),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, required=True, help="on the drive; what is written is removed"
    )
    parser.add_argument("--params", type=read_count, default=650_000_000)
    parser.add_argument("--state-layout", default="fp32")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--before", type=Path, help="a checkout, from before there were second places")
    parser.add_argument("--mode", choices=MODES, help="run this one here and now")
    parser.add_argument("--is-before", action="store_true", help="this run's library knows no second places")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.mode:
        print(json.dumps(run(args)), flush=True)
        return
    own = ["--directory", str(args.directory), "--params", str(args.params), "--steps", str(args.steps)]
    own += ["--state-layout", args.state_layout]
    here = os.environ.copy()
    before = here | {"PYTHONPATH": str(args.before)}
    for _ in range(args.turns):
        for mode in args.modes:
            remove_files(args.directory)
            subprocess.run([sys.executable, __file__, *own, "--mode", mode], check=True, env=here)
            if args.before is not None and mode in BEFORE:
                remove_files(args.directory)
                run_before = [sys.executable, __file__, *own, "--mode", mode, "--is-before"]
                subprocess.run(run_before, check=True, env=before)
    remove_files(args.directory)


def remove_files(directory: Path) -> None:
    for name in ("files", "saved"):
        shutil.rmtree(directory / name, ignore_errors=True)


if __name__ == "__main__":
    main()
