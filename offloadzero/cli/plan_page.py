"""The answer of `offloadzero plan` as an HTML page, [Note: the page] in page.py: tiers, and the lanes of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offloadzero.cli.plan_answer import Answer
from offloadzero.cli.plan_report import LANE_HEADER, Report, count_text, rate_text, time_text
from offloadzero.observe.bound import CORES
from offloadzero.observe.forecast import FILE_ENGINE, PYTHON
from offloadzero.observe.timeline import LANES
from offloadzero.planning.fit import needed
from offloadzero.planning.step.forecast import OVERLAP, Forecast, Phase
from offloadzero.planning.step.rates import HOST_MEMORY, LINKS, NETWORK, NVME_MIXED
from offloadzero.segments import TierName

PAGE = "plan_page.html"
_LANES = (
    CORES,
    *LANES,
    NVME_MIXED,
    LINKS,
    NETWORK,
    HOST_MEMORY,
    PYTHON,
    FILE_ENGINE,
)  # in the order of the chart


def plan_data(report: Report) -> dict[str, Any]:
    """Return all data that the page shows."""
    answer, found = report.answer, report.forecast
    header, rows = report.stage_table()
    return {
        "title": report.head_line(),
        "summary": report.time_line(),
        "verdict": [*([report.refusal] if report.refusal else []), *report.verdict_lines()],
        "fits": report.fits,
        "notes": [*report.memory_notes(), *report.simulation_lines(), *report.advice_lines()],
        "facts": list(_facts(report)),
        "tiers": [] if answer is None else tier_rows(answer, report.hardware.process_bytes),
        "lanes": [] if found is None else lane_names(found),
        "phases": [] if found is None else [_phase(phase) for phase in found.phases],
        "table": None if found is None else {"header": list(LANE_HEADER), "rows": report.lane_rows(found)},
        "stages": {"header": header, "rows": rows, "notes": list(report.stage_notes())}
        if report.stages
        else None,
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
        config = answer.planned.config
        size = f"{answer.micro_batch}"
        if answer.trace is not None:
            size += f" x {answer.trace.num_tokens // answer.micro_batch:,} tokens"
        yield ["micro batch", size]
        yield ["micro batches per step", str(config.batch.gradient_accumulation_steps)]
        yield ["parameters", count_text(answer.planned.num_parameters)]
        yield ["units", str(len(answer.planned.records))]
        yield ["state layout", config.state_layout]
    yield ["device", report.hardware.device or "cpu"]


# --- memory ---


def tier_rows(answer: Answer, process_bytes: int) -> list[dict[str, Any]]:
    """Return the tiers: parts in bytes, what the configuration allows the plan, and what the machine has.

    With the CPU as the device its memory is the host's: a row of both together follows, and it alone has a limit.
    """
    memory, beside = answer.memory, answer.beside
    budgets = answer.planned.config.budgets
    buffers = answer.planned.buffer_bytes
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
    has = {TierName.DEVICE: memory.device, TierName.HOST: memory.host, TierName.NVME: memory.nvme}
    allowed = {TierName.DEVICE: budgets.device, TierName.HOST: budgets.host, TierName.NVME: budgets.nvme}
    is_shared = memory.device is None
    rows = []
    for tier in TierName:
        parts = _parts(answer, tier, outside[tier])
        if not parts:
            continue
        is_part = is_shared and not tier.is_file
        rows.append(_tier(tier.value, parts, None if is_part else has[tier], allowed[tier]))
    if is_shared:
        totals = {row["name"]: sum(part["num_bytes"] for part in row["parts"]) for row in rows}
        both = {f"on the {name}": totals[name] for name in ("device", "host") if name in totals}
        last = _tier("in all", _as_parts(both), memory.host, None)
        rows.insert(len(both), last)
    expected = sum(needed(answer.planned.plan, beside, memory).values())
    shown = sum(part["num_bytes"] for row in rows if row["name"] != "in all" for part in row["parts"])
    if shown != expected:
        raise AssertionError(f"the page shows {shown} bytes of {expected}")
    return rows


def _parts(answer: Answer, tier: TierName, outside: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return what is planned in a tier, and then what lies beside the plan."""
    lines = [line for line in answer.planned.plan.lines if line.tier is tier and line.num_bytes]
    return [{"what": line.what, "num_bytes": line.num_bytes} for line in lines] + _as_parts(outside)


def _as_parts(sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"what": what, "num_bytes": size} for what, size in sizes.items() if size]


def _tier(
    name: str, parts: Sequence[Mapping[str, Any]], available: int | None, budget: int | None
) -> dict[str, Any]:
    return {"name": name, "parts": parts, "available": available, "budget": budget}


# --- time ---


def lane_names(found: Forecast) -> list[str]:
    """Return the lanes that do something in the forecast, from top to bottom."""
    used = {lane for phase in found.phases for lane, seconds in phase.lanes_s.items() if seconds}
    return [lane for lane in _LANES if lane in used] + sorted(used.difference(_LANES))


def _phase(phase: Phase) -> dict[str, Any]:
    parts = sorted(phase.parts_s.items(), key=lambda part: -part[1])
    return {
        "name": phase.name,
        "seconds": phase.seconds,
        "lanes": {lane: seconds for lane, seconds in phase.lanes_s.items() if seconds},
        "parts": {CORES: [[part, seconds] for part, seconds in parts if seconds]} if parts else {},
        "bytes": {lane: size for lane, size in phase.num_bytes.items() if size},
    }
