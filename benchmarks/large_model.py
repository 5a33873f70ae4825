"""Tokens per second and TFLOPS of a Llama-shaped model whose states are offloaded.

    python benchmarks/large_model.py --model 7b --placement host --batch-size 8 --seq-len 2048

FLOPs are counted as DESIGN's bound counts them: 8 per parameter and token with activation recomputation (a forward,
its repetition, and a backward of two), 6 without; attention scores are left out. Prints JSON, one object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from llama_model import SIZES, Llama  # noqa: E402

import offloadzero  # noqa: E402


def config(args: argparse.Namespace, nvme_path: str) -> dict[str, Any]:
    own: dict[str, Any] = {"placement": args.placement, "units": {"prefetch_units": args.prefetch_units}}
    if args.placement == "nvme":
        own["nvme_path"] = nvme_path
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": args.clipping,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "offloadzero": own,
    }


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def run(args: argparse.Namespace, nvme_path: str) -> dict[str, Any]:
    """Train `args.steps` steps and report medians of all but the first two."""
    settings = config(args, nvme_path)
    torch.manual_seed(0)
    size = SIZES[args.model]
    started_s = time.perf_counter()
    with offloadzero.zero.Init(config_dict_or_path=settings):
        model = Llama(size, checkpoint_activations=True)
    num_params = sum(param.numel() for param in model.parameters())
    engine = offloadzero.initialize(model=model, config=settings)[0]
    build_s = time.perf_counter() - started_s
    print(engine.memory_table(), file=sys.stderr, flush=True)
    generator = torch.Generator().manual_seed(0)
    step_s: list[float] = []
    waits: list[dict[str, float]] = []
    losses: list[float] = []
    for step in range(args.steps):
        start_s = time.perf_counter()
        for _ in range(args.accumulation):
            tokens = torch.randint(
                0, size.vocab_size, (args.batch_size, args.seq_len + 1), generator=generator
            )
            tokens = tokens.to(engine.device)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))  # waits for the device: the step's time is the device's
        step_s.append(time.perf_counter() - start_s)
        waits.append(engine.last_step_report().waits_s)
        print(f"step {step}: {step_s[-1]:.3f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    engine.close()
    tokens_per_step = args.batch_size * args.seq_len * args.accumulation
    median_s = statistics.median(step_s[2:])
    return {
        **vars(args),
        "device": device_name(),
        "torch": torch.__version__,
        "num_params": num_params,
        "reserved_bytes": engine.reserved_bytes(),
        "build_s": build_s,
        "median_step_s": median_s,
        "tokens_per_s": tokens_per_step / median_s,
        "tflops": 8 * num_params * tokens_per_step / median_s / 1e12,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "step_s": step_s,
        "waits_s": waits[-1],
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="7b")
    parser.add_argument("--placement", choices=("device", "host", "nvme"), default="host")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument("--prefetch-units", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--nvme-dir", default=".", help="where the files go (a folder of their own in it)")
    args = parser.parse_args()
    if args.steps < 3:
        parser.error("--steps: at least 3, the first two are left out")
    with tempfile.TemporaryDirectory(dir=args.nvme_dir, prefix="large-model-") as nvme_path:
        print(json.dumps(run(args, nvme_path), indent=1))


if __name__ == "__main__":
    main()
