"""Checkpoints resume bitwise, from any placement into any other; a crash leaves the last one whole."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.checkpoint.format.manifest import HashingPool
from offloadzero.checkpoint.format.safetensors_file import SafetensorsReader, SafetensorsWriter
from offloadzero.errors import CheckpointError, ConfigError
from tests.support.checkpoints import reseal, small_engine
from tests.support.faults import delays, fails


class Net(nn.Module):
    """Blocks with a buffer, a tied head and a frozen parameter."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def make_engine(directory: Path, placement: str, dtype: str = "bf16", seed: int = 0, **top: Any) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        dtype: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
        "offloadzero": {
            "placement": placement,
            "nvme_path": str(directory),
            "units": {"min_leaf_elements": 100},
        },
        **top,
    }
    return offloadzero.initialize(model=Net(), config=config)[0]


def train(engine: Any, num_steps: int, *, first: int) -> list[float]:
    losses = []
    for step in range(first, first + num_steps):
        tokens = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(step))
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clipping", [0.0, 1.0])  # updates in backward; at the step
def test_a_checkpoint_right_after_the_step_counts_it(
    tmp_path: Path, faults: ExitStack, clipping: float
) -> None:
    """Its updates have not even begun when the checkpoint is asked for."""
    faults.enter_context(delays("decider.decide_one", 0.1))
    faults.enter_context(delays("decider.decide", 0.1))
    engine = make_engine(tmp_path, "host", gradient_clipping=clipping)
    train(engine, 1, first=0)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    meta = json.loads((tmp_path / "saved" / "global_step1" / "meta.json").read_text())
    assert set(meta["steps"].values()) == {1}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("written", "read"), [("device", "nvme"), ("nvme", "host"), ("host", "device")])
def test_resume_is_bitwise(tmp_path: Path, written: str, read: str, dtype: str) -> None:
    engine = make_engine(tmp_path, written, dtype)
    train(engine, 4, first=0)
    assert engine.save_checkpoint(tmp_path / "ckpt", client_state={"epoch": 3})
    expected = train(engine, 4, first=4)
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()

    other = make_engine(tmp_path, read, dtype, seed=99)
    path, client_state = other.load_checkpoint(tmp_path / "ckpt")
    assert path == str(tmp_path / "ckpt" / "global_step4")
    assert client_state == {"epoch": 3}
    assert other.global_steps == 4
    assert train(other, 4, first=4) == expected
    for name, value in other.module.state_dict().items():
        assert torch.equal(value, weights[name]), name
    other.close()


def test_files_are_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    engine = make_engine(tmp_path, "nvme")
    train(engine, 2, first=0)
    engine.save_16bit_model(tmp_path / "out")
    expected = engine.module.state_dict()
    engine.close()
    loaded = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(expected) - {"head.weight"}  # tied: stored once
    for name, value in loaded.items():
        assert torch.equal(value, expected[name]), name


def test_a_crash_while_writing_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "host")
    train(engine, 1, first=0)
    engine.save_checkpoint(tmp_path / "ckpt", tag="best", client_state={"step": 1})
    train(engine, 1, first=1)

    full = fails("checkpoint.write", OSError(28, "No space left on device"))
    with full, pytest.raises(CheckpointError, match="ckpt: No space left on device: nothing was saved"):
        engine.save_checkpoint(tmp_path / "ckpt", tag="best", client_state={"step": 2})
    assert engine.load_checkpoint(tmp_path / "ckpt")[1] == {"step": 1}
    assert [path.name for path in (tmp_path / "ckpt").iterdir() if "partial" in path.name] == []
    engine.close()


def test_replacing_a_checkpoint(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "host")
    for step in (1, 2):
        engine.save_checkpoint(tmp_path / "ckpt", tag="best", client_state={"step": step})
    assert engine.load_checkpoint(tmp_path / "ckpt", tag="best")[1] == {"step": 2}
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["best", "latest"]
    engine.close()


def test_module_only_and_nothing_there(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "host")
    train(engine, 2, first=0)
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
    engine.save_checkpoint(tmp_path / "ckpt")
    engine.close()
    other = make_engine(tmp_path, "host", seed=5)
    other.load_checkpoint(tmp_path / "ckpt", load_module_only=True)
    assert other.global_steps == 0
    moments = offloadzero.zero.safe_get_full_optimizer_state(other.module.blocks[0].weight, "exp_avg")
    assert not moments.any()
    other.close()


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, "host")
    engine.save_checkpoint(tmp_path / "ckpt", tag="a")
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    unit = next((tmp_path / "ckpt" / "a").glob("unit-0001*"))
    data = unit.read_bytes()
    unit.unlink()
    with pytest.raises(CheckpointError, match=r"unit-0001.safetensors is missing"):
        engine.load_checkpoint(tmp_path / "ckpt")
    reseal(tmp_path / "ckpt" / "a")
    with pytest.raises(CheckpointError, match="missing"):
        engine.load_checkpoint(tmp_path / "ckpt")
    for damaged, reason in (
        (data[:-4], "past the end of the file"),
        (b"\xff" * 64, "not a safetensors file"),
    ):
        unit.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"were written|does not list it"):
            engine.load_checkpoint(tmp_path / "ckpt")
        reseal(tmp_path / "ckpt" / "a")
        with pytest.raises(CheckpointError, match=reason):
            engine.load_checkpoint(tmp_path / "ckpt")
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(ConfigError, match="client_state"):
        engine.save_checkpoint(tmp_path / "ckpt", client_state={"object": object()})
    engine.close()


class NetWithBuffers(Net):
    """Persistent buffers of unusual dtypes."""

    def __init__(self, *buffers: torch.Tensor) -> None:
        super().__init__()
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"buffer{number}", buffer)


def offloaded_with(directory: Path, *buffers: torch.Tensor) -> Any:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "offloadzero": {"placement": "nvme", "nvme_path": str(directory)},
    }
    return offloadzero.initialize(model=NetWithBuffers(*buffers), config=config)[0]


def test_complex_buffers(tmp_path: Path) -> None:
    angles = torch.polar(torch.ones(3, 5), torch.rand(3, 5))
    engine = offloaded_with(tmp_path, angles.clone(), torch.arange(7).to(torch.uint32))
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
    engine = offloaded_with(tmp_path, torch.zeros(3, dtype=torch.complex128))
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointError, match=r"buffer0 has dtype torch\.complex128.*view_as_real"):
            save(tmp_path / "ckpt")
        assert not (tmp_path / "ckpt").exists()
    engine.close()


def with_frozen(dtype: torch.dtype) -> Net:
    torch.manual_seed(2)
    model = Net()
    num_bytes = torch.empty(0, dtype=dtype).itemsize
    values = torch.randint(0, 120, (33, num_bytes), dtype=torch.uint8).view(dtype).view(33)
    model.extra = torch.nn.Parameter(values, requires_grad=False)
    return model


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.complex64])
def test_frozen_parameters_of_rare_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = with_frozen(dtype)
    before = model.extra.detach().view(torch.uint8).clone()
    engine = small_engine(tmp_path, "nvme", model=model, bf16={"enabled": False})
    engine.save_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        model.extra.copy_(torch.zeros_like(before).view(dtype))
    engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(model.extra.detach().clone().view(torch.uint8), before)
    engine.close()


@pytest.mark.parametrize("name", ["complex128", "float4_e2m1fn_x2"])
def test_a_frozen_parameter_of_a_dtype_that_no_checkpoint_holds_is_refused_at_the_start(
    name: str, tmp_path: Path
) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    model = with_frozen(getattr(torch, name))
    with pytest.raises(
        ConfigError, match=rf"extra\.dtype = '{name}': frozen parameters: .* safetensors knows"
    ):
        small_engine(tmp_path, "nvme", model=model, bf16={"enabled": False})
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
