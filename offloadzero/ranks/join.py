"""How the ranks of a process group join as those of one model, and the settings that are refused there."""

from __future__ import annotations

import logging
import os

import torch

from offloadzero.config import OffloadConfig
from offloadzero.core import launch
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import ConfigError
from offloadzero.memory.device import make_current
from offloadzero.memory.tickets import Failures
from offloadzero.ranks.comparing import digest, machine
from offloadzero.ranks.process_groups import Ranks, make_ranks
from offloadzero.ranks.shard import consecutive_groups, keeps_params_on_device

log = logging.getLogger("offloadzero")

_NUM_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # read by the driver when a process first uses the device
MOST_QUEUES = 32


def join_ranks(device: torch.device, config: OffloadConfig, failures: Failures) -> Ranks:
    """Join the ranks of torch's default process group, which are told of the first one of `failures`.

    Raises ConfigError for settings not built over several.
    """
    expect_built(config)
    shared_queues = expect_own_queues(device, launch.group_size())
    make_current(device)
    wire = config.zero_plus_plus
    ranks = make_ranks(
        device,
        mesh=config.mesh,
        node_ranks=wire.node_ranks,
        reduces_codes=wire.quantized_gradients,
        divides_inputs=config.partition_activations,
    )
    failures.tell_others(lambda error, has_failed: ranks.board.report(error, has_failed=has_failed))
    for warning in filter(None, (shared_queues, _apart(ranks))):
        if ranks.is_first:
            log.warning("%s", warning)
    return ranks


def _apart(ranks: Ranks) -> str:
    """Return a warning where ranks that count as a machine are on several ones, or "". All ranks call this."""
    near = ranks.near_weights or ranks.near_gradients
    if near is None:
        return ""
    by_rank = ranks.control.by_rank_unless_same([digest(machine())], "which ranks are on a machine")
    if by_rank is None:
        return ""
    size = near.spec.world_size
    groups = consecutive_groups(ranks.control.spec, size)
    odd = next((members for members in groups if len({by_rank[rank][0] for rank in members}) > 1), None)
    if odd is None:
        return ""
    return (
        f"ZeRO++ takes {size} consecutive ranks for one machine, and ranks {odd} are on several: what was to stay "
        "within a machine goes over the network. Start the ranks of a machine one after the other (torchrun does, "
        "mpirun --map-by slot, srun --distribution=block)"
    )


def expect_own_queues(device: torch.device, world_size: int) -> str:
    """Refuse a single hardware queue for all of a GPU's streams; return a warning where streams may share one, or "".

    Weights are gathered and gradients reduced by different threads, each in its own order, so one rank may launch them
    in another order than the next. In one queue what waits for the first holds the second back: on one rank the gather
    behind what waits for a reduction, on the next the other way round, and neither goes on.
    """
    if device.type != "cuda" or world_size == 1:
        return ""
    value = os.environ.get(_NUM_QUEUES)
    if value == "1":
        raise ConfigError(
            _NUM_QUEUES,
            1,
            f"{MOST_QUEUES} where several ranks train: with one queue they could wait for each other",
        )
    if value == str(MOST_QUEUES):
        return ""
    return (
        f"{_NUM_QUEUES} is {value or 'not set'}: streams of an engine share hardware queues, and ranks could wait for "
        f"each other; set it to {MOST_QUEUES} before the script starts"
    )


def expect_built(config: OffloadConfig) -> None:
    """Refuse settings that would not be right over several ranks."""
    several = f"over {config.world_size} ranks" if config.mesh is None else "in a mesh of ranks"
    wire = config.zero_plus_plus
    if config.mesh is not None and wire.node_ranks > 1:
        raise ConfigError("zero_optimization.zero_hpz_partition_size", wire.node_ranks, f"{several}: 1")
    if config.mesh is not None and wire.quantized_gradients:
        raise ConfigError("zero_optimization.zero_quantized_gradients", True, f"{several}: false")
    if config.mesh is not None and config.placement.auto:
        raise ConfigError(
            "offloadzero.placement", "auto", f"homes by name: {several} the choice is not built"
        )
    rules = () if config.placement.auto else config.placement.rules
    tiers = {rule.tiers.get(SegmentKind.PARAM, TierName.DEVICE) for rule in rules}
    if keeps_params_on_device(config.zero_stage) and tiers - {TierName.DEVICE}:
        (tier_name, *_) = sorted(tier.value for tier in tiers - {TierName.DEVICE})
        allowed = f"{several} device, or zero_optimization.stage 3: stages 1 and 2 keep all parameters on each device"
        raise ConfigError("offloadzero.placement.param", tier_name, allowed)
    if config.placement.host_update_ratio < 1.0:
        ratio = config.placement.host_update_ratio
        raise ConfigError("zero_optimization.offload_optimizer.ratio", ratio, f"{several}: 1.0")
