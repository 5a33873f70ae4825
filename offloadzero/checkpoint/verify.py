"""The checks that a checkpoint is unchanged: every file, before anything of it is used.

[Note: what is checked at load]
The manifest against its own digest, then size and digest of each file it lists, then that no file of our names is there
beside them; then each field of meta.json and the header of each file: that dtypes and shapes give the sizes, that no
tensor is there twice, that each parameter with a step count has the tensors of a state, in their dtypes and shapes, and
none without. Only what has passed all of it is compared with the model, and only what has passed that is written. These
checks cannot be skipped. They read every byte once more than loading does: that costs the checkpoint's size over the
slower of the drive's and the digest's rate ([Note: the digest of a file]), and the part that fits into the page cache
is then loaded from there.

Another process may save under the same tag meanwhile, which puts another directory in the place of this one. Each file
is read by its path, so after each the directory must be the one that was checked: values of two checkpoints never mix
unseen.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offloadzero.checkpoint.format.manifest import HashingPool, check_file, check_size, read_manifest
from offloadzero.checkpoint.format.meta import Meta, read_meta
from offloadzero.checkpoint.format.names import (
    BUFFERS,
    EXTRA_STATE,
    IS_LATEST,
    MANIFEST,
    META,
    is_data_file,
    is_unit_file,
)
from offloadzero.checkpoint.format.safetensors_file import SafetensorsReader, TensorEntry
from offloadzero.checkpoint.module_states import described_tensors
from offloadzero.checkpoint.stored_states import codes_among, state_names, state_specs
from offloadzero.core.fail_points import through
from offloadzero.errors import CheckpointError
from offloadzero.update.spec import AnySpec
from offloadzero.update.specs import SPECS


@dataclass(frozen=True)
class StoredTensor:
    """The place of a stored tensor, its dtype and its shape."""

    file: Path
    entry: TensorEntry


class OpenDirectory:
    """The directory that was opened under a path. It stays open, so that no other directory can get its inode.

    Raises CheckpointError where it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        weakref.finalize(self, os.close, descriptor)
        self._status = os.fstat(descriptor)

    def expect_same(self) -> None:
        """Raise CheckpointError when the path names another directory by now: later reads may be of either."""
        try:
            is_same = os.path.samestat(os.stat(self._path), self._status)
        except OSError:
            is_same = False
        if not is_same:
            raise CheckpointError(f"{self._path} was replaced or removed while it was read: load it again")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole. `states`: for each trained parameter the optimizer's states or their codes."""

    path: Path
    directory: OpenDirectory
    meta: Meta
    spec: AnySpec
    weights: Mapping[str, StoredTensor] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    buffers: Mapping[str, StoredTensor] = field(default_factory=dict)
    extra_tensors: Mapping[str, StoredTensor] = field(default_factory=dict)  # those of meta.extra_states

    def identity(self) -> str:
        """A text that two checkpoints share only if they hold the same: their digests."""
        files = (self.path / MANIFEST, self.path / META)
        return " ".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint after [Note: what is checked at load]. CheckpointError names the file and the reason."""
    directory = OpenDirectory(path)
    try:
        return _read_headers(path, directory, _check_manifest(path, contents=True))
    finally:
        directory.expect_same()


def check_sizes(path: Path) -> Meta:
    """Do the quick part of the checks: manifest, meta.json, and the size of each file. Raises CheckpointError."""
    _check_manifest(path, contents=False)
    return read_meta(path)


def _check_manifest(path: Path, *, contents: bool) -> list[str]:
    """Check the manifest; return the names of the files that were written."""
    files = read_manifest(path)
    for name in (META, BUFFERS):
        if name not in files:
            raise CheckpointError(f"{path / MANIFEST} does not list {name}")
    for name, entry in files.items():
        check_size(path / name, entry)
    stray = sorted(name for name in os.listdir(path) if is_data_file(name) and name not in files)
    if stray:
        raise CheckpointError(f"{path / stray[0]} is not of this checkpoint: its manifest does not list it")
    _check_marker(path)
    if contents:
        with HashingPool() as pool:
            for name, entry in files.items():
                through("checkpoint.check", check_file, name)(path / name, entry, pool)
    return sorted(files)


def _check_marker(path: Path) -> None:
    marker = path / IS_LATEST
    if os.path.lexists(marker) and not (marker.is_file() and marker.stat().st_size == 0):
        raise CheckpointError(f"{marker} is damaged: it is an empty file when it is whole")


def _read_headers(path: Path, directory: OpenDirectory, data_files: Collection[str]) -> Checkpoint:
    meta = read_meta(path)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(filter(is_unit_file, data_files)):
        for tensor, stored in _stored(path / name).items():
            if tensor in tensors:
                raise CheckpointError(f"{path / name}: {tensor} is in {tensors[tensor].file.name} too")
            tensors[tensor] = stored
    spec = _spec(path, meta)
    states = {name: _take_states(path, spec, name, tensors) for name in meta.steps}
    _check_weights(tensors, spec, meta)
    buffers = _stored(path / BUFFERS)
    extra = _stored(path / EXTRA_STATE) if EXTRA_STATE in data_files else {}
    _check_extra_states(path, meta, extra)
    return Checkpoint(
        path, directory, meta, spec, weights=tensors, states=states, buffers=buffers, extra_tensors=extra
    )


def _spec(path: Path, meta: Meta) -> AnySpec:
    for spec in SPECS:
        if spec.name == meta.optimizer:
            return spec
    known = ", ".join(spec.name for spec in SPECS)
    raise CheckpointError(f"{path / META}: optimizer = {meta.optimizer!r}; this package knows {known}")


def _stored(file: Path) -> dict[str, StoredTensor]:
    with SafetensorsReader(file) as reader:
        return {name: StoredTensor(file, entry) for name, entry in reader.entries.items()}


def _check_extra_states(path: Path, meta: Meta, stored: Mapping[str, StoredTensor]) -> None:
    try:
        described = described_tensors(meta.extra_states)
    except ValueError as error:
        raise CheckpointError(f"{path / META}: extra_states: {error}") from None
    for name in sorted(described.keys() ^ stored.keys()):
        raise CheckpointError(f"{path / EXTRA_STATE} and extra_states in {META} do not agree about {name}")


def _take_states(
    path: Path, spec: AnySpec, name: str, tensors: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Move a parameter's optimizer states out of `tensors`."""
    shape = tensors[name].entry.shape if name in tensors else torch.Size(())
    names = {member: state_names(member) for member in spec.members}
    spec = next((m for m, of_m in names.items() if any(f"{name}.{state}" in tensors for state in of_m)), spec)
    present = {state for state in state_names(spec) if f"{name}.{state}" in tensors}
    specs = state_specs(spec, codes_among(present, spec), shape)
    missing = [stored for stored in (name, *(f"{name}.{s}" for s, _, _ in specs)) if stored not in tensors]
    if missing:
        raise CheckpointError(f"{path}: missing {', '.join(missing)}")
    states = {suffix: tensors.pop(f"{name}.{suffix}") for suffix, _, _ in specs}
    for suffix, dtype, stored_shape in specs:
        file, entry = states[suffix].file, states[suffix].entry
        if (entry.dtype, entry.shape) != (dtype, stored_shape):
            found = f"{entry.dtype} {tuple(entry.shape)}"
            raise CheckpointError(
                f"{file}: {name}.{suffix} is {found} instead of {dtype} {tuple(stored_shape)}"
            )
    return states


def _check_weights(tensors: Mapping[str, StoredTensor], spec: AnySpec, meta: Meta) -> None:
    of_states = {state for member in spec.members for state in state_names(member)}
    for name, stored in tensors.items():
        if name in meta.steps and stored.entry.dtype != torch.float32:
            raise CheckpointError(f"{stored.file}: {name} has dtype {stored.entry.dtype} instead of float32")
        owner, _, suffix = name.rpartition(".")
        if suffix in of_states and owner in tensors:
            raise CheckpointError(f"{stored.file}: {name}, but {META} has no step count of {owner}")
