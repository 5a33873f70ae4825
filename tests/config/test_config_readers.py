"""Who reads what a key sets: a key that nobody reads fails here.

Engines of every kind run while the fields of the configuration note which module reads them.
`tests/config/test_config.py` shows that each key changes a field.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.config import load_config, schema
from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS, Action
from tests.config.blocks import nested
from tests.config.test_config import USED, USED_ELSEWHERE
from tests.support.tiny import TinyModel, make_engine, settings, tokens, train

# Field -> the module that reads it. Those that hold others are not listed.
READERS: Mapping[str, str] = {
    "BatchConfig.train_batch_size": "step.accumulation",
    "BatchConfig.micro_batch_size": "api.initialize",
    "BatchConfig.gradient_accumulation_steps": "step.accumulation",
    "BatchConfig.managed": "step.accumulation",
    "BatchConfig.unresolved": "config.load",
    "LossScaleConfig.static": "step.step_decision",
    "LossScaleConfig.initial_scale_power": "step.step_decision",
    "LossScaleConfig.window": "step.step_decision",
    "LossScaleConfig.hysteresis": "step.step_decision",
    "LossScaleConfig.min_scale": "step.step_decision",
    "LossScaleConfig.consecutive_hysteresis": "step.step_decision",
    "PrecisionConfig.param_dtype": "engine.build",
    "PrecisionConfig.grad_accum_dtype": "planning.engine_plan",
    "OptimizerConfig.type": "api.engine",
    "OptimizerConfig.params": "api.optimizer",
    "SchedulerConfig.type": "api.deepspeed.schedule_by_name",
    "SchedulerConfig.params": "api.deepspeed.schedule_by_name",
    "BudgetConfig.device": "planning.memory_plan",
    "BudgetConfig.host": "planning.memory_plan",
    "BudgetConfig.nvme": "planning.memory_plan",
    "PlacementRule.units": "planning.homes",
    "PlacementRule.tiers": "planning.homes",
    "PlacementConfig.rules": "planning.homes",
    "PlacementConfig.host_update_ratio": "planning.homes",
    "PlacementConfig.auto": "planning.engine_plan",
    "UnitConfig.patterns": "streaming.building.units",
    "UnitConfig.min_leaf_elements": "streaming.building.units",
    "UnitConfig.prefetch_units": "planning.homes",
    "ActivationConfig.units": "streaming.building.units",
    "ActivationConfig.tier": "activations.store",
    "ActivationConfig.input_bytes": "planning.homes",
    "OffloadConfig.partition_activations": "config.load",
    "UpdateConfig.in_backward": "planning.memory_plan",
    "UpdateConfig.on_nonfinite": "engine.build",
    "UpdateConfig.chunk_elements": "engine.build",
    "UpdateConfig.num_chunks_in_flight": "planning.memory_plan",
    "UpdateConfig.num_threads": "engine.build",
    "UpdateConfig.cores": "engine.build",
    "AioConfig.backend": "memory.nvme",
    "AioConfig.block_size": "memory.nvme",
    "AioConfig.queue_depth": "memory.nvme",
    "AioConfig.num_threads": "memory.nvme",
    "AioConfig.checksums": "memory.nvme",
    "AioConfig.transfer_timeout_s": "memory.nvme",
    "ZeroPlusPlusConfig.quantized_gradients": "update.wire_codes",
    "ZeroPlusPlusConfig.node_ranks": "update.wire_codes",
    "ZeroPlusPlusConfig.quantized_weights": "update.wire_codes",
    "ZeroPlusPlusConfig.quantized_nontrainable_weights": "update.wire_codes",
    "ObserveConfig.step_line": "observe.monitor",
    "ObserveConfig.run_dir": "observe.monitor",
    "ObserveConfig.trace_steps": "observe.monitor",
    "ObserveConfig.nvme_shared": "observe.monitor",
    "OffloadConfig.gradient_clipping": "engine.build",
    "OffloadConfig.zero_stage": "api.deepspeed.engine_names",
    "OffloadConfig.world_size": "api.initialize",
    "OffloadConfig.communication_dtype": "api.deepspeed.engine_names",
    "OffloadConfig.nvme_paths": "engine.build",
    "OffloadConfig.pin_memory": "engine.build",
    "OffloadConfig.placement_tokens": "planning.engine_plan",
    "OffloadConfig.state_layout": "engine.build",
    "OffloadConfig.max_live_parameters": "planning.homes",
    "OffloadConfig.gather_16bit_weights_on_save": "api.deepspeed.engine_names",
    "OffloadConfig.poison_released_leases": "engine.build",
    "OffloadConfig.device": "engine.runtime",
    "OffloadConfig.steps_per_print": "api.engine",
    "OffloadConfig.notices": "engine.runtime",
    "OffloadConfig.warnings": "api.initialize",
}
SAID = {"OffloadConfig.notices", "OffloadConfig.warnings"}  # what is said of a key is not what it does
# Read where there are several ranks: tests/ranks/test_ranks_mesh.py.
OF_A_MESH = {
    f"MeshConfig.{name}" for name in ("data_ranks", "tensor_rank", "tensor_size", "pipeline_rank", "source")
}
CLASSES = [cls for cls in vars(schema).values() if isinstance(cls, type) and dataclasses.is_dataclass(cls)]


def run_engines(directory: Path) -> None:
    """Every part of a configuration is used by one of them."""
    observe = {"run_dir": str(directory / "run"), "trace_steps": [1], "step_line": True}
    with_everything = settings(
        directory,
        gradient_accumulation_steps=2,
        activation_checkpoints={"tier": "nvme", "units": ["blocks.*"], "input_bytes": "1MiB"},
        observe=observe,
        update={"chunk_elements": 65536},
    )
    with_everything["scheduler"] = {"type": "WarmupLR"}
    with_everything["steps_per_print"] = 1
    engine, _, _, _ = offloadzero.initialize(
        model=TinyModel(), config=with_everything, training_data=[tokens(seed)[0] for seed in range(4)]
    )
    train(engine, num_steps=2)
    engine.set_train_batch_size(4)
    assert engine.communication_data_type == torch.bfloat16
    answers = ("zero_optimization_stage", "zero_gather_16bit_weights_on_model_save", "optimizer_name")
    assert [getattr(engine, name)() for name in answers] == [3, False, "AdamW"]
    engine.close()
    budgets = dict.fromkeys(("device", "host", "nvme"), "1GiB")
    for more in (
        {"placement": "auto", "budgets": budgets},
        {"placement": [{"units": "blocks.*", "param": "host"}]},
    ):
        engine = make_engine(settings(directory, **more))
        train(engine, num_steps=1)
        engine.close()
    fp16 = {"enabled": True, "hysteresis": 1, "initial_scale_power": 4}
    engine = make_engine(settings(None, placement="host", bf16=None, fp16=fp16))
    train(engine, num_steps=1)
    engine.backward(engine(tokens(0)) * math.inf)
    engine.step()
    assert engine.loss_scale() == 2.0**3
    engine.close()


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Field -> the modules of the package that have read it, below `offloadzero.`."""
    found: dict[str, set[str]] = {}

    def noting(cls: type) -> Any:
        names = {field.name for field in dataclasses.fields(cls)}

        def get(self: Any, name: str) -> Any:
            if name in names:
                module = sys._getframe(1).f_globals["__name__"]
                found.setdefault(f"{cls.__name__}.{name}", set()).add(module.removeprefix("offloadzero."))
            return object.__getattribute__(self, name)

        return get

    with pytest.MonkeyPatch.context() as patch:
        for cls in CLASSES:
            patch.setattr(cls, "__getattribute__", noting(cls))
        torch.manual_seed(1)
        run_engines(tmp_path_factory.mktemp("files"))
    return found


def is_container(field: dataclasses.Field[Any]) -> bool:
    return any(f"{cls.__name__}" in str(field.type).split(" | ") for cls in CLASSES)


def test_every_field_is_listed() -> None:
    fields = {
        f"{cls.__name__}.{field.name}"
        for cls in CLASSES
        for field in dataclasses.fields(cls)
        if not is_container(field)
    }
    assert fields == set(READERS) | OF_A_MESH


@pytest.mark.parametrize("field", READERS)
def test_who_reads_a_field(field: str, readers: dict[str, set[str]]) -> None:
    assert READERS[field] in readers.get(field, set())


def differing(one: Any, other: Any, name: str) -> set[str]:
    """The listed fields in which two configurations, or parts of them, differ."""
    if type(one) is not type(other) and not (one is None or other is None):
        raise AssertionError(f"{name}: {one!r} and {other!r}")
    part = other if one is None else one
    if isinstance(part, tuple) and part and dataclasses.is_dataclass(part[0]):
        return {name} if one != other else set()
    if not dataclasses.is_dataclass(part):
        return {name} if one != other else set()
    found: set[str] = set()
    for field in dataclasses.fields(part):
        own = f"{type(part).__name__}.{field.name}"
        found |= differing(getattr(one, field.name, None), getattr(other, field.name, None), own)
    return found


# Those that `test_config.py` leaves to tests of their own, in `test_config_placement.py` and `test_config_values.py`.
ELSEWHERE = {
    ("activation_checkpointing", "partition_activations"): {"OffloadConfig.partition_activations"},
    ("activation_checkpointing", "cpu_checkpointing"): {"ActivationConfig.tier"},
    ("zero_optimization.offload_param", "device"): {"PlacementConfig.rules"},
    ("zero_optimization.offload_optimizer", "device"): {"PlacementConfig.rules"},
    ("zero_optimization.offload_param", "nvme_path"): {"OffloadConfig.nvme_paths"},
    ("zero_optimization.offload_optimizer", "nvme_path"): {"OffloadConfig.nvme_paths"},
    ("zero_optimization.offload_optimizer", "ratio"): {"PlacementConfig.host_update_ratio"},
    ("data_types", "param_dtype"): {"PrecisionConfig.param_dtype"},  # must agree with it
}
# They hold keys that are accepted or refused, and nothing else.
SAY_ONLY = {("", "tensor_parallel"), ("", "checkpoint")}


def test_every_key_sets_a_field_that_is_read() -> None:
    assert set(ELSEWHERE) == USED_ELSEWHERE
    for path, table in (*DEEPSPEED_KEYS.items(), *OWN_KEYS.items()):
        for key, spec in table.items():
            if spec.action not in (Action.USE, Action.MAP):
                continue
            if (path, key) in ELSEWHERE:
                assert ELSEWHERE[path, key] <= set(READERS)
                continue
            value, beside = USED[path, key]
            without = load_config(nested(path, key, None, **beside)) if beside else load_config({})
            changed = differing(load_config(nested(path, key, value, **beside)), without, "") - SAID
            assert changed <= set(READERS), f"{path}.{key}"
            assert bool(changed) != ((path, key) in SAY_ONLY), f"{path}.{key}: {changed}"
