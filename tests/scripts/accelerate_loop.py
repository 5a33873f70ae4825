"""Accelerate: `offload()` first, then `accelerator.prepare(model, optimizer, loader, scheduler)`."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from tests.scripts.common import MAX_NORM, NUM_STEPS, Result, Wrap, adamw, weights_of
from tests.scripts.transformers_trainer import dataset, make_gpt2


def run(wrap: Wrap, *, accumulation: int = 1, **settings: Any) -> Result:
    """accelerator.backward and accelerator.clip_grad_norm_ under accelerator.accumulate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **settings)
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


def bf16_autocast(wrap: Wrap) -> Result:
    """mixed_precision="bf16" wraps the model's forward."""
    return run(wrap, mixed_precision="bf16")


def value_clipping(wrap: Wrap) -> Result:
    """accelerator.clip_grad_value_, and a look at the gradients after it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = make_gpt2()
    model, optimizer = accelerator.prepare(*wrap(made, adamw(made)))
    losses, largest = [], []
    for row in range(NUM_STEPS):
        rows = dataset(4 * NUM_STEPS)[4 * row : 4 * row + 4]
        ids = torch.stack([r["input_ids"] for r in rows])
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        largest.append(max(float(p.grad.abs().max()) for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, [], weights_of(accelerator.unwrap_model(model)), {"max": torch.tensor(largest)})


def saved_and_loaded(wrap: Wrap) -> Result:
    """accelerator.save_state in the middle, load_state at the end, and the same steps once more."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = make_gpt2()
    model, optimizer = accelerator.prepare(*wrap(made, adamw(made)))
    losses: list[float] = []

    def steps(first: int, num_steps: int) -> None:
        for step in range(first, first + num_steps):
            rows = dataset(4 * NUM_STEPS)[4 * step : 4 * step + 4]
            ids = torch.stack([row["input_ids"] for row in rows])
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    half = NUM_STEPS // 2
    with tempfile.TemporaryDirectory() as directory:
        steps(0, half)
        accelerator.save_state(directory)
        steps(half, NUM_STEPS - half)
        accelerator.load_state(directory)
        steps(half, NUM_STEPS - half)
    assert losses[half:NUM_STEPS] == losses[NUM_STEPS:]
    return Result(losses, [], weights_of(accelerator.unwrap_model(model)))
