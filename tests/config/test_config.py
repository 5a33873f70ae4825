"""Every key of the tables does what docs/config.md says, and mistakes are named with their full path."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadzero.config import (
    AioConfig,
    BatchConfig,
    BudgetConfig,
    LossScaleConfig,
    OffloadConfig,
    OptimizerConfig,
    PlacementConfig,
    UpdateConfig,
    load_config,
)
from offloadzero.config.batch import resolve_batch
from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS, Action, KeySpec, Kind
from offloadzero.config.optimizer import OPTIMIZERS
from offloadzero.config.parse import read_num_bytes
from offloadzero.errors import ConfigError
from offloadzero.segments import SegmentKind, TierName
from tests.support.cases import case, loop_over

REPOSITORY = Path(__file__).parents[2]
DOC = REPOSITORY / "docs" / "config.md"
TABLES = {**DEEPSPEED_KEYS, **OWN_KEYS}
ALL_KEYS = [(path, key, spec) for path, table in TABLES.items() for key, spec in table.items()]

RECORD = ("param", "master", "exp_avg", "exp_avg_sq")


def keys_with(*actions: Action) -> dict[str, tuple[str, str, KeySpec]]:
    """The keys of the tables with one of these actions, by name."""
    return {
        f"{path}.{key}".removeprefix("."): (path, key, spec)
        for path, key, spec in ALL_KEYS
        if spec.action in actions
    }


def nested(path: str, key: str, value: object, **beside: object) -> dict[str, Any]:
    """A configuration with `value` at path.key; blocks on the way get what they need to be valid."""
    inner: Any = {**NEEDED.get(path, {}), **beside, key: value}
    parts = path.split(".") if path else []
    for depth in reversed(range(len(parts))):
        name = parts[depth].removesuffix("[]")
        above = NEEDED.get(".".join(parts[:depth]), {})
        if path == "optimizer.params" and depth == 1:
            above = type_that_takes(key)
        inner = {**above, name: [inner] if parts[depth].endswith("[]") else inner}
    return dict(inner)


def type_that_takes(argument: str) -> dict[str, str]:
    types = ("AdamW", *OPTIMIZERS)
    return {"type": next((name for name in types if argument in OPTIMIZERS[name]), "AdamW")}


NEEDED = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}


def homes(config: OffloadConfig) -> dict[str, str]:
    """Where the rules for every unit put each segment of Adam's records; a later rule wins."""
    tiers: dict[str, TierName] = {}
    for rule in config.placement.rules:
        assert rule.units == "*"
        of_rule = dict(rule.tiers)
        states = of_rule.pop(SegmentKind.STATES, None)
        if states is not None:
            tiers.update(dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), states))
        tiers.update({kind.value: tier for kind, tier in of_rule.items()})
    return {kind: tier.value for kind, tier in tiers.items()}


def zero(stage: object = 3, **block: object) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **block}}


# --- sources ---------------------------------------------------------------------------------------------


def test_an_empty_configuration_is_the_defaults() -> None:
    assert load_config({}) == OffloadConfig()


def test_a_file_a_path_and_a_dict_read_the_same_and_the_dict_is_left_alone(tmp_path: Path) -> None:
    source = {
        "train_batch_size": 8,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "cpu_offload": True},
    }
    before = copy.deepcopy(source)
    file = tmp_path / "ds.json"
    file.write_text("\ufeff" + json.dumps(source), encoding="utf-8")  # editors on Windows write the mark
    config = load_config(source, world_size=2)
    assert source == before
    assert load_config(file, world_size=2) == load_config(str(file), world_size=2) == config
    assert config.batch == BatchConfig(8, 4, 1)
    assert load_config(config, world_size=64) is config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"train_batch_size": 1, "train_batch_size": 2}',
            r"train_batch_size = 2: duplicate key, given before as 1",
        ),
        ('{"aio": {"queue_depth": 1, "queue_depth": 1}}', r"aio\.queue_depth = 1: duplicate key"),
        (
            '{"offloadzero": {"placement": [{"units": "a"}, {"param": "host", "param": "host"}]}}',
            r"offloadzero\.placement\[1\]\.param = 'host': duplicate key",
        ),
        ('{"aio": {"a": {}, "a": {"b": 1}}}', r"aio\.a = \{'b': 1\}: duplicate key"),
        ('{\n  "train_batch_size": 1\n  "aio": {}\n}', r"ds\.json:3:3 = '\"aio\": \{\}': not valid JSON"),
        ("", r"ds\.json:1:1 = '': not valid JSON"),
        ("[1]", r"must hold one JSON object"),
        ("[" * 100_000, r"nested too deeply"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json': the file cannot be read: No such file"):
        load_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a\xff": 1}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.json")


def adam(name: str, **options: Any) -> OptimizerConfig:
    """Adam with its defaults and these options."""
    defaults = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled_weight_decay": True,
        "bias_correction": True,
    }
    return OptimizerConfig(name, MappingProxyType({**defaults, **options}))


@pytest.mark.parametrize("source", [None, 3, [], [("a", 1)]])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="a dict, the path of a JSON file, or an OffloadConfig"):
        load_config(source)


@pytest.mark.parametrize("world_size", [0, -1, 1.5, "2", True])
def test_world_size_is_checked(world_size: Any) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        load_config({}, world_size=world_size)


@pytest.mark.parametrize("name", ["resident", "host", "nvme", "mixed"])
def test_the_examples_load(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = REPOSITORY / "examples" / "configs" / f"{name}.json"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "offload-files").mkdir()
    config = load_config(file)
    assert config.zero_stage == 3
    assert config.notices == ()


# --- every key of the tables -----------------------------------------------------------------------------

# (block, key) -> a value that must change the configuration, and what the same block needs beside it.
USED: dict[tuple[str, str], tuple[object, dict[str, Any]]] = {
    ("", "train_batch_size"): (8, {}),
    ("", "train_micro_batch_size_per_gpu"): (8, {}),
    ("", "gradient_accumulation_steps"): (8, {}),
    ("", "gradient_clipping"): (0.5, {}),
    ("", "optimizer"): ({"type": "Adam"}, {}),
    ("", "scheduler"): ({"type": "WarmupLR"}, {}),
    ("", "managed_gradient_accumulation"): (False, {}),
    ("", "tensor_parallel"): ({"preset_model": "llama"}, {}),
    ("", "fp16"): ({"enabled": True}, {}),
    ("", "bf16"): ({"enabled": True}, {}),
    ("", "data_types"): ({"grad_accum_dtype": "fp32"}, {}),
    ("", "zero_optimization"): (True, {}),
    ("", "aio"): ({"queue_depth": 3}, {}),
    ("", "activation_checkpointing"): ({"profile": True}, {}),
    ("", "checkpoint"): ({"tag_validation": "Fail"}, {}),
    ("", "offloadzero"): ({"device": "cpu"}, {}),
    ("", "steps_per_print"): (10, {}),
    ("", "communication_data_type"): ("bf16", {}),
    ("optimizer", "type"): ("Adam", {}),  # nested() has AdamW where no other is given
    ("optimizer", "params"): ({"lr": 0.5}, {}),
    ("optimizer.params", "lr"): (0.5, {}),
    ("optimizer.params", "betas"): ([0.5, 0.6], {}),
    ("optimizer.params", "eps"): (1e-6, {}),
    ("optimizer.params", "weight_decay"): (0.1, {}),
    ("optimizer.params", "lr_decay"): (0.1, {}),
    ("optimizer.params", "initial_accumulator_value"): (0.1, {}),
    ("optimizer.params", "momentum"): (0.1, {}),
    ("optimizer.params", "dampening"): (0.1, {}),
    ("optimizer.params", "nesterov"): (True, {}),
    ("optimizer.params", "adam_w_mode"): (True, {}),
    ("optimizer.params", "bias_correction"): (False, {}),
    ("scheduler", "type"): ("WarmupLR", {}),
    ("scheduler", "params"): ({"warmup_max_lr": 1}, {}),
    ("fp16", "enabled"): (True, {}),
    ("fp16", "loss_scale"): (128, {"enabled": True}),
    ("fp16", "initial_scale_power"): (8, {"enabled": True}),
    ("fp16", "loss_scale_window"): (8, {"enabled": True}),
    ("fp16", "hysteresis"): (8, {"enabled": True}),
    ("fp16", "min_loss_scale"): (8, {"enabled": True}),
    ("bf16", "enabled"): (True, {}),
    ("data_types", "grad_accum_dtype"): ("fp32", {}),
    ("zero_optimization", "stage"): (2, {}),
    ("zero_optimization", "offload_param"): ({"device": "cpu"}, {"stage": 3}),
    ("zero_optimization", "offload_optimizer"): ({"device": "cpu"}, {"stage": 1}),
    ("zero_optimization", "cpu_offload"): (True, {"stage": 1}),
    ("zero_optimization", "cpu_offload_param"): (True, {"stage": 3}),
    ("zero_optimization", "cpu_offload_use_pin_memory"): (False, {}),
    ("zero_optimization", "max_live_parameters"): (8, {}),
    ("zero_optimization", "param_persistence_threshold"): (8, {}),
    ("zero_optimization", "sub_group_size"): (100_000, {}),
    ("zero_optimization", "gather_16bit_weights_on_model_save"): (True, {}),
    ("zero_optimization", "zero_quantized_weights"): (True, {"stage": 3}),
    ("zero_optimization", "zero_hpz_partition_size"): (4, {"stage": 3}),
    ("zero_optimization", "zero_quantized_gradients"): (True, {"stage": 3}),
    ("zero_optimization", "zero_quantized_nontrainable_weights"): (True, {"stage": 3}),
    ("zero_optimization.offload_param", "pin_memory"): (False, {}),
    ("zero_optimization.offload_optimizer", "pin_memory"): (False, {}),
    ("aio", "block_size"): (131072, {}),
    ("aio", "queue_depth"): (3, {}),
    ("aio", "intra_op_parallelism"): (3, {}),
    ("offloadzero", "budgets"): ({"host": "1GiB"}, {}),
    ("offloadzero", "placement"): ("host", {}),
    ("offloadzero", "nvme_path"): ("/tmp", {}),
    ("offloadzero", "units"): ({"prefetch_units": 3}, {}),
    ("offloadzero", "update"): ({"num_threads": 3}, {}),
    ("offloadzero", "aio"): ({"backend": "io_uring"}, {}),
    ("offloadzero", "observe"): ({"step_line": True}, {}),
    ("offloadzero", "device"): ("cuda:1", {}),
    ("offloadzero", "poison_released_leases"): (True, {}),
    ("offloadzero.budgets", "device"): ("16GiB", {}),
    ("offloadzero.budgets", "host"): (0, {}),
    ("offloadzero.budgets", "nvme"): (10**12, {}),
    **{
        (f"offloadzero.placement{form}", segment): ("host", {})
        for form in ("", "[]")
        for segment in OWN_KEYS["offloadzero.placement"]
    },
    ("offloadzero.placement[]", "units"): ("layers.*", {"param": "host"}),
    ("offloadzero", "activation_checkpoints"): ({}, {}),
    ("offloadzero.activation_checkpoints", "units"): (["layers.*"], {}),
    ("offloadzero.activation_checkpoints", "tier"): ("host", {}),
    ("offloadzero.activation_checkpoints", "input_bytes"): ("1MiB", {"tier": "host"}),
    ("offloadzero.units", "patterns"): (["layers.*"], {}),
    ("offloadzero.units", "min_leaf_elements"): (8, {}),
    ("offloadzero.units", "prefetch_units"): (3, {}),
    ("offloadzero", "state_layout"): ("compact", {}),
    ("offloadzero.update", "in_backward"): (False, {}),
    ("offloadzero.update", "on_nonfinite"): ("skip", {}),
    ("offloadzero.update", "chunk_elements"): (8192, {}),
    ("offloadzero.update", "num_chunks_in_flight"): (5, {}),
    ("offloadzero.update", "num_threads"): (5, {}),
    ("offloadzero.update", "cores"): ([min(os.sched_getaffinity(0))], {}),
    ("offloadzero.aio", "backend"): ("aiofiles", {}),
    ("offloadzero.aio", "checksums"): (True, {}),
    ("offloadzero.aio", "transfer_timeout_s"): (60, {}),
    ("offloadzero.observe", "step_line"): (True, {}),
    ("offloadzero.observe", "run_dir"): ("runs/a", {}),
    ("offloadzero.observe", "trace_steps"): ([3, "5-7"], {"run_dir": "runs/a"}),
    ("offloadzero.observe", "nvme_shared"): (True, {}),
}
# Tested on their own below: they need stage 3 outside their block, or have one value only.
USED_ELSEWHERE = {
    *(
        (f"zero_optimization.offload_{what}", key)
        for what in ("param", "optimizer")
        for key in ("device", "nvme_path")
    ),
    ("zero_optimization.offload_optimizer", "ratio"),
    ("data_types", "param_dtype"),  # checked against fp16 and bf16
}


@loop_over(keys_with(Action.USE, Action.MAP))
def test_a_used_key_changes_the_configuration(path: str, key: str, spec: KeySpec) -> None:
    if (path, key) in USED_ELSEWHERE:
        assert (path, key) not in USED
        return
    value, beside = USED[path, key]
    assert spec.off == ()
    without = load_config(nested(path, key, None, **beside)) if beside else load_config({})
    assert load_config(nested(path, key, value, **beside)) != without


def sample(spec: KeySpec, *, on: bool) -> object:
    """A value of the key's kind that asks for something."""
    samples: dict[Kind, list[object]] = {
        Kind.ANY: [{"a": 1}],
        Kind.BOOL: [True, False],
        Kind.NUMBER: [7, 2.5],
        Kind.TEXT: ["text"],
        Kind.SWITCHED: [{"enabled": on, "other": 1}],
    }
    return next(value for value in samples[spec.kind] if value not in spec.off)


@loop_over(keys_with(Action.ACCEPT))
def test_an_accepted_key_gives_one_line_and_changes_nothing_else(path: str, key: str, spec: KeySpec) -> None:
    empty = load_config(nested(path, key, None))
    accepted = load_config(nested(path, key, sample(spec, on=True)))
    dotted = f"{path}.{key}" if path else key
    (line,) = set(accepted.notices) - set(empty.notices)
    assert line == f"{dotted}: accepted, changes nothing: {spec.note}"
    assert replace(accepted, notices=()) == replace(empty, notices=())
    for off in spec.off:
        assert load_config(nested(path, key, off)) == empty
    if spec.kind is Kind.SWITCHED:
        assert load_config(nested(path, key, sample(spec, on=False))) == empty
    if spec.kind is Kind.ANY:
        assert load_config(nested(path, key, [1])) == accepted


@loop_over(keys_with(Action.REFUSE))
def test_a_refused_key_says_why_and_its_off_value_is_taken(path: str, key: str, spec: KeySpec) -> None:
    dotted = f"{path}.{key}" if path else key
    with pytest.raises(ConfigError) as caught:
        load_config(nested(path, key, sample(spec, on=True)))
    assert caught.value.key == dotted
    assert caught.value.allowed == spec.note
    empty = load_config(nested(path, key, None))
    for off in spec.off:
        assert load_config(nested(path, key, off)) == empty
    if spec.kind is Kind.SWITCHED:
        assert load_config(nested(path, key, sample(spec, on=False))) == empty
        with pytest.raises(ConfigError):
            load_config(nested(path, key, {"inner": [{"enabled": True}]}))


@loop_over(keys_with(Action.ACCEPT, Action.REFUSE))
def test_the_type_of_a_value_that_changes_nothing_is_checked_all_the_same(
    path: str, key: str, spec: KeySpec
) -> None:
    wrong: object = [1]
    if spec.kind is Kind.ANY and spec.action is Action.ACCEPT:
        return  # no value is wrong
    with pytest.raises(ConfigError) as caught:
        load_config(nested(path, key, wrong))
    assert caught.value.key == (f"{path}.{key}" if path else key)
    assert caught.value.value == wrong


@loop_over(keys_with(Action.ALIAS))
def test_an_alias_reads_as_its_key_and_must_not_contradict_it(path: str, key: str, spec: KeySpec) -> None:
    canonical = TABLES[path][spec.note]
    if (path, spec.note) in USED:
        value, beside = USED[path, spec.note]
        assert load_config(nested(path, key, value, **beside)) == load_config(
            nested(path, spec.note, value, **beside)
        )
    else:
        assert canonical.action is Action.ACCEPT
        value, beside = sample(canonical, on=True), {}
        assert f"{path}.{key}: accepted".lstrip(".") in load_config(nested(path, key, value)).notices[0]
    both = {**beside, spec.note: value}
    assert load_config(nested(path, key, value, **both)) is not None
    with pytest.raises(ConfigError, match="contradicts"):
        load_config(nested(path, key, 123, **both))


@loop_over({path: (path,) for path in TABLES})
def test_an_unknown_key_is_named_with_its_full_path_at_every_level(path: str) -> None:
    known = next(iter(TABLES[path]))
    near_miss = known + "x"
    with pytest.raises(ConfigError) as caught:
        load_config(nested(path, near_miss, "auto"))
    dotted = f"{path}.{near_miss}" if path else near_miss
    assert caught.value.key == dotted.replace("[]", "[0]")
    assert caught.value.nearest == known
    assert "unknown key" in str(caught.value)
    with pytest.raises(ConfigError, match="keys must be text"):
        load_config(nested(path, 7, 1))  # type: ignore[arg-type]


def test_a_key_in_the_wrong_block_is_sent_home() -> None:
    with pytest.raises(ConfigError, match=r"^stage = 3: unknown key here; it belongs in zero_optimization$"):
        load_config({"stage": 3})
    with pytest.raises(ConfigError, match=r"aio\.gradient_clipping = 1: .* it belongs in the top level"):
        load_config({"aio": {"gradient_clipping": 1}})


@loop_over(
    {
        f"{name} = {absent}": (*row, absent)
        for name, row in keys_with(*Action).items()
        for absent in ("auto", None)
    }
)
def test_auto_and_null_are_absent(path: str, key: str, spec: KeySpec, absent: object) -> None:
    """But for an "auto" that has a meaning here, or that somebody has to resolve: tests/config/test_config_auto.py."""
    if (absent == "auto" and not spec.auto_is_absent) or (path, key) == ("optimizer", "type"):
        return
    beside = {"param": "host"} if path.startswith("offloadzero.placement") and key != "param" else {}
    beside |= {"grad": "host"} if path.startswith("offloadzero.placement") and key == "param" else {}
    with_key = load_config(nested(path, key, absent, **beside))
    if path:
        head, _, last = path.rpartition(".")
        inner: Any = {**NEEDED.get(path, {}), **beside}
        inner.pop(key, None)
        last_name = last.removesuffix("[]")
        outer = type_that_takes(key) if path == "optimizer.params" else {}
        without = load_config(nested(head, last_name, [inner] if last.endswith("[]") else inner, **outer))
    else:
        without = load_config({})
    assert replace(with_key, notices=()) == replace(without, notices=())
    said = set(with_key.notices) - set(without.notices)
    spec = TABLES[path][spec.note] if spec.action is Action.ALIAS else spec
    if absent == "auto" and spec.action in (Action.USE, Action.MAP):
        dotted = (f"{path}.{key}" if path else key).replace("[]", "[0]")
        assert said == {f'{dotted}: "auto", which nobody has resolved: {spec.note}'}
    else:
        assert not said


def test_the_doc_lists_exactly_the_known_keys_with_their_actions() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", DOC.read_text(), re.MULTILINE)
    known = [(f"{path}.{key}" if path else key, spec.action.value) for path, key, spec in ALL_KEYS]
    assert sorted(rows) == sorted(known)


def test_the_docs_example_loads(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)
    drives = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for drive in drives:
        drive.mkdir()
    config = load_config(json.loads(block.replace("/mnt/", f"{tmp_path}/").replace("/train", "")))
    assert config.nvme_paths == tuple(drives)
    assert config.notices == ()
    assert config.warnings == ()


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
    ("sizes", "message"),
    [
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 3,
                "gradient_accumulation_steps": 2,
            },
            r"train_batch_size = 32: must equal .* = 3 \* 2 \* 4 = 24",
        ),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 3},
            r"must equal 3 \(train_micro_batch_size_per_gpu\) \* gradient_accumulation_steps \* 4 \(ranks\)",
        ),
        ({"train_batch_size": 2}, "not a multiple of 4"),
        ({"train_batch_size": 0}, r"train_batch_size = 0: a whole number at least 1"),
        ({"train_micro_batch_size_per_gpu": -1}, "train_micro_batch_size_per_gpu"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps"),
        ({"train_batch_size": True}, "train_batch_size"),
        ({"train_batch_size": "8"}, "train_batch_size"),
    ],
)
def test_bad_batch_sizes(sizes: dict[str, Any], message: str) -> None:
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
    }
    config = load_config({"fp16": {"enabled": True, **block}})
    assert config.precision.param_dtype == "fp16"
    assert config.precision.loss_scale == LossScaleConfig(0.0, 8, 100, 3, 4.0)
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


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "Adam"}, adam("Adam")),
        ({"type": "adamw"}, adam("AdamW")),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, adam("Adam", decoupled_weight_decay=False)),
        (
            {
                "type": "AdamW",
                "params": {
                    "lr": 3e-4,
                    "betas": [0, 0.95],
                    "eps": 0,
                    "weight_decay": 0.1,
                    "bias_correction": False,
                    "torch_adam": True,
                },
            },
            adam("AdamW", lr=3e-4, betas=(0.0, 0.95), eps=0.0, weight_decay=0.1, bias_correction=False),
        ),
        (
            {"type": "Adam", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
            adam("Adam", lr=None),
        ),
        (
            {"type": "lion", "params": {"lr": 1e-4}},
            OptimizerConfig(
                "Lion", MappingProxyType({"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.0})
            ),
        ),
    ],
)
def test_optimizers(block: dict[str, Any], expected: OptimizerConfig) -> None:
    assert load_config({"optimizer": block}).optimizer == expected


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"type": "Adamax"},
            "type = 'Adamax': known, not built yet: available are Adam, AdamW, Lion, Adagrad, SGD",
        ),
        ({"type": "Adagrad", "params": {"lr_decay": -1}}, r"optimizer\.params\.lr_decay"),
        (
            {"type": "Lion", "params": {"eps": 1e-6}},
            r"params\.eps = 1e-06: Lion takes lr, betas, weight_decay$",
        ),
        ({"type": "Lion", "params": {"adam_w_mode": True}}, r"params\.adam_w_mode = True: Lion takes"),
        (
            {"type": "SGD", "params": {"betas": [0.9, 0.9]}},
            r"params\.betas = .*: SGD takes lr, momentum, dampening",
        ),
        ({"type": "OneBitAdam"}, "known, not built yet"),
        (
            {"type": "Adma"},
            r"unknown optimizer: available are Adam, AdamW, Lion, Adagrad, SGD \(did you mean 'Adam",
        ),
        ({"type": 3}, r"optimizer\.type = 3"),
        (
            {"params": {}},
            r"optimizer\.type = None: the name of an optimizer: available are Adam, AdamW, Lion, Adagrad, SGD",
        ),
        (
            {"type": "Adam", "params": {"learning_rate": 1}},
            r"optimizer\.params\.learning_rate = 1: unknown key",
        ),
        ({"type": "Adam", "params": {"beta": 1}}, "did you mean 'betas'"),
        ({"type": "Adam", "params": {"max_grad_norm": 1}}, "write gradient_clipping"),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, "contradicts the type"),
        ({"type": "Adam", "params": {"betas": [0.9]}}, "two numbers"),
        ({"type": "Adam", "params": {"betas": [0.9, 1]}}, "below 1"),
        ({"type": "Adam", "params": {"betas": [-0.1, 0.9]}}, r"betas\[0\] = -0.1"),
        ({"type": "Adam", "params": {"betas": 0.9}}, "two numbers"),
        ({"type": "Adam", "params": {"betas": ["auto", 0.9]}}, r"betas\[0\]"),
        ({"type": "Adam", "params": {"eps": -1e-8}}, r"optimizer\.params\.eps"),
        ({"type": "Adam", "params": {"lr": -1}}, r"optimizer\.params\.lr"),
        ({"type": "Adam", "params": {"lr": 1e300}}, r"optimizer\.params\.lr = 1e\+300: .* at most 3\.4e\+38"),
        ({"type": "Adam", "params": {"weight_decay": -1}}, r"optimizer\.params\.weight_decay"),
    ],
)
def test_bad_optimizers(block: dict[str, Any], message: str) -> None:
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


# --- ZeRO and placement ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "number"), [(0, 0), (1, 1), (2, 2), (3.0, 3), (True, 1), (False, 0)])
def test_stages(stage: object, number: int) -> None:
    config = load_config(zero(stage))
    assert config.zero_stage == number
    assert type(config.zero_stage) is int
    assert config.placement == PlacementConfig()


def test_the_oldest_zero_switch() -> None:
    assert load_config({"zero_optimization": True}).zero_stage == 1
    assert load_config({"zero_optimization": False}).zero_stage == 0


def test_a_stage_out_of_range_says_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"^zero_optimization\.stage = 4: allowed 0, 1, 2, 3$"):
        load_config(zero(4))


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({}, {}),
        ({"offload_param": None, "offload_optimizer": {"device": "none", "nvme_path": "/nowhere"}}, {}),
        ({"offload_param": {"device": "cpu"}}, {"param": "host"}),
        ({"offload_optimizer": {"device": "cpu"}}, dict.fromkeys(RECORD[1:], "host")),
        ({"cpu_offload": True}, dict.fromkeys(RECORD[1:], "host")),
        ({"cpu_offload": False}, {}),
        ({"cpu_offload": True, "cpu_offload_params": True}, dict.fromkeys(RECORD, "host")),
        ({"cpu_offload_param": True, "offload_optimizer": {"device": "cpu"}}, dict.fromkeys(RECORD, "host")),
    ],
)
def test_offload_blocks(block: dict[str, Any], expected: dict[str, str]) -> None:
    assert homes(load_config(zero(3, **block))) == expected


@pytest.mark.parametrize(("name", "stages"), [("offload_param", {3}), ("offload_optimizer", {1, 2, 3})])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offload_blocks_need_their_stage(name: str, stages: set[int], stage: int) -> None:
    block = zero(stage, **{name: {"device": "cpu"}})
    if stage in stages:
        assert homes(load_config(block)) != {}
        return
    with pytest.raises(ConfigError, match=rf"{name}\.device = 'cpu': needs zero_optimization\.stage"):
        load_config(block)
    assert load_config(zero(stage, **{name: {"device": "none"}})).placement == PlacementConfig()


def test_an_old_name_beside_the_new_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.cpu_offload = True: the old name of"):
        load_config(zero(3, cpu_offload=True, offload_optimizer={"device": "none"}))


@pytest.mark.parametrize(
    ("block", "pinned"),
    [
        ({}, True),
        ({"offload_param": {"pin_memory": False}}, False),
        ({"offload_param": {"pin_memory": False}, "offload_optimizer": {"pin_memory": True}}, True),
        ({"cpu_offload_use_pin_memory": False}, False),
    ],
)
def test_pin_memory(block: dict[str, Any], pinned: bool) -> None:
    assert load_config(zero(3, **block)).pin_memory is pinned


def test_the_ratio_of_the_update_off_the_device() -> None:
    assert (
        load_config(zero(3, offload_optimizer={"device": "cpu", "ratio": 0.25})).placement.host_update_ratio
        == 0.25
    )
    assert (
        load_config(zero(3, offload_optimizer={"device": "none", "ratio": 0.25})).placement
        == PlacementConfig()
    )


@pytest.mark.parametrize(
    ("given_size", "chunk"),
    [
        (1, 65_536),
        (65_536, 65_536),
        (65_537, 65_536 + 4096),
        (1e6, 1_003_520),
        (UpdateConfig().chunk_elements - 1, UpdateConfig().chunk_elements),
    ],
)
def test_sub_group_size_is_the_updates_piece(given_size: float, chunk: int) -> None:
    assert load_config(zero(3, sub_group_size=given_size)).update.chunk_elements == chunk
    own = {"offloadzero": {"update": {"chunk_elements": 8192}}}
    assert load_config({**zero(3, sub_group_size=given_size), **own}).update.chunk_elements == 8192


def test_deepspeeds_usual_sub_group_size_does_not_become_a_buffer() -> None:
    config = load_config(zero(3, sub_group_size=1e9))
    assert config.update == UpdateConfig()
    assert any(line.startswith("zero_optimization.sub_group_size: accepted") for line in config.notices)


def test_own_units_win_over_the_persistence_threshold() -> None:
    own = {"offloadzero": {"units": {"min_leaf_elements": 5}}}
    assert load_config(zero(3, stage3_param_persistence_threshold=1e4)).units.min_leaf_elements == 10_000
    assert (
        load_config({**zero(3, stage3_param_persistence_threshold=1e4), **own}).units.min_leaf_elements == 5
    )


def test_own_placement_forms() -> None:
    def own(placement: object) -> OffloadConfig:
        return load_config({"offloadzero": {"placement": placement}})

    assert homes(own("host")) == dict.fromkeys(RECORD, "host")
    assert homes(own({"grad": "host", "master": "device"})) == {"grad": "host", "master": "device"}
    first, second = own([{"exp_avg": "host"}, {"units": "layers.0", "param": "device"}]).placement.rules
    assert (first.units, dict(first.tiers)) == ("*", {SegmentKind("exp_avg"): TierName.HOST})
    assert (second.units, dict(second.tiers)) == ("layers.0", {SegmentKind.PARAM: TierName.DEVICE})
    assert own([]).placement == PlacementConfig()


def test_own_placement_comes_after_the_offload_blocks() -> None:
    own = {"offloadzero": {"placement": {"exp_avg": "device"}}}
    config = load_config({**zero(3, offload_optimizer={"device": "cpu"}), **own})
    assert homes(config) == {"master": "host", "exp_avg": "device", "exp_avg_sq": "host"}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("cpu", r"offloadzero\.placement = 'cpu': allowed device, host, nvme"),
        (3, r"offloadzero\.placement = 3: one of device, host, nvme, an object"),
        ({}, r"offloadzero\.placement = \{\}: a rule needs at least one of param"),
        ([{"units": "a"}], r"offloadzero\.placement\[0\] = \{'units': 'a'\}: a rule needs"),
        ([{"param": "host"}, {"param": "disk"}], r"offloadzero\.placement\[1\]\.param = 'disk'"),
        ([{"param": "host", "units": ""}], r"offloadzero\.placement\[0\]\.units"),
        (["host"], r"offloadzero\.placement\[0\] = 'host': a JSON object"),
        ({"units": "a", "param": "host"}, r"offloadzero\.placement\.units"),
        ({"momentum": "host"}, r"offloadzero\.placement\.momentum = 'host': unknown key"),
    ],
)
def test_bad_own_placements(placement: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"offloadzero": {"placement": placement}})


def test_the_compact_layout() -> None:
    def load(**own: object) -> OffloadConfig:
        return load_config({"bf16": {"enabled": True}, "offloadzero": {"state_layout": "compact", **own}})

    assert load_config({}).state_layout == load(state_layout="fp32").state_layout == "fp32"
    assert load().state_layout == "compact"
    assert load(update={"chunk_elements": 131_072}).update.chunk_elements == 131_072
    with pytest.raises(ConfigError, match="chunk_elements = 4096: a multiple of 65536 with state_layout"):
        load(update={"chunk_elements": 4096})
    with pytest.raises(ConfigError, match="state_layout = 'compact': needs bf16 parameters, fp16 is enabled"):
        load_config({"fp16": {"enabled": True}, "offloadzero": {"state_layout": "compact"}})


def test_a_sub_group_size_is_rounded_up_to_chunks_of_the_compact_layout() -> None:
    own = {"offloadzero": {"state_layout": "compact"}}
    assert load_config({**zero(3, sub_group_size=100_000), **own}).update.chunk_elements == 131_072


# --- the file engine and nvme paths ----------------------------------------------------------------------


def test_aio_block() -> None:
    block = {
        "block_size": "2MiB",
        "queue_depth": 16,
        "thread_count": 2,
        "single_submit": False,
        "use_gds": False,
    }
    config = load_config(
        {"gradient_clipping": 1, "aio": block, "offloadzero": {"aio": {"backend": "native_aio"}}}
    )
    assert config.aio == AioConfig("native_aio", 2 * 2**20, 16, 2)
    assert config.notices == ()


def test_an_odd_block_size_is_rounded_up() -> None:
    config = load_config({"gradient_clipping": 1, "aio": {"block_size": 1_000_000}})
    assert config.aio.block_size == 1_003_520
    assert config.notices == ("aio.block_size: 1000000 is rounded up to 1003520",)


def test_the_key_deepspeeds_tuner_prints_points_to_the_right_one() -> None:
    with pytest.raises(
        ConfigError, match=r"aio\.num_threads = 8: .*intra_op_parallelism \(or thread_count\)"
    ):
        load_config({"aio": {"num_threads": 8}})


def on_nvme(path: object, stage: int = 3) -> dict[str, Any]:
    return zero(stage, offload_optimizer={"device": "nvme", "nvme_path": path})


def test_nvme_paths_unite_in_order_without_repetition(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    for directory in (a, b, c):
        directory.mkdir()
    (tmp_path / "link").symlink_to(a)
    block = {
        "offload_param": {"device": "nvme", "nvme_path": str(b)},
        "offload_optimizer": {"device": "nvme", "nvme_path": [str(a), f"{b}/"]},
    }
    own = {"nvme_path": [str(tmp_path / "link"), str(c)]}
    config = load_config({**zero(3, **block), "offloadzero": own})
    assert config.nvme_paths == (b, a, c)
    assert homes(config) == dict.fromkeys(RECORD, "nvme")


def test_nvme_paths_of_other_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert load_config(on_nvme(tmp_path / "x")).nvme_paths == (tmp_path / "x",)
    assert load_config(on_nvme([tmp_path / "x"])).nvme_paths == (tmp_path / "x",)
    assert load_config(on_nvme("~/x")).nvme_paths == (tmp_path / "x",)
    assert load_config(on_nvme("x")).nvme_paths == (Path("x").absolute(),)
    own = load_config({"offloadzero": {"placement": "nvme", "nvme_path": "x"}})
    assert (own.nvme_paths, homes(own)) == ((Path("x").absolute(),), dict.fromkeys(RECORD, "nvme"))


def test_one_blocks_path_serves_both(tmp_path: Path) -> None:
    block = {
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
    }
    assert load_config(zero(3, **block)).nvme_paths == (tmp_path,)
    own = {"offloadzero": {"nvme_path": str(tmp_path)}}
    assert load_config({**zero(3, offload_param={"device": "nvme"}), **own}).nvme_paths == (tmp_path,)


@pytest.mark.parametrize(
    ("source", "key"),
    [
        (zero(3, offload_param={"device": "nvme"}), "zero_optimization.offload_param.nvme_path"),
        (zero(1, offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.nvme_path"),
        ({"offloadzero": {"placement": "nvme"}}, "offloadzero.nvme_path"),
        ({"offloadzero": {"placement": [{"units": "a", "master": "nvme"}]}}, "offloadzero.nvme_path"),
    ],
)
def test_nvme_needs_a_directory(source: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="the placement uses nvme") as caught:
        load_config(source)
    assert caught.value.key == key


@pytest.mark.parametrize("value", ["", [], [""], 3, [3], {"a": 1}])
def test_bad_nvme_path_values(value: object) -> None:
    for source in (on_nvme(value), {"offloadzero": {"nvme_path": value}}):
        with pytest.raises(ConfigError, match="nvme_path"):
            load_config(source)


def test_an_nvme_path_must_be_a_directory(tmp_path: Path) -> None:
    key = r"zero_optimization\.offload_optimizer\.nvme_path"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{key}\[1\] = '.*file': is not a directory"):
        load_config(on_nvme([str(tmp_path), str(tmp_path / "file")]))
    with pytest.raises(ConfigError, match=rf"{key} = '.*below': there is no such directory"):
        load_config(on_nvme(str(tmp_path / "file" / "below")))
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="is not a directory"):
        load_config(on_nvme(str(tmp_path / "dangling")))


def test_an_nvme_path_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not (str(path) == str(tmp_path) and mode & os.W_OK))
        with pytest.raises(ConfigError, match="is not writable: this process lacks the permission"):
            load_config(on_nvme(str(tmp_path)))
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[8] = real.f_flag | os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    with pytest.raises(ConfigError, match="is not writable: the filesystem is mounted read-only"):
        load_config(on_nvme(str(tmp_path)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="lacks the permission"):
        load_config(on_nvme(str(tmp_path)))


def read_only_mount() -> str | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, _, options, *_ = line.split()
        if "ro" in options.split(",") and os.path.isdir(where):
            return where
    return None


@pytest.mark.skipif(read_only_mount() is None, reason="nothing is mounted read-only here")
def test_a_real_read_only_mount_is_refused() -> None:
    with pytest.raises(ConfigError, match="mounted read-only"):
        load_config(on_nvme(read_only_mount()))


# --- whole configurations as they are found --------------------------------------------------------------


def test_the_hugging_face_stage_3_configuration() -> None:
    """The stage 3 example of the transformers documentation, every "auto" left as it is."""
    source = {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": 0.9 * 1001 * 1001,
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    config = load_config(source)
    assert config.zero_stage == 3
    assert homes(config) == dict.fromkeys(RECORD, "host")
    assert config.optimizer == adam("AdamW", lr=None)
    assert config.scheduler is not None
    assert set(config.scheduler.params.values()) == {"auto"}
    batch_keys = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    assert config.batch == BatchConfig(unresolved=batch_keys)
    assert config.gradient_clipping == 1.0
    assert config.max_live_parameters == 10**9
    assert config.gather_16bit_weights_on_save
    assert config.steps_per_print == 2000
    assert [line.split(" ")[0] for line in config.warnings] == ["gradient_clipping"]
    assert {line.split(":")[0] for line in config.notices} == {
        *("fp16.enabled", "bf16.enabled"),
        *(f"optimizer.params.{key}" for key in ("betas", "eps", "weight_decay")),
        *(
            f"zero_optimization.{key}"
            for key in (
                "overlap_comm",
                "contiguous_gradients",
                "sub_group_size",
                "stage3_prefetch_bucket_size",
                "stage3_max_reuse_distance",
                "stage3_param_persistence_threshold",
            )
        ),
    }


def test_accelerates_plugin_configuration() -> None:
    """What accelerate builds from its plugin's arguments."""
    source = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "cpu", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": math.inf,
        "fp16": {"enabled": True, "auto_cast": True},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    }
    config = load_config(source, world_size=4)
    assert config.batch == BatchConfig(32, 4, 2)
    assert homes(config) == {"param": "host"}
    assert config.precision.loss_scale == LossScaleConfig()
    assert [line.split(":")[0] for line in config.notices] == [
        "zero_allow_untested_optimizer",
        "fp16.auto_cast",
    ]
