"""Tokens per second and TFLOPS of a Llama-shaped model whose states are offloaded, and the bound of its step.

    python benchmarks/large_model.py --model 7b --placement host --batch-size 8 --seq-len 2048
    python benchmarks/large_model.py --parameters 3B --placement auto --device-budget 40GiB --clipping 0
    python benchmarks/large_model.py --parameters 20M --placement nvme --device cpu

FLOPs are counted as DESIGN's bound counts them: 8 per parameter and token with activation recomputation (a forward,
its repetition, and a backward of two), 6 without; attention scores are left out. Prints JSON, one object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from arguments import read_count  # noqa: E402
from llama_model import SIZES, Llama, LlamaSize, size_with  # noqa: E402
from torch import nn  # noqa: E402

import offloadzero  # noqa: E402
from offloadzero.config.parse import read_num_bytes  # noqa: E402
from offloadzero.errors import BudgetError  # noqa: E402

NUM_WARMUP_STEPS = 2
TILE_ELEMENTS = 1 << 20
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
    if args.placement in ("nvme", "auto"):
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
    return SIZES[args.model] if args.parameters is None else size_with(args.parameters)


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
    """Train `args.steps` steps and report medians of all but the first two."""
    settings = config(args, directory)
    size = model_size(args)
    started_s = time.perf_counter()
    model = build_model(size, settings)
    num_params = sum(param.numel() for param in model.parameters())
    engine = offloadzero.initialize(model=model, config=settings)[0]
    build_s = time.perf_counter() - started_s
    print(engine.memory_table(), file=sys.stderr, flush=True)
    print(f"{num_params:,} parameters, ready after {build_s:.1f} s", file=sys.stderr, flush=True)
    generator = torch.Generator().manual_seed(0)
    step_s: list[float] = []
    losses: list[float] = []
    for step in range(args.steps):
        if not has_time_for_a_step(args, started_s, step_s):
            break
        start_s = time.perf_counter()
        for _ in range(args.accumulation):
            tokens = torch.randint(
                0, size.vocab_size, (args.batch_size, args.seq_len + 1), generator=generator
            )
            tokens = tokens.to(engine.device)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())  # waits for the device: the step's time is the device's
        step_s.append(time.perf_counter() - start_s)
        print(f"step {step}: {step_s[-1]:.3f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    memory_table, reserved_bytes = engine.memory_table(), engine.reserved_bytes()
    on_cuda = engine.device.type == "cuda"
    engine.close()
    tokens_per_step = args.batch_size * args.seq_len * args.accumulation
    median_s = statistics.median(step_s[NUM_WARMUP_STEPS:])
    return {
        **vars(args),
        "device": device_name(engine.device),
        "torch": torch.__version__,
        "num_params": num_params,
        "size": vars(size),
        "memory_table": memory_table.splitlines(),
        "reserved_bytes": reserved_bytes,
        "build_s": build_s,
        "median_step_s": median_s,
        "tokens_per_s": tokens_per_step / median_s,
        "flops_per_step": 8 * num_params * tokens_per_step,
        "tflops": 8 * num_params * tokens_per_step / median_s / 1e12,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
        "step_s": step_s,
        "losses": losses,
        **bound(Path(directory) / "run" / "steps.jsonl"),
    }


def has_time_for_a_step(args: argparse.Namespace, started_s: float, step_s: list[float]) -> bool:
    """Whether another step fits in the time. The least number of steps is done in any case, or there is no figure."""
    if args.time_limit_s is None or len(step_s) <= NUM_WARMUP_STEPS:
        return True
    return time.perf_counter() - started_s + step_s[-1] < args.time_limit_s


def bound(path: Path) -> dict[str, Any]:
    """Return seconds and bytes of each lane, waits, and the bound: medians of the timed steps."""
    steps = [json.loads(line) for line in path.read_text().splitlines()][NUM_WARMUP_STEPS:]

    def medians(key: str) -> dict[str, float]:
        names = dict.fromkeys(name for step in steps for name in step[key])
        return {name: statistics.median(step[key].get(name, 0) for step in steps) for name in names}

    return {
        "lanes_s": medians("lanes_s"),
        "lane_bytes": medians("bytes"),
        "lane_busy_s": medians("busy_s"),
        "waits_s": medians("waits_s"),
        "bound_s": statistics.median(step["bound_s"] for step in steps),
        "efficiency": statistics.median(step["efficiency"] for step in steps),
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
    parser.add_argument("--placement", choices=("device", "host", "nvme", "auto"), default="host")
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
    parser.add_argument("--time-limit-s", type=float, help="no further step that would end later than this")
    parser.add_argument("--nvme-dir", default=".", help="where the files go (a folder of their own in it)")
    args = parser.parse_args(given)
    if args.steps <= NUM_WARMUP_STEPS:
        parser.error(f"--steps: at least {NUM_WARMUP_STEPS + 1}, the first {NUM_WARMUP_STEPS} are left out")
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
            print(json.dumps(run(args, directory), indent=1))
        except BudgetError as error:
            sys.exit(f"large_model.py: error: {error}")


if __name__ == "__main__":
    main()
