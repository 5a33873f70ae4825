"""LoRA over a base on NVMe, read in place or copied into swap files: time to the first step, bytes, losses.

python benchmarks/frozen_weights.py --directory /mnt/nvme [--turns 3]

A Llama of random weights is written there once. Each turn is a process of its own for each mode; before it the model's
files leave the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

import offloadzero

SIZE = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 20, "num_attention_heads": 12}
STEPS, TOKENS, MIB = 4, 64, 1 << 20


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(vocab_size=16000, **SIZE)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="400MB")


def forget_pages(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def moved_bytes() -> dict[str, int]:
    """Bytes that this process has had drives read and write so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


def run(mode: str, folder: Path, files: Path) -> dict[str, Any]:
    on_files = {"device": "nvme", "nvme_path": str(files)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": on_files, "offload_optimizer": on_files},
        "offloadzero": {"device": "cpu", "frozen_weights": mode, "budgets": {"device": "700MiB"}},
    }
    torch.manual_seed(0)
    begun_s, before = time.monotonic(), moved_bytes()
    with offloadzero.zero.Init(config_dict_or_path=config):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).train()
    loaded_s = time.monotonic()
    engine = offloadzero.initialize(model=model, config=config)[0]
    ready_s, at_start = time.monotonic(), moved_bytes()
    tokens = torch.arange(TOKENS).view(1, TOKENS)
    losses, ends_s = [], []
    for _ in range(STEPS):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        ends_s.append(time.monotonic())
    engine.close()
    after = moved_bytes()
    return {
        "mode": mode,
        "load_s": round(loaded_s - begun_s, 2),
        "initialize_s": round(ready_s - loaded_s, 2),
        "to_first_step_s": round(ends_s[0] - begun_s, 2),
        "step_s": [round(end - start, 2) for start, end in pairwise(ends_s)],
        "start_written_mib": (at_start["write_bytes"] - before["write_bytes"]) // MIB,
        "step_read_mib": (after["read_bytes"] - at_start["read_bytes"]) // STEPS // MIB,
        "step_written_mib": (after["write_bytes"] - at_start["write_bytes"]) // STEPS // MIB,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, required=True, help="on the drive: for the model and swap files"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--mode", choices=("copy", "in_place"), help="run this one here and now")
    args = parser.parse_args()
    folder, files = args.directory / "model", args.directory / "files"
    if args.mode:
        print(json.dumps(run(args.mode, folder, files)), flush=True)
        return
    if not (folder / "config.json").exists():
        make_model(folder)
    for _ in range(args.turns):
        for mode in ("copy", "in_place"):
            forget_pages(folder)
            command = [sys.executable, __file__, "--directory", str(args.directory), "--mode", mode]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
