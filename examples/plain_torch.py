"""The baseline: the same model, data and hyperparameters in plain PyTorch, every state resident.

bf16 weights and gradients, fp32 master weights (from the bf16 weights) and moments, torch.optim.AdamW, clipping.
Reads the same JSON as train_gpt.py and leaves its `zero_optimization` and `offloadzero` blocks aside.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt_model import GPT, SIZES, Text
from torch import Tensor, nn

NUM_VALIDATION_BATCHES = 16
STEPS_PER_LINE = 20


class PlainTrainer:
    """bf16 model, fp32 master weights: one `step(tokens, targets)` is forward, backward, clip, update."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        self.model = model.to(torch.bfloat16)
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.clipping: float = config["gradient_clipping"]
        self.optimizer = torch.optim.AdamW(self.masters, **config["optimizer"]["params"], fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warmup_factor(config))

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Do one optimizer step on one micro batch; return the loss in nats."""
        loss = self.backward(tokens, targets)
        self.update()
        return loss

    def backward(self, tokens: Tensor, targets: Tensor, *, num_micro_batches: int = 1) -> Tensor:
        """Add the gradients of one micro batch of several up in fp32; return its loss."""
        loss: Tensor = self.model(tokens, targets)
        (loss / num_micro_batches).backward()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if parameter.grad is not None:
                master.grad = (
                    parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
                )
            parameter.grad = None
        return loss.detach()

    def update(self) -> None:
        """Clip and step."""
        if self.clipping > 0:
            nn.utils.clip_grad_norm_(self.masters, self.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)

    @torch.no_grad()
    def evaluate(self, text: Text, *, batch_size: int, seq_len: int) -> float:
        """Return the mean loss in nats over the fixed validation windows."""
        self.model.eval()
        batches = text.validation_batches(
            batch_size=batch_size, seq_len=seq_len, num_batches=NUM_VALIDATION_BATCHES
        )
        losses = [float(self.model(tokens, targets)) for tokens, targets in batches]
        self.model.train()
        return sum(losses) / len(losses)


def warmup_factor(config: dict[str, Any]) -> Callable[[int], float]:
    """Return the JSON's linear WarmupLR as a factor of the learning rate: 0 at the first step, at last 1."""
    num_steps: int = config["scheduler"]["params"]["warmup_num_steps"] if "scheduler" in config else 0
    return lambda step: min(max(step - 1, 0) / num_steps, 1.0) if num_steps else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON configuration file")
    parser.add_argument("--data", type=Path, help="file or directory (default: Python's standard library)")
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untied", action="store_true", help="give the head its own weights")
    args = parser.parse_args()

    config = json.loads(args.config.read_text())
    batch_size = config["train_micro_batch_size_per_gpu"]
    text = Text.load(args.data)
    generator = torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    model = GPT(SIZES[args.model], seq_len=args.seq_len, tied=not args.untied)
    trainer = PlainTrainer(model, config)

    start = time.perf_counter()
    for step in range(args.steps):
        loss = trainer.step(*text.batch(batch_size=batch_size, seq_len=args.seq_len, generator=generator))
        if step % STEPS_PER_LINE == 0 or step == args.steps - 1:
            print(f"step {step}: loss {float(loss):.4f}", flush=True)
    elapsed_s = time.perf_counter() - start
    validation_loss = trainer.evaluate(text, batch_size=batch_size, seq_len=args.seq_len)
    tokens_per_s = args.steps * batch_size * args.seq_len / elapsed_s
    print(f"validation loss {validation_loss:.4f} nats/byte, {tokens_per_s:.0f} tokens/s, {elapsed_s:.1f} s")


if __name__ == "__main__":
    main()
