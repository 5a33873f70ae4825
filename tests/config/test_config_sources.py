"""What is not a configuration ends in a ConfigError of bounded length, whatever it is made of."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from offloadzero.config import load_config
from offloadzero.config.source import MAX_DEPTH, MAX_VALUES, parse_json
from offloadzero.errors import ConfigError, abbreviated

MAX_MESSAGE_CHARS = 800


def deep_list(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    block: dict[str, Any] = {"stage": 3}
    block["offload_param"] = block
    return {"zero_optimization": block}


def cyclic_list() -> dict[str, Any]:
    values: list[Any] = []
    values.append(values)
    return {"offloadzero": {"units": {"patterns": values}}}


def shared(depth: int = 30) -> dict[str, Any]:
    """2 ** depth values, if each is visited as often as it is reached."""
    value: Any = 1
    for _ in range(depth):
        value = [value, value]
    return {"autotuning": {"a": value}}


def nvme(path: object) -> dict[str, Any]:
    return {"offloadzero": {"placement": "nvme", "nvme_path": path}}


class Strange:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


HOSTILE: dict[str, tuple[dict[Any, Any], str]] = {
    "5000 digits": (
        {"train_batch_size": 10**5000},
        "train_batch_size = <integer of 16610 bits>: a number of",
    ),
    "400 digits": ({"gradient_clipping": 10**400}, "gradient_clipping = <integer of 1329 bits>"),
    "5000 digits in an unread key": ({"autotuning": {"a": [10**5000]}}, r"autotuning\.a\[0\]"),
    "a long byte size": (
        {"offloadzero": {"budgets": {"host": "9" * 5000 + "GB"}}},
        "a whole number of bytes",
    ),
    "a long range": (
        {"offloadzero": {"observe": {"run_dir": "x", "trace_steps": "1-" + "9" * 5000}}},
        "steps from 1",
    ),
    "a deep list": ({"optimizer": {"params": {"betas": deep_list(950)}}}, f"at most {MAX_DEPTH} levels"),
    "a deep dict": (json.loads('{"a":' * 900 + "1" + "}" * 900), f"at most {MAX_DEPTH} levels"),
    "a cyclic dict": (cyclic(), r"nested too deeply"),
    "a cyclic list": (cyclic_list(), r"nested too deeply"),
    "a tower of shared lists": (shared(), f"more than {MAX_VALUES} values"),
    "a long list": (
        {"offloadzero": {"units": {"patterns": ["a"] * 10**5}}},
        f"more than {MAX_VALUES} values",
    ),
    "NUL in nvme_path": (nvme("/tmp/a\0b"), r"offloadzero\.nvme_path = .*NUL"),
    "NUL in a list of them": (nvme(["/tmp", "a\0"]), r"offloadzero\.nvme_path\[1\] = .*NUL"),
    "a surrogate in nvme_path": (nvme("/tmp/\ud800"), r"offloadzero\.nvme_path = .*surrogate"),
    "nobody's home": (nvme("~nobody-has-this-name/x"), r"offloadzero\.nvme_path = .*home directory"),
    "NUL in run_dir": ({"offloadzero": {"observe": {"run_dir": "a\0"}}}, r"offloadzero\.observe\.run_dir"),
    "a surrogate in run_dir": ({"offloadzero": {"observe": {"run_dir": "\udfff"}}}, "surrogate"),
    "a number for a key": ({"optimizer": {3: 1}}, "optimizer = 3: keys must be text"),
    "a surrogate in a key": ({"aio": {"\ud800": 1}}, r"aio\.\\ud800 = 1: unknown key"),
    "a line break in a key": ({"aio": {"a\nb": 1}}, r"^aio\.a\\nb = 1: unknown key"),
    "a key of a megabyte": ({"aio": {"k" * 10**6: 1}}, r"^aio\.k+\.\.\.k+ = 1: unknown key"),
    "a value of a megabyte": ({"offloadzero": {"device": "c" * 10**6}}, "allowed cpu, cuda, cuda:N"),
    "a set": ({"aio": {"queue_depth": {1}}}, r"aio\.queue_depth = \{1\}: a JSON value"),
    "bytes": ({"offloadzero": {"nvme_path": b"/tmp"}}, "a JSON value"),
    "an object without repr": ({"aio": {"queue_depth": Strange()}}, r"aio\.queue_depth = <Strange instance"),
    "an array": ({"aio": {"single_submit": memoryview(b"ab")}}, r"aio\.single_submit"),
    "NaN": ({"optimizer": {"type": "Adam", "params": {"lr": math.nan}}}, "a finite number"),
    "a text": (
        {"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}},
        r"a finite number .*, without quotes$",
    ),
}


@pytest.mark.parametrize("key", ["k" * 10**6, "a strange\nkey", "some \ud800"])
def test_a_hostile_key_that_is_passed_over_can_be_printed(key: str) -> None:
    (text,) = load_config({key: 1}).warnings
    assert len(text) <= MAX_MESSAGE_CHARS
    text.encode()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_dicts(name: str) -> None:
    source, message = HOSTILE[name]
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(source)
    text = str(caught.value)
    assert len(text) <= MAX_MESSAGE_CHARS
    text.encode()  # can be printed: no lone surrogate is left in it


def test_any_mapping_is_read_and_none_is_changed() -> None:
    inner = MappingProxyType({"type": "Adam", "params": MappingProxyType({"betas": (0.5, 0.6)})})
    optimizer = load_config(MappingProxyType({"optimizer": inner})).optimizer
    assert optimizer is not None
    assert optimizer.params["betas"] == (0.5, 0.6)


def test_a_schedule_may_get_what_is_no_json() -> None:
    def rate(step: int) -> float:
        return 1 / (1 + step)

    scheduler = load_config({"scheduler": {"type": "LambdaLR", "params": {"lr_lambda": rate}}}).scheduler
    assert scheduler is not None
    assert scheduler.params["lr_lambda"] is rate


@pytest.mark.parametrize("depth", [1, MAX_DEPTH - 2])
def test_ordinary_depth_is_read(depth: int) -> None:
    (line,) = load_config({"autotuning": {"enabled": True, "a": deep_list(depth)}}).notices
    assert line.startswith("autotuning: accepted")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("a\0b", "NUL"),
        ("\ud800.json", "surrogate"),
        ("~nobody-has-this-name/ds.json", "home directory"),
        ("x" * 5000, "File name too long"),
        ("", "text that is not empty"),
        ('{"train_batch_size": 1}', "cannot be read"),
        ("/dev/zero", "more than 1048576 bytes"),
    ],
)
def test_paths_that_are_none(name: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed) as caught:
        load_config(name)
    assert caught.value.key == "config"
    assert len(str(caught.value)) <= MAX_MESSAGE_CHARS


def test_a_pipe_is_read_as_a_file(tmp_path: Path) -> None:
    """`train.py --deepspeed_config <(jq ...)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"train_batch_size": 3}',))
    writer.start()
    assert load_config(pipe).batch.train_batch_size == 3
    writer.join()


# --- the text of a file ----------------------------------------------------------------------------------


def load_text(directory: Path, text: str) -> Any:
    file = directory / "ds.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return load_config(file)


COMMENTED = """
# a comment of Hjson's
{
  // the batch
  "train_batch_size": 8, /* over
  all ranks */ "gradient_clipping": 0.5, # bites
  "offloadzero": {"nvme_path": ["/tmp//x # y", "/tmp/*a*/",], "units": {"patterns": ["a,]", "b\\"//,}",],},},
  "optimizer": {"type": "Adam", "params": {"betas": [0.5, 0.6 , ] /* first, second, */ , } } ,
}
// the end"""


def test_comments_and_trailing_commas() -> None:
    values = parse_json(COMMENTED, name="ds.json")
    own = dict(dict(values)["offloadzero"])
    assert own["nvme_path"] == ["/tmp//x # y", "/tmp/*a*/"]
    assert dict(own["units"])["patterns"] == ["a,]", 'b"//,}']
    assert dict(values)["train_batch_size"] == 8
    assert dict(dict(dict(values)["optimizer"])["params"])["betas"] == [0.5, 0.6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[,]", "not valid JSON"),
        ('{"a": 1,,}', "not valid JSON"),
        ('{"a": ,}', "not valid JSON"),
        ("{,}", "not valid JSON"),
        ('{"a": 1},', "not valid JSON"),
        ('{"a": 1 /* no end', r"ds\.json:1 = .*a comment without its \*/"),
        ('{"a": 1 /*/ }', r"a comment without its \*/"),
        ('{\n // one\n /* two\n */ "a": 1\n "b": 2}', r"ds\.json:5:2 = '\"b\": 2\}': not valid JSON"),
        ('{"a": 1 / 2}', "not valid JSON"),
        ("{a: 1}", "not valid JSON"),
        ('{"a": one}', "not valid JSON"),
        ('{"train_batch_size": ' + "1" * 5000 + "}", "not valid JSON: Exceeds the limit"),
        ('{"train_batch_size": -' + "1" * 5000 + "}", "not valid JSON: Exceeds the limit"),
        ('{"train_batch_size": ' + "1" * 350 + "}", "train_batch_size = .*: a number of at most"),
        ('{"gradient_clipping": ' + "1" * 5000 + ".5}", "a finite number"),
        ('{"gradient_clipping": 1e999}', "a finite number"),
        ('{"autotuning": ' + "[" * 950 + "]" * 950 + "}", "nested too deeply"),
        ('{"autotuning": ' + '{"a":' * 400 + "1" + "}" * 400 + "}", "nested too deeply"),
        ('{"autotuning": ' + "[" * 10**5 + "}", "nested too deeply"),
        ('{"offloadzero": {"nvme_path": "a\\u0000b"}}', "NUL"),
        ('{"offloadzero": {"nvme_path": "\\ud800"}}', "surrogate"),
        ('{"offloadzero": {"nvme_path": "\ud800"}}', "not UTF-8"),
        ('{"a\\ud800": 1}', r"^a\\ud800 = 1: unknown key"),
        ("{" + " " * 2**20 + "}", "more than 1048576 bytes"),
        ("/*" * 2**18, r"a comment without its \*/"),
        ("," * (2**20 - 1), "not valid JSON"),
        ('"' * (2**20 - 1), "not valid JSON"),
        ('"' + "\\" * (2**20 - 2), "not valid JSON"),
        ("#" * (2**20 - 1), "not valid JSON"),
        ("#\n" * 2**19, "not valid JSON"),
    ],
)
def test_texts_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_text(tmp_path, text)
    assert len(str(caught.value)) <= MAX_MESSAGE_CHARS
    str(caught.value).encode()


def test_a_file_with_comments_is_the_file_without(tmp_path: Path) -> None:
    plain = '{"train_batch_size": 8, "aio": {"queue_depth": 3}}'
    noted = '{"train_batch_size": 8, # all\n "aio": {"queue_depth": 3, /* three */},}'
    assert load_text(tmp_path, noted) == load_text(tmp_path, plain)


@pytest.mark.parametrize("make", [lambda: {"a": [1] * 10**6}, lambda: "x" * 10**6, lambda: 10**5000, cyclic])
def test_an_abbreviated_value_is_short(make: Callable[[], object]) -> None:
    assert len(abbreviated(make())) <= 250
