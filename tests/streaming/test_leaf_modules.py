"""Leaf modules: one unit each, by DeepSpeed's functions or by configuration."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offloadzero
from offloadzero.config import load_config
from offloadzero.errors import ConfigError, StateError
from offloadzero.streaming.building.units import cut_units
from offloadzero.update.specs.adam import ADAM
from offloadzero.zero import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from tests.support.tiny import Block, TinyModel, settings


class Experts(nn.Module):
    """A container of experts, in it one of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(Block(8) for _ in range(3))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(8), Experts(), nn.ModuleDict({"moe": Experts()})])
        self.head = nn.Linear(8, 8)


def unit_names(model: nn.Module, **zero: Any) -> set[str]:
    """The units of a model under keys of `zero_optimization`, and those of `offloadzero.units` as `units`."""
    own = {"units": zero.pop("units", {})}
    config = load_config({"zero_optimization": {"stage": 3, **zero}, "offloadzero": own})
    group_of = {id(param): 0 for param in model.parameters()}
    cut = cut_units(model, config.units, group_of=group_of, param_dtype=None, spec=ADAM)
    return {record.name for record in cut.records}


EXPERTS = {f"{outer}.experts.{n}" for outer in ("layers.1", "layers.2.moe") for n in range(3)}
AS_LEAVES = {"(rest)", "layers.1", "layers.2.moe"}


def test_without_leaves_each_expert_is_a_unit() -> None:
    assert unit_names(Mixture()) == {"(rest)", *EXPERTS}


@pytest.mark.parametrize(
    "leaf_module",
    [
        {"classes": "Experts"},
        {"classes": [f"{__name__}.Experts", "SomebodyElses"]},
        {"names": ["layers.1"], "name_suffixes": ["moe"]},
    ],
)
def test_the_configuration_names_leaves(leaf_module: dict[str, Any]) -> None:
    assert unit_names(Mixture(), leaf_module=leaf_module) == AS_LEAVES


@pytest.mark.parametrize("classes", [[Experts], ["Experts"], [nn.Linear, f"{__name__}.Experts"]])
def test_a_script_sets_leaves(classes: list[Any]) -> None:
    model = Mixture()
    found = set_z3_leaf_modules(model, classes)
    assert get_z3_leaf_modules(model) == found
    assert all(z3_leaf_module(module) for module in found)
    assert not z3_leaf_module(model.layers)
    assert unit_names(model) >= AS_LEAVES
    assert unit_names(copy.deepcopy(model)) >= AS_LEAVES
    assert unset_z3_leaf_modules(model, classes) == found
    assert get_z3_leaf_modules(model) == []
    assert unit_names(model) == {"(rest)", *EXPERTS}


def test_a_class_is_that_of_its_subclasses_too() -> None:
    class Special(Experts):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Special())
    assert set_z3_leaf_modules(model, [Experts]) == [model[1]]
    assert set_z3_leaf_modules(model, ["Experts"], raise_if_not_found=False) == []


def test_of_two_units_one_in_the_other_the_outer_one_is_it() -> None:
    leaf_module = {"classes": ["Experts", "Block"]}
    assert unit_names(Mixture(), leaf_module=leaf_module) == {*AS_LEAVES, "layers.0"}
    patterns = {"patterns": ["layers.2", "layers.1.experts.*"]}
    assert unit_names(Mixture(), leaf_module=leaf_module, units=patterns) == {
        *("(rest)", "layers.0", "layers.1", "layers.2"),
    }
    model = TinyModel()
    assert unit_names(model, leaf_module={"classes": ["Linear"]}) == unit_names(model)


def test_what_cannot_be_a_leaf_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"leaf module layers\.1\.experts = 'ModuleList': .*part: Experts"):
        unit_names(Mixture(), leaf_module={"name_suffixes": ["experts"]})
    with pytest.raises(
        ConfigError, match="leaf modules = 'Mixture': modules of the model, and not the model"
    ):
        unit_names(Mixture(), leaf_module={"classes": ["Mixture"]})
    with pytest.raises(ConfigError, match=r"leaf_module_classes = 'Expert': .*did you mean 'Experts'"):
        set_z3_leaf_modules(Mixture(), ["Expert"])
    with pytest.raises(ConfigError, match=r"leaf_module_classes = 3: classes of modules, or their names"):
        set_z3_leaf_modules(Mixture(), [3])  # type: ignore[list-item]
    with pytest.raises(
        ConfigError, match=r"zero_optimization\.leaf_module\.class = .*did you mean 'classes'"
    ):
        load_config({"zero_optimization": {"leaf_module": {"class": ["Experts"]}}})


def test_an_offloaded_model_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = TinyModel()
    config = settings(tmp_path)
    config["zero_optimization"] = {
        **config["zero_optimization"],
        "leaf_module": {"classes": ["Linear"], "names": ["a"]},
    }
    assert not z3_leaf_parameter(model.head.weight)
    with caplog.at_level(logging.WARNING, logger="offloadzero"):
        engine, *_ = offloadzero.initialize(model=model, config=config)
    assert "zero_optimization.leaf_module.names: 'a' is that of no module of the model" in caplog.text
    assert "leaf_module.classes" not in caplog.text
    assert z3_leaf_module(model.head)
    assert z3_leaf_parameter(model.head.weight)
    assert not z3_leaf_module(model.blocks[0])
    for change in (set_z3_leaf_modules, unset_z3_leaf_modules):
        with pytest.raises(StateError, match=r"before initialize\(\) or offload\(\)"):
            change(model, [nn.Linear])
    engine.close()
