"""LoRA by PEFT on a Llama with transformers' gradient checkpointing; merged, saved and loaded."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.scripts.common import MAX_NORM, NUM_STEPS, Result, Wrap, adamw, tokens, weights_of
from tests.scripts.transformers_trainer import VOCABULARY, make_llama


def make_lora() -> Any:
    """Attention and MLP adapters; the base model is frozen."""
    import peft

    adapters = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(make_llama(), adapters)


def batch(seed: int) -> Tensor:
    """Token ids (4, 12)."""
    return tokens(seed, length=12, vocabulary=VOCABULARY)


def train(wrap: Wrap, *, checkpointing: bool = True) -> tuple[Any, Result]:
    """The plain loop of the PEFT examples."""
    made = make_lora()
    if checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.train()
    model, optimizer = wrap(made, adamw(made, lr=2e-2))
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, Result(losses, norms, weights_of(model))


def checkpointed(wrap: Wrap) -> Result:
    """Trained under gradient checkpointing."""
    return train(wrap)[1]


def merged(wrap: Wrap) -> Result:
    """merge_and_unload, save_pretrained, from_pretrained: three times the same loss and weights."""
    import transformers

    model, result = train(wrap, checkpointing=False)
    model.eval()
    ids = batch(1000)
    with torch.no_grad():
        adapted = model(input_ids=ids, labels=ids).loss.item()
        whole = model.merge_and_unload()
        after_merging = whole(input_ids=ids, labels=ids).loss.item()
        with tempfile.TemporaryDirectory() as directory:
            whole.save_pretrained(directory)
            loaded = transformers.LlamaForCausalLM.from_pretrained(directory).eval()
        after_loading = loaded(input_ids=ids, labels=ids).loss.item()
    notes = {
        **{f"merged {name}": value for name, value in weights_of(whole).items()},
        **{f"loaded {name}": value for name, value in weights_of(loaded).items()},
    }
    losses = [*result.losses, adapted, after_merging, after_loading]
    return Result(losses, result.grad_norms, result.weights, notes)


def adapter_saved(wrap: Wrap) -> Result:
    """The adapter alone saved and put on another copy of the base model."""
    import peft

    model, result = train(wrap)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        torch.manual_seed(0)
        loaded = peft.PeftModel.from_pretrained(make_llama(), directory)
    return Result(result.losses, result.grad_norms, result.weights, weights_of(loaded))


def by_trainer(wrap: Wrap) -> Result:
    """The Trainer's own gradient checkpointing on a LoRA model."""
    from tests.scripts.transformers_trainer import train as train_by_trainer

    return train_by_trainer(
        wrap,
        make_lora(),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )[1]
