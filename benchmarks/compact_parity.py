"""Training on real text with the 12-byte state, the compact state, and int8 moments without companding.

    python benchmarks/compact_parity.py --runs DIRECTORY [--steps 1500] [--batch-size 16] [--seeds 0,1,2]
        [--schedule cosine] [--layouts fp32,control,shaken,compact,compact_shaken,naive]
    python benchmarks/compact_parity.py --runs DIRECTORY --report FILE.md --plot FILE.png

The GPT of examples/gpt_model.py with 10.8M parameters in bf16 on the sources of Python's standard library, AdamW.
Runs of one seed see the same initial weights and the same batches and differ in the optimizer's state alone:

- fp32: 16-bit remainder, fp32 moments (12 bytes), the kernel of `offloadzero.native.kernels`;
- control: the same, but one of the weights starts one bf16 step off. Training is chaotic: this is how far from the
  first run the smallest difference takes it;
- shaken: the same, but every weight starts one bf16 step up or down, at random: how far a difference of the size of
  a rounding in every weight takes it, without any in the states;
- compact: 8-bit remainder, exp_avg and the square root of exp_avg_sq companded to 8 bits each, the kernel of
  `offloadzero.native.kernels`;
- compact_shaken: the same from the start of `shaken`: how much of compact's distance is chaos;
- naive: the same remainder, bytes and blocks, but exp_avg and exp_avg_sq are rounded linearly to their block's largest
  magnitude. In torch operations, here.

The learning rate stays constant after its warm-up, or falls along a cosine to zero at the last step.

Every run is one file of losses, so a broken series goes on where it stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
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

from offloadzero.core.constants import COMPACT_BLOCK, num_scales  # noqa: E402
from offloadzero.native.hyper import AdamHyper  # noqa: E402
from offloadzero.native.kernels import (  # noqa: E402
    adam_step,
    compact_adam_step,
    compact_decode,
    compact_encode,
)

SIZE = GPTSize(num_layers=6, width=384, num_heads=6)
SEQ_LEN = 64
HYPER = AdamHyper(lr=6e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
NUM_WARMUP_STEPS = 100
NUM_LAST_STEPS = 100
MAX_DIFFERENCE = 0.005  # of the mean loss of the last steps, against fp32
LAYOUTS = ("fp32", "control", "shaken", "compact", "compact_shaken", "naive")
SCHEDULES = ("constant", "cosine")


class Optimizer(Protocol):
    """AdamW over one flat bf16 tensor."""

    def step(self, grad: Tensor, hyper: AdamHyper, step: int) -> None:
        """Update from a bf16 gradient of the same length; `step` counts from 1."""


class Fp32State:
    """The state of 12 bytes per parameter."""

    def __init__(self, param: Tensor) -> None:
        self._param = param
        self._remainder = torch.zeros_like(param, dtype=torch.int16)
        self._exp_avg = torch.zeros_like(param, dtype=torch.float32)
        self._exp_avg_sq = torch.zeros_like(param, dtype=torch.float32)

    def step(self, grad: Tensor, hyper: AdamHyper, step: int) -> None:
        moments = self._exp_avg, self._exp_avg_sq
        adam_step(self._param, grad, *moments, hyper=hyper, step=step, master=self._remainder, num_threads=1)


class CompactState:
    """The state of 5 bytes per parameter and two scales per block."""

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


STATES: dict[str, type[Any]] = {
    "fp32": Fp32State,
    "control": Fp32State,
    "shaken": Fp32State,
    "compact": CompactState,
    "compact_shaken": CompactState,
    "naive": NaiveState,
}


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
        """Do forward and backward; the gradient is in `grad`."""
        self.grad.zero_()
        loss = self.model(tokens, targets)
        loss.backward()
        return loss.item()


def learning_rate(step: int, num_steps: int, schedule: str) -> float:
    """Return the learning rate of step 1, 2, ..., `num_steps`."""
    rate = HYPER.lr * min(step / NUM_WARMUP_STEPS, 1.0)
    if schedule == "cosine" and step > NUM_WARMUP_STEPS:
        done = (step - NUM_WARMUP_STEPS) / (num_steps - NUM_WARMUP_STEPS)
        rate *= (1 + math.cos(math.pi * done)) / 2
    return rate


def train(
    layout: str, seed: int, *, num_steps: int, batch_size: int, schedule: str, text: Text
) -> list[float]:
    """Return the loss of every step, in nats per byte."""
    torch.set_num_threads(1)
    model = FlatModel(seed)
    if layout == "control":
        model.flat[:1] *= 1 + torch.finfo(torch.bfloat16).eps
    if layout.endswith("shaken"):
        up_or_down = torch.randint(0, 2, model.flat.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        bits = model.flat.view(torch.int16)
        bits += torch.where(model.flat == 0, 0, up_or_down).to(torch.int16)
    optimizer: Optimizer = STATES[layout](model.flat)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    begin_s = time.perf_counter()
    for step in range(1, num_steps + 1):
        tokens, targets = text.batch(batch_size=batch_size, seq_len=SEQ_LEN, generator=generator)
        losses.append(model.loss_of(tokens, targets))
        hyper = replace(HYPER, lr=learning_rate(step, num_steps, schedule))
        optimizer.step(model.grad, hyper, step)
        if step % 100 == 0:
            mean = statistics.fmean(losses[-100:])
            elapsed_s = time.perf_counter() - begin_s
            print(f"{layout} seed {seed} step {step}: {mean:.4f} ({elapsed_s:.0f} s)", flush=True)
    return losses


class Runs:
    """The losses in a folder of runs of one length and batch size."""

    def __init__(self, folder: Path, num_steps: int, batch_size: int) -> None:
        self.num_steps = num_steps
        self.batch_size = batch_size
        self._folder = folder

    def path(self, layout: str, schedule: str, seed: int) -> Path:
        """Return the path of the losses of one run."""
        return self._folder / f"{layout}-{schedule}-{self.batch_size}-{seed}-{self.num_steps}.json"

    def losses(self, layout: str, schedule: str, seed: int) -> list[float] | None:
        """Return the losses of every step; None where there is no such run."""
        path = self.path(layout, schedule, seed)
        return json.loads(path.read_text()) if path.exists() else None

    def last(self, layout: str, schedule: str, seed: int) -> float | None:
        """Return the mean of the last steps."""
        losses = self.losses(layout, schedule, seed)
        return None if losses is None else statistics.fmean(losses[-NUM_LAST_STEPS:])


def table(runs: Runs, schedule: str, seeds: list[int]) -> list[str]:
    """Return a table with one row a seed; a missing run is an empty cell."""
    lines = [
        f"| seed, lr {schedule} | fp32 (12 bytes) | fp32, one weight off | fp32, all weights off "
        "| compact (5.06 bytes) | compact, all weights off | int8 without companding |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for seed in seeds:
        exact = runs.last("fp32", schedule, seed)
        if exact is None or runs.last("compact", schedule, seed) is None:
            continue
        cells = [str(seed), f"{exact:.4f}"]
        for layout in LAYOUTS[1:]:
            loss = runs.last(layout, schedule, seed)
            cells.append("" if loss is None else f"{loss:.4f} ({100 * (loss / exact - 1):+.2f} %)")
        lines.append(f"| {' | '.join(cells)} |")
        loss = runs.last("compact", schedule, seed)
        if loss is not None and abs(loss / exact - 1) > MAX_DIFFERENCE:
            print(
                f"{schedule}, seed {seed}: compact is further than {MAX_DIFFERENCE:.1%} from fp32",
                file=sys.stderr,
            )
    return [*lines, ""] if len(lines) > 2 else []


def report(runs: Runs, seeds: list[int]) -> str:
    """Return the tables; a difference over MAX_DIFFERENCE is named on stderr."""
    parameters = num_params(SIZE, seq_len=SEQ_LEN)
    lines = [
        "# The compact state on real text",
        "",
        f"- date: {datetime.date.today()}; {platform.machine()}, torch {torch.__version__}",
        f"- GPT of {parameters / 1e6:.1f}M parameters ({SIZE.num_layers} blocks, width {SIZE.width}), bf16, "
        f"{runs.batch_size} x {SEQ_LEN} bytes of Python source per step, {runs.num_steps} steps",
        f"- AdamW, lr {HYPER.lr} after {NUM_WARMUP_STEPS} steps of warm-up, then constant or along a cosine to zero; "
        f"weight decay {HYPER.weight_decay}, no clipping",
        "- command: `python benchmarks/compact_parity.py --runs DIRECTORY --schedule cosine` (and `constant`), then "
        "with `--report` and `--plot`",
        "",
        f"Mean training loss of the last {NUM_LAST_STEPS} steps in nats per byte, and its distance from the run of",
        "the same seed with the fp32 layout. The columns with weights off show what training's chaos does: the same",
        "layout from a start in which one weight, or every weight, is one bf16 step off.",
        "",
    ]
    for schedule in reversed(SCHEDULES):
        lines += table(runs, schedule, seeds)
    return "\n".join(lines)


def plot(runs: Runs, seeds: list[int], schedule: str, target: Path) -> None:
    """Plot means over 50 steps of every run, and below them the distance from fp32."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    window = 50

    def means(layout: str, seed: int) -> Tensor | None:
        losses = runs.losses(layout, schedule, seed)
        return None if losses is None else torch.tensor(losses).unfold(0, window, window).mean(1)

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    colors = ("tab:blue", "tab:green", "tab:olive", "tab:orange", "tab:brown", "tab:red")
    named = {
        "control": "fp32, one weight one step off",
        "shaken": "fp32, all weights one step off",
        "compact_shaken": "compact, all weights one step off",
    }
    for layout, color in zip(LAYOUTS, colors, strict=True):
        label: str | None = named.get(layout, layout)
        for seed in seeds:
            curve, exact = means(layout, seed), means("fp32", seed)
            if curve is None or exact is None:
                continue
            steps = torch.arange(1, len(curve) + 1) * window
            above.plot(steps, curve, color=color, label=label, linewidth=1)
            if layout != "fp32":
                below.plot(steps, 100 * (curve / exact - 1), color=color, linewidth=1)
            label = None
    above.set_ylabel(f"loss, nats/byte (mean of {window} steps)")
    above.legend()
    below.set_ylabel("distance from fp32, %")
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
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--schedule", choices=SCHEDULES, default="cosine")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    runs = Runs(args.runs, args.steps, args.batch_size)
    if args.report or args.plot:
        if args.report:
            args.report.write_text(report(runs, seeds))
        if args.plot:
            plot(runs, seeds, args.schedule, args.plot)
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    text = Text.load()
    for seed in seeds:
        for layout in args.layouts.split(","):
            path = runs.path(layout, args.schedule, seed)
            if path.exists():
                continue
            losses = train(
                layout,
                seed,
                num_steps=args.steps,
                batch_size=args.batch_size,
                schedule=args.schedule,
                text=text,
            )
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(losses))
            partial.rename(path)


if __name__ == "__main__":
    main()
