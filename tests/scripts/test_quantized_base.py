"""LoRA by PEFT over a base that is quantised, loaded by transformers: 4 bits stream, what cannot is refused by name."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offloadzero
from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import ModelPlanner
from offloadzero.errors import ConfigError
from offloadzero.planning.model.shapes import read_model
from offloadzero.streaming.building.coded_parameters import attached_bytes
from tests.support.mapped import in_place_bytes
from tests.support.tiny import settings
from tests.support.training import make_config

NUM_STEPS = 3
IDS = torch.arange(80).view(2, 40)
DOUBLED = "nf4, scales in 8 bits"
FOUR_BITS: dict[str, dict[str, Any]] = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    DOUBLED: {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 in bf16 memory": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
}


def peft_itself() -> Any:
    """It takes seconds to import: not where tests are collected."""
    import peft

    return peft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bf16."""
    made = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=101, **size)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    return made


def four_bits(**arguments: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **arguments
    )


def load(folder: Path, quantised: Any = None) -> Any:
    """The model, on the host; None: quantised as its folder says."""
    more = {} if quantised is None else {"quantization_config": quantised, "device_map": {"": "cpu"}}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Else an evaluation on such a processor lays the weights out anew, for other numbers than training's.
            module.support_avx512bf16_for_cpu = False
    return model


def adapted(folder: Path, quantised: Any = None, *, checkpoints: str = "") -> Any:
    torch.manual_seed(1)
    lora = peft_itself().LoraConfig(
        r=3, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = peft_itself().get_peft_model(load(folder, quantised), lora)
    if checkpoints in ("reentrant", "not reentrant"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
    return model.train()


def in_bf16(model: Any) -> Any:
    """The model without us, with its adapters as the engine has them."""
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(torch.bfloat16)
    return model


def step(engine: Any) -> float:
    loss = engine(input_ids=IDS, labels=IDS).loss
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def train(model: Any, config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and all weights and scales."""
    engine = offloadzero.initialize(model=model, config=config)[0]
    losses = [step(engine) for _ in range(NUM_STEPS)]
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    return losses, weights


@pytest.mark.parametrize(
    ("kind", "checkpoints"),
    [
        *((kind, "") for kind in FOUR_BITS),
        *((DOUBLED, one) for one in ("reentrant", "not reentrant", "units")),
    ],
)
def test_four_bits_train_the_same_adapters_wherever_they_live(
    kind: str, checkpoints: str, folder: Path, tmp_path: Path
) -> None:
    quantised = four_bits(**FOUR_BITS[kind])
    own: dict[str, Any] = {"activation_checkpoints": {}} if checkpoints == "units" else {}
    if checkpoints == "reentrant":  # all gradients of the model come from such checkpoints
        own = {"update": {"in_backward": False}}
    make = functools.partial(adapted, folder, quantised, checkpoints=checkpoints)
    found = {
        place: train(make(), make_config(place, tmp_path, dtype="bf16", lr=2e-2, offloadzero=own))
        for place in ("resident", "host", "nvme")
    }
    losses, weights = found["resident"]
    alone = in_bf16(make())
    assert alone(input_ids=IDS, labels=IDS).loss.item() == losses[0]
    assert losses[-1] < losses[0] - 0.05
    assert sum("absmax" in name for name in weights) >= 21
    for place, (own_losses, own_weights) in found.items():
        assert own_losses == losses, place
        assert own_weights.keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(own_weights[name].view(torch.uint8), value.view(torch.uint8)), (place, name)


def evaluated(model: Any) -> float:
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=IDS, labels=IDS).loss.item())


def test_evaluated_merged_and_given_back_it_has_the_numbers_of_the_model_alone(
    folder: Path, tmp_path: Path
) -> None:
    model = adapted(folder, four_bits(**FOUR_BITS[DOUBLED]))
    engine = offloadzero.initialize(model=model, config=make_config("nvme", tmp_path, dtype="bf16"))[0]
    for _ in range(NUM_STEPS):
        step(engine)
    alone = in_bf16(adapted(folder, four_bits(**FOUR_BITS[DOUBLED])))
    with torch.no_grad():
        for mine, other in zip(alone.parameters(), engine.module.parameters(), strict=True):
            if mine.requires_grad:
                mine.copy_(other)
    expected = evaluated(alone)
    assert evaluated(engine.module) == expected
    engine.module.save_pretrained(tmp_path / "adapters")
    weight = engine.module.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight
    for made in (copy.copy(weight), copy.deepcopy(weight)):
        assert torch.equal(made.data, weight.data)
        assert made.quant_state.shape == weight.quant_state.shape == (64, 128)
    engine.restore_model()
    assert evaluated(in_bf16(model)) == expected
    again = peft_itself().PeftModel.from_pretrained(
        load(folder, four_bits(**FOUR_BITS[DOUBLED])), tmp_path / "adapters", is_trainable=True
    )
    assert evaluated(in_bf16(again)) == expected
    alone.merge_adapter()
    model.merge_adapter()
    assert evaluated(model) == evaluated(alone) != expected


def test_an_evaluation_leaves_codes_as_they_are(folder: Path, tmp_path: Path) -> None:
    """bitsandbytes lays them out anew on some CPUs: for other numbers, and without gradients from then on."""
    model, alone = (adapted(folder, four_bits(**FOUR_BITS["nf4"])) for _ in range(2))
    linear = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    assert len(linear) == 3 * 7
    for module in linear:
        module.support_avx512bf16_for_cpu = True
    engine = offloadzero.initialize(model=model, config=make_config("nvme", tmp_path, dtype="bf16"))[0]
    assert evaluated(engine.module) == evaluated(in_bf16(alone))
    engine.module.train()
    assert step(engine) > step(engine)
    engine.close()
    weight = alone.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight
    weight.quant_state.packing_format_for_cpu = True  # as after an evaluation there
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.down_proj\.base_layer\.weight.*as they were loaded"
    ):
        offloadzero.initialize(model=alone, config=make_config("nvme", tmp_path, dtype="bf16"))


@pytest.mark.parametrize("uses_init", [True, False], ids=["under Init", "an ordinary model"])
def test_a_folder_of_four_bits_is_read_where_it_lies(uses_init: bool, folder: Path, tmp_path: Path) -> None:
    load(folder, four_bits(**FOUR_BITS["nf4"])).save_pretrained(tmp_path / "saved")
    found, in_place = {}, {}
    for mode in ("copy", "auto"):
        config = settings(tmp_path, frozen_weights=mode)
        with offloadzero.zero.Init(config_dict_or_path=config, enabled=uses_init):
            model = adapted(tmp_path / "saved")
        engine = offloadzero.initialize(model=model, config=config)[0]
        in_place[mode] = in_place_bytes(engine)
        found[mode] = [step(engine) for _ in range(NUM_STEPS)]
        engine.close()
    of_codes = 3 * (4 * 64 * 64 + 3 * 64 * 128) // 2
    assert in_place["copy"] == 0
    assert in_place["auto"] > of_codes
    assert found["copy"] == found["auto"]


def test_int8_weights_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = adapted(folder, transformers.BitsAndBytesConfig(load_in_8bit=True))
    name = r"layers\.0\.self_attn\.q_proj\.base_layer\.weight = 'Int8Params of Linear8bitLt'"
    with pytest.raises(ConfigError, match=rf"{name}.* its attribute CB has it"):
        offloadzero.initialize(model=model, config=make_config("host", tmp_path))
    evaluated(model)  # moves it
    with pytest.raises(ConfigError, match=rf"{name}.* its module's state\.CB has it"):
        offloadzero.initialize(model=model, config=make_config("host", tmp_path))


def test_tensors_of_torchao_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantised = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = adapted(folder, quantised)
    with pytest.raises(ConfigError, match=r"q_proj\.base_layer\.weight = 'Int8Tensor of Linear'.* \(torchao"):
        offloadzero.initialize(model=model, config=make_config("host", tmp_path))
    evaluated(model)  # is as it was


@pytest.mark.parametrize("kind", ["nf4", DOUBLED])
def test_the_plan_knows_the_bytes_of_four_bits(kind: str, folder: Path, tmp_path: Path) -> None:
    base = load(folder, four_bits(**FOUR_BITS[kind]))
    base.save_pretrained(tmp_path / "saved")
    ours = replace(read_model(str(tmp_path / "saved")), adapter_rank=4).on_meta()
    assert attached_bytes(ours) == attached_bytes(base)
    adapters = peft_itself().LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft_itself().get_peft_model(base, adapters)
    config = settings(tmp_path, placement="host")
    found = ModelPlanner(ours).plan(load_config(config), available={TierName.HOST: 1 << 40})
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert found.buffer_bytes == buffers + attached_bytes(model)
    engine = offloadzero.initialize(model=model, config=config)[0]
    assert found.plan.table() in engine.memory_table()
    engine.close()
