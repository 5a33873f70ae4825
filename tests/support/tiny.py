"""A small model, its configurations and whole processes, shared by tests that drive the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offloadzero
from tests.support.warm import WarmProcess, run_warm

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY = 96


class Block(nn.Module):
    """A residual MLP block with odd sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """Embedding, blocks, a tied head; the forward returns the loss."""

    def __init__(self, width: int = 48, num_blocks: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def tokens(seed: int, *, batch: int = 2, length: int = 9) -> torch.Tensor:
    """Random token ids, shape (batch, length)."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def settings(directory: Path | str | None = None, *, placement: Any = "nvme", **keys: Any) -> dict[str, Any]:
    """A configuration on the CPU: `keys` go into the own block, except DeepSpeed's, which stay on top."""
    top = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    own: dict[str, Any] = {
        "device": "cpu",
        "placement": placement,
        "poison_released_leases": True,
        "units": {"min_leaf_elements": 1000},
    }
    if directory is not None:
        own["nvme_path"] = str(directory)
    for key, value in keys.items():
        if key in (*top, "fp16", "gradient_accumulation_steps", "train_batch_size", "data_types"):
            top[key] = value
        else:
            own[key] = value
    return {**{key: value for key, value in top.items() if value is not None}, "offloadzero": own}


def make_engine(config: Any, model: nn.Module | None = None, **keys: Any) -> offloadzero.Engine:
    """An engine of a TinyModel from a fixed seed, or of `model`."""
    if model is None:
        torch.manual_seed(1)
        model = TinyModel()
    engine, _, _, _ = offloadzero.initialize(model=model, config=config, **keys)
    return engine


def train(engine: offloadzero.Engine, *, num_steps: int, first_seed: int = 0) -> list[float]:
    """Losses of `num_steps` micro batches."""
    losses = []
    for seed in range(first_seed, first_seed + num_steps):
        loss = engine(tokens(seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def all_states(engine: offloadzero.Engine) -> dict[str, torch.Tensor]:
    """A copy of every segment of every record (gradients aside), read from its home, whatever has stopped training."""
    runtime = engine.optimizer.runtime
    runtime.changes.wait_updates()
    states: dict[str, torch.Tensor] = {}
    for record in runtime.records:
        for kind, segment in record.segments.items():
            if kind.value != "grad":
                target = torch.empty(segment.num_elements, dtype=segment.dtype)
                runtime.store.read(segment, target).wait()
                states[f"{record.name}.{kind.value}"] = target
    return states


def script_environment() -> dict[str, str]:
    """For a Python that must find the package and these tests."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def start_script(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that runs `script`, with pipes for its output; it starts with torch imported."""
    return WarmProcess(
        _command(script, arguments),
        env=script_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(script: str, *arguments: object, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    """`start_script` to its end. One that outlives `timeout_s` is killed: subprocess.TimeoutExpired."""
    return run_warm(_command(script, arguments), env=script_environment(), timeout_s=timeout_s)


def run_bare_script(
    script: str, *arguments: object, timeout_s: float = 30.0
) -> subprocess.CompletedProcess[str]:
    """`run_script` without torch, for scripts that fork often: a fork of what has it takes ten times as long."""
    return subprocess.run(
        _command(script, arguments),
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _command(script: str, arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]


@contextmanager
def small_disk(path: Path, *, size: str) -> Iterator[Path]:
    """A filesystem of `size` ("8m") at `path`; skips the test where mounting is not allowed."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        # The kernel closes what an io_uring held some moments after its end; a file that stays open is a failure.
        deadline_s = time.monotonic() + 5.0
        while (
            done := subprocess.run(["umount", str(path)], capture_output=True, text=True, check=False)
        ).returncode:
            if time.monotonic() > deadline_s:
                subprocess.run(["umount", "--lazy", str(path)], check=False)
                raise AssertionError(done.stderr)
            time.sleep(0.05)
