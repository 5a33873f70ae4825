"""Train a byte-level GPT whose states live where the JSON says: device, host memory, NVMe.

python examples/train_gpt.py --config examples/configs/nvme.json --model tiny --steps 400
torchrun --nproc-per-node 2 examples/train_gpt.py --config examples/configs/nvme.json --model tiny --steps 400
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from gpt_model import GPT, SIZES, Text
from torch import Tensor
from tqdm import tqdm

import offloadzero

NUM_VALIDATION_BATCHES = 16


def main() -> None:
    args = parse_arguments()
    try:
        text = Text.load(args.data)
    except (OSError, ValueError) as error:
        sys.exit(f"--data {args.data}: {error}")
    try:
        train(args, text)
    except offloadzero.OffloadError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def train(args: argparse.Namespace, text: Text) -> None:
    torch.manual_seed(args.seed)
    # Under zero.Init each unit goes to its home tier while it is built: the whole model is never in memory.
    with offloadzero.zero.Init(config_dict_or_path=args.config):
        model = GPT(
            SIZES[args.model],
            seq_len=args.seq_len,
            tied=not args.untied,
            checkpoint_activations=args.checkpoint_activations,
        )
    engine, _, _, _ = offloadzero.initialize(model=model, config=args.config)
    is_first = engine.global_rank == 0
    if is_first:
        print(engine.memory_table(), flush=True)

    batch_size = engine.train_micro_batch_size_per_gpu() or 1
    num_micro_batches = engine.gradient_accumulation_steps()
    tokens_per_step = num_micro_batches * batch_size * args.seq_len * engine.world_size
    # Each rank takes windows of its own.
    generator = torch.Generator().manual_seed(args.seed + engine.global_rank)
    report = Report(args.steps, tokens_per_step, args.log) if is_first else None
    for _ in range(args.steps):
        loss_sum = torch.zeros((), device=engine.device)
        for _ in range(num_micro_batches):
            tokens, targets = text.batch(batch_size=batch_size, seq_len=args.seq_len, generator=generator)
            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            loss_sum += loss.detach()
        if report is not None:
            report.add_step(loss_sum / num_micro_batches, sum(engine.last_step_report().waits_s.values()))

    if report is not None:
        report.close()
    validation_loss = evaluate(engine, text, batch_size=batch_size, seq_len=args.seq_len)
    if report is not None:
        print(f"validation loss {validation_loss:.4f} nats/byte, {report.summary()}")
    engine.close()


@torch.no_grad()
def evaluate(engine: Any, text: Text, *, batch_size: int, seq_len: int) -> float:
    """Return the mean loss in nats over the fixed validation windows."""
    engine.eval()
    batches = text.validation_batches(
        batch_size=batch_size, seq_len=seq_len, num_batches=NUM_VALIDATION_BATCHES
    )
    losses = [
        float(engine(tokens.to(engine.device), targets.to(engine.device))) for tokens, targets in batches
    ]
    engine.train()
    return sum(losses) / len(losses)


class Report:
    """Progress bar on a terminal, plain lines elsewhere, one JSON object per step in the log file."""

    def __init__(self, num_steps: int, tokens_per_step: int, log_path: Path | None) -> None:
        self.num_steps = num_steps
        self.tokens_per_step = tokens_per_step
        self.log: TextIO | None = None if log_path is None else log_path.open("w")
        self.bar = tqdm(total=num_steps, unit="step", disable=not sys.stdout.isatty(), file=sys.stdout)
        self.interval_s = 5.0 if self.bar.disable else 1.0
        self.unread: list[
            tuple[Tensor, float]
        ] = []  # loss and seconds in waits of each step since the last line
        self.num_read = 0
        self.wait_s = 0.0
        self.start_s = self.last_s = time.perf_counter()

    def add_step(self, loss: Tensor, wait_s: float) -> None:
        # Reading a loss waits for the device, so it is done once per line and not once per step.
        self.unread.append((loss, wait_s))
        is_last = self.num_read + len(self.unread) == self.num_steps
        if is_last or time.perf_counter() - self.last_s >= self.interval_s:
            self.write_line()
        self.bar.update()

    def write_line(self) -> None:
        num_steps = len(self.unread)
        for loss, wait_s in self.unread:
            self.num_read += 1
            self.wait_s += wait_s
            if self.log is not None:
                self.log.write(
                    json.dumps({"step": self.num_read, "loss": float(loss), "wait_s": wait_s}) + "\n"
                )
        now_s = time.perf_counter()
        tokens_per_s = num_steps * self.tokens_per_step / (now_s - self.last_s)
        status = f"loss {float(loss):.4f}, {tokens_per_s:.0f} tokens/s, {self.wait_s:.1f} s in waits"
        if self.bar.disable:
            print(f"step {self.num_read}/{self.num_steps}: {status}", flush=True)
        else:
            self.bar.set_postfix_str(status, refresh=False)
        self.unread.clear()
        self.last_s = now_s

    def summary(self) -> str:
        elapsed_s = self.last_s - self.start_s
        tokens_per_s = self.num_read * self.tokens_per_step / elapsed_s
        return f"{tokens_per_s:.0f} tokens/s, {elapsed_s:.1f} s, of which {self.wait_s:.1f} s in waits"

    def close(self) -> None:
        self.bar.close()
        if self.log is not None:
            self.log.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="JSON configuration file (DeepSpeed's keys)")
    parser.add_argument("--data", type=Path, help="file or directory (default: Python's standard library)")
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute in backward")
    parser.add_argument("--untied", action="store_true", help="give the head its own weights")
    parser.add_argument("--log", type=Path, help="write one JSON object per step to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
