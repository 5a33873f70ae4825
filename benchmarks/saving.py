"""Host memory that saving takes above training: a model in shards, adapters, a checkpoint of the Trainer.

python benchmarks/saving.py --model DIR --directory /mnt/nvme --part shards|trainer|adapters

DIR is a folder of `save_pretrained` in bf16. Everything lives on NVMe, the states in the compact layout. Peaks are
VmHWM of /proc/self/status, reset by /proc/self/clear_refs before training and before each save. What was saved is read
again, and must have the bits of the model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors import safe_open

import offloadzero
from offloadzero.integrations.transformers import Trainer

TOKENS, GIB = 64, 1 << 30
IDS = torch.arange(TOKENS).view(1, TOKENS)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_gib() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) * 1024 / GIB


def configuration(files: Path, **own: Any) -> dict[str, Any]:
    on_files = {"device": "nvme", "nvme_path": str(files)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": on_files, "offload_optimizer": on_files},
        "offloadzero": {"device": "cpu", "budgets": {"device": "1500MiB"}, **own},
    }


def offloaded(folder: Path, files: Path, *, lora: bool) -> tuple[Any, Any]:
    config = configuration(files, **({} if lora else {"state_layout": "compact"}))
    torch.manual_seed(0)
    with offloadzero.zero.Init(config_dict_or_path=config):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if lora:
        adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    trained = [param for param in model.parameters() if param.requires_grad]
    return offloadzero.offload(model, torch.optim.AdamW(trained, lr=1e-5), config)


def steps(model: Any, optimizer: Any, number: int) -> list[float]:
    taken = []
    for _ in range(number):
        begun_s = time.monotonic()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        taken.append(round(time.monotonic() - begun_s, 1))
    return taken


def differing(model: Any, folder: Path) -> list[str]:
    """The saved tensors whose bits are not the model's."""
    params = {name.replace("base_model.model.", ""): param for name, param in model.named_parameters()}
    odd, seen = [], 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                own = name.replace("base_model.model.", "")
                of_adapter = own.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")
                param = params.get(own, params.get(of_adapter))
                seen += 1
                if param is None or not torch.equal(param.detach().clone(), file.get_tensor(name)):
                    odd.append(name)
    assert seen
    return odd


def measured(save: Callable[[], object], training_gib: float) -> dict[str, float]:
    reset_peak()
    begun_s, before_gib = time.monotonic(), peak_gib()
    save()
    return {
        "seconds": round(time.monotonic() - begun_s, 1),
        "begun_gib": round(before_gib, 2),
        "peak_gib": round(peak_gib(), 2),
        "above_training_gib": round(peak_gib() - training_gib, 2),
    }


def by_loop(folder: Path, directory: Path, *, lora: bool) -> dict[str, Any]:
    model, optimizer = offloaded(folder, directory / "files", lora=lora)
    steps(model, optimizer, 1)
    reset_peak()
    taken = steps(model, optimizer, 2)
    training_gib, saved = peak_gib(), directory / "saved"
    found: dict[str, Any] = {"step_s": taken, "training_gib": round(training_gib, 2)}
    save = partial(model.save_pretrained, saved, max_shard_size="200MB")
    found["save"] = measured(save, training_gib)
    found["differing"] = differing(model, saved)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits.clone()
    optimizer.close()
    del model, optimizer, save
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder if lora else saved, dtype="auto").eval()
    if lora:
        loaded = peft.PeftModel.from_pretrained(loaded, saved, autocast_adapter_dtype=False)  # else fp32
    with torch.no_grad():
        found["logits_equal"] = torch.equal(loaded(input_ids=IDS).logits, logits)
    return found


def by_trainer(folder: Path, directory: Path) -> dict[str, Any]:
    model, optimizer = offloaded(folder, directory / "files", lora=False)
    found: dict[str, Any] = {}
    training: list[float] = []

    class Measured(Trainer):
        def _save_checkpoint(self, *args: Any) -> None:
            optimizer.synchronize()
            training.append(peak_gib())
            save = super()._save_checkpoint
            found["save"] = measured(lambda: save(*args), training[0])

        def training_step(self, *args: Any, **keys: Any) -> Any:
            if self.state.global_step == 1:
                reset_peak()
            return super().training_step(*args, **keys)

    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 3
    arguments = transformers.TrainingArguments(
        output_dir=str(directory / "saved"), per_device_train_batch_size=1, max_steps=3, save_steps=3,
        use_cpu=True, report_to=[], disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    Measured(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None)).train()
    checkpoint = directory / "saved" / "checkpoint-3"
    found["training_gib"] = round(training[0], 2)
    found["files_gib"] = round(sum(f.stat().st_size for f in checkpoint.rglob("*") if f.is_file()) / GIB, 2)
    found["differing"] = differing(model, checkpoint)
    optimizer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--directory", type=Path, required=True, help="on the drive; what is written is removed"
    )
    parser.add_argument("--part", choices=("shards", "adapters", "trainer"), required=True)
    args = parser.parse_args()
    directory = args.directory / "saving"
    (directory / "files").mkdir(parents=True)
    try:
        if args.part == "trainer":
            found = by_trainer(args.model, directory)
        else:
            found = by_loop(args.model, directory, lora=args.part == "adapters")
        print(json.dumps({"part": args.part, **found}), flush=True)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
