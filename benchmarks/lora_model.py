"""A Llama of 70B parameters whose weights are frozen, with LoRA adapters of rank 16, for `offloadzero plan --model`.

offloadzero plan --model benchmarks.lora_model:llama_70b --config FILE
"""

from __future__ import annotations

from torch import Tensor, nn

from offloadzero.planning.model.shapes import PUBLISHED

RANK = 16


class LoraLinear(nn.Module):
    """A frozen projection and its adapter (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]


def llama_70b() -> nn.Module:
    """Return the model: everything but the adapters of the blocks' projections is frozen."""
    model = PUBLISHED["llama:70b"].build().requires_grad_(False)
    for path, parent in list(model.named_modules()):
        if ".layers." not in path:
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoraLinear(child, RANK))
    return model
