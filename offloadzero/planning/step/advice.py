"""What is said of a forecast: changes that would make the step faster, settings that it leaves out, a run's days."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from offloadzero.config import OffloadConfig
from offloadzero.config.schema import AioConfig
from offloadzero.observe.bound import CORES
from offloadzero.observe.forecast import PYTHON
from offloadzero.observe.timeline import (
    COLLECTIVES,
    COMPUTE,
    D2H,
    DEVICE_UPDATE,
    H2D,
    LANDING,
    NVME_READ,
    NVME_WRITE,
    UPDATE,
)
from offloadzero.planning.step.forecast import COMPACT, Forecast, Rates, Step, compute_seconds
from offloadzero.planning.step.work import HOST_MEMORY, LINKS, NETWORK, NVME_MIXED
from offloadzero.planning.zero_formulas import efficiency_unoverlapped

_COMPACT = "the compact layout"
_RECOMPUTE_LESS = "fewer recomputations"
_HOST_BUDGET = "a larger host budget"
_HOST_HOMES = 'homes in host memory (offloadzero.placement, or "device": "cpu" in the offload blocks)'
_MORE_MICRO_BATCHES = "more micro batches per step"
_LESS_OF_THE_DRIVE = (_HOST_BUDGET, _COMPACT, "a second drive", _MORE_MICRO_BATCHES)

FASTER: Mapping[str, tuple[str, tuple[str, ...]]] = {
    COMPUTE: ("the computation is", ("a faster device", _RECOMPUTE_LESS, "a shorter sequence")),
    CORES: (
        "the cores are",
        (_RECOMPUTE_LESS, "a shorter sequence", "a device that computes beside them"),
    ),
    PYTHON: (
        "Python per unit is",
        ("larger units (offloadzero.units.patterns)", "a larger micro batch"),
    ),
    H2D: (
        "the link to the device is",
        (
            "a larger device budget, which keeps units there",
            "a larger micro batch, which uses each fetch for more tokens",
        ),
    ),
    D2H: ("gradients on the link are", ("a larger micro batch, which sends them less often per token",)),
    UPDATE: (
        "updates on the host are",
        (
            'records updated on the device (a larger device budget with placement "auto")',
            _MORE_MICRO_BATCHES,
            f"{_COMPACT}, which moves half the bytes",
        ),
    ),
    DEVICE_UPDATE: ("updates on the device are", (_MORE_MICRO_BATCHES,)),
    LANDING: ("gradients that land on the host are", ("a larger micro batch",)),
    NVME_READ: ("reads of the drive are", _LESS_OF_THE_DRIVE),
    NVME_WRITE: ("writes of the drive are", _LESS_OF_THE_DRIVE),
    NVME_MIXED: ("the drive is", _LESS_OF_THE_DRIVE),
    COLLECTIVES: (
        "what the ranks send is",
        (
            "a larger micro batch",
            "a larger device budget",
            "ZeRO++'s codes and copies for near ranks (zero_optimization.zero_quantized_weights, "
            "zero_hpz_partition_size, zero_quantized_gradients)",
        ),
    ),
    LINKS: (
        "the links between the devices of a machine are",
        (
            "a larger micro batch",
            "a larger device budget",
            "weights and gradients as codes (zero_optimization.zero_quantized_weights, zero_quantized_gradients)",
        ),
    ),
    NETWORK: (
        "the network between machines is",
        (
            "ZeRO++ (zero_optimization.zero_hpz_partition_size, zero_quantized_weights, zero_quantized_gradients)",
            "a larger micro batch",
            "a larger device budget",
        ),
    ),
    HOST_MEMORY: (
        "the host's memory is",
        ("records updated on the device", _COMPACT, _MORE_MICRO_BATCHES),
    ),
}


def faster(lane: str, step: Step) -> tuple[str, str]:
    """Return what the step waits for, and what would shorten it: of the remedies those that this step has left."""
    what, remedies = FASTER[lane]
    found = []
    for remedy in remedies:
        if remedy.startswith(_COMPACT) and not step.can_be_compact:
            continue
        if remedy == _RECOMPUTE_LESS and not step.recomputes:
            continue
        # A budget moves nothing that the configuration has placed by name.
        found.append(_HOST_HOMES if remedy == _HOST_BUDGET and not step.homes_by_budget else remedy)
    *others, last = found
    comma = "," if len(others) > 1 else ""
    return f"{what} the bound", f"{', '.join(others)}{comma} or {last}" if others else last


_OF_THE_DRIVE = {  # of AioConfig, and their keys
    "backend": "offloadzero.aio.backend",
    "block_size": "aio.block_size",
    "queue_depth": "aio.queue_depth",
    "num_threads": "aio.intra_op_parallelism",
}


def other_settings(config: OffloadConfig, lanes: Collection[str], *, device_is_cpu: bool) -> Iterator[str]:
    """Yield what of a configuration's settings is not in a forecast of a step that moves bytes on `lanes`.

    A machine is measured once, with the engine's default settings: pinned copies, updates on all cores, the file engine
    as it is without a key.
    """
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


def faster_in_fp32(step: Step, rates: Rates) -> Iterator[str]:
    """Yield a sentence where the CPU, as the device, computes much faster in fp32 than in the step's dtype."""
    seconds, in_fp32 = (compute_seconds(one, rates) for one in (step, replace(step, dtype="fp32")))
    if seconds is None or in_fp32 is None or seconds < 2 * in_fp32:
        return
    compact = ' with "state_layout": "fp32"' if step.layout == COMPACT else ""
    yield (
        f'This CPU computes {seconds / in_fp32:.3g} times as fast in fp32 as in {step.dtype}: "{step.dtype}": '
        f'{{"enabled": false}}{compact} trains in it, with parameters and gradients of twice the bytes.'
    )


def intensities(step: Step, found: Forecast) -> dict[str, dict[str, float]]:
    """Return the operations of a step for each byte of a lane, and the share of computing if it did not overlap.

    By lane, where bytes, operations and both rates are known: [Note: efficiency by bandwidth].
    """
    seconds = {**found.lanes_s, **found.parts_s}
    compute_s = seconds.get(COMPUTE)
    if step.trace is None or step.trace.uncounted or not compute_s:
        return {}
    flops = step.num_micro * step.trace.flops
    known = {}
    for name, num_bytes in step.traffic.lanes.items():
        if num_bytes and seconds.get(name):
            per_byte = flops / num_bytes
            share = efficiency_unoverlapped(
                per_byte, bytes_per_s=num_bytes / seconds[name], flops_per_s=flops / compute_s
            )
            known[name] = {"flops_per_byte": per_byte, "efficiency": share}
    return known


@dataclass(frozen=True)
class Run:
    """The time and writes of a run over so many tokens."""

    num_steps: int
    days: float | None
    written_bytes: int  # to the drives
    drive_years: float | None  # until the drives reach their endurance, in uninterrupted training


def forecast_run(
    found: Forecast, step: Step, *, num_tokens: int, endurance_bytes: int | None = None
) -> Run | None:
    """Return days and writes for `num_tokens`; None where the tokens of a step are not known.

    `endurance_bytes`: the bytes for whose writing the drives together are made (TBW).
    """
    if not found.tokens:
        return None
    num_steps = -(-num_tokens // found.tokens)
    per_step = step.num_ranks * step.traffic.lane(NVME_WRITE)
    years = None
    if endurance_bytes is not None and per_step and found.seconds is not None:
        years = endurance_bytes / per_step * found.seconds / (365.25 * 86_400)
    days = None if found.seconds is None else num_steps * found.seconds / 86_400
    return Run(num_steps, days, num_steps * per_step, years)
