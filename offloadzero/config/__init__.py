"""The configuration: a frozen schema, and `load_config`, which reads a DeepSpeed JSON into it.

Nothing here imports torch.
"""

from offloadzero.config.load import (
    create_nvme_directories,
    load_config,
    settle_for_initialize,
    settle_for_offload,
    settle_partition,
    with_unused_blocks,
)
from offloadzero.config.own_block import PARTITION_KEY
from offloadzero.config.readers import UNRESOLVED
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
    UnitConfig,
    UpdateConfig,
)
from offloadzero.config.source import read_config_file

__all__ = [
    "PARTITION_KEY",
    "UNRESOLVED",
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
    "UnitConfig",
    "UpdateConfig",
    "create_nvme_directories",
    "load_config",
    "read_config_file",
    "settle_for_initialize",
    "settle_for_offload",
    "settle_partition",
    "with_unused_blocks",
]
