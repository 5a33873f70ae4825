"""A model whose weights are frozen beside LoRA adapters, for `offloadzero plan --lora`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from offloadzero.errors import ConfigError

KEY = "--lora"


class LoraLinear(nn.Module):
    """A frozen projection and its adapter (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        """That of the projection, whose dtype some models ask for."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze the model, and put adapters on each `nn.Linear` but the head, as PEFT's "all-linear" does.

    Raises ConfigError where there is none.
    """
    model.requires_grad_(False)
    head = head_of(model)
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not head
    ]
    if not found:
        allowed = f"a model with nn.Linear beside its head: {type(model).__name__} has none"
        raise ConfigError(KEY, rank, allowed)
    for parent, name, child in found:
        setattr(parent, name, LoraLinear(child, rank))
    return model


def head_of(model: nn.Module) -> Any:
    """The projection onto the vocabulary; None where there is none."""
    of_transformers = getattr(model, "get_output_embeddings", None)
    return getattr(model, "lm_head", None) if of_transformers is None else of_transformers()
