"""Parameters that left memory while their model was being built.

`zero.Init` hands large parameters over as soon as their module exists; the runtime takes them back one unit at a
time. They wait with all bits they were initialised with, so a model built under `Init` trains exactly as one that
was not; on NVMe each has a file of its own until then. Meanwhile such a parameter is one that is away: reads give its
value, writes arrive ([Note: a parameter away] in access/parameter.py), and it is trained or saved as any other.

[Note: one place at a time]
A parameter gets its weight object before its memory goes, and its memory before that object goes: an interrupt between
any two lines leaves it with its value.
"""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offloadzero.access.parameter import is_offloaded, offload_parameter, restore_parameter
from offloadzero.access.weight_value import Weight, weight_of
from offloadzero.core import interrupts
from offloadzero.core.fail_points import through
from offloadzero.core.interrupts import is_interrupt, uninterrupted_throughout
from offloadzero.core.torch_private import DisableTorchFunctionSubclass, set_data
from offloadzero.errors import AioError, StateError
from offloadzero.memory.arena import align_up
from offloadzero.memory.mapped_files import MappedFiles

if TYPE_CHECKING:  # it loads torch.distributed, which not every build of torch has
    from offloadzero.ranks.init_parts import ValueParts


class SpilledWeight(Weight):
    """The value of one parameter outside the module."""

    def __init__(
        self,
        param: nn.Parameter,
        value: torch.Tensor,
        *,
        name: str,
        directory: Path | None,
        parts: ValueParts | None = None,
        source: int = 0,
    ) -> None:
        """Keep `value` in host memory, or in an unnamed file in `directory`.

        With `parts` this rank's part is kept of the value that the rank at place `source` has. All ranks call this.
        """
        kept = value.detach().to("cpu")
        if parts is not None:
            kept = parts.divide(kept, source=source)
        super().__init__(name, value.shape, value.dtype, value.device)
        self.parts = parts
        self.directory = directory
        self._param = weakref.ref(param)
        self._num_writes = 0
        self._value: torch.Tensor | None = None
        self._file: _UnnamedFile | None = None
        if directory is None:
            self._value = kept
        else:
            self._file = _UnnamedFile(kept.contiguous(), directory, label=self.name)

    @property
    def host_bytes(self) -> int:
        """The bytes of the value in host memory; 0 when it is on a file."""
        return 0 if self._value is None else self._value.nbytes

    @property
    def drive(self) -> int | None:
        """`st_dev` of the value's file; None when it is in memory."""
        return None if self._file is None else self._file.drive

    @property
    def file_bytes(self) -> int:
        """The bytes of the value on the drive; 0 when it is in memory."""
        return 0 if self._file is None else align_up(self._kept_shape.numel() * self.dtype.itemsize)

    @property
    def members(self) -> Sequence[int] | None:
        """The ranks that have the value together, in the order of their parts; None: it is whole."""
        return None if self.parts is None else self.parts.ranks.members

    @property
    def _kept_shape(self) -> torch.Size:
        return self.shape if self.parts is None else self.parts.kept_shape(self.shape)

    @property
    def version(self) -> tuple[int, int]:
        """A number that changes with each write: a graph over a parameter that is away asks for it."""
        return 0, self._num_writes

    def read(self, *, to_write: bool = False) -> torch.Tensor:
        value = self._stored().to(self.device).contiguous()
        return value.clone() if to_write and self._file is None and self.parts is None else value

    @uninterrupted_throughout
    def write(self, value: torch.Tensor, *, source: int = 0) -> None:
        """Replace the value; one in parts by that of the rank at place `source`, and all ranks call this."""
        kept = value.detach()
        if self.parts is not None:
            self.parts.announce_write(source=source)
            kept = self.parts.divide(kept.to("cpu"), source=source)
        self._num_writes += 1
        if self._file is not None:
            self._file.write(kept.to("cpu").contiguous())
        else:
            self._kept().copy_(kept)

    @uninterrupted_throughout
    def assign(self, value: torch.Tensor) -> None:
        """Do `param.data = value`, of any shape, dtype and device, as for an ordinary parameter."""
        param = self._param()
        if param is None or value is param or self.is_assigned_itself(value):
            return
        self.expect_own(value)
        new = self._like(param, value.detach().clone())
        try:
            wear(param, new)
        except BaseException:  # torch refuses a dtype, say
            offload_parameter(param, self)
            new.drop()
            raise
        self.leave_alias()
        self.drop()

    def _like(self, param: nn.Parameter, value: torch.Tensor) -> SpilledWeight:
        """Make the weight of another value, which waits where this one does."""
        parts = None if self.parts is None else self.parts.of_another(value)
        return SpilledWeight(param, value, name=self.name, directory=self.directory, parts=parts)

    def give_back(self, param: nn.Parameter) -> None:
        """Let the parameter hold its value itself; remove the file, and give the drive its space back."""
        self.lend(param)
        self.drop()

    def bring_home(self, param: nn.Parameter) -> None:
        """Leave the drive, which gets its space back: `take` gets what is kept here from memory."""
        if self.parts is None:
            self.give_back(param)
            return
        file, self._value, self._file = self._file, self._kept(), None
        if file is not None:  # last: an interrupt may come with any call
            file.close()

    def take(self, param: nn.Parameter, channel: Any) -> torch.Tensor:
        """Return the value and give it up: a host tensor. The parameter is then an ordinary one without values.

        `channel`: of the engine that takes a value in parts, over the same ranks, which have found that they take the
        same; None: that of the block in which it was made.
        """
        if self.parts is None:
            self.give_back(param)
            return param.detach().to("cpu")
        value = self.parts.gather(self._kept(), self.shape, channel)
        restore_parameter(param)
        placeholder = torch.full((), float("nan"), device="cpu").to(self.dtype)
        set_data(param, placeholder.to(self.device).expand(self.shape))
        self.drop()
        return value

    def lend(self, param: nn.Parameter) -> None:
        """Let the parameter hold its value itself, and keep it here, too."""
        value = self._stored()
        with DisableTorchFunctionSubclass():
            set_data(param, value.to(self.device))
        restore_parameter(param)

    def _stored(self) -> torch.Tensor:
        """Return the value in host memory; one in parts is gathered, as all ranks do here."""
        return self._kept() if self.parts is None else self.parts.read(self._kept(), self.shape)

    def _kept(self) -> torch.Tensor:
        """Return what is kept here, in host memory."""
        if self._file is not None:
            return self._file.read(self._kept_shape, self.dtype)
        if self._value is None:
            raise StateError(
                f"{self.name}: this tensor was taken before the model was offloaded, or before its parameter was "
                "released, and has no value any more: take it from the parameter again"
            )
        return self._value

    def drop(self) -> None:
        """Give the value up; the drive gets its space back."""
        file, self._file, self._value = self._file, None, None
        if file is not None:
            file.close()


class _UnnamedFile:
    """A file without a name: it is gone when its descriptor closes, however the process ends."""

    def __init__(self, value: torch.Tensor, directory: Path, *, label: str) -> None:
        self._label = label
        self._directory = directory
        with tempfile.TemporaryFile(dir=directory) as file:
            self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._pid = os.getpid()
        self.drive = os.fstat(self._descriptor).st_dev
        try:
            self.write(value)
        except BaseException:
            self._close()  # a full disk gets its space back
            raise

    def write(self, value: torch.Tensor) -> None:
        """Replace the contents by a contiguous host tensor's."""
        if os.getpid() != self._pid:
            raise StateError(f"{self._label}: its file is the parent's: a forked child cannot write it")
        view = _as_bytes(value)
        position = 0
        while position < len(view):
            try:
                write = through("spill.write", os.pwrite, self._label)
                position += write(self._descriptor, view[position:], position)
            except OSError as error:
                if is_interrupt(error):
                    raise
                raise self._error("write", position, len(view), error.errno or 0) from error
        # Written pages are sent on to the drive, so that they do not pile up in the page cache.
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a new host tensor of the contents."""
        target = torch.empty(shape, dtype=dtype, device="cpu")
        view = _as_bytes(target)
        position = 0
        while position < len(view):
            try:
                read = through("spill.read", os.preadv, self._label)
                count = read(self._descriptor, [view[position:]], position)
            except OSError as error:
                if is_interrupt(error):
                    raise
                raise self._error("read", position, len(view), error.errno or 0) from error
            if not count:
                raise self._error("read", position, len(view), 0, "the file ends here")
            position += count
        return target

    def close(self) -> None:
        """Close the file and give the drive its space back."""
        if os.getpid() == self._pid:  # else it is still the parent's
            os.ftruncate(self._descriptor, 0)  # closing alone frees the space some time later on XFS
        self._close()

    def _error(self, operation: str, offset: int, num_bytes: int, errno: int, detail: str = "") -> AioError:
        return AioError(
            operation=operation,
            path=f"{self._directory}/(unnamed)",
            offset=offset,
            num_bytes=num_bytes,
            errno=errno,
            label=self._label,
            detail=detail,
        )


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def wear(param: nn.Parameter, weight: SpilledWeight) -> None:
    """Let `weight` answer for the parameter, which itself holds one element in its shape."""
    interrupts.install()  # its writes are whole, also before there is an engine
    offload_parameter(param, weight)
    placeholder = torch.full((), float("nan"), device="cpu").to(weight.device, weight.dtype)
    with DisableTorchFunctionSubclass():
        set_data(param, placeholder.expand(weight.shape))


def can_spill(param: nn.Parameter) -> bool:
    """Whether the parameter has a value of its own in memory that may leave it."""
    has_no_shape: bool = is_lazy(param)
    return (
        not has_no_shape
        and isinstance(param, nn.Parameter)
        and not is_offloaded(param)
        and param.device.type != "meta"
    )


def spill(param: nn.Parameter, *, name: str, directory: Path | None) -> None:
    """Take the parameter's value out of its module: [Note: one place at a time]. `name` is for errors."""
    wear(param, SpilledWeight(param, param.data, name=name, directory=directory))


# Methods of transformers' models (5, 4.56) that put new values where the files have none.
MOVES_MISSING = ("_move_missing_keys_from_meta_to_device", "_move_missing_keys_from_meta_to_cpu")


def releasing_loaded(release: Callable[[nn.Module], None]) -> Callable[..., None]:
    """Make the `Module.register_parameter` that releases a value which takes the place of one on the meta device.

    So `from_pretrained` of transformers loads a model. What it maps takes no memory; what it merges or casts does.
    """
    register = nn.Module.register_parameter

    @functools.wraps(register)
    def registering(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        before = vars(module).get("_parameters", {}).get(name)
        register(module, name, param)
        if before is None or not before.is_meta or type(param) is not nn.Parameter or param.is_meta:
            return
        if MappedFiles().offset(param.data) is None:
            release(module)

    return registering


def releasing_in_order(
    move: Callable[..., None], release: Callable[[nn.Module], None]
) -> Callable[..., None]:
    """Make the one of `MOVES_MISSING` that releases them when all are there, in the order of the model's modules.

    They come in the order of a set of names, which is another one in each process, and ranks release together.
    """

    @functools.wraps(move)
    def moving(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        def on_meta(module: nn.Module) -> set[str]:
            return {name for name, param in module.named_parameters(recurse=False) if param.is_meta}

        before = {module: on_meta(module) for module in model.modules()}
        registering = nn.Module.register_parameter
        original = getattr(registering, "__wrapped__", registering)
        setattr(nn.Module, "register_parameter", original)  # noqa: B010
        try:
            move(model, *args, **kwargs)
        finally:
            setattr(nn.Module, "register_parameter", registering)  # noqa: B010
        for module, names in before.items():
            if names - on_meta(module):
                release(module)

    return moving


def all_subclasses(cls: type[nn.Module]) -> list[type[nn.Module]]:
    """Return the classes that are derived from it, whole generations first."""
    found: dict[type[nn.Module], None] = {}
    pending = [cls]
    while pending:
        for sub in pending.pop().__subclasses__():
            if sub not in found:
                found[sub] = None
                pending.append(sub)
    return list(found)


def spilled_weight(param: torch.Tensor) -> SpilledWeight | None:
    """Return the weight object of a spilled parameter; None if it is not spilled."""
    weight = weight_of(param) if is_offloaded(param) else None
    return weight if isinstance(weight, SpilledWeight) else None


def restore(param: nn.Parameter) -> SpilledWeight | None:
    """Put a spilled value back into the parameter; return its weight object, None if it was not spilled."""
    weight = spilled_weight(param)
    if weight is not None:
        weight.give_back(param)
    return weight


def bring_home(param: nn.Parameter) -> None:
    """Have the parameter's value, or this rank's part of it, in memory."""
    weight = spilled_weight(param)
    if weight is not None:
        weight.bring_home(param)


def take(param: nn.Parameter, channel: Any) -> torch.Tensor:
    """Return the parameter's value, a host tensor, which it may lose; one in parts is gathered over `channel`."""
    weight = spilled_weight(param)
    return param.detach().to("cpu") if weight is None else weight.take(param, channel)


def is_in_parts(param: nn.Parameter) -> bool:
    """Whether several ranks have the parameter's value together."""
    weight = spilled_weight(param)
    return weight is not None and weight.members is not None


def file_bytes(params: Iterable[nn.Parameter]) -> Counter[int]:
    """The bytes of the parameters' values on drives now, by `st_dev`."""
    found: Counter[int] = Counter()
    for param in params:
        weight = spilled_weight(param)
        if weight is not None and weight.drive is not None:
            found[weight.drive] += weight.file_bytes
    return found


def host_bytes(param: nn.Parameter, mapped: MappedFiles) -> int:
    """The bytes of host memory that the parameter's value takes now: those of a `mapped` file are the page cache's."""
    weight = spilled_weight(param)
    if weight is not None:
        return weight.host_bytes
    if param.device.type != "cpu" or mapped.offset(param.data) is not None:
        return 0
    return param.data.untyped_storage().nbytes()
