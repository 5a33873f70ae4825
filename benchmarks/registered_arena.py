"""A training step with everything on NVMe, its transfer buffers registered with io_uring or not, interleaved.

    python benchmarks/registered_arena.py --path DIRECTORY [--rounds 15] [--report FILE.md]

Two engines of the same model in one process, on files of their own; `pin_memory: false` leaves the buffers of one of
them unregistered, and with the CPU as the device that is its only effect. They take turns, in a new order each round,
and the result is the median over the rounds of the ratio within a round. A step ends when its updates are home.

CPU time is that of the process in user and kernel mode (getrusage), all threads, Adam and the model included: one
sequence of one token, so that the states' traffic is most of it. Work that the kernel does on its own threads is in no
figure. `--small-pages` measures where a machine gives no huge pages: unregistered memory is then pinned by the
4 KiB page at every transfer.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import platform
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from aio_engine import GIB, filesystem_of  # noqa: E402
from torch import nn  # noqa: E402

import offloadzero  # noqa: E402

NUM_WARMUP_STEPS = 2
PR_SET_THP_DISABLE = 41


class Sample(NamedTuple):
    step_s: float
    num_bytes: int
    cpu_s: float
    kernel_cpu_s: float

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.num_bytes / 1e9)

    @property
    def kernel_cpu_s_per_gb(self) -> float:
        return self.kernel_cpu_s / (self.num_bytes / 1e9)


class Model(nn.Module):
    """Equal linear blocks: a model of weights to move and hardly any computation."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


class Contender:
    """One engine and its steps."""

    def __init__(self, args: argparse.Namespace, *, is_registered: bool) -> None:
        torch.manual_seed(0)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "cpu_offload_use_pin_memory": is_registered},
            "offloadzero": {"device": "cpu", "placement": "nvme", "nvme_path": str(args.path)},
        }
        config["aio"] = {"queue_depth": args.queue_depth, "intra_op_parallelism": args.threads}
        model = Model(args.width, args.blocks)
        self.engine = offloadzero.initialize(model=model, config=config)[0]
        self._x = torch.randn(1, args.width, dtype=torch.bfloat16)
        self.losses: list[float] = []

    @property
    def files(self) -> Any:
        return self.engine.optimizer.runtime.store.nvme

    def step(self) -> Sample:
        stats = self.files.engine.stats()
        before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        loss = self.engine(self._x)
        self.engine.backward(loss)
        self.engine.step()
        self.engine.synchronize()
        step_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
        moved = self.files.engine.stats()
        self.losses.append(float(loss.detach()))
        return Sample(
            step_s,
            sum(moved[key] - stats[key] for key in ("bytes_read", "bytes_written")),
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            after.ru_stime - before.ru_stime,
        )


def measure(contenders: dict[str, Contender], num_rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for contender in contenders.values():
        for _ in range(NUM_WARMUP_STEPS):
            contender.step()
    for number in range(num_rounds):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            samples[name].append(contenders[name].step())
    first, *others = [contender.losses for contender in contenders.values()]
    if any(losses != first for losses in others):
        raise SystemExit("the contenders computed different losses")
    return samples


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def table(samples: dict[str, list[Sample]]) -> list[str]:
    reference = samples["unregistered"]
    lines = [
        "| buffers | step s | ratio | CPU s/GB | ratio | in the kernel, s/GB | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, own in samples.items():
        cells = [name]
        for field in ("step_s", "cpu_s_per_gb"):
            values = [getattr(sample, field) for sample in own]
            ratios = [value / getattr(other, field) for value, other in zip(values, reference, strict=True)]
            cells += [f"{statistics.median(values):.4f}", "1" if own is reference else quartiles(ratios)]
        # The clock of kernel time is too coarse for one step: the time is that of all steps.
        in_kernel = statistics.mean(sample.kernel_cpu_s_per_gb for sample in own)
        share = in_kernel / statistics.mean(sample.kernel_cpu_s_per_gb for sample in reference)
        cells += [f"{in_kernel:.4f}", "1" if own is reference else f"{share:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def environment_lines(path: Path, load: float) -> list[str]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else platform.machine()
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return [
        f"- date: {datetime.date.today()}",
        f"- machine: {os.cpu_count()} x {cpu}, {memory_gib:.0f} GiB; load before: {load:.1f}",
        f"- kernel: {platform.system()} {platform.release()}; filesystem: {filesystem_of(path)}",
        f"- torch {torch.__version__}; Python {platform.python_version()}",
    ]


def refuse_huge_pages() -> None:
    """Switch huge pages off for this process's later allocations."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        raise SystemExit(f"prctl: {os.strerror(ctypes.get_errno())}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A training step on NVMe with registered buffers and without."
    )
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on the drive")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of the file engine")
    parser.add_argument("--small-pages", action="store_true", help="no huge pages in this process")
    parser.add_argument("--report", type=Path, help="where the table goes (standard output too)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    load = os.getloadavg()[0]
    if args.small_pages:
        refuse_huge_pages()
    contenders = {
        name: Contender(args, is_registered=name == "registered") for name in ("unregistered", "registered")
    }
    try:
        samples = measure(contenders, args.rounds)
        num_bytes = samples["registered"][0].num_bytes
        num_params = sum(param.numel() for param in contenders["registered"].engine.module.parameters())
        options = f"--rounds {args.rounds} --width {args.width} --blocks {args.blocks}"
        options += f" --queue-depth {args.queue_depth} --threads {args.threads}"
        options += " --small-pages" * args.small_pages
        lines = ["# Registered buffers in a training step", "", *environment_lines(args.path, load)]
        lines += [f"- command: `python benchmarks/registered_arena.py {options}`"]
        lines += [f"- {num_params / 1e6:.0f}M parameters, {num_bytes / 1e9:.2f} GB of file traffic per step"]
        lines += [f"- {name}: {contender.files.description}" for name, contender in contenders.items()]
        text = "\n".join([*lines, "", *table(samples)]) + "\n"
    finally:
        for contender in contenders.values():
            contender.engine.close()
    print(text)
    if args.report:
        args.report.write_text(text)


if __name__ == "__main__":
    main()
