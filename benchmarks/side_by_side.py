"""Step time and peak memory of the same training in plain PyTorch, DeepSpeed and offloadzero, side by side.

    python benchmarks/side_by_side.py --deepspeed-python /path/to/venv/bin/python

Every contender is a process of its own that does steps only on request (turns.py), so one works at a time and all see
the same drift of the machine: round after round, each contender does its steps. Writes side_by_side.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import turns  # noqa: E402
from turns import Batches, Contender, Result, Trainer  # noqa: E402

CONTENDERS = (
    "torch",
    "deepspeed-none",
    "deepspeed-cpu",
    "deepspeed-nvme",
    "offloadzero-resident",
    "offloadzero-host",
    "offloadzero-nvme",
)
PLACEMENTS = {"resident": "none", "host": "cpu", "nvme": "nvme"}  # DeepSpeed's names
SEED = 0


@dataclass(frozen=True)
class Work:
    """The work of every contender in one step."""

    model: str
    batch_size: int
    seq_len: int
    micro_batches: int
    clipping: float  # 0: no clipping

    def options(self) -> list[str]:
        """Return the command line's options that say this."""
        return [
            f"--model={self.model}",
            f"--batch-size={self.batch_size}",
            f"--seq-len={self.seq_len}",
            f"--micro-batches={self.micro_batches}",
            f"--clipping={self.clipping}",
        ]


# ---------------------------------------------------------------------------------------------------------
# Contenders. They import inside themselves, so a worker loads only its own framework.


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


def plain_torch(work: Work, _placement: str, _nvme_path: Path) -> Trainer:
    from plain_torch import PlainTrainer

    trainer = PlainTrainer(build_model(work), base_config(work))

    def step(batches: Batches) -> Any:
        for batch in batches:
            loss = trainer.backward(*batch, num_micro_batches=len(batches))
        trainer.update()
        return loss

    return Trainer(step)


def deepspeed(work: Work, placement: str, nvme_path: Path) -> Trainer:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(turns.free_port()))
    return deepspeed_trainer(work, base_config(work), placement, nvme_path)


def deepspeed_trainer(work: Work, base: dict[str, Any], placement: str, nvme_path: Path) -> Trainer:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as ds

    config = base | {"zero_optimization": zero_block(placement, nvme_path)}
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
        config["aio"] = {"block_size": turns.MIB, "queue_depth": 32, "intra_op_parallelism": 2}
    ds.init_distributed(dist_backend="gloo")
    with ds.zero.Init(config_dict_or_path=config):
        model = build_model(work)
    engine = ds.initialize(model=model, config=config)[0]
    return engine_trainer(engine)


def offloadzero(work: Work, placement: str, nvme_path: Path) -> Trainer:
    return offloadzero_trainer(work, base_config(work), placement, nvme_path)


def offloadzero_trainer(work: Work, base: dict[str, Any], placement: str, nvme_path: Path) -> Trainer:
    import torch

    import offloadzero as oz

    config = base | {"zero_optimization": zero_block(PLACEMENTS[placement], nvme_path)}
    config["offloadzero"] = {"observe": {"run_dir": str(nvme_path / turns.RUN_DIR)}}  # for the drive's time
    # Rounded at the start as the others round: without `dtype` the master would keep the fp32 initial weights.
    with oz.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = build_model(work)
    engine = oz.initialize(model=model, config=config)[0]
    return engine_trainer(engine)._replace(finish=engine.synchronize)


def engine_trainer(engine: Any) -> Trainer:
    def step(batches: Batches) -> Any:
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()  # updates at the last
        return loss.detach()

    return Trainer(step)


def serve(name: str, work: Work, nvme_path: Path) -> None:
    channel = turns.take_channel()
    import torch
    from gpt_model import Text

    torch.set_num_threads(os.cpu_count() or 1)
    text = Text.load()
    generator = torch.Generator().manual_seed(SEED)
    framework, _, placement = name.partition("-")
    build = {"torch": plain_torch, "deepspeed": deepspeed, "offloadzero": offloadzero}[framework]
    trainer = build(work, placement, nvme_path)

    def next_batches() -> Batches:
        return [
            text.batch(batch_size=work.batch_size, seq_len=work.seq_len, generator=generator)
            for _ in range(work.micro_batches)
        ]

    turns.serve(channel, trainer, next_batches, version=f"{framework} {sys.modules[framework].__version__}")


# ---------------------------------------------------------------------------------------------------------
# The report.


def work_line(args: argparse.Namespace, work: Work) -> str:
    """Return what a step is, and how many of them were measured."""
    from gpt_model import SIZES, num_params

    count = num_params(SIZES[work.model], seq_len=work.seq_len)
    clipping = f"clipping {work.clipping}" if work.clipping else "no clipping"
    return (
        f"{work.model} GPT ({count / 1e6:.0f}M parameters), {work.batch_size} x {work.seq_len} tokens, "
        f"bf16 weights, fp32 master, AdamW, {clipping}, CPU as the device, "
        f"micro batches per step: {work.micro_batches}; "
        f"{args.rounds} interleaved rounds of {args.steps} steps after {args.warmup} warm-up steps."
    )


def main() -> None:
    args = turns.parser(__doc__, contenders=CONTENDERS, output="side_by_side.md").parse_args()
    work = Work(args.model, args.batch_size, args.seq_len, args.micro_batches, args.clipping)
    if args.worker:
        serve(args.worker, work, args.nvme_path)
        return

    def start(name: str, workdir: Path) -> Contender:
        python = args.deepspeed_python if name.startswith("deepspeed") else sys.executable
        return Contender(name, [python, __file__, *work.options()], workdir, environments=[{}])

    def report(results: dict[str, Result], environment: list[str]) -> str:
        pairs = [(f"offloadzero-{ours}", f"deepspeed-{theirs}") for ours, theirs in PLACEMENTS.items()]
        return "\n".join(
            [
                "# Side by side",
                "",
                work_line(args, work),
                "",
                *environment,
                f"- command: `{turns.command_line(args)}`",
                "",
                turns.table(results, memory="peak RSS GiB"),
                "",
                turns.ratios(results, pairs),
                "",
                turns.agreement(results),
            ]
        )

    turns.run(args, start, report)


if __name__ == "__main__":
    main()
