"""Checkpoints resume bitwise, from any placement into any other; a crash leaves the last one whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from offloadzero.checkpoint.format.manifest import HashingPool
from offloadzero.checkpoint.format.safetensors_file import SafetensorsReader, SafetensorsWriter
from offloadzero.errors import CheckpointError, ConfigError
from tests.support.checkpoints import Net, small_engine, train
from tests.support.faults import delays, fails


@pytest.mark.parametrize("clipping", [0.0, 1.0])  # updates in backward; at the step
def test_a_checkpoint_right_after_the_step_counts_it(
    engine_of: Callable[..., Any], tmp_path: Path, faults: ExitStack, clipping: float
) -> None:
    """Its updates have not even begun when the checkpoint is asked for."""
    faults.enter_context(delays("decider.decide_one", 0.1))
    faults.enter_context(delays("decider.decide", 0.1))
    engine = engine_of(placement="host", gradient_clipping=clipping)
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    meta = json.loads((tmp_path / "saved" / "global_step1" / "meta.json").read_text())
    assert set(meta["steps"].values()) == {1}


PRECISIONS: dict[str, Any] = {"bf16": {}, "fp16": {"bf16": {"enabled": False}, "fp16": {"enabled": True}}}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("written", "read"), [("device", "nvme"), ("nvme", "host"), ("host", "device")])
def test_resume_is_bitwise(
    engine_of: Callable[..., Any], tmp_path: Path, written: str, read: str, dtype: str
) -> None:
    engine = engine_of(placement=written, **PRECISIONS[dtype])
    train(engine, 4)
    assert engine.save_checkpoint(tmp_path / "ckpt", client_state={"epoch": 3})
    expected = train(engine, 4, first=4)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}

    other = engine_of(placement=read, seed=99, **PRECISIONS[dtype])
    path, client_state = other.load_checkpoint(tmp_path / "ckpt")
    assert path == str(tmp_path / "ckpt" / "global_step4")
    assert client_state == {"epoch": 3}
    assert other.global_steps == 4
    assert train(other, 4, first=4) == expected
    for name, value in other.module.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_files_are_what_the_safetensors_library_reads(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    engine = engine_of(placement="nvme")
    train(engine, 2)
    engine.save_16bit_model(tmp_path / "out")
    expected = engine.module.state_dict()
    loaded = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(expected) - {"head.weight"}  # tied: stored once
    for name, value in loaded.items():
        assert torch.equal(value, expected[name]), name


def test_a_crash_while_writing_leaves_the_last_checkpoint(
    engine_of: Callable[..., Any], tmp_path: Path
) -> None:
    engine = engine_of(placement="host")
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "ckpt", tag="best", client_state={"step": 1})
    train(engine, 1, first=1)

    full = fails("checkpoint.write", OSError(28, "No space left on device"))
    with full, pytest.raises(CheckpointError, match="ckpt: No space left on device: nothing was saved"):
        engine.save_checkpoint(tmp_path / "ckpt", tag="best", client_state={"step": 2})
    assert engine.load_checkpoint(tmp_path / "ckpt")[1] == {"step": 1}
    assert [path.name for path in (tmp_path / "ckpt").iterdir() if "partial" in path.name] == []


def test_the_model_alone_comes_without_its_states(engine_of: Callable[..., Any], tmp_path: Path) -> None:
    engine = engine_of()
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "ckpt")
    other = engine_of(seed=5)
    other.load_checkpoint(tmp_path / "ckpt", load_module_only=True)
    moments = offloadzero.zero.safe_get_full_optimizer_state(other.module.blocks[0].weight, "exp_avg")
    assert not moments.any()


def engine_with_buffers(directory: Path, *buffers: torch.Tensor) -> Any:
    model = Net()
    for number, buffer in enumerate(buffers):
        model.register_buffer(f"buffer{number}", buffer)
    return small_engine(directory, "nvme", model=model)


def test_complex_buffers(tmp_path: Path) -> None:
    angles = torch.polar(torch.ones(3, 5), torch.rand(3, 5))
    engine = engine_with_buffers(tmp_path, angles.clone(), torch.arange(7).to(torch.uint32))
    engine.save_checkpoint(tmp_path / "ckpt")
    engine.save_16bit_model(tmp_path / "model")
    with torch.no_grad():
        engine.module.buffer0.zero_()
        engine.module.buffer1.zero_()
    engine.load_checkpoint(tmp_path / "ckpt")
    assert torch.equal(engine.module.buffer0, angles)
    assert engine.module.buffer1.tolist() == list(range(7))
    engine.close()
    load_file = pytest.importorskip("safetensors.torch").load_file
    (file,) = (tmp_path / "model").iterdir()
    for values in (load_file(tmp_path / "ckpt" / "global_step0" / "buffers.safetensors"), load_file(file)):
        assert torch.equal(values["buffer0"], angles)


def test_a_buffer_that_cannot_be_kept_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    engine = engine_with_buffers(tmp_path, torch.zeros(3, dtype=torch.complex128))
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointError, match=r"buffer0 has dtype torch\.complex128.*view_as_real"):
            save(tmp_path / "ckpt")
        assert not (tmp_path / "ckpt").exists()
    engine.close()


def with_frozen(dtype: torch.dtype) -> Net:
    torch.manual_seed(2)
    model = Net()
    num_bytes = torch.empty(0, dtype=dtype).itemsize
    values = torch.randint(0, 120, (17, num_bytes), dtype=torch.uint8).view(dtype).view(17)
    model.extra = torch.nn.Parameter(values, requires_grad=False)
    return model


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.complex64])
def test_frozen_parameters_of_rare_dtypes(
    engine_of: Callable[..., Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = with_frozen(dtype)
    before = model.extra.detach().view(torch.uint8).clone()
    engine = engine_of(model, "nvme", bf16={"enabled": False})
    engine.save_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        model.extra.copy_(torch.zeros_like(before).view(dtype))
    engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(model.extra.detach().clone().view(torch.uint8), before)


@pytest.mark.parametrize("name", ["complex128", "float4_e2m1fn_x2"])
def test_a_frozen_parameter_of_a_dtype_that_no_checkpoint_holds_is_refused_at_the_start(
    engine_of: Callable[..., Any], name: str
) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    model = with_frozen(getattr(torch, name))
    with pytest.raises(
        ConfigError, match=rf"extra\.dtype = '{name}': frozen parameters: .* safetensors knows"
    ):
        engine_of(model, "nvme", bf16={"enabled": False})
    assert type(model.extra) is torch.nn.Parameter


DTYPES = [
    *(torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.uint16, torch.uint32, torch.bool),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("shape", [(0,), (), (1,), (511,), (3, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_round_trip(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.rand(shape) * 8 - 4 * dtype.is_signed).to(dtype)
    with (
        HashingPool() as pool,
        SafetensorsWriter(tmp_path / "x", [("x", dtype, tensor.shape)], metadata={}, pool=pool) as writer,
    ):
        writer.add(tensor)
        writer.close()
    with SafetensorsReader(tmp_path / "x") as reader:
        read = reader.read("x")
        assert (read.dtype, read.shape) == (dtype, tensor.shape)
        assert read.reshape(-1).tolist() == tensor.reshape(-1).tolist()
        with pytest.raises(CheckpointError, match="there is no y"):
            reader.read("y")
