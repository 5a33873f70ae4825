"""DeepSpeed's names for the CPU optimizers."""

from offloadzero.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
