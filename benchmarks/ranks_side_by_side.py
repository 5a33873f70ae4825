"""Step time and memory per rank of the same training on several ranks of this machine, side by side: PyTorch's DDP and
FSDP2, DeepSpeed and offloadzero at ZeRO's stage 3.

    python benchmarks/ranks_side_by_side.py --deepspeed-python /path/to/venv/bin/python

Every contender is a group of processes over gloo, one for each rank, with an equal part of the cores, and does steps
only on request (turns.py). All take the same global batches. Writes ranks_side_by_side.md.
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

import side_by_side  # noqa: E402
import turns  # noqa: E402
from side_by_side import PLACEMENTS, SEED, Work, build_model  # noqa: E402
from turns import Batches, Contender, Result, Trainer  # noqa: E402

CONTENDERS = (
    "torch-ddp",
    "fsdp2-none",
    "fsdp2-cpu",
    "deepspeed-none",
    "deepspeed-cpu",
    "deepspeed-nvme",
    "offloadzero-resident",
    "offloadzero-host",
    "offloadzero-nvme",
)
FRAMEWORKS = {"torch": "torch", "fsdp2": "torch", "deepspeed": "deepspeed", "offloadzero": "offloadzero"}


@dataclass(frozen=True)
class RanksWork(Work):
    """The work of every contender in one step; `batch_size` is that of all ranks together."""

    num_ranks: int
    reduce_dtype: str  # "bf16" or "fp32": in which gradients are added up over the ranks

    def options(self) -> list[str]:
        return [*super().options(), f"--ranks={self.num_ranks}", f"--reduce-dtype={self.reduce_dtype}"]

    def config(self) -> dict[str, Any]:
        """Return the JSON that DeepSpeed and offloadzero share."""
        return side_by_side.base_config(self) | {
            "train_micro_batch_size_per_gpu": self.batch_size // self.num_ranks,
            "communication_data_type": self.reduce_dtype,
        }


# ---------------------------------------------------------------------------------------------------------
# Contenders. They import inside themselves, so a worker loads only its own framework.


def ddp(work: RanksWork, _placement: str, _nvme_path: Path) -> Trainer:
    """Everything whole on every rank: bf16 weights and gradients, fp32 masters and moments."""
    import torch
    from plain_torch import PlainTrainer
    from torch.nn.parallel import DistributedDataParallel

    trainer = PlainTrainer(build_model(work), work.config())
    model = DistributedDataParallel(trainer.model)
    if work.reduce_dtype == "fp32":
        model.register_comm_hook(None, reduce_in_fp32)
    trainer.model = model

    def step(batches: Batches) -> torch.Tensor:
        for batch in batches:
            loss = trainer.backward(*batch, num_micro_batches=len(batches))
        trainer.update()
        return loss

    return Trainer(step)


def reduce_in_fp32(_state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """Add a bucket up in fp32, whatever its dtype: a hook of DistributedDataParallel."""
    import torch.distributed as dist

    values = bucket.buffer().float().div_(dist.get_world_size())
    work = dist.all_reduce(values, async_op=True)
    return work.get_future().then(lambda _: bucket.buffer().copy_(values))


def fsdp2(work: RanksWork, placement: str, _nvme_path: Path) -> Trainer:
    """A unit for each block and one for the rest, fp32 shards, computing in bf16."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    config = work.config()
    reduce_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[work.reduce_dtype]
    options = {
        "mesh": init_device_mesh("cpu", (work.num_ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype),
        # Pinned memory needs an accelerator.
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if placement == "cpu" else OffloadPolicy(),
    }
    model = build_model(work).bfloat16().float()  # rounded at the start as the others round
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"], fused=True)

    def step(batches: Batches) -> torch.Tensor:
        for batch in batches:
            loss: torch.Tensor = model(*batch)
            (loss / len(batches)).backward()
        if work.clipping > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clipping)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step)


def deepspeed(work: RanksWork, placement: str, nvme_path: Path) -> Trainer:
    return side_by_side.deepspeed_trainer(work, work.config(), placement, nvme_path)


def offloadzero(work: RanksWork, placement: str, nvme_path: Path) -> Trainer:
    return side_by_side.offloadzero_trainer(work, work.config(), placement, nvme_path)


def serve(name: str, work: RanksWork, nvme_path: Path) -> None:
    channel = turns.take_channel()
    import torch
    import torch.distributed as dist
    from gpt_model import Text

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    text = Text.load()
    generator = torch.Generator().manual_seed(SEED)
    framework, _, placement = name.partition("-")
    build = {"torch": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed, "offloadzero": offloadzero}[framework]
    dist.init_process_group("gloo")
    trainer = build(work, placement, nvme_path)
    rank, num_rows = dist.get_rank(), work.batch_size // work.num_ranks
    rows = slice(rank * num_rows, (rank + 1) * num_rows)

    def next_batches() -> Batches:
        """Return this rank's rows of the next global batches."""
        batches = [
            text.batch(batch_size=work.batch_size, seq_len=work.seq_len, generator=generator)
            for _ in range(work.micro_batches)
        ]
        return [(tokens[rows], targets[rows]) for tokens, targets in batches]

    package = FRAMEWORKS[framework]
    version = f"{package} {sys.modules[package].__version__}"
    turns.serve(channel, trainer, next_batches, version=version, begin_turn=dist.barrier)


# ---------------------------------------------------------------------------------------------------------
# The parent's side.


def environments(num_ranks: int) -> list[dict[str, str]]:
    """Return what a launcher would set for each rank."""
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(turns.free_port()),
        "DS_ACCELERATOR": "cpu",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def pairs() -> list[tuple[str, str]]:
    """Return whom each placement is compared with: DeepSpeed's equal one, and FSDP2 without and with its policy."""
    theirs = {
        "resident": ("deepspeed-none", "fsdp2-none"),
        "host": ("deepspeed-cpu", "fsdp2-cpu"),
        "nvme": ("deepspeed-nvme", "fsdp2-cpu"),
    }
    return [(f"offloadzero-{placement}", other) for placement in PLACEMENTS for other in theirs[placement]]


def report(
    args: argparse.Namespace, work: RanksWork, results: dict[str, Result], environment: list[str]
) -> str:
    shared = [
        f"{name} {result.shared_bytes / turns.MIB:.0f} MiB"
        for name, result in results.items()
        if result.shared_bytes >= turns.MIB
    ]
    return "\n".join(
        [
            "# Side by side on several ranks",
            "",
            f"{side_by_side.work_line(args, work)} {work.num_ranks} ranks over gloo, an equal part of the batch and "
            f"of the cores for each; gradients are added up in {work.reduce_dtype}. A step is as long as that of the "
            "slowest rank; *bound* is the CPU time of all ranks over the cores, for offloadzero the drive's time where "
            "that is longer; the resident set is that of the largest rank.",
            "",
            *environment,
            f"- command: `{turns.command_line(args)}`",
            "",
            turns.table(results, memory="peak RSS GiB per rank"),
            "",
            turns.ratios(results, pairs()),
            "",
            f"Of the resident sets in memory that processes share: {', '.join(shared) or 'nothing'}.",
            turns.agreement(results),
        ]
    )


def main() -> None:
    parser = turns.parser(__doc__, contenders=CONTENDERS, output="ranks_side_by_side.md")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reduce-dtype", choices=("bf16", "fp32"), default="bf16", help="of gradients' sums")
    args = parser.parse_args()
    if args.batch_size % args.ranks:
        parser.error(f"--batch-size {args.batch_size}: not a multiple of --ranks {args.ranks}")
    work = RanksWork(
        args.model,
        args.batch_size,
        args.seq_len,
        args.micro_batches,
        args.clipping,
        args.ranks,
        args.reduce_dtype,
    )
    if args.worker:
        serve(args.worker, work, args.nvme_path)
        return

    def start(name: str, workdir: Path) -> Contender:
        python = args.deepspeed_python if name.startswith("deepspeed") else sys.executable
        command = [python, __file__, *work.options()]
        return Contender(name, command, workdir, environments=environments(work.num_ranks))

    turns.run(args, start, lambda results, environment: report(args, work, results, environment))


if __name__ == "__main__":
    main()
