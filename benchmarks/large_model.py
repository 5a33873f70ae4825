"""Tokens per second and TFLOPS of a Llama-shaped model whose states are offloaded, and the bound of its step.

    python benchmarks/large_model.py --model 7b --placement host --batch-size 8 --seq-len 2048
    python benchmarks/large_model.py --parameters 3B --fit --placement auto --device-budget 40GiB --clipping 0
    python benchmarks/large_model.py --parameters 20M --placement nvme --device cpu
    python benchmarks/large_model.py --model 7b --placement none

FLOPs are counted as DESIGN's bound counts them: 8 per parameter and token with activation recomputation (a forward,
its repetition, and a backward of two), 6 without; attention scores are left out. `--placement none` is the computation
alone: weights resident in plain torch, gradients dropped, no update. Prints JSON: a line with the figures as soon as
the steps are done, and one with all of it when the engine is closed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import fitting  # noqa: E402
import torch  # noqa: E402
from arguments import read_count  # noqa: E402
from llama_model import SIZES, Llama, LlamaSize, size_with  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import offloadzero  # noqa: E402
from offloadzero.config.readers import read_num_bytes  # noqa: E402
from offloadzero.errors import BudgetError  # noqa: E402
from offloadzero.memory.device import find_device  # noqa: E402

TILE_ELEMENTS = 1 << 20
FORECAST_S = 45.0  # that are waited for it, when the steps have run
BYTES_PER_PARAM = {"fp32": 12.0, "compact": 5.2}  # of states, read and written once per step
ZERO_DEVICES = {"host": "cpu", "nvme": "nvme"}


def config(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Return the JSON of a run whose files go to `directory`."""
    own: dict[str, Any] = {
        "units": {"prefetch_units": args.prefetch_units},
        "state_layout": args.state_layout,
        "observe": {"run_dir": str(Path(directory) / "run")},
    }
    if args.device is not None:
        own["device"] = args.device
    if args.placement == "nvme":
        own["nvme_path"] = directory
    budgets = {"device": args.device_budget, "host": args.host_budget}
    own["budgets"] = {tier: budget for tier, budget in budgets.items() if budget is not None}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": args.clipping,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "offloadzero": own,
    }
    if args.host_update_ratio < 1:
        home = {"device": ZERO_DEVICES[args.placement]}
        optimizer = {**home, "ratio": args.host_update_ratio}
        settings["zero_optimization"] = {"stage": 3, "offload_param": home, "offload_optimizer": optimizer}
    else:
        own["placement"] = args.placement
    return settings


def model_size(args: argparse.Namespace) -> LlamaSize:
    size = SIZES[args.model] if args.parameters is None else size_with(args.parameters)
    return size if args.layers is None else replace(size, num_layers=min(args.layers, size.num_layers))


@contextlib.contextmanager
def quick_weights() -> Iterator[None]:
    """Make bf16 weights that repeat one tile of random values: drawing billions takes longer than all steps."""
    tile = torch.empty(TILE_ELEMENTS, dtype=torch.bfloat16).normal_(
        0, 0.02, generator=torch.Generator().manual_seed(0)
    )

    def reset(module: Any) -> None:
        flat = module.weight.data.view(-1)
        for start in range(0, flat.numel(), TILE_ELEMENTS):
            part = flat[start : start + TILE_ELEMENTS]
            part.copy_(tile[: part.numel()])

    originals = [(cls, cls.reset_parameters) for cls in (nn.Linear, nn.Embedding)]
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for cls, _ in originals:
            cls.reset_parameters = reset  # type: ignore[method-assign]
        yield
    finally:
        torch.set_default_dtype(dtype)
        for cls, original in originals:
            cls.reset_parameters = original  # type: ignore[method-assign]


def build_model(size: LlamaSize, settings: dict[str, Any]) -> nn.Module:
    with quick_weights(), offloadzero.zero.Init(config_dict_or_path=settings):
        return Llama(size, checkpoint_activations=True)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def run(args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Train `args.steps` steps and report medians of all but the first `args.warmup`."""
    started_s = time.perf_counter()
    make = plain if args.placement == "none" else offloaded
    with forecast(args, directory) as planned, make(args, directory) as (step, found):
        found["build_s"] = time.perf_counter() - started_s
        print(f"{found['num_params']:,} parameters, ready after {found['build_s']:.1f} s", file=sys.stderr)
        generator = torch.Generator().manual_seed(0)
        step_s: list[float] = []
        losses: list[float] = []
        for number in range(args.steps):
            if not has_time_for_a_step(args, step_s):
                break
            batches = [draw(args, found["size"]["vocab_size"], generator) for _ in range(args.accumulation)]
            start_s = time.perf_counter()
            losses.append(step(batches).item())  # waits for the device: the step's time is the device's
            step_s.append(time.perf_counter() - start_s)
            print(f"step {number}: {step_s[-1]:.3f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
        found |= {
            "step_s": step_s,
            "losses": losses,
            "torch": torch.__version__,
            **rates(args, found, step_s),
        }
        print(
            json.dumps(found), flush=True
        )  # to close an engine of many gigabytes may take longer than is left
    steps_file = Path(directory) / "run" / "steps.jsonl"
    own = own_figures(steps_file, args.warmup) if steps_file.exists() else {}
    return {**vars(args), **found, **planned, **own}


def rates(args: argparse.Namespace, found: dict[str, Any], step_s: Sequence[float]) -> dict[str, Any]:
    num_tokens = args.batch_size * args.seq_len * args.accumulation
    flops, median_s = 8 * found["num_params"] * num_tokens, statistics.median(step_s[args.warmup :])
    return {
        "median_step_s": median_s,
        "tokens_per_s": num_tokens / median_s,
        "flops_per_step": flops,
        "tflops": flops / median_s / 1e12,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
    }


def fit(args: argparse.Namespace, directory: str) -> None:
    """Make the model as large as the memory, and in `--drive-time-s` the drive, allow."""
    budgets = fitting.budgets(Path(directory), on_cuda=find_device(args.device).free_bytes() is not None)
    args.device_budget, args.host_budget = (
        args.device_budget or budgets["device"],
        args.host_budget or budgets["host"],
    )
    if args.drive_time_s is not None:
        read_gbps, write_gbps = fitting.drive_gbps(Path(directory))
        in_time = fitting.largest_in_time(
            bytes_per_param=BYTES_PER_PARAM[args.state_layout],
            read_gbps=read_gbps,
            write_gbps=write_gbps,
            num_steps=args.warmup + 1,
            seconds=args.drive_time_s,
        )
        args.parameters = min(args.parameters, in_time)
        args.drive_gbps = read_gbps, write_gbps
    settings = config(args, directory)
    settings["offloadzero"]["budgets"]["nvme"] = budgets["nvme"]
    args.parameters = fitting.largest_that_fits(settings, at_most=args.parameters)


def draw(args: argparse.Namespace, vocab_size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, vocab_size, (args.batch_size, args.seq_len + 1), generator=generator)


@contextlib.contextmanager
def forecast(args: argparse.Namespace, directory: str) -> Iterator[dict[str, Any]]:
    """Have `offloadzero plan` forecast the step meanwhile, by `--hardware`; afterwards its answer is there."""
    found: dict[str, Any] = {}
    if args.hardware is None:
        yield found
        return
    size, folder = model_size(args), Path(directory)
    settings = config(args, directory)
    settings["offloadzero"]["activation_checkpoints"] = {"tier": "device"}  # the model has torch's, in itself
    hardware = json.loads(args.hardware.read_text())
    if args.drive_gbps is not None:
        read_gbps, write_gbps = args.drive_gbps
        size_gb = shutil.disk_usage(directory).free / 1e9
        hardware["drives"] = {
            "number": 1,
            "size_gb": size_gb,
            "read_gb_per_s": read_gbps,
            "write_gb_per_s": write_gbps,
        }
    for name, value in (("config.json", settings), ("hardware.json", hardware)):
        (folder / name).write_text(json.dumps(value))
    shape = (
        size.width,
        size.num_layers,
        size.num_heads,
        size.vocab_size,
        size.hidden_width,
        size.num_kv_heads,
    )
    command = [sys.executable, "-m", "offloadzero", "plan", "--model", f"llama:{'/'.join(map(str, shape))}"]
    command += ["--config", str(folder / "config.json"), "--hardware", str(folder / "hardware.json")]
    command += ["--sequence", str(args.seq_len), "--json", str(folder / "plan.json")]
    with (folder / "plan.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            yield found
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(FORECAST_S)
        finally:
            process.kill()
            process.wait()
    plan = folder / "plan.json"
    answer = json.loads(plan.read_text())["forecast"] if plan.exists() else None
    found["forecast"] = answer or {"problem": (folder / "plan.txt").read_text()[-1000:]}


# Takes the tokens of a step's micro batches, returns the loss of the last one.
Step = Callable[[Sequence[Tensor]], Tensor]
Made = Iterator[tuple[Step, dict[str, Any]]]  # with the figures known so far, to which more come at the end


@contextlib.contextmanager
def offloaded(args: argparse.Namespace, directory: str) -> Made:
    """Offload a model; at the end it is closed."""
    settings = config(args, directory)
    size = model_size(args)
    model = build_model(size, settings)
    num_params = sum(param.numel() for param in model.parameters())
    engine = offloadzero.initialize(model=model, config=settings)[0]
    print(engine.memory_table(), file=sys.stderr, flush=True)

    def step(batches: Sequence[Tensor]) -> Tensor:
        for tokens in batches:
            there = tokens.to(engine.device)
            loss: Tensor = engine(there[:, :-1], there[:, 1:])
            engine.backward(loss)
            engine.step()
        return loss

    found = {"device": device_name(engine.device), "num_params": num_params, "size": vars(size)}
    yield step, found
    found["memory_table"] = engine.memory_table().splitlines()
    found["reserved_bytes"] = engine.reserved_bytes()
    engine.close()


@contextlib.contextmanager
def plain(args: argparse.Namespace, _: str) -> Made:
    """Keep the weights on the device, and drop each gradient as it is complete: what the computation takes alone."""
    size, device = model_size(args), find_device(args.device).torch_device
    with quick_weights(), device:
        model = Llama(size, checkpoint_activations=True)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda complete: setattr(complete, "grad", None))

    def step(batches: Sequence[Tensor]) -> Tensor:
        for tokens in batches:
            there = tokens.to(device)
            loss: Tensor = model(there[:, :-1], there[:, 1:])
            loss.backward()
        return loss

    num_params = sum(param.numel() for param in model.parameters())
    yield step, {"device": device_name(device), "num_params": num_params, "size": vars(size)}


def has_time_for_a_step(args: argparse.Namespace, step_s: Sequence[float]) -> bool:
    """Whether another step fits in the time. The least number of steps is done in any case, or there is no figure."""
    if args.end_s is None or len(step_s) <= args.warmup:
        return True
    return time.monotonic() + step_s[-1] < args.end_s


def own_figures(path: Path, num_warmup: int) -> dict[str, Any]:
    """Return seconds and bytes of each lane, waits, and the bound by the run's own record: medians of timed steps."""
    steps = [json.loads(line) for line in path.read_text().splitlines()][num_warmup:]

    def medians(key: str) -> dict[str, float]:
        names = dict.fromkeys(name for step in steps for name in step[key])
        return {name: statistics.median(step[key].get(name, 0) for step in steps) for name in names}

    return {
        "lanes_s": medians("lanes_s"),
        "lane_bytes": medians("bytes"),
        "lane_busy_s": medians("busy_s"),
        "waits_s": medians("waits_s"),
        "own_bound_s": statistics.median(step["bound_s"] for step in steps),
        "own_efficiency": statistics.median(step["efficiency"] for step in steps),
    }


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    num_bytes = lambda text: read_num_bytes("bytes", text)  # noqa: E731
    parser.add_argument("--model", choices=SIZES, default="7b")
    parser.add_argument(
        "--parameters", type=read_count, help="the largest size with at most so many: 20M, 7.2B"
    )
    parser.add_argument("--layers", type=int, help="fewer blocks than the size has")
    parser.add_argument(
        "--fit", action="store_true", help="of the family of --parameters the largest that the memory allows"
    )
    parser.add_argument("--placement", choices=("device", "host", "nvme", "auto", "none"), default="host")
    parser.add_argument("--state-layout", choices=("fp32", "compact"), default="fp32")
    parser.add_argument(
        "--host-update-ratio",
        type=float,
        default=1.0,
        help="share of the states kept off the device (host, nvme)",
    )
    parser.add_argument("--device-budget", type=num_bytes, help="bytes of the device for states: 40GiB")
    parser.add_argument("--host-budget", type=num_bytes, help="bytes of host memory")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; cuda if there is one")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument("--prefetch-units", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--end-s", type=float, help="no further step that ends later, on time.monotonic()")
    parser.add_argument(
        "--drive-time-s", type=float, help="with --fit: the drive's share of building and steps"
    )
    parser.add_argument("--hardware", type=Path, help="a file by which `offloadzero plan` forecasts the step")
    parser.add_argument("--nvme-dir", default=".", help="where the files go (a folder of their own in it)")
    parser.set_defaults(drive_gbps=None)
    args = parser.parse_args(given)
    if args.steps <= args.warmup:
        parser.error(f"--steps: at least {args.warmup + 1}, the first {args.warmup} are left out")
    if args.fit and args.parameters is None:
        parser.error("--fit: with --parameters, the most that it may be")
    try:
        model_size(args)
    except ValueError as error:
        parser.error(f"--parameters: {error}")
    if args.host_update_ratio < 1 and args.placement not in ZERO_DEVICES:
        parser.error(f"--host-update-ratio: with --placement {' or '.join(ZERO_DEVICES)}")
    return args


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(dir=args.nvme_dir, prefix="large-model-") as directory:
        try:
            if args.fit:
                fit(args, directory)
            print(json.dumps(run(args, directory), default=str))
        except BudgetError as error:
            sys.exit(f"large_model.py: error: {error}")


if __name__ == "__main__":
    main()
