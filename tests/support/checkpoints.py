"""Checkpoints for tests: small ones, and edits that their manifest agrees to."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offloadzero
from offloadzero.checkpoint.format.manifest import FileEntry, HashedFile, HashingPool, encode_manifest
from offloadzero.checkpoint.format.names import MANIFEST, META, is_data_file
from tests.support.tiny import all_states


def reseal(checkpoint: Path) -> None:
    """Write a manifest of the files as they are now: what is wrong inside of them has to be seen by itself."""
    files: dict[str, FileEntry] = {}
    with HashingPool() as pool:
        for path in sorted(checkpoint.iterdir()):
            if is_data_file(path.name):
                data = path.read_bytes()
                path.unlink()
                file = HashedFile(path, pool)
                file.write(data)
                files[path.name] = file.close()
    (checkpoint / MANIFEST).write_bytes(encode_manifest(files))


def edit_meta(checkpoint: Path, **changes: Any) -> None:
    """Set fields of meta.json (None of them: `...` removes one), and reseal."""
    values = json.loads((checkpoint / META).read_text())
    values.update(changes)
    values = {key: value for key, value in values.items() if value is not ...}
    (checkpoint / META).write_text(json.dumps(values))
    reseal(checkpoint)


class Net(nn.Module):
    """Two blocks, a tied head, a frozen parameter, a buffer."""

    def __init__(self, width: int = 17) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(width, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def small_engine(
    directory: Path, placement: str = "host", *, seed: int = 0, model: nn.Module | None = None, **top: Any
) -> Any:
    """An engine of a Net, with a schedule."""
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1.0,
        "offloadzero": {
            "placement": placement,
            "nvme_path": str(directory),
            "units": {"min_leaf_elements": 100},
        },
        **top,
    }
    return offloadzero.initialize(model=model or Net(), config=config)[0]


def train(engine: Any, num_steps: int, *, first: int = 0) -> list[float]:
    """Losses of `num_steps` steps."""
    losses = []
    for step in range(first, first + num_steps):
        tokens = torch.randint(0, 24, (2, 7), generator=torch.Generator().manual_seed(step))
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole_state(engine: Any) -> dict[str, Any]:
    """Every bit that a load may change: weights, states, buffers, counters, options, schedule."""
    state: dict[str, Any] = {name: bits(value) for name, value in all_states(engine).items()}
    state.update({f"buffer {name}": bits(value) for name, value in engine.module.named_buffers()})
    state["steps"] = [slot.step for record in engine._runtime.records for slot in record.slots]
    state["counts"] = (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.loss_scale)
    state["groups"] = repr([{**group, "params": None} for group in engine.optimizer.param_groups])
    state["schedule"] = repr(engine.lr_scheduler.state_dict()) if engine.lr_scheduler is not None else None
    return state


def bits(value: torch.Tensor) -> bytes:
    """The tensor's bytes: NaN equals itself."""
    return bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def contents(directory: Path) -> dict[str, Any]:
    """Path -> bytes, target of a link, or None for a directory."""
    found: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def state_digest(engine: Any) -> str:
    """Of every weight, state, buffer and counter."""
    state = whole_state(engine)
    return hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()


def save_numbered(engine: Any, directory: str, tag: str, number: int) -> None:
    """A checkpoint that knows what it is."""
    engine.save_checkpoint(
        directory, tag=tag, client_state={"number": number, "digest": state_digest(engine)}
    )
