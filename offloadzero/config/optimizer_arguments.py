"""The optimizers that a configuration can name, and the arguments that each takes, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TORCH_ADAMW_DECAY = 0.01  # torch.optim.AdamW's default

_ADAM: Mapping[str, Any] = MappingProxyType(
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "adam_w_mode": True,
        "bias_correction": True,
        "torch_adam": False,
    }
)
# For each type, the arguments it takes and their defaults; offloadzero.update.specs has its update.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Adam": _ADAM,
        "AdamW": _ADAM,
        "Lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
        "Adagrad": {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "eps": 1e-10,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
        },
        "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    }
)
# Arguments of DeepSpeed's own and of torch.optim (2.13) that a script may carry over.
KNOWN_OPTIMIZERS = (
    *(
        "Lamb",
        "Muon",
        "OneBitAdam",
        "ZeroOneAdam",
        "OneBitLamb",
        "MuAdam",
        "MuAdamW",
        "MuSGD",
    ),
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop"),
    "SparseAdam",
)
