"""Damage to checkpoints is found before the first weight is written, whatever the bytes.

OFFLOADZERO_TEST_DAMAGES random ones (1,000 for the campaign): each is found, named, and changes nothing of the model.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offloadzero import CheckpointError
from offloadzero.checkpoint.format.manifest import read_manifest
from offloadzero.checkpoint.format.names import IS_LATEST, MANIFEST
from offloadzero.checkpoint.latest import find_checkpoint
from tests.support.checkpoints import edit_meta, reseal, small_engine, train, whole_state

NUM_DAMAGES = int(os.environ.get("OFFLOADZERO_TEST_DAMAGES", "40"))
STEPS = ("global_step1", "global_step2", "global_step3")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`saved`: three checkpoints of one run; `other`: the same of another run."""
    root = tmp_path_factory.mktemp("pristine")
    for seed, name in ((1, "saved"), (2, "other")):
        engine = small_engine(root, seed=seed)
        for step in range(3):
            train(engine, 1, first=10 * seed + step)
            engine.save_checkpoint(root / name)
        engine.close()
    return root


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """In a state that no checkpoint has: whatever is written to it shows."""
    yield from fresh_engine(tmp_path_factory.mktemp("nvme"), "host")


@pytest.fixture(scope="module", params=["host", "nvme"])
def either_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same, in both places."""
    yield from fresh_engine(tmp_path_factory.mktemp("nvme"), request.param)


def fresh_engine(directory: Path, placement: str) -> Iterator[Any]:
    engine = small_engine(directory, placement, seed=5)
    train(engine, 1, first=77)
    yield engine
    engine.close()


# --- the campaign ---


class Damage:
    """One random damage to a copy of the checkpoints."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        self.saved = root / "saved"
        self.other = root / "other"
        self.draw = draw
        self.tag = draw.choice(STEPS)  # of the checkpoint that is damaged
        self.files = sorted(path for path in (self.saved / self.tag).iterdir() if path.name != IS_LATEST)
        self.file = draw.choice(self.files)
        self.by_tag = self.tag != STEPS[-1]
        self.done = getattr(self, draw.choice(KINDS))()

    def _rewrite(self, change: Callable[[bytearray], Any]) -> str:
        data = bytearray(self.file.read_bytes())
        before = bytes(data)
        while data == before:
            change(data)
        self.file.write_bytes(data)
        return f"{change.__name__} {self.file.name}"

    def flip_bit(self) -> str:
        def flip(data: bytearray) -> None:
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)

        return self._rewrite(flip)

    def flip_bit_in_the_head(self) -> str:
        def flip_head(data: bytearray) -> None:
            data[self.draw.randrange(min(64, len(data)))] ^= 1 << self.draw.randrange(8)

        return self._rewrite(flip_head)

    def overwrite(self) -> str:
        def overwrite(data: bytearray) -> None:
            start = self.draw.randrange(len(data))
            size = min(self.draw.choice([1, 2, 8, 512, 4096]), len(data) - start)
            data[start : start + size] = self.draw.choice([self.draw.randbytes(size), bytes(size)])

        return self._rewrite(overwrite)

    def truncate(self) -> str:
        def truncate(data: bytearray) -> None:
            del data[self.draw.choice([0, 7, 8, len(data) - 1, self.draw.randrange(len(data))]) :]

        return self._rewrite(truncate)

    def extend(self) -> str:
        def extend(data: bytearray) -> None:
            data += self.draw.choice([b"\0", b" ", b"\n", self.draw.randbytes(512)])

        return self._rewrite(extend)

    def exchange_parts(self) -> str:
        def exchange(data: bytearray) -> None:
            size = self.draw.choice([4, 64, len(data) // 3])
            one, two = (self.draw.randrange(len(data) - size + 1) for _ in range(2))
            data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]

        return self._rewrite(exchange)

    def delete(self) -> str:
        self.file.unlink()
        return f"delete {self.file.name}"

    def take_of_another_step(self) -> str:
        return self._take(self.saved / self.draw.choice([tag for tag in STEPS if tag != self.tag]))

    def take_of_another_run(self) -> str:
        return self._take(self.other / self.tag)

    def _take(self, source: Path) -> str:
        usable = [file for file in self.files if (source / file.name).read_bytes() != file.read_bytes()]
        self.file = self.draw.choice(usable)
        shutil.copyfile(source / self.file.name, self.file)
        return f"take {self.file.name} of {source}"

    def exchange_two(self) -> str:
        units = [file for file in self.files if file.name.startswith("unit")]
        one, two = self.draw.sample(units, 2)
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        return f"exchange {one.name} and {two.name}"

    def add_stray(self) -> str:
        units = [file for file in self.files if file.name.startswith("unit")]
        name = self.draw.choice(["unit-9999.safetensors", "unit-12345.safetensors"])
        shutil.copyfile(self.draw.choice(units), self.saved / self.tag / name)
        return f"add {name}"

    def not_a_file(self) -> str:
        self.file.unlink()
        kind = self.draw.choice(["directory", "FIFO", "link to nowhere", "link to itself"])
        if kind == "directory":
            self.file.mkdir()
        elif kind == "FIFO":
            os.mkfifo(self.file)
        else:
            self.file.symlink_to("nowhere" if kind == "link to nowhere" else self.file.name)
        return f"{kind} for {self.file.name}"

    def latest(self) -> str:
        self.by_tag = False
        self.file = self.saved / "latest"
        kind = self.draw.choice([self.flip_bit, self.overwrite, self.truncate, self.delete])
        return f"latest: {kind()}"

    def latest_names_another(self) -> str:
        self.by_tag = False
        (self.saved / "latest").write_text(self.draw.choice(STEPS[:2]))
        return "latest names another"

    def marker(self) -> str:
        self.by_tag = False
        self.file = self.saved / STEPS[-1] / IS_LATEST
        if self.draw.random() < 0.5:
            return self.delete()
        self.file.write_bytes(self.draw.randbytes(3))
        return "lengthen is_latest"

    def delete_all(self) -> str:
        self.by_tag = False
        shutil.rmtree(self.saved / STEPS[-1])
        return "delete all of the newest"


KINDS = [
    *(("flip_bit",) * 6),
    *(name for name in vars(Damage) if not name.startswith("_")),
]


def test_every_damage_is_found_and_changes_nothing(
    either_engine: Any, pristine: Path, tmp_path: Path
) -> None:
    before = whole_state(either_engine)
    for seed in range(NUM_DAMAGES // 2):
        root = tmp_path / str(seed)
        shutil.copytree(pristine, root)
        damage = Damage(
            root, random.Random(f"{seed} {either_engine.optimizer.runtime.store.nvme is not None}")
        )
        what = f"seed {seed}: {damage.tag}, {damage.done}"
        try:
            either_engine.load_checkpoint(damage.saved, tag=damage.tag if damage.by_tag else None)
        except CheckpointError as error:
            message = str(error)
        else:
            raise AssertionError(f"{what}: loaded")
        assert str(damage.saved) in message, f"{what}: {message}"
        assert "is intact: pass tag='global_step" in message, f"{what}: {message}"
        assert whole_state(either_engine) == before, what
        shutil.rmtree(root)


@pytest.mark.parametrize("step", STEPS[:1])
def test_each_file_of_another_step_is_found(engine: Any, pristine: Path, tmp_path: Path, step: str) -> None:
    """Each is whole in itself, has the right size and lies in its place."""
    before = whole_state(engine)
    last = pristine / "saved" / STEPS[-1]
    files = sorted(path.name for path in last.iterdir() if path.name != IS_LATEST)
    # One holds frozen weights alone.
    files = [file for file in files if (last / file).read_bytes() != (last.parent / step / file).read_bytes()]
    assert "meta.json" in files
    assert len(files) > 3
    for file in files:
        root = tmp_path / file
        shutil.copytree(pristine / "saved", root)
        shutil.copy(root / step / file, root / STEPS[-1] / file)
        with pytest.raises(CheckpointError, match="is intact: pass tag='global_step") as caught:
            engine.load_checkpoint(root)
        assert file in str(caught.value) or file == "manifest.json", str(caught.value)
        assert whole_state(engine) == before, file


def test_after_all_of_it_an_intact_one_loads(either_engine: Any, pristine: Path, tmp_path: Path) -> None:
    """Bitwise: what a refused load left behind would show in the losses."""
    resident = small_engine(tmp_path, seed=9)
    losses = []
    for one in (resident, either_engine):
        assert one.load_checkpoint(pristine / "saved", tag="global_step2")[0] is not None
        losses.append(train(one, 2))
    assert losses[0] == losses[1]
    resident.close()


# --- what a manifest agrees to ---


def edit_header(unit: Path, old: str, new: str) -> None:
    """Replace in a unit's header; the length stays."""
    data = unit.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode()
    assert old in header, header
    header = header.replace(old, new)
    encoded = header.rstrip().encode()
    encoded += b" " * (-len(encoded) % 8)
    unit.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + size :])


def set_header(unit: Path, header: bytes) -> None:
    unit.write_bytes(len(header).to_bytes(8, "little") + header)


Edit = Callable[[Path], Any]
UNIT = "unit-0002.safetensors"  # of the first block
NAME = "blocks.0.weight"


def in_header(old: str, new: str) -> Edit:
    return lambda path: edit_header(path / UNIT, old, new)


def entry(state: str, dtype: str, sizes: str) -> str:
    """How the header's entry of a state of NAME begins."""
    return f'"{NAME}.{state}": {{"dtype": "{dtype}", "shape": [{sizes}'


def header(data: bytes) -> Edit:
    return lambda path: set_header(path / UNIT, data)


def meta(**changes: Any) -> Edit:
    return lambda path: edit_meta(path, **changes)


def raw_meta(data: bytes) -> Edit:
    return lambda path: (path / "meta.json").write_bytes(data)


def steps(path: Path, **changes: Any) -> None:
    values = json.loads((path / "meta.json").read_text())["steps"]
    values.update(changes)
    edit_meta(path, steps={key: value for key, value in values.items() if value is not ...})


def step_of(value: Any) -> Edit:
    return lambda path: steps(path, **{NAME: value})


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
LONG = b'{"format": "offloadzero-checkpoint", "version": ' + b"9" * 5000 + b"}"

SEALED: dict[str, tuple[Edit, str]] = {
    "F32 read as I32": (in_header('"F32"', '"I32"'), r"unit-0002.*int32"),
    "F32 read as another float": (in_header('"F32", "shape": [17,', '"F16", "shape": [34,'), "float16"),
    "a dtype that is none": (in_header('"F32"', '"F33"'), "unknown dtype"),
    "a dtype of another type": (in_header('"F32"', "7"), "unknown dtype"),
    "a shape that is none": (in_header("[17, 17]", '"17"'), "no shape"),
    "a shape of texts": (in_header("[17, 17]", '["17", 17]'), "sizes that are none"),
    "a shape of truths": (in_header('"shape": [17]', '"shape": [true]'), "sizes that are none"),
    "a negative shape": (in_header("[17, 17]", "[-17, -17]"), "sizes that are none"),
    "a huge shape": (in_header("[17, 17]", "[" + ", ".join(["9000000000000000000"] * 60) + "]"), "its shape"),
    "many dimensions": (in_header("[17, 17]", "[" + "1, " * 1000 + "289]"), "no shape"),
    "another shape": (
        in_header("[17, 17]", "[289, 1]"),
        r"blocks.0.weight has the shape \(289, 1\) here and ",
    ),
    "a state of another shape": (
        in_header(entry("exp_avg", "F32", "17, 17"), entry("exp_avg", "F32", "289")),
        r"blocks.0.weight.exp_avg is torch.float32 \(289,\) instead of torch.float32 \(17, 17\)",
    ),
    "a state of another dtype": (
        in_header(entry("exp_avg", "F32", "17, 17"), entry("exp_avg", "F16", "34, 17")),
        r"blocks.0.weight.exp_avg is torch.float16 \(34, 17\) instead of torch.float32 \(17, 17\)",
    ),
    "no offsets": (in_header('"data_offsets"', '"offsets"'), "no dtype, shape and data_offsets"),
    "three offsets": (in_header('"data_offsets": [0, ', '"data_offsets": [0, 0, '), "no dtype, shape"),
    "a gap": (in_header('"data_offsets": [0, 1156]', '"data_offsets": [4, 1160]'), "begins at 4"),
    "an entry that is none": (header(b'{"x": 1}'), "no dtype, shape and data_offsets"),
    "a list for a header": (header(b"[]"), "not a JSON object"),
    "a deep header": (header(DEEP), "nested too deeply"),
    "a header with a name twice": (header(b'{"x": 1, "x": 2}'), "there twice"),
    "a header that is not UTF-8": (header(b'{"\xff": 1}'), "not UTF-8"),
    "an empty file": (lambda path: (path / UNIT).write_bytes(b""), "not a safetensors file"),
    "a file of other bytes": (lambda path: (path / UNIT).write_bytes(b"\xff" * 64), "not a safetensors file"),
    "no file": (lambda path: (path / UNIT).unlink(), "missing blocks.0.weight"),
    "a file that is cut short": (
        lambda path: os.truncate(path / UNIT, (path / UNIT).stat().st_size - 4),
        "past the end of the file",
    ),
    "more behind": (lambda path: (path / UNIT).open("ab").write(b"12"), "more behind the last tensor"),
    "another name": (in_header(NAME, "blocks.0.WEIGHT"), "missing blocks.0.weight"),
    "a tensor in two files": (
        lambda path: shutil.copyfile(path / UNIT, path / "unit-7777.safetensors"),
        r"unit-7777.safetensors: blocks.0.weight is in unit-0002.safetensors too",
    ),
    "buffers of another shape": (
        lambda path: edit_header(path / "buffers.safetensors", '"shape": []', '"shape": [1]'),
        r"buffers.safetensors: seen has the shape \(1,\) here and \(\) in the model",
    ),
    "buffers of another dtype": (
        lambda path: edit_header(path / "buffers.safetensors", '"I64", "shape": []', '"I32", "shape": [2]'),
        r"seen has the shape \(2,\)",
    ),
    "buffers under another name": (
        lambda path: edit_header(path / "buffers.safetensors", '"seen"', '"been"'),
        "missing seen; not in the model: been",
    ),
    "no buffers": (lambda path: (path / "buffers.safetensors").unlink(), "does not list buffers"),
    "no step of a parameter": (step_of(...), "has no step count of blocks.0.weight"),
    "a step of no parameter": (lambda path: steps(path, nobody=3), "missing nobody"),
    "a negative step": (step_of(-1), "steps = .*not a count"),
    "half a step": (step_of(1.5), "not a count"),
    "a true step": (step_of(True), "not a count"),
    "a huge step": (step_of(2**60), "not a count"),
    "no counters": (meta(global_steps=...), "meta.json: global_steps is missing"),
    "a text for a counter": (meta(micro_steps="3"), "micro_steps = '3': not a count"),
    "no state of the client": (meta(client_state=[]), r"client_state = \[\]: not an object"),
    "a loss scale of text": (meta(loss_scale={"scale": "1"}), "loss_scale.*not a positive number"),
    "a loss scale of NaN": (meta(loss_scale={"scale": float("nan")}), "not a positive number"),
    "a list of loss scales": (meta(loss_scale=[]), "not an object"),
    "names that are none": (meta(excluded=[1]), r"excluded = \[1\]: not a text"),
    "no groups": (meta(param_groups=[]), "0 param groups were saved, the optimizer has 1"),
    "groups that are none": (meta(param_groups=[1]), r"param_groups = \[1\]: not an object"),
    "a group with parameters": (
        meta(param_groups=[{"params": []}]),
        r"param_groups\[0\].params does not fit",
    ),
    "a rate of text": (meta(param_groups=[{"lr": "0.1"}]), r"param_groups\[0\].lr does not fit"),
    "betas of text": (meta(param_groups=[{"betas": "ab"}]), r"param_groups\[0\].betas does not fit"),
    "a tuple that is none": (meta(client_state={"__tuple__": 1}), "client_state is not what was saved"),
    "a dict of lists": (meta(client_state={"__dict__": [[[], 1]]}), "client_state is not what was saved"),
    "a schedule that is none": (meta(lr_scheduler=5), "lr_scheduler = 5: not an object"),
    "another schedule": (meta(lr_scheduler_type="OneCycle"), "saved with OneCycle, the engine has WarmupLR"),
    "a schedule refused": (meta(lr_scheduler={"last_batch_iteration": "x"}), "WarmupLR refuses lr_scheduler"),
    "no schedule": (meta(lr_scheduler=None), "saved without a schedule"),
    "a later version": (meta(version=3), "version 3; this package reads up to 2"),
    "no version": (meta(version=...), "format 'offloadzero-checkpoint' instead of"),
    "another format": (meta(format="other"), "format 'other'"),
    "a deep meta": (raw_meta(DEEP), "meta.json: nested too deeply"),
    "a long number": (raw_meta(LONG), "meta.json: not JSON"),
    "a meta of lists": (raw_meta(b"[]"), "meta.json: not a JSON object"),
    "an empty meta": (raw_meta(b""), "meta.json: not JSON"),
    "a meta with NUL": (raw_meta(b"\0"), "meta.json: not JSON"),
    "a meta that is not UTF-8": (raw_meta(b"\xff\xfe"), "meta.json: not UTF-8 at byte 0"),
}


@pytest.mark.parametrize("what", SEALED)
def test_what_the_manifest_agrees_to_is_checked_too(
    engine: Any, pristine: Path, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "saved" / "global_step2"
    shutil.copytree(pristine / "saved", tmp_path / "saved")
    edit, reason = SEALED[what]
    edit(path)
    reseal(path)
    before = whole_state(engine)
    with pytest.raises(CheckpointError, match=reason) as raised:
        engine.load_checkpoint(tmp_path / "saved", tag="global_step2")
    assert str(path) in str(raised.value)
    assert whole_state(engine) == before


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (entry("scales", "F32", "3, 2"), entry("scales", "F32", "2, 3"), r"\(2, 3\) instead of"),
        (entry("exp_avg_e2m5", "I8", ""), entry("exp_avg_e2m5", "U8", ""), "uint8 .* instead of torch.int8"),
        (entry("scales", "F32", ""), entry("scale", "F32", ""), "missing blocks.0.weight.exp_avg, "),
    ],
)
def test_codes_of_another_kind_are_refused(old: str, new: str, reason: str, tmp_path: Path) -> None:
    own = {"state_layout": "compact", "units": {"min_leaf_elements": 100}}
    engine = small_engine(tmp_path, "device", offloadzero=own)
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved", tag="global_step2")
    path = tmp_path / "saved" / "global_step2"
    edit_header(path / UNIT, old, new)
    reseal(path)
    before = whole_state(engine)
    assert re.search(reason, refusal_of(engine, tmp_path / "saved", "codes") or "")
    assert whole_state(engine) == before
    engine.close()


WEIRD = [
    None, True, -1, 0, 2**53, 2**70, 10**400, 0.5, -0.0, float("inf"), float("nan"), "", "x", "\ud800", "a\0", [], {},
    [[]], [None], {"a": 1}, {"__tuple__": 5}, {"__dict__": [1]}, {"__dict__": [[{}, 1]]}, {"__counter__": [["a", "b"]]},
]  # fmt: skip


def change_somewhere(value: Any, draw: random.Random) -> Any:
    """Another value at a random place of a JSON tree."""
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        places = list(value) if isinstance(value, dict) else range(len(value))
        place = draw.choice(places)
        if draw.random() < 0.15:
            del value[place]
        else:
            value[place] = change_somewhere(value[place], draw)
        return value
    return copy.deepcopy(draw.choice(WEIRD))


def refusal_of(engine: Any, directory: Path, what: str, **keys: Any) -> str | None:
    """What CheckpointError says; None when it loads. Another error is a failure."""
    try:
        engine.load_checkpoint(directory, tag="global_step2", **keys)
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(what) from error
    return None


# Its text may be anything, half a character too, which pytest's workers cannot pass on.
@pytest.mark.filterwarnings("ignore:.*was saved in the middle of a step")
def test_no_content_ends_in_another_error(engine: Any, pristine: Path, tmp_path: Path) -> None:
    """meta.json and headers with other values at random places, agreed to by the manifest: refused, or whole."""
    num_refused = 0
    shutil.copytree(pristine / "saved", tmp_path / "saved")
    path = tmp_path / "saved" / "global_step2"
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    before = whole_state(engine)
    for seed in range(NUM_DAMAGES):
        draw = random.Random(seed)
        for name, data in whole.items():
            (path / name).write_bytes(data)
        name = draw.choice(["meta.json", "buffers.safetensors", "unit-0000.safetensors", UNIT])
        if name == "meta.json":
            changed = change_somewhere(json.loads(whole[name]), draw)
            (path / name).write_text(json.dumps(changed))
        else:
            size = int.from_bytes(whole[name][:8], "little")
            encoded = json.dumps(change_somewhere(json.loads(whole[name][8 : 8 + size]), draw)).encode()
            (path / name).write_bytes(len(encoded).to_bytes(8, "little") + encoded + whole[name][8 + size :])
        reseal(path)
        strict = draw.random() < 0.8
        refusal = refusal_of(engine, tmp_path / "saved", f"seed {seed}: {name}", load_module_strict=strict)
        if refusal is not None:
            num_refused += 1
            assert str(path) in refusal, f"seed {seed}: {refusal}"
            assert whole_state(engine) == before, f"seed {seed}: {refusal}"
        else:
            engine.load_checkpoint(pristine / "saved", tag="global_step1")
            before = whole_state(engine)
    assert num_refused > NUM_DAMAGES / 2


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a file outside": (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}), "no file of"),
    "a file of others": (lambda m: m["files"].update({"x": {"bytes": 1, "sha256": "0" * 64}}), "no file of"),
    "a list of files": (lambda m: m.update(files=[]), "files is not an object"),
    "a size of text": (lambda m: m["files"]["meta.json"].update(bytes="7"), "size of meta.json is not a"),
    "a digest that is none": (lambda m: m["files"]["meta.json"].update(sha256="x"), "digest of meta.json is"),
    "an entry that is none": (lambda m: m["files"].update({"meta.json": 1}), "meta.json is not an object"),
    "without meta.json": (lambda m: m["files"].pop("meta.json"), "does not list meta.json"),
    "another format": (lambda m: m.update(format="x"), "its format is not"),
    "other pieces": (lambda m: m.update(piece_bytes=1), "its format is not"),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_agrees_with_itself(engine: Any, pristine: Path, tmp_path: Path, what: str) -> None:
    from offloadzero.checkpoint.format import manifest

    path = tmp_path / "saved" / "global_step2"
    shutil.copytree(pristine / "saved", tmp_path / "saved")
    values = json.loads((path / MANIFEST).read_text())
    del values["sha256"]
    change, reason = MANIFESTS[what]
    change(values)
    (path / MANIFEST).write_bytes(manifest._encode(values))
    with pytest.raises(CheckpointError, match=reason):
        engine.load_checkpoint(tmp_path / "saved", tag="global_step2")


def test_bits_all_over_the_manifest_and_latest(pristine: Path, tmp_path: Path) -> None:
    shutil.copytree(pristine / "saved", tmp_path / "saved")
    path = tmp_path / "saved" / STEPS[-1]
    assert read_manifest(path)
    for file, read, stride in (
        (path / MANIFEST, lambda: read_manifest(path), 13),
        (tmp_path / "saved" / "latest", lambda: find_checkpoint(tmp_path / "saved", None), 3),
    ):
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), stride):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(
                CheckpointError, match=r"damaged|not JSON|not UTF-8|no object|not saved as|names"
            ):
                read()
        file.write_bytes(whole)


def test_a_manifest_in_another_spelling_is_damaged(engine: Any, pristine: Path, tmp_path: Path) -> None:
    """Not a bit of it may change unseen, those that mean nothing to JSON included."""
    shutil.copytree(pristine / "saved", tmp_path / "saved")
    path = tmp_path / "saved" / "global_step2" / MANIFEST
    whole = path.read_bytes()
    for other in (
        whole + b"\n",
        json.dumps(json.loads(whole)).encode(),
        whole.replace(b"4194304", b"4194304.0"),
    ):
        path.write_bytes(other)
        with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
            engine.load_checkpoint(tmp_path / "saved", tag="global_step2")
