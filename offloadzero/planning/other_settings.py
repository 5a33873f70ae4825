"""The settings of a configuration with which a step is not as fast as the rates of a machine say.

A machine is measured once, with the engine's default settings: pinned copies, updates on all cores, the file engine as
it is without a key. A forecast of a configuration with others names them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from offloadzero.config import OffloadConfig
from offloadzero.config.schema import AioConfig
from offloadzero.observe.timeline import D2H, H2D, NVME_READ, NVME_WRITE, UPDATE

_OF_THE_DRIVE = {  # of AioConfig, and their keys
    "backend": "offloadzero.aio.backend",
    "block_size": "aio.block_size",
    "queue_depth": "aio.queue_depth",
    "num_threads": "aio.intra_op_parallelism",
}


def other_settings(config: OffloadConfig, lanes: Collection[str], *, device_is_cpu: bool) -> Iterator[str]:
    """Yield what of a configuration's settings is not in a forecast of a step that moves bytes on `lanes`."""
    if not config.pin_memory and not device_is_cpu and not {H2D, D2H}.isdisjoint(lanes):
        yield "pin_memory = false, with which copies are slower than the pinned ones of the rates"
    update = config.update
    if (update.num_threads is not None or update.cores) and UPDATE in lanes:
        names = [name for name in ("num_threads", "cores") if getattr(update, name)]
        keys = " and ".join(f"offloadzero.update.{name}" for name in names)
        yield f"{keys}: the rate of updates is that of as many as an engine takes itself"
    if {NVME_READ, NVME_WRITE}.isdisjoint(lanes):
        return
    usual = AioConfig()
    changed = [
        key for name, key in _OF_THE_DRIVE.items() if getattr(config.aio, name) != getattr(usual, name)
    ]
    if changed:
        yield f"{', '.join(changed)}: the drive's rates are those of the default settings"
    if config.aio.checksums:
        yield "offloadzero.aio.checksums, for which the cores pass once more over what the drive moves"
