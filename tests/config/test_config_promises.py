"""What the table of keys says that always happens, of keys that it takes and does nothing with."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import OffloadError
from offloadzero.memory.device import CpuDevice
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.step.landing import Landing
from offloadzero.step.record_gradient import Brought
from tests.support.tiny import TinyModel, all_states, make_engine, settings, tokens, train

PACKAGE = Path(offloadzero.__file__).parent


def test_every_logger_is_below_ours() -> None:
    found = 0
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getLogger":
                (name,) = node.args
                assert isinstance(name, ast.Constant), file
                assert str(name.value).partition(".")[0] == "offloadzero"
                found += 1
    assert found > 5


class WithBuffers(TinyModel):
    """A table in fp32 and a counter beside the weights, and a note of what the forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 7))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.given: list[torch.dtype] = []

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if scale is not None:
            self.given.append(scale.dtype)
        return super().forward(tokens)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_buffers_and_inputs_are_not_cast(dtype: str, tmp_path: Path) -> None:
    config = settings(tmp_path, bf16=None)
    config[dtype] = {"enabled": True}
    model = WithBuffers()
    engine = make_engine(config, model)
    engine.backward(engine(tokens(0), torch.ones(1)))
    engine.step()
    assert model.given == [torch.float32]
    assert (model.table.dtype, model.count.dtype) == (torch.float32, torch.int64)
    assert torch.equal(model.table, torch.linspace(0, 1, 7))
    engine.close()


def test_gradients_leave_one_by_one_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    copy = Landing._copy_to_host

    def noted(self: Landing, brought: Brought, *rest: Any) -> Any:
        record = brought.gradient.record
        assert brought.flat.shape == (record.num_trainable,)
        events.append(f"sent {record.name}")
        return copy(self, brought, *rest)

    monkeypatch.setattr(Landing, "_copy_to_host", noted)
    model = TinyModel()
    engine = make_engine(settings(tmp_path), model)
    for index, block in enumerate(model.blocks):
        block.register_full_backward_pre_hook(lambda *_, index=index: events.append(f"backward {index}"))
    train(engine, num_steps=1)
    assert [event for event in events if event.startswith("sent blocks")] == [
        f"sent blocks.{index}" for index in (3, 2, 1, 0)
    ]
    for index in (3, 2):
        assert events.index(f"sent blocks.{index}") < events.index(f"backward {index - 2}")
    engine.close()


def test_a_unit_is_fetched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = CpuDevice.copy

    def noted(self: CpuDevice, target: torch.Tensor, source: torch.Tensor) -> None:
        copied.append(target.nbytes)
        copy(self, target, source)

    engine = make_engine(settings(placement="host", budgets={"device": "1MiB"}))
    train(engine, num_steps=2)
    engine.synchronize()
    records = engine.optimizer.runtime.records
    monkeypatch.setattr(CpuDevice, "copy", noted)
    with torch.no_grad():
        engine.eval()
        engine(tokens(0))
    largest_parameter = max(slot.num_elements for record in records for slot in record.slots) * 2
    sizes = {record.param_bytes for record in records}
    assert all(size in sizes or size > largest_parameter for size in copied)
    engine.close()


def test_what_starting_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight goes home once; moments, and remainders of 0, begin as the zeros that a fresh file holds."""
    written: list[tuple[str, int]] = []
    write = TieredStore.write

    def noted(self: TieredStore, segment: Segment, source: torch.Tensor, **keys: Any) -> Any:
        written.append((segment.label, source.numel()))
        return write(self, segment, source, **keys)

    monkeypatch.setattr(TieredStore, "write", noted)
    engine = make_engine(settings(tmp_path))
    segments = {
        segment.label: segment.num_elements
        for record in engine.optimizer.runtime.records
        for segment in record.segments.values()
        if segment.kind in (SegmentKind.PARAM, SegmentKind.MASTER)
    }
    assert len(segments) == 12
    assert len(written) == len(set(written))
    assert set(segments.items()) - set(written) == {("(rest).master", segments["(rest).master"])}
    assert set(written) < set(segments.items())
    engine.close()


def test_the_next_chunk_is_read_before_the_last_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []

    def noting(verb: str) -> None:
        move = getattr(TieredStore, verb)

        def noted(self: TieredStore, segment: Segment, *rest: Any, start: int = 0, **keys: Any) -> Any:
            if segment.label == "blocks.0.exp_avg":
                events.append((verb, start))
            return move(self, segment, *rest, start=start, **keys)

        monkeypatch.setattr(TieredStore, verb, noted)

    config = settings(tmp_path, update={"chunk_elements": 4096})
    config["gradient_clipping"] = 1.0
    noting("read")
    noting("write")
    engine = make_engine(config)
    events.clear()
    train(engine, num_steps=1)
    engine.synchronize()
    assert events.index(("read", 4096)) < events.index(("write", 0))
    assert events.index(("read", 8192)) < events.index(("write", 4096))
    engine.close()


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero/fp32.pt"])
def test_a_checkpoint_of_deepspeed(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved" / "global_step1"
    (folder / name).parent.mkdir(parents=True)
    torch.save({"module": TinyModel().state_dict()}, folder / name)
    (tmp_path / "saved" / "latest").write_text("global_step1")
    engine = make_engine(settings(tmp_path / "files"))
    before = all_states(engine)
    with pytest.raises(OffloadError):
        engine.load_checkpoint(str(tmp_path / "saved"))
    assert all(torch.equal(value, before[key]) for key, value in all_states(engine).items())
    engine.close()


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[offloadzero.Engine, str]]:
    engine = make_engine(settings(tmp_path))
    train(engine, num_steps=1)
    yield engine, str(tmp_path / "saved")
    engine.close()


def test_a_checkpoint_is_moved_unit_by_unit(
    saved: tuple[offloadzero.Engine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is written or read no unit's states come back to once another's have begun."""
    engine, folder = saved
    order: list[str] = []

    def noting(verb: str) -> None:
        move = getattr(TieredStore, verb)

        def noted(self: TieredStore, segment: Segment, *rest: Any, **keys: Any) -> Any:
            if threading.current_thread() is threading.main_thread():  # others read ahead for the next update
                order.append(segment.record)
            return move(self, segment, *rest, **keys)

        monkeypatch.setattr(TieredStore, verb, noted)

    def runs() -> list[str]:
        return [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]

    noting("read")
    noting("write")
    engine.save_checkpoint(folder, tag="one")
    assert len(set(order)) > 3
    assert len(runs()) == len(set(order))
    files = {path.name for path in Path(folder, "one").iterdir() if path.suffix == ".safetensors"}
    assert len(files) >= len(set(order))
    order.clear()
    engine.load_checkpoint(folder, tag="one")
    assert len(runs()) == len(set(order)) > 3
