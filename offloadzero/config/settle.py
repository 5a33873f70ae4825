"""The values that `initialize()` and `offload()` give to settings that a configuration leaves open."""

from __future__ import annotations

from dataclasses import replace

from offloadzero.config.optimizer import UNRESOLVED
from offloadzero.config.schema import DEFAULT_GRADIENT_CLIPPING, OffloadConfig
from offloadzero.errors import ConfigError

PARTITION_KEY = "activation_checkpointing.partition_activations"


def expect_partitionable(config: OffloadConfig) -> None:
    """Raise ConfigError where inputs of checkpointed units are to be divided, and no ranks have the same ones."""
    mesh = config.mesh
    if not config.partition_activations or (mesh is not None and (mesh.tensor_size or 0) > 1):
        return
    if mesh is not None and mesh.tensor_size is None:
        raise ConfigError(
            PARTITION_KEY, True, "needs get_tensor_model_parallel_world_size() of initialize(mpu=...)"
        )
    allowed = (
        "false: there is nothing to partition. It divides what offloadzero.activation_checkpoints keeps among the "
        f"ranks along the axis tp of initialize(mpu=...), and here is {'one' if mesh is not None else 'none'}"
    )
    raise ConfigError(PARTITION_KEY, True, allowed)


def settle_for_initialize(config: OffloadConfig) -> OffloadConfig:
    """Fill in DeepSpeed's defaults, and warn of those that change the training.

    Raises:
        ConfigError: the number of micro batches per step is "auto" and does not follow from the batch sizes.
    """
    steps = "gradient_accumulation_steps"
    if steps in config.batch.unresolved and config.batch.managed:
        sizes = "train_batch_size and train_micro_batch_size_per_gpu"
        raise ConfigError(steps, "auto", f"{UNRESOLVED}; or give {sizes}, from which it follows")
    if config.gradient_clipping is not None:
        return config
    warning = (
        f"The configuration has no gradient_clipping: gradients are clipped at a norm of "
        f"{DEFAULT_GRADIENT_CLIPPING}, DeepSpeed's default. Write the key, {DEFAULT_GRADIENT_CLIPPING} or any other "
        "number or 0 for no clipping, and this warning is gone."
    )
    return replace(config, gradient_clipping=DEFAULT_GRADIENT_CLIPPING, warnings=(*config.warnings, warning))


def settle_for_offload(config: OffloadConfig) -> OffloadConfig:
    """Leave gradients alone unless the configuration says otherwise, as in torch; the script does the rest."""
    why = "offload() trains with the optimizer that it is given"
    clipping = config.gradient_clipping
    settled = replace(config, gradient_clipping=0.0 if clipping is None else clipping)
    return with_unused_blocks(settled, optimizer=why, scheduler=why)


def with_unused_blocks(
    config: OffloadConfig, *, optimizer: str | None = None, scheduler: str | None = None
) -> OffloadConfig:
    """Note for the log why the blocks of optimizer and schedule are not used, where the configuration has them."""
    blocks = (("optimizer", config.optimizer, optimizer), ("scheduler", config.scheduler, scheduler))
    unused = [f"{key}: not used: {why}" for key, block, why in blocks if block and why is not None]
    return replace(config, notices=(*config.notices, *unused))
