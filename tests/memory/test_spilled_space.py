"""What a model that waits on a drive takes there while it moves to its homes: [Note: the gap] in memory/nvme.py."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero import BudgetError, zero
from offloadzero.core.segments import TierName
from offloadzero.io.engine import AioFile
from offloadzero.memory.nvme import STRIPE_BYTES, bytes_before, file_bytes, stripe_pieces
from offloadzero.streaming.building import original_form
from tests.support.cases import each_pair
from tests.support.faults import observes
from tests.support.tiny import TinyModel, all_states, make_engine, settings, small_disk, train

WIDTH = 160
MIXED = {"param": "nvme", "master": "host", "exp_avg": "nvme", "exp_avg_sq": "host"}


def build(num_blocks: int = 8) -> TinyModel:
    torch.manual_seed(1)
    return TinyModel(width=WIDTH, num_blocks=num_blocks)


def waiting(config: dict[str, Any], num_blocks: int = 8) -> TinyModel:
    with zero.Init(config_dict_or_path=config):
        return build(num_blocks)


def used_bytes(directory: Path) -> int:
    """Of all open files there, those without a name included."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            path, status = os.readlink(f"/proc/self/fd/{name}"), os.stat(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
        if path.startswith(f"{directory}/"):
            files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


class Peak:
    """The largest `used_bytes` after anything that may take space."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.num_bytes = directory, 0
        for owner, name in ((AioFile, "preallocate"), (original_form, "write_weights"), (os, "pwrite")):
            self._measure_after(owner, name, monkeypatch)

    def _measure_after(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def measured(*args: Any, **keys: Any) -> Any:
            value = original(*args, **keys)
            self.num_bytes = max(self.num_bytes, used_bytes(self.directory))
            return value

        monkeypatch.setattr(owner, name, measured)


@pytest.mark.parametrize(
    ("layout", "placement", "num_directories"),
    each_pair(["fp32", "compact"], ["nvme", MIXED], [1, 3]),
    ids=str,
)
def test_moving_home_takes_no_more_than_the_homes_and_one_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, placement: Any, num_directories: int
) -> None:
    directories = [tmp_path / f"drive{i}" for i in range(num_directories)]
    for directory in directories:
        directory.mkdir()
    config = settings(list(map(str, directories)), placement=placement, state_layout=layout)
    config["offloadzero"]["nvme_path"] = list(map(str, directories))
    peak = Peak(tmp_path, monkeypatch)
    model = waiting(config, num_blocks=24 if num_directories > 1 else 8)
    unit_bytes = 4 * sum(param.numel() for param in model.blocks[0].parameters())
    spilled_bytes = used_bytes(tmp_path)
    num_large = 4 * sum(param.numel() for param in model.parameters() if param.numel() >= 4096)
    assert spilled_bytes >= num_large, "nothing waits on the drive"
    peak.num_bytes = 0
    engine = make_engine(config, model)
    final_bytes = used_bytes(tmp_path)
    planned = engine.optimizer.runtime.plan.tier_bytes(TierName.NVME)
    assert final_bytes >= planned, "the homes are not reserved"
    row_bytes = (num_directories - 1) * STRIPE_BYTES  # what begins in the middle of a row of stripes
    assert final_bytes <= planned + row_bytes + 64 * 1024
    assert peak.num_bytes <= max(final_bytes, spilled_bytes) + unit_bytes + row_bytes
    assert peak.num_bytes < 0.95 * (planned + spilled_bytes), "as much as if both were there at once"
    (tmp_path / "plain").mkdir()
    plain = make_engine({**config, "offloadzero": {**config["offloadzero"], "nvme_path": str(tmp_path / "plain")}},
                        build(24 if num_directories > 1 else 8))  # fmt: skip
    assert train(engine, num_steps=2) == train(plain, num_steps=2)
    one, other = all_states(engine), all_states(plain)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    engine.close()
    plain.close()
    assert [os.listdir(directory) for directory in directories] == [[]] * num_directories


@pytest.mark.parametrize("layout", ["fp32", "compact"])
def test_a_drive_that_holds_the_homes_and_one_unit_suffices(tmp_path: Path, layout: str) -> None:
    elements = sum(param.numel() for param in build().parameters())
    unit = 4 * sum(param.numel() for param in build().blocks[0].parameters())
    final_bytes = int((12 if layout == "fp32" else 5.2) * elements) + 128 * 1024
    with small_disk(tmp_path / "drive", size=str(final_bytes + unit)) as drive:
        config = settings(drive, placement="nvme", state_layout=layout)
        assert os.statvfs(drive).f_bavail * 4096 < final_bytes + 4 * elements
        model = waiting(config)
        engine = make_engine(config, model)
        losses = train(engine, num_steps=2)
        engine.close()
    plain = make_engine(settings(tmp_path, placement="nvme", state_layout=layout), build())
    assert losses == train(plain, num_steps=2)
    plain.close()


def test_a_drive_without_room_is_refused_before_anything_moves(tmp_path: Path) -> None:
    elements = sum(param.numel() for param in build().parameters())
    with small_disk(tmp_path / "drive", size=str(10 * elements)) as drive:
        config = settings(drive, placement="nvme")
        model = waiting(config)
        before = used_bytes(drive)
        with pytest.raises(BudgetError) as caught:
            make_engine(config, model)
        assert "hold parameters that wait there" in str(caught.value)
        assert str(drive) in str(caught.value)
        assert used_bytes(drive) == before
        assert os.listdir(drive) == []
        engine = make_engine(settings(tmp_path, placement="host"), model)
        plain = make_engine(settings(tmp_path, placement="host"), build())
        assert train(engine, num_steps=2) == train(plain, num_steps=2)
        engine.close()
        plain.close()


def test_what_waits_on_another_drive_makes_no_gap(tmp_path: Path) -> None:
    with small_disk(tmp_path / "waits", size="64m") as other:
        model = waiting(settings(other, placement="nvme"))
        (tmp_path / "home").mkdir()
        config = settings(tmp_path / "home", placement="nvme")
        if os.stat(other).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("one drive")
        engine = make_engine(config, model)
        nvme = engine.optimizer.runtime.store.nvme
        assert nvme is not None
        assert used_bytes(tmp_path / "home") >= nvme.num_bytes
        assert used_bytes(other) == 0
        plain = make_engine(settings(tmp_path, placement="nvme"), build())
        assert train(engine, num_steps=2) == train(plain, num_steps=2)
        engine.close()
        plain.close()


def test_frozen_units_that_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their homes take half of what they took while they waited: never more than that, or than the homes."""
    peak = Peak(tmp_path, monkeypatch)
    config = settings(tmp_path, placement="nvme")
    model = waiting(config)
    for block in model.blocks[:-1]:
        block.requires_grad_(False)
    spilled_bytes = used_bytes(tmp_path)
    engine = make_engine(config, model)
    planned = engine.optimizer.runtime.plan.tier_bytes(TierName.NVME)
    assert planned < spilled_bytes
    assert peak.num_bytes <= spilled_bytes + 12 * sum(p.numel() for p in model.blocks[0].parameters())
    plain_model = build()
    for block in plain_model.blocks[:-1]:
        block.requires_grad_(False)
    (tmp_path / "plain").mkdir()
    plain = make_engine(settings(tmp_path / "plain", placement="nvme"), plain_model)
    assert train(engine, num_steps=2) == train(plain, num_steps=2)
    engine.close()
    plain.close()


def test_space_that_somebody_takes_meanwhile(tmp_path: Path) -> None:
    """What a unit leaves is gone before its home is reserved: the error says so, and the model has its values."""
    elements = sum(param.numel() for param in build().parameters())
    with small_disk(tmp_path / "drive", size=str(int(12.1 * elements) + 256 * 1024)) as drive:
        config = settings(drive, placement="nvme")
        model = waiting(config)
        calls = []

        def fill(_tier: object) -> None:
            calls.append(None)
            if len(calls) == 3:
                free = os.statvfs(drive)
                (drive / "hog").write_bytes(bytes(free.f_bavail * free.f_bsize))

        with observes("nvme.reserve", before=fill), pytest.raises(BudgetError, match=str(drive)):
            make_engine(config, model)
        (drive / "hog").unlink()
        plain = dict(build().named_parameters())
        with zero.GatheredParameters(list(model.parameters())):
            for name, param in model.named_parameters():
                assert torch.equal(param, plain[name]), name
        del model, param
        gc.collect()
        assert used_bytes(drive) == 0


@pytest.mark.parametrize("num_files", [1, 2, 3, 5])
def test_bytes_before_an_offset_are_those_of_its_pieces(num_files: int) -> None:
    for offset in (0, 1, STRIPE_BYTES - 1, STRIPE_BYTES, 3 * STRIPE_BYTES + 7, 11 * STRIPE_BYTES + 4096):
        expected = [0] * num_files
        for piece in stripe_pieces(0, offset, num_files):
            expected[piece.file_index] += piece.num_bytes
        assert [bytes_before(offset, index, num_files) for index in range(num_files)] == expected


def test_bytes_of_each_file() -> None:
    assert file_bytes(12345, 1) == 12345
    assert file_bytes(1, 2) == STRIPE_BYTES
    assert file_bytes(2 * STRIPE_BYTES + 1, 2) == 2 * STRIPE_BYTES
