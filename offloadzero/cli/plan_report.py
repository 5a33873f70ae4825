"""The report of `offloadzero plan`: the answer as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from offloadzero.cli.output import text_table
from offloadzero.cli.plan_answer import Answer, Planner, Question
from offloadzero.cli.plan_model import ModelSource
from offloadzero.cli.units import size_text
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.observe.bound import CORES
from offloadzero.observe.texts import duration_text
from offloadzero.observe.timeline import COMPUTE
from offloadzero.planned_model import uses_of
from offloadzero.planning.fit import Change, Source, needed, with_keys
from offloadzero.planning.hardware import Hardware
from offloadzero.planning.memory_plan import format_bytes
from offloadzero.planning.shapes import MAX_LAYERS, ModelShape
from offloadzero.planning.simulated_step import SimulatedStep
from offloadzero.planning.time_model import (
    FASTER,
    Forecast,
    Run,
    Step,
    forecast,
    forecast_run,
    plan_step,
    simulated,
)
from offloadzero.planning.zero_formulas import STAGES, efficiency, state_bytes
from offloadzero.segments import TierName

LANE_HEADER = ("lane", "bytes per step", "alone", "FLOP/byte", "efficiency")


@dataclass(frozen=True)
class StageBytes:
    """The bytes of one rank if ZeRO's stage were this one, beside the formula of ZeRO's paper.

    `tiers` is None where the engine refuses the stage: `refusal`. `states` are those of parameters, gradients and
    optimizer states, buffers left out.
    """

    stage: int
    formula: int
    tiers: Mapping[TierName, int] | None
    states: int = 0
    refusal: str = ""


@dataclass(frozen=True)
class Intensity:
    """The operations of a step for each byte on a lane, and the share of computing if the lane did not overlap."""

    flops_per_byte: float
    efficiency: float


@dataclass(frozen=True)
class Report:
    """An answer with its forecast. `answer` is None where the configuration's budgets leave no plan: `refusal`."""

    model: str
    refusal: str
    answer: Answer | None
    change: Change | None  # None: it fits
    step: Step | None
    forecast: Forecast | None  # None: not asked for
    run: Run | None
    hardware: Hardware
    num_tokens: int | None
    num_ranks: int = 1
    stages: tuple[StageBytes, ...] = ()  # of several ranks
    simulated: SimulatedStep | None = None  # None: not asked for, or something is not known

    @property
    def fits(self) -> bool:
        """Whether the run can start without a change."""
        return self.change is None

    # --- for people ---

    def lines(self) -> list[str]:
        """Return paragraphs of text."""
        return [*self.plan_lines(), *self.answer_lines()]

    def plan_lines(self) -> list[str]:
        """Return those about the plan, which is known before a change is searched for."""
        lines = list(self._memory_lines()) if self.answer is not None else [self.refusal]
        if self.stages:
            lines += ["", *self._stage_lines()]
        return lines

    def answer_lines(self) -> list[str]:
        """Return the others."""
        lines = ["", *self.verdict_lines()]
        if self.forecast is not None:
            times = [self.time_line(), *self.simulation_lines()]
            lines += ["", *times, *self._lane_lines(self.forecast), *self.advice_lines()]
        elif self.num_ranks > 1:
            lines += ["", self.time_line()]
        return lines

    def head_line(self) -> str:
        """Return the model in one line."""
        if self.answer is None:
            return self.model
        planned = self.answer.planned
        return (
            f"{self.model} ({planned.class_name}): {count_text(planned.num_parameters)} parameters in "
            f"{len(planned.records)} units, {planned.spec.name}, {planned.config.state_layout} layout of the states"
        )

    def _memory_lines(self) -> Iterator[str]:
        answer = self.answer
        if answer is None:
            return
        planned, beside = answer.planned, answer.beside
        yield self.head_line()
        yield ""
        yield planned.plan.table()
        yield ""
        yield "Beside the plan:"
        yield f"    activations                 {self._activations_text():>12}"
        if planned.buffer_bytes:
            yield f"    buffers of the model        {format_bytes(planned.buffer_bytes):>12}"
        yield f"    Python and torch            {format_bytes(self.hardware.process_bytes):>12}"
        yield ""
        has = {
            TierName.DEVICE: answer.memory.device,
            TierName.HOST: answer.memory.host,
            TierName.NVME: answer.memory.nvme,
        }
        rows = [
            [tier.value, format_bytes(num_bytes), format_bytes(has[tier] or 0)]
            for tier, num_bytes in needed(planned.plan, beside, answer.memory).items()
            if num_bytes
        ]
        yield from text_table(["in all", "needed", "available"], rows)
        yield from self.memory_notes()

    def memory_notes(self) -> Iterator[str]:
        """Yield sentences about the bytes."""
        answer = self.answer
        if answer is None:
            return
        if answer.memory.device is None:
            yield "The CPU is the device: what is needed there is a part of the host's."
        if answer.waiting_bytes:
            yield (
                "Built under zero.Init its parameters wait on the drives before that: "
                f"{format_bytes(answer.waiting_bytes)} of nvme at the most, "
                f"{format_bytes(answer.memory.nvme or 0)} are available."
            )
        yield from answer.planned.plan.choice
        config, trace = answer.planned.config, answer.trace
        is_by_bytes = config.placement.auto and config.placement_tokens is None
        if is_by_bytes and trace is not None and self.num_ranks == 1:
            yield (
                f"auto goes by bytes: offloadzero.placement_tokens = {trace.num_tokens} lets it go by the time of a "
                "step."
            )

    def _stage_lines(self) -> Iterator[str]:
        yield f"One of {self.num_ranks:,} ranks, by stage of ZeRO:"
        yield from text_table(*self.stage_table())
        yield from self.stage_notes()

    def stage_table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the bytes of one rank by stage."""
        rows = []
        for found in self.stages:
            tiers = ["refused"] * len(TierName)
            if found.tiers is not None:
                tiers = [format_bytes(found.tiers[tier]) for tier in TierName]
            states = "" if found.tiers is None else format_bytes(found.states)
            rows.append([str(found.stage), *tiers, states, format_bytes(found.formula)])
        return ["stage", *(tier.value for tier in TierName), "of it states", "ZeRO's formula"], rows

    def stage_notes(self) -> Iterator[str]:
        """Yield a sentence for each stage that the engine refuses."""
        for found in self.stages:
            if found.refusal:
                yield f"Stage {found.stage} is refused: {found.refusal}"

    def _activations_text(self) -> str:
        answer = self.answer
        if answer is None or answer.trace is None:
            return "not counted"
        return format_bytes(answer.trace.peak_bytes)

    def verdict_lines(self) -> Iterator[str]:
        """Yield sentences on whether it fits, and on what would."""
        answer = self.answer
        if answer is not None and answer.trace is None:
            yield f"Activations are not counted: {answer.untraced}."
        if self.change is None:
            yield "It fits."
            return
        if answer is not None:
            short = ", ".join(
                f"{tier.value} {format_bytes(size)}" for tier, size in answer.verdict.short.items()
            )
            yield f"It does not fit: {short} short."
        yield f"The smallest change with which it fits: {self.change.text()}"

    def time_line(self) -> str:
        """Return the forecast in a sentence, or the reason why there is none; empty where none is asked for."""
        found = self.forecast
        if found is None:
            return "The step's time is not forecast over several ranks." if self.num_ranks > 1 else ""
        if found.seconds is None or found.bound_s is None or found.alone_s is None:
            what = ", ".join(found.unknown) or "anything that moves"
            why = f" ({self.answer.unknown})" if self.answer is not None and self.answer.unknown else ""
            return f"The step's time is not forecast: no rate or no count of {what}{why}."
        return (
            f"A step takes {time_text(found.seconds)} (forecast; {time_text(found.bound_s)} if all of it "
            f"overlapped, {time_text(found.alone_s)} if nothing did): {rate_text(found.tokens_per_s or 0.0)} tokens/s"
        )

    def simulation_lines(self) -> Iterator[str]:
        """Yield a sentence about the simulated step, if there is one."""
        found = self.simulated
        if found is None:
            return
        chain = sorted(found.critical_s.items(), key=lambda part: -part[1])
        parts = ", ".join(f"{lane} {time_text(s)}" for lane, s in chain if s >= 0.005 * found.seconds)
        yield f"Simulated unit by unit, with its leases and buffers, it takes {time_text(found.seconds)}: {parts}."

    def advice_lines(self) -> Iterator[str]:
        """Yield sentences about what would make the step faster, and about the run."""
        found = self.forecast
        if found is None:
            return
        if found.lane is not None:
            yield f"What would make it faster: {FASTER[found.lane]}."
        if self.run is not None and self.run.days is not None:
            years = (
                ""
                if self.run.drive_years is None
                else f"; the drives last {self.run.drive_years:,.1f} years of it"
            )
            yield (
                f"{self.num_tokens:,} tokens: {self.run.num_steps:,} steps, {self.run.days:,.1f} days, "
                f"{size_text(self.run.written_bytes)} written to the drives{years}"
            )

    def _lane_lines(self, found: Forecast) -> Iterator[str]:
        yield from text_table(LANE_HEADER, self.lane_rows(found))

    def lane_rows(self, found: Forecast) -> list[list[str]]:
        """Return the lanes of the forecast in the columns of LANE_HEADER, the longest first."""
        moved = self.step.traffic.lanes if self.step is not None else {}
        lanes = sorted(
            {*found.lanes_s, *moved} - found.parts_s.keys(), key=lambda name: -found.lanes_s.get(name, 0.0)
        )
        rows = []
        of_bytes = intensities(self.step, found) if self.step is not None else {}
        for name in lanes:
            rows.append([*_lane_row(name, moved, found.lanes_s), *_intensity_texts(of_bytes.get(name))])
            if name == CORES:  # the work that shares them
                for part in sorted(found.parts_s, key=lambda part: -found.parts_s[part]):
                    row = _lane_row(part, moved, found.parts_s, indent="  ")
                    rows.append([*row, *_intensity_texts(of_bytes.get(part))])
        return rows

    # --- for programs ---

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as JSON."""
        answer = self.answer
        return {
            "model": self.model,
            "fits": self.fits,
            "refusal": self.refusal or None,
            "change": self.change
            and {
                "keys": dict(self.change.keys),
                "more_bytes": {t.value: b for t, b in self.change.more.items()},
            },
            **({} if answer is None else _answer_json(answer)),
            "forecast": self.forecast
            and {**asdict(self.forecast), "tokens_per_s": self.forecast.tokens_per_s},
            "simulated": self.simulated and asdict(self.simulated),
            "intensity": {
                name: asdict(found) for name, found in intensities(self.step, self.forecast).items()
            }
            if self.step is not None and self.forecast is not None
            else None,
            "ranks": self.num_ranks,
            "stages": [_stage_json(found) for found in self.stages],
            "traffic": self.step
            and {phase: dict(lanes) for phase, lanes in self.step.traffic.by_phase.items()},
            "run": self.run and asdict(self.run),
            "hardware": self.hardware.to_json(),
        }


def count_text(count: int) -> str:
    """Return a number of parameters."""
    return f"{count / 1e9:,.3f} billion" if count >= 1e8 else f"{count:,}"


def time_text(seconds: float) -> str:
    """Return the time of a step, long ones in whole seconds."""
    return duration_text(seconds) if seconds < 1000 else f"{seconds:,.0f} s"


def rate_text(rate: float) -> str:
    """Return a rate with three digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _lane_row(
    name: str, moved: Mapping[str, int], seconds: Mapping[str, float], *, indent: str = ""
) -> list[str]:
    known = time_text(seconds[name]) if name in seconds else ""
    return [indent + name, size_text(moved[name]) if name in moved else "", known]


def _intensity_texts(found: Intensity | None) -> list[str]:
    return ["", ""] if found is None else [f"{found.flops_per_byte:,.0f}", f"{100 * found.efficiency:.1f} %"]


def _stage_json(found: StageBytes) -> dict[str, Any]:
    tiers = found.tiers
    return {**asdict(found), "tiers": tiers and {tier.value: size for tier, size in tiers.items()}}


def intensities(step: Step, found: Forecast) -> dict[str, Intensity]:
    """Give them by lane, where bytes, operations and both rates are known: [Note: two papers]."""
    seconds = {**found.lanes_s, **found.parts_s}
    compute_s = seconds.get(COMPUTE)
    if step.trace is None or step.trace.uncounted or not compute_s:
        return {}
    flops = step.num_micro * step.trace.flops
    known: dict[str, Intensity] = {}
    for name, num_bytes in step.traffic.lanes.items():
        if num_bytes and seconds.get(name):
            per_byte = flops / num_bytes
            share = efficiency(per_byte, bytes_per_s=num_bytes / seconds[name], flops_per_s=flops / compute_s)
            known[name] = Intensity(per_byte, share)
    return known


def _answer_json(answer: Answer) -> dict[str, Any]:
    planned = answer.planned
    tiers = needed(planned.plan, answer.beside, answer.memory)
    return {
        "model_class": planned.class_name,
        "num_parameters": planned.num_parameters,
        "num_trainable": planned.num_trainable,
        "units": [
            {"name": r.name, "num_parameters": r.num_params, "bytes": r.param_bytes} for r in planned.records
        ],
        "plan": [
            {"tier": line.tier.value, "what": line.what, "bytes": line.num_bytes}
            for line in planned.plan.lines
        ],
        "beside": asdict(answer.beside),
        "nvme_with_zero_init": answer.waiting_bytes or None,
        "needed": {tier.value: num_bytes for tier, num_bytes in tiers.items()},
        "short": {tier.value: num_bytes for tier, num_bytes in answer.verdict.short.items()},
        "micro_batch": answer.micro_batch,
        "micro_batch_trace": answer.trace and asdict(answer.trace),
        "not_traced": answer.untraced or None,
    }


def make_report(
    question: Question,
    source: Source,
    hardware: Hardware,
    *,
    with_time: bool,
    num_tokens: int | None = None,
    endurance_bytes: int | None = None,
    show: Callable[[list[str]], None] | None = None,
) -> Report:
    """Answer a question for a JSON. Raises ConfigError.

    `show` gets `plan_lines()` before the search for a change, which takes longer than all before it.
    """
    planner = Planner(question)
    refusal, answer = "", None
    try:
        answer = planner.answer(source, by_time=True)
    except BudgetError as error:
        refusal = str(error)
    report = Report(
        model=str(question.model.shape or question.model.text),
        refusal=refusal,
        answer=answer,
        change=None,
        step=None,
        forecast=None,
        run=None,
        hardware=hardware,
        num_tokens=num_tokens,
        num_ranks=question.num_ranks,
        stages=by_stage(planner, source) if question.num_ranks > 1 else (),
    )
    if show is not None:
        show(report.plan_lines())
    if answer is None or not answer.verdict.fits:
        report = replace(report, change=planner.smallest_change(source))
    if answer is None or not with_time:
        return report
    step = step_of(answer)
    found = forecast(step, hardware.rates, num_cores=hardware.num_cores, device_is_cpu=hardware.device_is_cpu)
    simulation = simulated(
        step, hardware.rates, num_cores=hardware.num_cores, device_is_cpu=hardware.device_is_cpu
    )
    run = None
    if num_tokens is not None:
        run = forecast_run(found, step, num_tokens=num_tokens, endurance_bytes=endurance_bytes)
    return replace(report, step=step, forecast=found, run=run, simulated=simulation)


def by_stage(planner: Planner, source: Source) -> tuple[StageBytes, ...]:
    """Plan a JSON for each stage of ZeRO."""
    return tuple(_of_stage(planner, source, stage) for stage in STAGES)


def _of_stage(planner: Planner, source: Source, stage: int) -> StageBytes:
    model, num_ranks = planner.model(), planner.question.num_ranks
    num_trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    num_frozen = sum(param.numel() for param in model.parameters()) - num_trainable
    formula = round(state_bytes(num_trainable, stage=stage, num_ranks=num_ranks, num_frozen=num_frozen))
    try:
        planned, _ = planner.plan(with_keys(source, {"zero_optimization.stage": stage}))
    except (ConfigError, BudgetError) as error:
        return StageBytes(stage, formula, None, refusal=str(error).partition("\n")[0])
    plan = planned.plan
    return StageBytes(stage, formula, {tier: plan.tier_bytes(tier) for tier in TierName}, plan.home_bytes)


def step_of(answer: Answer) -> Step:
    """Return the bytes and operations of a step of a planned model."""
    planned = answer.planned
    return plan_step(
        planned.records,
        planned.plan,
        planned.config,
        uses=uses_of(planned.cut),
        trace=answer.trace,
    )


# --- the largest ---


def largest(question: Question, source: Source) -> ModelSource:
    """Find the model of the question's shape with the most blocks that fit. Raises ConfigError if one does not."""
    shape = question.model.shape
    if shape is None:
        raise ConfigError(
            "--largest", question.model.text, "a shape (llama:13b, hidden/layers/heads/vocabulary)"
        )
    if not _fits(question, source, shape, 1):
        raise ConfigError("--largest", str(shape), "not even one block of this width fits: a smaller width")
    low, high = 1, 2
    while high < MAX_LAYERS and _fits(question, source, shape, high):
        low, high = high, 2 * high
    high = min(high, MAX_LAYERS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(question, source, shape, middle):
            low = middle
        else:
            high = middle
    return of_shape(replace(shape, num_layers=low))


def of_shape(shape: ModelShape) -> ModelSource:
    """Return the source of a shape."""
    return ModelSource(str(shape), shape.build, shape)


def _fits(question: Question, source: Source, shape: ModelShape, num_layers: int) -> bool:
    model = of_shape(replace(shape, num_layers=num_layers))
    return Planner(replace(question, model=model)).verdict(source).fits
