"""Every key of the tables does what docs/config.md says, and mistakes are named with their full path."""

from __future__ import annotations

import copy
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadzero.config import BatchConfig, OffloadConfig, load_config
from offloadzero.config.keys import OWN_KEYS, Action, KeySpec, Kind
from offloadzero.config.readers import shown
from offloadzero.core.segments import TierName
from offloadzero.errors import ConfigError
from tests.config.blocks import NEEDED, TABLES, keys_with, nested, type_that_takes
from tests.support.cases import loop_over
from tests.support.key_tables import DOC, with_tables

REPOSITORY = Path(__file__).parents[2]


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
    ("", "activation_checkpointing"): (
        {"cpu_checkpointing": True},
        {"offloadzero": {"activation_checkpoints": {}}},
    ),
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
    ("optimizer.params", "muon_lr"): (0.1, {}),
    ("optimizer.params", "adam_lr"): (0.1, {}),
    ("optimizer.params", "nesterov"): (True, {}),
    ("optimizer.params", "adam_w_mode"): (True, {}),
    ("optimizer.params", "bias_correction"): (False, {}),
    ("optimizer.params", "torch_adam"): (True, {}),
    ("scheduler", "type"): ("WarmupLR", {}),
    ("scheduler", "params"): ({"warmup_max_lr": 1}, {}),
    ("fp16", "enabled"): (True, {}),
    ("fp16", "loss_scale"): (128, {"enabled": True}),
    ("fp16", "initial_scale_power"): (8, {"enabled": True}),
    ("fp16", "loss_scale_window"): (8, {"enabled": True}),
    ("fp16", "hysteresis"): (8, {"enabled": True}),
    ("fp16", "min_loss_scale"): (8, {"enabled": True}),
    ("fp16", "consecutive_hysteresis"): (True, {"enabled": True}),
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
    ("zero_optimization", "leaf_module"): ({"classes": ["Experts"]}, {}),
    ("zero_optimization.leaf_module", "classes"): (["Experts"], {}),
    ("zero_optimization.leaf_module", "names"): (["layers.1"], {}),
    ("zero_optimization.leaf_module", "name_suffixes"): ("experts", {}),
    ("offloadzero.activation_checkpoints", "units"): (["layers.*"], {}),
    ("offloadzero.activation_checkpoints", "tier"): ("host", {}),
    ("offloadzero.activation_checkpoints", "input_bytes"): ("1MiB", {"tier": "host"}),
    ("offloadzero.units", "patterns"): (["layers.*"], {}),
    ("offloadzero.units", "min_leaf_elements"): (8, {}),
    ("offloadzero.units", "prefetch_units"): (3, {}),
    ("offloadzero", "frozen_weights"): ("copy", {}),
    ("offloadzero", "versions"): (True, {}),
    ("offloadzero", "durable"): (True, {"nvme_path": "/tmp"}),
    ("offloadzero", "state_layout"): ("compact", {}),
    ("offloadzero", "placement_tokens"): (4096, {"placement": "auto"}),
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
# Tested on their own, those of placement in test_config_placement.py, those of activations in test_config_values.py:
# they need stage 3 or our block outside their block, or have one value only.
USED_ELSEWHERE = {
    ("activation_checkpointing", "partition_activations"),
    ("activation_checkpointing", "cpu_checkpointing"),
    *(
        (f"zero_optimization.offload_{what}", key)
        for what in ("param", "optimizer")
        for key in ("device", "nvme_path")
    ),
    ("zero_optimization.offload_optimizer", "ratio"),
    ("data_types", "param_dtype"),  # checked against fp16 and bf16
}


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


def test_an_unknown_key_that_is_near_none_gets_those_of_a_small_object() -> None:
    with pytest.raises(ConfigError, match=r"budgets\.gpu = 1: unknown key: allowed device, host, nvme$"):
        load_config({"offloadzero": {"budgets": {"gpu": 1}}})
    with pytest.raises(ConfigError, match=r"^zero_optimization\.qqq = 1: unknown key$"):
        load_config({"zero_optimization": {"qqq": 1}})


def test_a_key_in_the_wrong_block_is_sent_home() -> None:
    with pytest.raises(ConfigError, match=r"^stage = 3: unknown key here; it belongs in zero_optimization$"):
        load_config({"stage": 3})
    with pytest.raises(ConfigError, match=r"aio\.gradient_clipping = 1: .* it belongs in the top level"):
        load_config({"aio": {"gradient_clipping": 1}})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"optimizer": {"type": "Adam", "param": {}}}, r"^optimizer\.param = .*did you mean 'params'"),
        ({"offloadzero": {"placement": {"params": "host"}}}, r"placement\.params = .*did you mean 'param'"),
    ],
)
def test_a_slip_that_is_a_key_elsewhere_gets_the_nearest_key_of_its_own_object(
    source: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(source)


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
        assert said == {f'{dotted}: "auto", which nobody has resolved: as if it were absent ({spec.note})'}
    else:
        assert not said


def test_the_tables_of_the_document_are_those_of_the_keys() -> None:
    """Else: `make docs`."""
    text = DOC.read_text()
    assert with_tables(text) == text


def test_what_messages_print_of_a_key_has_no_links() -> None:
    """They are for the page, which makes them of the documents' paths."""
    assert not [name for name, (_, _, spec) in keys_with(*Action).items() if "](" in spec.note]


def test_the_defaults_in_sentences_are_exact() -> None:
    assert [shown(number) for number in (1.0, 1e-3, 1e-8, 1e-10)] == ["1", "0.001", "1e-8", "1e-10"]
    for number in (1234567.0, 0.12345678, 1e16, 1e-5, 100.05e-7):
        assert float(shown(number)) == number
    assert [shown(value) for value in (True, (0.9, 0.999), 100, TierName.HOST)] == [
        "true",
        "0.9, 0.999",
        "100",
        "host",
    ]


def test_the_docs_example_loads(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)
    drives = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for drive in drives:
        drive.mkdir()
    config = load_config(json.loads(block.replace("/mnt/", f"{tmp_path}/").replace("/train", "")))
    assert config.nvme_paths == tuple(drives)
    assert config.notices == ()
    assert config.warnings == ()
