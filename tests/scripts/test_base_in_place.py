"""LoRA by PEFT on a model of `from_pretrained` whose frozen weights stay in its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offloadzero
from tests.support.mapped import in_place_bytes
from tests.support.tiny import settings

MODES = ("copy", "auto")


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with odd sizes and tied embeddings, in several files with an index."""
    made = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    size = {"hidden_size": 36, "intermediate_size": 67, "num_hidden_layers": 3, "num_attention_heads": 3}
    config = transformers.LlamaConfig(vocab_size=101, tie_word_embeddings=True, **size)
    model = transformers.LlamaForCausalLM(config).to(request.param)
    model.save_pretrained(made, max_shard_size="40KB")
    assert len([*made.glob("*.safetensors")]) > 2
    assert (made / "model.safetensors.index.json").exists()
    return made


def adapted(folder: Path, config: dict[str, Any], *, uses_init: bool) -> Any:
    import peft  # takes seconds: not where tests are collected

    torch.manual_seed(1)
    with offloadzero.zero.Init(config_dict_or_path=config, enabled=uses_init):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    lora = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


@pytest.mark.parametrize("uses_init", [True, False], ids=["under Init", "an ordinary model"])
def test_adapters_train_to_the_same_bits_over_a_base_in_place(
    folder: Path, tmp_path: Path, uses_init: bool
) -> None:
    ids, found, in_place = torch.arange(80).view(2, 40), {}, {}
    is_bf16 = transformers.AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    before = [file.read_bytes() for file in sorted(folder.iterdir())]
    for mode in MODES:
        config = settings(
            tmp_path, frozen_weights=mode, bf16={"enabled": is_bf16}, budgets={"device": "150KiB"}
        )
        engine = offloadzero.initialize(model=adapted(folder, config, uses_init=uses_init), config=config)[0]
        in_place[mode] = in_place_bytes(engine)
        losses = []
        for _ in range(3):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.module.merge_adapter()  # writes weights of the base, which move
        assert in_place_bytes(engine) < max(in_place[mode], 1)
        with torch.no_grad():
            losses.append(engine(input_ids=ids, labels=ids).loss.item())
        weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        found[mode] = losses, weights
        engine.close()
    assert in_place["copy"] == 0
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert (
        0.8 * files < in_place["auto"] < files
    )  # all but the norms, which stay on the device, and the headers
    assert found["copy"][0] == found["auto"][0]
    for name, value in found["copy"][1].items():
        assert torch.equal(value, found["auto"][1][name]), name
    assert before == [file.read_bytes() for file in sorted(folder.iterdir())]
