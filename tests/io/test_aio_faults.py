"""Injected faults: an error ends its own operation only, short transfers continue, delays stall nobody."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from offloadzero.errors import AioError, ConfigError
from offloadzero.io.engine import AioEngine, AioFile
from tests.io.engines import BLOCK, aligned, random_bytes
from tests.support.cases import each_pair

WAIT_S = 30.0
LONG_MS = 3_600_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "states.bin"


@pytest.fixture
def file(shallow: AioEngine, path: Path) -> AioFile:
    path.write_bytes(random_bytes(16 * BLOCK, seed=9))
    return shallow.open(path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("nth", [1, 3, 8])
def test_an_error_names_everything(shallow: AioEngine, file: AioFile, code: int, nth: int) -> None:
    shallow.inject("errno", nth, code)
    ticket = shallow.write(file, aligned(bytes(8 * BLOCK)), offset=4 * BLOCK, label="layers.0.attn.wq")
    with pytest.raises(AioError) as caught:
        ticket.wait(WAIT_S)
    error = caught.value
    assert error.errno == code
    assert (error.label, error.operation, error.path) == ("layers.0.attn.wq", "pwrite", file.path)
    assert (error.offset, error.num_bytes) == (4 * BLOCK, 8 * BLOCK)
    assert ("at 0x" in str(error)) == (f"at {(4 + nth - 1) * BLOCK:#x}" in str(error)) == (nth > 1)


def test_an_error_cancels_the_rest_of_its_operation_only(
    shallow: AioEngine, file: AioFile, path: Path
) -> None:
    # The delay keeps block 2 in flight: the operation must not complete before it.
    shallow.inject("errno", 1, errno.EIO)
    shallow.inject("delay", 2, 150)
    failing = shallow.write(file, aligned(bytes(1000 * BLOCK)), offset=16 * BLOCK)
    data = random_bytes(4 * BLOCK + 5)
    other = shallow.write(file, data, offset=0)
    with pytest.raises(AioError):
        failing.wait(WAIT_S)
    other.wait(WAIT_S)
    assert path.read_bytes()[: len(data)] == data
    assert shallow.stats()["blocks"] < 100
    assert shallow.stats()["bytes_written"] == len(data)
    assert shallow.stats()["operations"] == 2


@pytest.mark.parametrize(
    ("num_short", "nth", "is_aligned"),
    each_pair([1, 511, 512, 4096, 5000, BLOCK - 1], [1, 2, 4], [True, False]),
)
def test_short_transfers_continue(
    shallow: AioEngine, file: AioFile, path: Path, num_short: int, nth: int, is_aligned: bool
) -> None:
    data = random_bytes(4 * BLOCK + (0 if is_aligned else 1001))
    offset = BLOCK if is_aligned else BLOCK - 7
    buffer = aligned(data) if is_aligned else data
    # Two in a row: the continuation of another block may be cut short too.
    shallow.inject("short", nth, num_short)
    shallow.inject("short", nth + 1, num_short)
    shallow.write(file, buffer, offset=offset).wait(WAIT_S)
    assert path.read_bytes()[offset : offset + len(data)] == data
    assert path.stat().st_size == 16 * BLOCK
    num_retries = shallow.stats()["retries"]
    assert num_retries >= 1
    shallow.inject("short", nth, num_short)
    back = aligned(bytes(len(data))) if is_aligned else np.zeros(len(data), np.uint8)
    shallow.read(file, back, offset=offset).wait(WAIT_S)
    assert back.tobytes() == data
    # Of an unaligned read's edge units fewer bytes may be needed than the fault lets through.
    assert not is_aligned or shallow.stats()["retries"] > num_retries


def test_a_read_that_stays_empty_is_the_end_of_the_file(shallow: AioEngine, file: AioFile) -> None:
    shallow.inject("short", 2, 0)
    with pytest.raises(AioError) as caught:
        shallow.read(file, aligned(bytes(4 * BLOCK)), offset=0).wait(WAIT_S)
    assert caught.value.errno == errno.ENODATA
    assert f"end of file at {BLOCK:#x}" in str(caught.value)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_retried(shallow: AioEngine, file: AioFile, path: Path, code: int) -> None:
    for nth in (1, 2, 3, 6):
        shallow.inject("errno", nth, code)
    data = random_bytes(6 * BLOCK)
    shallow.write(file, aligned(data), offset=0).wait(WAIT_S)
    assert path.read_bytes()[: len(data)] == data
    assert shallow.stats()["retries"] == 4
    assert shallow.stats()["blocks"] == 6


def test_a_delayed_block_stalls_no_other(shallow: AioEngine, file: AioFile, path: Path) -> None:
    shallow.inject("delay", 1, LONG_MS)
    late = shallow.write(file, aligned(b"l" * BLOCK), offset=0)
    others = [shallow.write(file, aligned(b"o" * BLOCK), offset=k * BLOCK) for k in range(1, 13)]
    for ticket in others:
        ticket.wait(WAIT_S)
    assert not late.done()
    with pytest.raises(TimeoutError):
        late.wait(0.01)
    # Its bytes are in the file; only the news is late, and close() does not wait for it.
    shallow.close(cancel=True)
    late.wait(0)
    assert path.read_bytes()[: 13 * BLOCK] == b"l" * BLOCK + b"o" * (12 * BLOCK)


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR])
def test_an_error_in_a_partial_write_frees_its_unit(
    shallow: AioEngine, file: AioFile, path: Path, code: int
) -> None:
    expected = bytearray(path.read_bytes())
    shallow.inject("errno", 1, code)
    shallow.inject("delay", 1, 50)  # the others queue up behind it
    first = shallow.write(file, b"1" * 10, offset=100)
    rest = [shallow.write(file, bytes([k]) * 10, offset=100 + 10 * k) for k in range(1, 20)]
    for k, ticket in enumerate(rest, start=1):
        ticket.wait(WAIT_S)
        expected[100 + 10 * k : 110 + 10 * k] = bytes([k]) * 10
    if code == errno.EINTR:
        first.wait(WAIT_S)
        expected[100:110] = b"1" * 10
    else:
        with pytest.raises(AioError):
            first.wait(WAIT_S)
    assert path.read_bytes() == expected


def test_faults_count_from_the_injection_and_can_be_cleared(shallow: AioEngine, file: AioFile) -> None:
    block = aligned(bytes(BLOCK))
    shallow.inject("errno", 2, errno.EIO)
    shallow.inject("errno", 3, errno.ENOSPC)
    shallow.write(file, block, offset=0).wait(WAIT_S)
    for code in (errno.EIO, errno.ENOSPC):
        with pytest.raises(AioError) as caught:
            shallow.write(file, block, offset=0).wait(WAIT_S)
        assert caught.value.errno == code
    shallow.inject("errno", 1, errno.EIO)
    shallow.clear_faults()
    shallow.write(file, block, offset=0).wait(WAIT_S)


def test_fault_arguments(shallow: AioEngine) -> None:
    for key, arguments in [("kind", ("slow", 1, 1)), ("nth", ("delay", 0, 1)), ("value", ("delay", 1, -1))]:
        with pytest.raises(ConfigError) as caught:
            shallow.inject(*arguments)
        assert caught.value.key == key
