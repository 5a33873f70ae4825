"""Adam on the CPU beside torch's fused AdamW and DeepSpeed's CPUAdam, in one table: `offloadzero bench adam` and peers.

    python benchmarks/adam.py [--params N] [--rounds N] [--json FILE] [--deepspeed-python PATH]

DeepSpeed runs in a process of its own, by an interpreter that can import it (adam_deepspeed.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offloadzero.cli.bench.adam import Case, Cases, Sample, check, kernel_cases, measured, table, timed
from offloadzero.cli.output import print_lines, save_json
from offloadzero.errors import ConfigError, OffloadError

WORKER = Path(__file__).with_name("adam_deepspeed.py")
BYTES_OF_TORCH = 16  # for each parameter: four arrays in fp32
BYTES_OF_DEEPSPEED = 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Adam on the CPU beside torch's and DeepSpeed's.")
    parser.add_argument("--params", type=int, default=1 << 26, help="parameters (default 67108864)")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each (default 9)")
    parser.add_argument("--deepspeed-python", metavar="PATH", help="an interpreter that can import deepspeed")
    parser.add_argument("--json", metavar="FILE", help="every sample, the machine and the results")
    args = parser.parse_args()
    check(args, bytes_beside=BYTES_OF_TORCH + (BYTES_OF_DEEPSPEED if args.deepspeed_python else 0))
    num_cores = len(os.sched_getaffinity(0))
    ours = [*kernel_cases(args.params, num_cores), torch_case(args.params, num_cores)]
    with deepspeed_worker(args.deepspeed_python, args.params, num_cores) as (cases, versions):
        result = {**measured(ours + cases, args.params, args.rounds), "deepspeed_versions": versions}
    print_lines(table(result))
    rows = {row["what"]: row["gparam_per_s"] for row in result["results"] if row["num_threads"] == num_cores}
    baseline = next((rate for what, rate in rows.items() if what.endswith("as ZeRO uses it")), None)
    if baseline is not None:
        print_lines(f"{what}: {rate / baseline:.2f} times ZeRO's" for what, rate in rows.items())
    if args.json:
        save_json(args.json, result)


def torch_case(num_params: int, num_threads: int) -> tuple[Case, Sample]:
    """Return the case of torch's fused AdamW: fp32 parameters, gradients and moments."""
    import torch

    param = torch.nn.Parameter(torch.randn(num_params) * 0.02)
    param.grad = torch.randn(num_params) * 1e-3
    optimizer = torch.optim.AdamW([param], lr=1e-5, weight_decay=0.01, fused=True)

    def step() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        optimizer.step()
        torch.set_num_threads(before)

    return Case("torch fused AdamW", "fp32 params", "", num_threads, 28, num_params), timed(step)


@contextmanager
def deepspeed_worker(
    python: str | None, num_params: int, num_threads: int
) -> Iterator[tuple[Cases, dict[str, str] | None]]:
    """Yield the cases of DeepSpeed, in a process of its own; none without an interpreter for it.

    Raises ConfigError where the interpreter cannot be run, OffloadError where its process fails.
    """
    if python is None:
        yield [], None
        return
    environment = {
        **os.environ,
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # ninja
        "OMP_NUM_THREADS": str(num_threads),
        "DS_ACCELERATOR": "cpu",
    }
    command = [python, str(WORKER), str(num_params), str(num_threads)]
    try:
        worker = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise ConfigError("--deepspeed-python", python, f"cannot be run: {error.strerror}") from error
    with worker:
        try:
            versions = _versions(_answer(worker, python), python)
            cases = [
                (
                    Case(f"DeepSpeed CPUAdam, {text}", "fp32 params", "", num_threads, num_bytes, num_params),
                    _ask(worker, python, step),
                )
                for step, text, num_bytes in (("bare", "bare", 28), ("zero", "as ZeRO uses it", 48))
            ]
            yield cases, versions
        finally:
            worker.terminate()


def _versions(answer: str, python: str) -> dict[str, str]:
    try:
        versions = json.loads(answer)
    except ValueError as error:
        raise OffloadError(f"the DeepSpeed worker of {python} answered {answer!r:.80}") from error
    return {str(name): str(version) for name, version in versions.items()}


def _answer(worker: subprocess.Popen[str], python: str) -> str:
    if worker.stdout is None:
        raise AssertionError("the worker's answers are not piped")
    line = worker.stdout.readline()
    if not line:
        raise OffloadError(f"the DeepSpeed worker of {python} ended with status {worker.wait()}")
    return line


def _ask(worker: subprocess.Popen[str], python: str, step: str) -> Sample:
    def sample() -> float:
        if worker.stdin is None:
            raise AssertionError("the worker's questions are not piped")
        # A worker that has ended reads nothing more: its status tells the reason.
        with contextlib.suppress(BrokenPipeError):
            print(step, file=worker.stdin, flush=True)
        answer = _answer(worker, python)
        try:
            return float(answer)
        except ValueError as error:
            raise OffloadError(f"the DeepSpeed worker of {python} answered {answer!r:.80}") from error

    return sample


if __name__ == "__main__":
    main()
