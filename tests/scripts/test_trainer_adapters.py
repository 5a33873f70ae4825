"""What the Trainer of transformers resumes: the adapters that are trained, or an error; a model in several files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.errors import CheckpointError, ConfigError, StateError

transformers = pytest.importorskip("transformers")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "offloadzero": {"device": "cpu", "placement": "host"},
}


def train(
    directory: Path,
    num_steps: int,
    *,
    collective: bool = True,
    resumes: bool = False,
    lora: bool = True,
    base: Path | None = None,
) -> Any:
    """Train adapters of a new model, or all of it, with a checkpoint at the second step. Returns what was trained.

    `base`: a folder, whose model gets more embeddings, drawn anew each time.
    """
    from offloadzero.integrations.transformers import CollectiveSaving

    bases: tuple[type, ...] = (CollectiveSaving, transformers.Trainer)
    kind = type("Trainer", bases if collective else bases[1:], {"max_shard_size": "20KB"})
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=96
    )
    model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
    if base is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        torch.seed()
        model.resize_token_embeddings(100)
        torch.manual_seed(0)
    if lora:
        peft = pytest.importorskip("peft")  # takes seconds: not where tests are collected
        adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = offloadzero.offload(model, torch.optim.AdamW(trained, lr=1e-2), CONFIG)
    rows = [{"input_ids": list(range(n, n + 12)), "labels": list(range(n, n + 12))} for n in range(16)]
    args = transformers.TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, max_steps=num_steps, save_steps=2,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    try:
        trainer = kind(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resumes)
        return {
            name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad
        }
    finally:
        optimizer.close()


def test_a_run_that_is_resumed_has_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "resumed", 2)
    resumed = train(tmp_path / "resumed", 4, resumes=True)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], value) for name, value in resumed.items())


def test_a_resumed_run_has_the_embeddings_that_were_resized(tmp_path: Path) -> None:
    """The new ones are in no base, and frozen: PEFT saves them beside the adapters."""
    from safetensors.torch import load_file

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=96))
    base.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    train(tmp_path, 2, base=tmp_path / "base")
    train(tmp_path, 4, base=tmp_path / "base", resumes=True)
    saved = [load_file(tmp_path / f"checkpoint-{n}" / "adapter_model.safetensors") for n in (2, 4)]
    embeddings = [name for name in saved[0] if "lora" not in name]
    assert len(embeddings) == 2
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in embeddings)


def test_a_checkpoint_that_a_kill_has_cut_says_which_folder_to_remove(tmp_path: Path) -> None:
    train(tmp_path, 2)
    largest = max((tmp_path / "checkpoint-2" / "offloadzero").rglob("*.safetensors"), key=os.path.getsize)
    os.truncate(largest, os.path.getsize(largest) // 2)
    with pytest.raises(CheckpointError, match=rf"{largest.name}.*Remove .*checkpoint-2, and resume from"):
        train(tmp_path, 4, resumes=True)


def test_a_checkpoint_without_states_is_refused_before_adapters_are_replaced(tmp_path: Path) -> None:
    """It was an error of the first step, and said that adapters had been replaced."""
    train(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoint-2" / "offloadzero")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2 has no folder offloadzero: another Trainer has saved"
    ):
        train(tmp_path, 4, resumes=True)


def test_a_model_is_saved_in_files_of_a_size_and_resumed_from_them(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4, lora=False)
    train(tmp_path / "resumed", 2, lora=False)
    files = [*(tmp_path / "resumed" / "checkpoint-2").glob("model-*.safetensors")]
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    resumed = train(tmp_path / "resumed", 4, resumes=True, lora=False)
    assert all(torch.equal(whole[name], value) for name, value in resumed.items())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "resumed" / "checkpoint-4", dtype="auto"
    )
    assert all(torch.equal(whole[name], value) for name, value in loaded.named_parameters())


def test_adapters_that_are_put_in_the_place_of_trained_ones_are_an_error(tmp_path: Path) -> None:
    """The Trainer by itself has PEFT load the checkpoint's, in fp32: they would not be trained."""
    train(tmp_path, 2, collective=False)
    with pytest.raises(StateError, match=r"lora_A.*replaced by another parameter after offload\(\)"):
        train(tmp_path, 4, collective=False, resumes=True)


def trainer_of(
    directory: Path, config: Any, optimizer: Any = None, *, by_position: bool = False, **given: Any
) -> Any:
    """A Trainer that offloads a new model, and has trained it for four steps."""
    from offloadzero.integrations.transformers import Trainer

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=96
    )
    model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
    rows = [{"input_ids": list(range(n, n + 12)), "labels": list(range(n, n + 12))} for n in range(16)]
    args = transformers.TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, max_steps=4, learning_rate=1e-2,
        weight_decay=0.1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True, **given,
    )  # fmt: skip
    made = None if optimizer is None else optimizer(model)
    keys: dict[str, Any] = {"offload_config": config}
    if config is None:
        model, made = offloadzero.offload(model, made, CONFIG)
        keys = {}
    if by_position:
        trainer = Trainer(model, args, None, rows, *[None] * 6, (made, None), **keys)
    else:
        trainer = Trainer(model=model, args=args, train_dataset=rows, optimizers=(made, None), **keys)
    trainer.train()
    return trainer


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    found = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    trainer.optimizer.optimizer.close()
    return found


def as_the_trainer_makes_it(model: Any) -> torch.optim.Optimizer:
    """Norms have no weight decay."""
    norms = [param for name, param in model.named_parameters() if "norm" in name]
    others = [param for name, param in model.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("by", ["the Trainer", "the script", "the script, by position"])
def test_a_trainer_that_offloads_has_the_bits_of_one_that_gets_what_is_offloaded(
    by: str, tmp_path: Path
) -> None:
    def of_the_script(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.9))

    optimizer = None if by == "the Trainer" else of_the_script
    offloading = weights_of(trainer_of(tmp_path, CONFIG, optimizer, by_position="position" in by))
    given = weights_of(trainer_of(tmp_path, None, optimizer or as_the_trainer_makes_it))
    assert all(torch.equal(given[name], value) for name, value in offloading.items())


def test_activation_checkpoints_take_the_place_of_the_trainers(tmp_path: Path) -> None:
    plain = weights_of(trainer_of(tmp_path, CONFIG))
    own = {**CONFIG, "offloadzero": {**CONFIG["offloadzero"], "activation_checkpoints": {}}}  # type: ignore[dict-item]
    trainer = trainer_of(tmp_path, own, gradient_checkpointing=True)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    assert all(torch.equal(plain[name], value) for name, value in weights_of(trainer).items())
    trainer = trainer_of(tmp_path, CONFIG, gradient_checkpointing=True)
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    assert all(torch.equal(plain[name], value) for name, value in weights_of(trainer).items())


def test_a_model_that_the_trainer_makes_itself_is_not_offloaded(tmp_path: Path) -> None:
    from offloadzero.integrations.transformers import Trainer

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match="model_init"):
        Trainer(args=args, model_init=lambda: torch.nn.Linear(2, 2), offload_config=CONFIG)


def test_a_trainer_that_does_not_see_the_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    from offloadzero.integrations.transformers import CollectiveSaving

    class Trainer(CollectiveSaving, transformers.Trainer):
        pass

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=False, report_to=[])
    monkeypatch.setattr(type(args), "world_size", 1)
    with pytest.raises(ConfigError, match=r"TrainingArguments\.world_size.*use_cpu=True"):
        Trainer(model=torch.nn.Linear(2, 2), args=args)


def test_several_gpus_in_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer would put nn.DataParallel around the model."""
    from offloadzero.integrations.transformers import CollectiveSaving

    class Trainer(CollectiveSaving, transformers.Trainer):
        pass

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    monkeypatch.setattr(type(args), "n_gpu", 2)
    with pytest.raises(ConfigError, match=r"TrainingArguments\.n_gpu = 2.*torchrun.*CUDA_VISIBLE_DEVICES"):
        Trainer(model=torch.nn.Linear(2, 2), args=args)


@pytest.mark.parametrize("last", ["model.safetensors", "model.safetensors.index.json"])
def test_of_two_models_in_a_folder_the_last_one_stays(last: str, tmp_path: Path) -> None:
    """A save in shards into the folder of an earlier run: from_pretrained would take the one file."""
    from offloadzero.integrations.transformers import _models_in, _remove_older

    names = ["model.safetensors", "model.safetensors.index.json"]
    for name in names:
        if name != last:
            (tmp_path / name).touch()
            os.utime(tmp_path / name, ns=(2**62, 2**62))  # by a clock that is ahead
    before = _models_in(tmp_path)
    (tmp_path / last).touch()
    for _ in range(2):
        _remove_older(before, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [last]
        before = _models_in(tmp_path)
    (tmp_path / last).write_text("once more")
    _remove_older(before, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [last]
