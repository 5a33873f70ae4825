"""Saving all states of an offloaded model.

[Note: checkpoint format]
A checkpoint is a directory: `meta.json` (format, counters, the optimizer, param groups, schedules, the user's own
state), one `unit-NNNN.safetensors` per record, `buffers.safetensors`, and the modules' own states ([Note: extra
state]). A trainable parameter is stored as its fp32 master under its own name, with the optimizer's states as
`NAME.STATE` (for Adam `NAME.exp_avg` and `NAME.exp_avg_sq`); a frozen one in its dtype. Nothing depends on placement,
units, dtype or budgets, so a checkpoint loads into any of them.

Moments in the compact layout are stored as they are, as reading and rounding them again does not always give the same
bits: `NAME.exp_avg_e2m5`, `NAME.exp_avg_sq_e1m7` and `NAME.scales` (fp32, one row of two per block) in the place of
the two above. The names tell the meaning of the bytes (bits of exponent and mantissa), so that codes of another kind
are refused and not misread. The file's content decides how it is read: a run in either layout loads either, and with
the layout unchanged goes on bit by bit. From compact to fp32 the values are those of the codes, exactly; from fp32 to
compact they are rounded as [Note: compact state] in csrc/cpu_adam/cpu_adam.h says.

`manifest.json` lists the files with sizes and digests; `is_latest` is in the checkpoint that `latest` names ([Note: the
file latest]). [Note: how a checkpoint takes its name] is about its directory, [Note: what is checked at load] about the
checks before the first value is used.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from offloadzero.access.weight_access import WeightAccess
from offloadzero.checkpoint.format.manifest import FileEntry, HashingPool, encode_manifest, write_file
from offloadzero.checkpoint.format.meta import Meta, encode_meta
from offloadzero.checkpoint.format.names import (
    BUFFERS,
    EXTRA_STATE,
    IS_LATEST,
    MANIFEST,
    META,
    tag_problem,
    unit_file,
)
from offloadzero.checkpoint.format.safetensors_file import SafetensorsWriter, TensorSpec, expect_known_dtypes
from offloadzero.checkpoint.format.torch_file import TorchFileWriter
from offloadzero.checkpoint.latest import expect_latest_replaceable, point_latest_to
from offloadzero.checkpoint.module_states import expect_dense, persistent_buffers, read_extra_states
from offloadzero.checkpoint.partial import (
    PartialCheckpoint,
    alone_in,
    clear_leftovers,
    expect_replaceable,
    new_file,
)
from offloadzero.checkpoint.stored_states import read_states, state_names, state_specs
from offloadzero.core.interrupts import is_interrupt
from offloadzero.errors import CheckpointError, ConfigError, OffloadError
from offloadzero.memory.swap_file import sync_directory
from offloadzero.streaming.building.coded_parameters import is_coded
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


@dataclass(frozen=True)
class States:
    """The objects whose states a checkpoint holds."""

    model: nn.Module
    records: Sequence[Record]
    weights: WeightAccess
    optimizer: str  # the name of its spec


def expect_same_parameters(states: States, *, besides_frozen: bool = False) -> None:
    """Raise CheckpointError for parameters without states here; `besides_frozen`: frozen ones are allowed.

    They are compared by identity: another parameter may have taken the name of one that is offloaded.
    """
    names = {slot.name for record in states.records for slot in record.slots}
    known = {id(slot.param) for record in states.records for slot in record.slots}
    came_later = [
        f"{name} (another one was replaced by it)" if name in names else name
        for name, param in states.model.named_parameters(remove_duplicate=False)
        if id(param) not in known and (param.requires_grad or not besides_frozen)
    ]
    if came_later:
        raise CheckpointError(
            f"added to the model after its engine was made: {', '.join(came_later[:5])} ({len(came_later)} in all). A "
            "checkpoint would lack them: call restore_model(), which keeps the weights, change the model, and make a "
            "new engine"
        )


# --- saving ---


def _expect_storable(states: States, *, exclude_frozen: bool, else_save: str) -> None:
    """Raise CheckpointError for what the format cannot keep of the model; `else_save`: what saves the trained part."""
    coded = [slot.name for r in states.records for slot in r.slots if is_coded(slot.param)]
    if coded and not exclude_frozen:
        raise CheckpointError(
            f"{coded[0]} and {len(coded) - 1} more parameters are codes, which mean nothing without the scales that "
            f"their modules keep. The base is where it was loaded from: {else_save} saves what is trained"
        )
    frozen = [(s.name, r.dtype, s.shape) for r in states.records for s in r.slots if not s.trainable]
    expect_known_dtypes(frozen)
    expect_keepable(persistent_buffers(states.model))


def expect_keepable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError for a buffer, or another module's tensor, that a file cannot keep."""
    expect_dense(tensors)
    expect_known_dtypes([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])


def _expect_clear_names(states: States, *, exclude_frozen: bool) -> None:
    """Raise CheckpointError where one parameter has the name of another's state: none could be told from the other."""
    slots = [(r, s) for r in states.records for s in r.slots if s.trainable or not exclude_frozen]
    names = {slot.name for _, slot in slots}
    for record, slot in slots:
        for state in sorted(state_names(record.spec)):
            if (stored := f"{slot.name}.{state}") in names:
                raise CheckpointError(
                    f"{stored} is a parameter, and by its name a state of {slot.name}: a checkpoint cannot have both. "
                    "Rename one of the two parameters"
                )


def begin_save(
    states: States,
    directory: Path,
    *,
    tag: str,
    meta: Meta,
    save_latest: bool,
    exclude_frozen: bool,
    later: States | None = None,
) -> Callable[[], Path]:
    """Begin to write a checkpoint `directory`/`tag`: [Note: checkpoint format]. `meta` gets its steps and time here.

    Returns the call that ends it, once. It writes the records of `later`, on any thread; `states` has them, too.

    ConfigError for a tag that cannot be used and for values that JSON cannot keep; CheckpointError for a dtype that the
    format cannot keep, for parameters without states or with the name of another's, and where `tag` or `latest` exists
    and is not ours. Nothing has been written then.
    """
    problem = tag_problem(tag)
    if problem is not None:
        raise ConfigError("tag", tag, problem)
    extra = read_extra_states(states.model)
    meta = replace(meta, extra_states=extra.described)
    encode_meta(meta)
    expect_same_parameters(states, besides_frozen=exclude_frozen)
    _expect_clear_names(states, exclude_frozen=exclude_frozen)
    expect_keepable(extra.tensors)
    _expect_storable(
        states, exclude_frozen=exclude_frozen, else_save="save_checkpoint(exclude_frozen_parameters=True)"
    )
    nothing_saved = "nothing was saved, and what was there is as it was"
    with _named(directory, nothing_saved):
        end = _begin_write(
            states,
            directory,
            meta,
            extra.tensors,
            tag,
            later,
            save_latest=save_latest,
            exclude_frozen=exclude_frozen,
        )

    def finish() -> Path:
        final = directory / tag
        with _named(directory, nothing_saved):
            end()
        if save_latest:
            with _named(directory, f"{final} is saved, but the file 'latest' may not name it"):
                point_latest_to(directory, tag)
        return final

    return finish


@contextmanager
def _named(directory: Path, what_is_there: str) -> Iterator[None]:
    """Turn an error of the system into a CheckpointError with path, reason and the present state of the directory."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OffloadError) or is_interrupt(error):  # a TimeoutError of a handler, say
            raise
        reason = error.strerror or str(error)
        raise CheckpointError(f"{error.filename or directory}: {reason}: {what_is_there}") from error


def _begin_write(
    states: States,
    directory: Path,
    meta: Meta,
    extra_tensors: Mapping[str, torch.Tensor],
    tag: str,
    later: States | None,
    *,
    save_latest: bool,
    exclude_frozen: bool,
) -> Callable[[], None]:
    _make_directory(directory)
    final = directory / tag
    with alone_in(directory):
        clear_leftovers(directory)
        expect_replaceable(final)
        if save_latest:
            expect_latest_replaceable(directory)
        unfinished = PartialCheckpoint(directory, tag)
    with ExitStack() as files:
        partial, pool = files.enter_context(unfinished), files.enter_context(HashingPool())
        writer = CheckpointFiles(partial.path, pool)
        late = set() if later is None else {record.index for record in later.records}
        for record in states.records:
            if record.index not in late:
                writer.add_record(states, record, exclude_frozen=exclude_frozen)
        writer.add_tensors(BUFFERS, persistent_buffers(states.model))
        if extra_tensors:
            writer.add_tensors(EXTRA_STATE, extra_tensors)
        # Only now: reading the records has waited for their updates, which count the steps.
        excluded = [
            slot.name for r in states.records for slot in r.slots if exclude_frozen and not slot.trainable
        ]
        steps = {slot.name: slot.step for record in states.records for slot in record.trainable_slots}
        whole = replace(meta, steps=steps, excluded=excluded, saved_unix_ns=time.time_ns())
        kept = files.pop_all()

    def end() -> None:
        with kept:
            if later is not None:
                for record in later.records:
                    writer.add_record(later, record, exclude_frozen=exclude_frozen)
            writer.seal(whole)
            if save_latest or os.path.lexists(final / IS_LATEST):
                (partial.path / IS_LATEST).touch()
            partial.commit()

    return end


def _make_directory(directory: Path) -> None:
    existed = directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError("save_dir", str(directory), "must be a directory: there is a file") from error
    if not existed:
        sync_directory(directory.parent)


class CheckpointFiles:
    """Writes the files of one checkpoint into a directory; `files` becomes its manifest."""

    def __init__(self, path: Path, pool: HashingPool) -> None:
        self.files: dict[str, FileEntry] = {}
        self._path = path
        self._pool = pool

    @contextmanager
    def tensors(self, name: str, specs: Sequence[TensorSpec], **metadata: str) -> Iterator[SafetensorsWriter]:
        """The writer of a file of tensors, to which the block adds those of `specs`."""
        path, metadata = self._path / name, {"format": "pt", **metadata}
        with SafetensorsWriter(path, specs, metadata=metadata, pool=self._pool) as writer:
            yield writer
            self.files[name] = writer.close()

    def seal(self, meta: Meta) -> None:
        """Write meta.json and then the manifest of all files."""
        self.add_bytes(META, encode_meta(meta))
        self.add_bytes(MANIFEST, encode_manifest(self.files))

    def add_record(self, states: States, record: Record, *, exclude_frozen: bool) -> None:
        slots = [slot for slot in record.slots if slot.trainable or not exclude_frozen]
        specs = [spec for slot in slots for spec in _slot_specs(record, slot)]
        name = unit_file(record.index)
        with self.tensors(name, specs, unit=record.name) as writer:
            for slot in slots:
                for tensor in _read_slot(states, record, slot):
                    writer.add(tensor)

    def add_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        specs = [(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()]
        with self.tensors(name, specs) as writer:
            for tensor in tensors.values():
                writer.add(tensor.detach().to("cpu"))

    def add_bytes(self, name: str, data: bytes) -> None:
        self.files[name] = write_file(self._path / name, data, self._pool)


def _slot_specs(record: Record, slot: ParamSlot) -> list[TensorSpec]:
    if not slot.trainable:
        return [(slot.name, record.dtype, slot.shape)]
    states = state_specs(record.spec, record.codes, slot.shape)
    return [
        (slot.name, torch.float32, slot.shape),
        *((f"{slot.name}.{name}", dtype, shape) for name, dtype, shape in states),
    ]


def _read_slot(states: States, record: Record, slot: ParamSlot) -> Iterator[torch.Tensor]:
    """Yield the tensors of `_slot_specs`."""
    if not slot.trainable:
        yield states.weights.read(record, slot)
        return
    yield states.weights.read_master(record, slot)
    yield from read_states(states.weights, record, slot)


def save_weights(states: States, path: Path) -> None:
    """Write one file with every parameter in its own dtype, and the buffers.

    Safetensors, with tied ones once, if its name ends so; else the file that `torch.save()` makes of a state dict.
    CheckpointError for what the file cannot keep, for parameters without states, and where it cannot be made.
    """
    extra = read_extra_states(states.model).described
    if extra:
        warnings.warn(f"{path} is without {', '.join(extra)}: it holds weights only", stacklevel=3)
    expect_same_parameters(states)
    _expect_storable(states, exclude_frozen=False, else_save="PEFT's save_pretrained()")
    with _named(path.parent, "nothing was saved, and what was there is as it was"):
        _write_weights(states, path)


def _write_weights(states: States, path: Path) -> None:
    _make_directory(path.parent)
    with alone_in(path.parent):
        clear_leftovers(path.parent)
    buffers = persistent_buffers(states.model)
    specs = [(slot.name, record.dtype, slot.shape) for record in states.records for slot in record.slots]
    specs += [(name, buffer.dtype, buffer.shape) for name, buffer in buffers.items()]
    with (
        new_file(path) as partial,
        HashingPool() as pool,
        _weights_writer(states.model, path, partial, specs, pool) as writer,
    ):
        for record in states.records:
            for slot in record.slots:
                writer.add(states.weights.read(record, slot))
        for buffer in buffers.values():
            writer.add(buffer.detach().to("cpu"))
        writer.close()


def _weights_writer(
    model: nn.Module, path: Path, partial: Path, specs: Sequence[TensorSpec], pool: HashingPool
) -> SafetensorsWriter | TorchFileWriter:
    """Make the writer of `partial`, which will take the name `path`."""
    if path.suffix == ".safetensors":
        return SafetensorsWriter(partial, specs, metadata={"format": "pt"}, pool=pool, is_there=True)
    other_names = _other_names(model, {name for name, _, _ in specs})
    return TorchFileWriter(partial, specs, other_names=other_names, pool=pool, is_there=True)


def _other_names(model: nn.Module, written: Collection[str]) -> dict[str, list[str]]:
    """By a name that is written, the others under which `state_dict()` has the same tensor, or the same module's."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: Iterable[tuple[str, torch.Tensor]] = itertools.chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in own:
            if name not in module._non_persistent_buffers_set:
                names.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
    return {
        name: [other for other in alike if other not in written]
        for alike in names.values()
        for name in alike
        if name in written
    }
