"""The end of a store, where one of its parts fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from offloadzero.config import AioConfig
from offloadzero.memory.device import CpuDevice
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.store import StoreSizes, TieredStore
from offloadzero.memory.tickets import Failures

STRIPE = 4 * 1024 * 1024


def test_a_device_that_fails_at_the_end_leaves_no_files_and_nothing_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of gigabytes would stay on the drives until the next start."""
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    store = TieredStore(
        Accelerator(CpuDevice()),
        sizes=StoreSizes(device=STRIPE, host=STRIPE, nvme=4 * STRIPE),
        nvme_paths=directories,
        aio=AioConfig(),
        failures=Failures(),
    )
    store.pin()
    assert len(list(tmp_path.glob("*/*"))) == 2
    unpinned: list[Any] = []

    with monkeypatch.context() as broken:
        broken.setattr(store.on_device, "close", _raiser("device-side assert triggered"))
        broken.setattr(store.accelerator, "unpin", unpinned.append)
        with pytest.raises(RuntimeError, match="device-side assert"):
            store.close()
    assert not list(tmp_path.glob("*/*"))
    assert [memory.data_ptr() for memory in unpinned] == [store.host.buffer.data_ptr()]
    store.close()


def test_a_store_that_cannot_be_made_ends_its_lanes_whatever_fails_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that fails at its end would leave the threads of the device's lanes for good."""
    monkeypatch.setattr("offloadzero.memory.store.HostTier", _raiser("no memory"))
    monkeypatch.setattr(NvmeTier, "close", _raiser("the drive is gone"))
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="the drive is gone") as raised:
        TieredStore(
            Accelerator(CpuDevice()),
            sizes=StoreSizes(device=STRIPE, host=STRIPE, nvme=STRIPE),
            nvme_paths=[tmp_path],
            aio=AioConfig(),
            failures=Failures(),
        )
    assert "no memory" in str(raised.value.__context__)
    assert set(threading.enumerate()) <= before


def _raiser(text: str) -> Any:
    def fail(*_: Any) -> None:
        raise RuntimeError(text)

    return fail
