"""Lion written out: torch has none to compare with."""

from __future__ import annotations

from typing import Any

import torch


class ExactLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, with torch operations in the parameters' dtype."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (beta1 * m + (1 - beta1) * p.grad).sign()
                p -= group["lr"] * (update + group["weight_decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)
