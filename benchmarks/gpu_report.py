"""One table of what a run of `gpu.py` has found: pure functions of its JSON.

[Note: the bound of a run]
T_compute is the time of the same floating-point operations with resident weights and no update, in the run
"computation alone". The other lanes are the run's own: the bytes of a step over the best rate that a step of it has
shown. Where the device is the CPU, the computation and the updates share its cores, and `cores` (CPU seconds over their
number) takes the place of T_compute. The overlap efficiency is the longest lane over the step's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_LINES = 40
ALONE = "computation alone"
OWN_COMPUTE = "compute"  # the run's own lane: the step less its named waits
BASELINE_COMPUTE = "T_compute"
NUM_HOOKS = 4
NUM_GAPS = 10
WIDTH = 180
Found = Mapping[str, Any]


def runs_of(found: Found) -> dict[str, Found]:
    """Return the trainings of all slices by name; a failed one has no figures."""
    slices = (one for name, one in found["slices"].items() if name != "tests")
    return {name: run for one in slices for name, run in one.get("runs", {}).items()}


def flops_rate(run: Found) -> float:
    return float(run["flops_per_step"] / run["median_step_s"])


def bound(run: Found, flops_per_s: float | None) -> tuple[str, float] | None:
    """Return the slowest lane and its seconds: [Note: the bound of a run]. None when nothing is known."""
    lanes = {lane: seconds for lane, seconds in run.get("lanes_s", {}).items() if lane != OWN_COMPUTE}
    if flops_per_s is not None and "cores" not in lanes:
        lanes[BASELINE_COMPUTE] = run["flops_per_step"] / flops_per_s
    if not lanes:
        return None
    lane = max(lanes, key=lambda name: lanes[name])
    return lane, lanes[lane]


COLUMNS = (
    "run", "parameters", "s/step", "forecast", "tokens/s", "TFLOPS 8P", "6P", "of matmul", "of alone", "bound s", "by",
    "overlap",
)  # fmt: skip


def row(name: str, run: Found, alone: Found | None, matmul_tflops: float | None) -> list[str]:
    """Return the cells of one run; one without figures has its status."""
    if "median_step_s" not in run:
        return [name, "", str(run.get("status", "not finished")), *[""] * (len(COLUMNS) - 3)]
    step_s, flops_per_s = run["median_step_s"], None if alone is None else flops_rate(alone)
    # The computation alone is what others are compared with.
    lane, least_s = ("", 0.0) if run is alone else bound(run, flops_per_s) or ("", 0.0)
    timed = run.get("step_s", [step_s])[run.get("warmup", 1) :] or [step_s]
    planned = run.get("forecast", {})
    share = lambda part, whole: f"{part / whole:.1%}" if part and whole else ""  # noqa: E731
    return [
        name,
        f"{run['num_params'] / 1e9:.3g}B" if run["num_params"] >= 1e8 else f"{run['num_params'] / 1e6:.3g}M",
        f"{step_s:.3f} ({min(timed):.3f}-{max(timed):.3f})",
        f"{planned['seconds']:.3f} ({planned['lane']})" if "seconds" in planned else "",
        f"{run['tokens_per_s']:,.0f}",
        f"{run['tflops']:.4g}",
        f"{run['tflops'] * 6 / 8:.4g}",
        share(run["tflops"], matmul_tflops),
        "" if run is alone else share(flops_rate(run), flops_per_s),
        f"{least_s:.3f}" if lane else "",
        lane,
        share(least_s, step_s),
    ]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table with padded cells, so that its source is readable, too."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(columns), line(["-" * width for width in widths]), *(line(row) for row in rows)]


def right_lines(found: Found) -> Iterator[str]:
    cases = found.get("cases", {})
    of_torch = [case["of_torch"] for case in cases.values() if "of_torch" in case]
    bad = {"WRONG": "problem", "NOT RUN": "error"}
    named = {
        word: [f"{name}: {one[key]}" for name, one in cases.items() if one.get(key)]
        for word, key in bad.items()
    }
    good = len(cases) - sum(map(len, named.values()))
    near = f", at most {max(of_torch):.1e} (1e-3 is allowed) from plain torch" if of_torch else ""
    yield (
        f"right: {good} of {len(cases)} trainings bitwise as with all states on the device{near}; "
        f"update on the device: {found.get('triton', 'not tried')}"
    )
    for word, lines in named.items():
        yield from (f"  {word}: {line}" for line in lines[:3])
        if len(lines) > 3:
            yield f"  {word}: {len(lines) - 3} more"


def rate_line(rates: Found) -> str:
    texts = {
        "matmul_tflops": "matrix product {:.4g} TFLOPS",
        "block_tflops": "a block {:.4g}",
        "h2d_gbps": "h2d {:.1f}",
        "d2h_gbps": "d2h {:.1f}",
        "both_gbps": "both at once {:.1f} GB/s",
        "take_s_per_10gb": "10 GB of host memory: {:.2f} s to take",
        "pin_s_per_10gb": "{:.2f} s to pin",
        "host_adam_gparams": "Adam: host {:.2f}",
        "device_adam_gparams": "device {:.1f} Gparam/s",
    }
    return "rates: " + ", ".join(text.format(rates[key]) for key, text in texts.items() if key in rates)


def where_lines(found: Found) -> Iterator[str]:
    if "gaps" not in found:
        return
    counts = ", ".join(f"{name} {count:.1f}" for name, count in found["per_unit"].items())
    idle = found["idle_us"] / found["step_us"]
    yield f"where: a step of {found['step_us'] / 1e3:.1f} ms, idle {idle:.1%}; per unit: {counts or 'no device'}"
    hooks = list(found["hooks"].items())[:NUM_HOOKS]
    per_unit = found["num_units"]
    yield "  hooks, us per unit: " + ", ".join(f"{name} {one['us'] / per_unit:.0f}" for name, one in hooks)
    for gap in found["gaps"][:NUM_GAPS]:
        meanwhile = "; ".join(gap["meanwhile"])
        yield f"  idle {gap['us']:.0f} us at {gap['at_us'] / 1e3:.1f} ms before {gap['before']}: {meanwhile}"


def failure_lines(found: Found) -> Iterator[str]:
    """Yield a line for each thing that failed; the whole text is in the JSON and the log."""
    for name, one in found["slices"].items():
        if one["status"] in ("ok", "skipped"):
            continue
        parts = {"": one, **one.get("runs", {})}
        said = [
            part["error"].strip().splitlines() for part in parts.values() if part.get("error", "").strip()
        ]
        last = f"{said[0][-1]}: " if said else ""
        yield f"FAILED {name}: {last}{one['status']}"


def text_of(found: Found) -> str:
    """Return the table, of at most MAX_LINES lines of WIDTH characters, failures first to stay."""
    slices = found["slices"]
    machine, rates = slices.get("modules", {}).get("machine", {}), slices.get("rates", {}).get("rates", {})
    facts = {key: f"{value:.1f}" if isinstance(value, float) else value for key, value in machine.items()}
    lines = ["machine: " + ", ".join(f"{key} {value}" for key, value in facts.items())] if facts else []
    if "modules" in slices:
        taken = slices.get("memory", {})
        host = (
            "; host memory: {taken_gib:.0f} GiB taken once, {host_gib:.0f} shown then".format(**taken)
            if taken.get("host_gib")
            else ""
        )
        lines.append(f"modules: {slices['modules'].get('modules', 'none')}{host}")
    if "right" in slices:
        lines += right_lines(slices["right"])
    if rates:
        lines.append(rate_line(rates))
    runs = runs_of(found)
    if runs:
        alone = runs.get(ALONE)
        alone = alone if alone is not None and "median_step_s" in alone else None
        rows = [row(name, run, alone, rates.get("matmul_tflops")) for name, run in runs.items()]
        lines += markdown_table(COLUMNS, rows)
        for name, run in runs.items():
            waits = sorted(run.get("waits_s", {}).items(), key=lambda item: -item[1])
            if waits:
                lines.append(f"waits, {name}: " + ", ".join(f"{wait} {s * 1e3:.0f} ms" for wait, s in waits))
    if "tests" in slices:
        files = slices["tests"].get("runs", {})
        lines += (
            ["tests: " + ", ".join(f"{name} {run['status']}" for name, run in files.items())] if files else []
        )
    failures = list(failure_lines(found))
    room = MAX_LINES - len(lines) - len(failures) - 1
    if "where" in slices:
        lines += list(where_lines(slices["where"]))[: max(room, 0)]
    if "seconds" in found:
        lines.append(
            f"{found['seconds']:.0f} s in all; {'all went well' if not failures else 'not all went well'}"
        )
    return (
        "\n".join(line[:WIDTH] if not line.startswith("|") else line for line in [*lines, *failures]) + "\n"
    )
