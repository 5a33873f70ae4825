"""Plain loops with clip_grad_norm_: as in every tutorial."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from examples.gpt_model import GPT, GPTSize
from tests.scripts.common import LM, NUM_STEPS, Result, Wrap, adamw, start, tokens, train, weights_of

EMA_DECAY = 0.9


def loop(wrap: Wrap) -> Result:
    """Backward, clip, step, zero_grad."""
    return train(*start(wrap), clips=True)


def gpt(wrap: Wrap, *, checkpointing: bool = False) -> Result:
    """The example's GPT with tied weights, accumulation, a schedule and logs of the weights' norm."""
    size = GPTSize(num_layers=3, width=32, num_heads=4)
    model, optimizer = start(wrap, GPT(size, seq_len=16, checkpoint_activations=checkpointing), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)

    def loss_of(model: nn.Module, number: int) -> Tensor:
        ids = tokens(number, length=17, vocabulary=256)
        return model(ids[:, :-1], ids[:, 1:])  # type: ignore[no-any-return]

    def after(model: nn.Module, _step: int) -> Tensor:
        scheduler.step()
        return torch.stack([p.detach().norm() for p in model.parameters()])

    return train(model, optimizer, loss_of=loss_of, num_micro=2, clips=True, after=after)


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
    """No norm trains."""
    made = FrozenNorm()
    for block in made.blocks:
        block.norm.requires_grad_(False)
    return train(*start(wrap, made), clips=True)


def ema_by_hand(wrap: Wrap) -> Result:
    """A moving average over parameters() right after step()."""
    model, optimizer = start(wrap)
    average = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def follow(model: nn.Module, _step: int) -> None:
        for p_ema, p in zip(average, model.parameters(), strict=True):
            p_ema.lerp_(p, 1 - EMA_DECAY)

    result = train(model, optimizer, clips=True, after=follow)
    names = [name for name, _ in model.named_parameters()]
    return dataclasses.replace(result, notes=dict(zip(names, average, strict=True)))


def with_evaluation(result: Result, average: nn.Module) -> Result:
    """The average is evaluated, and its weights are noted."""
    with torch.no_grad():
        losses = [*result.losses, average(tokens(99)).item()]
    return dataclasses.replace(result, losses=losses, notes=weights_of(average))


def ema_of_a_copy(wrap: Wrap) -> Result:
    """The same with a copy made after the model was handed over, and .data as many write it."""
    model, optimizer = start(wrap)
    average = LM()
    average.load_state_dict(model.state_dict())

    def follow(model: nn.Module, _step: int) -> None:
        for p_ema, p in zip(average.parameters(), model.parameters(), strict=True):
            p_ema.data.mul_(EMA_DECAY).add_(p.data, alpha=1 - EMA_DECAY)

    return with_evaluation(train(model, optimizer, clips=True, after=follow), average)


def averaged_model(wrap: Wrap) -> Result:
    """torch's AveragedModel, made before the model is handed over (a copy), updated after each step."""
    plain = LM()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    model, optimizer = wrap(plain, adamw(plain))
    result = train(model, optimizer, clips=True, after=lambda model, _: average.update_parameters(model))
    return with_evaluation(result, average)
