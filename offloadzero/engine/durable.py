"""A durable run: its commits, and the run that is found again: [Note: durable runs] in update/commits.py."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from offloadzero.checkpoint.commits import (
    BUFFER_PREFIX,
    COMMITS,
    RunDirectory,
    StoredCommit,
    expect_same_layout,
    is_second,
    layout_of,
    named,
    run_name,
)
from offloadzero.checkpoint.format.meta import Meta
from offloadzero.checkpoint.format.safetensors_file import TensorSpec
from offloadzero.checkpoint.module_states import persistent_buffers, read_extra_states, write_buffer
from offloadzero.checkpoint.states import expect_keepable
from offloadzero.config import OffloadConfig, PlacementConfig, PlacementRule, create_nvme_directories
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.engine.lifetime import Resources
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.memory.lanes import Lane
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.swap_file import KeptFile
from offloadzero.memory.tickets import Ticket
from offloadzero.observe.texts import format_bytes
from offloadzero.ranks.group import Group
from offloadzero.update.commits import Commits, Committed
from offloadzero.update.records import Record

_PIECE_BYTES = 16 << 20
_START = "the start of a durable run"
_NUM_TOLD = 2  # commits that a rank can have: the last one, and the one before until all have it


@dataclass(frozen=True)
class OpenRun:
    """The place of a run before its engine has memory, and the commit that is found there; of most runs neither."""

    config: OffloadConfig  # with the homes of the run that is found
    group: Group
    directory: RunDirectory | None = None
    found: StoredCommit | None = None

    @property
    def kept_file(self) -> KeptFile | None:
        """The swap file that is to stay; None where the run is not durable."""
        if self.directory is None:
            return None
        file_bytes = None if self.found is None else self.found.file_bytes
        return KeptFile(f"{run_name(self.group.spec.rank)}.bin", file_bytes)

    def begin(self, model: nn.Module, records: Sequence[Record], store: TieredStore) -> DurableRun | None:
        """Make the run when the homes are made, and spare those of the commit. Raises CheckpointError."""
        if self.directory is None:
            return None
        with self.group.together(_START), named(self.directory.path):
            run = DurableRun(model, records, store, self.directory, group=self.group, found=self.found)
            run.spare_committed()
        return run


def open_run(config: OffloadConfig, group: Group, model: nn.Module, resources: Resources) -> OpenRun:
    """Find the last commit that all ranks have, or none: nothing is there yet. All ranks call this.

    Raises ConfigError for what durable runs are not built for, and where another process has the directory;
    CheckpointError where commits are damaged, some ranks have none, or those of other ranks lie there.
    """
    if not config.durable:
        return OpenRun(config, group)
    with group.together(_START):
        _expect_committable(config, model)
        create_nvme_directories(config.nvme_paths)
        path = config.nvme_paths[0] / run_name(group.spec.rank)
        directory = resources.make(lambda: RunDirectory(path))
        told = [*directory.numbers()[:_NUM_TOLD], *[0] * _NUM_TOLD][:_NUM_TOLD]
    by_rank = group.control.by_rank(told, "the commits that ranks have")
    of_all = set.intersection(*map(set, by_rank)) - {0}
    if not any(map(any, by_rank)):
        with group.together(_START):
            _expect_no_commits(path.parent)
    elif not of_all:
        # The end has come with the first commit, which some ranks have made and others not?
        with group.together(_START):
            own_size = directory.read(max(told)).layout["world_size"] if any(told) else 0
        size = max(max(sizes) for sizes in group.control.by_rank([own_size], "the ranks of the run"))
        if size != len(by_rank):
            raise CheckpointError(
                f"{path}: the run there is of {size} ranks, and these are {len(by_rank)}: start as many, or remove "
                f"{path.parent}/{run_name(0)[:-1]}* to begin anew"
            )
        if group.is_on_some(not set(told) <= {0, 1}):
            raise CheckpointError(
                f"{path}: the ranks have no commit in common; by rank they have {by_rank} (0: none)"
            )
        with named(path):
            directory.keep_only(0)
    with group.together(_START):
        found = directory.read(max(of_all)) if of_all else None
        if found is not None and found.file_bytes and len(found.file_bytes) != len(config.nvme_paths):
            raise CheckpointError(
                f"{found.path}: its run has files in {len(found.file_bytes)} directories, and nvme_path names "
                f"{len(config.nvme_paths)}"
            )
    steps = group.control.by_rank([-1 if found is None else found.meta.global_steps], "the steps of commits")
    if len(set(map(tuple, steps))) > 1:
        raise CheckpointError(f"{path}: the ranks' commits are of different steps: {steps}")
    return OpenRun(config if found is None else _with_homes_of(config, found), group, directory, found)


def _expect_no_commits(directory: Path) -> None:
    """Raise CheckpointError where a run lies in a directory of nvme_path in which no rank has found its own commits."""
    names = sorted({path.parent.name for path in directory.glob(COMMITS)})
    if names:
        raise CheckpointError(
            f"{directory}: of the commits that lie there ({', '.join(names[:3])}) none is of a rank that is here now: "
            "start the ranks on the machines on which they were. To begin anew remove "
            f"{directory / names[0].rstrip('0123456789')}* on all of them"
        )


def _expect_committable(config: OffloadConfig, model: nn.Module) -> None:
    if config.mesh is not None:
        raise ConfigError(
            "offloadzero.durable", True, "not supported with mpu, where ranks have parts of the model"
        )
    if read_extra_states(model).described:
        raise ConfigError(
            "offloadzero.durable", True, "not supported for modules with a get_extra_state() of their own"
        )
    expect_keepable(persistent_buffers(model))


def _with_homes_of(config: OffloadConfig, found: StoredCommit) -> OffloadConfig:
    """Return the configuration with the homes of a run in the place of "auto", which might choose others."""
    if not config.placement.auto:
        return config
    rules = [
        PlacementRule(
            units=glob.escape(name),
            tiers=MappingProxyType(
                {SegmentKind(kind): TierName(tier) for kind, (_, _, tier, _) in said["segments"].items()}
                | ({} if said["gradient"] is None else {SegmentKind.GRAD: TierName(said["gradient"])})
            ),
        )
        for name, said in sorted(found.layout.items())
        if isinstance(said, dict)
    ]
    return replace(config, placement=PlacementConfig(rules=tuple(rules)))


class DurableRun:
    """Commits the steps of one engine."""

    def __init__(
        self,
        model: nn.Module,
        records: Sequence[Record],
        store: TieredStore,
        directory: RunDirectory,
        *,
        group: Group,
        found: StoredCommit | None,
    ) -> None:
        """Make the run, whose homes are made. Raises CheckpointError where `found` is another's."""
        self._model, self._records, self._store, self._group = model, records, store, group
        self._directory = directory
        self._number = 0 if found is None else found.number  # of the last commit
        self.is_committing = False  # in the step that is taken
        self.found = found
        self._lane: Lane | None = None
        self._commits = Commits()
        for record in records:
            record.commits = self._commits
        self._files = [] if store.nvme is None else store.nvme.swap_files
        self._layout = layout_of(records, self._files, world_size=group.spec.world_size)
        self._in_memory = list(_segments_in_memory(records))
        if found is not None:
            expect_same_layout(found, self._layout)
            for file in self._files:
                found.expect_last(file.path, file.last_commit)

    @property
    def description(self) -> str:
        """Where the commits are, and the bytes of each beside the swap files."""
        num_bytes = sum(count * segment.dtype.itemsize for _, segment, count in self._in_memory)
        return (
            f"commits in {self._directory.path}, each with {format_bytes(num_bytes)} of what is in one place"
        )

    # --- a run that is found ---

    def spare_committed(self) -> None:
        """Have the first values written into the places that are not those of the commit which is found."""
        if self.found is None:
            return
        if self._store.nvme is not None:
            self._store.nvme.grow(self._store.nvme.num_bytes)
        # A newer one is not of all ranks, and would not be whole for long.
        self._directory.keep_only(self._number)
        for file in self._files:
            file.note_commit(self._number)  # the end may have come between a commit and its mark
        for record in self._records:
            of_commit = self.found.second.get(record.name)
            if of_commit is None:
                continue
            if is_second(record) == of_commit:
                record.flip()
            record.committed = Committed.NEXT

    def take_over(self) -> None:
        """Take the states of the commit which is found."""
        if self.found is None:
            return
        # Before the rest is written: a segment in memory may have two places, too.
        for record in self._records:
            if record.committed is Committed.NEXT:
                record.flip()
            for slot in record.trainable_slots:
                slot.step = self.found.meta.steps[slot.name]
        with self.found.reader() as reader:
            for name, segment, num_elements in self._in_memory:
                self._store.write(segment, reader.read(name)[:num_elements]).wait()
            for name, buffer in persistent_buffers(self._model).items():
                write_buffer(buffer, reader.read(BUFFER_PREFIX + name))

    # --- commits ---

    def commit(self, meta: Meta, random: Mapping[str, Any], updates: Sequence[Ticket]) -> None:
        """Begin to commit the step that was taken last, whose `updates` may run still. On the script's thread."""
        if self._lane is None:
            self._lane = self._store.accelerator.lane("commit", self._store.failures)
        self._number += 1
        number = self._number
        buffers = {
            BUFFER_PREFIX + name: buffer.detach().to("cpu", copy=True)
            for name, buffer in persistent_buffers(self._model).items()
        }
        steps: dict[str, int] = {}

        def count() -> None:
            steps.update({slot.name: slot.step for r in self._records for slot in r.trainable_slots})
            for record in self._records:
                if is_second(record) is not None:
                    record.committed = Committed.PRESENT

        counted = self._lane.submit(count, after=updates, label=f"step {meta.global_steps}")
        complete = self._lane.submit(
            lambda: self._write(number, replace(meta, steps=steps), random, buffers),
            after=[counted],
            label=f"step {meta.global_steps}",
        )
        self._commits.begin(counted, complete)

    def wait_complete(self) -> None:
        """Block until the last commit is made: no more than one step is lost."""
        self._commits.complete.wait()

    def _write(
        self, number: int, meta: Meta, random: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        memory: list[tuple[TensorSpec, Iterator[torch.Tensor]]] = [
            ((name, segment.dtype, torch.Size([num_elements])), self._pieces(segment, num_elements))
            for name, segment, num_elements in self._in_memory
        ]
        memory += [
            ((name, buffer.dtype, buffer.shape), iter([buffer.reshape(-1)]))
            for name, buffer in buffers.items()
        ]
        second = {record.name: is_second(record) for record in self._records}
        described = {
            "layout": self._layout,
            "second": {name: of_second for name, of_second in second.items() if of_second is not None},
            "random": random,
            "file_bytes": [file.num_bytes for file in self._files],
            "file_paths": [str(file.path) for file in self._files],
        }
        self._directory.write(number, meta, described, memory=memory, sync=self._sync)
        there = torch.ones(1, dtype=torch.uint8, device="cpu")
        self._group.commits.all_reduce(there, f"the commit of step {meta.global_steps}")
        with named(self._directory.path, f"step {meta.global_steps} may not be committed"):
            for file in self._files:
                file.note_commit(number)
            self._directory.keep_only(number)

    @property
    def _sync(self) -> Callable[[], None]:
        return (lambda: None) if self._store.nvme is None else self._store.nvme.sync

    def _pieces(self, segment: Segment, num_elements: int) -> Iterator[torch.Tensor]:
        """The first elements of a segment, in pieces of host memory."""
        size = _PIECE_BYTES // segment.dtype.itemsize
        for start in range(0, num_elements, size):
            stop = min(start + size, num_elements)
            if segment.is_in_host_memory:
                yield segment.memory[start:stop]
                continue
            piece = torch.empty(stop - start, dtype=segment.dtype, device="cpu")
            self._store.read(segment, piece, start=start).wait()
            yield piece


def _segments_in_memory(records: Sequence[Record]) -> Iterator[tuple[str, Segment, int]]:
    """Yield what is written with each commit: name, segment, and how many of its elements are trained."""
    for record in records:
        if not record.num_trainable:
            continue
        for kind, (_, num_elements) in record.layout.items():
            segment = record.param_home if kind is SegmentKind.PARAM else record.segments[kind]
            if segment.has_versions and segment.extent is not None:
                continue
            trained = record.num_trainable if segment is record.whole_param else record.kept_trainable
            is_param = kind is SegmentKind.PARAM  # frozen ones come behind
            yield f"{record.name}.{kind.value}", segment, trained if is_param else num_elements
