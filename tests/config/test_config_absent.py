"""What stands where a key does not: the values that notes of used keys give for when they are absent."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import offloadzero
from offloadzero.config import load_config
from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS, Action
from offloadzero.core.segments import TierName

# Key -> what its note gives for when it is absent, and what a configuration without it has.
ABSENT: Mapping[str, tuple[str, Callable[[offloadzero.OffloadConfig], bool]]] = {
    "managed_gradient_accumulation": ("true when", lambda c: c.batch.managed),
    "aio.block_size": ("1 MiB when", lambda c: c.aio.block_size == 2**20),
    "aio.queue_depth": ("32 when", lambda c: c.aio.queue_depth == 32),
    "aio.intra_op_parallelism": ("1 when", lambda c: c.aio.num_threads == 1),
    "offloadzero.aio.transfer_timeout_s": ("no limit when", lambda c: c.aio.transfer_timeout_s is None),
    "zero_optimization.stage": ("0, nothing, when", lambda c: c.zero_stage == 0),
    "zero_optimization.offload_param.device": ("none when", lambda c: c.placement.rules == ()),
    "zero_optimization.offload_optimizer.device": ("none when", lambda c: c.placement.rules == ()),
    "zero_optimization.offload_param.pin_memory": ("true when", lambda c: c.pin_memory),
    "zero_optimization.offload_optimizer.pin_memory": ("true when", lambda c: c.pin_memory),
    "zero_optimization.offload_optimizer.ratio": ("1 when", lambda c: c.placement.host_update_ratio == 1),
    "data_types.grad_accum_dtype": ("parameter's dtype when", lambda c: c.precision.grad_accum_dtype is None),
    "offloadzero.activation_checkpoints": ("off when", lambda c: c.activation_checkpoints is None),
    "offloadzero.activation_checkpoints.units": (
        "every repeated block (or unit of units.patterns) when",
        lambda c: c.activation_checkpoints is None,
    ),
    "activation_checkpointing.partition_activations": ("false when", lambda c: not c.partition_activations),
    "offloadzero.activation_checkpoints.tier": (
        "device when",
        lambda _: with_checkpoints().activation_checkpoints.tier is TierName.DEVICE,
    ),
    "offloadzero.activation_checkpoints.input_bytes": (
        "taken in the first step when",
        lambda _: with_checkpoints().activation_checkpoints.input_bytes is None,
    ),
    "offloadzero.budgets": ("what the machine has when", lambda c: c.budgets == type(c.budgets)()),
    "offloadzero.units.patterns": ("default cut when", lambda c: c.units.patterns == ()),
    "offloadzero.update.on_nonfinite": ("error when", lambda c: c.update.on_nonfinite == "error"),
    "offloadzero.update.num_threads": ("this process may use when", lambda c: c.update.num_threads is None),
    "offloadzero.update.cores": ("any when", lambda c: c.update.cores == ()),
    "offloadzero.device": ('"cuda" if there is one when', lambda c: c.device is None),
    "optimizer.params.lr": (
        "0.001 (Adagrad: 0.01, Muon: 0.02) when",
        lambda _: absent("lr") == {1e-3, 1e-2, 2e-2},
    ),
    "optimizer.params.muon_lr": (
        "that of lr when",
        lambda _: absent("muon_lr") == {2e-2} and rates() == (0.5, 0.5),
    ),
    "optimizer.params.adam_lr": (
        "that of lr when absent, 0.0003 where lr is",
        lambda _: absent("adam_lr") == {3e-4} and rates() == (0.5, 0.5),
    ),
    "optimizer.params.betas": (
        "0.9, 0.999 (Muon: 0.9, 0.95) when",
        lambda _: absent("betas") == {(0.9, 0.999), (0.9, 0.95)},
    ),
    "optimizer.params.eps": (
        "1e-8 (Adagrad: 1e-10, Muon: 1e-10) when",
        lambda _: absent("eps") == {1e-8, 1e-10},
    ),
    "optimizer.params.weight_decay": ("0 when", lambda _: absent("weight_decay") == {0}),
    "optimizer.params.lr_decay": ("0 when", lambda _: absent("lr_decay") == {0}),
    "optimizer.params.initial_accumulator_value": (
        "0 when",
        lambda _: absent("initial_accumulator_value") == {0},
    ),
    "optimizer.params.momentum": ("0 (Muon: 0.95) when", lambda _: absent("momentum") == {0, 0.95}),
    "optimizer.params.dampening": ("0 when", lambda _: absent("dampening") == {0}),
    "optimizer.params.nesterov": ("false when", lambda _: absent("nesterov") == {False}),
    "optimizer.params.adam_w_mode": ("true when", lambda _: absent("decoupled_weight_decay") == {True}),
    "optimizer.params.bias_correction": ("true when", lambda _: absent("bias_correction") == {True}),
    "fp16.loss_scale": ("0 when", lambda _: scaling().static == 0),
    "fp16.initial_scale_power": ("16 when", lambda _: scaling().initial_scale_power == 16),
    "fp16.loss_scale_window": ("1000 when", lambda _: scaling().window == 1000),
    "fp16.hysteresis": ("2 when", lambda _: scaling().hysteresis == 2),
    "fp16.min_loss_scale": ("1 when", lambda _: scaling().min_scale == 1),
    "fp16.consecutive_hysteresis": ("false when", lambda _: not scaling().consecutive_hysteresis),
    "zero_optimization.zero_hpz_partition_size": ("1 when", lambda c: c.zero_plus_plus.node_ranks == 1),
    "offloadzero.placement[].units": ("* when", lambda _: one_rule().units == "*"),
    "offloadzero.units.min_leaf_elements": ("; 100000 when", lambda c: c.units.min_leaf_elements == 100_000),
    "offloadzero.units.prefetch_units": ("; 2 when", lambda c: c.units.prefetch_units == 2),
    "offloadzero.update.chunk_elements": ("; 2097152 when", lambda c: c.update.chunk_elements == 2_097_152),
    "offloadzero.update.num_chunks_in_flight": ("; 8 when", lambda c: c.update.num_chunks_in_flight == 8),
    "offloadzero.frozen_weights": ("; auto when", lambda c: c.frozen_weights == "auto"),
    "offloadzero.versions": ("auto when", lambda c: c.versions is None),
    "offloadzero.durable": ("; false when", lambda c: c.durable == 0),
    "offloadzero.aio.checksums": ("; false when", lambda c: not c.aio.checksums),
    "offloadzero.observe.step_line": ("; false when", lambda c: not c.observe.step_line),
    "offloadzero.observe.nvme_shared": ("; false when", lambda c: not c.observe.nvme_shared),
}

# Said of keys whose absence is tried where a model is: DeepSpeed's clipping, homes that follow from others', the order.
ELSEWHERE = {
    "gradient_clipping",
    "offloadzero.placement_tokens",
    *(f"offloadzero.placement{form}.{segment}" for form in ("", "[]") for segment in ("scales", "grad")),
}
OPTIMIZERS = ("Adam", "Lion", "Adagrad", "SGD", "Muon")


def rates() -> tuple[float, float]:
    """Muon's two rates where only one is given for both."""
    params = load_config({"optimizer": {"type": "Muon", "params": {"lr": 0.5}}}).optimizer.params
    return params["muon_lr"], params["adam_lr"]


def with_checkpoints() -> Any:
    return load_config({"offloadzero": {"activation_checkpoints": {}}})


def absent(option: str) -> set[Any]:
    """What the optimizers that know the option take in its place."""
    groups = [load_config({"optimizer": {"type": type}}).optimizer.params for type in OPTIMIZERS]
    return {group[option] for group in groups if option in group}


def scaling() -> Any:
    return load_config({"fp16": {"enabled": True}}).precision.loss_scale


def one_rule() -> Any:
    return load_config({"offloadzero": {"placement": [{"param": "host"}]}}).placement.rules[0]


def test_what_stands_where_a_key_does_not() -> None:
    config = load_config({})
    said = {
        f"{path}.{key}".removeprefix("."): spec.note
        for path, table in (*DEEPSPEED_KEYS.items(), *OWN_KEYS.items())
        for key, spec in table.items()
        if spec.action is Action.USE and re.search(r" absent|; \S+$", spec.note)
    }
    for key, (text, holds) in ABSENT.items():
        assert text in said.pop(key), key
        assert holds(config), key
    assert set(said) == ELSEWHERE
