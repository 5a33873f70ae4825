"""Saving and loading all states of an offloaded model (floor 5).

[Note: checkpoint format]
A checkpoint is a directory: `meta.json` (format, counters, param groups, schedules, the user's own state), one
`unit-NNNN.safetensors` per record, `buffers.safetensors`. A trainable parameter is stored as its fp32 master
under its own name, with `NAME.exp_avg` and `NAME.exp_avg_sq`; a frozen one in its dtype. Nothing depends on
placement, units, dtype or budgets, so a checkpoint loads into any of them.

Moments in the compact layout are stored as they are, for reading and rounding them again is not always the same
bits: `NAME.exp_avg_e2m5`, `NAME.exp_avg_sq_e1m7` and `NAME.scales` (fp32, one row of two per block) in the place of
the two above. The names say what the bytes mean (bits of exponent and mantissa), so that codes of another kind are
refused and not misread. What is in the file decides how it is read: a run in either layout loads either, and with the
layout unchanged goes on bit by bit. From compact to fp32 the values are those of the codes, exactly; from fp32 to
compact they are rounded as [Note: compact state] in csrc/cpu_adam/cpu_adam.h says.

It is written beside its final name and renamed when every file is on the disk: a crash at any instant leaves the
previous checkpoint whole. A checkpoint that is replaced keeps the suffix `.replaced` until its successor has
taken its name, and the reader knows that name too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadzero.checkpoint.safetensors_file import (
    CheckpointError,
    SafetensorsReader,
    SafetensorsWriter,
    TensorSpec,
)
from offloadzero.config import SegmentKind
from offloadzero.errors import ConfigError
from offloadzero.optim.records import ParamSlot, Record
from offloadzero.streaming.weights import WeightAccess, code_specs

FORMAT = "offloadzero-1"
LATEST = "latest"
_MOMENTS = (SegmentKind.EXP_AVG, SegmentKind.EXP_AVG_SQ)


@dataclass(frozen=True)
class States:
    """What a checkpoint covers."""

    model: nn.Module
    records: Sequence[Record]
    weights: WeightAccess


def _moment_specs(slot: ParamSlot, *, compact: bool) -> list[TensorSpec]:
    """What is stored of a parameter's moments."""
    if compact:
        return [(f"{slot.name}.{name}", dtype, shape) for name, _, dtype, shape in code_specs(slot)]
    return [(_moment_name(slot, kind), torch.float32, slot.shape) for kind in _MOMENTS]


def _moment_name(slot: ParamSlot, kind: SegmentKind) -> str:
    return f"{slot.name}.{kind.value}"


def _is_compact(slot: ParamSlot, names: Collection[str]) -> bool:
    """Whether a checkpoint with these names has the parameter's moments in the compact layout."""
    return f"{slot.name}.{SegmentKind.SCALES.value}" in names


def _file_name(record: Record) -> str:
    return f"unit-{record.index:04}.safetensors"


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers by name."""
    buffers: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{module_name}.{name}" if module_name else name] = buffer
    return buffers


# --- save ---


def save_states(
    states: States,
    directory: Path,
    *,
    tag: str,
    meta: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> Path:
    """Write a checkpoint `directory`/`tag`: [Note: checkpoint format]. `meta` must be JSON."""
    if not tag or "/" in tag or tag.startswith("."):
        raise ConfigError("tag", tag, "a name without '/' that does not begin with '.'")
    try:
        json.dumps(meta)
    except TypeError as error:
        raise ConfigError("client_state", type(meta).__name__, f"must be JSON: {error}") from error
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / tag
    partial = directory / f".{tag}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        for record in states.records:
            _save_record(states, record, partial / _file_name(record), exclude_frozen=exclude_frozen)
        buffers = _buffers(states.model)
        _save_tensors(partial / "buffers.safetensors", buffers)
        # Only now: reading the records has waited for their updates, which count the steps.
        whole = {**meta, "format": FORMAT, "steps": _steps(states.records)}
        _write_text(partial / "meta.json", json.dumps(whole, indent=1))
        _sync_directory(partial)
        _replace(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if save_latest:
        _write_text(directory / f"{LATEST}.partial", tag)
        (directory / f"{LATEST}.partial").rename(directory / LATEST)
        _sync_directory(directory)
    return final


def _steps(records: Sequence[Record]) -> dict[str, int]:
    return {slot.name: slot.step for record in records for slot in record.trainable_slots}


def _save_record(states: States, record: Record, path: Path, *, exclude_frozen: bool) -> None:
    slots = [slot for slot in record.slots if slot.trainable or not exclude_frozen]
    specs: list[TensorSpec] = []
    for slot in slots:
        specs.append((slot.name, torch.float32 if slot.trainable else record.dtype, slot.shape))
        if slot.trainable:
            specs += _moment_specs(slot, compact=record.compact)
    writer = SafetensorsWriter(path, specs, metadata={"format": "pt", "unit": record.name})
    for slot in slots:
        if slot.trainable:
            writer.add(states.weights.read_master(record, slot))
            for moment in _read_moments(states, record, slot):
                writer.add(moment)
        else:
            writer.add(states.weights.read(record, slot))
    writer.close()


def _read_moments(states: States, record: Record, slot: ParamSlot) -> Iterator[torch.Tensor]:
    """What `_moment_specs` names."""
    if record.compact:
        yield from states.weights.read_codes(record, slot).values()
    else:
        yield from (states.weights.read_state(record, slot, kind) for kind in _MOMENTS)


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    writer = SafetensorsWriter(path, specs, metadata={"format": "pt"})
    for tensor in tensors.values():
        writer.add(tensor.detach().to("cpu"))
    writer.close()


def save_weights(states: States, path: Path) -> None:
    """One safetensors file with every parameter in its own dtype, and the buffers; tied ones once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffers = _buffers(states.model)
    specs = [(slot.name, record.dtype, slot.shape) for record in states.records for slot in record.slots]
    specs += [(name, buffer.dtype, buffer.shape) for name, buffer in buffers.items()]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        writer = SafetensorsWriter(partial, specs, metadata={"format": "pt"})
        for record in states.records:
            for slot in record.slots:
                writer.add(states.weights.read(record, slot))
        for buffer in buffers.values():
            writer.add(buffer.detach().to("cpu"))
        writer.close()
        partial.rename(path)
        _sync_directory(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replaced(final: Path) -> Path:
    return final.with_name(f"{final.name}.replaced")


def _replace(partial: Path, final: Path) -> None:
    old = _replaced(final)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    _sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


# --- load ---


def find_checkpoint(directory: Path, tag: str | None) -> Path | None:
    """The checkpoint of `tag`, or of the file `latest`; None when there is neither."""
    if tag is None:
        latest = directory / LATEST
        if not latest.exists():
            return None
        tag = latest.read_text().strip()
    for path in (directory / tag, _replaced(directory / tag)):
        if (path / "meta.json").exists():
            return path
    return None


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint; raises CheckpointError for another format."""
    meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {meta.get('format')!r} instead of {FORMAT!r}")
    return meta


def load_states(states: States, path: Path, *, strict: bool, load_optimizer_states: bool) -> None:
    """Write a checkpoint's values to the homes. All names and shapes are checked before the first is written."""
    meta = read_meta(path)
    files: dict[str, Path] = {}
    for file in sorted(path.glob("unit-*.safetensors")):
        with SafetensorsReader(file) as reader:
            files.update(dict.fromkeys(reader.names(), file))
    _check_names(states, files, path, strict=strict, with_moments=load_optimizer_states)
    for record in states.records:
        for slot in record.slots:
            if slot.name in files:
                _load_slot(states, record, slot, files, with_moments=load_optimizer_states)
                if load_optimizer_states and slot.trainable:
                    slot.step = int(meta["steps"][slot.name])
    _load_buffers(states.model, path)


def _check_names(
    states: States, files: Mapping[str, Path], path: Path, *, strict: bool, with_moments: bool
) -> None:
    known = {slot.name for record in states.records for slot in record.slots}
    moments, frozen_moments = (
        {
            name
            for record in states.records
            for slot in record.slots
            if slot.trainable is trainable
            for name, _, _ in _moment_specs(slot, compact=_is_compact(slot, files))
        }
        for trainable in (True, False)
    )
    wanted = known | (moments if with_moments else set())
    missing = sorted(wanted - set(files))
    foreign = sorted(set(files) - known - moments - frozen_moments)  # what trained once may be frozen here
    if strict and (missing or foreign):
        raise CheckpointError(
            f"{path}: missing {', '.join(missing[:5]) or 'nothing'}; not in the model: "
            f"{', '.join(foreign[:5]) or 'nothing'} ({len(missing)} and {len(foreign)} in all)"
        )


def _load_slot(
    states: States, record: Record, slot: ParamSlot, files: Mapping[str, Path], *, with_moments: bool
) -> None:
    with SafetensorsReader(files[slot.name]) as reader:
        value = reader.read(slot.name)
        if value.shape != slot.shape:
            raise CheckpointError(
                f"{files[slot.name]}: {slot.name} is {tuple(value.shape)}, in the model {tuple(slot.shape)}"
            )
        states.weights.write(record, slot, value)
        if not with_moments or not slot.trainable:
            return
        if _is_compact(slot, files):
            names = [name for name, _, _, _ in code_specs(slot)]
            codes = {name: reader.read(f"{slot.name}.{name}") for name in names}
            states.weights.write_codes(record, slot, codes)
        else:
            for kind in _MOMENTS:
                states.weights.write_state(record, slot, kind, reader.read(_moment_name(slot, kind)))


def _load_buffers(model: nn.Module, path: Path) -> None:
    buffers = _buffers(model)
    with SafetensorsReader(path / "buffers.safetensors") as reader:
        for name in reader.names():
            if name in buffers:
                buffers[name].copy_(reader.read(name))
