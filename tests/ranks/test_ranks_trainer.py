"""Trainers of transformers and Lightning and a loop of accelerate on two ranks: as under DDP, saved and resumed."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offloadzero
from tests.scripts.common import Wrap, tokens
from tests.scripts.peft_lora import make_lora
from tests.scripts.transformers_trainer import VOCABULARY, make_llama
from tests.support.cases import IN_FULL
from tests.support.ranks import run_torchrun

CASES = {
    f"stage {stage}, {tier}": (stage, device)
    for stage in (1, 2, 3)
    for tier, device in (("host", "cpu"), ("nvme", "nvme"))
}
FEWER = ("stage 1, host", "stage 2, nvme", "stage 3, nvme")  # each stage and each tier
# So do the others: every stage on every tier is under one of them.
OF_TRAINER = [*CASES] if IN_FULL else [*FEWER]
OF_OTHERS = [name for name in CASES if IN_FULL or name not in OF_TRAINER]
RATE = 3e-3


class Offloaded(Wrap):
    """`offloadzero.offload()` of a stage and a tier."""

    def __init__(self, stage: int, device: str, directory: Path) -> None:
        files = {"device": device} if device == "cpu" else {"device": device, "nvme_path": str(directory)}
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": files}
        if stage == 3:
            zero |= {"offload_param": files, "stage3_max_live_parameters": 1}
        own = {"device": "cpu", "poison_released_leases": True}
        self._config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "offloadzero": own}

    def __call__(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return offloadzero.offload(model, optimizer, self._config)


def by_trainer(
    wrap: Wrap,
    directory: Path,
    *,
    resume: bool = False,
    make: Callable[[], Any] = make_llama,
    trainer_class: Any = None,
    arguments_class: Any = None,
    as_dataset: Callable[[list[dict[str, torch.Tensor]]], Any] = list,
    given: Mapping[str, Any] = MappingProxyType({}),
    **over: Any,
) -> dict[str, Any]:
    """Two epochs with clipping that bites, accumulation and a short last window, evaluations, a checkpoint."""
    import transformers

    from offloadzero.integrations.transformers import CollectiveSaving

    class Trainer(CollectiveSaving, trainer_class or transformers.Trainer):  # type: ignore[misc]
        pass

    torch.manual_seed(0)
    model = make()
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = wrap(model, torch.optim.AdamW(trained, lr=RATE, eps=1e-4))
    rows = [tokens(seed, rows=1, length=12, vocabulary=VOCABULARY)[0] for seed in range(22)]
    settings: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = (arguments_class or transformers.TrainingArguments)(
        output_dir=str(directory), **settings | over
    )
    examples = [{"input_ids": row, "labels": row.clone()} for row in rows]
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=as_dataset(examples),
        eval_dataset=as_dataset(examples[:6]),
        **given,
        optimizers=(
            optimizer,
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20)),
        ),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(directory / "saved"))
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "step")
    log = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
    weights = {
        name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad
    }
    if isinstance(wrap, Offloaded):
        optimizer.close()
    torch.distributed.barrier()
    (file,) = (directory / "saved").glob("*.safetensors")
    saved = load_file(file)
    expected = {name.replace(".default.", "."): value for name, value in weights.items()}
    is_saved = saved.keys() == expected.keys() and all(torch.equal(saved[n], expected[n]) for n in saved)
    return {"log": log[:-1], "is_saved": is_saved}


def by_sft(wrap: Wrap, directory: Path, *, resume: bool = False, **over: Any) -> dict[str, Any]:
    """The same under TRL: rows of different lengths, its gradient checkpoints and its own forward of the head."""
    import datasets
    import tokenizers
    import transformers
    import trl

    vocabulary = {str(number): number for number in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="1", pad_token="0")

    def as_dataset(rows: list[dict[str, torch.Tensor]]) -> Any:
        ids = [row["input_ids"][: 12 - number % 5].tolist() for number, row in enumerate(rows)]
        file = directory.parent / f"rows {torch.distributed.get_rank()} {len(rows)}.json"
        file.write_text("\n".join(json.dumps({"input_ids": row}) for row in ids))
        cache = str(directory.parent / "cache")
        return datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)

    return by_trainer(
        wrap,
        directory,
        resume=resume,
        trainer_class=trl.SFTTrainer,
        arguments_class=trl.SFTConfig,
        as_dataset=as_dataset,
        given={"processing_class": tokenizer},
        bf16=False,
        **over,
    )


def by_accelerate(wrap: Wrap) -> dict[str, Any]:
    """Its documentation's loop with `accumulate`, whose last window is short."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = make_llama()
    model, optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-4))
    rows = [tokens(seed, rows=1, length=12, vocabulary=VOCABULARY)[0] for seed in range(20)]
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(rows, batch_size=2)
    )
    losses, norms = [], []
    for ids in itertools.chain.from_iterable(loader for _ in range(2)):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    if isinstance(wrap, Offloaded):
        optimizer.optimizer.close()
    return {"losses": losses, "norms": norms}


def by_lightning(wrap: Wrap, path: Path, *, resume: bool = False) -> dict[str, Any]:
    """Trainer.fit with clipping and accumulation, saved in the middle or gone on from there."""
    import lightning
    from lightning.pytorch.utilities import grad_norm

    from offloadzero.integrations.lightning import OffloadStrategy

    losses, norms = [], []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = make_llama()

        def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
            losses.append(self.all_gather(loss.detach()).mean().item())
            return loss

        def on_before_optimizer_step(self, _: Any) -> None:
            norms.append(float(grad_norm(self.model, norm_type=2)["grad_2.0_norm_total"]))

        def cpu(self) -> Any:
            assert not isinstance(wrap, Offloaded), "the weights would leave the device"
            return super().cpu()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, eps=1e-4)
            self.model, optimizer = wrap(self.model, optimizer)
            return optimizer

    rows = [tokens(seed, rows=1, length=12, vocabulary=VOCABULARY)[0] for seed in range(24)]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OffloadStrategy() if isinstance(wrap, Offloaded) else "ddp",
        max_epochs=2 if resume else 1,
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(path.parent),
    )
    module = Module()
    given = {"ckpt_path": path, "weights_only": False} if resume else {}
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), **given)
    trainer.save_checkpoint(path)
    if isinstance(wrap, Offloaded):
        trainer.optimizers[0].close()
    return {"losses": losses, "norms": norms}


def by_cases(names: list[str], by: Callable[..., dict[str, Any]], directory: Path) -> dict[str, Any]:
    """What a trainer logs and saves plain and in each of the cases, those of stage 3 resumed as well."""
    found = {"plain": by(Wrap(), directory / "plain")}
    for name in names:
        stage, device = CASES[name]
        wrap = Offloaded(stage, device, directory)
        found[name] = by(wrap, directory / name)
        if stage == 3:
            broken = directory / f"{name} resumed"
            by(wrap, broken, max_steps=3)
            found[f"{name}, resumed"] = by(wrap, broken, resume=True)
    return found


def of_rank(directory: Path) -> None:
    """What one rank does, under torchrun: all cases one after the other."""
    found = by_cases(OF_TRAINER, by_trainer, directory)
    found["accelerate"] = by_accelerate(Wrap())
    for name in OF_OTHERS:
        found[f"accelerate, {name}"] = by_accelerate(Offloaded(*CASES[name], directory))
    wraps = {"plain": Wrap()} | {name: Offloaded(*CASES[name], directory) for name in FEWER}
    for name, wrap in wraps.items():
        path = directory / f"{name}.ckpt"
        found[f"lightning, {name}"] = [by_lightning(wrap, path, resume=resume) for resume in (False, True)]
        found[f"lora, {name}"] = by_trainer(wrap, directory / f"lora {name}", make=make_lora)
    if importlib.util.find_spec("trl"):
        found["sft"] = by_cases(OF_OTHERS, by_sft, directory / "sft")
    if torch.distributed.get_rank() == 0:
        (directory / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("trainer")
    (directory / "sft").mkdir()
    run = run_torchrun(Path(__file__), directory, cwd=Path(__file__).parents[2], timeout_s=480)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads((directory / "found.json").read_text())
    return result


@pytest.fixture
def found_of_sft(found: dict[str, Any]) -> dict[str, Any]:
    pytest.importorskip("trl")
    of_sft: dict[str, Any] = found["sft"]
    return of_sft


@pytest.mark.parametrize("name", OF_TRAINER)
def test_the_trainer_logs_what_it_does_under_ddp(found: dict[str, Any], name: str) -> None:
    expect_the_log_of_ddp(found, name)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_trl_logs_what_it_does_under_ddp(found_of_sft: dict[str, Any], name: str) -> None:
    expect_the_log_of_ddp(found_of_sft, name)
    if f"{name}, resumed" in found_of_sft:
        assert found_of_sft[f"{name}, resumed"]["log"][-4:] == found_of_sft[name]["log"][-4:]


def expect_the_log_of_ddp(found: dict[str, Any], name: str) -> None:
    plain, ours = found["plain"]["log"], found[name]["log"]
    assert [entry.keys() for entry in plain] == [entry.keys() for entry in ours]
    assert sum("eval_loss" in entry for entry in plain) >= 2
    assert all(entry["grad_norm"] > 0.1 for entry in plain if "grad_norm" in entry)
    for there, here in zip(plain, ours, strict=True):
        assert here == pytest.approx(there, rel=1e-3)
    assert found["plain"]["is_saved"]
    assert found[name]["is_saved"]


@pytest.mark.parametrize("name", FEWER)
def test_adapters_of_peft(found: dict[str, Any], name: str) -> None:
    for there, here in zip(found["lora, plain"]["log"], found[f"lora, {name}"]["log"], strict=True):
        assert here == pytest.approx(there, rel=1e-3)
    assert found[f"lora, {name}"]["is_saved"]


@pytest.mark.parametrize("name", [name for name in OF_TRAINER if CASES[name][0] == 3])
def test_a_resumed_trainer_goes_on_as_if_it_had_not_stopped(found: dict[str, Any], name: str) -> None:
    assert found[f"{name}, resumed"]["log"][-4:] == found[name]["log"][-4:]


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_loop_of_accelerate_is_that_under_ddp(found: dict[str, Any], name: str) -> None:
    plain, ours = found["accelerate"], found[f"accelerate, {name}"]
    assert len(plain["norms"]) == 6
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-3)


@pytest.mark.parametrize("name", FEWER)
def test_lightning_is_what_it_is_under_ddp_and_goes_on_from_a_checkpoint(
    found: dict[str, Any], name: str
) -> None:
    for plain, ours in zip(found["lightning, plain"], found[f"lightning, {name}"], strict=True):
        assert len(plain["norms"]) == 3
        assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-3)


def test_a_module_of_lightning_knows_its_device_and_only_its_metrics_go_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`meta` stands for a GPU, where the two differ."""
    import lightning
    from lightning.pytorch.trainer.states import TrainerFn
    from torchmetrics import MeanMetric

    from offloadzero.integrations.lightning import OffloadStrategy

    device = torch.device("meta")
    module = lightning.LightningModule()
    module.model, module.metric = torch.nn.Linear(2, 2), MeanMetric()
    module.trainer = trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False)
    strategy = OffloadStrategy()
    strategy.connect(module)
    monkeypatch.setattr(OffloadStrategy, "root_device", device)
    trainer.state.fn = TrainerFn.FITTING
    strategy.model_to_device()
    assert module.device == module.metric.device == device
    assert not any(param.is_meta for param in module.parameters())
    trainer.state.fn = TrainerFn.VALIDATING  # which does not offload
    strategy.model_to_device()
    assert all(param.is_meta for param in module.parameters())


def test_accelerate_still_asks_for_the_mark() -> None:
    """A private name: without it the model would be wrapped, which is refused."""
    from accelerate import Accelerator

    from offloadzero.api.optimizer import ACCELERATE_MARK, _Prepared

    model = torch.nn.Linear(2, 2)
    setattr(model, ACCELERATE_MARK, _Prepared())
    assert not getattr(copy.deepcopy(model), ACCELERATE_MARK)  # an ordinary model, which is wrapped
    assert ACCELERATE_MARK in Accelerator.prepare_model.__code__.co_consts
    assert Accelerator(cpu=True).prepare_model(model) is model


if __name__ == "__main__":
    of_rank(Path(sys.argv[1]))
