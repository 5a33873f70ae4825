"""Changes that would make a step faster: of the remedies of the lane it waits for, those that the step has left."""

from __future__ import annotations

from collections.abc import Mapping

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
from offloadzero.planning.time_model import HOST_MEMORY, LINKS, NETWORK, NVME_MIXED, Step

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
