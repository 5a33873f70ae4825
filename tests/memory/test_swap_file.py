"""Swap files: nobody can plant one, none is left behind, and nobody else's is touched."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero.config import AioConfig
from offloadzero.errors import AioError
from offloadzero.memory import swap_file
from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.swap_file import MARK_BYTES, SwapFile, remove_stale_files
from tests.support.homes import file_home
from tests.support.tiny import make_engine, run_script, settings, start_script, train

NUM_KILLS = int(os.environ.get("OFFLOADZERO_TEST_KILLS", "12"))
NUM_FOREIGN_RUNS = int(os.environ.get("OFFLOADZERO_TEST_FOREIGN_RUNS", "40"))

real_open = os.open


def without_tmpfile(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
    """os.open on a filesystem that has no unnamed files."""
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return real_open(path, flags, *arguments, **options)


def without_link(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.fixture(params=["linked", "no O_TMPFILE", "no links"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a swap file comes to its name."""
    if request.param == "no O_TMPFILE":
        monkeypatch.setattr(os, "open", without_tmpfile)
    if request.param == "no links":
        monkeypatch.setattr(os, "link", without_link)


def leave(file: SwapFile) -> Path:
    """As a killed process does: the descriptor closes, the name stays."""
    os.close(file.descriptor)
    return file.path


@pytest.mark.usefixtures("way")
def test_a_swap_file_is_new_private_marked_and_locked(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        file = SwapFile(tmp_path)
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == [file.path.name]
    status = file.path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_nlink) == (0o600, os.geteuid(), 1)
    block = file.path.read_bytes()
    file_id = bytes.fromhex(file.path.stem.rpartition("-")[2])
    assert block == (b"offloadzero-swap" + file_id + b"\1\0\0\0").ljust(MARK_BYTES, b"\0")
    with file.path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not os.get_inheritable(file.descriptor)
    assert remove_stale_files(tmp_path) == []
    file.remove()
    file.remove()
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("way")
def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    living = SwapFile(tmp_path)
    left = [leave(SwapFile(tmp_path)) for _ in range(3)]
    left[0].write_bytes(left[0].read_bytes() + bytes(100_000))
    os.truncate(left[1], 0)  # killed before the mark was written, where a file cannot be made unnamed
    assert sorted(remove_stale_files(tmp_path)) == sorted(left)
    assert os.listdir(tmp_path) == [living.path.name]
    living.remove()


@pytest.mark.usefixtures("way")
def test_a_symlink_with_the_next_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if somebody could guess it."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("secrets.token_bytes", lambda count: bytes(range(count)))
    link = tmp_path / f"offloadzero-{os.getpid()}-{bytes(range(16)).hex()}.bin"
    for target in (victim, tmp_path / "missing"):
        link.symlink_to(target)
        with pytest.raises(AioError, match=rf"open {link}\+0x0, 0 bytes: File exists"):
            SwapFile(tmp_path)
        link.unlink()
    assert (victim.read_text(), os.listdir(tmp_path)) == ("mine", ["victim"])


def test_planted_links_and_files_are_left_alone_by_a_run(tmp_path: Path) -> None:
    """The names that could be guessed once: a run wrote its states through the link."""
    victim, directory = tmp_path / "victim", tmp_path / "nvme"
    victim.write_text("mine")
    directory.mkdir()
    names = [f"offloadzero-{os.getpid()}-{number}.bin" for number in range(50)]
    for name in names:
        (directory / name).symlink_to(victim)
        (directory / f".{name}.new").symlink_to(victim)
    planted = set(os.listdir(directory))
    engine = make_engine(settings(directory))
    losses = train(engine, num_steps=2)
    engine.close()
    assert victim.read_text() == "mine"
    assert set(os.listdir(directory)) == planted
    alone = make_engine(settings(placement="device"))
    assert losses == train(alone, num_steps=2)
    alone.close()


@pytest.mark.usefixtures("way")
def test_a_name_that_is_taken_away_does_no_harm(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    tier = NvmeTier([tmp_path], num_bytes=8192, aio=AioConfig())
    ((path, size),) = tier.files
    assert size == MARK_BYTES + 8192
    path.unlink()
    path.symlink_to(victim)
    data = torch.arange(8192, dtype=torch.int32).view(torch.uint8)[:8192]
    tier.write(file_home(tier, 0, 8192), data).wait()
    found = torch.zeros_like(data)
    tier.read(file_home(tier, 0, 8192), found).wait()
    assert torch.equal(found, data)
    tier.close()
    assert victim.read_text() == "mine"
    assert path.is_symlink(), "somebody else's link was removed"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("what", ["owner", "mode"])
def test_a_mount_that_gives_files_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    uid = os.geteuid()
    if what == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        words = f"belongs to user {uid} with mode 0600, not to user {uid + 1} alone"
    else:
        real = os.fchmod
        monkeypatch.setattr(os, "fchmod", lambda descriptor, _: real(descriptor, 0o644))
        words = f"belongs to user {uid} with mode 0644, not to user {uid} alone"
    with pytest.raises(AioError, match=rf"open {tmp_path}/offloadzero-\S+\.bin.*{words}"):
        SwapFile(tmp_path)
    assert os.listdir(tmp_path) == []


PEER = """
    import os, sys
    os.getpid = lambda: 7
    from tests.support.tiny import make_engine, settings, train
    engine = make_engine(settings(sys.argv[1]))
    print(engine.optimizer.runtime.store.nvme.files[0][0].stat().st_ino, flush=True)
    open(sys.argv[2]).read()
    print(train(engine, num_steps=3, first_seed=int(sys.argv[3])), flush=True)
    engine.close()
"""


def test_two_containers_with_one_process_number_do_not_share_a_file(tmp_path: Path) -> None:
    directory = tmp_path / "nvme"
    directory.mkdir()
    gates = {seed: tmp_path / f"gate{seed}" for seed in (0, 100)}
    for gate in gates.values():
        os.mkfifo(gate)
    peers = [start_script(PEER, directory, gate, seed) for seed, gate in gates.items()]
    try:
        lines = [peer.stdout.readline() for peer in peers if peer.stdout is not None]
        assert all(lines), [peer.communicate()[1] for peer in peers]
        assert len({*lines}) == len({*os.listdir(directory)}) == 2
        for gate in gates.values():  # both have their files: they go on together
            gate.write_text("go")
        outputs = [peer.communicate(timeout=60) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    for (stdout, stderr), seed in zip(outputs, gates, strict=True):
        alone = make_engine(settings(placement="device"))
        assert json.loads(stdout or "[]") == train(alone, num_steps=3, first_seed=seed), stderr
        alone.close()
    assert os.listdir(directory) == []


# --- files of others ---


def snapshot(directory: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for path in directory.iterdir():
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else None
        found[path.name] = (status.st_ino, status.st_mode, status.st_uid, status.st_mtime_ns, content, link)
    return found


def name_like_ours(rng: random.Random) -> str:
    number, token = rng.randrange(1, 99_999), rng.randbytes(16).hex()
    patterns = (
        "offloadzero-notes.bin",
        f"offloadzero-{number}-{rng.randrange(9)}.bin",
        f".offloadzero-{number}-{rng.randrange(9)}.bin.new",
        f"offloadzero-{number}-{token[:-1]}.bin",
        f"offloadzero-{number}-{token.upper()}.bin.bak",
        f"offloadzero-{number}-{token}.bin ",
        f"offloadzero-x{number}-{token}.bin",
        f"offloadzero-{number}-{token}.bin",
        f"offloadzero-{number}-{token}.bin",
    )
    return rng.choice(patterns)


def plant_foreign(directory: Path, rng: random.Random, left: Path) -> None:
    """One thing of somebody else's with a name like ours."""
    path = directory / name_like_ours(rng)
    is_full_name = swap_file._NAME.fullmatch(path.name) is not None
    mark = left.read_bytes()
    contents: list[bytes] = [b"notes", mark[:15], bytes(5000), rng.randbytes(64), b"offloadzero-swap", mark]
    if not is_full_name:
        contents.append(b"")
    makers: list[Callable[[], object]] = [
        lambda: path.write_bytes(rng.choice(contents)),
        lambda: path.write_bytes(rng.choice(contents)),
        lambda: path.symlink_to(left),
        lambda: path.symlink_to(directory / "nowhere"),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: bind(path),
    ]
    if os.geteuid() == 0:
        makers.append(lambda: (path.write_bytes(mark_of(path)), os.chown(path, 1234, 1234)))
        makers.append(lambda: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3)))
    if not os.path.lexists(path):
        rng.choice(makers)()


def mark_of(path: Path) -> bytes:
    """What would make the file ours, if its owner were we."""
    token = path.stem.rpartition("-")[2]
    return b"offloadzero-swap" + (bytes.fromhex(token) if len(token) == 32 else b"")


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def test_files_of_others_with_similar_names_stay(tmp_path: Path) -> None:
    """A user's offloadzero-notes.bin was removed, as every unlocked offloadzero-*.bin was."""
    for seed in range(NUM_FOREIGN_RUNS):
        rng = random.Random(seed)
        directory, elsewhere = tmp_path / f"run{seed}", tmp_path / f"elsewhere{seed}"
        directory.mkdir()
        elsewhere.mkdir()
        kept = leave(SwapFile(elsewhere))  # a stale one, which links point to
        for _ in range(12):
            plant_foreign(directory, rng, kept)
        foreign = snapshot(directory)
        left = leave(SwapFile(directory))
        assert remove_stale_files(directory) == [left], seed
        assert snapshot(directory) == foreign, seed
        assert kept.exists()


# --- killed at any instant ---

# The parent has loaded everything and has no threads; its children make files until they are killed.
KILL_CAMPAIGN = """
    import os, random, signal, sys, time
    from pathlib import Path
    from offloadzero.config import AioConfig
    from offloadzero.memory import nvme, swap_file

    directory, way, num_kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if way == "named":
        swap_file._make_linked = lambda *_: -1
    rng = random.Random(5)
    num_left = num_after = num_done = 0
    # On a busy machine most of them come before a file is there: some must not.
    while num_done < num_kills or (num_left == 0 and num_done < 20 * num_kills):
        num_done += 1
        child = os.fork()
        if child == 0:
            while True:
                nvme.NvmeTier([directory], num_bytes=1 << 20, aio=AioConfig()).close()
        time.sleep(rng.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        num_left += len(os.listdir(directory))
        nvme.NvmeTier([directory], num_bytes=4096, aio=AioConfig(backend="native_aio")).close()
        num_after += len(os.listdir(directory))
    print(num_left, num_after)
"""


@pytest.mark.parametrize("how", ["linked", "named"])
def test_nothing_is_left_after_the_start_that_follows_a_kill(tmp_path: Path, how: str) -> None:
    done = run_script(KILL_CAMPAIGN, tmp_path, how, NUM_KILLS, timeout_s=60 + NUM_KILLS)
    assert done.returncode == 0, done.stderr
    num_left, num_after = map(int, done.stdout.split())
    print(f"{how}: {NUM_KILLS} kills left {num_left} files, {num_after} after the next start")
    assert num_after == 0
    assert num_left > 0, "no kill hit"
