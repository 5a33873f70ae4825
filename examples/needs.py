"""The bytes of each tier for training a Llama, before a weight is made: the engine's own plan of its memory."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from llama_model import Block, Llama, LlamaSize
from torch import Tensor

from offloadzero.config import OffloadConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import BudgetError
from offloadzero.memory.device import find_device
from offloadzero.memory.swap_file import remove_stale_files
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.engine_plan import DTYPES, plan_records
from offloadzero.planning.hardware import drive_bytes
from offloadzero.planning.machine import available_host_bytes, host_bytes_before
from offloadzero.planning.memory_plan import (
    MemoryPlan,
    nvme_bytes_with_waiting,
    waits_on_nvme,
)
from offloadzero.streaming.building.units import checkpointed_modules, cut_units
from offloadzero.update.records import Record
from offloadzero.update.spec import device_form
from offloadzero.update.specs import spec_of_type

INITIAL_DTYPE = torch.float32  # the dtype of values that wait under zero.Init
SMALLER = {"3B": 3_000_000_000, "300M": 300_000_000, "20M": 20_000_000}  # what --parameters may be instead


@dataclass(frozen=True)
class Needs:
    """The bytes that training takes. Those outside of the plan are estimates, and marked as such."""

    num_params: int
    plan: MemoryPlan
    device_is_host: bool  # the CPU is the device: its memory is the host's
    beside_bytes: int  # on the device, beside the plan: a block's gradients and activations, inputs of blocks
    interpreter_bytes: int  # of host memory
    swap_bytes: int  # the most bytes on the drive, also while the model is built
    checkpoint_bytes: int

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory, all together."""
        own = self.plan.tier_bytes(TierName.HOST) + self.interpreter_bytes
        return own + (self.device_bytes if self.device_is_host else 0)

    @property
    def device_bytes(self) -> int:
        """The bytes of the device's memory."""
        return self.plan.tier_bytes(TierName.DEVICE) + self.beside_bytes

    def table(self) -> str:
        """Return a table."""
        beside = "one block's gradients and activations, and the inputs of all (estimated)"
        lines = [
            f"{self.num_params:,} parameters",
            self.plan.table(),
            f"beside the plan: {format_bytes(self.beside_bytes)} of the device for {beside}, "
            f"{format_bytes(self.interpreter_bytes)} of the host for Python and torch",
            f"resident set: about {format_bytes(self.host_bytes)}",
            f"disk: {self.swap_bytes:,} bytes of swap files; each checkpoint {self.checkpoint_bytes:,} bytes more",
        ]
        return "\n".join(lines)


def find_needs(size: LlamaSize, config: OffloadConfig, *, batch_size: int, seq_len: int) -> Needs:
    """Cut and place a model without memory as the engine will cut and place the real one."""
    if config.optimizer is None:
        raise BudgetError("the configuration names no optimizer: there is nothing to plan for")
    with torch.device("meta"):
        model = Llama(size)
    device = find_device(config.device)
    spec = spec_of_type(config.optimizer.type)
    param_dtype = DTYPES[config.precision.param_dtype]
    cut = cut_units(
        model,
        config.units,
        group_of={id(param): 0 for param in model.parameters()},
        param_dtype=param_dtype,
        spec=spec,
        compact=config.state_layout == "compact",
    )
    num_checkpointed = len(checkpointed_modules(model, cut, config))
    free_bytes = device.free_bytes()
    available = {TierName.HOST: available_host_bytes()}
    if free_bytes is not None:
        available[TierName.DEVICE] = free_bytes
    on_drives = drive_bytes(config.nvme_paths)
    if on_drives is not None:  # second places of states are taken where there is room
        available[TierName.NVME] = on_drives
    plan = plan_records(
        cut.records,
        config,
        together=cut.together,
        available=available,
        form=device_form(spec, device.torch_device),
        num_checkpointed=num_checkpointed,
    )
    num_tokens = batch_size * seq_len
    dtype = param_dtype or INITIAL_DTYPE
    return Needs(
        num_params=sum(param.numel() for param in model.parameters()),
        plan=plan,
        device_is_host=free_bytes is None,
        beside_bytes=max(record.param_bytes for record in cut.records)
        + activation_bytes(size, dtype, batch_size=batch_size, seq_len=seq_len)
        + size.num_layers * num_tokens * size.width * dtype.itemsize,
        interpreter_bytes=resident_bytes(),
        swap_bytes=nvme_bytes_with_waiting(cut.records, plan, config)
        if waits_on_nvme(config)
        else plan.tier_bytes(TierName.NVME),
        checkpoint_bytes=sum(map(_checkpoint_bytes, cut.records)),
    )


def _checkpoint_bytes(record: Record) -> int:
    """Return the bytes of one record in a checkpoint: fp32 masters, and the states as they are."""
    states = (
        dtype.itemsize * num_elements
        for kind, (dtype, num_elements) in record.layout.items()
        if kind not in (SegmentKind.PARAM, SegmentKind.MASTER)
    )
    return record.num_trainable * torch.float32.itemsize + sum(states)


def activation_bytes(size: LlamaSize, dtype: torch.dtype, *, batch_size: int, seq_len: int) -> int:
    """Return the bytes that one block's forward keeps for its backward."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.device("meta"):
        block = Block(size).to(dtype)
        x = torch.empty(batch_size, seq_len, size.width, dtype=dtype, requires_grad=True)
        angles = torch.empty(seq_len, size.width // size.num_heads // 2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(x, angles)  # keeps packed tensors alive: no storage is counted for another
    of_weights = {param.untyped_storage()._cdata for param in block.parameters()}
    del out
    return sum(num_bytes for storage, num_bytes in kept.items() if storage not in of_weights)


def check(needs: Needs, config: OffloadConfig, *, save: Path | None) -> None:
    """Raise BudgetError with the figures, where host memory, device memory or a disk has not enough."""
    short = []
    available = host_bytes_before()
    if needs.host_bytes > available:
        short.append(
            f"host memory: about {format_bytes(needs.host_bytes)} are needed, {format_bytes(available)} are available"
        )
    free_bytes = find_device(config.device).free_bytes()
    if free_bytes is not None and needs.device_bytes > free_bytes:
        short.append(
            f"device memory: about {format_bytes(needs.device_bytes)} are needed, {format_bytes(free_bytes)} are free"
        )
    short += _short_disks(needs, config.nvme_paths, save)
    if short:
        raise BudgetError("\n".join([*short, _smaller(needs.num_params)]))


def _smaller(num_params: int) -> str:
    """Say how to train less: the size that is named is less than half of the one that is refused."""
    smaller = next((name for name, count in SMALLER.items() if 2 * count < num_params), None)
    return (
        "a smaller model, or a shorter --seq-len"
        if smaller is None
        else f"a smaller model: --parameters {smaller}, say"
    )


def _short_disks(needs: Needs, swap_paths: tuple[Path, ...], save: Path | None) -> list[str]:
    """Return the disks that lack space. Files of killed runs are removed first, as the engine does at its start."""
    wanted: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    places: dict[int, Path] = {}

    def want(path: Path, num_bytes: int, what: str) -> None:
        place = existing(path)
        drive = os.stat(place).st_dev
        wanted[drive] += num_bytes
        parts.setdefault(drive, []).append(f"{num_bytes:,} for {what}")
        places[drive] = place

    if needs.swap_bytes:
        for path in swap_paths:
            remove_stale_files(path)
            want(path, needs.swap_bytes // len(swap_paths), "the swap file")
    if save is not None:
        want(save, needs.checkpoint_bytes, "a checkpoint")
    short = []
    for drive, num_bytes in wanted.items():
        status = os.statvfs(places[drive])
        free = status.f_bavail * status.f_frsize
        if num_bytes > free:
            short.append(
                f"disk of {places[drive]}: {num_bytes:,} bytes are needed ({', '.join(parts[drive])}), {free:,} are "
                f"free, {num_bytes - free:,} short"
            )
    return short


def existing(path: Path) -> Path:
    """Return the path itself, or the directory in which it would be made."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def resident_bytes(key: str = "VmRSS") -> int:
    """Return the resident bytes of this process; `VmHWM` is its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
