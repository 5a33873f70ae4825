"""A short selection of the tests under pairs of Python and torch, each in an environment of its own; prints a table.

python -m tests.support.version_matrix --folder ../versions [3.10:2.8 3.14:2.14 ...]

The compiled modules are those of the checkout: one build serves every Python. uv makes the environments, of Pythons
that it finds on PATH or fetches. A pair's log is in the folder, and so is its outcome, which later tables show, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14")
REQUIREMENTS = ("numpy", "aiofiles", "hypothesis", "pytest", "safetensors", "tqdm")
# What leans on torch's private names and on its hooks, and the bindings, which lean on Python's limited API.
SELECTION = (
    "access/test_weights_away.py",
    "access/test_remote_tensors.py",
    "checkpoint/test_checkpoint_resume.py",
    "engine/test_compiled.py",
    "engine/test_copies.py",
    "engine/test_zero.py",
    "native/test_bindings.py",
    "optim/test_optimizer_states.py",
    "optim/test_torch_schedulers.py",
    "ranks/test_ranks_start.py",
    "repository/test_torch_private.py",
    "scripts/test_scripts.py",
    "step/test_gradients.py",
    "step/test_gradient_tensors.py",
    "streaming/test_state_dicts.py",
)


def run(python: str, torch: str, folder: Path) -> str:
    """Make the environment, run the selection in it, remove it; return what came of it in a few words."""
    environment = folder / f"python-{python}-torch-{torch}"
    interpreter = environment / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    commands = [
        [*uv, "venv", "--quiet", "--clear", "--python", python, str(environment)],
        [*uv, "pip", "install", "--quiet", "--python", str(interpreter), f"torch=={torch}.*", *REQUIREMENTS],
        [str(interpreter), "-m", "pytest", "-q", "-m", "not alone and not gpu", "-p", "no:cacheprovider"],
    ]
    commands[-1] += [f"tests/{name}" for name in SELECTION]
    variables = {**os.environ, "UV_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    log = environment.with_suffix(environment.suffix + ".log")
    try:
        with log.open("w") as file:
            for command in commands:
                done = subprocess.run(command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT)
                if done.returncode:
                    break
    finally:
        shutil.rmtree(environment, ignore_errors=True)
        # No other pair has this wheel of two gigabytes; the libraries beside it are shared.
        subprocess.run([*uv, "cache", "clean", "--quiet", "torch"], env=variables, check=True)
    return outcome(log.read_text(), has_run=command is commands[-1])


def outcome(log: str, *, has_run: bool) -> str:
    """What a log says: `660 passed`, `3 failed`, and `no wheel` or `not installed` where no test ran."""
    if not has_run:
        return "no wheel" if re.search(r"no wheels with a matching|unsatisfiable", log) else "not installed"
    counts = {
        word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", log.splitlines()[-1])
    }
    num_bad = counts.get("failed", 0) + counts.get("error", 0)
    return f"{num_bad} failed" if num_bad or "passed" not in counts else f"{counts['passed']} passed"


def table(outcomes: dict[str, str]) -> str:
    """One row for each Python, one column for each torch, in Markdown."""
    pairs = [pair.split(":") for pair in outcomes]

    def by_version(version: str) -> list[int]:
        return [int(number) for number in version.split(".")]

    torches = sorted({torch for _, torch in pairs}, key=by_version)
    lines = [
        f"| Python | {' | '.join(f'torch {torch}' for torch in torches)} |",
        "| --- |" + " --- |" * len(torches),
    ]
    for python in sorted({python for python, _ in pairs}, key=by_version):
        cells = [outcomes.get(f"{python}:{torch}", "") for torch in torches]
        lines.append(f"| {python} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="for environments, logs and what uv fetches"
    )
    everything = [f"{python}:{torch}" for python in PYTHONS for torch in TORCHES]
    parser.add_argument(
        "pairs", nargs="*", default=everything, metavar="PYTHON:TORCH", help="default: all pairs"
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "outcomes.json"
    outcomes: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    for pair in args.pairs:
        python, _, torch = pair.partition(":")
        outcomes[pair] = run(python, torch, folder)
        print(f"Python {python}, torch {torch}: {outcomes[pair]}", flush=True)
        file.write_text(json.dumps(outcomes, indent=1))
    print(f"\n{table(outcomes)}")
    return any("failed" in outcomes[pair] for pair in args.pairs)


if __name__ == "__main__":
    sys.exit(main())
