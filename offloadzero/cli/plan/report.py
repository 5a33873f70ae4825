"""The report of `offloadzero plan`: the answer as text, as JSON and as a page, [Note: the page] in cli/output.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from offloadzero.cli.output import text_table
from offloadzero.cli.plan.answer import Answer, Planner, Question, building_notes, step_of, without_clipping
from offloadzero.core.segments import TierName
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.observe.bound import CORES
from offloadzero.observe.forecast import FILE_ENGINE, PYTHON
from offloadzero.observe.texts import (
    count_text,
    format_bytes,
    rate_text,
    size_text,
    time_text,
    years_text,
)
from offloadzero.observe.timeline import COLLECTIVES, LANES
from offloadzero.planning.cluster import Cluster
from offloadzero.planning.engine_plan import Change, Source, with_keys
from offloadzero.planning.hardware import Hardware, share_of
from offloadzero.planning.placement_rules import idle_rules
from offloadzero.planning.step.advice import (
    Run,
    faster,
    faster_in_fp32,
    forecast_run,
    intensities,
    other_settings,
)
from offloadzero.planning.step.forecast import OVERLAP, Forecast, Phase, Step
from offloadzero.planning.step.work import HOST_MEMORY, LINKS, NETWORK, NVME_MIXED
from offloadzero.planning.zero_formulas import STAGES, state_bytes

WORTH = 0.9  # of the seconds of a step: a change that saves less is not named
# Of the keys of a change that makes a step faster.
WHAT_IT_IS = {
    "offloadzero.budgets.device": "auto leaves that memory to others, and to what the plan does not count",
    "offloadzero.placement_tokens": "auto goes by the time of a step in the place of bytes",
    "offloadzero.state_layout": "states of half the bytes, with which the numbers are others",
    "zero_optimization.stage": "each rank keeps a part of the states, and not all of them",
}
LANE_HEADER = ("lane", "bytes per step", "alone", "FLOP/byte", "efficiency")


@dataclass(frozen=True)
class StageBytes:
    """The bytes of one rank if ZeRO's stage were this one, beside the formula of ZeRO's paper.

    `tiers` is None where the engine refuses the stage: `refusal`. `states` are those of parameters, gradients and
    optimizer states, buffers left out. `forecast` is None where none is asked for, or where it `does_not_fit`.
    """

    stage: int
    formula: int
    tiers: Mapping[TierName, int] | None
    states: int = 0
    refusal: str = ""
    does_not_fit: bool = False
    forecast: Forecast | None = None


@dataclass(frozen=True)
class Report:
    """An answer with its forecast. `answer` is None where the configuration's budgets leave no plan: `refusal`."""

    model: str
    refusal: str
    answer: Answer | None
    hardware: Hardware
    num_tokens: int | None
    num_ranks: int
    num_local_ranks: int
    stages: tuple[StageBytes, ...]  # of several ranks
    cluster: Cluster | None  # whose ranks they are
    change: Change | None = None  # None: it fits
    step: Step | None = None
    forecast: Forecast | None = None  # None: not asked for
    run: Run | None = None
    # Of the configuration, with which a step is faster, the fastest first.
    changes: tuple[tuple[Change, Forecast], ...] = ()

    @property
    def fits(self) -> bool:
        return self.change is None

    # --- for people ---

    def plan_lines(self) -> list[str]:
        """Return those about the plan, which is known before a change is searched for."""
        lines = list(self._memory_lines()) if self.answer is not None else [self.refusal]
        if self.stages:
            lines += ["", *self._stage_lines()]
        return lines

    def answer_lines(self) -> list[str]:
        lines = ["", *self.verdict_lines()]
        if self.forecast is not None:
            lanes = text_table(LANE_HEADER, self.lane_rows(self.forecast))
            lines += ["", self.time_line(), *self.simulation_lines(), *lanes, *self.advice_lines()]
        return lines

    def head_line(self) -> str:
        if self.answer is None:
            return self.model
        planned = self.answer.planned
        units = "1 unit" if len(planned.records) == 1 else f"{len(planned.records)} units"
        return (
            f"{self.model} ({planned.class_name}): {count_text(planned.num_parameters)} parameters in "
            f"{units}, {planned.spec.name}, {planned.config.state_layout} layout of the states"
        )

    def rank_line(self) -> str:
        """Return whose bytes and lanes these are, of several ranks."""
        text = f"One of {self.num_ranks:,} ranks"
        if self.cluster is not None:
            num_machines = self.num_ranks // self.num_local_ranks
            text += f", {self.num_local_ranks} on each of {num_machines:,} machines: {self.hardware.device}"
        return text

    def _memory_lines(self) -> Iterator[str]:
        answer = self.answer
        if answer is None:
            return
        planned, beside = answer.planned, answer.beside
        yield self.head_line()
        if self.num_ranks > 1:
            yield f"{self.rank_line()}; zero_optimization.stage is {planned.config.zero_stage}"
        yield from ("", planned.plan.table(), "", "Beside the plan:")
        of_trace = "not counted" if answer.trace is None else format_bytes(answer.trace.peak_bytes)
        yield f"    {'activations':<28}{of_trace:>12}"
        for what, num_bytes in (
            ("holes in the heap", beside.holes),
            ("files in memory", beside.files),
            ("building under zero.Init", beside.waiting),
            ("buffers of the model", planned.buffer_bytes),
            ("Python and torch", self.hardware.process_bytes),
        ):
            if num_bytes or what == "Python and torch":
                yield f"    {what:<28}{format_bytes(num_bytes):>12}"
        yield ""
        rows = [
            [tier.value, format_bytes(num_bytes), format_bytes(getattr(answer.memory, tier.value) or 0)]
            for tier, num_bytes in answer.needed.items()
            if num_bytes
        ]
        yield from text_table(["in all", "needed", "available"], rows)
        yield from self.memory_notes()

    def memory_notes(self) -> Iterator[str]:
        answer = self.answer
        if answer is None:
            return
        if answer.memory.device is None:
            yield "The CPU is the device: what is needed there is a part of the host's."
        wanted = answer.planned.config.device
        if wanted is not None and (wanted == "cpu") != (answer.memory.device is None):
            yield (
                f"The configuration has offloadzero.device = {wanted}; this is the plan for the device of --hardware, "
                f"{self.hardware.device or 'the CPU'}."
            )
        yield from building_notes(answer)
        yield from answer.planned.plan.choice
        yield from idle_rules(answer.planned.records, answer.planned.config)

    def _stage_lines(self) -> Iterator[str]:
        yield f"One of {self.num_ranks:,} ranks, by stage of ZeRO:"
        yield from text_table(*self.stage_table())
        yield from self.stage_notes()

    def stage_table(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows of the bytes of one rank by stage, and of the step's time where it is forecast."""
        rows = []
        has_times = any(found.forecast is not None for found in self.stages)
        for found in self.stages:
            tiers = ["refused"] * len(TierName)
            if found.tiers is not None:
                tiers = [format_bytes(found.tiers[tier]) for tier in TierName]
            states = "" if found.tiers is None else format_bytes(found.states)
            times = _stage_times(found) if has_times else []
            rows.append([str(found.stage), *tiers, states, format_bytes(found.formula), *times])
        header = ["stage", *(tier.value for tier in TierName), "of it states", "ZeRO's formula"]
        return [*header, *(("step", "longest lane") if has_times else ())], rows

    def stage_notes(self) -> Iterator[str]:
        for found in self.stages:
            if found.refusal:
                yield f"Stage {found.stage} is refused: {found.refusal}"

    def verdict_lines(self) -> Iterator[str]:
        """Yield sentences on whether it fits, and on what would."""
        answer = self.answer
        if answer is not None and answer.trace is None:
            yield f"Activations are not counted: {answer.untraced.rstrip('.')}."
        if self.change is None:
            yield "It fits."
            return
        if answer is not None:
            short = ", ".join(f"{t.value} {format_bytes(size)}" for t, size in answer.verdict.short.items())
            yield f"It does not fit: {short} short."
            yield from without_clipping(answer)
        yield f"The smallest change with which it fits: {self.change.text()}"

    def time_line(self) -> str:
        """Return the forecast in a sentence, or the reason why there is none; empty where none is asked for."""
        found = self.forecast
        if found is None:
            return ""
        if found.seconds is None or found.bound_s is None or found.alone_s is None:
            named = self.hardware.unknown_rate if self.cluster is None else str
            what = ", ".join(map(named, found.unknown)) or "anything that moves"
            why = f" ({self.answer.unknown})" if self.answer is not None and self.answer.unknown else ""
            if COLLECTIVES in found.unknown:
                why += "; --hardware takes the description of a cluster, which has the rates between ranks"
            return f"The step's time is not forecast: no rate or no count of {what}{why}."
        text = (
            f"A step takes {time_text(found.seconds)} (forecast; {time_text(found.bound_s)} if all of it "
            f"overlapped, {time_text(found.alone_s)} if nothing did): {rate_text(found.tokens_per_s or 0.0)} tokens/s"
        )
        if self.num_ranks == 1:
            return text
        each = "" if self.tflops is None else f", {rate_text(self.tflops)} TFLOPS on each device"
        return f"{text} of {self.num_ranks:,} ranks{each}"

    @property
    def tflops(self) -> float | None:
        """The operations per second, in units of 10^12, of a device over a whole step; recomputations count."""
        found, step = self.forecast, self.step
        if found is None or found.seconds is None or step is None or step.trace is None:
            return None
        return step.num_micro * step.trace.flops / found.seconds / 1e12

    def left_out(self) -> list[str]:
        found = [] if self.cluster is None else [*self.cluster.left_out()]
        if self.answer is not None and self.step is not None:
            moved, config = self.step.traffic.lanes, self.answer.planned.config
            found += other_settings(config, moved, device_is_cpu=self.hardware.device_is_cpu)
            found += self.hardware.unknown_of_drive(moved)
        return found

    def simulation_lines(self) -> Iterator[str]:
        found = self.forecast.simulated if self.forecast is not None else None
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
        if found.waits_for is not None and self.step is not None:
            what, remedies = faster(found.waits_for, self.step)
            if found.waits_for != found.lane:
                what = f"the step waits longest for {found.waits_for}"
            yield f"What would make it faster: {what}: {remedies}."
            if found.waits_for_next is not None:
                lane, share = found.waits_for_next
                yield f"{share:.0%} of the simulated step waits for {lane}: {faster(lane, self.step)[1]}."
            for change, then in self.changes:
                why = "; ".join(WHAT_IT_IS[key] for key in change.keys)
                yield f"{change.text()} makes it {time_text(then.seconds or 0.0)}: {why}."
            if self.hardware.device_is_cpu:
                yield from faster_in_fp32(self.step, self.hardware.rates)
            if self.left_out():
                yield f"Not in it: {'; '.join(self.left_out())}."
        if self.run is not None:
            days = "" if self.run.days is None else f" {self.run.days:,.1f} days,"
            years = ""
            if self.run.drive_years is not None and self.run.days is not None:
                share = self.run.days / (365.25 * self.run.drive_years)
                years = (
                    f", {share:.2g} times what they are made for: they are worn out after "
                    f"{years_text(self.run.drive_years)} of such training"
                )
            yield (
                f"{self.num_tokens:,} tokens: {self.run.num_steps:,} steps,{days} "
                f"{size_text(self.run.written_bytes)} written to the drives{years}"
            )

    def lane_rows(self, found: Forecast) -> list[list[str]]:
        """Return the lanes of the forecast in the columns of LANE_HEADER, the longest first."""
        moved = self.step.traffic.lanes if self.step is not None else {}
        of_bytes = intensities(self.step, found) if self.step is not None else {}

        def row(name: str, seconds: Mapping[str, float], indent: str = "") -> list[str]:
            size = size_text(moved[name]) if name in moved else ""
            known, ratio = time_text(seconds[name]) if name in seconds else "", of_bytes.get(name)
            cells = (
                ["", ""]
                if ratio is None
                else [f"{ratio['flops_per_byte']:,.0f}", f"{100 * ratio['efficiency']:.1f} %"]
            )
            return [indent + name, size, known, *cells]

        rows = []
        unparted = dict.fromkeys(moved.keys() - found.parts_s.keys(), 0.0)
        for name in _longest_first({**unparted, **found.lanes_s}):
            rows.append(row(name, found.lanes_s))
            if name == CORES:  # the work that shares them
                rows += [row(part, found.parts_s, "  ") for part in _longest_first(found.parts_s)]
        return rows

    # --- for programs ---

    def to_json(self) -> dict[str, Any]:
        answer = self.answer
        found = asdict(self.forecast) if self.forecast is not None else {}
        simulation = found.pop("simulated", None)
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
            "forecast": self.forecast and {**found, "tokens_per_s": self.forecast.tokens_per_s},
            "simulated": simulation,
            "intensity": self.step and self.forecast and intensities(self.step, self.forecast),
            "ranks": self.num_ranks,
            "local_ranks": self.num_local_ranks,
            "tflops_of_device": self.tflops,
            "left_out": self.left_out(),
            "cluster": self.cluster and dict(self.cluster.described),
            "stages": [_stage_json(found) for found in self.stages],
            "traffic": self.step
            and {phase: dict(lanes) for phase, lanes in self.step.traffic.by_phase.items()},
            "run": self.run and asdict(self.run),
            "faster": [{"keys": dict(change.keys), "seconds": then.seconds} for change, then in self.changes],
            "hardware": self.hardware.to_json(),
        }


def _longest_first(seconds: Mapping[str, float]) -> list[str]:
    return sorted(seconds, key=lambda name: (-seconds[name], name))


def _stage_times(found: StageBytes) -> list[str]:
    if found.tiers is None:
        return ["", ""]
    if found.forecast is None or found.forecast.seconds is None:
        return ["does not fit" if found.does_not_fit else "", ""]
    return [time_text(found.forecast.seconds), found.forecast.lane or ""]


def _stage_json(found: StageBytes) -> dict[str, Any]:
    tiers = found.tiers
    return {**asdict(found), "tiers": tiers and {tier.value: size for tier, size in tiers.items()}}


def _answer_json(answer: Answer) -> dict[str, Any]:
    planned = answer.planned
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
        "host_without_zero_init": answer.whole_bytes,
        "needed": {tier.value: num_bytes for tier, num_bytes in answer.needed.items()},
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
    cluster: Cluster | None = None,
    num_tokens: int | None = None,
    endurance_bytes: int | None = None,
    show: Callable[[list[str]], None] | None = None,
) -> Report:
    """Answer a question for a JSON. Raises ConfigError.

    `show` gets `plan_lines()` before the search for a change, which takes longer than all before it. `hardware` is what
    a rank has, of `cluster` where that is given.
    """
    planner = Planner(question)
    of_rank = hardware if cluster is not None else share_of(hardware, question.num_local_ranks)
    refusal, answer = "", None
    try:
        answer = planner.answer(source, by_time=True)
    except BudgetError as error:
        refusal = str(error)
    stages: tuple[StageBytes, ...] = ()
    if question.num_ranks > 1:
        forecast_of = of_rank.forecast if with_time and cluster is not None else None
        stages = tuple(by_stage(planner, source, forecast_of, cluster))
    report = Report(
        model=question.model.name,
        refusal=refusal,
        answer=answer,
        hardware=hardware,
        num_tokens=num_tokens,
        num_ranks=question.num_ranks,
        num_local_ranks=question.num_local_ranks,
        stages=stages,
        cluster=cluster,
    )
    if show is not None:
        show(report.plan_lines())
    if answer is None or not answer.verdict.fits:
        report = replace(report, change=planner.smallest_change(source))
    if answer is None or not with_time:
        return report
    step = step_of(answer, num_local_ranks=question.num_local_ranks, cluster=cluster)
    found = of_rank.forecast(step)
    run = None
    if num_tokens is not None:
        run = forecast_run(found, step, num_tokens=num_tokens, endurance_bytes=endurance_bytes)
    changes = []
    for change, other in planner.other_answers(source, answer) if found.seconds else ():
        then = of_rank.forecast(step_of(other, num_local_ranks=question.num_local_ranks, cluster=cluster))
        if (then.seconds or math.inf) < WORTH * (found.seconds or 0.0):
            changes.append((change, then))
    changes.sort(key=lambda changed: changed[1].seconds or math.inf)
    return replace(report, step=step, forecast=found, run=run, changes=tuple(changes))


def by_stage(
    planner: Planner,
    source: Source,
    forecast_of: Callable[[Step], Forecast] | None = None,
    cluster: Cluster | None = None,
) -> Iterator[StageBytes]:
    """Plan a JSON for each stage of ZeRO, and forecast its step where that is given."""
    model, num_ranks = planner.model(), planner.question.num_ranks
    num_trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    num_frozen = sum(param.numel() for param in model.parameters()) - num_trainable
    for stage in STAGES:
        formula = round(state_bytes(num_trainable, stage=stage, num_ranks=num_ranks, num_frozen=num_frozen))
        of_stage = with_keys(source, {"zero_optimization.stage": stage})
        answer: Answer | None = None
        try:
            if forecast_of is None:
                planned, _ = planner.plan(of_stage)
            else:
                answer = planner.answer(of_stage)
                planned = answer.planned
        except (ConfigError, BudgetError) as error:
            yield StageBytes(stage, formula, None, refusal=str(error).partition("\n")[0])
            continue
        plan = planned.plan
        tiers = {tier: plan.tier_bytes(tier) for tier in TierName}
        found = StageBytes(stage, formula, tiers, plan.home_bytes)
        if forecast_of is not None and answer is not None:
            found = replace(found, does_not_fit=not answer.verdict.fits)
            if answer.verdict.fits:
                step = step_of(answer, num_local_ranks=planner.question.num_local_ranks, cluster=cluster)
                found = replace(found, forecast=forecast_of(step))
        yield found


PAGE = "plan/page.html"
# In the order of the chart.
_LANES = (CORES, *LANES, NVME_MIXED, LINKS, NETWORK, HOST_MEMORY, PYTHON, FILE_ENGINE)


def plan_data(report: Report) -> dict[str, Any]:
    answer, found = report.answer, report.forecast
    header, rows = report.stage_table()
    stages = {"header": header, "rows": rows, "notes": list(report.stage_notes())}
    used = set[str]()
    if found is not None:
        used = {lane for phase in found.phases for lane, seconds in phase.lanes_s.items() if seconds}
    return {
        "title": report.head_line(),
        "summary": report.time_line(),
        "verdict": [*([report.refusal] if report.refusal else []), *report.verdict_lines()],
        "fits": report.fits,
        "notes": [*report.memory_notes(), *report.simulation_lines(), *report.advice_lines()],
        "facts": list(_facts(report)),
        "tiers": [] if answer is None else tier_rows(answer, report.hardware.process_bytes),
        "lanes": [lane for lane in _LANES if lane in used] + sorted(used.difference(_LANES)),
        "phases": [] if found is None else [_phase(phase) for phase in found.phases],
        "table": found and {"header": list(LANE_HEADER), "rows": report.lane_rows(found)},
        "stages": stages if report.stages else None,
        "stretch": _stretch(found),
    }


def _stretch(found: Forecast | None) -> str:
    """Say by what a phase is longer than its longest lane."""
    text = f"over an overlap of {OVERLAP:.0%}"
    more = 1.0 if found is None else found.over_phases
    return text if more < 1.005 else f"{text}, times {more:.2f}: simulated unit by unit, the step is longer"


def _facts(report: Report) -> Iterator[list[str]]:
    """Yield label and value of the tiles on top."""
    found, answer = report.forecast, report.answer
    if found is not None and found.seconds is not None:
        yield ["step (forecast)", time_text(found.seconds)]
        if found.tokens_per_s is not None:
            yield ["tokens/s", rate_text(found.tokens_per_s)]
        if found.lane is not None:
            yield ["longest lane", found.lane]
    if report.num_ranks > 1:
        yield ["ranks", f"{report.num_ranks:,}, {report.num_local_ranks} on a machine"]
    if answer is not None:
        config, trace = answer.planned.config, answer.trace
        tokens = "" if trace is None else f" x {trace.num_tokens // answer.micro_batch:,} tokens"
        yield ["micro batch", f"{answer.micro_batch}{tokens}"]
        yield ["micro batches per step", str(config.batch.gradient_accumulation_steps)]
        yield ["parameters", count_text(answer.planned.num_parameters)]
        yield ["units", str(len(answer.planned.records))]
        yield ["state layout", config.state_layout]
    yield ["device", report.hardware.device or "cpu"]


def tier_rows(answer: Answer, process_bytes: int) -> list[dict[str, Any]]:
    """Return the tiers: parts in bytes, what the configuration allows the plan, and what the machine has.

    With the CPU as the device its memory is the host's: a row of both together follows, and it alone has a limit.
    """
    memory, beside, buffers = answer.memory, answer.beside, answer.planned.buffer_bytes
    outside = {
        TierName.DEVICE: {"activations": beside.device - buffers, "buffers of the model": buffers},
        TierName.HOST: {
            "inputs of checkpointed units": beside.host - process_bytes,
            "holes in the heap": beside.holes,
            "files in memory": beside.files,
            "Python and torch": process_bytes,
        },
        TierName.NVME: {
            "inputs of checkpointed units": beside.nvme,
            "building under zero.Init": beside.waiting,
        },
    }
    is_shared, rows, expected = memory.device is None, list[dict[str, Any]](), sum(answer.needed.values())
    for tier in TierName:
        lines = [(line.what, line.num_bytes) for line in answer.planned.plan.lines if line.tier is tier]
        sizes = _as_parts([*lines, *outside[tier].items()])
        if sizes:
            limit = None if is_shared and not tier.is_file else getattr(memory, tier.value)
            budget = getattr(answer.planned.config.budgets, tier.value)
            rows.append({"name": tier.value, "parts": sizes, "available": limit, "budget": budget})
    totals = {row["name"]: sum(part["num_bytes"] for part in row["parts"]) for row in rows}
    if sum(totals.values()) != expected:
        raise AssertionError(f"the page shows {sum(totals.values())} bytes of {expected}")
    if is_shared:
        both = [(f"on the {name}", totals[name]) for name in ("device", "host") if name in totals]
        row = {"name": "in all", "parts": _as_parts(both), "available": memory.host, "budget": None}
        rows.insert(len(both), row)
    return rows


def _as_parts(sizes: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"what": what, "num_bytes": size} for what, size in sizes if size]


def _phase(phase: Phase) -> dict[str, Any]:
    parts = [[part, phase.parts_s[part]] for part in _longest_first(_done(phase.parts_s))]
    return {
        "name": phase.name,
        "seconds": phase.seconds,
        "lanes": _done(phase.lanes_s),
        "parts": {CORES: parts} if phase.parts_s else {},
        "bytes": _done(phase.num_bytes),
    }


def _done(lanes: Mapping[str, float]) -> dict[str, float]:
    return {lane: amount for lane, amount in lanes.items() if amount}
