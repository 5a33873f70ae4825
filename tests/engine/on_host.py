"""A small engine on the host, as the tests of DeepSpeed's names start it, and what it trains to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import offloadzero
from tests.support.tiny import TinyModel, settings, train


def make_model(seed: int = 1) -> TinyModel:
    torch.manual_seed(seed)
    return TinyModel(width=16, num_blocks=2)


def config(directory: Path | None = None, **keys: Any) -> dict[str, Any]:
    return settings(directory, **{"placement": "host", **keys})


def losses_of(engine: offloadzero.Engine, num_steps: int = 4) -> list[float]:
    losses = train(engine, num_steps=num_steps)
    engine.close()
    return losses
