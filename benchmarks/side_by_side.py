"""Step time and peak memory of the same training in plain PyTorch, DeepSpeed and offloadzero, side by side.

    python benchmarks/side_by_side.py --deepspeed-python /path/to/venv/bin/python

Every contender is a process of its own that does steps only on request, so one works at a time and all see the
same drift of the machine: round after round, each contender does its steps. Writes side_by_side.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

CONTENDERS = (
    "torch",
    "deepspeed-none",
    "deepspeed-cpu",
    "deepspeed-nvme",
    "offloadzero-resident",
    "offloadzero-host",
    "offloadzero-nvme",
)
Batches = list[tuple[Any, Any]]
RUN_DIR = "run"  # of offloadzero, beside its files
SEED = 0
MIB = 1024 * 1024
MIN_AVAILABLE_BYTES = 1024 * MIB  # for the file cache and other programs


@dataclass(frozen=True)
class Work:
    """The work of every contender in one step."""

    model: str
    batch_size: int
    seq_len: int
    micro_batches: int
    clipping: float  # 0: no clipping


# ---------------------------------------------------------------------------------------------------------
# Contenders: each returns a function that does one step on micro batches of (tokens, targets) and returns the
# loss of the last.
# They import inside themselves, so a worker loads only its own framework.


def base_config(work: Work) -> dict[str, Any]:
    """Return the JSON that all contenders share."""
    return {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": work.clipping,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
    }


def zero_block(placement: str, nvme_path: Path) -> dict[str, Any]:
    """Return `zero_optimization` with parameters and optimizer states in "none", "cpu" or "nvme"."""
    home = {"device": placement}
    if placement == "nvme":
        home["nvme_path"] = str(nvme_path)
    return {"stage": 3, "offload_param": dict(home), "offload_optimizer": dict(home)}


def build_model(work: Work) -> Any:
    import torch
    from gpt_model import GPT, SIZES

    torch.manual_seed(SEED)
    return GPT(SIZES[work.model], seq_len=work.seq_len)


def plain_torch(work: Work, _placement: str, _nvme_path: Path) -> Callable[..., Any]:
    from plain_torch import PlainTrainer

    trainer = PlainTrainer(build_model(work), base_config(work))

    def step(batches: Batches) -> Any:
        for batch in batches:
            loss = trainer.backward(*batch, num_micro_batches=len(batches))
        trainer.update()
        return loss

    return step


def deepspeed(work: Work, placement: str, nvme_path: Path) -> Callable[..., Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed as ds

    config = base_config(work) | {"zero_optimization": zero_block(placement, nvme_path)}
    if placement == "nvme":
        # With the defaults it fails: a parameter that stays live for reuse (up to 1e9 elements do) keeps its
        # staging buffer, of which there are five. No parameter of this model has more than 4.2M elements.
        config["zero_optimization"]["offload_param"] |= {
            "buffer_size": 4_300_000,
            "buffer_count": 24,
            "max_in_cpu": 0,
        }
        live = {"stage3_max_live_parameters": 30_000_000, "stage3_max_reuse_distance": 30_000_000}
        config["zero_optimization"] |= live | {"stage3_prefetch_bucket_size": 13_000_000}
        # Sub-groups keep the staged fp32 states small; with more than one, the default of four buffers fails.
        # The pipeline_read and pipeline_write options are off: on, they were slower and took 2 GiB more.
        config["zero_optimization"] |= {"sub_group_size": 30_000_000}
        config["zero_optimization"]["offload_optimizer"] |= {"buffer_count": 8}
        config["aio"] = {"block_size": MIB, "queue_depth": 32, "intra_op_parallelism": 2}
    ds.init_distributed(dist_backend="gloo")
    with ds.zero.Init(config_dict_or_path=config):
        model = build_model(work)
    engine = ds.initialize(model=model, config=config)[0]
    return engine_step(engine)


def offloadzero(work: Work, placement: str, nvme_path: Path) -> Callable[..., Any]:
    import torch

    import offloadzero as oz

    device = {"resident": "none", "host": "cpu", "nvme": "nvme"}[placement]
    config = base_config(work) | {"zero_optimization": zero_block(device, nvme_path)}
    config["offloadzero"] = {"observe": {"run_dir": str(nvme_path / RUN_DIR)}}  # for the bound of each step
    # Rounded at the start as the others round: without `dtype` the master would keep the fp32 initial weights.
    with oz.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = build_model(work)
    engine = oz.initialize(model=model, config=config)[0]
    return engine_step(engine)


def engine_step(engine: Any) -> Callable[..., Any]:
    def step(batches: Batches) -> Any:
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()  # updates at the last
        return loss.detach()

    return step


def contender_step(name: str, work: Work, nvme_path: Path) -> Callable[..., Any]:
    framework, _, placement = name.partition("-")
    build = {"torch": plain_torch, "deepspeed": deepspeed, "offloadzero": offloadzero}[framework]
    return build(work, placement, nvme_path)


# ---------------------------------------------------------------------------------------------------------
# The worker's side: one JSON line in (the number of steps), one JSON line out.


def serve(name: str, work: Work, nvme_path: Path) -> None:
    # Frameworks print: what was stdout becomes the channel, and prints go to stderr (the log file).
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from gpt_model import Text

    torch.set_num_threads(os.cpu_count() or 1)
    text = Text.load()
    generator = torch.Generator().manual_seed(SEED)
    step = contender_step(name, work, nvme_path)
    framework = name.partition("-")[0]
    print(json.dumps({"version": sys.modules[framework].__version__}), file=channel, flush=True)
    for line in sys.stdin:
        answer: dict[str, Any] = {"step_s": [], "loss": []}
        for _ in range(int(line)):
            batches = [
                text.batch(batch_size=work.batch_size, seq_len=work.seq_len, generator=generator)
                for _ in range(work.micro_batches)
            ]
            start = time.perf_counter()
            loss = float(step(batches))
            answer["step_s"].append(time.perf_counter() - start)
            answer["loss"].append(loss)
        answer["peak_rss_bytes"] = status_bytes("VmHWM")
        print(json.dumps(answer), file=channel, flush=True)
    os._exit(0)  # nothing of the frameworks' shutdown is measured, and some of it hangs


def status_bytes(key: str) -> int:
    """Return a field of /proc/self/status; VmHWM is the peak resident set."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise KeyError(key)
    return int(match[1]) * 1024


# ---------------------------------------------------------------------------------------------------------
# The parent's side.


class WorkerError(Exception):
    """A contender died; the message is the end of its log."""


class Worker:
    """A contender's process, idle until a step is requested."""

    def __init__(self, name: str, python: str, work: Work, workdir: Path) -> None:
        self.name = name
        self.nvme_path = workdir / name
        self.nvme_path.mkdir(parents=True, exist_ok=True)
        self.log_path = workdir / f"{name}.log"
        command = [python, __file__, "--worker", name, "--nvme-path", str(self.nvme_path)]
        command += ["--model", work.model]
        command += [f"--batch-size={work.batch_size}", f"--seq-len={work.seq_len}"]
        command += [f"--micro-batches={work.micro_batches}", f"--clipping={work.clipping}"]
        environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
        # DeepSpeed runs `ninja` by name.
        environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self.versions = self._answer()

    def steps(self, num_steps: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{num_steps}\n")
        self.process.stdin.flush()
        return self._answer()

    def bounds_s(self, *, num_warmup: int) -> list[float]:
        """Return the lower bound of each timed step but the last, whose record is still open; for other frameworks
        nothing.

        The CPU time over the cores and the drive's lanes. The lane of the training thread is left out: between
        two steps of one contender the others have their turns.
        """
        path = self.nvme_path / RUN_DIR / "steps.jsonl"
        lines = path.read_text().splitlines()[num_warmup:] if path.exists() else []
        lanes_s = [json.loads(line)["lanes_s"] for line in lines]
        return [max(s for lane, s in lanes.items() if lane != "compute") for lanes in lanes_s]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        shutil.rmtree(self.nvme_path, ignore_errors=True)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log_path.read_text().splitlines()[-30:])
            raise WorkerError(f"{self.name} ended with status {self.process.wait()}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Result:
    """The result of one contender, warm-up steps left out of `step_s`."""

    versions: dict[str, str] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bound_s: list[float] = field(default_factory=list)  # of offloadzero's timed steps
    peak_rss_bytes: int = 0

    def add(self, answer: dict[str, Any], *, num_warmup: int = 0) -> None:
        self.step_s += answer["step_s"][num_warmup:]
        self.losses += answer["loss"]
        self.peak_rss_bytes = max(self.peak_rss_bytes, answer["peak_rss_bytes"])


def measure(args: argparse.Namespace, work: Work, workdir: Path) -> dict[str, Result]:
    """Measure workers that all live at once and take turns; the first round begins with each one's warm-up steps."""
    results: dict[str, Result] = {}
    workers: list[Worker] = []
    try:
        for name in args.contenders:
            python = args.deepspeed_python if name.startswith("deepspeed") else sys.executable
            worker = Worker(name, python, work, workdir)
            workers.append(worker)
            results[name] = Result(worker.versions)
            results[name].add(worker.steps(args.warmup), num_warmup=args.warmup)
            print(f"{name}: {args.warmup} warm-up steps done", flush=True)
            expect_memory(name)
        for round_number in range(1, args.rounds + 1):
            for worker in workers:
                answer = worker.steps(args.steps)
                results[worker.name].add(answer)
                median_s = statistics.median(answer["step_s"])
                print(f"round {round_number}/{args.rounds} {worker.name}: {median_s:.2f} s/step", flush=True)
        for worker in workers:
            results[worker.name].bound_s += worker.bounds_s(num_warmup=args.warmup)
    finally:
        for worker in workers:
            worker.close()
    return results


def measure_restarted(args: argparse.Namespace, work: Work, workdir: Path) -> dict[str, Result]:
    """Measure with one worker alive at a time, started anew and warmed up in every round."""
    results: dict[str, Result] = {}
    for round_number in range(1, args.rounds + 1):
        for name in args.contenders:
            python = args.deepspeed_python if name.startswith("deepspeed") else sys.executable
            worker = Worker(name, python, work, workdir)
            try:
                answer = worker.steps(args.warmup + args.steps)
                result = results.setdefault(name, Result(worker.versions))
                result.add(answer, num_warmup=args.warmup)
                result.bound_s += worker.bounds_s(num_warmup=args.warmup)
            finally:
                worker.close()
            median_s = statistics.median(answer["step_s"][args.warmup :])
            print(f"round {round_number}/{args.rounds} {name}: {median_s:.2f} s/step", flush=True)
    return results


def expect_memory(name: str) -> None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if match is not None and int(match[1]) * 1024 < MIN_AVAILABLE_BYTES:
        raise WorkerError(
            f"less than {MIN_AVAILABLE_BYTES // MIB} MiB of memory left after {name}: "
            "use --restart-workers, or fewer --contenders"
        )


# ---------------------------------------------------------------------------------------------------------
# The report.


def losses_agree(results: dict[str, Result], *, num_steps: int = 5, tolerance: float = 0.05) -> bool:
    """Whether the first losses of all contenders differ by less than `tolerance` nats (bf16 rounding)."""
    columns = zip(*(result.losses[:num_steps] for result in results.values()), strict=True)
    return all(max(losses) - min(losses) < tolerance for losses in columns)


def table(results: dict[str, Result]) -> str:
    base_s = statistics.median(next(iter(results.values())).step_s)
    lines = [
        f"| contender | median s/step | min - max | over {next(iter(results))} | bound s, over the step "
        "| peak RSS GiB | losses |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        median_s = statistics.median(result.step_s)
        losses = " ".join(f"{loss:.3f}" for loss in result.losses[:4])
        bound_s = statistics.median(result.bound_s) if result.bound_s else 0.0
        bound = f"{bound_s:.2f}, {bound_s / median_s:.0%}" if bound_s else ""
        lines.append(
            f"| {name} | {median_s:.2f} | {min(result.step_s):.2f} - {max(result.step_s):.2f} "
            f"| {median_s / base_s:.2f} | {bound} | {result.peak_rss_bytes / 1024**3:.2f} | {losses} |"
        )
    return "\n".join(lines)


def ratios(results: dict[str, Result]) -> str:
    """Return the ratios of offloadzero to DeepSpeed at the same placement, where both ran."""
    lines = []
    for ours, theirs in (("resident", "none"), ("host", "cpu"), ("nvme", "nvme")):
        a, b = results.get(f"offloadzero-{ours}"), results.get(f"deepspeed-{theirs}")
        if a and b:
            speedup = statistics.median(b.step_s) / statistics.median(a.step_s)
            memory = a.peak_rss_bytes / b.peak_rss_bytes
            pair = f"offloadzero-{ours} to deepspeed-{theirs}"
            lines.append(f"- {pair}: {speedup:.2f}x steps/s, {memory:.2f}x RSS")
    return "\n".join(lines)


def environment_lines(results: dict[str, Result], workdir: Path) -> list[str]:
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    models = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    filesystem = subprocess.run(
        ["df", "--output=fstype", str(workdir)], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    frameworks = {name.partition("-")[0]: result.versions["version"] for name, result in results.items()}
    versions = ", ".join(f"{name} {number}" for name, number in frameworks.items())
    return [
        f"- date: {date.today().isoformat()}",
        f"- machine: {models[0] if models else platform.machine()}, {os.cpu_count()} cores, "
        f"{int(memory[1]) / 1024**2 if memory else 0:.0f} GiB, filesystem {filesystem}",
        f"- kernel: {platform.release()}; Python {platform.python_version()}; {versions}",
    ]


def write_report(args: argparse.Namespace, work: Work, results: dict[str, Result], workdir: Path) -> str:
    from gpt_model import SIZES, num_params

    count = num_params(SIZES[work.model], seq_len=work.seq_len)
    agree = "agree" if losses_agree(results) else "DO NOT AGREE: the contenders do not do the same work"
    clipping = f"clipping {work.clipping}" if work.clipping else "no clipping"
    command = shlex.join(["python", *sys.argv])
    for path, name in ((args.deepspeed_python, "DEEPSPEED_PYTHON"), (ROOT, "."), (Path.home(), "~")):
        command = command.replace(str(path), name)
    lines = [
        "# Side by side",
        "",
        f"{work.model} GPT ({count / 1e6:.0f}M parameters), {work.batch_size} x {work.seq_len} tokens, "
        f"bf16 weights, fp32 master, AdamW, {clipping}, CPU as the device, "
        f"micro batches per step: {work.micro_batches}; "
        f"{args.rounds} interleaved rounds of {args.steps} steps after {args.warmup} warm-up steps.",
        "",
        *environment_lines(results, workdir),
        f"- command: `{command}`",
        "",
        table(results),
        "",
        ratios(results),
        "",
        f"The first losses of all contenders {agree} (same seed and data; rounding differs).",
    ]
    report = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"
    args.output.write_text(report)
    return report


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--deepspeed-python", help="interpreter that has deepspeed; without it, left out")
    parser.add_argument("--model", default="160m", help="a size of examples/gpt_model.py")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=1, help="per optimizer step")
    parser.add_argument("--clipping", type=float, default=1.0, help="0 for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per contender and round")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps after a worker starts")
    parser.add_argument("--restart-workers", action="store_true", help="one worker in memory at a time")
    parser.add_argument("--nvme-path", type=Path, default=Path("offload-files"), help="where files go")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "side_by_side.md")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    work = Work(args.model, args.batch_size, args.seq_len, args.micro_batches, args.clipping)
    if args.worker:
        serve(args.worker, work, args.nvme_path)
        return
    if args.deepspeed_python is None:
        args.contenders = [name for name in args.contenders if not name.startswith("deepspeed")]
    args.nvme_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.nvme_path, prefix="side_by_side-") as workdir:
        try:
            run = measure_restarted if args.restart_workers else measure
            results = run(args, work, Path(workdir))
        except WorkerError as error:
            sys.exit(str(error))
        print(write_report(args, work, results, Path(workdir)))


if __name__ == "__main__":
    main()
