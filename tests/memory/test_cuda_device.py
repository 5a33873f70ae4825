"""What the engine asks torch about a CUDA device, with an allocator and a driver of the test's."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadzero.access.gradient import GradientTensor
from offloadzero.access.tensor import RemoteTensor
from offloadzero.config import load_config
from offloadzero.core.torch_private import fake_tensor_mode
from offloadzero.engine import runtime
from offloadzero.engine.join import config_of_rank
from offloadzero.engine.lifetime import Resources, wait_for_collected
from offloadzero.memory.device import CudaDevice, StreamDevice
from tests.support.tiny import make_engine, settings, tokens

GIB = 1 << 30


def test_memory_that_the_allocator_keeps_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine has no room for the very arena that the one before it has given back."""
    asked: list[torch.device] = []
    stats: dict[str, int] = {}

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 30 * GIB, 139 * GIB

    def memory_stats(device: torch.device) -> dict[str, int]:
        asked.append(device)
        return stats

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    device = CudaDevice(torch.device("cuda", 1))
    assert device.free_bytes() == 30 * GIB  # torch has not begun to count
    assert set(asked) == {torch.device("cuda", 1)}
    stats |= {
        "reserved_bytes.all.current": 108 * GIB,
        "active_bytes.all.current": 5 * GIB,
        "inactive_split_bytes.all.current": 3 * GIB,  # beside tensors that live: nobody gets these
    }
    assert device.free_bytes() == 130 * GIB


@pytest.mark.parametrize("has_common_count", [True, False])
def test_the_free_memory_of_another_accelerator(
    has_common_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.8 and 2.9 have no torch.accelerator.get_memory_info: an engine on a GPU of Intel's could not be made."""

    def free_and_all(device: torch.device) -> tuple[int, int]:
        assert device == torch.device("xpu", 1)
        return 30 * GIB, 48 * GIB

    if has_common_count:
        monkeypatch.setattr(torch.accelerator, "get_memory_info", free_and_all, raising=False)
    else:
        monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
        monkeypatch.setattr(torch.xpu, "mem_get_info", free_and_all)
    assert StreamDevice(torch.device("xpu", 1)).free_bytes() == 30 * GIB


@pytest.mark.parametrize(("local_rank", "index"), [("2", 2), ("5", 1), ("", 3), (None, 3)])
def test_a_rank_without_a_launcher_computes_where_its_script_does(
    local_rank: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that a script has spawned were all on the first device, whatever each had made current."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    for name, found in {
        None: f"cuda:{index}",
        "cuda": f"cuda:{index}",
        "cuda:1": "cuda:1",
        "cpu": "cpu",
    }.items():
        config = replace(load_config({"train_batch_size": 4}, world_size=4), device=name)
        assert config_of_rank(config, 3, 4).device == found


class Elsewhere:
    """A value that a tensor on CUDA stands for; nobody reads it."""

    name, shape, dtype, device = "weight", torch.Size([4, 3]), torch.bfloat16, torch.device("cuda", 1)
    num_tensors = 0


@pytest.mark.parametrize("kind", [RemoteTensor, GradientTensor])
def test_what_stands_for_a_value_on_a_device_is_there_to_torch(kind: Any) -> None:
    """C++ compares the devices, and the backends that it takes them for, when a tensor becomes `param.grad`."""
    tensor = kind(Elsewhere())
    assert (tensor.device, tensor.get_device(), tensor.is_cuda) == (Elsewhere.device, 1, True)
    assert tensor.detach().device == Elsewhere.device
    with fake_tensor_mode():
        params = {
            device: nn.Parameter(torch.empty(4, 3, dtype=torch.bfloat16, device=device))
            for device in ("cuda:0", "cuda:1", "cpu")
        }
    params["cuda:1"].grad = tensor
    assert params["cuda:1"].grad is tensor
    for other in ("cuda:0", "cpu"):
        with pytest.raises(RuntimeError, match="device"):
            params[other].grad = tensor


def test_each_background_thread_is_on_the_engines_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread is on the first device, whatever the script's is."""
    begun: dict[str, torch.device] = {}

    def make_current(device: torch.device) -> None:
        begun[threading.current_thread().name] = device

    monkeypatch.setattr(runtime, "make_current", make_current)
    engine = make_engine(settings(tmp_path, placement="nvme", activation_checkpoints={"tier": "nvme"}))
    engine.backward(engine(tokens(0, batch=4, length=33)))
    engine.step()
    threads: list[Any] = engine.optimizer.runtime.failures.threads
    names = {each._thread.name for each in threads}
    engine.close()
    assert {"offloadzero-fetch", "offloadzero-stage", "offloadzero-landing", "offloadzero-update"} < names
    assert begun == dict.fromkeys(names, torch.device("cpu"))


def test_the_thread_that_closes_a_collected_engine_is_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for events of the engine's device, and each such look would make a context on the first one."""
    begun: set[int] = set()
    closed_on: list[int] = []
    close = Resources.close

    def make_current(_: torch.device) -> None:
        begun.add(threading.get_ident())

    def closing(resources: Resources, *, has_failed: bool = False) -> None:
        closed_on.append(threading.get_ident())
        assert closed_on[-1] in begun
        close(resources, has_failed=has_failed)

    monkeypatch.setattr(runtime, "make_current", make_current)
    engine = make_engine(settings(tmp_path, placement="host"))
    engine.synchronize()
    begun.clear()
    monkeypatch.setattr(Resources, "close", closing)
    del engine
    gc.collect()
    wait_for_collected()
    assert len(closed_on) == 1
    assert closed_on[0] in begun
