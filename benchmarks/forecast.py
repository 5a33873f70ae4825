"""Forecast against measurement: bytes per tier, peak resident set and seconds per step of a dozen configurations.

    python benchmarks/forecast.py --directory /mnt/nvme

Each forecast is printed before its run, which is a process of its own. Exit status 1 where a figure is off by more than
its limit: bytes by any, the resident set by 5 %, the step by 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT_RSS, LIMIT_STEP = 0.05, 0.15
SMALL, DEEP, WIDE = "llama:1024/8/8/4096", "llama:768/24/6/8192", "gpt:1536/8/12/8192"
NUM_STEPS = 12
# The cases by name: shape, micro batch, sequence, keys of the configuration.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "resident": (SMALL, 1, 256, {"placement": "device"}),
    "host": (SMALL, 1, 256, {"placement": "host"}),
    "host, clipped": (SMALL, 1, 256, {"placement": "host", "clipping": 1.0}),
    "host, accumulated": (SMALL, 1, 256, {"placement": "host", "clipping": 1.0, "micro_batches": 3}),
    "host, compact": (DEEP, 1, 256, {"placement": "host", "state_layout": "compact"}),
    "nvme": (SMALL, 1, 256, {"placement": "nvme"}),
    "nvme, clipped": (SMALL, 1, 256, {"placement": "nvme", "clipping": 1.0}),
    "nvme, compact": (SMALL, 1, 256, {"placement": "nvme", "state_layout": "compact"}),
    "nvme, compact, clipped": (
        DEEP,
        1,
        256,
        {"placement": "nvme", "state_layout": "compact", "clipping": 1.0},
    ),
    "states on nvme": (WIDE, 1, 256, {"placement": {"param": "host", "states": "nvme"}}),
    "checkpoints": (WIDE, 2, 256, {"placement": "host", "activation_checkpoints": {}}),
    "auto": (DEEP, 1, 256, {"placement": "auto", "budgets": {"device": "300MiB", "host": "1GiB"}}),
    "fp32": (SMALL, 1, 256, {"placement": "host", "bf16": False}),
    "drive and little else": (WIDE, 1, 16, {"placement": "nvme"}),
}


def config(case: str, directory: str) -> dict[str, Any]:
    """Return the JSON of a case."""
    _, micro_batch, _, keys = CASES[case]
    own = {key: value for key, value in keys.items() if key not in ("clipping", "micro_batches", "bf16")}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": keys.get("micro_batches", 1),
        "gradient_clipping": keys.get("clipping", 0.0),
        "bf16": {"enabled": keys.get("bf16", True)},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "offloadzero": {"device": "cpu", "nvme_path": directory, **own},
    }


def forecast(case: str, directory: str) -> dict[str, Any]:
    """Return the command's forecast, as JSON."""
    text, _, sequence, _ = CASES[case]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config(case, directory), file)
        file.flush()
        command = [sys.executable, "-m", "offloadzero", "plan", "--model", text, "--config", file.name]
        command += ["--sequence", str(sequence), "--json", "-"]
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def environment() -> dict[str, str]:
    """Return the environment of a Python that finds the package."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}


def run(case: str, directory: str) -> None:
    """Train a few steps, and print the measurements."""
    import torch

    import offloadzero
    from offloadzero.planning.model.shapes import read_shape

    text, micro_batch, sequence, _ = CASES[case]
    shape = read_shape("model", text)
    if shape is None:
        raise AssertionError(text)
    settings = config(case, directory)
    settings["offloadzero"]["observe"] = {"run_dir": f"{directory}/run"}
    torch.manual_seed(0)
    with offloadzero.zero.Init(config_dict_or_path=settings):
        model = shape.build()
    engine, *_ = offloadzero.initialize(model=model, config=settings)
    for _ in range(NUM_STEPS):
        for _ in range(settings["gradient_accumulation_steps"]):
            engine.backward(engine(torch.randint(0, shape.vocabulary, (micro_batch, sequence))))
            engine.step()
    plan = [[line.tier.value, line.what, line.num_bytes] for line in engine.optimizer.runtime.plan.lines]
    engine.close()
    steps = [json.loads(line) for line in Path(directory, "run", "steps.jsonl").read_text().splitlines()][2:]
    result = {
        "plan": plan,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step_s": statistics.median(step["step_s"] for step in steps),
        "cores_s": statistics.median(step["lanes_s"]["cores"] for step in steps),
    }
    print(json.dumps(result))


def measured(case: str, directory: str) -> dict[str, Any]:
    """Return the measurements of a process of its own."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        command = [sys.executable, __file__, "--directory", folder, "--run", case]
        # Without the rates that the forecast has kept: the run's own forecast takes memory that is none of the plan's.
        alone = {**environment(), "XDG_CACHE_HOME": folder}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=alone, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def compare(case: str, directory: str) -> tuple[list[str], bool]:
    """Return a row of the table, and whether all of it is within its limits."""
    plan = forecast(case, directory)
    seconds, host = plan["forecast"]["seconds"], plan["needed"]["host"]
    if seconds is None:
        sys.exit(f"{case}: no forecast of time, {plan['forecast']['unknown']} not known")
    print(
        f"{case}: {host / 2**20:,.0f} MiB of host memory, {seconds:.2f} s per step",
        file=sys.stderr,
        flush=True,
    )
    found = measured(case, directory)
    is_exact = [[line["tier"], line["what"], line["bytes"]] for line in plan["plan"]] == found["plan"]
    rss = found["peak_rss_bytes"] / host - 1
    step = found["step_s"] / seconds - 1
    cores_s = plan["forecast"]["lanes_s"]["cores"]
    row = [
        case,
        CASES[case][0],
        "exact" if is_exact else "not those",
        f"{host / 2**20:,.0f}",
        f"{found['peak_rss_bytes'] / 2**20:,.0f}",
        f"{rss:+.1%}",
        f"{seconds:.2f}",
        f"{found['step_s']:.2f}",
        f"{step:+.1%}",
        f"{cores_s:.2f}",
        f"{found['cores_s']:.2f}",
    ]
    return row, is_exact and abs(rss) <= LIMIT_RSS and abs(step) <= LIMIT_STEP


def main() -> int:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True, help="on the drive; made if it is missing")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    if args.run:
        run(args.run, args.directory)
        return 0
    header = [
        "case",
        "model",
        "bytes",
        "host MiB",
        "peak RSS",
        "",
        "step s",
        "measured",
        "",
        "cores s",
        "measured",
    ]
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header), flush=True)
    within = True
    for case in args.cases:
        row, is_within = compare(case, args.directory)
        within = within and is_within
        print("| " + " | ".join(row) + " |", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
