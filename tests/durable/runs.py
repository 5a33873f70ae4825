"""Small runs of every kind, which draw on all that a durable run brings back, and what a step of one leaves."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import offloadzero
from offloadzero.zero import (
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from tests.support.checkpoints import state_digest

NUM_STEPS = 7
SAVED = "saved"  # beside the run
MIXED = [{"units": "*", "param": "host", "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "host"}]
ON_DEVICE = [{"units": "*", "param": "device", "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"}]
MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 2e-3, "momentum": 0.9, "weight_decay": 0.1}}
FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1},
    "bf16": {"enabled": False},
}


class Block(nn.Module):
    """A linear layer with frozen weights in the same unit, as an adapter has, dropout and a buffer."""

    def __init__(self, width: int, *, is_adapter: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.up = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.base.requires_grad_(not is_adapter)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().float().mean()
        return x + self.drop(torch.tanh(self.up(torch.tanh(self.base(x)))))


class Net(nn.Module):
    """Two blocks and an embedding with a tied head; one parameter is not used in every step."""

    def __init__(self, width: int, *, is_adapter: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.embed.requires_grad_(not is_adapter)
        self.blocks = nn.ModuleList(Block(width, is_adapter=is_adapter) for _ in range(2))
        self.rare = nn.Linear(width, width)
        self.head = nn.Linear(width, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, uses_rare: bool) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        if uses_rare:
            hidden = hidden + self.rare(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Kind:
    """A way of training."""

    placement: Any = "nvme"
    top: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    is_adapter: bool = False
    bad_steps: tuple[int, ...] = ()  # whose loss is not finite
    num_ranks: int = 1
    saves: tuple[int, ...] = ()  # steps before which a checkpoint begins to be saved in the background
    writes: bool = False  # the script writes weights and states before every second step

    @property
    def width(self) -> int:
        """Of the model's layers: with several ranks more, or all that one of them has would be padding."""
        return 31 if self.num_ranks == 1 else 67


KINDS = {
    "nvme": Kind(),
    "mixed": Kind(MIXED),
    "device": Kind(ON_DEVICE),
    "host": Kind("host"),
    "compact": Kind(own={"state_layout": "compact"}),
    "adapter": Kind(is_adapter=True),
    "adapter mixed": Kind(MIXED, is_adapter=True),
    "fp16": Kind(top=FP16, bad_steps=(1, 4)),
    "fp16 mixed": Kind(MIXED, top={**FP16, "gradient_clipping": 0.05}, bad_steps=(2,)),
    "skip": Kind(own={"update": {"on_nonfinite": "skip"}}, bad_steps=(0, 3)),
    "accumulation": Kind(top={"gradient_accumulation_steps": 3}),
    "accumulation without clipping": Kind(top={"gradient_accumulation_steps": 3, "gradient_clipping": 0.0}),
    "always clipped": Kind(top={"gradient_clipping": 0.01}),
    "sometimes clipped": Kind(top={"gradient_clipping": 1.9}),
    "host parameters": Kind(
        [{"units": "*", "param": "host", "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"}]
    ),
    "no clipping": Kind(top={"gradient_clipping": 0.0}),
    "no clipping mixed": Kind(MIXED, top={"gradient_clipping": 0.0}),
    "small chunks": Kind(own={"update": {"chunk_elements": 4096}}),
    "sgd": Kind(top={"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
    "sgd without momentum": Kind(top={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}),
    "muon": Kind(top={"optimizer": MUON, "scheduler": None}),
    "muon mixed": Kind(
        [{"units": "*", "param": "host", "master": "nvme"}], top={"optimizer": MUON, "scheduler": None}
    ),
    "every third": Kind(own={"durable": 3}),
    "every second mixed": Kind(MIXED, own={"durable": 2}),
    "script writes": Kind(writes=True),
    "script writes mixed": Kind(MIXED, writes=True),
    "script writes, every third": Kind(writes=True, own={"durable": 3}),
    "saves": Kind(saves=(2, 5)),
    "saves without clipping": Kind(top={"gradient_clipping": 0.0}, saves=(2, 5)),
    "saves, host parameters": Kind(
        [{"units": "*", "param": "host", "master": "nvme", "exp_avg": "nvme", "exp_avg_sq": "nvme"}],
        saves=(3,),
    ),
    "saves, script writes": Kind(saves=(1, 3), writes=True),
    "checksums": Kind(own={"aio": {"checksums": True}}),
    "auto": Kind("auto"),
    "two ranks stage 1": Kind(ON_DEVICE, top={"zero_optimization": {"stage": 1}}, num_ranks=2),
    "two ranks stage 2": Kind(ON_DEVICE, top={"zero_optimization": {"stage": 2}}, num_ranks=2),
    "two ranks stage 3": Kind(top={"zero_optimization": {"stage": 3}}, num_ranks=2),
    "two ranks, saves": Kind(top={"zero_optimization": {"stage": 3}}, num_ranks=2, saves=(2, 5)),
    "two ranks mixed": Kind(MIXED, top={"zero_optimization": {"stage": 3}}, num_ranks=2),
}


def config_of(kind: Kind, directory: Path | str, *, durable: bool = True) -> dict[str, Any]:
    """Its configuration; `durable` False: as if there was no such key."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1e6,
        **kind.top,
    }
    own = {
        "device": "cpu",
        "placement": kind.placement,
        "nvme_path": str(directory),
        "poison_released_leases": True,
        "units": {"min_leaf_elements": 100},
        "durable": True,
        **kind.own,
        "update": {"num_chunks_in_flight": 3, **kind.own.get("update", {})},  # few: slots are used again
    }
    if not durable:
        del own["durable"]
    return {**{key: value for key, value in config.items() if value is not None}, "offloadzero": own}


def make(kind: Kind, directory: Path | str, *, durable: bool = True) -> Any:
    """An engine of a new model, the generators as a new process has them."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    model = Net(kind.width, is_adapter=kind.is_adapter)
    return offloadzero.initialize(model=model, config=config_of(kind, directory, durable=durable))[0]


def train_step(engine: Any, kind: Kind, number: int) -> float:
    """Step `number`, from 0, whose batches come of the generators; `client_state` says what the next one is."""
    if number in kind.saves:
        directory = engine.optimizer.runtime.config.nvme_paths[0] / SAVED
        engine.save_checkpoint(directory, tag=f"step{number}", wait=False)
    if kind.writes and number % 2:
        _write(engine.module)
    loss = torch.zeros(())
    for _ in range(engine.gradient_accumulation_steps()):
        tokens = torch.randint(0, 24, (2, 5)) + int(os.environ.get("RANK", "0"))
        loss = engine(tokens % 24, uses_rare=number % 3 == 1) * (1.0 + random.random() + np.random.rand())
        engine.backward(loss * float("inf") if number in kind.bad_steps else loss)
        engine.client_state = {"next": number + 1}
        engine.step()
    return loss.item()


def _write(model: Net) -> None:
    """Change weights and states of one unit, and the weights of another."""
    up, rare = model.blocks[0].up, model.rare
    with torch.no_grad(), offloadzero.zero.GatheredParameters([up.weight], modifier_rank=0):
        up.weight.mul_(0.5)
    moment = safe_get_full_optimizer_state(rare.weight, "exp_avg")
    safe_set_full_optimizer_state(rare.weight, moment * 0.5 + 0.25, "exp_avg")
    safe_set_full_fp32_param(rare.bias, rare.bias.detach().float() + 0.25)


def digest(engine: Any) -> str:
    """Of all that a run brings back."""
    engine.synchronize()
    drawn = (
        random.getstate(),
        [np.asarray(part).tolist() for part in np.random.get_state(legacy=True)],
        torch.get_rng_state().tolist(),
    )
    lr = engine.get_lr()
    return hashlib.sha256(repr((state_digest(engine), drawn, lr)).encode()).hexdigest()


def plain_digests(
    kind: Kind, directory: Path | str, num_steps: int = NUM_STEPS, *, log: Callable[[str], None] | None = None
) -> list[str]:
    """The digest before the first step and after each, of a run that is not durable."""
    engine = make(kind, directory, durable=False)
    digests = [digest(engine)]
    for number in range(num_steps):
        loss = train_step(engine, kind, number)
        digests.append(digest(engine))
        if log is not None:
            log(f"{number} {loss} {engine.get_lr()} {engine.loss_scale}")
    engine.close()
    return digests
