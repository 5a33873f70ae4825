"""What a power failure may leave of a durable run's files: recorded while it trains, then put together by chance.

[Note: crash images]
As in ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018): every change of a file is recorded,
and what makes changes last. An image of one moment has all that was made to last before, and of the rest what chance
says:

- of the writes to the swap file any subset, each whole or some of its 512-byte sectors;
- of a directory's names none, all, the first few or any of their changes since its last fsync;
- of a file without fsync nothing, all or the first few bytes.

A write lasts if it was done when an fdatasync began that has returned.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offloadzero.checkpoint.commits import number_of
from offloadzero.memory.swap_file import MARK_BYTES
from tests.support.faults import replaced

SECTOR_BYTES = 512
RUN = "offloadzero-durable-rank0"
SWAP = f"{RUN}.bin"
Event = tuple[Any, ...]


class Recorder:
    """The changes below a directory, in their order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self._tickets: list[Any] = []
        self._lock = threading.Lock()
        self._is_on = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens in the block. Once a process, as an audit hook stays."""
        calls = {name: getattr(os, name) for name in ("fsync", "fdatasync", "pwrite")}
        os.fsync, os.fdatasync, os.pwrite = self._fsync, self._fdatasync, self._pwrite  # type: ignore[assignment]
        self._calls = calls
        sys.addaudithook(self._on_event)
        self._is_on = True
        try:
            with replaced("nvme.write", self._write):
                yield
        finally:
            self._is_on = False
            for name, call in calls.items():
                setattr(os, name, call)

    def note(self, *event: Any) -> None:
        """Add an event."""
        with self._lock:
            self.events.append(event)

    def _path(self, path: Any, dir_fd: Any = -1) -> str | None:
        """Relative to the root; None: it lies elsewhere."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if not os.path.isabs(text):
            at = (
                self.root
                if text == SWAP
                else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
                if dir_fd >= 0
                else None
            )
            if at is None:
                return None
            text = str(at / text)
        return os.path.relpath(text, self.root) if text.startswith(f"{self.root}/") else None

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "open":
            path = self._path(arguments[0])
            flags = arguments[2] or 0
            if path is not None and flags & os.O_CREAT and not os.path.lexists(self.root / path):
                self.note("create", path)
        elif event == "os.mkdir" and not os.path.isdir(arguments[0]):  # with exist_ok it may be there
            self._note_path("mkdir", arguments[0], arguments[2])
        elif event in ("os.remove", "os.rmdir"):
            self._note_path("remove", arguments[0], arguments[1])
        elif event == "os.rename":
            old, new = self._path(arguments[0]), self._path(arguments[1])
            if old is not None:
                self.note("rename", old, new)

    def _note_path(self, what: str, path: Any, dir_fd: int) -> None:
        relative = self._path(path, dir_fd)
        if relative is not None:
            self.note(what, relative)

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._calls["fsync"](descriptor)
        if path == self.root or str(path).startswith(f"{self.root}/"):
            relative = os.path.relpath(path, self.root)
            if path.is_dir():
                self.note("sync directory", relative)
            else:
                self.note("sync file", relative, path.read_bytes())

    def _fdatasync(self, descriptor: int) -> None:
        with self._lock:
            done = [index for index, ticket in enumerate(self._tickets) if ticket is None or ticket.done()]
        self._calls["fdatasync"](descriptor)
        self.note("sync swap", done)

    def _pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        written: int = self._calls["pwrite"](descriptor, data, offset)
        with self._lock:
            self.events.append(("write", len(self._tickets), offset, bytes(data)))
            self._tickets.append(None)
        return written

    def _write(self, work: Callable[..., Any], verb: str, start: int, data: torch.Tensor, **keys: Any) -> Any:
        with self._lock:
            index = len(self._tickets)
            self.events.append(("write", index, MARK_BYTES + start, bytes(data.numpy().tobytes())))
            self._tickets.append(_Never())
        self._tickets[index] = ticket = work(verb, start, data, **keys)
        return ticket


class _Never:
    """Of a write that is not submitted yet."""

    def done(self) -> bool:
        return False


@dataclass(eq=False)
class _File:
    data: bytes | None = None  # None: never made to last


@dataclass(eq=False)
class _Directory:
    entries: dict[str, Any] = field(default_factory=dict)  # as the system has them
    lasting: dict[str, Any] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(
        default_factory=list
    )  # since the last fsync: name -> node, None: gone

    def change(self, **names: Any) -> None:
        self.changes.append(names)
        _apply(self.entries, names)

    def sync(self) -> None:
        self.lasting, self.changes = dict(self.entries), []


def _apply(entries: dict[str, Any], names: dict[str, Any]) -> None:
    for name, node in names.items():
        entries.pop(name, None)
        if node is not None:
            entries[name] = node


class Images:
    """The images of a recorded run, whose directory began as a copy of `base`."""

    def __init__(self, base: Path, events: list[Event], *, swap_bytes: int) -> None:
        self._base, self._events, self._swap_bytes = base, events, swap_bytes
        # What is written into a file whose name is given away once.
        self._ever = {event[1]: event[2] for event in events if event[0] == "sync file"}
        metas = [(path, data) for path, data in self._ever.items() if path.startswith(f"{RUN}/")]
        metas += [(str(path), path.read_bytes()) for path in (base / RUN).glob("*/meta.json")]
        self._step_of = {0: 0}  # by the number of a commit
        for path, data in metas:
            if path.endswith("/meta.json"):
                name = re.sub(r"^\.|\.[0-9a-f]+\.partial$", "", Path(path).parent.name)
                self._step_of[number_of(Path(name))] = json.loads(data)["global_steps"]

    def moment_of_commit(self, *, is_named: bool) -> int:
        """The moment before the first commit gets its name, or `is_named`: when that is made to last."""
        number = next(
            i for i, event in enumerate(self._events) if event[0] == "rename" and number_of(Path(event[2]))
        )
        return self._events.index(("sync directory", RUN), number) + 1 if is_named else number

    def make(self, target: Path, moment: int, draw: random.Random) -> tuple[int, int]:
        """Make an image of the moment before event `moment`. Returns the oldest and the newest step it may have."""
        tree = _load(self._base)
        renamed, lasting = _commits(tree), _commits(tree)
        done: set[int] = set()
        created: dict[int, str] = {}
        for event in self._events[:moment]:
            what, *rest = event
            if what == "sync swap":
                done.update(rest[0])
            elif what == "sync file":
                node = _find(tree, rest[0])
                if isinstance(node, _File):
                    node.data = rest[1]
            elif what == "sync directory":
                node = _find(tree, rest[0])
                node.sync()
                lasting |= renamed
            elif what in ("create", "mkdir"):
                node = _File() if what == "create" else _Directory()
                created[id(node)] = rest[0]
                _parent(tree, rest[0]).change(**{Path(rest[0]).name: node})
            elif what == "remove":
                _parent(tree, rest[0]).change(**{Path(rest[0]).name: None})
            elif what == "rename":
                old, new = Path(rest[0]), Path(rest[1])
                node = _find(tree, rest[0])
                _parent(tree, rest[0]).change(**{old.name: None, new.name: node})
                if number := number_of(new):
                    renamed.add(number)
        swap = self._swap(moment, done, draw)
        _store(tree, target, draw, lambda node: self._ever.get(created.get(id(node), ""), b""), swap)
        return self._step_of[max(lasting, default=0)], self._step_of[max(renamed, default=0)]

    def _swap(self, moment: int, done: set[int], draw: random.Random) -> bytes:
        path = self._base / SWAP
        swap = bytearray(path.read_bytes() if path.exists() else b"")
        part = draw.choice((0.0, 0.3, 0.7, 1.0))
        tears = draw.choice((0.0, 0.5, 1.0))
        for event in self._events[:moment]:
            if event[0] != "write":
                continue
            _, index, offset, data = event
            swap.extend(bytes(max(0, offset + len(data) - len(swap))))
            if index in done or (draw.random() < part and draw.random() >= tears):
                swap[offset : offset + len(data)] = data
            elif draw.random() < part:
                for start in range(0, len(data), SECTOR_BYTES):
                    if draw.random() < 0.5:
                        sector = data[start : start + SECTOR_BYTES]
                        swap[offset + start : offset + start + len(sector)] = sector
        return bytes(swap.ljust(self._swap_bytes, b"\0"))  # it is reserved before all of these


def _load(path: Path) -> _Directory:
    directory = _Directory()
    for entry in path.iterdir():
        directory.entries[entry.name] = _load(entry) if entry.is_dir() else _File(entry.read_bytes())
    directory.sync()
    return directory


def _commits(tree: _Directory) -> set[int]:
    run = tree.entries.get(RUN)
    return set() if run is None else set(filter(None, map(number_of, map(Path, run.entries))))


def _find(tree: _Directory, path: str) -> Any:
    node: Any = tree
    for part in Path(path).parts:
        node = node.entries[part]
    return node


def _parent(tree: _Directory, path: str) -> _Directory:
    return _find(tree, str(Path(path).parent))  # type: ignore[no-any-return]


def _store(
    directory: _Directory, target: Path, draw: random.Random, ever: Callable[[Any], bytes], swap: bytes
) -> None:
    target.mkdir()
    entries, how = dict(directory.lasting), draw.choice(("none", "all", "first", "any"))
    number = len(directory.changes)
    kept = {"none": 0, "all": number, "first": draw.randint(0, number), "any": number}[how]
    for change in directory.changes[:kept]:
        if how != "any" or draw.random() < 0.5:
            _apply(entries, change)
    for name, node in entries.items():
        if isinstance(node, _Directory):
            _store(node, target / name, draw, ever, swap)
        elif name == SWAP:
            (target / name).write_bytes(swap)
            (target / name).chmod(0o600)
        else:
            whole = ever(node)
            data = (
                node.data if node.data is not None else whole[: draw.choice((0, len(whole) // 2, len(whole)))]
            )
            (target / name).write_bytes(data)
