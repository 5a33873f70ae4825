"""Train a Llama of ten billion parameters on one device: its states are in files on NVMe, 5.06 bytes per parameter.

python examples/train_10b.py --steps 3                       # 10.07 billion; needs 52 GB of disk under ./offload-files
python examples/train_10b.py --parameters 3B --steps 100 --save checkpoints     # Ctrl-C ends it after the running step
python examples/train_10b.py --parameters 3B --steps 100 --resume checkpoints --save checkpoints
python examples/train_10b.py --plan                          # says what it would need, and builds nothing
python examples/train_10b.py --plan --rehearse               # and how long it would take, from two small models
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from gpt_model import VOCAB_SIZE, Text
from llama_model import Llama, LlamaSize, shape_of, size_of_at_least
from needs import Needs, check, existing, find_needs, resident_bytes
from rehearsal import NUM_LAYERS, Seconds, rehearse
from torch import Tensor, nn

import offloadzero
from offloadzero.config import OffloadConfig, load_config, settle_for_initialize
from offloadzero.observe.bound import StepReport

GIB = 1 << 30
CONFIG = Path(__file__).parent / "configs" / "ten_billion.json"
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
INTERRUPTED = 130


def main(given: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 where something was refused or failed, 130 after Ctrl-C."""
    args = parse_arguments(given)
    try:
        return run(args)
    except offloadzero.OffloadError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"the rehearsal ended with status {error.returncode}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped at once: nothing was saved", file=sys.stderr)
        return INTERRUPTED


def run(args: argparse.Namespace) -> int:
    if args.resume is not None and not (args.resume / "latest").exists():
        raise offloadzero.CheckpointError(f"{args.resume}: there is no checkpoint (no file 'latest')")
    config = settle_for_initialize(load_config(args.config))
    size = model_size(args)
    needs = find_needs(size, config, batch_size=config.batch.micro_batch_size or 1, seq_len=args.seq_len)
    print(needs.table(), flush=True)
    check(needs, config, save=args.save)
    text = None if args.plan else load_text(args)
    forecast = rehearse_as(args, size) if args.rehearse else None
    if text is None:
        return 0
    start_s = time.perf_counter()
    engine, model = build(args, size, config)
    build_s = time.perf_counter() - start_s
    print(f"built in {build_s:.1f} s, peak RSS {resident_bytes('VmHWM') / GIB:.2f} GiB", flush=True)
    try:
        if args.resume is not None:
            resume(engine, args, size)
        with Report(args, needs, build_s, forecast) as report, Progress(model, args.progress_s) as progress:
            is_interrupted = train(engine, text, args, report, progress)
        if args.save is not None:
            save(engine, args, size)
    finally:
        engine.close()
    return INTERRUPTED if is_interrupted else 0


def load_text(args: argparse.Namespace) -> Text:
    """Load the text, before the model is built: that may take minutes. Raises ConfigError."""
    try:
        text = Text.load(args.data)
    except (OSError, ValueError) as error:
        raise offloadzero.ConfigError(
            "--data", str(args.data), f"a file, or a directory with files: {error}"
        ) from error
    if len(text.train) <= args.seq_len:
        allowed = f"less than the {len(text.train):,} bytes of text that there are to train on"
        raise offloadzero.ConfigError("--seq-len", args.seq_len, allowed)
    return text


def rehearse_as(args: argparse.Namespace, size: LlamaSize) -> Seconds:
    """Forecast building and a step of this model, on the same drive and device."""
    options = ["--config", args.config, "--width", size.width, "--seq-len", args.seq_len, "--seed", args.seed]
    options += [] if args.data is None else ["--data", args.data]
    forecast = rehearse(__file__, list(map(str, options)), size.num_layers)
    print(f"forecast: {forecast.build_s:.0f} s to build, {forecast.step_s:.1f} s per step", flush=True)
    return forecast


def build(args: argparse.Namespace, size: LlamaSize, config: OffloadConfig) -> tuple[Any, Llama]:
    """Build the model. It goes to its home tier meanwhile: it is never whole in memory."""
    torch.manual_seed(args.seed)
    with offloadzero.zero.Init(config_dict_or_path=args.config):
        model = Llama(size, checkpoint_activations=config.activation_checkpoints is None)
    # The engine measures the bound of a step only when asked to, and this logger asks for it.
    logging.getLogger("offloadzero.steps").setLevel(logging.INFO)
    return offloadzero.initialize(model=model, config=args.config)[0], model


def train(engine: Any, text: Text, args: argparse.Namespace, report: Report, progress: Progress) -> bool:
    """Train up to `args.steps` steps in all; True after Ctrl-C, which ends it when the running step has ended."""
    batch_size = engine.train_micro_batch_size_per_gpu() or 1
    num_micro_batches = engine.gradient_accumulation_steps()
    if engine.global_steps >= args.steps:
        print(f"nothing left to do: {engine.global_steps} of {args.steps} steps are done", flush=True)
    with stopping_after_step() as is_stopped:
        for step in range(engine.global_steps + 1, args.steps + 1):
            # A generator per step: a resumed run sees the batches that it would have seen.
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
            progress.begin_step(step)
            loss_sum = torch.zeros((), device=engine.device)
            for _ in range(num_micro_batches):
                tokens, targets = text.batch(batch_size=batch_size, seq_len=args.seq_len, generator=generator)
                loss = engine(tokens.to(engine.device), targets.to(engine.device))
                engine.backward(loss)
                engine.step()
                loss_sum += loss.detach()
            progress.end_step()
            report.add_step(step, float(loss_sum / num_micro_batches), engine.last_step_report())
            if is_stopped():
                return step < args.steps
    return False


@contextmanager
def stopping_after_step() -> Iterator[Any]:
    """Yield a function that is true after the first Ctrl-C; a second one raises KeyboardInterrupt."""
    seen: list[int] = []

    def stop(signum: int, _frame: object) -> None:
        seen.append(signum)
        signal.signal(signal.SIGINT, before)
        print("\nstopping when this step has ended; once more: at once", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


# --- checkpoints


def of_run(args: argparse.Namespace, size: LlamaSize) -> dict[str, Any]:
    """Return the settings that must be the same for a run to go on as it would have."""
    return {"size": vars(size), "seq_len": args.seq_len, "seed": args.seed}


def save(engine: Any, args: argparse.Namespace, size: LlamaSize) -> None:
    start_s = time.perf_counter()
    engine.save_checkpoint(args.save, client_state=of_run(args, size))
    seconds = time.perf_counter() - start_s
    print(f"saved step {engine.global_steps} to {args.save} in {seconds:.1f} s", flush=True)


def resume(engine: Any, args: argparse.Namespace, size: LlamaSize) -> None:
    start_s = time.perf_counter()
    path, state = engine.load_checkpoint(args.resume)
    if state != of_run(args, size):
        raise offloadzero.CheckpointError(
            f"{path} is of another run: it has {state}, this one {of_run(args, size)}"
        )
    seconds = time.perf_counter() - start_s
    print(f"resumed from {path} after step {engine.global_steps}, in {seconds:.1f} s", flush=True)


# --- output


class Progress:
    """The progress of a step: a line that is overwritten on a terminal, and now and then a line elsewhere.

    A unit's backward begins when its output gets a gradient.
    """

    def __init__(self, model: Llama, interval_s: float) -> None:
        self.units: list[nn.Module] = [model.embed, *model.blocks, model.head]
        self.rank = os.environ.get("RANK", "0")
        self.on_terminal = sys.stdout.isatty()
        self.interval_s = 0.2 if self.on_terminal else interval_s
        self.step = 0
        self.is_backward = False
        self.start_s = self.said_s = time.perf_counter()

    def __enter__(self) -> Progress:
        self.handles = [
            unit.register_forward_hook(self.forward_hook(number))
            for number, unit in enumerate(self.units, start=1)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def begin_step(self, step: int) -> None:
        self.step = step
        self.start_s = self.said_s = time.perf_counter()

    def end_step(self) -> None:
        if self.on_terminal:
            print("\r\x1b[K", end="", flush=True)

    def forward_hook(self, number: int) -> Any:
        def on_gradient(_: Tensor) -> None:
            self.is_backward = True
            self.say("backward", number)

        def on_forward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if number == 1:
                self.is_backward = False
            if self.is_backward:  # its forward runs again
                return
            self.say("forward", number)
            if output.requires_grad:
                output.register_hook(on_gradient)

        return on_forward

    def say(self, what: str, number: int) -> None:
        now_s = time.perf_counter()
        if now_s - self.said_s < self.interval_s:
            return
        self.said_s = now_s
        line = f"rank {self.rank}: step {self.step}, {what}, unit {number} of {len(self.units)}, "
        line += f"{now_s - self.start_s:.1f} s so far"
        print(
            f"\r\x1b[K{line}" if self.on_terminal else line, end="" if self.on_terminal else "\n", flush=True
        )


class Report:
    """A line per step, the same as one JSON object in the log, and a line for the run."""

    def __init__(
        self, args: argparse.Namespace, needs: Needs, build_s: float, forecast: Seconds | None
    ) -> None:
        self.num_steps = args.steps
        self.needs = needs
        self.losses: dict[int, float] = {}
        self.log: TextIO | None = None if args.log is None else args.log.open("a")
        self.write(
            {
                "num_params": needs.num_params,
                "planned_bytes": {
                    "device": needs.device_bytes,
                    "host": needs.host_bytes,
                    "disk": needs.swap_bytes,
                    "checkpoint": needs.checkpoint_bytes,
                },
                "forecast_s": forecast and {"build": forecast.build_s, "step": forecast.step_s},
                "build_s": build_s,
                "built_peak_rss_bytes": resident_bytes("VmHWM"),
            }
        )

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        if self.losses:
            first, last = next(iter(self.losses)), next(reversed(self.losses))
            print(
                f"{self.needs.num_params:,} parameters, steps {first} to {last}: loss {self.losses[first]:.4f} to "
                f"{self.losses[last]:.4f}, peak RSS {resident_bytes('VmHWM') / GIB:.2f} GiB "
                f"(about {self.needs.host_bytes / GIB:.2f} were planned)",
                flush=True,
            )
        if self.log is not None:
            self.log.close()

    def add_step(self, step: int, loss: float, report: StepReport) -> None:
        """Add a step. On a device that runs behind this thread the report is of the last finished step."""
        self.losses[step] = loss
        peak_bytes = resident_bytes("VmHWM")
        line = f"step {step}/{self.num_steps}: loss {loss:.4f}, "
        line += (
            f"{report.step_s:.2f} s" if report.step == step else f"step {report.step} {report.step_s:.2f} s"
        )
        if report.bound is not None:
            line += (
                f", bound {report.bound.seconds:.2f} s ({report.bound.lane}), overlap {report.efficiency:.1%}"
            )
        print(f"{line}, peak RSS {peak_bytes / GIB:.2f} GiB", flush=True)
        self.write(
            {
                "step": step,
                "loss": loss,
                "report_step": report.step,
                "step_s": report.step_s,
                "bound_s": report.bound and report.bound.seconds,
                "bound_lane": report.bound and report.bound.lane,
                "lanes_s": report.bound and dict(report.bound.lanes_s),
                "efficiency": report.efficiency,
                "waits_s": report.waits_s,
                "peak_rss_bytes": peak_bytes,
            }
        )

    def write(self, row: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(json.dumps(row) + "\n")
            self.log.flush()


# --- arguments


def model_size(args: argparse.Namespace) -> LlamaSize:
    if args.layers is not None:
        return shape_of(args.width, args.layers, vocab_size=VOCAB_SIZE)
    return size_of_at_least(args.parameters, vocab_size=VOCAB_SIZE)


def read_count(text: str) -> int:
    """Read `20M`, `7.2B` or a number."""
    found = re.fullmatch(r"(\d+\.?\d*)([KMB]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a number, or one with K, M or B behind it: 20M, 7.2B")
    return round(float(found[1]) * COUNTS[found[2]])


def read_positive(text: str) -> int:
    """Read a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 on")
    return int(text)


def read_seconds(text: str) -> float:
    """Read a number from 0 on."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds, from 0 on")
    return seconds


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="JSON configuration (DeepSpeed's keys)")
    parser.add_argument("--data", type=Path, help="file or directory (default: Python's standard library)")
    parser.add_argument("--parameters", type=read_count, help="at least so many: 10B (the default), 3B, 20M")
    parser.add_argument("--layers", type=read_positive, help="instead of --parameters, with --width")
    parser.add_argument("--width", type=read_positive, help="a multiple of 128 (of 64 below 1024)")
    parser.add_argument(
        "--steps", type=read_positive, default=3, help="in all, those before --resume included"
    )
    parser.add_argument("--seq-len", type=read_positive, default=128, help="bytes of text per sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write a checkpoint here at the end, and after Ctrl-C")
    parser.add_argument("--resume", type=Path, help="go on from the latest checkpoint here")
    parser.add_argument("--log", type=Path, help="append one JSON object per step to this file")
    parser.add_argument(
        "--progress-s",
        type=read_seconds,
        default=15.0,
        help="seconds between lines within a step, off a terminal",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="time small models of this width first, and forecast this one's",
    )
    parser.add_argument(
        "--plan", action="store_true", help="say what is needed, check that it is there, and end"
    )
    args = parser.parse_args(given)
    if (args.layers is None) != (args.width is None):
        parser.error("--layers and --width go together")
    if args.layers is not None and args.parameters is not None:
        parser.error("--parameters, or --layers and --width in its place")
    args.parameters = read_count("10B") if args.parameters is None else args.parameters
    if args.width is not None and args.width % (128 if args.width >= 1024 else 64):
        parser.error(f"--width {args.width}: a multiple of 128, or of 64 below 1024")
    # What cannot be written is said now and not when the model is built, or trained.
    if args.log is not None and not args.log.absolute().parent.is_dir():
        parser.error(f"--log {args.log}: there is no directory {args.log.parent}")
    if args.save is not None and not existing(args.save).is_dir():
        parser.error(f"--save {args.save}: {existing(args.save)} is no directory")
    if args.layers is None:
        try:
            size_of_at_least(args.parameters, vocab_size=VOCAB_SIZE)
        except ValueError as error:
            parser.error(f"--parameters: {error}")
    if args.rehearse and model_size(args).num_layers <= max(NUM_LAYERS):
        parser.error(
            f"--rehearse: a model of more than {max(NUM_LAYERS)} layers; this one takes no longer itself"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
