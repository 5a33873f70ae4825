"""Accelerate: `offload()` first, then `accelerator.prepare(model, optimizer, loader, scheduler)`."""

from __future__ import annotations

import torch

from tests.scripts.common import MAX_NORM, NUM_STEPS, Result, Wrap, adamw, weights_of
from tests.scripts.transformers_trainer import dataset, make_gpt2


def run(wrap: Wrap, *, accumulation: int = 1) -> Result:
    """accelerator.backward and accelerator.clip_grad_norm_ under accelerator.accumulate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    made = make_gpt2()
    model, optimizer = wrap(made, adamw(made))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.05 * step))
    loader = torch.utils.data.DataLoader(dataset(4 * NUM_STEPS * accumulation), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, norms, weights_of(accelerator.unwrap_model(model)))


def accumulated(wrap: Wrap) -> Result:
    """Two micro batches per step."""
    return run(wrap, accumulation=2)
