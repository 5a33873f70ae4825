"""The batch arithmetic: train batch = micro batch * accumulation steps * ranks; any two give the third."""

from __future__ import annotations

from dataclasses import replace

from offloadzero.config.block import Block
from offloadzero.config.readers import MAX_COUNT, is_auto, read_bool, read_int
from offloadzero.config.schema import BatchConfig
from offloadzero.errors import ConfigError

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_ONE_STEP = BatchConfig.gradient_accumulation_steps


def read_batch(top: Block, *, world_size: int) -> BatchConfig:
    """Read the three sizes. Raises ConfigError, with the product, where they and `world_size` contradict each other."""
    train, micro, steps = (top.read(key, _read_size, None) for key in (_TRAIN, _MICRO, _STEPS))
    batch = resolve_batch(train, micro, steps, world_size=world_size)
    follows = {
        _TRAIN: batch.train_batch_size is not None,
        _MICRO: batch.micro_batch_size is not None,
        _STEPS: train is not None and micro is not None,  # one size alone resolves no "auto"
    }
    return replace(
        batch,
        managed=top.read("managed_gradient_accumulation", read_bool, batch.managed),
        unresolved=tuple(key for key, known in follows.items() if is_auto(top.raw(key)) and not known),
    )


def _read_size(key: str, value: object) -> int | None:
    return None if is_auto(value) else read_int(key, value, minimum=1, maximum=MAX_COUNT)


def resolve_batch(train: int | None, micro: int | None, steps: int | None, *, world_size: int) -> BatchConfig:
    """Fill in what is None. One size alone means one accumulation step; with none all sizes stay None.

    Raises ConfigError where the train batch is not the product of the others and `world_size`.
    """
    if train is None:
        if micro is None:
            return BatchConfig(None, None, _ONE_STEP if steps is None else steps)
        steps = _ONE_STEP if steps is None else steps
        return BatchConfig(micro * steps * world_size, micro, steps)
    if micro is None:
        steps = _ONE_STEP if steps is None else steps
        micro = _divide(
            train, by=steps * world_size, product=f"{_MICRO} * {steps} ({_STEPS}) * {world_size} (ranks)"
        )
    elif steps is None:
        steps = _divide(
            train, by=micro * world_size, product=f"{micro} ({_MICRO}) * {_STEPS} * {world_size} (ranks)"
        )
    if micro * steps * world_size != train:
        raise ConfigError(
            _TRAIN,
            train,
            f"must equal {_MICRO} * {_STEPS} * ranks = {micro} * {steps} * {world_size}"
            f" = {micro * steps * world_size}",
        )
    return BatchConfig(train, micro, steps)


def _divide(train: int, *, by: int, product: str) -> int:
    quotient, rest = divmod(train, by)
    if rest or quotient < 1:
        raise ConfigError(_TRAIN, train, f"must equal {product}: not a multiple of {by}")
    return quotient
