"""Checksums of swap files: damage is found and named, and nothing that is whole is called damaged."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offloadzero.config import AioConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import AioError
from offloadzero.io import _aio
from offloadzero.memory.checksums import BLOCK_BYTES, checksum_bytes
from offloadzero.memory.nvme import STRIPE_BYTES, NvmeTier
from offloadzero.memory.swap_file import MARK_BYTES
from offloadzero.memory.tickets import Ticket
from offloadzero.memory.tiers import Extent, Home
from tests.support.faults import begun_later, replaced
from tests.support.homes import file_home
from tests.support.tiny import TinyModel, make_engine, settings, tokens, train

NUM_DAMAGES = int(os.environ.get("OFFLOADZERO_TEST_FLIPS", "60"))
NUM_BYTES = 20 * BLOCK_BYTES

# --- the sum itself ---


def crc32c_bit_by_bit(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def sums_of(data: bytes, block_size: int, *, with_tables: bool) -> list[int]:
    array = np.frombuffer(bytearray(data) or bytearray(1), dtype=np.uint8)
    sums = np.zeros(-(-len(data) // block_size), dtype=np.uint32)
    _aio.crc32c_blocks(array.ctypes.data, len(data), block_size, sums.ctypes.data, with_tables)
    if len(sums) and not with_tables:
        check = (array.ctypes.data, len(data), block_size, sums.ctypes.data)
        assert _aio.crc32c_find_mismatch(*check) == -1
        at = random.Random(len(data)).randrange(len(sums))
        sums[at] ^= 1
        assert _aio.crc32c_find_mismatch(*check) == at
        sums[at] ^= 1
    return sums.tolist()


@pytest.mark.parametrize("with_tables", [False, True])
def test_the_sums_are_those_of_the_standard(with_tables: bool) -> None:
    """RFC 3720, B.4, and the bit-by-bit definition."""
    known = {
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
        b"123456789": 0xE3069283,
    }
    for data, crc in known.items():
        assert sums_of(data, 4096, with_tables=with_tables) == [crc]
    rng = random.Random(1)
    for num_bytes in (0, 1, 7, 8, 9, 199, 1000, 1024, 1999):
        for block_size in (1, 3, 8, 64, 199, 1000):
            data = rng.randbytes(num_bytes)
            blocks = [data[i : i + block_size] for i in range(0, num_bytes, block_size)]
            found = sums_of(data, block_size, with_tables=with_tables)
            assert found == [crc32c_bit_by_bit(block) for block in blocks]


# --- the tier ---


@pytest.fixture(params=[1, 2])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NvmeTier]:
    directories = [tmp_path / str(i) for i in range(request.param)]
    for directory in directories:
        directory.mkdir()
    tier = NvmeTier(directories, num_bytes=NUM_BYTES, aio=AioConfig(checksums=True))
    yield tier
    tier.close()


def home(tier: NvmeTier, offset: int = 0) -> Home:
    """NUM_BYTES of the files."""
    return file_home(tier, offset, NUM_BYTES, label="blocks.1.exp_avg")


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def write(tier: NvmeTier, at: int, data: bytes) -> Ticket:
    return tier.write(home(tier), tensor(data), start=at)


def read(tier: NvmeTier, at: int, num_bytes: int) -> bytes:
    target = torch.full((num_bytes,), 0xAA, dtype=torch.uint8)
    tier.read(home(tier), target, start=at).wait()
    return target.numpy().tobytes()


def flip(tier: NvmeTier, byte: int, bit: int = 0) -> None:
    """Of the tier's space, which all lies in the first stripe, hence the first file."""
    assert NUM_BYTES < STRIPE_BYTES
    descriptor = os.open(tier.files[0][0], os.O_RDWR)
    (value,) = os.pread(descriptor, 1, MARK_BYTES + byte)
    os.pwrite(descriptor, bytes([value ^ 1 << bit]), MARK_BYTES + byte)
    os.fdatasync(descriptor)
    os.close(descriptor)


def ranges(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Disjoint ranges, in any order, that begin and end anywhere; many share a block."""
    cuts = sorted(rng.sample(range(NUM_BYTES + 1), 2 * count))
    cuts = sorted(round(cut / BLOCK_BYTES) * BLOCK_BYTES if rng.random() < 0.3 else cut for cut in cuts)
    pairs = [(begin, end) for begin, end in itertools.pairwise(cuts) if begin < end]
    rng.shuffle(pairs)
    return pairs[:count]


def test_what_is_whole_is_never_called_damaged(tier: NvmeTier) -> None:
    """Reads and writes of disjoint ranges in flight together, many in one block, against a plain array."""
    for seed in range(40):
        rng = random.Random(seed)
        if seed == 0:
            model = bytearray(NUM_BYTES)
        targets: list[tuple[int, torch.Tensor]] = []
        tickets = []
        written: list[tuple[int, bytes]] = []
        for begin, end in ranges(rng, rng.randrange(1, 12)):
            if rng.random() < 0.5:
                written.append((begin, rng.randbytes(end - begin)))
                tickets.append(write(tier, *written[-1]))
            else:
                targets.append((begin, torch.zeros(end - begin, dtype=torch.uint8)))
                tickets.append(tier.read(home(tier), targets[-1][1], start=begin))
        rng.shuffle(tickets)
        for ticket in tickets:
            ticket.wait()
            assert ticket.done()
            ticket.wait()
        for begin, target in targets:
            assert target.numpy().tobytes() == bytes(model[begin : begin + target.numel()]), seed
        for begin, data in written:
            model[begin : begin + len(data)] = data
    assert read(tier, 0, NUM_BYTES) == bytes(model)


def test_every_flipped_bit_that_is_read_is_found_and_no_other(tier: NvmeTier) -> None:
    rng = random.Random(3)
    covered = [0] * (NUM_BYTES // BLOCK_BYTES)  # by block: where the last write into it ended
    for begin, end in ranges(rng, 8):
        write(tier, begin, rng.randbytes(end - begin)).wait()
        for at in range(begin, end):
            covered[at // BLOCK_BYTES] = max(covered[at // BLOCK_BYTES], at % BLOCK_BYTES + 1)
    assert any(0 < count < BLOCK_BYTES for count in covered)
    assert 0 in covered
    path = tier.files[0][0]
    for _ in range(NUM_DAMAGES):
        block, bit = rng.randrange(NUM_BYTES // BLOCK_BYTES), rng.randrange(8)
        byte = block * BLOCK_BYTES + rng.randrange(covered[block] or BLOCK_BYTES)
        begin = rng.randrange(max(0, byte - 2 * BLOCK_BYTES), byte + 1)
        end = rng.randrange(byte + 1, min(NUM_BYTES, byte + 2 * BLOCK_BYTES) + 1)
        good = read(tier, begin, end - begin)
        flip(tier, byte, bit)
        with pytest.raises(AioError) as caught:
            read(tier, begin, end - begin)
        assert caught.value.errno == errno.EBADMSG
        place = f"{path}+{MARK_BYTES + block * BLOCK_BYTES:#x}, "
        assert str(caught.value).startswith(f"blocks.1.exp_avg (nvme): pread {place}")
        assert "the file does not hold what was written: CRC-32C 0x" in str(caught.value)
        if block:
            read(tier, 0, block * BLOCK_BYTES)
        read(tier, (block + 1) * BLOCK_BYTES, NUM_BYTES - (block + 1) * BLOCK_BYTES)
        flip(tier, byte, bit)
        assert read(tier, begin, end - begin) == good


def test_a_write_of_a_part_does_not_hide_damage_of_the_rest(tier: NvmeTier) -> None:
    write(tier, 0, b"a" * BLOCK_BYTES).wait()
    flip(tier, 10)
    with pytest.raises(AioError, match="does not hold what was written"):
        write(tier, 100, b"b" * 50)
    flip(tier, 5 * BLOCK_BYTES + 10)  # never written: zeros
    with pytest.raises(AioError, match="does not hold what was written"):
        write(tier, 5 * BLOCK_BYTES + 100, b"b" * 50)
    write(tier, 0, b"c" * BLOCK_BYTES).wait()
    assert read(tier, 0, BLOCK_BYTES) == b"c" * BLOCK_BYTES


def test_what_the_file_held_before_is_found_too(tier: NvmeTier) -> None:
    """A write that is lost: the block is a good one, of an earlier write."""
    write(tier, 0, b"old!" * 2048).wait()
    descriptor = os.open(tier.files[0][0], os.O_RDWR)
    old = os.pread(descriptor, 8192, MARK_BYTES)
    write(tier, 0, b"new!" * 2048).wait()
    os.pwrite(descriptor, old[:BLOCK_BYTES], MARK_BYTES)
    os.fdatasync(descriptor)
    os.close(descriptor)
    with pytest.raises(AioError, match="does not hold what was written"):
        read(tier, 0, 8192)


def test_the_ticket_fails_again_for_who_waits_again(tier: NvmeTier) -> None:
    write(tier, 0, b"a" * 300).wait()
    flip(tier, 299)
    ticket = tier.read(home(tier), torch.zeros(300, dtype=torch.uint8))
    for _ in range(2):
        with pytest.raises(AioError, match=r"blocks\.1\.exp_avg \(nvme\)"):
            ticket.wait()


def test_an_extent_that_is_given_away_begins_anew(tier: NvmeTier) -> None:
    write(tier, 0, b"a" * 8192).wait()
    tier.forget(Extent(0, 8192))
    write(tier, 0, b"b" * 5000).wait()  # its tail is shorter than the old one, which nobody reads again
    assert read(tier, 0, 5000) == b"b" * 5000
    flip(tier, 4999)
    with pytest.raises(AioError, match="does not hold what was written"):
        read(tier, 0, 5000)


def test_the_space_grows(tier: NvmeTier) -> None:
    write(tier, 0, b"a" * NUM_BYTES).wait()
    tier.grow(2 * NUM_BYTES)
    more = home(tier, NUM_BYTES)
    data = tensor(random.Random(1).randbytes(NUM_BYTES - 5))
    tier.write(more, data).wait()
    target = torch.zeros_like(data)
    tier.read(more, target).wait()
    assert torch.equal(data, target)
    assert read(tier, 0, NUM_BYTES) == b"a" * NUM_BYTES


# --- whole engines ---


def test_training_is_the_same_and_the_plan_counts_them(tmp_path: Path) -> None:
    plain = make_engine(settings(tmp_path))
    reserved = plain.reserved_bytes()
    losses = train(plain, num_steps=4)
    plain.close()
    checked = make_engine(
        settings(tmp_path, aio={"checksums": True}, activation_checkpoints={"tier": "nvme"})
    )
    assert train(checked, num_steps=4) == losses
    assert "; checksums (" in checked.memory_table()
    assert "checksums of nvme" in checked.memory_table()
    checked.close()
    alone = make_engine(settings(tmp_path, aio={"checksums": True}))
    more = alone.reserved_bytes()["host"] - reserved["host"]
    assert more == checksum_bytes(reserved["nvme"])
    arena = alone.optimizer.runtime.store.host.buffer.numel()
    assert arena == reserved["host"], "they are beside the arena, not in it"
    alone.close()


@pytest.mark.parametrize("checksums", [True, False])
def test_a_bit_that_flips_between_steps_is_an_error_that_names_the_tensor(
    tmp_path: Path, checksums: bool
) -> None:
    engine = make_engine(settings(tmp_path, aio={"checksums": checksums}))
    train(engine, num_steps=2)
    engine.synchronize()
    store, record = engine.optimizer.runtime.store, engine.optimizer.runtime.records[1]
    segment = record.segments[SegmentKind("exp_avg")]
    assert segment.tier is TierName.NVME
    assert segment.extent is not None
    assert store.nvme is not None
    flip_at = segment.extent.offset + 4 * 7 + 3  # in the exponent of an element
    descriptor = os.open(store.nvme.files[0][0], os.O_RDWR)
    (value,) = os.pread(descriptor, 1, MARK_BYTES + flip_at)
    os.pwrite(descriptor, bytes([value ^ 0x01]), MARK_BYTES + flip_at)
    os.fdatasync(descriptor)
    os.close(descriptor)
    if checksums:
        with pytest.raises(AioError, match=rf"{segment.label} \(nvme\): pread \S+offloadzero-\S+\.bin\+0x"):
            train(engine, num_steps=2, first_seed=2)
        engine.close()
        return
    # Why there is the option: without it the run goes on, with other numbers.
    losses = train(engine, num_steps=4, first_seed=2)
    engine.close()
    whole = make_engine(settings(tmp_path))
    expected = train(whole, num_steps=6)[2:]
    whole.close()
    assert losses != expected


def late_reads() -> AbstractContextManager[None]:
    """What the update's thread reads it reads a while later than it asks for it."""

    def late(submit: Callable[..., Ticket], *arguments: Any, **options: Any) -> Ticket:
        begin = functools.partial(submit, *arguments, **options)
        is_update = threading.current_thread().name == "offloadzero-update"
        return begun_later(begin, 0.03) if is_update else begin()

    return replaced("nvme.read", late)


def test_weights_that_a_script_writes_while_their_states_are_read_ahead(tmp_path: Path) -> None:
    """What was read of a block that is written meanwhile is dropped, and is no damage."""

    def losses(placement: str) -> list[float]:
        own = {"placement": placement, "aio": {"checksums": True}, "gradient_clipping": 0.5}
        engine = make_engine(settings(tmp_path, **own), TinyModel(width=64, num_blocks=2))
        found = []
        for seed in range(3):
            loss = engine(tokens(seed))
            found.append(loss.item())
            engine.backward(loss)
            with torch.no_grad():
                for param in engine.module.parameters():
                    param.mul_(0.99)
            engine.step()
        engine.synchronize()
        engine.close()
        return found

    torch.manual_seed(0)
    expected = losses("device")
    torch.manual_seed(0)
    with late_reads():
        assert losses("nvme") == expected
