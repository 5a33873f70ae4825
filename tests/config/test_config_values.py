"""Batch sizes, numbers, byte sizes, precisions and optimizers are read for what they are; mistakes are named."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadzero.config import (
    ActivationConfig,
    AioConfig,
    BatchConfig,
    BudgetConfig,
    LossScaleConfig,
    ObserveConfig,
    OffloadConfig,
    OptimizerConfig,
    PlacementRule,
    UnitConfig,
    UpdateConfig,
    load_config,
)
from offloadzero.config.readers import own_keys, read_float, read_int, read_multiple, read_num_bytes
from offloadzero.config.schema import resolve_batch
from offloadzero.core.segments import TierName
from offloadzero.errors import ConfigError
from tests.config.blocks import TABLES, adam, nested
from tests.support.cases import case, loop_over

# --- batch sizes -----------------------------------------------------------------------------------------

SIZES = st.integers(1, 4096)


@given(micro=SIZES, steps=SIZES, world=SIZES)
def test_any_two_batch_sizes_give_the_third(micro: int, steps: int, world: int) -> None:
    train = micro * steps * world
    whole = BatchConfig(train, micro, steps)
    for given_sizes in [
        (train, micro, steps),
        (None, micro, steps),
        (train, None, steps),
        (train, micro, None),
    ]:
        assert resolve_batch(*given_sizes, world_size=world) == whole
    assert resolve_batch(None, micro, None, world_size=world) == BatchConfig(micro * world, micro, 1)
    assert resolve_batch(micro * world, None, None, world_size=world) == BatchConfig(micro * world, micro, 1)


@given(train=st.none() | SIZES, micro=st.none() | SIZES, steps=st.none() | SIZES, world=st.integers(1, 64))
def test_a_resolved_batch_keeps_what_was_given_and_multiplies_out(
    train: int | None, micro: int | None, steps: int | None, world: int
) -> None:
    known = (micro or 1) * (steps or 1) * world
    fits = train is None or (train == known if micro and steps else train % known == 0)
    if not fits:  # no positive whole numbers fill the gaps
        with pytest.raises(ConfigError, match=f"^train_batch_size = {train}: must equal"):
            resolve_batch(train, micro, steps, world_size=world)
        return
    batch = resolve_batch(train, micro, steps, world_size=world)
    given_and_found = [
        (train, batch.train_batch_size),
        (micro, batch.micro_batch_size),
        (steps, batch.gradient_accumulation_steps),
    ]
    assert all(wanted in (None, found) for wanted, found in given_and_found)
    if train is None and micro is None:
        assert (batch.train_batch_size, batch.micro_batch_size) == (None, None)
    else:
        assert batch.micro_batch_size is not None
        product = batch.micro_batch_size * batch.gradient_accumulation_steps * world
        assert batch.train_batch_size == product


@pytest.mark.parametrize(
    ("train", "micro", "steps", "message"),
    [
        (32, 3, 2, r"train_batch_size = 32: must equal .* = 3 \* 2 \* 4 = 24"),
        (
            *(32, 3, None),
            r"must equal 3 \(train_micro_batch_size_per_gpu\) \* gradient_accumulation_steps \* 4 \(ranks\)",
        ),
        (2, None, None, "not a multiple of 4"),
        (0, None, None, r"train_batch_size = 0: a whole number at least 1"),
        (None, -1, None, "train_micro_batch_size_per_gpu"),
        (None, None, 1.5, "gradient_accumulation_steps"),
        (True, None, None, "train_batch_size"),
        ("8", None, None, "train_batch_size"),
    ],
)
def test_bad_batch_sizes(train: object, micro: object, steps: object, message: str) -> None:
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    with pytest.raises(ConfigError, match=message):
        load_config(sizes, world_size=4)


# --- numbers and byte sizes ------------------------------------------------------------------------------

UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
UNITS |= {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4, "": 1}


@given(number=st.integers(0, 10**9), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
def test_byte_sizes(number: int, unit: str, space: str) -> None:
    expected = number * UNITS[unit]
    assert read_num_bytes("key", f"{number}{space if unit else ''}{unit}") == expected
    assert read_num_bytes("key", expected) == expected


@given(thousandths=st.integers(0, 10**6), unit=st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_decimal_byte_sizes_are_exact(thousandths: int, unit: str) -> None:
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{unit}"
    assert read_num_bytes("key", text) == thousandths * UNITS[unit] // 1000


@given(text=st.text(max_size=8))
def test_other_text_is_never_a_byte_size(text: str) -> None:
    accepted = re.fullmatch(r"\s*[0-9]+(\.[0-9]+)? *(|B|[KMGT]i?B)\s*", text)
    try:
        num_bytes = read_num_bytes("key", text)
    except ConfigError:
        assert not accepted or "." in text  # a fraction of a byte
    else:
        assert accepted
        assert num_bytes >= 0


@pytest.mark.parametrize(
    "value", ["16G", "16gb", "16 Gib", "-1GB", "", "GB", "0.5B", "1e9", "٣GB", 1.5, -1, True]
)
def test_bad_byte_sizes(value: object) -> None:
    for tier in ("device", "host", "nvme"):
        with case(tier):
            with pytest.raises(ConfigError) as caught:
                load_config({"offloadzero": {"budgets": {tier: value}}})
            assert caught.value.key == f"offloadzero.budgets.{tier}"


def test_a_size_of_no_whole_number_of_bytes_is_told_what_it_is() -> None:
    with pytest.raises(
        ConfigError, match=r"host = '1\.7MiB': a whole number of bytes, and this is 1782579\.2$"
    ):
        load_config({"offloadzero": {"budgets": {"host": "1.7MiB"}}})


def test_budgets() -> None:
    budgets = {"device": "1.5GiB", "host": "512MB", "nvme": 1e12}
    config = load_config({"offloadzero": {"budgets": budgets}})
    assert config.budgets == BudgetConfig(3 * 2**29, 512_000_000, 10**12)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        ("", "gradient_clipping", -0.1),
        ("", "gradient_clipping", math.nan),
        ("", "gradient_clipping", "1"),
        ("", "gradient_clipping", 10**400),
        ("", "steps_per_print", 0),
        ("fp16", "enabled", 2),
        ("fp16", "enabled", "true"),
        ("fp16", "loss_scale", -1),
        ("fp16", "initial_scale_power", 128),
        ("fp16", "loss_scale_window", 0),
        ("fp16", "hysteresis", 0),
        ("data_types", "grad_accum_dtype", "int8"),
        ("zero_optimization", "stage", 4),
        ("zero_optimization", "stage", -1),
        ("zero_optimization", "stage", "3"),
        ("zero_optimization", "stage", 1.5),
        ("zero_optimization", "sub_group_size", 0),
        ("zero_optimization", "stage3_max_live_parameters", -1),
        ("zero_optimization.offload_param", "device", "gpu"),
        ("zero_optimization.offload_optimizer", "ratio", 1.5),
        ("aio", "block_size", 0),
        ("aio", "queue_depth", 0),
        ("aio", "queue_depth", 4097),
        ("aio", "thread_count", 0),
        ("offloadzero", "state_layout", "fp8"),
        ("offloadzero", "frozen_weights", "file"),
        ("offloadzero", "versions", "yes"),
        ("offloadzero", "placement_tokens", 0),
        ("offloadzero", "device", "cuda:"),
        ("offloadzero", "device", "cuda:1234567890"),
        ("offloadzero", "device", "mps"),
        ("offloadzero", "poison_released_leases", 0.5),
        ("offloadzero.units", "patterns", 1),
        ("offloadzero.units", "prefetch_units", 0),
        ("offloadzero.update", "in_backward", "yes"),
        ("offloadzero.update", "on_nonfinite", "ignore"),
        ("offloadzero.update", "chunk_elements", 5000),
        ("offloadzero.update", "chunk_elements", 0),
        ("offloadzero.update", "num_chunks_in_flight", 0),
        ("offloadzero.update", "num_chunks_in_flight", 1e9),
        ("offloadzero.update", "num_threads", 1e9),
        ("", "gradient_accumulation_steps", 1e30),
        ("aio", "block_size", 1e30),
        ("offloadzero.update", "num_threads", 0),
        ("offloadzero.update", "cores", []),
        ("offloadzero.update", "cores", [1 << 20]),
        ("offloadzero.aio", "backend", "libaio"),
        ("offloadzero.aio", "transfer_timeout_s", 0),
        ("offloadzero.aio", "transfer_timeout_s", "60s"),
    ],
)
def test_bad_values_are_named(path: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(nested(path, key, value))
    assert caught.value.key == (f"{path}.{key}" if path else key)
    assert caught.value.value is value or caught.value.value == value


CLASSES = {
    "offloadzero": OffloadConfig,
    "offloadzero.budgets": BudgetConfig,
    "offloadzero.placement[]": PlacementRule,
    "offloadzero.units": UnitConfig,
    "offloadzero.activation_checkpoints": ActivationConfig,
    "offloadzero.update": UpdateConfig,
    "offloadzero.aio": AioConfig,
    "offloadzero.observe": ObserveConfig,
}
# Of each number of the `offloadzero` block the smallest value, the largest (None: there is none), and a step off.
BOUNDS: dict[tuple[str, str], tuple[float, float | None, float]] = {
    ("offloadzero", "placement_tokens"): (1, 2**40, 1),
    ("offloadzero.budgets", "device"): (0, None, 1),
    ("offloadzero.budgets", "host"): (0, None, 1),
    ("offloadzero.budgets", "nvme"): (0, None, 1),
    ("offloadzero.units", "min_leaf_elements"): (0, None, 1),
    ("offloadzero.units", "prefetch_units"): (1, None, 1),
    ("offloadzero.activation_checkpoints", "input_bytes"): (1, None, 1),
    ("offloadzero.update", "chunk_elements"): (4096, None, 2048),
    ("offloadzero.update", "num_chunks_in_flight"): (1, 1024, 1),
    ("offloadzero.update", "num_threads"): (1, 1024, 1),
    ("offloadzero.aio", "transfer_timeout_s"): (0.1, 1e6, 0.001),
}


@loop_over({f"{path}.{key}": (path, key, *bounds) for (path, key), bounds in BOUNDS.items()})
def test_bounds_are_taken_and_what_is_beyond_is_refused(
    path: str, key: str, smallest: float, largest: float | None, step: float
) -> None:
    beside = {"tier": "host"} if key == "input_bytes" else {}
    for value in (smallest, 2**40 if largest is None else largest):
        load_config(nested(path, key, value, **beside))
    for value in (smallest - step, *([] if largest is None else [largest + step])):
        with pytest.raises(ConfigError) as caught:
            load_config(nested(path, key, value, **beside))
        assert caught.value.key == f"{path}.{key}"


def test_each_number_of_the_own_block_has_its_bounds_above() -> None:
    numbers = {
        (path, key.name)
        for path, config_class in CLASSES.items()
        for _, key in own_keys(config_class)
        if key.read in (read_float, read_int, read_num_bytes, read_multiple)
    }
    assert numbers == BOUNDS.keys()


def test_what_is_allowed_is_said_whole() -> None:
    for key, value, allowed in (
        ("in_backward", "yes", "true, false, auto"),
        ("cores", [], "at least one CPU"),
    ):
        with pytest.raises(ConfigError, match=allowed):
            load_config({"offloadzero": {"update": {key: value}}})


@loop_over({path: (path,) for path in TABLES if path and not path.endswith("[]")})
def test_a_block_must_be_an_object(path: str) -> None:
    head, _, last = path.rpartition(".")
    with pytest.raises(ConfigError) as caught:
        load_config(nested(head, last, 7))
    assert caught.value.key.startswith(path)


def test_accelerates_infinite_print_interval_is_never() -> None:
    assert load_config({"steps_per_print": math.inf}).steps_per_print is None
    assert load_config({"steps_per_print": 2000.0}).steps_per_print == 2000


# --- precision and optimizer -----------------------------------------------------------------------------


def test_fp16_block() -> None:
    block = {
        "loss_scale": 0,
        "initial_scale_power": 8,
        "loss_scale_window": 100,
        "hysteresis": 3,
        "min_loss_scale": 4,
        "consecutive_hysteresis": True,
    }
    config = load_config({"fp16": {"enabled": True, **block}})
    assert config.precision.param_dtype == "fp16"
    assert config.precision.loss_scale == LossScaleConfig(0.0, 8, 100, 3, 4.0, True)
    off = load_config({"fp16": {"enabled": False, **block}})
    assert off.precision == OffloadConfig().precision


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_one_precision_at_a_time(name: str) -> None:
    config = load_config({name: {"enabled": True}, "fp16": {"enabled": False}})
    assert (config.precision.param_dtype, config.precision.loss_scale) == ("bf16", None)
    with pytest.raises(ConfigError, match=rf"{name}\.enabled = True: fp16\.enabled is true as well"):
        load_config({name: {"enabled": True}, "fp16": {"enabled": True}})


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("fp32", "fp32"), ("torch.float32", "fp32"), ("bfloat16", "bf16"), ("half", "fp16"), ("fp16", "fp16")],
)
def test_grad_accum_dtype(spelling: str, dtype: str) -> None:
    assert load_config({"data_types": {"grad_accum_dtype": spelling}}).precision.grad_accum_dtype == dtype


LION = OptimizerConfig("Lion", MappingProxyType({"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.0}))
FULL_ADAMW = {"lr": 3e-4, "betas": [0, 0.95], "eps": 0, "weight_decay": 0.1, "bias_correction": False}


@pytest.mark.parametrize(
    ("type_", "params", "expected"),
    [
        ("Adam", {}, adam("Adam")),
        ("adamw", {}, adam("AdamW")),
        ("Adam", {"adam_w_mode": False}, adam("Adam", decoupled_weight_decay=False)),
        (
            *("AdamW", {**FULL_ADAMW, "torch_adam": True}),
            adam("AdamW", lr=3e-4, betas=(0.0, 0.95), eps=0.0, weight_decay=0.1, bias_correction=False),
        ),
        # DeepSpeed makes torch.optim's class then: its AdamW decays by 0.01 where nothing is said, its Adam does not.
        ("AdamW", {"torch_adam": True}, adam("AdamW", weight_decay=0.01)),
        ("Adam", {"torch_adam": True, "weight_decay": "auto"}, adam("Adam", weight_decay=0.01)),
        ("Adam", {"torch_adam": True, "weight_decay": 0}, adam("Adam")),
        ("AdamW", {"torch_adam": False}, adam("AdamW")),
        ("Adam", {"foreach": False, "fp32_optimizer_states": True}, adam("Adam")),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, adam("Adam", decoupled_weight_decay=False)),
        ("Adam", {"lr": "auto", "betas": "auto", "weight_decay": "auto"}, adam("Adam", lr=None)),
        ("lion", {"lr": 1e-4}, LION),
    ],
)
def test_optimizers(type_: str, params: dict[str, Any], expected: OptimizerConfig) -> None:
    block = {"type": type_, "params": params} if params else {"type": type_}
    assert load_config({"optimizer": block}).optimizer == expected


BUILT = "available are Adam, AdamW, Lion, Adagrad, SGD, Muon"


@pytest.mark.parametrize(
    ("type_", "params", "message"),
    [
        ("Adamax", {}, f"type = 'Adamax': known, not built yet: {BUILT}"),
        ("Adagrad", {"lr_decay": -1}, r"optimizer\.params\.lr_decay"),
        ("Lion", {"eps": 1e-6}, r"params\.eps = 1e-06: Lion takes lr, betas, weight_decay$"),
        ("Lion", {"adam_w_mode": True}, r"params\.adam_w_mode = True: Lion takes"),
        (
            *("Adam", {"fp32_optimizer_states": False}),
            r"params\.fp32_optimizer_states = False: offloadzero\.state_layout = compact .*allowed true$",
        ),
        ("SGD", {"torch_adam": True}, r"params\.torch_adam = True: SGD takes"),
        ("SGD", {"betas": [0.9, 0.9]}, r"params\.betas = .*: SGD takes lr, momentum, dampening"),
        ("OneBitAdam", {}, "known, not built yet"),
        ("Adma", {}, rf"unknown optimizer: {BUILT} \(did you mean 'Adam"),
        (3, {}, r"optimizer\.type = 3"),
        (None, {}, rf"optimizer\.type = None: the name of an optimizer: {BUILT}"),
        ("Adam", {"learning_rate": 1}, r"optimizer\.params\.learning_rate = 1: unknown key"),
        ("Adam", {"beta": 1}, "did you mean 'betas'"),
        ("Adam", {"max_grad_norm": 1}, "write gradient_clipping"),
        ("AdamW", {"adam_w_mode": False}, "contradicts the type"),
        ("Adam", {"betas": [0.9]}, "two numbers"),
        ("Adam", {"betas": [0.9, 1]}, "below 1"),
        ("Adam", {"betas": [-0.1, 0.9]}, r"betas\[0\] = -0.1"),
        ("Adam", {"betas": 0.9}, "two numbers"),
        ("Adam", {"betas": ["auto", 0.9]}, r"optimizer\.params\.betas\[0\]"),
        ("Adam", {"eps": -1e-8}, r"optimizer\.params\.eps"),
        ("Adam", {"lr": -1}, r"optimizer\.params\.lr"),
        ("Adam", {"lr": 1e300}, r"optimizer\.params\.lr = 1e\+300: .* at most 3\.4e\+38"),
        ("Adam", {"weight_decay": -1}, r"optimizer\.params\.weight_decay"),
    ],
)
def test_bad_optimizers(type_: object, params: dict[str, Any], message: str) -> None:
    block = {"params": params} if type_ is None else {"type": type_, "params": params}
    with pytest.raises(ConfigError, match=message):
        load_config({"optimizer": block})


def test_scheduler_parameters_are_passed_on_as_they_are() -> None:
    params = {"warmup_min_lr": "auto", "warmup_max_lr": 0.5, "warmup_num_steps": None}
    scheduler = load_config({"scheduler": {"type": "WarmupLR", "params": params}}).scheduler
    assert scheduler is not None
    assert scheduler.type == "WarmupLR"
    assert scheduler.params == params
    assert isinstance(scheduler.params, MappingProxyType)
    with pytest.raises(ConfigError, match=r"scheduler\.type = None"):
        load_config({"scheduler": {"params": {"warmup_num_steps": 3}}})


@pytest.mark.parametrize("block", ["optimizer", "scheduler"])
def test_an_empty_block_is_none(block: str) -> None:
    """As in DeepSpeed, where what has no type is not built."""
    assert load_config({block: {}}) == load_config({})


# --- activation checkpoints ------------------------------------------------------------------------------


def load_activations(own: dict[str, Any] | None, **deepspeeds: bool) -> OffloadConfig:
    block = {} if own is None else {"activation_checkpoints": own}
    return load_config({"activation_checkpointing": deepspeeds, "offloadzero": {**block, "nvme_path": "."}})


@pytest.mark.parametrize(
    ("own", "tier"),
    [({}, TierName.HOST), ({"tier": "host"}, TierName.HOST), ({"tier": "nvme"}, TierName.NVME)],
)
def test_deepspeeds_key_puts_inputs_on_the_host(own: dict[str, Any], tier: TierName) -> None:
    found = load_activations(own, cpu_checkpointing=True).activation_checkpoints
    assert found is not None
    assert found.tier is tier
    assert load_activations(own, cpu_checkpointing=False) == load_activations(own)


def test_deepspeeds_keys_are_of_our_checkpoints() -> None:
    assert load_activations({}, partition_activations=True).partition_activations
    assert load_activations(None, partition_activations=False) == load_activations(None)
    for name in ("cpu_checkpointing", "partition_activations"):
        without = load_activations(None, **{name: True})
        (warning,) = without.warnings
        assert warning.startswith(f"activation_checkpointing.{name} = true has no effect: ")
        assert '"offloadzero": {"activation_checkpoints": {}} would switch on' in warning
        assert replace(without, warnings=()) == load_activations(None)
    with pytest.raises(ConfigError, match=r"activation_checkpoints\.tier = 'device': host or nvme, or no "):
        load_activations({"tier": "device"}, cpu_checkpointing=True)
