"""`save_16bit_model()` under a name that is not safetensors': the file that torch.load() takes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadzero.checkpoint.format.manifest import HashingPool
from offloadzero.checkpoint.format.torch_file import TorchFileWriter
from offloadzero.errors import CheckpointError
from tests.support.faults import fails
from tests.support.tiny import TinyModel, make_engine, settings, train

DTYPES = [
    "bfloat16",
    "bool",
    "complex64",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
]


def same_bytes(value: torch.Tensor, other: torch.Tensor) -> bool:
    assert (value.dtype, value.shape, value.stride()) == (other.dtype, other.shape, other.stride())
    return torch.equal(value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_of_all_dtypes_and_shapes(mmap: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        for shape in ((), (0,), (3,), (2, 3, 5), (4, 0), (number + 1, 33)):
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            data = torch.randint(0, 2, (num_bytes,), dtype=torch.uint8, generator=generator)
            tensors[f"{name}.{shape}"] = data.view(dtype).view(shape)
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    path = tmp_path / "some.bin"
    with HashingPool() as pool, TorchFileWriter(path, specs, other_names={}, pool=pool) as writer:
        for tensor in tensors.values():
            writer.add(tensor)
        entry = writer.close()
    assert entry.num_bytes == path.stat().st_size
    loaded = torch.load(path, mmap=mmap, weights_only=True)
    assert list(loaded) == list(tensors)
    assert all(same_bytes(loaded[name], tensor) for name, tensor in tensors.items())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def engine_with_buffers(directory: Path, **keys: Any) -> Any:
    torch.manual_seed(0)
    model = TinyModel()
    model.register_buffer("scale", torch.rand(5))
    model.register_buffer("left_out", torch.rand(5), persistent=False)
    model.blocks[0].register_buffer("count", torch.tensor(3))
    model.unused = model.again = nn.BatchNorm1d(3)  # one module with two names
    model.again.register_buffer("mean", model.again.running_mean)  # and a buffer of it with two
    return make_engine(settings(directory, **keys), model)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_weights_and_buffers_load_into_a_model(placement: str, tmp_path: Path) -> None:
    engine = engine_with_buffers(tmp_path, placement=placement)
    train(engine, num_steps=2)
    engine.save_16bit_model(tmp_path / "out", "pytorch_model.bin")
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    loaded = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert set(loaded) == set(expected)
    assert all(same_bytes(loaded[name], value) for name, value in expected.items())
    assert loaded["head.weight"].data_ptr() == loaded["emb.weight"].data_ptr()
    model = TinyModel().bfloat16()
    assert model.load_state_dict(loaded, strict=False).missing_keys == []
    assert torch.equal(model.head.weight, expected["head.weight"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]


def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    engine = engine_with_buffers(tmp_path)
    engine.save_16bit_model(tmp_path / "out", "model.pt")
    before = (tmp_path / "out" / "model.pt").read_bytes()
    train(engine, num_steps=1)
    full = fails("checkpoint.write", OSError(28, "No space left on device"))
    with full, pytest.raises(CheckpointError, match="No space left on device: nothing was saved"):
        engine.save_16bit_model(tmp_path / "out", "model.pt")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "out").iterdir()] == [("model.pt", before)]
    engine.save_16bit_model(tmp_path / "out", "model.pt")
    assert (tmp_path / "out" / "model.pt").read_bytes() != before
    engine.close()
