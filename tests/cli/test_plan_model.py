"""The plan of a model that is nowhere against the engine of the same model, byte by byte, in plan and tiers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.cli.main import USER_ERROR, main
from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import Loop, ModelPlanner
from offloadzero.errors import BudgetError, ConfigError
from offloadzero.memory.swap_file import MARK_BYTES
from offloadzero.planning.engine_plan import ENOUGH
from offloadzero.planning.model.shapes import ModelSource, read_model
from offloadzero.streaming.building.coded_parameters import attached_bytes
from tests.support import models
from tests.support.tiny import TinyModel, settings
from tests.support.training import PLACEMENTS, make_config

PLENTY = {TierName.HOST: 1 << 40}
CONFIGS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "resident": lambda path: make_config("resident", path),
    "host": lambda path: make_config("host", path, clipping=1.0),
    "nvme": lambda path: make_config("nvme", path),
    "nvme, clipped, accumulated": lambda path: make_config("nvme", path, clipping=1.0, accumulation=3),
    "mixed": lambda path: make_config("mixed", path, clipping=1.0),
    "mixed, fp32 gradients": lambda path: make_config(
        "mixed", path, accumulation=2, data_types={"grad_accum_dtype": "fp32"}
    ),
    "fp16": lambda path: make_config("mixed", path, dtype="fp16"),
    "fp32": lambda path: make_config("host", path, dtype=None),
    "compact": lambda path: settings(path, placement=PLACEMENTS["mixed"], state_layout="compact"),
    "share": lambda path: settings(
        path,
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        placement="host",
    ),
    "budgets": lambda path: settings(
        path, placement="auto", budgets={"device": "1MiB", "host": "100MiB"}, gradient_clipping=1.0
    ),
    "checkpoints": lambda path: settings(
        path, activation_checkpoints={"tier": "host", "input_bytes": "64KiB"}, aio={"checksums": True}
    ),
    "lion": lambda path: settings(path, optimizer={"type": "Lion", "params": {"lr": 1e-3}}, placement="nvme"),
    "gradients on nvme": lambda path: settings(
        path,
        placement={
            "param": "nvme",
            "master": "host",
            "exp_avg": "device",
            "exp_avg_sq": "host",
            "grad": "nvme",
        },
    ),
}
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "tied": TinyModel,
    "stack": models.Stack,
    "odd sizes": models.OddSizes,
    "torch's transformer": models.TorchTransformer,
    "llama": lambda: read_model("llama:64/3/4/101/96/2").build(),
    "gpt": lambda: read_model("gpt:64/3/4/101").build(),
}


def build_frozen() -> nn.Module:
    model = TinyModel()
    model.blocks[0].requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    return model


def config_of(name: str, path: Path, model: str) -> dict[str, Any]:
    config = CONFIGS[name](path)
    if name == "checkpoints" and model == "odd sizes":
        config["offloadzero"]["units"] = {"min_leaf_elements": 100_000}
    return config


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_is_the_engines(name: str, tmp_path: Path) -> None:
    for model, build in {**MODELS, "partly frozen": build_frozen}.items():
        config = config_of(name, tmp_path, model)
        source = ModelSource(model, build)
        found = ModelPlanner(source.on_meta()).plan(load_config(config), available=PLENTY)
        assert all(
            param.is_meta for record in found.records for param in (slot.param for slot in record.slots)
        )
        engine, *_ = offloadzero.initialize(model=build(), config=config)
        try:
            runtime = engine.optimizer.runtime
            assert found.plan == runtime.plan, model
            assert found.plan.table() in engine.memory_table()
            assert [r.name for r in found.records] == [r.name for r in runtime.records]
            assert found.num_parameters == sum(param.numel() for param in build().parameters())
            expect_tiers(found.plan.tier_bytes, runtime)
        finally:
            engine.close()


def expect_tiers(planned: Callable[[TierName], int], runtime: Any) -> None:
    """What is planned is what arenas and files have; fetched inputs and checksums have memory of their own."""
    store, inputs = runtime.store, runtime.plan.inputs
    assert store.device.num_bytes == planned(TierName.DEVICE) - (0 if inputs is None else inputs.device)
    sums = sum(line.num_bytes for line in runtime.plan.lines if line.what == "checksums of nvme")
    assert store.host.num_bytes == planned(TierName.HOST) - sums
    files = [] if store.nvme is None else [path for path, _ in store.nvme.files]
    assert sum(path.stat().st_size - MARK_BYTES for path in files) == planned(TierName.NVME)
    # Everything that was reserved is in use: nothing was counted twice or forgotten.
    assert (store.device.free_bytes, store.host.free_bytes) == (0, 0)
    for record in runtime.records:
        for kind, segment in record.segments.items():
            assert segment.tier is runtime.plan.placement[record.index, kind]


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_plain_loop_keeps_its_gradients(clipping: float, tmp_path: Path) -> None:
    config = settings(tmp_path, placement="host", gradient_clipping=clipping)
    found = ModelPlanner(ModelSource("", TinyModel).on_meta()).plan(
        load_config(config), loop=Loop.OFFLOAD, available=PLENTY
    )
    model = TinyModel()
    _, optimizer = offloadzero.offload(model, torch.optim.AdamW(model.parameters()), config)
    assert found.plan == optimizer.runtime.plan
    assert found.plan.grads_have_homes
    optimizer.restore_model()


def test_what_the_engine_refuses_the_plan_refuses_in_the_same_words() -> None:
    refused = {
        "budget": settings(placement="host", budgets={"host": "4KiB"}),
        "layout": settings(optimizer={"type": "SGD", "params": {"lr": 1.0}}, state_layout="compact"),
        "units": settings(units={"patterns": ["nothing.*"]}),
        "checkpoints": settings(activation_checkpoints={"units": ["blocks.9"]}),
    }
    for config in refused.values():
        with pytest.raises((BudgetError, ConfigError)) as planned:
            ModelPlanner(ModelSource("", TinyModel).on_meta()).plan(load_config(config), available=PLENTY)
        with pytest.raises((BudgetError, ConfigError)) as built:
            offloadzero.initialize(model=TinyModel(), config=config)
        # Besides, the engine names budgets that are enough, the command the smallest change of all.
        assert str(planned.value) == str(built.value).partition(f"\n{ENOUGH}")[0]


# --- what --model names ---


def test_a_function_is_called_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_model_of_mine.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(3, 5)\ndef other():\n    return 7\nvalue = 1\n"
        "def asks(size):\n    return None\ndef fails():\n    raise RuntimeError('no weights here')\n"
        "def ends():\n    raise SystemExit(3)\n"
    )
    model = read_model("a_model_of_mine:make").on_meta()
    assert [tuple(param.shape) for param in model.parameters()] == [(5, 3), (5,)]
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(ConfigError, match=r"a function that returns an nn\.Module, not int"):
        read_model("a_model_of_mine:other").on_meta()
    for text in ("a_model_of_mine:nothing", "a_model_of_mine:value"):
        with pytest.raises(ConfigError, match="has no function"):
            read_model(text)
    with pytest.raises(ConfigError, match=r"cannot be imported from .*No module named 'not_here'"):
        read_model("not_here:make")
    with pytest.raises(ConfigError, match=r"without arguments .*it raised TypeError: .*missing 1 required"):
        read_model("a_model_of_mine:asks").on_meta()
    with pytest.raises(ConfigError, match="it raised RuntimeError: no weights here"):
        read_model("a_model_of_mine:fails").on_meta()
    with pytest.raises(ConfigError, match="it raised SystemExit: 3"):
        read_model("a_model_of_mine:ends").on_meta()
    (tmp_path / "a_script_of_mine.py").write_text("import sys\nsys.exit('usage: script')\n")
    with pytest.raises(
        ConfigError, match=r"a_script_of_mine cannot be imported from .*: SystemExit: usage: script"
    ):
        read_model("a_script_of_mine:make")
    (tmp_path / "a_broken_one.py").write_text("def make(:\n")
    with pytest.raises(ConfigError, match=r"a_broken_one cannot be imported from .*: SyntaxError: "):
        read_model("a_broken_one:make")


def test_a_config_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=96, vocab_size=101)
    config.save_pretrained(tmp_path)
    ours = read_model("llama:64/3/4/101/96/2").on_meta()
    for path in (tmp_path, tmp_path / "config.json"):
        theirs = read_model(str(path)).on_meta()
        settled = load_config(settings(tmp_path))
        plans = [ModelPlanner(model).plan(settled, available=PLENTY).plan for model in (theirs, ours)]
        assert plans[0] == plans[1]


@pytest.mark.parametrize("kept", [None, ["model.layers.0.mlp", "head"]])
@pytest.mark.parametrize("doubled", [False, True])
def test_a_config_of_four_bits(kept: list[str] | None, doubled: bool, tmp_path: Path) -> None:
    """Half a byte for each weight of the projections, and their scales: 1/16 of a byte, or 1/64 and a little."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.LlamaConfig(vocab_size=101, architectures=["LlamaForCausalLM"], **sizes).to_dict()
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": doubled,
        "llm_int8_skip_modules": kept,
    }
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    model = read_model(str(tmp_path)).on_meta()
    matrices = [64 * 64] * 4 + ([64 * 128] * 3 if kept is None else [])
    codes = [param for param in model.parameters() if param.dtype == torch.uint8]
    assert sorted(param.nbytes for param in codes) == sorted(size // 2 for size in matrices)
    assert not any(param.requires_grad for param in model.parameters())
    scales = sum(size // 64 * (1 if doubled else 4) for size in matrices)
    tables = len(matrices) * (16 * 4 + doubled * (256 * 4 + 4 + 4))  # and the second scale, and the offset
    assert attached_bytes(model) == scales + tables
    adapted = replace(read_model(str(tmp_path)), adapter_rank=2).on_meta()
    found = ModelPlanner(adapted).plan(load_config(settings(tmp_path, placement="host")), available=PLENTY)
    frozen = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 101 * 64 + 3 * 64
    assert found.num_parameters == frozen + found.num_trainable


def test_a_model_with_nothing_to_train_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.LlamaConfig(vocab_size=101, architectures=["LlamaForCausalLM"], **sizes).to_dict()
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    (tmp_path / "ours.json").write_text(json.dumps(settings(tmp_path)))
    words = ["plan", "--model", str(tmp_path), "--config", str(tmp_path / "ours.json"), "--no-time"]
    assert main(words) == USER_ERROR
    assert (
        "a model with something to train: its weights are frozen, and --lora RANK adds"
        in capsys.readouterr().err
    )
    assert main([*words, "--lora", "2"]) == 0


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_adapters_are_those_of_peft(model: str, tmp_path: Path) -> None:
    """The same parameters train, and the plan is that of the engine of PEFT's model."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    kind = transformers.LlamaForCausalLM if model == "llama" else transformers.BertForMaskedLM
    real = kind(kind.config_class(vocab_size=101, **sizes))
    real.save_pretrained(tmp_path)
    adapted = peft.get_peft_model(real, peft.LoraConfig(r=4, target_modules="all-linear"))
    ours = replace(read_model(str(tmp_path)), adapter_rank=4).on_meta()
    config = settings(tmp_path, placement="host")
    found = ModelPlanner(ours).plan(load_config(config), available=PLENTY)
    assert found.num_trainable == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    engine, *_ = offloadzero.initialize(model=adapted, config=config)
    try:
        assert found.plan.table() in engine.memory_table()
    finally:
        engine.close()


def test_the_class_is_the_one_that_a_config_of_transformers_names(tmp_path: Path) -> None:
    """An encoder-decoder's head and a vision-language model are not found by asking for a causal one."""
    transformers = pytest.importorskip("transformers")
    t5 = transformers.T5Config(
        vocab_size=401, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, tie_word_embeddings=False
    )
    text = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=301
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=28
    )
    llava = transformers.LlavaConfig(text_config=text, vision_config=vision)
    for config, name in ((t5, "T5ForConditionalGeneration"), (llava, "LlavaForConditionalGeneration")):
        config.architectures = [name]
        config.save_pretrained(tmp_path)
        settled = load_config(settings(tmp_path))
        found = ModelPlanner(read_model(str(tmp_path)).on_meta()).plan(settled, available=PLENTY)
        real = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(tmp_path))
        assert found.class_name == name
        assert found.num_parameters == sum(param.numel() for param in real.parameters())
    t5.architectures = ["OfSomebodyElse"]
    t5.save_pretrained(tmp_path)
    assert type(read_model(str(tmp_path)).on_meta()).__name__ == "T5Model"


def test_a_table_of_positions_has_an_end(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 101,
    }
    gpt = transformers.GPT2Config(n_positions=24, n_embd=32, n_head=2, n_layer=1, vocab_size=101)
    bert = transformers.BertConfig(**small, intermediate_size=48, max_position_embeddings=24)
    llama = transformers.LlamaConfig(**small, intermediate_size=48, max_position_embeddings=24)
    t5 = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=101)
    found = {}
    for config in (gpt, bert, llama, t5):
        config.save_pretrained(tmp_path)
        source = read_model(str(tmp_path))
        found[config.model_type] = (source.num_positions, source.learns_positions)
    assert found == {"gpt2": (24, True), "bert": (24, True), "llama": (24, False), "t5": (0, False)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "no such model"}, "transformers does not read it: ValueError: "),
        (
            {"model_type": "llama", "hidden_size": "abc"},
            "transformers does not read it: .*expected int, got str",
        ),
        ({"model_type": "llama", "hidden_size": 0}, "transformers does not build it: ZeroDivisionError: "),
        ([], "transformers does not read it: "),
    ],
)
def test_a_config_of_transformers_that_is_none(content: object, message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as caught:
        read_model(str(tmp_path / "config.json")).on_meta()
    assert "\n" not in str(caught.value)
