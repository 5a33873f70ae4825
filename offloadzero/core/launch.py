"""The parts of a process that launchers and command lines of DeepSpeed scripts expect."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from offloadzero.errors import ConfigError, RankError

log = logging.getLogger("offloadzero")

DEFAULT_PORT = 29500  # the default of DeepSpeed and of torch

# A launcher of several processes sets one of these variables.
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def local_rank() -> int:
    """The rank on this machine, as the launcher set it; 0 without a launcher. Raises ConfigError for no number."""
    return _environment_number("LOCAL_RANK", default=0)


def launched_local_rank() -> int | None:
    """The same; None where no launcher has set it."""
    return local_rank() if os.environ.get("LOCAL_RANK", "").strip() else None


def launched_local_size() -> int | None:
    """The number of ranks on this machine, as the launcher set it; None where none has. Raises ConfigError."""
    size = _environment_number("LOCAL_WORLD_SIZE", default=0)
    return size if size > 0 else None


def join_group() -> tuple[int, int]:
    """Return this rank and the number of ranks; make torch's process group where a launcher asks for several.

    Raises:
        ConfigError: a launcher says that there are several ranks, and not which this is.
    """
    if max(_sizes().values()) > 1:
        init_distributed()
    return (_distributed().get_rank(), group_size()) if _group_is_up() else (0, 1)


def group_size() -> int:
    """The number of ranks of torch's process group; 1 without one."""
    return int(_distributed().get_world_size()) if _group_is_up() else 1


@contextmanager
def not_launched() -> Iterator[None]:
    """Hide a launcher's variables: an engine that is made in the block is this process's alone."""
    hidden = {name: os.environ.pop(name) for name in (*_WORLD_SIZES, *_OF_A_RANK) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,  # noqa: ARG001 (DeepSpeed's signature)
    distributed_port: int = DEFAULT_PORT,  # noqa: ARG001 (the launcher's MASTER_PORT is used)
    verbose: bool = True,  # noqa: ARG001
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,  # noqa: ARG001
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch's process group where a launcher or the caller asks for it.

    Without a launcher's RANK and WORLD_SIZE, and unless `dist_init_required`, `rank` or `init_method` asks, nothing
    is initialised. A group that is up is kept. The backend is torch's for the devices ("nccl" for CUDA) where there
    are any, and several ranks, else "gloo", as is "nccl" without a GPU.

    Raises:
        ConfigError: a launcher says that there are several ranks, and not which this is.
        RankError: a rank has not come within `timeout`, or is gone.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    wanted = launched or init_method is not None or rank >= 0
    size = max(world_size, *_sizes().values())
    if _group_is_up():
        return
    if size > 1 and not wanted:
        name = next((name for name, number in _sizes().items() if number > 1), "world_size")
        raise ConfigError(
            name, size, "several ranks, and no RANK that says which this is: start them with torchrun"
        )
    if not (wanted if dist_init_required is None else dist_init_required):
        return
    dist = _distributed()
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if size > 1:
        options |= {"rank": rank, "world_size": world_size} if rank >= 0 else {}
        try:
            dist.init_process_group(_backend(dist_backend, size), init_method=init_method, **options)
        except RuntimeError as error:
            (first_line, *_) = [*str(error).splitlines(), ""]
            raise RankError(
                f"torch's process group of {size} ranks has not come up ({first_line})"
            ) from error
    else:
        where = {"store": dist.HashStore()} if init_method is None else {"init_method": init_method}
        dist.init_process_group(_backend(dist_backend, 1), rank=0, world_size=1, **where, **options)
    # A gloo group that is up when the process ends aborts it now and then, where its thread has not been joined.
    atexit.register(_leave_group)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config (and their oldest names), which `initialize(args)` reads."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(
            f"--{name}", action="store_true", help="for the script's own use: changes nothing here"
        )
        group.add_argument(f"--{name}_config", default=None, type=str, help="the configuration's JSON file")
    return parser


def _environment_number(name: str, *, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text.strip() else default
    except ValueError:
        raise ConfigError(name, text, "a whole number: it is set by the launcher") from None


def _sizes() -> dict[str, int]:
    """The numbers of ranks, by the launcher's variable or the process group that gives them."""
    sizes = {name: _environment_number(name, default=1) for name in _WORLD_SIZES}
    if _group_is_up():
        sizes["torch.distributed.get_world_size()"] = _distributed().get_world_size()
    return sizes


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def _leave_group() -> None:
    if _group_is_up():
        _distributed().destroy_process_group()


def _group_is_up() -> bool:
    dist = _distributed()
    return bool(dist.is_available() and dist.is_initialized())


def _backend(asked: str | None, world_size: int) -> str:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if asked is None:
        is_on_device = device is not None and world_size > 1
        return str(_distributed().get_default_backend_for_device(device)) if is_on_device else "gloo"
    if asked == "nccl" and device is None:
        log.info("init_distributed: gloo instead of %s, there is no GPU", asked)
        return "gloo"
    return asked
