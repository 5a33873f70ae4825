"""The arguments of `initialize()`: the configuration, from one of several places, and the training data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from offloadzero.api.optimizer import ConfigSource
from offloadzero.config.readers import AUTO
from offloadzero.config.schema import MICRO_BATCH, BatchConfig
from offloadzero.errors import ConfigError

Collate = Callable[[list[Any]], Any]


def config_source(args: Any, config: ConfigSource | None, config_params: ConfigSource | None) -> ConfigSource:
    """Return the one configuration that is given. Raises ConfigError for none, and for two that differ."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if not found:
        raise ConfigError(
            "config",
            None,
            "a dict, the path of a JSON file, or an OffloadConfig; or args with `deepspeed_config`, as the script's "
            "--deepspeed_config FILE sets it",
        )
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise ConfigError(other, found[other], f"{first} is given too: give one")
    return found[first]


def size_of_micro_batch(batch: BatchConfig) -> int | str | None:
    """Return the samples of a micro batch; "auto" where the configuration says so, None where it says nothing."""
    return AUTO if MICRO_BATCH in batch.unresolved else batch.micro_batch_size


def make_loader(
    dataset: Dataset[Any],
    batch_size: int | str | None,
    *,
    route: str = "train",
    sampler: Sampler[Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
    **options: Any,
) -> DataLoader[Any]:
    """Make the DataLoader of a rank's micro batches. As in DeepSpeed it is shuffled for the route "train".

    Raises ConfigError without a batch size, and over several ranks for an IterableDataset.
    """
    if not isinstance(batch_size, int):  # None, or the text of the configuration
        raise ConfigError(MICRO_BATCH, batch_size, "a number: the DataLoader of the data needs it")
    if world_size > 1 and isinstance(dataset, IterableDataset):
        raise ConfigError(
            "training_data",
            type(dataset).__name__,
            f"a dataset with a length: over {world_size} ranks each would get all of an IterableDataset's data. Make "
            "the DataLoader of this rank's part yourself: islice(data, engine.get_data_parallel_rank(), None, "
            "engine.dp_world_size)",
        )
    if sampler is None and route == "train" and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    elif sampler is None and world_size > 1:
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)


def step_arguments(scheduler: Any) -> tuple[str, ...]:
    """The arguments that `scheduler.step()` cannot do without: "metrics" for a ReduceLROnPlateau."""
    if scheduler is None:
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(scheduler.step).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds and p.default is p.empty)
