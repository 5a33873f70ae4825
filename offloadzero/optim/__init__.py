"""The update kernels as torch optimizers for parameters in host memory, usable alone."""

from offloadzero.optim.cpu_optimizers import CPUAdagrad, CPUAdam, CPULion

__all__ = ["CPUAdagrad", "CPUAdam", "CPULion"]
