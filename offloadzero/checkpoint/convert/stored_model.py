"""A model as it is stored, whoever has stored it, and the writing of it as a checkpoint of this package.

[Note: conversions]
What reads a kind of files (`read_checkpoint` here, `read_folder`, `read_deepspeed`, `read_run`) checks them and returns
a `StoredModel`, which holds names, shapes and places in files. What writes a kind (`write_checkpoint` here,
`write_folder`) takes the values from there, a piece at a time, and brings each to the dtype that it writes. So memory
does not grow with the model or its largest tensor. The destination is written beside its name and takes it when all of
it is on the disk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from offloadzero.arithmetic.remainders import REMAINDER_DTYPE, split
from offloadzero.checkpoint.format.file_tensor import FileExtent, FileTensor
from offloadzero.checkpoint.format.manifest import HashingPool
from offloadzero.checkpoint.format.meta import Meta, encode_meta
from offloadzero.checkpoint.format.names import BUFFERS, IS_LATEST, tag_problem, unit_file
from offloadzero.checkpoint.format.safetensors_file import SafetensorsReader, TensorSpec, expect_known_dtypes
from offloadzero.checkpoint.latest import write_latest
from offloadzero.checkpoint.partial import new_folder
from offloadzero.checkpoint.states import CheckpointFiles
from offloadzero.checkpoint.verify import Checkpoint, OpenDirectory
from offloadzero.errors import CheckpointError
from offloadzero.memory.swap_file import sync_directory

_FILE_BYTES = 1 << 30  # of a checkpoint that is written: as large as a file of a large unit

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class StoredModel:
    """Weights, and what else of a training run is there.

    A parameter that `states` has is trained: what is stored of it are fp32 masters, or what becomes them exactly.
    """

    description: str  # of the files: "a checkpoint of step 3"
    directory: OpenDirectory  # must be the same one when all is read
    tag: str  # a name for it in a directory of checkpoints
    meta: Meta
    weights: Mapping[str, FileTensor]
    states: Mapping[str, Sequence[FileTensor]] = field(default_factory=dict)  # called NAME.STATE
    buffers: Mapping[str, FileTensor] = field(default_factory=dict)
    left_out: Sequence[str] = ()  # what is there and is not taken along

    @property
    def num_parameters(self) -> int:
        """The elements of all weights."""
        return sum(tensor.shape.numel() for tensor in self.weights.values())


@dataclass(frozen=True)
class Entry:
    """A tensor to be written, and the dtype that it gets."""

    tensor: FileTensor
    dtype: torch.dtype

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape."""
        return self.tensor.name, self.dtype, self.tensor.shape

    @property
    def num_bytes(self) -> int:
        """The bytes that are written."""
        return self.tensor.shape.numel() * self.dtype.itemsize

    def pieces(self, on_bytes: OnBytes) -> Iterator[torch.Tensor]:
        """Yield the elements in their dtype; `on_bytes` is told how many bytes of them there were each time."""
        for piece in self.tensor.pieces():
            converted = in_dtype(piece, self.dtype)
            yield converted
            on_bytes(converted.nbytes)


def in_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return flat values in another dtype. To bf16 they are rounded as the engine's masters to its parameters."""
    if values.dtype == dtype:
        return values
    if dtype != torch.bfloat16:
        return values.to(dtype)
    weights, rounded = values.to(torch.float32), torch.empty_like(values, dtype=dtype)
    split(weights, rounded, torch.empty_like(values, dtype=REMAINDER_DTYPE), spare=torch.empty_like(weights))
    return rounded


def divided(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Divide entries in their order into files of at most that many bytes, or of one tensor; at least one file."""
    files: list[list[Entry]] = [[]]
    num_bytes = 0
    for entry in entries:
        if files[-1] and num_bytes + entry.num_bytes > max_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(entry)
        num_bytes += entry.num_bytes
    return files


# --- a checkpoint of this package ---


def tensors_of(reader: SafetensorsReader) -> dict[str, FileTensor]:
    """Return the tensors of a file by name."""
    tensors: dict[str, FileTensor] = {}
    for name, entry in reader.entries.items():
        extent = FileExtent(reader.path, reader.offset_of(name), entry.stop - entry.start)
        tensors[name] = FileTensor(name, entry.dtype, entry.shape, (extent,))
    return tensors


def read_checkpoint(checkpoint: Checkpoint) -> StoredModel:
    """Return what a whole checkpoint has of a model, its optimizer's states aside."""
    if checkpoint.meta.part is not None:
        raise CheckpointError(
            f"{checkpoint.path} is of one of {checkpoint.meta.part.num_parts} parts of a model"
        )
    readers: dict[Path, dict[str, FileTensor]] = {}
    for stored in (*checkpoint.weights.values(), *checkpoint.buffers.values()):
        if stored.file not in readers:
            with SafetensorsReader(stored.file) as reader:
                readers[stored.file] = tensors_of(reader)
    checkpoint.directory.expect_same()
    meta = checkpoint.meta
    return StoredModel(
        description=f"a checkpoint of step {meta.global_steps}"
        + ("" if meta.partial_step is None else f", {meta.partial_step}"),
        directory=checkpoint.directory,
        tag=checkpoint.path.name,
        meta=meta,
        weights={name: readers[stored.file][name] for name, stored in checkpoint.weights.items()},
        buffers={name: readers[stored.file][name] for name, stored in checkpoint.buffers.items()},
        left_out=sorted(meta.extra_states),
    )


def _buffer_entries(model: StoredModel) -> list[Entry]:
    return [Entry(buffer, buffer.dtype) for buffer in model.buffers.values()]


def _entries(model: StoredModel) -> list[Entry]:
    """Return what a checkpoint gets of parameters. CheckpointError where two tensors have one name."""
    entries: list[Entry] = []
    for name, weight in model.weights.items():
        states = model.states.get(name)
        entries.append(Entry(weight, weight.dtype if states is None else torch.float32))
        # Codes of the compact layout are kept.
        entries += [
            Entry(state, torch.float32 if state.dtype.is_floating_point else state.dtype)
            for state in states or ()
        ]
    twice = [name for name, count in Counter(entry.tensor.name for entry in entries).items() if count > 1]
    if twice:
        raise CheckpointError(f"{twice[0]} is a parameter, and by its name a state of another")
    return entries


def bytes_of_checkpoint(model: StoredModel) -> int:
    """Return the bytes of tensors that `write_checkpoint` writes."""
    return sum(entry.num_bytes for entry in (*_entries(model), *_buffer_entries(model)))


def write_checkpoint(model: StoredModel, path: Path, on_bytes: OnBytes) -> str:
    """Write a directory of checkpoints that has one, which `latest` names; return its tag.

    `on_bytes` is told of what is written. Raises ConfigError, CheckpointError, AioError.
    """
    tag = model.tag if tag_problem(model.tag) is None else f"global_step{model.meta.global_steps}"
    entries, buffers = _entries(model), _buffer_entries(model)
    expect_known_dtypes([entry.spec for entry in (*entries, *buffers)])
    encode_meta(model.meta)  # before anything is written
    with new_folder(path) as folder, HashingPool() as pool:
        (folder / tag).mkdir()
        files = CheckpointFiles(folder / tag, pool)
        named = {unit_file(i): part for i, part in enumerate(divided(entries, _FILE_BYTES))}
        for name, part in {**named, BUFFERS: buffers}.items():
            with files.tensors(name, [entry.spec for entry in part]) as writer:
                for entry in part:
                    writer.add_pieces(entry.pieces(on_bytes))
        files.seal(replace(model.meta, saved_unix_ns=time.time_ns()))
        (folder / tag / IS_LATEST).touch()
        sync_directory(folder / tag)
        write_latest(folder, tag)
        model.directory.expect_same()
    return tag
