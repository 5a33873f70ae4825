"""The growth of a step's cost with the number of units, and the launching thread's Python per unit.

    python benchmarks/scaling.py [--placement nvme] [--blocks 12,24,48] [--width 512] [--rounds 5]

Models of 12, 24 and 48 equal blocks take turns, round by round, each in a process of its own. Seconds per block: the
slope and each model's (step - what the embedding, head and step() cost, the intercept of the line) over its blocks.

Python per unit, on blocks so small (width 32) that computing costs next to nothing:

- in the hooks: the CPU time inside every hook of ours on the launching thread (where a run's record has the wall time
  as `launch_s`), over the number of units, less what it costs to take the time. Copying small gradients and freeing
  them counts;
- in all: the CPU time of a step on that thread less that of the same model in plain PyTorch with its optimizer left
  out. That also counts what is no Python: a plain model of this size stays in the cache of its core, and weights that
  another core has just copied do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from gpt_model import GPT, GPTSize, Text  # noqa: E402

import offloadzero  # noqa: E402
from offloadzero.observe import timeline  # noqa: E402

NUM_WARMUP_STEPS = 3
SMALL_WIDTH, NUM_SMALL_STEPS = 32, 30


def config(placement: str, nvme_path: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
        "offloadzero": {"device": "cpu", "placement": placement, "nvme_path": nvme_path},
    }


def make_model(num_blocks: int, width: int, seq_len: int) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTSize(num_blocks, width, max(1, width // 64)), seq_len=seq_len)


def serve(args: argparse.Namespace) -> None:
    """Train one model: every line read is a step, whose seconds are printed."""
    text = Text.load()
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.nvme_path) as folder:
        model = make_model(args.serve, args.width, args.seq_len)
        engine, *_ = offloadzero.initialize(model=model, config=config(args.placement, folder))
        for number, _ in enumerate(sys.stdin):
            tokens, targets = text.batch(batch_size=4, seq_len=args.seq_len, generator=generator)
            begun_s = time.perf_counter()
            engine.backward(engine(tokens, targets))
            engine.step()
            if number == 0:
                engine.synchronize()
            print(time.perf_counter() - begun_s, flush=True)
        engine.close()


class Worker:
    """A process that does a step on request."""

    def __init__(self, args: argparse.Namespace, num_blocks: int) -> None:
        options = ["--width", args.width, "--seq-len", args.seq_len, "--placement", args.placement]
        options += ["--nvme-path", args.nvme_path, "--serve", num_blocks]
        command = [sys.executable, __file__, *map(str, options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> float:
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("the worker is not piped")
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def growth(args: argparse.Namespace, counts: list[int]) -> dict[str, Any]:
    """Return median seconds per step, the line through them, and the seconds per block."""
    workers = {count: Worker(args, count) for count in counts}
    samples: dict[int, list[float]] = {count: [] for count in counts}
    for worker in workers.values():
        for _ in range(NUM_WARMUP_STEPS):
            worker.step()
    for _ in range(args.rounds):
        for count, worker in workers.items():
            worker.step()  # ends the transfers that the last round left in flight
            samples[count] += [worker.step() for _ in range(max(1, 48 // count))]
    for worker in workers.values():
        worker.close()
    step_s = {count: statistics.median(values) for count, values in samples.items()}
    slope, intercept = statistics.linear_regression(counts, [step_s[count] for count in counts])
    per_block = {count: (step_s[count] - intercept) / count for count in counts}
    return {
        "step_s": step_s,
        "intercept_s": intercept,
        "slope_s_per_block": slope,
        "s_per_block": per_block,
        "spread": max(per_block.values()) / min(per_block.values()) - 1,
        "s_per_block_with_the_rest": {count: step_s[count] / count for count in counts},
    }


def launch_cpu_s(run: Any) -> float:
    """Return median CPU seconds per step of the calling thread, which on a CPU also runs backward."""
    text = Text.load()
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(NUM_SMALL_STEPS):
        tokens, targets = text.batch(batch_size=1, seq_len=16, generator=generator)
        begun_s = time.thread_time()
        run(tokens, targets)
        samples.append(time.thread_time() - begun_s)
    return statistics.median(samples)


def python_per_unit(args: argparse.Namespace, num_blocks: int) -> dict[str, float]:
    """Return microseconds per unit and step."""
    torch.set_num_threads(1)
    plain = make_model(num_blocks, SMALL_WIDTH, 16).to(torch.bfloat16)

    def plain_step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        plain(tokens, targets).backward()
        plain.zero_grad(set_to_none=True)

    plain_s = launch_cpu_s(plain_step)
    ours_s, num_units, _ = offloaded(args, num_blocks)
    CpuTimed.calibrate()
    timeline._Launching = CpuTimed
    _, _, in_hooks_s = offloaded(args, num_blocks, record=True)
    return {
        "num_units": num_units,
        "plain_ms": plain_s * 1e3,
        "ours_ms": ours_s * 1e3,
        "us_per_unit_in_hooks": in_hooks_s / num_units * 1e6,
        "us_per_unit_in_all": (ours_s - plain_s) / num_units * 1e6,
    }


class CpuTimed:
    """A stand-in for the timeline's timer of hooks: CPU time of the thread, less that of an empty one."""

    empty_s = 0.0

    def __init__(self, recorder: timeline.Timeline, sign: int = 1) -> None:
        self._timeline, self._sign = recorder, sign

    def __enter__(self) -> None:
        self._start_s = time.thread_time()

    def __exit__(self, *exception: object) -> None:
        self._timeline.launch_s += self._sign * (time.thread_time() - self._start_s - self.empty_s)

    @classmethod
    def calibrate(cls) -> None:
        """Measure an empty one."""
        recorder, num_samples = timeline.Timeline(is_on=True), 20_000
        for _ in range(num_samples):
            with cls(recorder):
                pass
        cls.empty_s = recorder.launch_s / num_samples


def offloaded(args: argparse.Namespace, num_blocks: int, *, record: bool = False) -> tuple[float, int, float]:
    """Return CPU seconds of a step, the number of units, and (when recorded) the seconds in hooks of a step."""
    with tempfile.TemporaryDirectory(dir=args.nvme_path) as folder:
        settings = config(args.placement, folder)
        run_dir = Path(folder) / "run"
        if record:
            settings["offloadzero"]["observe"] = {"run_dir": str(run_dir)}
        model = make_model(num_blocks, SMALL_WIDTH, 16)
        engine, *_ = offloadzero.initialize(model=model, config=settings)

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
            engine.backward(engine(tokens, targets))
            engine.step()

        step_s = launch_cpu_s(step)
        num_units = len(engine.optimizer.runtime.records)
        engine.close()
        steps = (run_dir / "steps.jsonl").read_text().splitlines() if record else []
    samples = [json.loads(line)["launch_s"] for line in steps]
    in_hooks_s = statistics.median(samples) if record else 0.0
    return step_s, num_units, in_hooks_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--placement", choices=("host", "nvme"), default="host")
    parser.add_argument("--blocks", default="12,24,48")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nvme-path", type=Path, default=Path("."))
    parser.add_argument("--only", choices=("growth", "python"))
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    counts = [int(count) for count in args.blocks.split(",")]
    result: dict[str, Any] = {"placement": args.placement, "width": args.width}
    if args.only != "python":
        result["growth"] = growth(args, counts)
    if args.only != "growth":
        result["python"] = python_per_unit(args, counts[-1])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
