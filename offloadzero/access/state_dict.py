"""The tensors of state dicts: they stand for values that are read into host memory when their bytes are asked for.

[Note: state dicts]
A state dict of an ordinary model shares memory with its parameters: `model.state_dict()[name].mul_(2)` changes the
model, and a later step changes what the dict has. So it is here, for the weights of a model and for the states of an
optimizer, and a dict takes no memory: to filter it, rename in it or split it into files moves no byte. An operation
reads the value, as with any remote tensor ([Note: remote tensors]); a copy (`clone()`, `cpu()`, `copy.deepcopy`) is an
ordinary tensor. Who asks for an address (`data_ptr()`; writers of safetensors do) gets the value in memory that stays
as long as a tensor of the dict stands for it. `torch.save` reads one storage after the other while it writes them.

Where several ranks have a value in parts, all of them read it, while a script often has one rank alone write a file.
There the value is read when the dict is made, and stays what it was; its tensors are not written any more after an
update. Where the first rank reads and the others follow (agreement.py), it is as with one rank.

An engine that is closed leaves the values in memory to those who still hold tensors of a dict, and one that nobody
holds but such a tensor is not collected.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage

from offloadzero.access.tensor import RemoteTensor, RemoteValue
from offloadzero.access.weight_access import WeightAccess
from offloadzero.core.interrupts import uninterrupted_throughout
from offloadzero.core.torch_private import NO_GRAPH_TASK, current_graph_task_id, rebuild_tensor
from offloadzero.errors import StateError

_HOST = torch.device("cpu")


class HostValue(RemoteValue):
    """The value of a weight or of an optimizer's state in host memory."""

    def __init__(self, value: RemoteValue, weights: WeightAccess, *, taken_with: str, at_once: bool) -> None:
        """Stand for `value` of an engine, which is read now and not again where `at_once` is set.

        `taken_with` is for errors.
        """
        super().__init__(value.name, value.shape, value.dtype, _HOST)
        self._value = value
        self._taken_with = taken_with
        self._storage: weakref.ref[_Storage] | None = None
        self._held: Tensor | None = None
        self._held_version: tuple[int, ...] | None = None
        self._follows = True
        self._read_version: tuple[int, ...] | None = None  # by the last operation outside of a backward
        self._engine = weights.engine()
        if at_once:
            self.keep()
        elif not weights.homes.leads:  # else the other ranks follow no more when the engine is closed
            weights.in_state_dicts.add(self)

    @property
    def version(self) -> tuple[int, ...] | None:
        return self._value.version

    @property
    def value(self) -> RemoteValue:
        """What it stands for."""
        return self._value

    def is_of(self, value: RemoteValue) -> bool:
        """Whether it is the present value of `value`."""
        return self._value is value and not self._is_stale()

    def read(self, *, to_write: bool = False) -> Tensor:
        """Return the value. Raises StateError where its engine failed, and in backward one that has changed since."""
        is_in_backward = current_graph_task_id() != NO_GRAPH_TASK
        if is_in_backward and self._read_version not in (None, self.version):
            raise StateError(
                f"{self.name}: a tensor of {self._taken_with} was updated between its use and the backward pass "
                "through it: compute with its clone()"
            )
        value = self._value.read_to_host() if self._follows else self.memory()
        if not is_in_backward:
            self._read_version = self.version  # which counts the update that the read has waited for
        return value.clone() if to_write and not self._follows else value

    @uninterrupted_throughout  # an interrupt must not leave the memory written and the home not
    def write(self, value: Tensor) -> None:
        """Write the value. Raises StateError where it is one of before the last update, or of a closed engine."""
        if self._is_stale():
            raise StateError(
                f"{self.name}: has changed since {self._taken_with}, so a write to that older copy would undo the "
                "change: take a new one, or use load_state_dict()"
            )
        held = None if self._held is None else value.clone()
        self._value.write(value)  # whose memory is the home's from now on
        self._value.count_write()
        if self._held is not None and held is not None:
            self._held.copy_(held)
        self._held_version = self.version

    def memory(self) -> Tensor:
        """Return the value in memory that is the same for each call."""
        if self._held is None or (self._follows and self._held_version != self.version):
            version, value = self.version, self._value.read_to_host()
            self._held = value if self._held is None else self._held.copy_(value)
            self._held_version = version
        return self._held

    @property
    def held(self) -> Tensor | None:
        """The memory that `memory()` has returned; None before that."""
        return self._held

    def keep(self) -> None:
        """Have in memory from now on what is the value now."""
        self.memory()
        self._held_version = self.version  # the read has waited for an update, which is counted then
        self._follows = False
        self._engine = None

    def storage(self) -> _Storage:
        """The storage of the tensors that stand for the value: the same object as long as one is held."""
        storage = None if self._storage is None else self._storage()
        if storage is None:
            storage = _Storage(self.shape.numel() * self.dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
            storage.value = self
            self._storage = weakref.ref(storage)
        return storage

    def _is_stale(self) -> bool:
        return not self._follows and self._held_version != self.version


class _Storage(torch.UntypedStorage):
    """A storage that reads its bytes when they are written to a file, and has none for anybody else."""

    value: HostValue

    def data_ptr(self) -> int:
        """The address of the value where it is in memory; else a number that tells which tensors would share it."""
        held = self.value.held
        return id(self.value) if held is None else held.data_ptr()

    def cpu(self) -> torch.UntypedStorage:
        """Return the bytes: `torch.save` asks for those of one storage after the other."""
        return self.value.read().contiguous().untyped_storage()

    def _write_file(self, *arguments: Any) -> None:
        """Write the bytes, in the form that torch has for one storage by itself."""
        self.cpu()._write_file(*arguments)


# To a reader of the file it is one of host memory.
torch.serialization.register_package(
    0, lambda storage: "cpu" if isinstance(storage, _Storage) else None, lambda *_: None
)


class StateTensor(RemoteTensor):
    """A tensor of a state dict, or a view of one."""

    _source: HostValue

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        """Return a copy: scripts take one of what is on the device like that."""
        return self.read()

    def to(self, *arguments: Any, **options: Any) -> Tensor:
        """Return a copy, as `cpu()` does, where there is nothing to change."""
        made = super().to(*arguments, **options)
        return self.read() if made is self else made

    def data_ptr(self) -> int:
        """Return the address of the value, which has memory from now on as long as the tensor is held."""
        return self._view_in(self._source.memory()).data_ptr()

    def untyped_storage(self) -> Any:
        """Return a storage that tells which tensors share memory."""
        return self._source.storage()

    def __copy__(self) -> Tensor:
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.is_whole:
            return super().__reduce_ex__(protocol)
        storage = TypedStorage(wrap_storage=self._source.storage(), dtype=self.dtype, _internal=True)
        return rebuild_tensor, (storage, 0, tuple(self.shape), self.stride(), False, OrderedDict())


def state_tensor(
    value: RemoteValue, weights: WeightAccess, *, at_once: bool, taken_with: str = "state_dict()"
) -> StateTensor:
    """Return a tensor of a state dict that stands for `value`: [Note: state dicts]. `HostValue` has the arguments."""
    with torch.inference_mode(False):  # the state dict may be used outside of inference mode
        return StateTensor(HostValue(value, weights, taken_with=taken_with, at_once=at_once))


def is_tensor_of(tensor: object, value: RemoteValue) -> bool:
    """Whether a tensor of a state dict stands for all of the present `value`."""
    return isinstance(tensor, StateTensor) and tensor.is_whole and tensor._source.is_of(value)
