"""A process's place among the ranks, taken before it makes an engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from torch import nn

from offloadzero.config import OffloadConfig, expect_partitionable
from offloadzero.config.schema import MeshConfig, ObserveConfig
from offloadzero.core import launch
from offloadzero.core.torch_private import sharder_of
from offloadzero.errors import ConfigError
from offloadzero.memory.device import device_of_rank

# What is imported inside of functions loads torch.distributed.


def telling_others() -> AbstractContextManager[None]:
    """Tell an error of the block to the other ranks of the process group, which wait for this one."""
    if launch.group_size() == 1:
        return nullcontext()
    from offloadzero.ranks.failure_board import telling_others as telling_ranks

    return telling_ranks()


def join_group(model: object) -> tuple[int, int]:
    """Return this rank and the number of ranks, which all start an engine with `model` now.

    Raises:
        ConfigError: a launcher says that there are several ranks, and not which this is; DistributedDataParallel or
            FSDP is around the model or a module of it.
        StateError: the ranks have built the model together, and another is about to do something else with it.
    """
    with telling_others():  # where there is a group already
        rank, world_size = launch.join_group()
    if isinstance(model, nn.Module):
        with telling_others():
            _expect_unwrapped(model, world_size)
    if world_size > 1 and isinstance(model, nn.Module):
        from offloadzero.streaming.building.divided import announce_start

        announce_start(model.parameters())
    return rank, world_size


def _expect_unwrapped(model: nn.Module, world_size: int) -> None:
    for name, module in model.named_modules():
        path = f"model.{name}" if name else "model"
        if isinstance(module, nn.parallel.DistributedDataParallel) and (world_size > 1 or not name):
            allowed = f"the module in it, {path}.module: its gradients are averaged over the ranks here"
            raise ConfigError(path, type(module).__name__, allowed)
        sharder = sharder_of(module)
        if sharder is not None:
            allowed = (
                "the model without it: ranks divide the parameters themselves at zero_optimization.stage 3"
            )
            raise ConfigError(path, sharder, allowed)


def config_of_rank(
    config: OffloadConfig, rank: int, world_size: int, mesh: MeshConfig | None = None
) -> OffloadConfig:
    """Return the configuration of one rank: each computes on its own GPU, and only the first one reports on the run.

    `world_size` is the number of ranks that train the same part of the model. Raises ConfigError where the
    configuration is for another number, or divides inputs where no ranks have the same ones.
    """
    if config.world_size != world_size:
        allowed = f"{world_size}: load_config(..., world_size={world_size}) makes it for so many ranks"
        raise ConfigError("config.world_size", config.world_size, allowed)
    config = replace(config, mesh=mesh)
    expect_partitionable(config)
    if not config.is_of_several:
        return config
    config = replace(config, device=device_of_rank(config.device, launch.launched_local_rank()))
    return config if rank == 0 else replace(config, observe=ObserveConfig(), steps_per_print=None)
