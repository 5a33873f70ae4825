"""The file engine under load: 10,000 operations at once, 1,000 faults, more than 2 GiB in one operation."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest

from offloadzero.errors import AioError
from offloadzero.io.engine import AioEngine, AioFile, AioTicket
from tests.io.engines import BACKENDS, FILESYSTEMS, make_engine
from tests.support.cases import IN_FULL, each_pair

WAIT_S = 60.0
GIB = 1 << 30


def descriptors() -> dict[str, str]:
    """What each open descriptor of this process shows."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the listing's own
    return found


class TestTenThousandOperations:
    NUM_FILES = 16
    NUM_GROWING = 4  # they begin empty, and are written in any order
    NUM_OPERATIONS = 10_000
    OPTIONS = (
        {"block_size": 16384, "queue_depth": 64, "num_threads": 2},
        {"block_size": 4096, "queue_depth": 1, "num_threads": 1},
        {"block_size": 65536, "queue_depth": 3, "num_threads": 2},
    )

    @pytest.mark.parametrize(
        ("number", "backend", "folder"),
        each_pair(range(len(OPTIONS)), BACKENDS, FILESYSTEMS),
        indirect=["folder"],
    )
    def test_random_reads_and_writes_at_once(self, number: int, backend: str, folder: Path) -> None:
        rng, options, size = np.random.default_rng(17 + number), self.OPTIONS[number], 400_000
        models = [rng.integers(0, 256, size, np.uint8) for _ in range(self.NUM_FILES)]
        paths = [folder / f"data.{i}" for i in range(self.NUM_FILES)]
        for i, (path, model) in enumerate(zip(paths, models, strict=True)):
            path.write_bytes(b"" if i < self.NUM_GROWING else model.tobytes())
        operations = self._cut(rng, size)
        with make_engine(backend, **options) as engine:
            files = [engine.open(path) for path in paths]
            tickets: list[AioTicket] = []
            reads: list[tuple[np.ndarray, np.ndarray]] = []
            for i, begin, end, is_write in operations:
                priority = int(rng.integers(3))
                if is_write:
                    data = rng.integers(0, 256, end - begin, np.uint8)
                    models[i][begin:end] = data
                    tickets.append(engine.write(files[i], data, offset=begin, priority=priority))
                else:
                    back = np.zeros(end - begin, np.uint8)
                    reads.append((back, models[i][begin:end]))
                    tickets.append(engine.read(files[i], back, offset=begin, priority=priority))
            assert len(tickets) == self.NUM_OPERATIONS
            for ticket in tickets:
                ticket.wait(WAIT_S)
            stats = engine.stats()
        assert stats["operations"] == self.NUM_OPERATIONS
        written = sum(end - begin for _, begin, end, is_write in operations if is_write)
        assert (stats["bytes_written"], stats["bytes_read"]) == (written, self.NUM_FILES * size - written)
        assert all(np.array_equal(back, expected) for back, expected in reads)
        for path, model in zip(paths, models, strict=True):
            assert path.read_bytes() == model.tobytes()

    def _cut(self, rng: np.random.Generator, size: int) -> list[tuple[int, int, int, bool]]:
        """(file, begin, end, is_write): each file cut at random places, so that neighbours share units."""
        per_file = self.NUM_OPERATIONS // self.NUM_FILES
        operations = []
        for i in range(self.NUM_FILES):
            cuts = np.sort(rng.integers(0, size, per_file - 1)).tolist()
            for begin, end in zip([0, *cuts], [*cuts, size], strict=True):
                operations.append((i, begin, end, i < self.NUM_GROWING or bool(rng.integers(2))))
        rng.shuffle(operations)
        return [(int(i), int(begin), int(end), bool(is_write)) for i, begin, end, is_write in operations]


class TestThousandFaults:
    NUM_FAULTS = 1000
    BLOCK = 4096
    SIZE = 64 * BLOCK
    ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENODEV)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_each_is_recovered_or_raised(self, backend: str, folder: Path) -> None:
        rng = random.Random(23)
        path = folder / "data"
        model = bytearray(rng.randbytes(self.SIZE))
        path.write_bytes(model)
        files_before, descriptors_before = sorted(os.listdir(folder)), descriptors()
        num_raised = num_recovered = 0
        with make_engine(backend, block_size=self.BLOCK, queue_depth=4) as engine, engine.open(path) as file:
            for _ in range(self.NUM_FAULTS):
                outcome = self._one_fault(rng, engine, file, model)
                num_raised += outcome
                num_recovered += not outcome
        assert num_raised > self.NUM_FAULTS / 10
        assert num_recovered > self.NUM_FAULTS / 10
        assert path.read_bytes() == model
        assert sorted(os.listdir(folder)) == files_before
        assert descriptors() == descriptors_before

    def _one_fault(self, rng: random.Random, engine: AioEngine, file: AioFile, model: bytearray) -> bool:
        """Whether the operation that the fault hit raised; `model` follows what is then in the file."""
        num_blocks = rng.randrange(1, 5)
        begin = rng.randrange(self.SIZE - num_blocks * self.BLOCK)
        begin -= begin % self.BLOCK if rng.random() < 0.5 else 0
        end = begin + num_blocks * self.BLOCK - (rng.randrange(self.BLOCK) if rng.random() < 0.5 else 0)
        kind, value = rng.choice(
            [
                ("errno", rng.choice(self.ERRORS)),
                ("errno", rng.choice([errno.EINTR, errno.EAGAIN])),
                ("short", rng.randrange(1, self.BLOCK)),
                ("delay", rng.randrange(2)),
            ]
        )
        engine.inject(kind, rng.randrange(1, num_blocks + 1), value)
        is_write = rng.random() < 0.5
        data = np.frombuffer(bytearray(rng.randbytes(end - begin)), np.uint8)
        call = engine.write if is_write else engine.read
        failure = self._failure_of(call(file, data, offset=begin, label="layers.7.w2"))
        engine.clear_faults()
        if failure is not None:
            assert (kind, value) == ("errno", failure.errno)
            assert value in self.ERRORS
            assert str(failure).startswith(
                f"layers.7.w2 (nvme): p{'write' if is_write else 'read'} {file.path}+"
            )
            assert os.strerror(value) in str(failure)
            if is_write:  # some blocks were written, some not: make it known again
                engine.write(file, data, offset=begin).wait(WAIT_S)
                model[begin:end] = data.tobytes()
            return True
        # The operation has at least `num_blocks` blocks: the fault has hit one.
        assert not (kind == "errno" and value in self.ERRORS)
        if is_write:
            model[begin:end] = data.tobytes()
        else:
            assert data.tobytes() == model[begin:end]
        return False

    @staticmethod
    def _failure_of(ticket: AioTicket) -> AioError | None:
        try:
            ticket.wait(WAIT_S)
        except AioError as failure:
            return failure
        return None


# By one backend; the campaign takes all of them.
LARGE_BACKENDS = BACKENDS if IN_FULL else BACKENDS[:1]


@pytest.mark.slow
class TestMoreThanTwoGiB:
    """One operation past the 2**31 - 1 bytes that one system call moves, between odd places."""

    NUM_BYTES = 2 * GIB + 12_345
    OFFSET = 4099
    STEP = 1 << 20  # of the comparison: it stays in the cache

    @pytest.mark.parametrize("backend", LARGE_BACKENDS)
    def test_what_is_written_is_read(self, backend: str, tmp_path: Path) -> None:
        path = tmp_path / "large"
        pattern = np.random.default_rng(5).integers(0, 256, self.STEP + 3, np.uint8)
        memory = np.resize(pattern, self.NUM_BYTES)
        with make_engine(backend, block_size=8 << 20) as engine, engine.open(path, create=True) as file:
            engine.write(file, memory, offset=self.OFFSET).wait(WAIT_S)
            assert path.stat().st_size == self.OFFSET + self.NUM_BYTES
            # Places that are read and written alike elsewhere would be none to the engine: the kernel reads some.
            with path.open("rb") as plain:
                assert plain.read(self.OFFSET) == bytes(self.OFFSET)
                for mark in (0, 4095, GIB - 3, 2 * GIB - 4099, 2 * GIB - 1, 2 * GIB, self.NUM_BYTES - 9000):
                    plain.seek(self.OFFSET + mark)
                    assert plain.read(9000) == memory[mark : mark + 9000].tobytes()
            memory.fill(255)
            engine.read(file, memory, offset=self.OFFSET).wait(WAIT_S)
        for begin in range(0, self.NUM_BYTES, pattern.nbytes):
            part = memory[begin : begin + pattern.nbytes]
            assert np.array_equal(part, pattern[: part.nbytes])
        path.unlink()
