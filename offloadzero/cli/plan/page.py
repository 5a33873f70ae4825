"""The answer of `offloadzero plan` as an HTML page: tiers, lanes of a step. [Note: the page] in cli/output.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offloadzero.cli.plan.answer import Answer
from offloadzero.cli.plan.report import LANE_HEADER, Report, count_text, rate_text, time_text
from offloadzero.core.segments import TierName
from offloadzero.observe.bound import CORES
from offloadzero.observe.forecast import FILE_ENGINE, PYTHON
from offloadzero.observe.timeline import LANES
from offloadzero.planning.step.forecast import OVERLAP, Forecast, Phase
from offloadzero.planning.step.rates import HOST_MEMORY, LINKS, NETWORK, NVME_MIXED

PAGE = "plan/page.html"
# In the order of the chart.
_LANES = (CORES, *LANES, NVME_MIXED, LINKS, NETWORK, HOST_MEMORY, PYTHON, FILE_ENGINE)


def plan_data(report: Report) -> dict[str, Any]:
    """Return all data that the page shows."""
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
    parts = sorted(phase.parts_s.items(), key=lambda part: -part[1])
    return {
        "name": phase.name,
        "seconds": phase.seconds,
        "lanes": _done(phase.lanes_s),
        "parts": {CORES: [[part, seconds] for part, seconds in parts if seconds]} if parts else {},
        "bytes": _done(phase.num_bytes),
    }


def _done(lanes: Mapping[str, float]) -> dict[str, float]:
    return {lane: amount for lane, amount in lanes.items() if amount}
