"""Plain loops with clip_grad_norm_: as in every tutorial."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from examples.gpt_model import GPT, GPTSize
from tests.scripts.common import MAX_NORM, NUM_STEPS, Result, Wrap, start, tokens, weights_of

EMA_DECAY = 0.9


def loop(wrap: Wrap) -> Result:
    """Backward, clip, step, zero_grad."""
    model, optimizer = start(wrap)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, norms, weights_of(model))


def gpt(wrap: Wrap, *, checkpointing: bool = False) -> Result:
    """The example's GPT with tied weights, accumulation, a schedule and logs of the weights' norm."""
    size = GPTSize(num_layers=3, width=32, num_heads=4)
    model, optimizer = start(wrap, GPT(size, seq_len=16, checkpoint_activations=checkpointing), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses, norms, weight_norms = [], [], []
    for step in range(NUM_STEPS):
        total = 0.0
        for micro_step in range(2):
            ids = tokens(2 * step + micro_step, length=17, vocabulary=256)
            loss = model(ids[:, :-1], ids[:, 1:]) / 2
            loss.backward()
            total += loss.item()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        weight_norms.append(torch.stack([p.detach().norm() for p in model.parameters()]))
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return Result(losses, norms, weights_of(model), {"weight norms": torch.stack(weight_norms)})


def gpt_checkpointed(wrap: Wrap) -> Result:
    """The same with torch's checkpointing of the blocks."""
    return gpt(wrap, checkpointing=True)


class FrozenNorm(nn.Module):
    """A GPT whose checkpointed layers begin with a frozen norm, checkpointed inside the module's call.

    As transformers does it: the recomputation runs the layer's own forward, without its hooks.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(24)
            self.up = nn.Linear(24, 49)
            self.down = nn.Linear(49, 24)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.compute, x, use_reentrant=False)

        def compute(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(61, 24)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(3))
        self.head = nn.Linear(24, 61)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids[:, :-1])
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids[:, 1:].flatten())


def frozen_norm_checkpointed(wrap: Wrap) -> Result:
    """The first norm, or all norms, do not train."""
    made = FrozenNorm()
    for block in made.blocks:
        block.norm.requires_grad_(False)
    model, optimizer = start(wrap, made)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, norms, weights_of(model))


def ema_by_hand(wrap: Wrap) -> Result:
    """A moving average over parameters() right after step(), then evaluated."""
    model, optimizer = start(wrap)
    average = [p.detach().clone() for p in model.parameters()]
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        with torch.no_grad():
            for p_ema, p in zip(average, model.parameters(), strict=True):
                p_ema.lerp_(p, 1 - EMA_DECAY)
        optimizer.zero_grad()
        losses.append(loss.item())
    names = [name for name, _ in model.named_parameters()]
    notes = dict(zip(names, average, strict=True))
    return Result(losses, norms, weights_of(model), notes)


def ema_of_a_copy(wrap: Wrap) -> Result:
    """The same with a copy made before the model was handed over, and .data as many write it."""
    model, optimizer = start(wrap)
    average = copy.deepcopy(reference_model(model))
    losses = []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        for p_ema, p in zip(average.parameters(), model.parameters(), strict=True):
            p_ema.data.mul_(EMA_DECAY).add_(p.data, alpha=1 - EMA_DECAY)
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(average(tokens(99)).item())
    return Result(losses, [], weights_of(model), weights_of(average))


def reference_model(model: nn.Module) -> nn.Module:
    """An ordinary model of the same class and values."""
    fresh = type(model)()
    fresh.load_state_dict(model.state_dict())
    return fresh


def averaged_model(wrap: Wrap) -> Result:
    """torch's AveragedModel, made before the model is handed over (a copy), updated after each step."""
    from tests.scripts.common import LM, adamw

    plain = LM()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    model, optimizer = wrap(plain, adamw(plain))
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(tokens(step))
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(average(tokens(99)).item())
    return Result(losses, norms, weights_of(model), weights_of(average))
