"""A durable run: its commits, and the run that is found again: [Note: durable runs] in update/commits.py."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from offloadzero.checkpoint.commits import (
    RunDirectory,
    StoredCommit,
    expect_same_layout,
    is_second,
    layout_of,
    run_name,
)
from offloadzero.checkpoint.format.meta import Meta
from offloadzero.checkpoint.format.safetensors_file import TensorSpec
from offloadzero.checkpoint.module_states import (
    expect_dense,
    persistent_buffers,
    read_extra_states,
    write_buffer,
)
from offloadzero.config import OffloadConfig, PlacementConfig, PlacementRule
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import CheckpointError, ConfigError
from offloadzero.memory.lanes import Lane
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.swap_file import KeptFile
from offloadzero.memory.tickets import Ticket
from offloadzero.ranks.group import Group
from offloadzero.update.commits import Commits, Committed
from offloadzero.update.records import Record

_PIECE_BYTES = 16 << 20
_NUM_TOLD = 2  # commits that a rank can have: the last one, and the one before until all have it


def directory_of_run(config: OffloadConfig, group: Group) -> RunDirectory:
    """The directory of this rank's commits."""
    return RunDirectory(config.nvme_paths[0] / run_name(group.spec.rank))


def find_run(config: OffloadConfig, group: Group, model: nn.Module) -> StoredCommit | None:
    """Return the last commit that all ranks have, or None: nothing is there yet. All ranks call this.

    Raises ConfigError for what durable runs are not built for; CheckpointError where commits are damaged, or some ranks
    have none.
    """
    if config.mesh is not None:
        raise ConfigError(
            "offloadzero.durable", True, "false with mpu: it is built for ranks with the whole model"
        )
    if read_extra_states(model).described:
        raise ConfigError(
            "offloadzero.durable", True, "false where modules have a get_extra_state() of their own"
        )
    expect_dense(persistent_buffers(model))
    directory = directory_of_run(config, group)
    told = [*directory.steps()[:_NUM_TOLD], *[-1] * _NUM_TOLD][:_NUM_TOLD]
    by_rank = group.control.by_rank(told, "the steps of which ranks have commits")
    of_all = set.intersection(*map(set, by_rank)) - {-1}
    if not of_all and any(step >= 0 for steps in by_rank for step in steps):
        raise CheckpointError(
            f"{directory.path}: the ranks have no commit in common; by rank they have {by_rank} (-1: none)"
        )
    with group.together("the start of a durable run"):
        return directory.read(max(of_all)) if of_all else None


def kept_file(config: OffloadConfig, group: Group, found: StoredCommit | None) -> KeptFile | None:
    """The swap file that is to stay; None where the run is not durable."""
    if not config.durable:
        return None
    return KeptFile(f"{run_name(group.spec.rank)}.bin", has_data=found is not None)


def with_homes_of(config: OffloadConfig, found: StoredCommit) -> OffloadConfig:
    """Return the configuration with the homes of a run in the place of "auto", which might choose others."""
    if not config.placement.auto:
        return config
    rules = [
        PlacementRule(
            units=glob.escape(name),
            tiers=MappingProxyType(
                {SegmentKind(kind): TierName(tier) for kind, (_, _, tier, _) in said["segments"].items()}
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
        self.found = found
        self._lane: Lane | None = None
        self._commits = Commits()
        for record in records:
            record.commits = self._commits
        file_ids = [] if store.nvme is None else store.nvme.file_ids
        self._layout = layout_of(records, file_ids, world_size=group.spec.world_size)
        self._in_memory = list(_segments_in_memory(records))
        if found is not None:
            expect_same_layout(found, self._layout)
            if (
                found.step not in directory.steps()
            ):  # its process has gone on until this one had the swap files
                raise CheckpointError(f"{found.path} is gone: another process has gone on with it meanwhile")

    # --- a run that is found ---

    def spare_committed(self) -> None:
        """Have the first values written into the places that are not those of the commit which is found."""
        if self.found is None:
            return
        self._directory.keep_only(
            self.found.step
        )  # a newer one is not of all ranks, and would not be whole for long
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
        for record in self._records:  # before the rest is written: a segment in memory may have two places, too
            if record.committed is Committed.NEXT:
                record.flip()
            for slot in record.trainable_slots:
                slot.step = self.found.meta.steps[slot.name]
        with self.found.reader() as reader:
            for name, segment, num_elements in self._in_memory:
                self._store.write(segment, reader.read(name)[:num_elements]).wait()
            for name, buffer in persistent_buffers(self._model).items():
                write_buffer(buffer, reader.read(_buffer_name(name)))

    # --- commits ---

    def commit(self, meta: Meta, random: Mapping[str, Any], updates: Sequence[Ticket]) -> None:
        """Begin to commit the step that was taken last, whose `updates` may run still. On the script's thread."""
        if self._lane is None:
            self._lane = self._store.accelerator.lane("commit", self._store.failures)
        buffers = {
            _buffer_name(name): buffer.detach().to("cpu", copy=True)
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
            lambda: self._write(replace(meta, steps=steps), random, buffers),
            after=[counted],
            label=f"step {meta.global_steps}",
        )
        self._commits.begin(counted, complete)

    def _write(self, meta: Meta, random: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        memory: list[tuple[TensorSpec, Iterator[torch.Tensor]]] = [
            ((name, segment.dtype, torch.Size([num_elements])), self._pieces(segment, num_elements))
            for name, segment, num_elements in self._in_memory
        ]
        memory += [
            ((name, buffer.dtype, buffer.shape), iter([buffer.reshape(-1)]))
            for name, buffer in buffers.items()
        ]
        second = {record.name: is_second(record) for record in self._records}
        self._directory.write(
            meta,
            layout=self._layout,
            second={name: of_second for name, of_second in second.items() if of_second is not None},
            random=random,
            memory=memory,
            sync=self._sync,
        )
        there = torch.ones(1, dtype=torch.uint8, device="cpu")
        self._group.commits.all_reduce(there, f"the commit of step {meta.global_steps}")
        self._directory.keep_only(meta.global_steps)

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


def _buffer_name(name: str) -> str:
    return f"buffer/{name}"


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
