"""DeepSpeed's names for the CPU optimizers (floor 5)."""

from offloadzero.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
