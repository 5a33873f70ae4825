"""One table and one JSON of the results of the parts of `gpu.py`: pure functions.

[Note: the bound of a run]
T_compute is the baseline's device-resident time for the same floating-point operations. The other lanes are the
run's own: the bytes of a step over the best rate that a step of the run has shown. Where the device is the CPU, the
computation and the updates share its cores, and `cores` (CPU seconds over their number) takes the place of T_compute.

The overlap that the run reports of itself takes its own computation in place of the baseline's: the step less the time
for which the stream stood still. Where it is higher than the overlap, the computation itself is slower than resident:
launches, copies that share the device's memory, kernels of the library.

[Note: several machines]
Parts are run one by one, into one folder, and may be of different machines or devices. Each kind of machine gets a
letter, which stands behind the names of its parts and runs. A run is compared with the baseline of its own machine
alone: without one it has neither T_compute nor a share of it.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BASELINE_PART = "device"
OWN_COMPUTE = "compute"  # the run's own lane: the step less its named waits
BASELINE_COMPUTE = "T_compute"
GIB = 1 << 30
VARYING = ("date", "host memory available")  # of one machine, from part to part


def load_parts(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the parts that have left a JSON; a damaged one has an error in place of its figures."""
    parts: dict[str, Any] = {}
    for name in names:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        try:
            parts[name] = json.loads(path.read_text())
        except ValueError as error:
            parts[name] = {"part": name, "status": f"unreadable: {error}"}
    return parts


def finished_runs(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of all parts, in order, failed ones included; `machine` is the letter of theirs."""
    letters = machine_letters(parts)
    return [
        {"part": name, "machine": letters[name], **run}
        for name, part in parts.items()
        if name != "report"
        for run in part.get("runs", ())
    ]


def machine_key(part: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return a key that is equal where parts are of one machine; empty where a part does not name it."""
    machine = part.get("machine", {})
    return tuple((name, value) for name, value in machine.items() if name not in VARYING)


def machine_letters(parts: Mapping[str, Any]) -> dict[str, str]:
    """Map parts to "A", "B", ... : [Note: several machines]. "" where there is one machine, or a part names none."""
    keys = list(dict.fromkeys(key for key in map(machine_key, parts.values()) if key))
    if len(keys) < 2:
        return dict.fromkeys(parts, "")
    letters = {key: string.ascii_uppercase[number % 26] for number, key in enumerate(keys)}
    return {name: letters.get(machine_key(part), "") for name, part in parts.items()}


def marked(name: str, letter: str) -> str:
    """Return a name with its machine's letter."""
    return f"{name} [{letter}]" if letter else name


def machine_lines(parts: Mapping[str, Any], letters: Mapping[str, str]) -> list[str]:
    """Describe the machine, or under its letter each of them, with its parts."""
    machines = {letters[name]: part["machine"] for name, part in reversed(parts.items()) if "machine" in part}
    if len(machines) < 2:
        return [f"- {key}: {value}" for machine in machines.values() for key, value in machine.items()]
    lines = ["The parts are of different machines; runs are compared within one."]
    for letter in sorted(machines):
        lines += ["", f"Machine {letter}: {', '.join(name for name in parts if letters[name] == letter)}", ""]
        lines += [f"- {key}: {value}" for key, value in machines[letter].items()]
    return [*lines, ""]


def flops_rate(run: Mapping[str, Any]) -> float:
    """Return the FLOPs per second."""
    return float(run["result"]["flops_per_step"] / run["result"]["median_step_s"])


def baseline(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the fastest device-resident run; None without one."""
    found = [run for run in runs if run["part"] == BASELINE_PART and run.get("result")]
    return max(found, key=flops_rate, default=None)


def baseline_lines(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say from which run "of device-resident" and T_compute are taken."""
    found = baseline(runs)
    if found is None:
        return []
    name = marked(found["name"], found["machine"])
    return [
        "",
        f"T_compute and 'of device-resident' are by the fastest run of the part device: {name}.",
    ]


def bound(result: Mapping[str, Any], flops_per_s: float | None) -> tuple[str, float] | None:
    """Return the slowest lane and its seconds: [Note: the bound of a run]. None when nothing is known."""
    lanes = {lane: seconds for lane, seconds in result["lanes_s"].items() if lane != OWN_COMPUTE}
    if flops_per_s is not None and "cores" not in lanes:
        lanes[BASELINE_COMPUTE] = result["flops_per_step"] / flops_per_s
    if not lanes:
        return None
    lane = max(lanes, key=lambda name: lanes[name])
    return lane, lanes[lane]


def with_bounds(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs; those with figures have their bound and the share of it that they reach."""
    found = []
    for run in runs:
        fastest = baseline([other for other in runs if other["machine"] == run["machine"]])
        flops_per_s = None if fastest is None else flops_rate(fastest)
        entry = dict(run)
        if run.get("result"):
            result = run["result"]
            least = bound(result, flops_per_s)
            if least is not None:
                entry["bound_lane"], entry["bound_s"] = least
                entry["overlap_efficiency"] = least[1] / result["median_step_s"]
            if flops_per_s is not None:
                entry["of_device_resident"] = result["flops_per_step"] / result["median_step_s"] / flops_per_s
        found.append(entry)
    return found


COLUMNS = (
    "run", "parameters", "step s", "tokens/s", "TFLOPS", "of device-resident", "bound s", "bound by", "overlap",
    "own overlap", "in waits", "longest wait", "device GiB", "host GiB", "nvme GiB",
)  # fmt: skip


def run_row(run: Mapping[str, Any]) -> list[str]:
    """Return the cells of one run; one without figures has the reason."""
    if not run.get("result"):
        return [marked(run["name"], run["machine"]), "", run["status"], *[""] * (len(COLUMNS) - 3)]
    result = run["result"]
    waits = max(result["waits_s"].items(), key=lambda item: item[1], default=("none", 0.0))
    reserved = result["reserved_bytes"]
    return [
        marked(run["name"], run["machine"]),
        f"{result['num_params'] / 1e9:.2f}B"
        if result["num_params"] >= 1e8
        else f"{result['num_params'] / 1e6:.1f}M",
        f"{result['median_step_s']:.3f}",
        f"{result['tokens_per_s']:,.0f}",
        f"{result['tflops']:.4g}",
        f"{run['of_device_resident']:.1%}" if "of_device_resident" in run else "",
        f"{run['bound_s']:.3f}" if "bound_s" in run else "",
        run.get("bound_lane", ""),
        f"{run['overlap_efficiency']:.1%}" if "overlap_efficiency" in run else "",
        f"{result['efficiency']:.1%}",
        f"{sum(result['waits_s'].values()) / result['median_step_s']:.1%}",
        f"{waits[0]} {waits[1]:.3f} s",
        *(f"{reserved.get(tier, 0) / GIB:.2f}" for tier in ("device", "host", "nvme")),
    ]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table with padded cells, so that its source is readable, too."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(columns), line(["-" * width for width in widths]), *(line(row) for row in rows)]


def test_lines(parts: Mapping[str, Any]) -> list[str]:
    """Return one line per part with tests, and the names of the files that did not pass."""
    lines, letters = [], machine_letters(parts)
    for name in ("tests", "gpu-tests"):
        found = parts.get(name, {}).get("tests")
        if found is None:
            continue
        counts = f"{found['num_tests']} tests in {len(found['files'])} files, {found['num_failed']} failed"
        lines.append(f"- {marked(name, letters[name])}: {counts}, {found['num_skipped']} skipped")
        for file in found["files"]:
            if file["status"] != "passed":
                reason = file["output"] if file["status"] == "left out" else ""
                lines.append(f"  - {file['status']}: {file['file']} {reason}".rstrip())
    return lines


def rate_lines(parts: Mapping[str, Any]) -> list[str]:
    """Return the tables of the part `rates`, as its commands print them."""
    lines, letter = [], machine_letters(parts).get("rates", "")
    for entry in parts.get("rates", {}).get("commands", ()):
        text = entry["text"].rstrip() if entry["status"] == "ok" else entry["status"]
        lines += ["", f"{marked(entry['name'], letter)}:", "", "```", *text.splitlines(), "```"]
    return lines


def write_report(folder: Path, names: Sequence[str]) -> str:
    """Write report.json and report.md; return the text of the latter."""
    parts = load_parts(folder, names)
    runs = with_bounds(finished_runs(parts))
    report = {"format": "offloadzero.gpu", "format_version": 1, "runs": runs}
    report |= {"parts": {name: {**part, "runs": None} for name, part in parts.items()}}
    letters = machine_letters(parts)
    lines = ["# GPU run", "", *machine_lines(parts, letters)]
    lines += [
        f"- {marked(name, letters[name])}: {part['status']}"
        for name, part in parts.items()
        if part.get("status") != "ok"
    ]
    lines += test_lines(parts)
    if runs:
        lines += ["", *markdown_table(COLUMNS, [run_row(run) for run in runs])]
        for letter in dict.fromkeys(letters.values()):
            lines += baseline_lines([run for run in runs if run["machine"] == letter])
    lines += rate_lines(parts)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    text = "\n".join(lines) + "\n"
    (folder / "report.md").write_text(text)
    return text
