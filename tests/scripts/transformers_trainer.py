"""The Trainer of transformers: `offload()` first, then `Trainer(optimizers=(optimizer, scheduler))`."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

from tests.scripts.common import MAX_NORM, NUM_STEPS, Result, Wrap, adamw, tokens, weights_of

VOCABULARY = 64


def make_gpt2(**over: Any) -> Any:
    """A GPT-2 of 2 layers without dropout."""
    import transformers

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**{**sizes, **drops, "bos_token_id": 0, "eos_token_id": 0, **over})
    return transformers.GPT2LMHeadModel(config)


def make_llama(**over: Any) -> Any:
    """A Llama of 2 layers with grouped-query attention."""
    import transformers

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(**{**sizes, **heads, **over})
    return transformers.LlamaForCausalLM(config)


def dataset(num_rows: int) -> list[dict[str, Tensor]]:
    """Rows for a Trainer or a DataLoader."""
    rows = [tokens(seed, rows=1, length=12, vocabulary=VOCABULARY)[0] for seed in range(num_rows)]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def train(
    wrap: Wrap, model: Any, *, directory: str | None = None, resume: bool = False, **arguments: Any
) -> tuple[Any, Result]:
    """Trainer.train() with max_grad_norm; norms are those of its log."""
    import transformers

    losses: list[float] = []

    class Trainer(transformers.Trainer):  # its own log rounds and averages the loss
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    model, optimizer = wrap(model, adamw(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.05 * step))
    with tempfile.TemporaryDirectory() as scratch:
        settings: dict[str, Any] = {
            "output_dir": directory or scratch,
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 4,
            "max_grad_norm": MAX_NORM,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "seed": 3,
        }
        trainer = Trainer(
            model=model,
            args=transformers.TrainingArguments(**{**settings, **arguments}),
            train_dataset=dataset(32),
            eval_dataset=dataset(8),
            optimizers=(optimizer, scheduler),
        )
        trainer.train(resume_from_checkpoint=resume)
        logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        norms = [float(entry["grad_norm"]) for entry in logged]
        rates = torch.tensor([entry["learning_rate"] for entry in logged])
        return trainer, Result(losses, norms, weights_of(model), {"learning rates": rates})


def gpt2(wrap: Wrap) -> Result:
    """GPT-2 with tied embeddings."""
    return train(wrap, make_gpt2())[1]


def llama_checkpointed(wrap: Wrap) -> Result:
    """Llama with the Trainer's gradient checkpointing and accumulation, a frozen first norm."""
    model = make_llama()
    model.model.layers[0].input_layernorm.requires_grad_(False)
    return train(
        wrap,
        model,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        gradient_accumulation_steps=2,
    )[1]


def saved_model(wrap: Wrap) -> Result:
    """trainer.save_model() and from_pretrained(): what was saved is what was trained."""
    import transformers

    trainer, result = train(wrap, make_gpt2())
    with tempfile.TemporaryDirectory() as directory:
        trainer.save_model(directory)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(directory)
    return Result(result.losses, result.grad_norms, result.weights, weights_of(loaded))


def resumed(wrap: Wrap) -> Result:
    """Checkpoints on the way, evaluation, then a second Trainer goes on from the last checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        half = NUM_STEPS // 2
        saving = {"save_strategy": "steps", "save_steps": half, "directory": directory}
        first = train(wrap, make_gpt2(), max_steps=half, eval_strategy="steps", eval_steps=2, **saving)
        second = train(wrap, make_gpt2(), resume=True, **saving)
    evaluated = [entry["eval_loss"] for entry in first[0].state.log_history if "eval_loss" in entry]
    assert evaluated
    assert second[0].state.global_step == NUM_STEPS
    losses = [*first[1].losses, *evaluated, *second[1].losses]
    return Result(losses, second[1].grad_norms, second[1].weights)


def best_model_loaded(wrap: Wrap) -> Result:
    """load_best_model_at_end puts the weights of the best evaluation back; then it generates."""
    with tempfile.TemporaryDirectory() as directory:
        trainer, result = train(
            wrap,
            make_gpt2(),
            directory=directory,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,  # the worst, so that it is not the last
        )
        trainer.model.eval()
        ids = dataset(2)[1]["input_ids"][None, :4]
        with torch.no_grad():
            generated = trainer.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return Result(result.losses, result.grad_norms, result.weights, {"generated": generated})


def bf16_autocast(wrap: Wrap) -> Result:
    """bf16=True: Accelerate wraps the model's forward."""
    return train(wrap, make_gpt2(), bf16=True)[1]
