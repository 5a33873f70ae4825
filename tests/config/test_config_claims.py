"""What the table of keys says of those that it takes and does nothing with: each claim is tried.

A claim is a note of `offloadzero/config/keys.py` whose key is accepted or read as another. It is tried here, under
`@claim`, or by the test that TRIED_BY of `claims.py` names.
"""

from __future__ import annotations

import ast
import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import offloadzero
from offloadzero.config import load_config
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import ConfigError, OffloadError
from offloadzero.memory.device import CpuDevice
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.step.landing import Landing
from offloadzero.step.record_gradient import Brought
from tests.config.claims import ABSENT_ELSEWHERE, PACKAGE, READ_IN, TESTS, TRIED_BY, accepted, claim, tried
from tests.streaming.test_order_of_use import config_with_room, start, train_step
from tests.support.models import SometimesStack
from tests.support.tiny import TinyModel, all_states, make_engine, settings, tokens, train


def test_every_claim_is_tried() -> None:
    claims = set(accepted())
    tables = (set(tried), set(TRIED_BY), set(READ_IN))
    assert set().union(*tables) == claims
    assert sum(map(len, tables)) == len(claims), "tried twice"


def test_the_tests_that_are_named_are_there() -> None:
    for place in (*TRIED_BY.values(), *ABSENT_ELSEWHERE.values()):
        file, _, name = place.partition("::")
        (path,) = TESTS.rglob(file)
        tree = ast.parse(path.read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree)), place


# --- reports


@claim("every step's waits are measured anyway", "the tiers' bytes are reported anyway")
def test_reports_that_nobody_asked_for(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path))
    with engine.optimizer.runtime.clock.waiting("of this test"):
        train(engine, num_steps=1)
    train(engine, num_steps=1)
    report = engine.last_step_report()
    assert report.step == 2
    assert report.step_s > 0
    assert report.waits_s["of this test"] > 0
    assert set(engine.reserved_bytes()) == {tier.value for tier in TierName}
    assert all(size > 0 for size in engine.reserved_bytes().values())
    engine.close()


@claim("print the OffloadConfig instead")
def test_a_configuration_prints_its_values() -> None:
    text = repr(load_config({"gradient_clipping": 0.625, "aio": {"queue_depth": 77}}))
    assert "gradient_clipping=0.625" in text
    assert "queue_depth=77" in text


@claim("metrics are not sent to trackers from here; log what the engine reports")
def test_no_tracker_is_imported() -> None:
    trackers = {"wandb", "tensorboard", "tensorboardX", "comet_ml"}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not trackers & {name.split(".")[0] for name in names}, file
            assert not any("utils.tensorboard" in name for name in names), file


@claim("no profile is printed; use torch.profiler")
def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path)
    config["flops_profiler"] = {"enabled": True}
    engine = make_engine(config)
    with torch.profiler.profile() as profile:
        train(engine, num_steps=2)
    engine.close()
    assert "aten::addmm" in {event.key for event in profile.key_averages()}
    assert capfd.readouterr().out == ""


@claim("set the level of Python's logger offloadzero")
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
    logger = logging.getLogger("offloadzero")
    before = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        assert not logging.getLogger("offloadzero.nvme").isEnabledFor(logging.ERROR)
    finally:
        logger.setLevel(before)


# --- one process, and what it leaves alone


@claim("one rank has no collective, several have one per unit")
def test_no_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    def refuse(*_arguments: object, **_keys: object) -> None:
        raise AssertionError("a collective")

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier"):
        monkeypatch.setattr(dist, name, refuse)
    engine = make_engine(settings(tmp_path, gradient_clipping=1.0))
    train(engine, num_steps=2)
    engine.save_checkpoint(str(tmp_path / "saved"), tag="one")
    assert not dist.is_initialized()
    assert engine.dp_world_size == engine.world_size == 1
    engine.close()


@claim("Python's garbage collector is left alone")
def test_the_garbage_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks))
    for name in ("collect", "disable", "enable", "freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_: pytest.fail("the collector was used"))
    engine = make_engine(settings(tmp_path))
    train(engine, num_steps=2)
    engine.close()
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks)) == before


class Operations(TorchDispatchMode):
    """The kernels that compute something, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.split(".")[1] in (
            "addmm",
            "mm",
            "bmm",
            "gelu",
            "native_layer_norm",
            "embedding",
            "_log_softmax",
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@claim(
    "kernels are launched as the model launches them",
    "the model's linear layers are used as they are",
)
def test_the_model_computes_what_it_computes_alone(tmp_path: Path) -> None:
    linear, functional = nn.Linear.forward, nn.functional.linear
    model = TinyModel().bfloat16()
    with Operations() as plain:
        model(tokens(0)).backward()
    engine = make_engine(settings(tmp_path))
    with Operations() as offloaded:
        engine.backward(engine(tokens(0)))
    engine.step()
    assert plain.names == offloaded.names
    assert len(plain.names) > 20
    assert nn.Linear.forward is linear
    assert nn.functional.linear is functional
    assert type(engine.module.blocks[0].up) is nn.Linear
    engine.close()


@claim("Module.apply gathers inside zero.Init, else it is left alone")
def test_module_apply(tmp_path: Path) -> None:
    plain = nn.Module.apply
    seen: list[torch.Size] = []

    def look(module: nn.Module) -> None:
        seen.extend(param.data.shape for param in module.parameters(recurse=False) if param.numel() > 4096)

    config = settings(tmp_path)
    with offloadzero.zero.Init(config_dict_or_path=config):
        assert nn.Module.apply is not plain
        model = TinyModel()
        model.apply(look)
    assert nn.Module.apply is plain
    assert torch.Size([145, 48]) in seen
    engine = make_engine(config, model)
    assert nn.Module.apply is plain
    engine.close()


# --- dtypes


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


@claim("buffers keep their own dtype", "inputs are not cast: hand over floating-point inputs in fp16")
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


# --- gradients


@claim("a gradient leaves the device as soon as it is complete", "a unit's gradients are one flat buffer")
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


@claim("the gradient norm is always known")
def test_the_norm_without_clipping(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = TinyModel().bfloat16()
    plain(tokens(0)).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.float().flatten() for p in plain.parameters()]))
    for in_backward in (True, False):
        engine = make_engine(settings(tmp_path, update={"in_backward": in_backward}))
        train(engine, num_steps=1)
        assert engine.get_global_grad_norm() == pytest.approx(expected.item(), rel=1e-3)
        engine.close()


class HalfUsed(TinyModel):
    """Its second block is there and never called."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        blocks = self.blocks
        self.blocks = nn.ModuleList([block for index, block in enumerate(blocks) if index != 1])
        try:
            return super().forward(tokens)
        finally:
            self.blocks = blocks


@claim("a parameter without a gradient is left as it is, as in torch")
@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_an_unused_parameter_is_not_decayed(placement: str, tmp_path: Path) -> None:
    """With a gradient of zeros weight decay would move it, and its moments would count the step."""
    torch.manual_seed(1)
    plain = HalfUsed().bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    unused = [param.detach().clone() for param in plain.blocks[1].parameters()]
    plain(tokens(0)).backward()
    optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(unused, plain.blocks[1].parameters(), strict=True))
    torch.manual_seed(1)
    engine = make_engine(settings(tmp_path, placement=placement), HalfUsed())
    before = {name: value for name, value in all_states(engine).items() if name.startswith("blocks.1.")}
    train(engine, num_steps=2)
    after = all_states(engine)
    assert before
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert not torch.equal(after["blocks.0.exp_avg"], torch.zeros_like(after["blocks.0.exp_avg"]))
    engine.close()


# --- where things are, and when


@claim("the update runs where the optimizer state lives")
def test_where_the_update_runs(tmp_path: Path) -> None:
    for placement, on_device in (("device", True), ("host", False), ("nvme", False)):
        engine = make_engine(settings(tmp_path, placement=placement))
        records = [record for record in engine.optimizer.runtime.records if not record.resident]
        assert {record.updates_on_device for record in records} == {on_device}
        engine.close()


@claim("parameters are moved unit by unit")
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


@claim("a change in the order of use shows as waits in the step report")
def test_a_change_of_order_is_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, delay = CpuDevice.copy, threading.Event()

    def slow(self: CpuDevice, target: torch.Tensor, source: torch.Tensor) -> None:
        delay.wait(0.02)  # never set: a copy that takes a while
        copy(self, target, source)

    engine = start(lambda: SometimesStack(num_blocks=5), config_with_room(2, tmp_path))
    for seed in range(3):
        train_step(engine, seed, (0, 1, 2, 3, 4))
    monkeypatch.setattr(CpuDevice, "copy", slow)
    train_step(engine, 3, (4, 3, 2, 1, 0))
    assert engine.last_step_report().waits_s["fetch"] > 0.01
    monkeypatch.undo()
    engine.close()


@claim("the state is written once, at its home")
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


@claim("reads, the update and writes always overlap (offloadzero.update.num_chunks_in_flight)")
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


# --- activations


@claim("activations on the device belong to torch's allocator", "the device is not synchronized there")
def test_activations_take_nothing_of_the_device_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(CpuDevice, "synchronize", lambda _self: calls.append("synchronize"))
    engine = make_engine(settings(tmp_path, activation_checkpoints={"tier": "device"}))
    planned = {line.what for line in engine.optimizer.runtime.plan.lines if line.tier is TierName.DEVICE}
    before = engine.reserved_bytes()
    train(engine, num_steps=2)
    assert engine.reserved_bytes() == before
    assert not any("activation" in what for what in planned)
    assert calls == []
    engine.close()


# --- checkpoints


@claim("checkpoints are written to save_dir")
def test_where_a_checkpoint_is(tmp_path: Path) -> None:
    engine = make_engine(settings(tmp_path / "files"))
    before = set(tmp_path.rglob("*"))
    engine.save_checkpoint(str(tmp_path / "here"), tag="one")
    new = set(tmp_path.rglob("*")) - before
    assert new
    assert all(path.is_relative_to(tmp_path / "here") for path in new)
    engine.close()


@claim("checkpoints of DeepSpeed are not read, universal or not")
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


@claim("one process writes, unit by unit", "checkpoints are read unit by unit")
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


# --- what there is one of, and what there is none of


@claim("there is one stage 1")
def test_stage_1() -> None:
    with_it = load_config({"zero_optimization": {"stage": 1, "legacy_stage1": True}})
    without = load_config({"zero_optimization": {"stage": 1}})
    assert with_it.zero_stage == without.zero_stage == 1


@claim("Muon is not built")
def test_muon() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.type = 'Muon'"):
        load_config({"optimizer": {"type": "Muon"}})


# --- keys that are read as others


@claim(
    'old name of offload_optimizer {"device": "cpu"}',
    'old name of offload_param {"device": "cpu"}',
    "old name of pin_memory",
    "units.min_leaf_elements: smaller leaves join the resident unit",
)
def test_keys_that_are_others() -> None:
    def loaded(zero: dict[str, Any], own: dict[str, Any] | None = None) -> offloadzero.OffloadConfig:
        return load_config({"zero_optimization": {"stage": 3, **zero}, "offloadzero": own or {}})

    cpu = {"device": "cpu"}
    assert loaded({"cpu_offload": True}) == loaded({"offload_optimizer": cpu}) != loaded({})
    assert loaded({"cpu_offload_param": True}) == loaded({"offload_param": cpu}) != loaded({})
    unpinned = loaded({"offload_param": {**cpu, "pin_memory": False}})
    assert loaded({"offload_param": cpu, "cpu_offload_use_pin_memory": False}) == unpinned
    assert not unpinned.pin_memory
    smaller = loaded({}, {"units": {"min_leaf_elements": 77}})
    assert loaded({"param_persistence_threshold": 77}) == smaller != loaded({})


@claim("an upper bound on update.chunk_elements, at least 65536")
def test_sub_group_size() -> None:
    def chunk_elements(sub_group_size: float) -> int:
        return load_config({"zero_optimization": {"sub_group_size": sub_group_size}}).update.chunk_elements

    default = load_config({}).update.chunk_elements
    assert [chunk_elements(size) for size in (1, 65536, 100_000, 1e9)] == [65536, 65536, 102_400, default]
