"""Which checkpoint is meant, what may be called so, and whose files are left alone."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import offloadzero
from offloadzero import CheckpointError, ConfigError
from offloadzero.checkpoint.format.names import Unfinished, new_unfinished, parse_unfinished
from offloadzero.checkpoint.partial import clear_leftovers
from tests.support.checkpoints import contents, small_engine, train, whole_state
from tests.support.faults import fails

NUM_LAYOUTS = int(os.environ.get("OFFLOADZERO_TEST_LAYOUTS", "20"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = small_engine(tmp_path_factory.mktemp("nvme"))
    train(engine, 1)
    yield engine
    engine.close()


@pytest.fixture
def saved(engine: Any, tmp_path: Path) -> Path:
    """Two checkpoints, a and b; `latest` names b."""
    for tag in ("a", "b"):
        engine.save_checkpoint(tmp_path / "saved", tag=tag, client_state={"tag": tag})
    return tmp_path / "saved"


# --- tags ---

BAD_TAGS = [
    "",
    " a",
    "a ",
    "a\n",
    "\u00a0a",
    "latest",
    "Latest",
    "..",
    ".",
    "../up",
    "/tmp/x",
    "a/b",
    "a/../b",
    ".a",
    "a\0b",
    "a\nb",
    "a.partial",
    "a.replaced",
    "\ud800",
    "x" * 201,
    "é" * 101,
]


@pytest.mark.parametrize("tag", BAD_TAGS)
def test_tags_that_cannot_be_are_refused_when_saving(engine: Any, tmp_path: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match=r"^tag = "):
        engine.save_checkpoint(tmp_path / "saved", tag=tag)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("tag", ["a", "step 5", "a..b", "x" * 200, "é", "a\\b", 5])
def test_tags_that_can_be(engine: Any, tmp_path: Path, tag: str | int) -> None:
    engine.save_checkpoint(tmp_path, tag=tag, client_state={"tag": tag})
    assert (tmp_path / "latest").read_text() == str(tag)  # and nothing else: as DeepSpeed has it
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / str(tag)), {"tag": tag})
    assert engine.load_checkpoint(tmp_path, tag=tag)[1] == {"tag": tag}


@pytest.mark.parametrize("path", ["a\0b", None, 5, b"bytes"])
def test_directories_that_cannot_be(engine: Any, path: Any) -> None:
    with pytest.raises(ConfigError, match="save_dir"):
        engine.save_checkpoint(path)
    with pytest.raises(ConfigError, match="load_dir"):
        engine.load_checkpoint(path)
    with pytest.raises(ConfigError, match="save_dir"):
        engine.save_16bit_model(path)


def test_a_file_in_the_place_of_the_directory(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="there is a file"):
        engine.save_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match="Not a directory"):
        engine.load_checkpoint(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# --- which one ---


def test_nothing_there_is_none(engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
    assert caplog.messages == [f"{tmp_path / 'nowhere'}: there is no checkpoint, and nothing is loaded"]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.json").write_text('{"format": "parquet"}')
    (tmp_path / ".x.123.partial").mkdir()
    assert engine.load_checkpoint(tmp_path) == (None, {})
    with pytest.raises(CheckpointError, match=r"no checkpoint 'a' in .*Complete checkpoints there: none"):
        engine.load_checkpoint(tmp_path, tag="a")
    with pytest.raises(CheckpointError, match=r"data is not a checkpoint of this package"):
        engine.load_checkpoint(tmp_path, tag="data")


def test_the_folder_of_a_tag_is_no_place_of_checkpoints(engine: Any, saved: Path) -> None:
    """`convert` takes it, and a script that passes it would begin anew."""
    with pytest.raises(CheckpointError, match=f"is a checkpoint itself: load {saved} with tag='b'"):
        engine.load_checkpoint(saved / "b")


def test_a_tag_that_is_not_there_names_those_that_are(engine: Any, saved: Path) -> None:
    (saved / "a" / "unit-0000.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint 'c' .*there: 'b'; damaged: 'a' \(.*0000.* missing"
    ):
        engine.load_checkpoint(saved, tag="c")
    for tag in ("../saved/b", "", "b/", ".", "b\0", "\ud800"):
        with pytest.raises(CheckpointError, match=r"no checkpoint .*Complete checkpoints there: 'b'"):
            engine.load_checkpoint(saved, tag=tag)


DAMAGED_LATEST: dict[str, Callable[[Path], Any]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "flipped": lambda file: file.write_bytes(b"c"),
    "flipped to one that is there": lambda file: file.write_bytes(b"a"),
    "not UTF-8": lambda file: file.write_bytes(b"\xff"),
    "NUL": lambda file: file.write_bytes(b"b\0"),
    "longer": lambda file: file.write_bytes(b"bb"),
    "long": lambda file: file.write_bytes(b"b" * 5000),
    "leads out": lambda file: file.write_bytes(b"../saved/b"),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "a FIFO": lambda file: (file.unlink(), os.mkfifo(file)),
    "a dangling link": lambda file: (file.unlink(), file.symlink_to("nowhere")),
    "names a file": lambda file: (file.write_bytes(b"x"), (file.parent / "x").touch()),
}


@pytest.mark.parametrize("damage", DAMAGED_LATEST)
def test_a_damaged_latest_offers_the_newest_that_is_intact(engine: Any, saved: Path, damage: str) -> None:
    before = whole_state(engine)
    DAMAGED_LATEST[damage](saved / "latest")
    with pytest.raises(CheckpointError, match=r"latest.*'b' \(step 1\) is intact: pass tag='b'"):
        engine.load_checkpoint(saved)
    unit = saved / "b" / "unit-0001.safetensors"
    unit.write_bytes(unit.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"latest.*'a' \(step 1\) is intact: pass tag='a'"):
        engine.load_checkpoint(saved)
    shutil.rmtree(saved / "a")
    with pytest.raises(CheckpointError, match=r"latest.*No checkpoint in .* is intact"):
        engine.load_checkpoint(saved)
    assert whole_state(engine) == before


def test_the_most_steps_are_the_newest_whatever_the_clock_says(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag, steps, saved_unix_ns in (("a", 1, 50), ("b", 10, 20), ("c", 9, 90), ("d", 10, 10), ("e", 2, 99)):
        monkeypatch.setattr(engine._coordinator, "global_steps", steps)
        monkeypatch.setattr("offloadzero.checkpoint.states.time.time_ns", lambda at=saved_unix_ns: at)
        engine.save_checkpoint(tmp_path, tag=tag)
    (tmp_path / "latest").write_text("nonsense")
    others = r"Complete by their sizes: 'd' \(step 10\), 'c' \(step 9\), 'e' \(step 2\), 'a' \(step 1\)$"
    with pytest.raises(
        CheckpointError, match=rf"'b' \(step 10\) is intact: pass tag='b' to load it\. {others}"
    ):
        engine.load_checkpoint(tmp_path)
    for tag in "bde":
        os.truncate(tmp_path / tag / "unit-0001.safetensors", 10)
    with pytest.raises(CheckpointError, match=r"'c' \(step 9\) is intact.* by their sizes: 'a' \(step 1\)$"):
        engine.load_checkpoint(tmp_path, tag="b")
    for tag in "ca":
        os.truncate(tmp_path / tag / "meta.json", 10)
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is intact$"):
        engine.load_checkpoint(tmp_path)


def test_after_a_damaged_latest_a_save_goes_on(engine: Any, saved: Path) -> None:
    (saved / "latest").write_bytes(b"\xff\xff")
    assert engine.load_checkpoint(saved, tag="a")[1] == {"tag": "a"}
    engine.save_checkpoint(saved, tag="c", client_state={"tag": "c"})
    assert engine.load_checkpoint(saved)[1] == {"tag": "c"}


def test_latest_names_what_was_saved_as_the_latest(engine: Any, saved: Path) -> None:
    engine.save_checkpoint(saved, tag="c", save_latest=False)
    assert engine.load_checkpoint(saved)[1] == {"tag": "b"}
    engine.save_checkpoint(saved, tag="b", client_state={"tag": "b again"}, save_latest=False)
    assert engine.load_checkpoint(saved)[1] == {"tag": "b again"}
    engine.save_checkpoint(saved, tag="a", client_state={"tag": "a again"})
    assert engine.load_checkpoint(saved)[1] == {"tag": "a again"}
    (saved / "latest").write_text("c")
    with pytest.raises(
        CheckpointError, match=r"not saved as the latest: damaged, or changed by hand .*tag='c'"
    ):
        engine.load_checkpoint(saved)
    (saved / "latest").write_text("a\n")  # an editor's newline
    assert engine.load_checkpoint(saved)[1] == {"tag": "a again"}


# --- whose ---


def refused_layouts(directory: Path) -> Iterator[tuple[Path, str]]:
    """What may lie under the tag `data`, and why it is left alone."""
    data = directory / "data"
    data.mkdir()
    yield data, "meta.json is missing"
    (data / "train.bin").write_bytes(b"mine")
    yield data, "meta.json is missing"
    (data / "meta.json").write_text('{"format": "offloadzero-checkpointx", "version": 2}')
    yield data, "format 'offloadzero-checkpointx'"
    (data / "meta.json").write_text("[" * 100_000)
    yield data, "nested too deeply"
    shutil.rmtree(data)
    data.write_text("mine")
    yield data, "not a directory"
    data.unlink()
    (directory / "elsewhere").mkdir()
    data.symlink_to("elsewhere")
    yield data, "a symbolic link"


def test_a_directory_that_is_not_ours_is_left_alone(engine: Any, tmp_path: Path) -> None:
    for data, reason in refused_layouts(tmp_path):
        before = contents(tmp_path)
        with pytest.raises(CheckpointError) as raised:
            engine.save_checkpoint(tmp_path, tag="data")
        assert str(raised.value).startswith(f"{data} is not a checkpoint of this package (")
        assert reason in str(raised.value)
        assert str(raised.value).endswith("It is left alone: save under another tag, or move it away.")
        assert contents(tmp_path) == before


def test_a_file_of_others_in_a_checkpoint_keeps_it_from_being_replaced(engine: Any, saved: Path) -> None:
    for name in ("tokenizer.json", "unit-9999.safetensors", "optimizer"):
        other = saved / "b" / name
        if "." in name:
            other.write_text("mine")
        else:
            other.mkdir()
        before = contents(saved)
        with pytest.raises(CheckpointError, match=rf"b holds '{name}', which is not of the checkpoint"):
            engine.save_checkpoint(saved, tag="b")
        assert contents(saved) == before
        if name == "tokenizer.json":  # it does no harm
            assert engine.load_checkpoint(saved)[1] == {"tag": "b"}
        if other.is_dir():
            other.rmdir()
        else:
            other.unlink()
    engine.save_checkpoint(saved, tag="b")


@pytest.mark.parametrize("kind", ["text", "link", "directory"])
def test_a_latest_that_is_not_ours_is_left_alone(engine: Any, tmp_path: Path, kind: str) -> None:
    latest = tmp_path / "latest"
    (tmp_path / "runs").mkdir()
    if kind == "text":
        latest.write_text("runs")
    elif kind == "link":
        latest.symlink_to("runs")
    else:
        latest.mkdir()
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"latest is not the file of this package .*save_latest=False"):
        engine.save_checkpoint(tmp_path)
    assert contents(tmp_path) == before
    engine.save_checkpoint(tmp_path, tag="a", save_latest=False)
    assert {name: value for name, value in contents(tmp_path).items() if name in before} == before


def test_foreign_files_of_similar_names_are_not_touched(engine: Any, tmp_path: Path) -> None:
    """OFFLOADZERO_TEST_LAYOUTS random directories; three saves each, one of which replaces another."""
    for seed in range(NUM_LAYOUTS):
        draw = random.Random(seed)
        directory = tmp_path / str(seed)
        directory.mkdir()
        for _ in range(draw.randrange(1, 9)):
            plant(directory, draw)
        before = contents(directory)
        tags = ["best", draw.choice(["global_step6", "run", "data2"]), "best"]
        for tag in tags:
            engine.save_checkpoint(directory, tag=tag, save_latest="latest" not in before)
        engine.save_16bit_model(directory, "weights.safetensors")
        after = contents(directory)
        touched = [name for name in before if after.get(name) != before[name]]
        assert not touched, f"seed {seed}: {touched}"
        ours = {name.split("/")[0] for name in after.keys() - before.keys()}
        assert ours <= {*tags, "latest", "weights.safetensors"}, f"seed {seed}: {ours}"


def plant(directory: Path, draw: random.Random) -> None:
    """Something of a user's, with a name like one of ours."""
    pid = draw.randrange(1, 99999)
    token = "".join(draw.choices("0123456789abcdef", k=32))
    other_tag = new_unfinished("other").token
    name = draw.choice(
        [
            "data", "global_step5", "latest.partial", "latest", "best.replaced", "best.partial", "best~", ".best",
            f".best.{pid}.partial", f".x.{pid}.partial", f".best.{token}.partial", f".best.{token}.replaced",
            f".best.{other_tag}.partial", f".best.{other_tag}.replaced", f".weights.safetensors.{pid}.partial",
            f"x.best.{token}.partial", "is_latest", "meta.json", "manifest.json", "unit-0000.safetensors", ".lock",
        ]
    )  # fmt: skip
    path = directory / name
    if path.exists() or path.is_symlink():
        return
    if draw.random() < 0.3:
        path.write_bytes(draw.randbytes(draw.randrange(20)))
        return
    if draw.random() < 0.1:
        path.symlink_to(draw.choice(["nowhere", "data", "."]))
        return
    path.mkdir()
    for inside in ("unit-0000.safetensors", "meta.json", ".lock", "is_latest", "notes.txt"):
        if draw.random() < 0.4:
            (path / inside).write_bytes(draw.choice([b"", b"{}", b'{"format": "mine"}', b"\xff"]))


def test_names_are_marks() -> None:
    unfinished = new_unfinished("a.b")
    assert parse_unfinished(unfinished.name) == unfinished
    for name in (
        unfinished.name.replace("a.b", "a.c"),
        Unfinished("a.b", "0" * 32, "partial").name,
        unfinished.name[1:],
        unfinished.name + "x",
        ".a.123.partial",
    ):
        assert parse_unfinished(name) is None, name


# --- what is unfinished ---


def test_what_a_live_process_writes_is_left_alone(engine: Any, saved: Path) -> None:
    """Another process is known by its lock, not by a number."""
    path = saved / new_unfinished("b").name
    path.mkdir()
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (path / "unit-0000.safetensors").write_text("half")
    before = contents(path)
    engine.save_checkpoint(saved, tag="b")
    assert contents(path) == before
    os.close(lock)  # it dies
    engine.save_checkpoint(saved, tag="b")
    assert sorted(entry.name for entry in saved.iterdir()) == ["a", "b", "latest"]


def test_leftovers_with_something_else_inside_stay(engine: Any, saved: Path) -> None:
    path = saved / new_unfinished("b").name
    path.mkdir()
    (path / ".lock").touch()
    (path / "notes.txt").write_text("mine")
    before = contents(path)
    engine.save_checkpoint(saved, tag="b")
    assert contents(path) == before


def test_a_kill_between_the_two_renames(engine: Any, saved: Path) -> None:
    """The old one is read under its other name, and the next save gives it its own again."""
    partial = new_unfinished("b")
    (saved / "b").rename(saved / Unfinished("b", partial.token, "replaced").name)
    shutil.copytree(saved / "a", saved / partial.name)
    (saved / partial.name / ".lock").touch()
    assert engine.load_checkpoint(saved)[1] == {"tag": "b"}
    assert engine.load_checkpoint(saved, tag="b")[1] == {"tag": "b"}
    engine.save_checkpoint(saved, tag="c", save_latest=False)
    assert sorted(entry.name for entry in saved.iterdir()) == ["a", "b", "c", "latest"]
    assert engine.load_checkpoint(saved)[1] == {"tag": "b"}


def test_a_failing_rename_leaves_the_old_one(engine: Any, saved: Path) -> None:
    before = contents(saved)
    failing = fails("checkpoint.commit", OSError(5, "Input/output error"))
    with failing, pytest.raises(CheckpointError, match=r"saved: Input/output error: nothing was saved"):
        engine.save_checkpoint(saved, tag="b")
    assert contents(saved) == before


def test_a_file_that_takes_its_name_while_another_run_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is listed as unfinished, and gone when it is looked at: nothing was left behind, nothing is said."""
    unfinished = tmp_path / new_unfinished("model.safetensors").name
    unfinished.write_bytes(b"whole")

    listdir = os.listdir

    def list_and_rename(path: Path) -> list[str]:
        names = listdir(path)
        if unfinished.name in names:
            unfinished.rename(path / "model.safetensors")
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", list_and_rename)
        clear_leftovers(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"whole"
    assert not caplog.records


@pytest.mark.parametrize("tags", ["one each", "the same"])
def test_two_runs_save_into_one_directory(
    tmp_path: Path, tags: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither takes what the other is writing for abandoned, and what `latest` names says so."""
    engines = [small_engine(tmp_path, seed=seed) for seed in range(2)]
    failures: list[BaseException] = []

    def save(engine: Any, number: int) -> None:
        try:
            for count in range(12):
                tag = f"run{number}" if tags == "one each" else "best"
                engine.save_checkpoint(tmp_path / "saved", tag=tag, client_state={"count": count})
                engine.save_16bit_model(tmp_path / "saved", f"{number}.safetensors")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(engine, i)) for i, engine in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert engines[0].load_checkpoint(tmp_path / "saved")[1] == {"count": 11}
    expected = {"best"} if tags == "the same" else {"run0", "run1"}
    found = {path.name for path in (tmp_path / "saved").iterdir()}
    assert found == {"0.safetensors", "1.safetensors", *expected, "latest"}
    assert not caplog.records
    for engine in engines:
        engine.close()


def test_the_error_is_public() -> None:
    assert issubclass(offloadzero.CheckpointError, offloadzero.OffloadError)
