"""The scalars of one optimizer step, rounded as the kernels take them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from offloadzero.errors import ConfigError


class StepScalars(NamedTuple):
    """The scalars of one step, each computed in double and rounded to fp32 once.

    The fields are those of the struct in csrc/cpu_adam/cpu_adam.h, in its order; the notes on arithmetic there
    say how they are used. Lion and Adagrad leave the fields that they do not use at 0.
    """

    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    step_size: float
    inv_sqrt_bias_correction2: float
    decay: float
    weight_decay: float
    sqrt_beta2: float
    sqrt_one_minus_beta2: float
    decoupled: bool

    @property
    def with_l2(self) -> bool:
        """Whether the weight decay is added to the gradient (L2)."""
        return not self.decoupled and self.weight_decay != 0.0


_FLOATS = struct.Struct("<12f")  # the standard sizes: native "f" does not report overflow


def round_scalars(exact: Sequence[float], *, decoupled: bool, given: object) -> StepScalars:
    """Round all fields of StepScalars but the last to fp32; raises ConfigError naming `given` if one overflows."""
    try:
        rounded = _FLOATS.unpack(_FLOATS.pack(*exact))
    except OverflowError:
        raise ConfigError("hyper", given, "every number must fit fp32") from None
    return StepScalars._make((*rounded, decoupled))


def check_at_least_0(name: str, value: float) -> None:
    """Raise ConfigError for a hyperparameter that is negative or not finite."""
    if not (value >= 0.0 and math.isfinite(value)):
        raise ConfigError(name, value, "allowed finite numbers >= 0")
