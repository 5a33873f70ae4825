"""The package's calls to a device in a step, counted on the simulated one, before and after a change.

    python benchmarks/device_counts.py [--before FOLDER ...] [--report FILE.md]

Small models on the simulated device of `tests/simulated` train in each placement, with and without options that
change the way of the data. The counts per unit and step: how often the thread that launches waits, for the device or
for another thread of the package; kernels that the package launches (the model's and autograd's are the script's);
copies between host and device; and bytes of device memory that the package takes beside its arena and gives back. The
second step and the later ones count, up to the end of their updates; the first takes memory that later ones use again,
and has a column of its own.

Waits for the device, launches and bytes depend on the code alone. Waits for another thread are those that found its
work unfinished, and copies are fewer where a unit was still there: both vary with the schedule, and are means.

FOLDER is another version of the repository, with its native modules built; it counts with its own simulator.

    git archive COMMIT | tar -x -C FOLDER && cd FOLDER && python setup.py build_ext --inplace
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "OFFLOADZERO_COUNTED"  # the version that a worker counts
if __name__ == "__main__":
    sys.path.insert(0, os.environ.get(FOLDER, str(ROOT)))

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.simulated.device import simulated  # noqa: E402
from tests.support.models import Stack, features  # noqa: E402

NUM_STEPS = 6  # the steps that count
ROWS = 97  # an input of a block is large enough to leave the device

PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"placement": "host"},
    "nvme": {"placement": "nvme"},
    "device states": {"placement": "device"},
    "auto": {"placement": "auto", "budgets": {"device": 150_000}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "in backward": {},
    "clipping": {"gradient_clipping": 0.5},
    "accumulation 3": {"gradient_accumulation_steps": 3},
    "checkpoints on host": {"offloadzero": {"activation_checkpoints": {"tier": "host"}}},
    "checkpoints on nvme": {"offloadzero": {"activation_checkpoints": {"tier": "nvme"}}},
    "checkpoints on nvme, planned": {
        "offloadzero": {"activation_checkpoints": {"tier": "nvme", "input_bytes": 8192}}
    },
}


def counting_module() -> Any:
    """Return `tests/simulated/counting.py` of this version, over the imported simulator."""
    path = ROOT / "tests" / "simulated" / "counting.py"
    spec = importlib.util.spec_from_file_location("device_counting", path)
    if spec is None or spec.loader is None:
        raise AssertionError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def config_of(placement: str, variant: str, directory: str) -> dict[str, Any]:
    """Return the configuration, with default leases and without poison."""
    more = VARIANTS[variant]
    own = {
        "device": "cpu",
        "nvme_path": directory,
        "units": {"min_leaf_elements": 256},
        **PLACEMENTS[placement],
        **more.get("offloadzero", {}),
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        **{key: value for key, value in more.items() if key != "offloadzero"},
        "offloadzero": own,
    }


def count(placement: str, variant: str, *, seed: int = 0, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Return the counts of one step, by kind; `places` says where in the package."""
    import offloadzero

    counting = counting_module()
    with (
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patch,
        counting.counting() as counts,
        simulated(patch, seed),
    ):
        torch.manual_seed(0)
        engine, *_ = offloadzero.initialize(
            model=Stack(num_blocks=6), config=config_of(placement, variant, directory)
        )
        num_units = len(engine.optimizer.runtime.records)
        counts.clear()
        _train(engine, 1)
        first = counts.of[counting.TEMPORARY_BYTES]
        counts.clear()
        _train(engine, num_steps, and_wait=False)
        waits = dict(counts.of)  # without those of this function for the last update
        engine.synchronize()
        found = {what: counts.of[what] / num_steps for what in counting.COUNTED}
        found |= {what: waits.get(what, 0) / num_steps for what in counting.WAITS}
        places = {f"{what}: {place}": number / num_steps for (what, place), number in counts.places.items()}
        engine.close()
    return {"units": num_units, "counts": found, "first": first, "places": places}


def _train(engine: Any, num_steps: int, *, and_wait: bool = True) -> None:
    for number in range(num_steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(features(number, rows=ROWS)))
        engine.step()
    if and_wait:
        engine.synchronize()


# --- the table


def count_all() -> dict[str, Any]:
    """Return the counts by placement and variant; a case that does not run here is its error."""
    found: dict[str, Any] = {}
    for placement in PLACEMENTS:
        for variant in VARIANTS:
            try:
                found[f"{placement}, {variant}"] = count(placement, variant)
            except Exception as error:
                found[f"{placement}, {variant}"] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return found


def count_version(folder: Path) -> dict[str, Any]:
    """Return the counts of the code in `folder`, from a process of its own."""
    environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": str(folder), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, __file__, "--worker"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, Any]) -> list[str]:
    """Return the table per unit and step; bytes are per step."""
    counted = next(iter(case["counts"] for case in found.values() if "counts" in case))
    lines = [
        "| case | " + " | ".join(counted) + " | in the first step |",
        "| --- " * (len(counted) + 2) + "|",
    ]
    for name, case in found.items():
        if "error" in case:
            why = (
                "its simulator cannot" if "meta tensor" in case["error"] else case["error"].partition(":")[0]
            )
            lines.append(f"| {name} | does not run: {why} |" + " |" * len(counted))
            continue
        values = [
            f"{number:,.0f}" if "bytes" in what else f"{number / case['units']:.2f}"
            for what, number in case["counts"].items()
        ]
        lines.append(f"| {name} | " + " | ".join(values) + f" | {case['first']:,} |")
    return lines


def environment_lines() -> list[str]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else platform.machine()
    return [
        f"- date: {datetime.date.today()}",
        f"- machine: {os.cpu_count()} x {cpu}; the device is simulated: counts, not times",
        f"- torch {torch.__version__}; Python {platform.python_version()}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the package asks of a device in a step.")
    parser.add_argument(
        "--before",
        type=Path,
        nargs="*",
        default=[],
        help="other versions, built, in folders named after them",
    )
    parser.add_argument("--report", type=Path, help="where the tables go (standard output too)")
    parser.add_argument("--places", action="store_true", help="where in the package, for each case")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(count_all()), flush=True)
        os._exit(0)  # an engine that has failed, which is in the table, would end the process with its error
    lines = ["# What the package asks of a device in a step", "", *environment_lines()]
    names = " ".join(folder.name for folder in args.before)
    lines += [f"- command: `python benchmarks/device_counts.py{f' --before {names}' if names else ''}`"]
    lines += [
        "- per unit and step; bytes per step, and in the first step; updates on the device in torch's operations"
    ]
    versions = {**{f"Before: {folder.name}": folder for folder in args.before}, "Now": ROOT}
    for name, folder in versions.items():
        found = count_version(folder)
        lines += ["", f"## {name}", "", *table(found)]
        for case, values in found.items() if args.places else ():
            lines += [
                "",
                case,
                *(
                    f"    {number:12,.1f}  {place}"
                    for place, number in sorted(values.get("places", {}).items())
                ),
            ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.report:
        args.report.write_text(text)


if __name__ == "__main__":
    main()
