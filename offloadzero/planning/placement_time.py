"""The seconds of a step with a plan, before the model has been called, for a search among plans.

Operations follow from the sizes: 2 for each parameter and token in the forward, 4 in backward, and 2 more where a
forward is run again. Attention is left out, and so are the inputs of checkpointed units, which are the same for each
plan. Of experts all are counted, though a token reaches a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from offloadzero.config import OffloadConfig
from offloadzero.planning.activation_trace import MicroBatchTrace
from offloadzero.planning.hardware import Hardware
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.planning.step.forecast import Step, forecast, plan_step, simulated
from offloadzero.planning.step.work import Uses, used_elements
from offloadzero.update.records import Record


class StepTimer:
    """Simulates a step with one plan or another of the same records."""

    def __init__(
        self,
        records: Sequence[Record],
        config: OffloadConfig,
        *,
        uses: Uses,
        hardware: Hardware,
        num_tokens: int,
    ) -> None:
        """Prepare for micro batches of `num_tokens`."""
        self._records, self._config, self._uses, self._hardware = records, config, uses, hardware
        forward_flops = 2 * num_tokens * used_elements(records, uses)
        recomputed = forward_flops if config.activation_checkpoints is not None else 0
        self._trace = MicroBatchTrace(
            num_tokens=num_tokens,
            forward_flops=forward_flops,
            backward_flops=2 * forward_flops + recomputed,
            kept_bytes=0,
            peak_bytes=0,
        )

    def seconds(self, plan: MemoryPlan) -> float:
        """Return the seconds of a step with a plan; inf: a rate is not known."""
        hardware, step = self._hardware, self._step(plan)
        found = simulated(
            step,
            hardware.rates_of(step),
            num_cores=hardware.num_cores,
            device_is_cpu=hardware.device_is_cpu,
        )
        return inf if found is None else found.seconds

    def unknown(self, plan: MemoryPlan) -> tuple[str, ...]:
        """Return the lanes of a step with a plan whose rates are not known."""
        hardware, step = self._hardware, self._step(plan)
        return forecast(
            step,
            hardware.rates_of(step),
            num_cores=hardware.num_cores,
            device_is_cpu=hardware.device_is_cpu,
        ).unknown

    def _step(self, plan: MemoryPlan) -> Step:
        return plan_step(self._records, plan, self._config, uses=self._uses, trace=self._trace)
