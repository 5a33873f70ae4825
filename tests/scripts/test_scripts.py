"""Ordinary scripts clip in every step, with us and without: the same losses, the same norms in their logs.

OFFLOADZERO_TEST_STEPS=50 for the long form.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import accelerate_loop, common, lightning_module, peft_lora, plain, transformers_trainer
from tests.scripts.common import (
    AUTOCAST_TOLERANCES,
    MAX_NORM,
    Script,
    Wrap,
    assert_matches,
    cases,
    offloaded,
    reference,
    run,
)

SCRIPTS: dict[str, tuple[Script, str | None]] = {
    "plain loop": (plain.loop, None),
    "GPT, accumulation, schedule, weight norms": (plain.gpt, None),
    "GPT with checkpointing": (plain.gpt_checkpointed, None),
    "frozen norms with checkpointing": (plain.frozen_norm_checkpointed, None),
    "EMA by hand": (plain.ema_by_hand, None),
    "EMA of a copy": (plain.ema_of_a_copy, None),
    "AveragedModel": (plain.averaged_model, None),
    "Trainer": (transformers_trainer.gpt2, "accelerate"),
    "Trainer with checkpointing": (transformers_trainer.llama_checkpointed, "accelerate"),
    "Trainer saves": (transformers_trainer.saved_model, "accelerate"),
    "Trainer resumes": (transformers_trainer.resumed, "accelerate"),
    "Trainer loads its best model": (transformers_trainer.best_model_loaded, "accelerate"),
    "Trainer in bf16": (transformers_trainer.bf16_autocast, "accelerate"),
    "Accelerate": (accelerate_loop.run, "accelerate"),
    "Accelerate accumulates": (accelerate_loop.accumulated, "accelerate"),
    "Accelerate in bf16": (accelerate_loop.bf16_autocast, "accelerate"),
    "Accelerate clips values": (accelerate_loop.value_clipping, "accelerate"),
    "Accelerate saves and loads": (accelerate_loop.saved_and_loaded, "accelerate"),
    "Lightning": (lightning_module.run, "lightning"),
    "Lightning clips values": (lightning_module.by_value, "lightning"),
    "Lightning resumes": (lightning_module.resumed, "lightning"),
    "LoRA with checkpointing": (peft_lora.checkpointed, "peft"),
    "LoRA merged": (peft_lora.merged, "peft"),
    "LoRA adapter saved": (peft_lora.adapter_saved, "peft"),
    "LoRA by the Trainer": (peft_lora.by_trainer, "peft"),
    "LoRA of experts": (peft_lora.experts, "peft"),
}

AUTOCAST = ("Trainer in bf16", "Accelerate in bf16")


@pytest.mark.parametrize(("name", "placement"), cases(SCRIPTS, ["host", "nvme"]))
def test_a_script_gives_the_numbers_of_plain_torch(name: str, placement: str, tmp_path: Path) -> None:
    script, framework = SCRIPTS[name]
    if framework:
        pytest.importorskip("transformers")
        pytest.importorskip(framework)
    expected = reference(script)
    assert all(norm > 1.2 * MAX_NORM for norm in expected.grad_norms), "clipping must bite in every step"
    ours = run(script, offloaded(placement, tmp_path))
    assert_matches(ours, expected, **(AUTOCAST_TOLERANCES if name in AUTOCAST else {}))


def test_the_clipping_of_these_scripts_is_seen_in_their_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that clips nothing would pass."""
    expected = reference(plain.loop)
    monkeypatch.setattr(common, "MAX_NORM", 1e9)
    unclipped = run(plain.loop, Wrap())
    with pytest.raises(AssertionError, match="losses differ"):
        assert_matches(unclipped, expected, loss_rtol=1e-3)
