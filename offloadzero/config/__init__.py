"""The configuration: a frozen schema, and `load_config`, which reads a DeepSpeed JSON into it.

Nothing here imports torch.
"""

from offloadzero.config.load import load_config
from offloadzero.config.schema import (
    ActivationConfig,
    AioConfig,
    BatchConfig,
    BudgetConfig,
    LossScaleConfig,
    ObserveConfig,
    OffloadConfig,
    OptimizerConfig,
    PlacementConfig,
    PlacementRule,
    PrecisionConfig,
    SchedulerConfig,
    SegmentKind,
    TierName,
    UnitConfig,
    UpdateConfig,
)

__all__ = [
    "ActivationConfig",
    "AioConfig",
    "BatchConfig",
    "BudgetConfig",
    "LossScaleConfig",
    "ObserveConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PlacementRule",
    "PrecisionConfig",
    "SchedulerConfig",
    "SegmentKind",
    "TierName",
    "UnitConfig",
    "UpdateConfig",
    "load_config",
]
