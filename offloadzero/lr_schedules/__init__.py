"""DeepSpeed's learning-rate schedules as torch schedulers, and the builder of any schedule by name."""

from offloadzero.lr_schedules.schedules import (
    DEEPSPEED_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_lr_scheduler,
)

__all__ = [
    "DEEPSPEED_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_lr_scheduler",
]
