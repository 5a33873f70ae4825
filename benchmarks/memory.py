"""Host memory of training a GPT under `zero.Init`: peak resident set above a bare torch, as JSON.

    python benchmarks/memory.py --placement nvme

The batch is small and activations are recomputed, so the rest is the states, the leases and the engine.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

PLACEMENTS = {"resident": "none", "host": "cpu", "nvme": "nvme"}


def config(args: argparse.Namespace, nvme_path: str) -> dict[str, Any]:
    home = {"device": PLACEMENTS[args.placement]}
    if args.placement == "nvme":
        home["nvme_path"] = nvme_path
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_clipping": args.clipping,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": dict(home), "offload_optimizer": dict(home)},
        "offloadzero": {"budgets": {"host": args.host_budget}} if args.host_budget else {},
    }


def bare_torch() -> dict[str, Any]:
    """Return the peak of an interpreter that only imported torch."""
    import torch

    return {"peak_rss_bytes": peak_rss_bytes(), "torch": torch.__version__}


def train(args: argparse.Namespace, nvme_path: str) -> dict[str, Any]:
    """Build, train `args.steps` steps, and report peaks, losses and seconds per step."""
    import torch
    from gpt_model import GPT, SIZES, Text, num_params

    import offloadzero

    torch.manual_seed(0)
    settings = config(args, nvme_path)
    size = SIZES[args.model]
    with offloadzero.zero.Init(config_dict_or_path=settings):
        model = GPT(size, seq_len=args.seq_len, checkpoint_activations=True)
    engine = offloadzero.initialize(model=model, config=settings)[0]
    built_rss_bytes = peak_rss_bytes()
    print(engine.memory_table(), file=sys.stderr)

    text = Text(b"the states live elsewhere. " * 4096)
    generator = torch.Generator().manual_seed(0)
    losses, step_s = [], []
    for _ in range(args.steps):
        tokens, targets = text.batch(batch_size=args.batch_size, seq_len=args.seq_len, generator=generator)
        start = time.perf_counter()
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        step_s.append(time.perf_counter() - start)
    engine.close()
    return {
        "reserved_bytes": engine.reserved_bytes(),
        "num_params": num_params(size, seq_len=args.seq_len),
        "built_rss_bytes": built_rss_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
        "losses": losses,
        "step_s": step_s,
    }


def peak_rss_bytes() -> int:
    """Return VmHWM of this process."""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise KeyError("VmHWM")
    return int(match[1]) * 1024


def in_subprocess(*arguments: str) -> dict[str, Any]:
    """Run this script as a worker: its last line of output is its result."""
    output = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def measure(arguments: list[str], nvme_path: Path) -> dict[str, Any]:
    bare = in_subprocess("--worker", "bare", *arguments)
    nvme_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=nvme_path, prefix="memory-") as workdir:
        trained = in_subprocess("--worker", "train", *arguments, "--nvme-path", workdir)
    above_bytes = trained["peak_rss_bytes"] - bare["peak_rss_bytes"]
    return {
        "peak_above_bare_bytes": above_bytes,
        "bytes_per_param": round(above_bytes / trained["num_params"], 3),
        "bare_rss_bytes": bare["peak_rss_bytes"],
        "torch": bare["torch"],
        **trained,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--placement", choices=PLACEMENTS, default="nvme")
    parser.add_argument("--model", default="400m", help="a size of examples/gpt_model.py")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--clipping", type=float, default=0.0, help="gradient_clipping; 0 is off")
    parser.add_argument("--host-budget", help='host budget such as "1GiB" (default: the planner\'s choice)')
    parser.add_argument("--nvme-path", type=Path, default=Path("offload-files"))
    parser.add_argument("--worker", choices=("bare", "train"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.worker == "bare":
        print(json.dumps(bare_torch()))
    elif args.worker == "train":
        print(json.dumps(train(args, str(args.nvme_path))))
    else:
        settings = {key: value for key, value in vars(args).items() if key not in ("worker", "nvme_path")}
        print(json.dumps(settings | measure(sys.argv[1:], args.nvme_path), indent=2))


if __name__ == "__main__":
    main()
