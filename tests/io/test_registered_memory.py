"""What the file engine has registered: how much, why not more, and that it is given back in time."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offloadzero
from offloadzero.config import AioConfig
from offloadzero.engine.lifetime import wait_for_collected
from offloadzero.errors import ConfigError
from offloadzero.io.engine import AioEngine
from offloadzero.memory.arena import Arena, allocate_host
from offloadzero.memory.device import CpuDevice
from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.store import _joined
from tests.support.homes import file_home
from tests.support.tiny import make_engine, run_script, settings, tokens, train

MIB = 1 << 20
BLOCK = 1 << 20


def pinned_bytes() -> int:
    """Pages of this process that the kernel has pinned for good."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPin"))


@pytest.fixture(autouse=True)
def nothing_ends_meanwhile() -> None:
    """What earlier tests have dropped is closed now, and not while this one counts."""
    gc.collect()
    wait_for_collected()


def uring_engine(**options: Any) -> AioEngine:
    try:
        engine = AioEngine(backend="io_uring", **options)
    except ConfigError as error:
        pytest.skip(str(error))
    if not engine.register_parts(bytearray(4096)):
        engine.close()
        pytest.skip(engine.buffers_reason)
    engine.close()
    return AioEngine(backend="io_uring", **options)


@contextlib.contextmanager
def forked_child() -> Iterator[None]:
    """A child that has all descriptors of this process, until the end of the block."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    try:
        yield
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


# --- the engine


@pytest.mark.parametrize("num_threads", [1, 3])
def test_close_unpins_even_while_a_forked_child_lives(num_threads: int) -> None:
    before = pinned_bytes()
    engine = uring_engine(num_threads=num_threads)
    memory = np.zeros(8 * MIB, np.uint8)
    assert engine.register_parts(memory) == memory.nbytes
    assert pinned_bytes() >= before + num_threads * memory.nbytes
    with forked_child():
        engine.close()
        assert pinned_bytes() == before
    assert engine.stats()["registered_bytes"] == 0


# Counted for a user of its own, to whose locked memory nobody else adds, and without CAP_IPC_LOCK.
LIMITED = """
    import ctypes, os, resource, struct, sys
    import numpy as np, offloadzero, torch
    from offloadzero.io.engine import AioEngine
    from tests.support.tiny import TinyModel, make_engine, settings, train

    directory, limit = sys.argv[1], int(sys.argv[2])
    configs = {
        name: offloadzero.load_config(settings(directory, aio={"backend": name}))
        for name in ("io_uring", "native_aio")
    }  # before: access(2) asks for the real user
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    if os.getuid() == 0:
        os.setresuid(200_000 + os.getpid(), 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("II", 0x20080522, 0), ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0
    words = list(struct.unpack("6I", data.raw))
    words[0] &= ~(1 << 14)
    assert libc.capset(header, struct.pack("6I", *words)) == 0
"""


def run_limited(script: str, folder: Path, limit: int) -> str:
    done = run_script(LIMITED + script, folder, limit, timeout_s=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_beyond_the_limit_is_registered_in_parts(tmp_path: Path) -> None:
    """And blocks inside them, across their borders and beyond them move the same bytes."""
    uring_engine().close()
    script = """
    import mmap, random
    memory = np.frombuffer(mmap.mmap(-1, 20 << 20), np.uint8)
    rng = random.Random(3)
    data = np.frombuffer(rng.randbytes(len(memory)), np.uint8)
    with AioEngine(backend="io_uring", block_size=1 << 20) as engine:
        done = engine.register_parts(memory)
        print(done, engine.stats()["registered_bytes"], engine.buffers_reason, sep=";")
        with engine.open(f"{directory}/data", create=True) as file:
            memory[:] = data
            engine.write(file, memory, offset=0).wait()
            print(engine.stats()["fixed"])
            for begin, size in [(0, len(memory)), (done - 4096, 8192), (done - (1 << 20), 3 << 20), (4095, 999)]:
                memory[:] = 0
                engine.read(file, memory[begin : begin + size], offset=begin).wait()
                assert (memory[begin : begin + size] == data[begin : begin + size]).all()
                assert not memory[:begin].any() and not memory[begin + size :].any()
        engine.unregister_buffer(memory)
        print(engine.stats()["registered_bytes"])
        assert engine.register_parts(memory) == done, "the limit has it back"
    with AioEngine(backend="io_uring") as engine:
        assert engine.register_parts(memory) == done, "close() has given it back"
    """
    first, fixed, last = run_limited(script, tmp_path, 8 * MIB).splitlines()
    done, registered, reason = first.split(";")
    assert 4 * MIB <= int(done) <= 8 * MIB
    assert done == registered
    assert reason == f"io_uring: ENOMEM (RLIMIT_MEMLOCK is {8 * MIB} bytes)"
    assert int(done) // BLOCK - 2 <= int(fixed) <= int(done) // BLOCK
    assert last == "0"


# --- depth and threads


def ring_sizes() -> list[int]:
    """Entries of each io_uring of this process."""
    sizes = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{number}") != "anon_inode:[io_uring]":
                continue
            (mask,) = re.findall(
                r"^SqMask:\s*(0x[0-9a-f]+)", Path(f"/proc/self/fdinfo/{number}").read_text(), re.M
            )
            sizes.append(int(mask, 16) + 1)
    return sizes


@pytest.mark.parametrize(("queue_depth", "num_threads"), [(1, 1), (31, 1), (7, 3), (63, 4)])
def test_the_configured_depth_is_of_each_thread(queue_depth: int, num_threads: int, tmp_path: Path) -> None:
    """A ring has an entry for each block and one to be woken by."""
    uring_engine().close()
    before = Counter(ring_sizes())
    aio = AioConfig(backend="io_uring", queue_depth=queue_depth, num_threads=num_threads)
    tier = NvmeTier([tmp_path], num_bytes=4096, aio=aio)
    try:
        assert Counter(ring_sizes()) - before == Counter({queue_depth + 1: num_threads})
    finally:
        tier.close()


@pytest.mark.parametrize("backend", ["io_uring", "aiofiles"])
def test_as_many_threads_as_the_configuration_allows(backend: str, tmp_path: Path) -> None:
    config = offloadzero.load_config(
        {"aio": {"intra_op_parallelism": 256, "queue_depth": 2}, "offloadzero": {"aio": {"backend": backend}}}
    )
    data = torch.arange(300 * 4096, dtype=torch.uint8)
    if backend == "io_uring":
        uring_engine().close()
    tier = NvmeTier([tmp_path], num_bytes=data.nbytes, aio=config.aio)
    try:
        home = file_home(tier, tier.allocate(data.dtype, data.numel(), "data").offset, data.nbytes)
        back = torch.zeros_like(data)
        tier.write(home, data).wait()
        tier.read(home, back).wait()
        assert torch.equal(back, data)
        num_threads = len(os.listdir("/proc/self/task"))
        assert num_threads > 256 or backend == "aiofiles"
    finally:
        tier.close()


def test_deeper_than_a_thread_goes() -> None:
    for num_threads in (1, 3):
        with pytest.raises(ConfigError, match=f"allowed: 1 to {4096 * num_threads}, 4096 for each thread"):
            AioEngine(queue_depth=4096 * num_threads + 1, num_threads=num_threads)
    with pytest.raises(ConfigError, match="allowed: 1 to 256"):
        AioEngine(num_threads=257)


# --- the store


def test_the_buffers_of_file_transfers_are_registered_and_used(tmp_path: Path) -> None:
    uring_engine().close()
    pinned = pinned_bytes()
    engine = make_engine(settings(tmp_path, aio={"backend": "io_uring"}))
    store = engine.optimizer.runtime.store
    train(engine, num_steps=2)
    engine.optimizer.runtime.synchronize()
    before = store.nvme.engine.stats()
    train(engine, num_steps=2)
    engine.optimizer.runtime.synchronize()
    after = store.nvme.engine.stats()
    moved = {key: after[key] - before[key] for key in after}
    assert moved["fixed"] >= moved["blocks"] - moved["bounced"] > 20
    lines = engine.optimizer.runtime.plan.lines
    staging = {"parameter staging", "update staging"}  # a passing gradient goes to no file here
    expected = sum(line.num_bytes for line in lines if line.what in staging)
    assert after["registered_bytes"] == expected
    assert f"; buffers registered ({expected:,} bytes)" in engine.memory_table()
    assert pinned_bytes() == pinned + expected
    engine.close()
    assert pinned_bytes() == pinned


def test_gradients_on_files_pass_through_registered_memory(tmp_path: Path) -> None:
    uring_engine().close()
    homes = dict.fromkeys(("param", "master", "exp_avg", "exp_avg_sq", "grad"), "nvme")
    config = settings(tmp_path, placement=homes, aio={"backend": "io_uring"}, gradient_clipping=1.0)
    engine = make_engine(config)
    train(engine, num_steps=1)
    lines = engine.optimizer.runtime.plan.lines
    staging = {"parameter staging", "update staging", "gradients in passing"}
    expected = sum(line.num_bytes for line in lines if line.what in staging)
    assert engine.optimizer.runtime.store.nvme.engine.stats()["registered_bytes"] == expected
    engine.close()


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "native_aio": ({"aio": {"backend": "native_aio"}}, "buffers not registered (native_aio has none)"),
    "aiofiles": ({"aio": {"backend": "aiofiles"}}, "buffers not registered (aiofiles has none)"),
    "not pinned": (
        {"zero_optimization": {"stage": 3, "cpu_offload_use_pin_memory": False}},
        "buffers not registered (pin_memory is false)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_why_nothing_is_registered(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys, expected = REFUSALS[case]
    reference = make_engine(settings(tmp_path))
    losses = train(reference, num_steps=3)
    reference.close()
    with caplog.at_level(logging.INFO, logger="offloadzero.nvme"):
        engine = make_engine(settings(tmp_path, **keys))
    assert train(engine, num_steps=3) == losses
    assert f"; {expected}" in engine.memory_table()
    assert engine.optimizer.runtime.store.nvme.engine.stats()["fixed"] == 0
    reason = expected.partition("(")[2].rstrip(")")
    assert any(
        record.getMessage().endswith(f"bytes of buffers registered: {reason}") for record in caplog.records
    )
    engine.close()


def test_training_beyond_the_limit(tmp_path: Path) -> None:
    """Registered as far as it goes, said so, and the same losses."""
    uring_engine().close()
    script = """
    for config in configs.values():
        torch.manual_seed(1)
        engine = make_engine(config, TinyModel(width=192))
        print(train(engine, num_steps=3))
        print(*[line for line in engine.memory_table().splitlines() if "file engine" in line])
        print(engine.optimizer.runtime.store.nvme.engine.stats()["fixed"])
        engine.close()
    """
    losses, line, num_fixed, *reference = run_limited(script, tmp_path, 4 * MIB).splitlines()
    assert losses == reference[0]
    assert " bytes of buffers registered (io_uring: ENOMEM (RLIMIT_MEMLOCK is 4194304 bytes))" in line
    assert int(num_fixed) > 0 == int(reference[2])


def test_unpinned_after_the_file_engine_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is page-locked for copies too: that ends last."""
    uring_engine().close()
    before = pinned_bytes()
    seen: list[int] = []
    monkeypatch.setattr(CpuDevice, "unpin", lambda _self, _buffer: seen.append(pinned_bytes()))
    engine = make_engine(settings(tmp_path, aio={"backend": "io_uring"}))
    train(engine, num_steps=1)
    assert pinned_bytes() > before
    with forked_child():
        engine.close()
    assert seen == [before]


def test_runs_of_leases() -> None:
    arena = Arena("test", allocate_host(10 * 4096))
    leases = [arena.lease(4096, str(index)) for index in range(6)]
    assert _joined([]) == []
    assert _joined([leases[4], leases[0], leases[1], leases[5]]) == [(0, 8192), (16384, 24576)]


# --- the inputs of checkpointed units


def on_files(tmp_path: Path) -> dict[str, Any]:
    return settings(
        tmp_path,
        placement="host",
        aio={"backend": "io_uring"},
        activation_checkpoints={"tier": "nvme"},
    )


def test_staging_of_inputs_is_registered_as_it_grows(tmp_path: Path) -> None:
    uring_engine().close()
    pinned = pinned_bytes()
    engine = make_engine(on_files(tmp_path))
    home: Any = None

    for batch in (2, 2, 5, 3):
        engine.backward(engine(tokens(0, batch=batch, length=65)))
        engine.step()
        home = engine.optimizer.runtime.activations._home
        staging = sum(buffer.nbytes for buffer in home.space._memory.buffers.values())
        assert home.space.files.engine.stats()["registered_bytes"] == staging > 0
        assert pinned_bytes() == pinned + staging
        assert f"buffers registered ({staging:,} bytes)" in engine.memory_table()
    assert home.space.files.engine.stats()["fixed"] > 0
    engine.close()
    assert pinned_bytes() == pinned


def test_staging_is_given_back_to_the_copies_after_the_file_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that makes room for a larger one is unregistered before it is unpinned."""
    uring_engine().close()

    def registered() -> int:
        files = engine.optimizer.runtime.activations._home.space.files
        return int(files.engine.stats()["registered_bytes"])

    seen: list[tuple[int, int]] = []

    def unpin(_self: CpuDevice, buffer: torch.Tensor) -> None:
        others = engine.optimizer.runtime.activations._home.space._memory.buffers.values()
        if any(buffer.data_ptr() == other.data_ptr() for other in others):
            raise AssertionError("still in use")
        seen.append((registered(), sum(other.nbytes for other in others)))

    engine = make_engine(on_files(tmp_path))
    monkeypatch.setattr(CpuDevice, "unpin", unpin)
    for batch in (2, 6):
        loss = engine(tokens(0, batch=batch, length=65))
        engine.backward(loss)
        engine.step()
    assert seen
    assert all(num_registered <= num_kept for num_registered, num_kept in seen)
    monkeypatch.undo()
    engine.close()
