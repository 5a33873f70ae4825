"""What a key sets is read where something follows from it: a key that nobody reads fails here.

Engines of every kind run while the fields of the configuration note which modules read them; and each key changes one.
"""

from __future__ import annotations

import dataclasses
import math
import sys
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


FIELDS = {
    f"{cls.__name__}.{field.name}"
    for cls in CLASSES
    for field in dataclasses.fields(cls)
    if not is_container(field)
} - OF_A_MESH
# Where a configuration is made: what only this reads is not used. The last of what is made settles what was left open.
IS_MADE_BY, SETTLES = "config.", "config.load"


def test_each_field_is_read_outside_its_room(readers: dict[str, set[str]]) -> None:
    unread = {
        field
        for field in FIELDS
        if all(name.startswith(IS_MADE_BY) and name != SETTLES for name in readers.get(field, ()))
    }
    assert not unread


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
                assert ELSEWHERE[path, key] <= FIELDS
                continue
            value, beside = USED[path, key]
            without = load_config(nested(path, key, None, **beside)) if beside else load_config({})
            with_it = load_config(nested(path, key, value, **beside))
            assert with_it != without, f"{path}.{key}"
            assert spec.off == ()
            changed = differing(with_it, without, "") - SAID
            assert changed <= FIELDS, f"{path}.{key}"
            assert bool(changed) != ((path, key) in SAY_ONLY), f"{path}.{key}: {changed}"
