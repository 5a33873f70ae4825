"""Models of which one gradient can be made NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offloadzero
from tests.support.tiny import TinyModel, all_states, make_engine, settings, train

PLACEMENTS: dict[str, Any] = {
    "host": "host",
    "nvme": "nvme",
    "device": "device",
    "mixed": {"param": "host", "master": "nvme", "exp_avg": "device", "exp_avg_sq": "nvme"},
}
WHERE = ["emb.weight", "blocks.1.up.weight", "norm.weight"]


class Poisonable(nn.Module):
    """A model whose gradient of one chosen parameter can be made NaN or Inf."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.model = TinyModel()
        self.poison: float | None = None
        parameter = dict(self.model.named_parameters())[where]
        parameter.register_hook(self._spoil)

    def _spoil(self, grad: torch.Tensor) -> torch.Tensor:
        if self.poison is not None:
            grad = grad.clone()
            grad.view(-1)[-1] = self.poison
        return grad

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch)  # type: ignore[no-any-return]


def assert_all_finite(engine: offloadzero.Engine) -> None:
    """Reads the homes themselves, also when the engine refuses to go on."""
    runtime = engine.optimizer.runtime
    for record in runtime.records:
        for kind, segment in record.segments.items():
            if kind.value == "grad":
                continue
            target = torch.empty(segment.num_elements, dtype=segment.dtype)
            runtime.store.read(segment, target).wait()
            assert not target.is_floating_point() or bool(target.isfinite().all()), segment.label


def poisonable_engine(
    directory: Path, where: str, placement: str, **keys: Any
) -> tuple[offloadzero.Engine, Poisonable]:
    torch.manual_seed(1)
    model = Poisonable(where)
    return make_engine(settings(directory, placement=PLACEMENTS[placement], **keys), model), model


def states_after(engine: offloadzero.Engine, seeds: Iterable[int]) -> dict[str, torch.Tensor]:
    """What nothing disturbs: the states of an engine behind a step for each of these batches."""
    for seed in seeds:
        train(engine, num_steps=1, first_seed=seed)
    states = all_states(engine)
    engine.close()
    return states


def same_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one
    )
