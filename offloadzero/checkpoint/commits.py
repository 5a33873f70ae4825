"""The commits of a durable run as directories on the drive: [Note: durable runs] in update/commits.py.

Each rank has a directory `offloadzero-durable-rankN` beside its swap file of that name, in the first of nvme_path. A
commit in it, `commit-N`, is like a checkpoint ([Note: how a checkpoint takes its name]). It has `meta.json`;
`commit.json`, which says what lies where in the swap files; `memory.safetensors` with all that does not; and the
manifest with digests of all of them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offloadzero.checkpoint.format.json_file import parse_json
from offloadzero.checkpoint.format.manifest import HashingPool, check_file, read_bytes, read_manifest
from offloadzero.checkpoint.format.meta import Meta, read_meta
from offloadzero.checkpoint.format.names import COMMIT, MEMORY
from offloadzero.checkpoint.format.safetensors_file import SafetensorsReader, TensorSpec
from offloadzero.checkpoint.partial import new_folder
from offloadzero.checkpoint.states import CheckpointFiles
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import CheckpointError, OffloadError
from offloadzero.memory.device import Device
from offloadzero.memory.swap_file import DirectoryLock, SwapFile, sync_directory
from offloadzero.memory.tiers import Extent, TwoPlaces
from offloadzero.update.records import Record

BUFFER_PREFIX = "buffer/"  # before a buffer's name, among the tensors in memory
COMMITS = "offloadzero-durable-rank*/commit-*"  # of any rank: a pattern of `Path.glob`
_NAME = re.compile(r"commit-(\d+)")
_MAX_BYTES = 1 << 30

Layout = Mapping[str, Any]  # values of JSON


def run_name(rank: int) -> str:
    """The name of a rank's swap files, with the ending .bin, and of the directory of its commits."""
    return f"offloadzero-durable-rank{rank}"


@dataclass(frozen=True)
class StoredCommit:
    """A commit that was read, every file of it checked."""

    path: Path
    meta: Meta
    layout: Layout
    second: Mapping[str, bool]  # by record with two places, whether the second one is the commit's
    random: Mapping[str, Any]
    file_bytes: Sequence[int]  # of each swap file
    file_paths: Sequence[str]  # where they were

    @property
    def number(self) -> int:
        """The number of the commit, which grows. Those of steps may fall when a checkpoint is loaded."""
        return number_of(self.path)

    def reader(self) -> SafetensorsReader:
        """Open what was in memory."""
        return SafetensorsReader(self.path / MEMORY)

    def expect_last(self, swap_file: Path, last_commit: int) -> None:
        """Raise CheckpointError unless the last commit that a swap file's mark knows of is this one or that before it.

        The mark is written when a commit is made, and before the next one begins.
        """
        if last_commit not in (self.number - 1, self.number):
            when = "after" if last_commit > self.number else "before"
            raise CheckpointError(
                f"{swap_file} has states from {when} the commit {self.path}: they are not of one run, or one of them "
                "is an older copy"
            )


class RunDirectory:
    """The commits of one rank's run, which has the directory's lock until `close`."""

    def __init__(self, path: Path) -> None:
        """Make the directory, if it is not there. Raises ConfigError where another process has it, AioError."""
        self.path = path
        self._lock = DirectoryLock(path)

    def close(self) -> None:
        """Leave the directory to others."""
        self._lock.close()

    def numbers(self) -> list[int]:
        """The numbers of the commits that are there, the newest first."""
        return sorted(filter(None, map(number_of, self.path.iterdir())), reverse=True)

    def read(self, number: int) -> StoredCommit:
        """Read and check a commit. Raises CheckpointError where it is damaged."""
        path = self.path / f"commit-{number}"
        with HashingPool() as pool:
            for name, entry in read_manifest(path).items():
                check_file(path / name, entry, pool)
        values = parse_json(read_bytes(path / COMMIT, max_bytes=_MAX_BYTES), path / COMMIT)
        return StoredCommit(path, read_meta(path), **values)

    def write(
        self,
        number: int,
        meta: Meta,
        described: Mapping[str, Any],
        *,
        memory: Sequence[tuple[TensorSpec, Iterable[torch.Tensor]]],
        sync: Callable[[], None],
    ) -> None:
        """Write a commit; `sync` makes what it says of the swap files last before it counts.

        Args:
            described: layout, second, random, file_bytes and file_paths, as in `StoredCommit`.
            memory: the tensors in memory, flat and in pieces.
        """
        path = self.path / f"commit-{number}"
        not_made = f"step {meta.global_steps} is not committed, the last commit is as it was"
        with named(self.path, not_made), new_folder(path) as folder, HashingPool() as pool:
            files = CheckpointFiles(folder, pool)
            with files.tensors(MEMORY, [spec for spec, _ in memory]) as writer:
                for _, pieces in memory:
                    writer.add_pieces(pieces)
            files.add_bytes(COMMIT, json.dumps(described).encode())
            files.seal(meta)
            sync()

    def keep_only(self, number: int) -> None:
        """Remove the other commits, and let that last. Raises OSError."""
        others = [other for other in self.numbers() if other != number]
        for other in others:
            shutil.rmtree(self.path / f"commit-{other}")
        if others:
            sync_directory(self.path)


@contextmanager
def named(path: Path, what_is_there: str = "the run that lies here is as it was") -> Iterator[None]:
    """Turn an error of the system into a CheckpointError with path, reason and what is there now."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OffloadError):
            raise
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror or error}: {what_is_there}"
        ) from error


def number_of(path: Path) -> int:
    """The number of a commit by its name, 1 and more; 0: it is none."""
    match = _NAME.fullmatch(path.name)
    return 0 if match is None else int(match[1])


# --- what lies where ---


def layout_of(records: Sequence[Record], files: Sequence[SwapFile], *, world_size: int) -> Layout:
    """Describe the records' homes for a comparison: another run's states would be read as if they were this one's."""
    return {
        "world_size": world_size,
        "swap files": [file.file_id for file in files],
        **{record.name: _described(record) for record in records},
    }


def _described(record: Record) -> Layout:
    grad = record.segments.get(SegmentKind.GRAD)  # not committed, but its home has a place among the others
    return {
        "parameters": {slot.name: [slot.offset, *slot.shape, slot.trainable] for slot in record.slots},
        "optimizer": record.spec.name,
        "segments": {
            kind.value: [str(dtype), num_elements, record.segments[kind].tier.value, _offsets(record, kind)]
            for kind, (dtype, num_elements) in record.layout.items()
        },
        "gradient": None if grad is None else grad.tier.value,
        "divided": [record.num_trainable, record.shard.world_size, record.is_gathered],
    }


def _offsets(record: Record, kind: SegmentKind) -> list[int] | None:
    place = record.segments[kind].place
    if not isinstance(place, TwoPlaces) or not isinstance(place.present, Extent):
        return None
    return sorted(extent.offset for extent in (place.present, place.next) if isinstance(extent, Extent))


def is_second(record: Record) -> bool | None:
    """Whether the second of a record's two places on the drive is the present one; None: it has no two."""
    for segment in (record.segments[kind] for kind in record.layout):
        place = segment.place
        if (
            isinstance(place, TwoPlaces)
            and isinstance(place.present, Extent)
            and isinstance(place.next, Extent)
        ):
            return place.present.offset > place.next.offset
    return None


def expect_same_layout(commit: StoredCommit, own: Layout) -> None:
    """Raise CheckpointError where a commit is of another model, optimizer, configuration or number of ranks."""
    stored = commit.layout
    for key in {**stored, **own}:
        if stored.get(key) == own.get(key):
            continue
        has, wants = stored.get(key), own.get(key)
        if isinstance(has, dict) and isinstance(wants, dict):
            part = next(part for part in {**has, **wants} if has.get(part) != wants.get(part))
            key, has, wants = f"{part} of {key}", has.get(part), wants.get(part)
        raise CheckpointError(
            f"{commit.path}: the durable run in this directory differs from this script in {key} ({_short(has)} there, "
            f"{_short(wants)} here): continue it with its own model and configuration, use another nvme_path, or "
            f"remove {commit.path.parent}* to give it up"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- random states ---


def random_states(device: Device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as values of JSON."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
    }
    of_device = device.random_state()
    if of_device is not None:
        states["device"] = _text(of_device)
    return states


def set_random_states(states: Mapping[str, Any], device: Device) -> None:
    """Set the generators to what `random_states` has returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    if "device" in states:
        device.set_random_state(_tensor(states["device"]))


def _text(state: torch.Tensor) -> str:
    return b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
