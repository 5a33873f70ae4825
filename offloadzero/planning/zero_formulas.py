"""The formulas of the ZeRO papers, which a plan is put beside: bytes per rank, and efficiency by bandwidth.

[Note: two papers]
ZeRO (arXiv 1910.02054) counts, for each parameter that Adam trains in mixed precision, 2 bytes of parameter, 2 of
gradient and 12 of optimizer states: the fp32 master weight and two moments. Stage 1 divides the states among the
ranks, stage 2 the gradients as well, stage 3 the parameters as well.

ZeRO-Infinity (arXiv 2104.07857) asks how fast memory must be that is not the device's. Its arithmetic intensity is the
operations of a step for each byte that moves to or from that memory. While bytes move, nothing is computed, so
the efficiency is the share of the time in which the device computes. It is 1/2 where moving takes as long as computing,
which a schedule that overlaps both can hide completely.
"""

from __future__ import annotations

from offloadzero.errors import ConfigError

STAGES = (0, 1, 2, 3)
PARAM_BYTES = 2
GRAD_BYTES = 2
STATE_BYTES = 12  # fp32 master weight, two fp32 moments


def state_bytes(num_trained: float, *, stage: int, num_ranks: int, num_frozen: float = 0) -> float:
    """Return the bytes of parameters, gradients and optimizer states that one rank holds by ZeRO's formulas.

    `num_trained` parameters have all three, `num_frozen` ones are parameters alone. Raises ConfigError for a stage that
    does not exist.
    """
    if stage not in STAGES:
        raise ConfigError("zero_optimization.stage", stage, "0, 1, 2 or 3")
    divided = {0: 0, 1: STATE_BYTES, 2: STATE_BYTES + GRAD_BYTES, 3: STATE_BYTES + GRAD_BYTES + PARAM_BYTES}
    whole = PARAM_BYTES + GRAD_BYTES + STATE_BYTES - divided[stage]
    of_frozen = PARAM_BYTES * num_frozen / (num_ranks if stage == 3 else 1)
    return num_trained * (whole + divided[stage] / num_ranks) + of_frozen


def efficiency_unoverlapped(flops_per_byte: float, *, bytes_per_s: float, flops_per_s: float) -> float:
    """Return the share of the time in which a device of `flops_per_s` computes if nothing overlaps."""
    fed = flops_per_byte * bytes_per_s
    return fed / (fed + flops_per_s)
