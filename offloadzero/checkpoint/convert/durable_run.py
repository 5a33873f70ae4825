"""Durable runs: the last commit that all ranks have: [Note: durable runs] in update/commits.py.

Each rank's part of a segment is in its memory.safetensors, or in its swap files, at the one of two places that the
commit names. Frozen weights are the model's own, and not in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offloadzero.checkpoint.commits import BUFFER_PREFIX, RunDirectory, StoredCommit, named, run_name
from offloadzero.checkpoint.convert.stored_model import StoredModel, tensors_of
from offloadzero.checkpoint.format.file_tensor import FileExtent, FileTensor, MasterTensor
from offloadzero.checkpoint.verify import OpenDirectory
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.memory.nvme import stripe_pieces
from offloadzero.memory.swap_file import MARK_BYTES, read_kept_mark
from offloadzero.ranks.shard import ShardSpec
from offloadzero.update.records import segment_slice
from offloadzero.update.specs import SPECS

_SPECS = {member.name: member for spec in SPECS for member in spec.members}


def is_run(path: Path) -> bool:
    """Whether a directory has the commits of a durable run."""
    return (path / run_name(0)).is_dir()


def read_run(path: Path, held: ExitStack) -> StoredModel:
    """Return weights, states, buffers and counters of the newest commit that all ranks have.

    No process can go on with the run until `held` is closed. ConfigError where one has it; CheckpointError where a
    commit is damaged, a swap file is not the run's, or those of some rank are not there.
    """
    ranks = [_Rank.of(commit) for commit in _read_commits(path, held)]
    meta, layout = ranks[0].commit.meta, ranks[0].commit.layout
    weights: dict[str, FileTensor] = {}
    states: dict[str, Sequence[FileTensor]] = {}
    excluded: list[str] = []
    for record, described in layout.items():
        if not isinstance(described, dict):
            continue
        for name, (offset, *shape, is_trained) in described["parameters"].items():
            if is_trained:
                parameter = _Parameter(ranks, record, name, offset, torch.Size(shape))
                weights[name], states[name] = parameter.master(), parameter.states()
            else:
                excluded.append(name)
    return StoredModel(
        description=f"a durable run at step {meta.global_steps}, ranks: {len(ranks)}",
        directory=OpenDirectory(ranks[0].commit.path),
        tag=f"global_step{meta.global_steps}",
        meta=replace(meta, excluded=excluded),
        weights=weights,
        states=states,
        buffers={
            name: replace(tensor, name=name)
            for stored, tensor in ranks[0].memory.items()
            if (name := stored.removeprefix(BUFFER_PREFIX)) != stored
        },
        left_out=["random states"],
    )


def _read_commits(path: Path, held: ExitStack) -> list[StoredCommit]:
    """Read the newest commit that all ranks have, by rank."""
    directories = []
    others = (path / run_name(rank) for rank in itertools.count(1))
    # A start that was refused, of more ranks than the run has, leaves directories without a commit.
    with_commits = itertools.takewhile(lambda other: any(other.glob("commit-*")), others)
    for of_rank in itertools.chain([path / run_name(0)], with_commits):
        try:
            directories.append(RunDirectory(of_rank))
        except ConfigError as error:
            raise ConfigError("SRC", str(path), error.allowed) from error
        held.callback(directories[-1].close)
    with named(path):
        by_rank = [directory.numbers() for directory in directories]
    of_all = set.intersection(*map(set, by_rank))
    if not of_all:
        raise CheckpointError(f"{path}: the ranks have no commit in common; by rank they have {by_rank}")
    commits = [directory.read(max(of_all)) for directory in directories]
    found = [(commit.layout["world_size"], commit.meta.global_steps) for commit in commits]
    if set(found) != {(len(commits), found[0][1])}:
        raise CheckpointError(
            f"{path}: the commits of {len(commits)} ranks are there, and by (ranks of the run, step) they are of "
            f"{found}: bring what all ranks of one run have in the first directory of nvme_path into one directory"
        )
    return commits


@dataclass(frozen=True)
class _Rank:
    """What one rank has of the commit."""

    commit: StoredCommit
    memory: Mapping[str, FileTensor]
    swap_files: Sequence[Path]

    @classmethod
    def of(cls, commit: StoredCommit) -> _Rank:
        """Find its files. CheckpointError unless the swap files are those of the commit."""
        with commit.reader() as reader:
            memory = tensors_of(reader)
        directory = commit.path.parent
        # The first one is beside the commits, wherever these were brought.
        paths = [directory.parent / f"{directory.name}.bin", *map(Path, commit.file_paths[1:])]
        swap_files = paths[: len(commit.file_paths)]
        for path, file_id, num_bytes in zip(
            swap_files, commit.layout["swap files"], commit.file_bytes, strict=True
        ):
            with named(path, f"{commit.path} needs it"):
                mark = read_kept_mark(path)
            if mark.file_id != file_id:
                raise CheckpointError(f"{path} is not the swap file that {commit.path} needs")
            if mark.num_bytes < num_bytes:
                raise CheckpointError(
                    f"{path} has {mark.num_bytes:,} bytes; {num_bytes:,} belong to {commit.path}"
                )
            commit.expect_last(path, mark.last_commit)
        return cls(commit, memory, swap_files)

    def extents(
        self, record: str, kind: SegmentKind, start_bytes: int, num_bytes: int
    ) -> Iterator[FileExtent]:
        """Yield where bytes of this rank's part of a segment lie."""
        in_memory = self.memory.get(f"{record}.{kind.value}")
        if in_memory is not None:
            (extent,) = in_memory.extents
            yield FileExtent(extent.file, extent.offset + start_bytes, num_bytes)
            return
        *_, places = self.commit.layout[record]["segments"][kind.value]
        place = places[self.commit.second[record]]
        for piece in stripe_pieces(place + start_bytes, num_bytes, len(self.swap_files)):
            yield FileExtent(
                self.swap_files[piece.file_index], MARK_BYTES + piece.file_offset, piece.num_bytes
            )


@dataclass(frozen=True)
class _Parameter:
    """A trained parameter, whose elements are the record's from `offset` on."""

    ranks: Sequence[_Rank]
    record: str
    name: str
    offset: int
    shape: torch.Size

    def master(self) -> FileTensor:
        """Its fp32 master weight."""
        kinds = self._described["segments"]
        if SegmentKind.MASTER not in kinds:
            return self._tensor(SegmentKind.PARAM, self.name, self.shape)
        master = self._tensor(SegmentKind.MASTER, self.name, self.shape)
        if master.dtype == torch.float32:
            return master
        param = self._tensor(SegmentKind.PARAM, self.name, self.shape)
        return MasterTensor(self.name, torch.float32, self.shape, param.extents, remainder=master)

    def states(self) -> list[FileTensor]:
        """Its optimizer's states, in the form of a checkpoint: fp32, or codes and scales."""
        spec = _SPECS[self._described["optimizer"]]
        forms = [(kind.value, kind, self.shape) for kind in spec.states]
        if spec.codes is not None and SegmentKind.SCALES in self._described["segments"]:
            forms = [(name, kind, shape) for name, kind, _, shape in spec.codes.specs(self.shape)]
        return [self._tensor(kind, f"{self.name}.{state}", shape) for state, kind, shape in forms]

    @property
    def _described(self) -> Mapping[str, Any]:
        described: Mapping[str, Any] = self.ranks[0].commit.layout[self.record]
        return described

    def _tensor(self, kind: SegmentKind, name: str, shape: torch.Size) -> FileTensor:
        dtype = getattr(torch, self._described["segments"][kind.value][0].removeprefix("torch."))
        num_trainable, num_shards, is_gathered = self._described["divided"]
        if kind is SegmentKind.PARAM and not is_gathered:
            num_shards = 1
        extents: list[FileExtent] = []
        for rank in range(num_shards):
            start, stop = ShardSpec(rank, num_shards).clipped(
                self.offset, self.offset + self.shape.numel(), num_trainable
            )
            part = segment_slice(kind, start, stop)
            if part.start < part.stop:
                extents += self.ranks[rank].extents(
                    self.record, kind, part.start * dtype.itemsize, (part.stop - part.start) * dtype.itemsize
                )
        return FileTensor(name, dtype, shape, tuple(extents))
