"""Training on real text with the 12-byte state, the compact state, and int8 moments without companding.

    python benchmarks/compact_parity.py --runs DIRECTORY [--steps 1500] [--seeds 0,1,2] [--layouts fp32,compact,naive]
    python benchmarks/compact_parity.py --runs DIRECTORY --report FILE.md --plot FILE.png

The GPT of examples/gpt_model.py with 10.8M parameters in bf16 on the sources of Python's standard library, AdamW.
Runs of one seed see the same initial weights and the same batches and differ in the optimizer's state alone:

- fp32: 16-bit remainder, fp32 moments (12 bytes), the kernel of `offloadzero.native.cpu_adam`;
- compact: 8-bit remainder, companded int8 exp_avg, uint8 square root of exp_avg_sq, the kernel of
  `offloadzero.native.compact`;
- naive: the same remainder, bytes and blocks, but exp_avg and exp_avg_sq are rounded linearly to their block's largest
  magnitude. In torch operations, here.

Every run is one file of losses, so a broken series goes on where it stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from gpt_model import GPT, GPTSize, Text, num_params  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from offloadzero.native.compact import (  # noqa: E402
    COMPACT_BLOCK,
    compact_adam_step,
    compact_decode,
    compact_encode,
    num_scales,
)
from offloadzero.native.cpu_adam import AdamHyper, adam_step  # noqa: E402

SIZE = GPTSize(num_layers=6, width=384, num_heads=6)
BATCH_SIZE, SEQ_LEN = 4, 64
HYPER = AdamHyper(lr=6e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
NUM_WARMUP_STEPS = 100
NUM_LAST_STEPS = 100
MAX_DIFFERENCE = 0.005  # of the mean loss of the last steps, against fp32
LAYOUTS = ("fp32", "compact", "naive")


class Optimizer(Protocol):
    """AdamW over one flat bf16 tensor."""

    def step(self, grad: Tensor, hyper: AdamHyper, step: int) -> None:
        """Update from a bf16 gradient of the same length; `step` counts from 1."""


class Fp32State:
    """12 bytes per parameter."""

    def __init__(self, param: Tensor) -> None:
        self._param = param
        self._remainder = torch.zeros_like(param, dtype=torch.int16)
        self._exp_avg = torch.zeros_like(param, dtype=torch.float32)
        self._exp_avg_sq = torch.zeros_like(param, dtype=torch.float32)

    def step(self, grad: Tensor, hyper: AdamHyper, step: int) -> None:
        moments = self._exp_avg, self._exp_avg_sq
        adam_step(self._param, grad, *moments, hyper=hyper, step=step, master=self._remainder, num_threads=1)


class CompactState:
    """5 bytes per parameter and two scales per block."""

    def __init__(self, param: Tensor) -> None:
        self.record = (
            param,
            torch.zeros_like(param, dtype=torch.int8),
            torch.zeros_like(param, dtype=torch.int8),
            torch.zeros_like(param, dtype=torch.uint8),
            torch.zeros(num_scales(param.numel())),
        )

    def step(self, grad: Tensor, hyper: AdamHyper, step: int) -> None:
        param, *state = self.record
        compact_adam_step(param, grad, *state, hyper=hyper, step=step, num_threads=1)


class NaiveState:
    """The compact state's bytes without companding and without the square root.

    An fp32 step between decoding and encoding; the remainder is the compact layout's own, and so is the least code
    of exp_avg_sq, 1: with 0 the next step divides by eps, and the loss is NaN within 100 steps.
    """

    def __init__(self, param: Tensor) -> None:
        self._compact = CompactState(param)
        shape = (param.numel() // COMPACT_BLOCK, COMPACT_BLOCK)
        self._codes = torch.zeros(shape, dtype=torch.int8), torch.zeros(shape, dtype=torch.uint8)
        self._scales = torch.zeros(shape[0], 1), torch.zeros(shape[0], 1)
        self._master, self._m, self._v, self._unused = (torch.zeros(param.numel()) for _ in range(4))

    def step(self, grad: Tensor, hyper: AdamHyper, step: int) -> None:
        compact_decode(*self._compact.record, self._master, self._unused, self._unused, num_threads=1)
        for flat, code, scale in zip((self._m, self._v), self._codes, self._scales, strict=True):
            flat.copy_((code * scale).view(-1))
        adam_step(self._master, grad, self._m, self._v, hyper=hyper, step=step, num_threads=1)
        self._unused.zero_()
        compact_encode(self._master, self._unused, self._unused, *self._compact.record, num_threads=1)
        for flat, code, scale, largest in zip(
            (self._m, self._v), self._codes, self._scales, (127, 255), strict=True
        ):
            blocks = flat.view(code.shape)
            scale.copy_(blocks.abs().amax(dim=1, keepdim=True) / largest)
            least = 1.0 if code.dtype == torch.uint8 else -127.0
            code.copy_(torch.where(scale > 0, (blocks / scale).round().clamp(min=least), 0.0))


STATES: dict[str, type[Any]] = {"fp32": Fp32State, "compact": CompactState, "naive": NaiveState}


class FlatModel:
    """The model in bf16 with all parameters, and all gradients, as views of one flat tensor each."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = GPT(SIZE, seq_len=SEQ_LEN).to(torch.bfloat16)
        params: list[nn.Parameter] = list(self.model.parameters())
        num_elements = sum(-(-p.numel() // COMPACT_BLOCK) * COMPACT_BLOCK for p in params)
        self.flat = torch.zeros(num_elements, dtype=torch.bfloat16)
        self.grad = torch.zeros_like(self.flat)
        start = 0
        for param in params:
            here = slice(start, start + param.numel())
            self.flat[here] = param.detach().flatten()
            param.data = self.flat[here].view(param.shape)
            param.grad = self.grad[here].view(param.shape)
            start += -(-param.numel() // COMPACT_BLOCK) * COMPACT_BLOCK

    def loss_of(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward; the gradient is in `grad`."""
        self.grad.zero_()
        loss = self.model(tokens, targets)
        loss.backward()
        return loss.item()


def train(layout: str, seed: int, num_steps: int, text: Text) -> list[float]:
    """Loss of every step, in nats per byte."""
    torch.set_num_threads(1)
    model = FlatModel(seed)
    optimizer: Optimizer = STATES[layout](model.flat)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    begin_s = time.perf_counter()
    for step in range(1, num_steps + 1):
        tokens, targets = text.batch(batch_size=BATCH_SIZE, seq_len=SEQ_LEN, generator=generator)
        losses.append(model.loss_of(tokens, targets))
        warmed_up = replace(HYPER, lr=HYPER.lr * min(step / NUM_WARMUP_STEPS, 1.0))
        optimizer.step(model.grad, warmed_up, step)
        if step % 100 == 0:
            mean = statistics.fmean(losses[-100:])
            elapsed_s = time.perf_counter() - begin_s
            print(f"{layout} seed {seed} step {step}: {mean:.4f} ({elapsed_s:.0f} s)", flush=True)
    return losses


def run_path(folder: Path, layout: str, seed: int, num_steps: int) -> Path:
    return folder / f"{layout}-{seed}-{num_steps}.json"


def report(folder: Path, seeds: list[int], num_steps: int) -> str:
    """The table; a difference over MAX_DIFFERENCE is marked."""

    def last(layout: str, seed: int) -> float:
        losses = json.loads(run_path(folder, layout, seed, num_steps).read_text())
        return statistics.fmean(losses[-NUM_LAST_STEPS:])

    parameters = num_params(SIZE, seq_len=SEQ_LEN)
    lines = [
        "# The compact state on real text",
        "",
        f"- date: {datetime.date.today()}; {platform.machine()}, torch {torch.__version__}",
        f"- GPT of {parameters / 1e6:.1f}M parameters ({SIZE.num_layers} blocks, width {SIZE.width}), bf16, "
        f"{BATCH_SIZE} x {SEQ_LEN} bytes of Python source per step, {num_steps} steps",
        f"- AdamW, lr {HYPER.lr} after {NUM_WARMUP_STEPS} steps of warm-up, weight decay "
        f"{HYPER.weight_decay}, no clipping",
        "- command: `python benchmarks/compact_parity.py --runs DIRECTORY`, then with `--report` and `--plot`",
        "",
        f"Mean training loss of the last {NUM_LAST_STEPS} steps in nats per byte, and its distance from the run of",
        "the same seed with the fp32 layout.",
        "",
        "| seed | fp32 (12 bytes) | compact (5.06 bytes) | int8 without companding |",
        "| --- | --- | --- | --- |",
    ]
    for seed in seeds:
        exact = last("fp32", seed)
        cells = [f"{exact:.4f}"]
        for layout in ("compact", "naive"):
            loss = last(layout, seed)
            cells.append(f"{loss:.4f} ({100 * (loss / exact - 1):+.2f} %)")
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
        if abs(last("compact", seed) / exact - 1) > MAX_DIFFERENCE:
            print(f"seed {seed}: compact is further than {MAX_DIFFERENCE:.1%} from fp32", file=sys.stderr)
    return "\n".join(lines) + "\n"


def plot(folder: Path, seeds: list[int], num_steps: int, target: Path) -> None:
    """Means over 50 steps of every run, and below them the distance from fp32."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    window = 50
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    for layout, color in zip(LAYOUTS, ("tab:blue", "tab:orange", "tab:red"), strict=True):
        for seed in seeds:
            curves = []
            for name in (layout, "fp32"):
                losses = torch.tensor(json.loads(run_path(folder, name, seed, num_steps).read_text()))
                curves.append(losses[: num_steps // window * window].view(-1, window).mean(1))
            steps = torch.arange(1, len(curves[0]) + 1) * window
            label = layout if seed == seeds[0] else None
            above.plot(steps, curves[0], color=color, label=label, linewidth=1)
            if layout != "fp32":
                below.plot(steps, 100 * (curves[0] / curves[1] - 1), color=color, label=label, linewidth=1)
    above.set_ylabel(f"loss, nats/byte (mean of {window} steps)")
    above.set_yscale("log")
    above.legend()
    below.set_ylabel("distance from fp32, %")
    below.set_yscale("symlog", linthresh=1)
    below.axhspan(-100 * MAX_DIFFERENCE, 100 * MAX_DIFFERENCE, color="0.9")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the runs' losses")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.report or args.plot:
        if args.report:
            args.report.write_text(report(args.runs, seeds, args.steps))
        if args.plot:
            plot(args.runs, seeds, args.steps, args.plot)
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    text = Text.load()
    for seed in seeds:
        for layout in args.layouts.split(","):
            path = run_path(args.runs, layout, seed, args.steps)
            if path.exists():
                continue
            losses = train(layout, seed, args.steps, text)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(losses))
            partial.rename(path)


if __name__ == "__main__":
    main()
