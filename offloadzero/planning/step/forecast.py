"""The forecast of a step's time: the bound of each lane from bytes, operations and measured rates.

[Note: the forecast]
A lane's seconds are its bytes (or operations) of a step over the rate that was measured on the machine. The bound is
the longest lane: no schedule is faster. The forecast is the bound phase by phase, since phases follow one another:

- Where updates wait for the end of backward (clipping, fp16), backward with its fetches and gradients is one phase, and
  the next forward with all updates is the other: the lanes of the updates have only the forward to hide behind.
- Where updates run in backward, they share its phase; with several micro batches that of the last one.

A phase is longer than its longest lane, due to the first unit's fetch and the last one's update: only the share OVERLAP
of the forecast is work. [Note: the simulated step] sees what no sum of a phase does: leases and buffers, and lanes that
have all their work in a few units. In turn it has no hand-over from one thread to the next, and nothing smaller than a
unit: the same share of a step is taken for its work. Each of the two leaves out something that makes a step longer, so
the forecast is the longer one. It lies between the bound and the step in which nothing overlaps, and both are given.

With the CPU as the device all but the drive share the cores: computation, copies, landings, updates and the file
engine's own work add up, as [Note: the bound] in observe/bound.py adds them up when it measures. Computation alone does
not keep all cores busy: threads begin and end each operation together, and some operations have one thread. So it takes
its own time on a clock, which is a lane of its own. No schedule can be shorter than that; a real one is longer: a copy
on one core holds up the thread of the computation there, and the others wait for it at the end of the operation. The
forecast, unlike the bound, has the other work of the cores in the lane of computation: for as long as it takes alone,
copies, updates and the drive for as long as they were measured to hold it up. As long as the cores work the drive has
the part of its rate that it was measured to have then.

[Note: lanes between ranks]
Of several ranks it is the forecast of one, which has its share of what the ranks of a machine have in common. What they
send is one lane, `collectives`, at one rate; or, of a cluster that is described, two: `links` within a machine and
`network` between machines, as planning/cluster.py says. There `host memory` is a lane as well, of all that passes
through the host's memory: that of h2d, d2h, updates, landings and the drives, at the same time as on their own lanes.
Ranks are taken to be equally fast: none waits for another. The start of a collective counts in the lanes of its bytes.

[Note: one drive for both directions]
Most drives share one limit between reads and writes. `mixed` is the rate of both together, and holds in each phase in
which there are both, whichever of the model's phases they come from. The bound counts the bytes of each direction at
that rate or at its own, whichever is faster: a schedule might keep the directions apart. Where nothing overlaps the
drive takes the longer of the two ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from offloadzero.config import OffloadConfig
from offloadzero.observe.bound import CORES
from offloadzero.observe.forecast import FILE_ENGINE, OF_ONE_CORE, PYTHON, parts_alone
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
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.planning.model.trace import MicroBatchTrace
from offloadzero.planning.step.simulation import MAX_MICRO, LaneRates, SimulatedStep, simulate_step
from offloadzero.planning.step.work import (
    AFTER,
    BACKWARD,
    FORWARD,
    HOST_MEMORY,
    LINKS,
    NETWORK,
    NVME_MIXED,
    PHASES,
    THROUGH_HOST_MEMORY,
    Lanes,
    StepTraffic,
    StepWork,
    Uses,
    traffic_of,
    work_of_step,
)
from offloadzero.update.records import Record

FP32, COMPACT = "fp32", "compact"
COPY, DRIVE = "copy", "drive"
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
OVERLAP = 0.95  # overlap efficiency of a phase: the design's goal, which steady steps reach
LEAST_OF_CHAIN = 0.1  # of the simulated step's: what it would be worth to shorten
_OF_ONE_ADVICE = ((CORES, COMPUTE), (NVME_MIXED, NVME_READ, NVME_WRITE))
_BESIDE_THE_CORES = (NVME_READ, NVME_WRITE, NVME_MIXED, COLLECTIVES, LINKS, NETWORK)


Table = Mapping[str, float]


class Computation(NamedTuple):
    """The rates of a model's computation, in operations per second; on the CPU of its cores' time."""

    forward: float
    backward: float
    core_share: float = 1.0  # of the cores' time in both, that in which they compute


@dataclass(frozen=True)
class Rates:
    """The rates of one machine, in bytes and operations per second. A rate that is None is not known."""

    flops: Table = field(default_factory=dict)  # in a transformer block, by dtype of the parameters
    # In its backward, without what is computed again; where it is not known it is taken for that of `flops`.
    gradient_flops: Table = field(default_factory=dict)
    # Of the cores' time in a block's forward and backward, the part in which they compute; not known: all of it.
    core_shares: Table = field(default_factory=dict)
    update: Table = field(default_factory=dict)  # bytes moved by updates on the host, by state layout
    device_update: Table = field(default_factory=dict)  # the same on the device
    copy: float | None = None  # host memory to host memory, one thread
    landing: float | None = None  # gradients that are measured, all threads
    h2d: float | None = None
    d2h: float | None = None
    nvme_read: float | None = None
    nvme_write: float | None = None
    nvme_mixed: float | None = None
    nvme_cpu_s_per_byte: float | None = None
    # Where the CPU is the device, seconds that computation loses for each byte of a "copy", of the "drive" or of
    # updates, by state layout: [Note: work beside the computation] in cli/plan/computation.py.
    holds: Table = field(default_factory=dict)
    nvme_beside: float | None = None  # part of its rate that the drive has beside it; not known: all
    unit_s: float | None = None  # seconds of Python for each use of a unit
    # Of several ranks, each one's: [Note: lanes between ranks].
    collectives: float | None = None
    links: float | None = None  # each way
    network: float | None = None  # each way
    host_memory: float | None = None
    collective_s: float | None = None  # seconds of a collective beside its bytes; None: they are left out


@dataclass(frozen=True)
class Step:
    """The operations and bytes of a step."""

    traffic: StepTraffic
    trace: MicroBatchTrace | None  # of one micro batch; None: operations are not known
    num_micro: int
    update_in_backward: bool
    dtype: str  # of products of matrices
    layout: str  # of the states
    num_ranks: int = 1
    work: StepWork | None = None  # the same unit by unit; None: not simulated, as with several ranks
    num_params: int = 0  # of the model, or of a rank's part of it
    can_be_compact: bool = False  # whether some states would be smaller in the compact layout
    homes_by_budget: bool = False  # whether a budget decides where states live

    @property
    def recomputes(self) -> bool:
        """Whether backward computes more than a tenth of the forward again."""
        return self.trace is not None and 10 * self.trace.recomputed_flops > self.trace.forward_flops


def plan_step(
    records: Sequence[Record],
    plan: MemoryPlan,
    config: OffloadConfig,
    *,
    uses: Uses,
    trace: MicroBatchTrace | None,
    products: torch.dtype | None = None,
    num_local_ranks: int | None = None,
) -> Step:
    """Return the bytes and operations of a step of a model that is planned; of several ranks those of one.

    Args:
        products: the dtype of products of matrices; None: that of most parameters, codes apart.
        num_local_ranks: the ranks of a machine; None: all are on one.
    """
    values = [record for record in records if record.dtype.is_floating_point] or records
    dtype = max(values, key=lambda record: record.num_elements).dtype if products is None else products
    inputs = trace.inputs if trace is not None else ()
    work = work_of_step(records, plan, config, uses=uses, inputs=inputs)
    return Step(
        traffic_of(work, records, plan, config, inputs=inputs, num_local_ranks=num_local_ranks),
        trace,
        num_micro=config.batch.gradient_accumulation_steps,
        update_in_backward=plan.update_in_backward,
        dtype=DTYPE_NAMES.get(dtype, str(dtype)),
        layout=config.state_layout,
        num_ranks=config.world_size,
        work=work if config.world_size == 1 else None,
        num_params=sum(record.num_params for record in records),
        can_be_compact=any(record.can_be_compact for record in records),
        homes_by_budget=config.placement.auto,
    )


@dataclass(frozen=True)
class Phase:
    """A part of a step in which lanes run side by side: [Note: the forecast]."""

    name: str
    seconds: float
    lanes_s: Lanes
    parts_s: Lanes  # of the work that shares the cores, as in `Forecast`
    num_bytes: Lanes


@dataclass(frozen=True)
class Forecast:
    """The seconds of a step: [Note: the forecast]. Without a rate that matters there are none; `unknown` names it.

    `bound_s` <= `seconds` <= `alone_s`, where nothing overlaps.
    """

    lanes_s: Lanes
    unknown: tuple[str, ...]
    parts_s: Lanes = field(
        default_factory=dict
    )  # the work that shares the cores, by the lane that it would be
    bound_s: float | None = None
    lane: str | None = None  # the lane of the bound
    seconds: float | None = None
    alone_s: float | None = None
    tokens: int | None = None  # of all ranks
    phases: tuple[Phase, ...] = ()  # in their order; together they take `seconds`
    # None: not simulated, as with several ranks, or a rate is not known.
    simulated: SimulatedStep | None = None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def over_phases(self) -> float:
        """What the forecast is over the time of its phases by their longest lanes alone: 1 where they are longest."""
        by_lanes_s = sum(max(phase.lanes_s.values()) / OVERLAP for phase in self.phases)
        return (self.seconds or 0.0) / by_lanes_s if by_lanes_s else 1.0

    @property
    def waits_for(self) -> str | None:
        """The lane that the step waits for most: the bound's, or the simulated step's where that is the forecast."""
        if self.simulated is not None and self.seconds == self.simulated.seconds / OVERLAP:
            return self.simulated.lane or self.lane
        return self.lane

    @property
    def waits_for_next(self) -> tuple[str, float] | None:
        """The lane with most of the simulated step's chain after `waits_for`, and its share; None: it is little."""
        if self.simulated is None:
            return None
        said = next((lanes for lanes in _OF_ONE_ADVICE if self.waits_for in lanes), (self.waits_for,))
        others = {lane: s for lane, s in self.simulated.critical_s.items() if lane not in said}
        lane = max(sorted(others), key=lambda lane: others[lane], default=None)
        if lane is None or others[lane] < LEAST_OF_CHAIN * self.simulated.seconds:
            return None
        return lane, others[lane] / self.simulated.seconds


def forecast(step: Step, rates: Rates, *, num_cores: int, device_is_cpu: bool) -> Forecast:
    """Forecast a step, or give the reason why that is not possible."""
    on = _StepOnMachine(step, rates, num_cores, device_is_cpu)
    by_phase = {phase: on.lanes(phase) for phase in PHASES}
    unknown = {lane for lanes in by_phase.values() for lane, seconds in lanes.items() if seconds is None}
    known = {phase: _known(lanes) for phase, lanes in by_phase.items()}
    shared = {phase: on.cores_s(phase) for phase in PHASES}
    total = on.with_both_directions(_together(known.values()), at_best=True)
    tokens = step.num_ranks * step.trace.num_tokens * step.num_micro if step.trace is not None else None
    found = Forecast(total, tuple(sorted(unknown)), parts_s=_together(shared.values()), tokens=tokens)
    if unknown or not total:
        return found
    phases, alone_s = list[Phase](), 0.0
    turns = (on.in_turn(table) for table in (known, shared, step.traffic.by_phase))
    for name, lanes, parts_s, num_bytes in zip(_turns(step), *turns, strict=True):
        undisturbed = on.with_both_directions(lanes)
        alone_s += _one_after_the_other(undisturbed, parts_s)
        lanes_s = on.beside_each_other(undisturbed, parts_s, num_bytes)
        phases.append(Phase(name, max(lanes_s.values(), default=0.0) / OVERLAP, lanes_s, parts_s, num_bytes))
    by_phase_s = sum(phase.seconds for phase in phases)
    simulation = on.simulated()
    seconds = by_phase_s if simulation is None else max(by_phase_s, simulation.seconds / OVERLAP)
    lane = max(total, key=lambda name: total[name])
    return replace(
        found,
        simulated=simulation,
        bound_s=total[lane],
        lane=lane,
        seconds=seconds,
        alone_s=max(seconds, alone_s),  # of few lanes OVERLAP may leave more than could be hidden
        phases=tuple(
            replace(phase, seconds=phase.seconds * seconds / by_phase_s) for phase in phases if phase.seconds
        ),
    )


def simulated(step: Step, rates: Rates, *, num_cores: int, device_is_cpu: bool) -> SimulatedStep | None:
    """Simulate a step: [Note: the simulated step]. None: a rate, the operations or the work by unit are not known."""
    return _StepOnMachine(step, rates, num_cores, device_is_cpu).simulated()


def compute_seconds(step: Step, rates: Rates) -> float | None:
    """Return the seconds of a step's computation alone; None where a rate or the operations are not known."""
    on = _StepOnMachine(step, rates, 1, device_is_cpu=False)
    forward_s, backward_s = on.compute_s(FORWARD), on.compute_s(BACKWARD)
    return None if forward_s is None or backward_s is None else forward_s + backward_s


class _StepOnMachine:
    """The seconds of a step's lanes at the rates of a machine. What is not known is None."""

    def __init__(self, step: Step, rates: Rates, num_cores: int, device_is_cpu: bool) -> None:
        self.step, self.rates, self.num_cores, self.device_is_cpu = step, rates, num_cores, device_is_cpu

    def rate(self, lane: str) -> float | None:
        rates, layout = self.rates, self.step.layout
        if self.device_is_cpu and lane in (H2D, D2H):
            return rates.copy
        if lane == UPDATE or (lane == DEVICE_UPDATE and self.device_is_cpu):
            return rates.update.get(layout)
        if lane == DEVICE_UPDATE:
            return rates.device_update.get(layout)
        found: float | None = getattr(rates, lane.replace(" ", "_"))
        return found

    def compute_s(self, phase: str) -> float | None:
        trace, rate = self.step.trace, self.rates.flops.get(self.step.dtype)
        if trace is None or trace.uncounted or rate is None:
            return None
        seconds = trace.forward_flops / rate
        if phase == BACKWARD:
            again = trace.recomputed_flops
            of_gradients = self.rates.gradient_flops.get(self.step.dtype, rate)
            seconds = again / rate + (trace.backward_flops - again) / of_gradients
        return self.step.num_micro * seconds

    def _each(self, phase: str) -> dict[str, float | None]:
        """Return the seconds of each kind of work by itself."""
        traffic, rates = self.step.traffic, self.rates
        moved = dict(traffic.by_phase[phase])
        if not self.device_is_cpu and phase == BACKWARD and moved.get(LANDING):
            # At the speed of its memory, which an update also has.
            moved[LANDING] -= traffic.measured_on_device
        lanes = {lane: _over(size, self.rate(lane)) for lane, size in moved.items() if size}
        for lane, num_starts in traffic.starts.get(phase, {}).items():
            seconds = lanes.get(lane)
            if seconds is not None:
                lanes[lane] = seconds + num_starts * (rates.collective_s or 0.0)
        if phase != AFTER:
            lanes[COMPUTE] = self.compute_s(phase)
            lanes[PYTHON] = None if rates.unit_s is None else traffic.num_uses / 2 * rates.unit_s
        on_drive = moved.get(NVME_READ, 0) + moved.get(NVME_WRITE, 0)
        if self.device_is_cpu and on_drive:
            per_byte = rates.nvme_cpu_s_per_byte
            lanes[FILE_ENGINE] = None if per_byte is None else on_drive * per_byte
        return lanes

    def cores_s(self, phase: str) -> dict[str, float]:
        """Return the seconds of all cores by work, where the CPU is the device.

        A copy keeps one of them busy, and so do Python and the file engine.
        """
        if not self.device_is_cpu:
            return {}
        return {
            lane: seconds / (self.num_cores if lane in OF_ONE_CORE else 1)
            for lane, seconds in self._each(phase).items()
            if seconds is not None and lane not in _BESIDE_THE_CORES
        }

    def lanes(self, phase: str) -> dict[str, float | None]:
        """Return the seconds by lane; all that shares the cores is one, and computation on a clock another."""
        each = self._each(phase)
        if not self.device_is_cpu:
            return each
        shared, share = self.cores_s(phase), self.rates.core_shares.get(self.step.dtype)
        lanes: dict[str, float | None] = {CORES: sum(shared.values())}
        lanes |= {lane: s for lane, s in each.items() if lane in _BESIDE_THE_CORES or s is None}
        if share is not None and COMPUTE in shared:
            lanes[COMPUTE] = shared[COMPUTE] / share
        return lanes

    def with_both_directions(self, lanes: Lanes, *, at_best: bool = False) -> dict[str, float]:
        """Add the drive's lane for reads and writes together: [Note: one drive for both directions]."""
        read, write, mixed = self.rates.nvme_read, self.rates.nvme_write, self.rates.nvme_mixed
        read_s, write_s = lanes.get(NVME_READ, 0.0), lanes.get(NVME_WRITE, 0.0)
        if read is None or write is None or mixed is None or not (read_s and write_s):
            return dict(lanes)
        of_reads, of_writes = (max(read, mixed), max(write, mixed)) if at_best else (mixed, mixed)
        return {**lanes, NVME_MIXED: read_s * read / of_reads + write_s * write / of_writes}

    def in_turn(self, phases: Mapping[str, Lanes]) -> tuple[Lanes, ...]:
        """Return the phases that follow one another, in the order of `_turns`: [Note: the forecast]."""
        share, in_backward = 1.0 / self.step.num_micro, self.step.update_in_backward
        hides = phases[BACKWARD if in_backward else FORWARD]
        beside = _together([_scaled(hides, share), phases[AFTER]])
        others = _scaled(hides, 1.0 - share)
        return (phases[FORWARD], others, beside) if in_backward else (beside, others, phases[BACKWARD])

    def beside_each_other(self, lanes: Lanes, of_cores: Lanes, num_bytes: Lanes) -> dict[str, float]:
        """Return the lanes of a phase as the cores' work and the drive hold each other up: [Note: the forecast]."""
        found, holds = dict(lanes), self.rates.holds
        if CORES not in lanes:
            return found
        if COMPUTE in lanes:
            others_s = parts_alone(of_cores, self.num_cores)
            others_s.pop(COMPUTE, None)
            others_s |= {
                lane: num_bytes[lane] * hold for lane, hold in self._holds().items() if num_bytes.get(lane)
            }
            if DRIVE in holds:
                moved = num_bytes.get(NVME_READ, 0.0) + num_bytes.get(NVME_WRITE, 0.0)
                others_s[FILE_ENGINE] = moved * holds[DRIVE]
            found[COMPUTE] += sum(others_s.values())
        share = 1.0 if self.rates.nvme_beside is None else self.rates.nvme_beside
        for lane in {NVME_READ, NVME_WRITE, NVME_MIXED} & lanes.keys():
            found[lane] += (1.0 - share) * min(lanes[CORES], lanes[lane] / share)
        return found

    def _holds(self) -> dict[str, float]:
        """Return by lane the seconds that computation loses for each byte, where they were measured."""
        kinds = {H2D: COPY, D2H: COPY, UPDATE: self.step.layout, DEVICE_UPDATE: self.step.layout}
        return {lane: self.rates.holds[kind] for lane, kind in kinds.items() if kind in self.rates.holds}

    def simulated(self) -> SimulatedStep | None:
        step, rates = self.step, self.rates
        if step.work is None or not (step.work.forward and step.work.backward):
            return None
        # Memory is no lane there: it slows the others down.
        moved = [lane for lane, size in step.traffic.lanes.items() if size and lane != HOST_MEMORY]
        known = _known({lane: self.rate(lane) for lane in moved})
        forward_s, backward_s = self.compute_s(FORWARD), self.compute_s(BACKWARD)
        if forward_s is None or backward_s is None or rates.unit_s is None or len(known) < len(moved):
            return None
        core_share = rates.core_shares.get(step.dtype, 1.0) if self.device_is_cpu else 1.0
        lane_rates = LaneRates(
            bytes_per_s=known,
            forward_s=forward_s / step.num_micro / core_share,
            backward_s=backward_s / step.num_micro / core_share,
            launch_s=rates.unit_s,
            drive_bytes_per_s=rates.nvme_mixed,
            host_bytes_per_s=rates.host_memory,
            num_cores=self.num_cores if self.device_is_cpu else None,
            core_share=core_share,
            holds=self._holds(),
            drive_hold_s=rates.holds.get(DRIVE, rates.nvme_cpu_s_per_byte or 0.0),
            drive_beside=1.0 if rates.nvme_beside is None else rates.nvme_beside,
        )
        found = simulate_step(step.work, lane_rates)
        if step.num_micro <= MAX_MICRO:
            return found
        # A lane that waits for others in the few micro batches of the simulation may be what more of them wait for. Of
        # the drive's reads updates spare some.
        lanes = _together(_known(self.lanes(phase)) for phase in PHASES)
        least_s = max((s for lane, s in lanes.items() if lane != NVME_READ), default=0.0)
        return replace(found, seconds=max(found.seconds, least_s))


def _turns(step: Step) -> tuple[str, str, str]:
    """Name the phases in their order; of a single micro batch the second one is empty."""
    has_several = step.num_micro > 1
    if step.update_in_backward:
        last = "backward of the last micro batch" if has_several else "backward"
        return ("forward", "backward of the other micro batches", f"{last}, with its updates")
    first = "forward of the first micro batch" if has_several else "forward"
    return (f"{first}, with the updates of the step before", "forward of the other micro batches", "backward")


def _one_after_the_other(lanes: Lanes, of_cores: Lanes) -> float:
    """Add up the lanes, those that are the same work as others once: both directions of the drive, host memory.

    Of the drive it is the longer of both directions at once and one after the other. Of computation that is a part of
    the cores' work, `of_cores`, only the time is added in which it leaves them idle.
    """
    if CORES in lanes and COMPUTE in lanes:
        lanes = {**lanes, COMPUTE: lanes[COMPUTE] - of_cores.get(COMPUTE, 0.0)}
    through_s = sum(lanes.get(lane, 0.0) for lane in THROUGH_HOST_MEMORY)
    through_s += max(0.0, lanes.get(NVME_MIXED, 0.0) - lanes.get(NVME_READ, 0.0) - lanes.get(NVME_WRITE, 0.0))
    not_here = (*THROUGH_HOST_MEMORY, NVME_MIXED, HOST_MEMORY)
    elsewhere_s = sum(s for lane, s in lanes.items() if lane not in not_here)
    return elsewhere_s + max(through_s, lanes.get(HOST_MEMORY, 0.0))


def _known(lanes: Mapping[str, float | None]) -> dict[str, float]:
    return {lane: seconds for lane, seconds in lanes.items() if seconds is not None}


def _scaled(lanes: Lanes, factor: float) -> Lanes:
    return {lane: factor * seconds for lane, seconds in lanes.items()}


def _together(phases: Iterable[Lanes]) -> dict[str, float]:
    total: dict[str, float] = {}
    for lanes in phases:
        for lane, seconds in lanes.items():
            total[lane] = total.get(lane, 0.0) + seconds
    return total


def _over(num_bytes: float, rate: float | None) -> float | None:
    return None if rate is None else num_bytes / rate
