"""Configurations as they are found in public repositories, by what is special in them: they are taken as they are.

What has no effect, in DeepSpeed neither, is said in one warning each.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.config import load_config
from offloadzero.config.load import settle_for_initialize
from offloadzero.errors import ConfigError

CPU: dict[str, Any] = {"device": "cpu", "pin_memory": True}
FP16: dict[str, Any] = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BUCKETS: dict[str, Any] = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE_3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e8,
    "stage3_param_persistence_threshold": 1e6,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ADAMW = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
PARTITION, ON_HOST = (
    f"activation_checkpointing.{key} = true" for key in ("partition_activations", "cpu_checkpointing")
)

# By what is special: the configuration, and the beginning of each warning.
FILES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "parameters are offloaded at stage 2": (
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "fp16": FP16,
            "zero_optimization": {**STAGE_3, "stage": 2, "offload_optimizer": CPU, "offload_param": CPU},
            "optimizer": ADAMW,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
        },
        ["zero_optimization.offload_param.device = 'cpu' has no effect at stage 2: "],
    ),
    "activations are partitioned": (
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "optimizer": ADAMW,
            "bf16": {"enabled": True},
            "zero_optimization": STAGE_3,
            "gradient_clipping": 1.0,
            "activation_checkpointing": {
                "partition_activations": True,
                "cpu_checkpointing": True,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
                "synchronize_checkpoint_boundary": False,
                "profile": False,
            },
        },
        [f"{PARTITION} has no effect: ", f"{ON_HOST} has no effect: "],
    ),
    "keys of other programs": (
        {
            "_read_the_docs": "https://www.deepspeed.ai/docs/config-json/",
            "train_batch_size": 16,
            "gradient_clipping": 1.0,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": 2, **BUCKETS, "offload_optimizer": CPU},
            "fp16": {"enabled": True},
            "logging": {"enabled": True, "level": "info"},
            "trainer": {"max_steps": 100},
            "tensor_parallel_size": 2,
            "micro_batch_size_per_gpu": 1,
        },
        [
            "the key '_read_the_docs' has no effect: ",
            "the key 'logging' has no effect: ",
            "the key 'trainer' has no effect: ",
            "the key 'tensor_parallel_size' has no effect (did you mean 'tensor_parallel'?): ",
            "the key 'micro_batch_size_per_gpu' has no effect (did you mean 'train_micro_batch_size_per_gpu'?): ",
        ],
    ),
    "old names, and what is switched off": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "fp16": {"enabled": False, "min_loss_scale": 1},
            "amp": {"enabled": False, "opt_level": "O2"},
            "bfloat16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "contiguous_gradients": True,
            },
            "activation_checkpointing": {"cpu_checkpointing": False, "profile": False},
            "gradient_clipping": 0.1,
            "zero_force_ds_cpu_optimizer": False,
        },
        [],
    ),
    "a share of the update on the device": (
        {
            "train_batch_size": 4,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": ADAMW,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": False,
                "reduce_bucket_size": 4e8,
                "sub_group_size": 4e8,
                "offload_optimizer": {**CPU, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9},
            },
            "wall_clock_breakdown": True,
        },
        [],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_public_file_is_taken_with_a_warning_for_each_key_without_effect(name: str) -> None:
    source, expected = FILES[name]
    found = load_config(source).warnings
    assert len(found) == len(expected)
    for warning, beginning in zip(found, expected, strict=True):
        assert warning.startswith(beginning)
        assert "DeepSpeed" in warning, "it says why"


def test_what_has_no_effect_changes_nothing() -> None:
    source, _ = FILES["parameters are offloaded at stage 2"]
    zero = {key: value for key, value in source["zero_optimization"].items() if key != "offload_param"}
    plain = load_config({**source, "zero_optimization": zero})
    assert load_config(source).placement == plain.placement
    source, _ = FILES["activations are partitioned"]
    config = load_config(source)
    assert (config.partition_activations, config.activation_checkpoints) == (False, None)


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_initialize_warns_once_of_each(has_optimizer: bool, tmp_path: Path) -> None:
    source, expected = FILES["activations are partitioned"]
    config = {
        **source,
        "train_batch_size": 32,
        "logging": {},
        "offloadzero": {"device": "cpu", "nvme_path": str(tmp_path)},
    }
    if not has_optimizer:
        del config["optimizer"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = offloadzero.initialize(model=nn.Linear(3, 3), config=config)
    engine.close()
    said = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    for beginning in (*expected, "the key 'logging' has no effect: "):
        assert sum(text.startswith(beginning) for text in said) == 1
    assert caught[0].filename == __file__


def test_offload_warns_as_well() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="the key 'logging' has no effect") as caught:
        _, offloaded = offloadzero.offload(
            model, optimizer, {"logging": {}, "offloadzero": {"device": "cpu"}}
        )
    offloaded.close()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("zero_optimisation", r"unknown key \(did you mean 'zero_optimization'\?\)$"),
        ("train_batch_sise", r"unknown key \(did you mean 'train_batch_size'\?\)$"),
        ("bf61", r"unknown key"),
        ("offload_zer", r"unknown key \(did you mean 'offloadzero'\?\)$"),
        ("offload_optimizer", r"unknown key here; it belongs in zero_optimization$"),
        ("max_grad_norm", r"write gradient_clipping instead$"),
    ],
)
def test_what_may_be_a_slip_is_an_error_still(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} = {{}}: {message}"):
        load_config({key: {}})


def test_an_unknown_key_of_a_block_is_an_error_still() -> None:
    for block in ("zero_optimization", "optimizer", "checkpoint", "bf16", "offloadzero"):
        with pytest.raises(ConfigError, match=rf"^{block}\.logging = True: unknown key"):
            load_config({block: {"logging": True}})


def test_the_share_of_the_update_is_the_ratio() -> None:
    source, _ = FILES["a share of the update on the device"]
    config = settle_for_initialize(load_config(source))
    assert config.placement.host_update_ratio == 0.9
    without = {**source["zero_optimization"], "offload_optimizer": {**CPU, "super_offload": True}}
    assert load_config({**source, "zero_optimization": without}).placement.host_update_ratio == 1.0
