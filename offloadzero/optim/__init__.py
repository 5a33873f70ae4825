"""The update kernels as torch optimizers for parameters in host memory, usable alone."""

from offloadzero.optim.cpu_adagrad import CPUAdagrad
from offloadzero.optim.cpu_adam import CPUAdam
from offloadzero.optim.cpu_lion import CPULion

__all__ = ["CPUAdagrad", "CPUAdam", "CPULion"]
