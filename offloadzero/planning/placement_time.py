"""The seconds of a step with a plan, before the model has been called, for a search among plans.

Operations follow from the sizes: 2 for each parameter and token in the forward, 4 in backward, and 2 more where a
forward is run again. Attention is left out, and so are the inputs of checkpointed units, which are the same for each
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from offloadzero.config import OffloadConfig
from offloadzero.planning.activation_trace import MicroBatchTrace
from offloadzero.planning.hardware import Hardware
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.planning.step_work import used_elements
from offloadzero.planning.time_model import plan_step, simulated
from offloadzero.planning.traffic import Uses
from offloadzero.update.records import Record


def step_timer(
    records: Sequence[Record], config: OffloadConfig, *, uses: Uses, hardware: Hardware, num_tokens: int
) -> Callable[[MemoryPlan], float]:
    """Return a function that simulates a step with a plan of these records, in seconds; inf: a rate is not known.

    `num_tokens` are those of a micro batch.
    """
    forward_flops = 2 * num_tokens * used_elements(records, uses)
    recomputed = forward_flops if config.activation_checkpoints is not None else 0
    trace = MicroBatchTrace(
        num_tokens=num_tokens,
        forward_flops=forward_flops,
        backward_flops=2 * forward_flops + recomputed,
        kept_bytes=0,
        peak_bytes=0,
    )

    def seconds(plan: MemoryPlan) -> float:
        step = plan_step(records, plan, config, uses=uses, trace=trace)
        found = simulated(
            step, hardware.rates, num_cores=hardware.num_cores, device_is_cpu=hardware.device_is_cpu
        )
        return inf if found is None else found.seconds

    return seconds
