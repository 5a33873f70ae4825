"""Checkpoints as folders of weights that transformers loads, and such folders as checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offloadzero
from offloadzero import CheckpointError
from offloadzero.checkpoint.convert.folder import INDEX, WEIGHTS
from offloadzero.checkpoint.convert.stored_model import in_dtype
from offloadzero.checkpoint.format.names import LOCK, new_unfinished
from offloadzero.checkpoint.partial import new_folder
from offloadzero.cli.main import FAILURE, INTERRUPTED, USER_ERROR, main
from tests.support.checkpoints import bits, contents, edit_meta, small_engine, train
from tests.support.faults import fails
from tests.support.tiny import script_environment

transformers = pytest.importorskip("transformers")


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and bits(one[name]) == bits(other[name]) for name in one
    )


@pytest.fixture(scope="module", params=["fp32", "compact"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoint, and beside it what the engine itself says of its weights."""
    made = tmp_path_factory.mktemp("run")
    own = {"placement": "host", "state_layout": request.param}
    engine = small_engine(made, offloadzero=own)
    train(engine, 3)
    engine.save_checkpoint(made / "saved")
    engine.save_16bit_model(made / "bf16")
    masters = {
        name: offloadzero.zero.safe_get_full_fp32_param(param).clone()
        if param.requires_grad
        else param.detach().clone()
        for name, param in engine.module.named_parameters()
    }
    save_file({**masters, **dict(engine.module.named_buffers())}, made / "masters.safetensors")
    engine.close()
    return made


# --- checkpoint to folder ---


def test_bf16_are_the_weights_and_fp32_the_masters(saved: Path, tmp_path: Path) -> None:
    assert convert(saved / "saved", tmp_path / "bf16", "--dtype", "bf16") == 0
    assert same(weights_in(tmp_path / "bf16"), weights_in(saved / "bf16"))
    masters = load_file(saved / "masters.safetensors")
    assert convert(saved / "saved" / "global_step3", tmp_path / "as saved") == 0
    assert same(weights_in(tmp_path / "as saved"), masters)
    assert convert(saved / "saved", tmp_path / "fp32", "--dtype", "fp32") == 0
    expected = {name: value.float() if name == "scale" else value for name, value in masters.items()}
    assert same(weights_in(tmp_path / "fp32"), expected)


def test_rounding_to_bf16_is_that_of_the_engine() -> None:
    patterns = torch.tensor([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F800000, 0x7FC00000, -0x407F8000, 1])
    values = patterns.to(torch.int32).view(torch.float32)
    rounded = in_dtype(values, torch.bfloat16)
    assert rounded.view(torch.int16).tolist() == [0x3F81, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, -0x407F, 0]
    assert in_dtype(torch.tensor([1.5], dtype=torch.float16), torch.bfloat16).tolist() == [1.5]


def test_shards_are_no_larger_than_asked_and_the_index_names_all(saved: Path, tmp_path: Path) -> None:
    assert convert(saved / "saved", tmp_path / "out", "--max-shard-size", "2KB") == 0
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = {file.name: load_file(file) for file in sorted((tmp_path / "out").glob("*.safetensors"))}
    assert len(files) > 2
    assert next(iter(files)) == f"model-00001-of-{len(files):05}.safetensors"
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(size <= 2000 or len(files[name]) == 1 for name, size in zip(files, sizes, strict=True))
    assert same(weights_in(tmp_path / "out"), load_file(saved / "masters.safetensors"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with odd sizes and tied embeddings, in several files with an index."""
    made = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    size = {"hidden_size": 36, "intermediate_size": 67, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.LlamaConfig(vocab_size=101, tie_word_embeddings=True, **size)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(made, max_shard_size="40KB")
    (made / "tokenizer.json").write_text("{}")
    (made / "pytorch_model.bin").write_text("weights of another kind")
    assert (made / INDEX).exists()
    return made


def engine_of(model: Any, directory: Path) -> Any:
    return small_engine(directory, model=model, scheduler={})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(60).view(2, 30)).logits.clone()  # type: ignore[no-any-return]


def test_transformers_loads_a_trained_checkpoint_with_equal_logits(llama: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    before = logits(model)
    engine = engine_of(model, tmp_path)
    ids = torch.arange(60).view(2, 30)
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(tmp_path / "saved")
    expected = logits(engine.module)
    engine.close()
    words = ("--like", llama, "--dtype", "bf16", "--max-shard-size", "40KB")
    assert convert(tmp_path / "saved", tmp_path / "out", *words) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(logits(loaded), expected)
    assert not torch.equal(before, expected)
    words = ("--like", tmp_path / "out", "--dtype", "fp32")
    assert convert(tmp_path / "saved", tmp_path / "fp32", *words) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype="auto")
    assert {param.dtype for param in loaded.parameters()} == {torch.float32}
    carried = {"config.json", "generation_config.json", "tokenizer.json"}
    assert {file.name for file in (tmp_path / "out").iterdir() if ".safetensors" not in file.name} == carried


# --- folder to checkpoint ---


def test_a_folder_becomes_a_checkpoint_of_weights(llama: Path, tmp_path: Path) -> None:
    assert convert(llama, tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["global_step0", "latest"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    model = transformers.LlamaForCausalLM(reference.config)
    engine = engine_of(model, tmp_path)
    other = logits(engine.module)
    with pytest.raises(CheckpointError, match="has weights alone: pass load_module_only=True"):
        engine.load_checkpoint(tmp_path / "out")
    assert torch.equal(logits(engine.module), other)
    path, _ = engine.load_checkpoint(tmp_path / "out", load_module_only=True)
    assert path == str(tmp_path / "out" / "global_step0")
    assert torch.equal(logits(engine.module), logits(reference))
    assert not torch.equal(logits(reference), other)
    engine.close()


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_a_folder_whose_weights_are_merged_on_load_becomes_no_checkpoint(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It failed only when the checkpoint was loaded."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    config = getattr(transformers, f"{kind}Config")(vocab_size=101, **sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path / "model")
    assert convert(tmp_path / "model", tmp_path / "out") == USER_ERROR
    error = capsys.readouterr().err
    assert f"the names that {kind}ForCausalLM has: model.layers.0.mlp.experts.down_proj (" in error
    assert ".experts.0." in error
    assert not (tmp_path / "out").exists()
    (tmp_path / "model" / "config.json").unlink()  # it may be of any model
    assert convert(tmp_path / "model", tmp_path / "out") == 0


def test_buffers_come_back_through_a_folder_that_does_not_tell_them_from_weights(
    saved: Path, tmp_path: Path
) -> None:
    assert convert(saved / "saved", tmp_path / "folder") == 0
    assert convert(tmp_path / "folder", tmp_path / "again") == 0
    engine = small_engine(tmp_path, seed=3)
    engine.load_checkpoint(tmp_path / "again", load_module_only=True)
    assert engine.module.seen.item() == 3
    expected = load_file(saved / "masters.safetensors")
    for name, param in engine.module.named_parameters():
        assert torch.equal(
            param.detach(), in_dtype(expected[name].flatten(), torch.bfloat16).view(param.shape)
        )
    engine.close()


# --- what is refused, and what is left ---


DAMAGES = {
    "a changed byte": lambda folder: _flip(folder / "unit-0000.safetensors"),
    "a file cut short": lambda folder: os.truncate(folder / "unit-0001.safetensors", 100),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a part of a model": lambda folder: edit_meta(
        folder, part={"pipeline_rank": 0, "tensor_rank": 0, "num_parts": 2, "save_number": 1}
    ),
}


def _flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_found_before_anything_is_written(
    damage: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved / "saved", tmp_path / "src")
    DAMAGES[damage](tmp_path / "src" / "global_step3")
    before = contents(tmp_path)
    assert convert(tmp_path / "src", tmp_path / "out") == FAILURE
    assert str(tmp_path / "src") in capsys.readouterr().err
    assert contents(tmp_path) == before


def _index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
FOLDER_DAMAGES = {
    f"{SHARDS[1]} is missing": lambda folder: (folder / SHARDS[1]).unlink(),
    "not a safetensors file, or cut short": lambda folder: os.truncate(folder / SHARDS[0], 100),
    "not the name of a file beside it": lambda folder: _index(folder, extra=f"../{SHARDS[0]}"),
    "do not agree about extra": lambda folder: _index(folder, extra=SHARDS[0]),
}


@pytest.mark.parametrize("message", FOLDER_DAMAGES)
def test_a_folder_that_is_not_whole_is_refused(
    message: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama, tmp_path / "src")
    FOLDER_DAMAGES[message](tmp_path / "src")
    before = contents(tmp_path)
    assert convert(tmp_path / "src", tmp_path / "out") == FAILURE
    assert message in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("error", "status"),
    [(OSError(28, "No space left on device"), FAILURE), (KeyboardInterrupt(), INTERRUPTED)],
)
def test_a_write_that_does_not_end_leaves_nothing(
    error: BaseException, status: int, saved: Path, tmp_path: Path
) -> None:
    with fails("checkpoint.write", error, about="blocks.1.weight"):
        assert convert(saved / "saved", tmp_path / "out") == status
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_its_frozen_weights_does_not_become_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """from_pretrained would draw them anew. Loaded into the model they are whole again, without a warning."""
    engine = small_engine(tmp_path)
    frozen = [name for name, param in engine.module.named_parameters() if not param.requires_grad]
    engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    assert convert(tmp_path / "saved", tmp_path / "out") == USER_ERROR
    error = capsys.readouterr().err
    assert f"exclude_frozen_parameters=True, without {frozen[0]} (1 in all)" in error
    assert not (tmp_path / "out").exists()
    caplog.clear()
    engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
    assert not caplog.records
    engine.save_checkpoint(tmp_path / "whole")
    engine.close()
    assert convert(tmp_path / "whole", tmp_path / "out") == 0
    assert frozen[0] in weights_in(tmp_path / "out")


def test_what_is_there_is_left_alone(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("text")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    for name, why in (
        ("full", "is there"),
        ("file", "is there"),
        ("link", "is there"),
        ("no/where", "its parent directory is not there"),
    ):
        assert convert(saved / "saved", tmp_path / name) == USER_ERROR
        assert why in capsys.readouterr().err
    assert contents(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert convert(saved / "saved", tmp_path / "empty") == 0
    assert (tmp_path / "empty" / WEIGHTS).exists()


def test_a_destination_in_the_source_leaves_that_whole_and_the_source_itself_is_none(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "saved"
    shutil.copytree(saved / "saved", source)
    for inside in ("tuned", "global_step3/tuned"):
        assert convert(source, source / inside) == 0
        assert convert(source / inside, source / inside / "start") == 0
    assert same(weights_in(source / "tuned"), weights_in(source / "global_step3" / "tuned"))
    assert convert(source, tmp_path / "out") == 0
    assert same(weights_in(source / "tuned"), weights_in(tmp_path / "out"))
    before = contents(tmp_path)
    for same_place in (source, source / "tuned", source / "global_step3"):
        assert convert(same_place, same_place) == USER_ERROR
        assert "is there: give a name that is free" in capsys.readouterr().err
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    assert convert(source, tmp_path / "mounted") == USER_ERROR
    assert "is a mount point, which no folder can replace: name a folder in it" in capsys.readouterr().err
    (tmp_path / "mounted").rmdir()
    assert contents(tmp_path) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from offloadzero.cli.main import main
from tests.support.faults import replaced

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

with replaced("checkpoint.write", kill, about="blocks.1.weight"):
    main(["convert", *sys.argv[1:]])
"""


def test_a_kill_leaves_no_destination_and_the_next_call_clears_up(saved: Path, tmp_path: Path) -> None:
    words = [str(saved / "saved"), str(tmp_path / "out")]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], env=script_environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.")
    others = tmp_path / new_unfinished("other").name
    others.mkdir()
    with new_folder(tmp_path / "out") as at_work:  # another process, which holds its lock
        assert not left.exists()
        assert (at_work / LOCK).exists()
        assert convert(*words) == 0
        assert at_work.exists()
        (tmp_path / "out" / WEIGHTS).unlink()
        (tmp_path / "out").rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", others.name])


def test_memory_does_not_grow_with_the_largest_tensor(tmp_path: Path) -> None:
    """A tensor of 384 MiB, which is a hole in its file, within half of that; libraries that are touched count, too."""
    shape, folder = [192, 1024, 1024], tmp_path / "src"
    header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 402653184]}}).encode()
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(folder / WEIGHTS, 8 + len(header) + 402653184)
    script = (
        "import resource, sys\n"
        "from offloadzero.checkpoint.convert import folder, stored_model\n"
        "from offloadzero.cli.main import main\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "status = main(['convert', *sys.argv[1:]])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, status)\n"
    )
    words = [sys.executable, "-c", script, str(folder), str(tmp_path / "out")]
    done = subprocess.run(words, env=script_environment(), check=True, capture_output=True, text=True)
    grown_mib, status = map(int, done.stdout.splitlines()[-1].split())
    assert status == 0
    assert grown_mib < 192
    assert (tmp_path / "out" / "global_step0" / "unit-0000.safetensors").stat().st_size > 402653184
