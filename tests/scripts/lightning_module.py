"""Lightning: `offload()` in configure_optimizers; the module keeps the model it gives."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.scripts.common import LM, MAX_NORM, NUM_STEPS, Result, Wrap, adamw, tokens, weights_of


def fit(wrap: Wrap, *, resume: str | None = None, num_steps: int = NUM_STEPS, **arguments: Any) -> Result:
    """Trainer.fit with gradient_clip_val; norms by Lightning's own grad_norm before it clips."""
    import lightning
    from lightning.pytorch.utilities import grad_norm

    losses: list[float] = []
    norms: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = LM()

        def training_step(self, ids: Tensor, index: int) -> Tensor:  # noqa: ARG002
            loss = self.model(ids)
            losses.append(loss.item())
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:  # noqa: ARG002
            norms.append(float(grad_norm(self.model, norm_type=2)["grad_2.0_norm_total"]))

        def configure_optimizers(self) -> Any:
            self.model, optimizer = wrap(self.model, adamw(self.model))
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.05 * step))
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": MAX_NORM,
    }
    save_to = arguments.pop("save_to", None)
    trainer = lightning.Trainer(**{**settings, **arguments})
    num_batches = num_steps * arguments.get("accumulate_grad_batches", 1)
    loader = torch.utils.data.DataLoader([tokens(i) for i in range(num_batches)], batch_size=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer.fit(module, loader, ckpt_path=resume, weights_only=False if resume else None)
    assert trainer.global_step == num_steps
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return Result(losses, norms, weights_of(module.model))


def run(wrap: Wrap) -> Result:
    """Clipping by norm."""
    return fit(wrap)


def by_value(wrap: Wrap) -> Result:
    """Clipping by value, two batches per step."""
    return fit(wrap, gradient_clip_val=1e-3, gradient_clip_algorithm="value", accumulate_grad_batches=2)


def resumed(wrap: Wrap) -> Result:
    """trainer.save_checkpoint, then fit(ckpt_path=...) with a new module."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "half.ckpt")
        first = fit(wrap, num_steps=NUM_STEPS // 2, max_epochs=1, save_to=path)
        second = fit(wrap, resume=path, max_epochs=-1, max_steps=NUM_STEPS)
    return Result(first.losses + second.losses, first.grad_norms + second.grad_norms, second.weights)
