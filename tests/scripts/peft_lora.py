"""LoRA by PEFT on a Llama with transformers' gradient checkpointing; merged, saved and loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.scripts.common import LR, MAX_NORM, NUM_STEPS, Result, Wrap, adamw, tokens, weights_of
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


def make_experts_lora(kind: str) -> Any:
    """Adapters of all layers with experts: PEFT parametrizes their stacked weights anew in each forward."""
    import peft
    import transformers

    # torch's grouped_mm takes rows of multiples of 16 bytes alone.
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1}
    if kind == "mixtral":
        config: Any = transformers.MixtralConfig(vocab_size=VOCABULARY, num_local_experts=3, **size)
    else:
        size |= {"moe_intermediate_size": 20, "head_dim": 8}
        config = transformers.Qwen3MoeConfig(
            vocab_size=VOCABULARY, num_experts=5, num_experts_per_tok=2, **size
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    adapters = peft.LoraConfig(r=2, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters)


def train(
    wrap: Wrap, *, checkpointing: bool = True, make: Callable[[], Any] = make_lora, lr: float = 2e-2
) -> tuple[Any, Result]:
    """The plain loop of the PEFT examples."""
    made = make()
    if checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.train()
    model, optimizer = wrap(made, adamw(made, lr=lr))
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


def experts(wrap: Wrap) -> Result:
    """Mixtral and, under gradient checkpointing, Qwen's mixture; merged, and with the adapters off."""
    import transformers

    result, notes = Result([]), {}
    for kind in ("mixtral", "qwen"):
        model, trained = train(
            wrap, checkpointing=kind == "qwen", make=partial(make_experts_lora, kind), lr=LR
        )
        result.losses += trained.losses
        result.grad_norms += trained.grad_norms
        result.weights |= {f"{kind} {name}": value for name, value in trained.weights.items()}
        model.eval()
        ids = batch(1000)
        with torch.no_grad():
            with model.disable_adapter():
                notes[f"{kind} base"] = model(input_ids=ids, labels=ids).loss
            notes[f"{kind} adapted"] = model(input_ids=ids, labels=ids).loss
            with tempfile.TemporaryDirectory() as directory:
                model.merge_and_unload().save_pretrained(directory)
                loaded = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
            notes[f"{kind} merged"] = loaded(input_ids=ids, labels=ids).loss
    result.notes = notes
    return result


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
