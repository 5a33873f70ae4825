"""Frozen weights that are read from the file in which they lie: [Note: weights in place] in memory/mapped_files.py."""

from __future__ import annotations

import copy
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offloadzero
from offloadzero import AioError, BudgetError
from offloadzero.engine import build
from offloadzero.io.engine import AioBackend
from offloadzero.memory.mapped_files import MappedFiles
from offloadzero.memory.tiers import InParts
from tests.support.mapped import frozen_bytes, in_place_bytes, loaded, saved
from tests.support.tiny import all_states, make_engine, settings, small_disk, tokens, train


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with the weights of a model in two files."""
    return saved(tmp_path / "base", torch.bfloat16)


def engine_of(
    base: Path, files: Path, mode: str = "auto", model: nn.Module | None = None, **keys: Any
) -> offloadzero.Engine:
    budgets = {"budgets": {"device": "110KiB"}}  # units are fetched again and again
    config = settings(files, frozen_weights=mode, **{**budgets, **keys})
    return make_engine(config, loaded(base) if model is None else model)


def written_bytes(engine: offloadzero.Engine) -> int:
    nvme = engine.optimizer.runtime.store.nvme
    assert nvme is not None
    engine.optimizer.runtime.synchronize()
    return nvme.engine.stats()["bytes_written"]


# --- where a value lies ---


def test_each_weight_is_found_in_its_file(base: Path) -> None:
    model = loaded(base)
    mapped = MappedFiles()
    for name, param in model.named_parameters():
        place = mapped.find(param.data)
        assert place is not None, name
        with open(place.file.path, "rb") as file:
            file.seek(place.offset)
            held = file.read(param.nbytes)
        assert held == param.detach().view(torch.uint8).numpy().tobytes(), name


def shared(path: Path) -> torch.Tensor:
    num_bytes = path.stat().st_size
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def written(path: Path) -> torch.Tensor:
    value = next(iter(load_file(path).values()))
    value.view(-1)[-1] = 7
    return value


def replaced(path: Path) -> torch.Tensor:
    value = next(iter(load_file(path).values()))
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
    return value


def deleted(path: Path) -> torch.Tensor:
    value = next(iter(load_file(path).values()))
    path.unlink()
    return value


NOWHERE: dict[str, Callable[[Path], torch.Tensor]] = {
    "memory of its own": lambda _: torch.ones(4096),
    "a mapping without a file": lambda _: torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8),
    "a copy": lambda path: next(iter(load_file(path).values())).clone(),
    "a view with gaps": lambda path: next(v for v in load_file(path).values() if v.dim() == 2).t(),
    "no element": lambda path: next(iter(load_file(path).values())).view(-1)[:0],
    "a shared mapping": shared,
    "a page that was written to": written,
    "a file whose name is another's": replaced,
    "a file without a name": deleted,
}


@pytest.mark.parametrize("form", NOWHERE)
def test_what_is_not_provably_in_a_file_is_in_none(base: Path, form: str) -> None:
    value = NOWHERE[form](base / "0.safetensors")
    assert MappedFiles().find(value) is None


def test_what_lies_in_a_file_is_no_memory_that_the_homes_get(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of weights that are trained: the page cache counts as free already, and would count twice."""
    movable = []
    plan_engine = build.plan_engine

    def noted(*given: Any, **keys: Any) -> Any:
        movable.append(keys["movable_bytes"])
        return plan_engine(*given, **keys)

    monkeypatch.setattr(build, "plan_engine", noted)
    mapped = loaded(base).requires_grad_(True)
    num_bytes = sum(param.nbytes for param in mapped.parameters())
    for model in (copy.deepcopy(mapped), mapped):
        engine_of(base, tmp_path, model=model, budgets={}).close()
    assert movable == [num_bytes, 0]


# --- training ---


@pytest.mark.parametrize("backend", [backend.value for backend in AioBackend])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_base_in_place_trains_to_the_same_bits_and_is_never_written(
    tmp_path: Path, dtype: torch.dtype, backend: str
) -> None:
    base = saved(tmp_path / "base", dtype)
    keys: dict[str, Any] = {"aio": {"backend": backend}, "budgets": {"device": "220KiB"}}
    keys["bf16"] = {"enabled": dtype == torch.bfloat16}
    copied, in_place = engine_of(base, tmp_path, "copy", **keys), engine_of(base, tmp_path, **keys)
    begun = [written_bytes(engine) for engine in (copied, in_place)]
    assert in_place_bytes(copied) == 0
    assert in_place_bytes(in_place) == frozen_bytes(in_place) > 100_000
    assert begun[0] - begun[1] >= frozen_bytes(in_place)
    assert begun[1] < 100_000
    assert train(copied, num_steps=3) == train(in_place, num_steps=3)
    assert written_bytes(copied) - begun[0] == written_bytes(in_place) - begun[1]
    expected, found = all_states(copied), all_states(in_place)
    for name, value in expected.items():
        assert torch.equal(value.view(torch.uint8), found[name].view(torch.uint8)), name
    table = in_place.memory_table()
    assert f"{base}/0.safetensors" in table
    assert "of frozen weights, in place" in table
    weights = {name: value.clone() for name, value in copied.module.state_dict().items()}
    copied.close()
    in_place.optimizer.runtime.restore_model()
    for name, value in in_place.module.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_a_weight_that_was_changed_before_the_start_is_copied(base: Path, tmp_path: Path) -> None:
    model = loaded(base)
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = 3
    engine = engine_of(base, tmp_path, model=model)
    assert 0 < in_place_bytes(engine) < frozen_bytes(engine)
    assert engine.module.blocks[1].up.weight[0, 0] == 3
    plain = engine_of(base, tmp_path, "copy", loaded(base))
    with torch.no_grad():
        plain.module.blocks[1].up.weight[0, 0] = 3
    assert train(engine, num_steps=3) == train(plain, num_steps=3)
    engine.close()
    plain.close()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"aio": {"checksums": True}}, "no checksum is known of the file"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "the weights have another dtype there"),
        ({"placement": "host"}, "there is no file to save"),
        ({"mode": "copy"}, "asked for"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_what_is_not_in_place(base: Path, tmp_path: Path, keys: dict[str, Any], why: str) -> None:
    engine = engine_of(base, tmp_path, **{"budgets": {}, **keys})
    assert in_place_bytes(engine) == 0, why
    engine.close()


def test_a_file_on_another_drive_is_read_where_that_is_asked_for(base: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "drive", size="8m") as drive:
        copied, in_place = engine_of(base, drive), engine_of(base, drive, "in_place")
        assert in_place_bytes(copied) == 0
        assert in_place_bytes(in_place) == frozen_bytes(in_place)
        assert train(copied, num_steps=2) == train(in_place, num_steps=2)
        copied.close()
        in_place.close()


def test_whole_sectors_of_a_file_come_without_a_copy(tmp_path: Path) -> None:
    """Wherever the first of them begins."""
    (tmp_path / "base").mkdir()
    file, num_layers = tmp_path / "base" / "0.safetensors", 4
    save_file({str(number): torch.randn(128, 128) for number in range(num_layers)}, file)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(num_layers)))
    for layer, value in zip(model, load_file(file).values(), strict=True):
        layer.weight = nn.Parameter(value, requires_grad=False)
    model.append(nn.Linear(128, 1))
    config = settings(tmp_path, bf16={"enabled": False}, budgets={"device": "264KiB"})
    engine = make_engine(config, model)
    nvme = engine.optimizer.runtime.store.nvme
    before = nvme.engine.stats()
    engine(torch.ones(1, 128))
    after = nvme.engine.stats()
    assert in_place_bytes(engine) == num_layers * 128 * 128 * 4
    straight = (after["blocks"] - after["bounced"]) - (before["blocks"] - before["bounced"])
    assert straight >= num_layers
    engine.close()


# --- writes ---


@pytest.fixture
def engine(base: Path, tmp_path: Path) -> Iterator[offloadzero.Engine]:
    engine = engine_of(base, tmp_path)
    yield engine
    engine.close()


def test_a_weight_that_is_written_moves_into_the_swap_files(base: Path, engine: offloadzero.Engine) -> None:
    before = [file.read_bytes() for file in sorted(base.iterdir())]
    train(engine, num_steps=1)
    weight, total = engine.module.blocks[2].down.weight, in_place_bytes(engine)
    with torch.no_grad():
        weight.mul_(2)
        weight[3, 5] = 9
    expected = loaded(base).blocks[2].down.weight.detach() * 2
    expected[3, 5] = 9
    assert torch.equal(weight, expected)
    assert in_place_bytes(engine) == total - weight.nbytes
    assert torch.equal(engine.module.blocks[2].up.weight, loaded(base).blocks[2].up.weight)
    losses = train(engine, num_steps=2)
    with torch.no_grad():
        weight.div_(2)  # a second write, in the swap files
    assert torch.equal(weight, expected / 2)
    assert in_place_bytes(engine) == total - weight.nbytes
    assert losses != train(engine, num_steps=2)
    assert before == [file.read_bytes() for file in sorted(base.iterdir())]


def test_values_that_the_file_has_move_nothing(engine: offloadzero.Engine, tmp_path: Path) -> None:
    total = in_place_bytes(engine)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.module.load_state_dict(weights)
    engine.save_checkpoint(str(tmp_path / "saved"))
    losses = train(engine, num_steps=2)
    engine.load_checkpoint(str(tmp_path / "saved"))
    assert losses == train(engine, num_steps=2)
    assert in_place_bytes(engine) == total == frozen_bytes(engine)


def test_a_move_beyond_the_budget_is_refused_and_the_weight_keeps_its_value(
    base: Path, tmp_path: Path
) -> None:
    planned = engine_of(base, tmp_path)
    budget = planned.optimizer.runtime.plan.tier_bytes(offloadzero.core.segments.TierName.NVME)
    planned.close()
    with pytest.raises(BudgetError, match=r"budgets\.nvme"):
        engine_of(base, tmp_path, "copy", budgets={"device": "110KiB", "nvme": budget})
    engine = engine_of(base, tmp_path, budgets={"device": "110KiB", "nvme": budget})
    expect_refused_writes(engine, engine_of(base, tmp_path, "copy"), r"budgets\.nvme allows")


def test_a_move_for_which_the_drive_has_no_room_is_refused(base: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "drive", size="1m") as drive:
        engine = engine_of(base, drive, "in_place")
        free = os.statvfs(drive)
        (drive / "rest").write_bytes(bytes(free.f_bavail * free.f_bsize))
        expect_refused_writes(
            engine, engine_of(base, tmp_path, "copy"), r"are free \(No space left on device\)"
        )
        (drive / "rest").unlink()
        with torch.no_grad():
            engine.module.blocks[0].up.weight.zero_()
        assert not engine.module.blocks[0].up.weight.any()
        engine.close()


def expect_refused_writes(engine: offloadzero.Engine, plain: offloadzero.Engine, why: str) -> None:
    """Write a weight in each way, which changes nothing: `engine` trains on as `plain` does."""
    module = engine.module
    block = module.blocks[0]
    says = rf"blocks\.0\.up\.weight: it is read from .*safetensors and now written, .*{why}.*keeps the value"
    loss = engine(tokens(0))
    with pytest.raises(BudgetError, match=says), torch.no_grad():
        block.up.weight.zero_()
    engine.backward(loss)
    engine.step()
    train(plain, num_steps=1)
    with pytest.raises(BudgetError, match=says):
        block.up.weight.data = torch.zeros_like(block.up.weight)
    with pytest.raises(BudgetError, match=says):
        module.load_state_dict({"blocks.0.up.weight": torch.zeros_like(block.up.weight)}, strict=False)
    with (
        pytest.raises(BudgetError, match=says),
        offloadzero.zero.GatheredParameters(block.up.weight, modifier_rank=0),
    ):
        block.up.weight.data.zero_()
    hook = block.register_forward_pre_hook(lambda *_: block.up.weight.data.zero_())
    with pytest.raises(BudgetError, match=says):
        module(tokens(0))
    hook.remove()
    home = engine.optimizer.runtime.records[1].param_home
    assert isinstance(home.place, InParts)
    assert in_place_bytes(engine) == frozen_bytes(engine)
    assert train(engine, num_steps=2) == train(plain, num_steps=2)
    plain.close()


# --- the file while it is read ---


def test_a_file_that_is_written_to_ends_the_run(base: Path, tmp_path: Path) -> None:
    engine = engine_of(base, tmp_path)
    train(engine, num_steps=1)
    for file in base.iterdir():
        with file.open("r+b") as opened:
            opened.seek(-2, os.SEEK_END)
            opened.write(b"ab")
    says = (
        r"\S+\.weight \(nvme\): pread .*safetensors\+0x[0-9a-f]+, \d+ bytes: Stale file handle.*"
        r'written to, or touched, since the start.*"frozen_weights": "copy"'
    )
    with pytest.raises(AioError, match=says):
        train(engine, num_steps=1)
    engine.close()


def test_a_file_that_is_cut_short_ends_the_run(base: Path, tmp_path: Path) -> None:
    engine = engine_of(base, tmp_path)
    train(engine, num_steps=1)
    for file in base.iterdir():
        os.truncate(file, 100)
    with pytest.raises(AioError, match=r"safetensors\+0x[0-9a-f]+, \d+ bytes: Stale file handle"):
        train(engine, num_steps=1)
    engine.close()


def test_a_file_that_is_replaced_or_deleted_is_read_as_it_was(base: Path, tmp_path: Path) -> None:
    engine, plain = engine_of(base, tmp_path), engine_of(base, tmp_path, "copy")
    (base / "0.safetensors").unlink()
    save_file({"other": torch.ones(5)}, tmp_path / "new")
    os.replace(tmp_path / "new", base / "1.safetensors")
    assert train(engine, num_steps=2) == train(plain, num_steps=2)
    engine.close()
    plain.close()
