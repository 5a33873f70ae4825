"""The value of a parameter wherever it lives, and those who look at it: `param.data`, `detach()`, a graph."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from offloadzero.access.tensor import RemoteTensor, RemoteValue
from offloadzero.core.torch_private import NO_GRAPH_TASK, current_graph_task_id
from offloadzero.errors import ConfigError, StateError

ATTRIBUTE = "_offloadzero_weight"  # of an offloaded parameter


class Weight(RemoteValue):
    """The value of a parameter, as `param.data` has it until another one is assigned."""

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(name, shape, dtype, device)
        self._held: weakref.ref[Alias] | None = None

    @property
    def is_computed_with(self) -> bool:
        """Whether a module of the model is in its forward, or in a backward on this thread."""
        raise NotImplementedError

    def alias(self) -> Alias:
        """Return the value behind `param.data`, the same object until `assign` as long as a script holds it."""
        alias = self._held_alias()
        if alias is None:
            alias = Alias(self)
            self._held = weakref.ref(alias)
        return alias

    def _held_alias(self) -> Alias | None:
        return None if self._held is None else self._held()

    def assign(self, value: Tensor) -> None:
        """`param.data = value`: the value is copied."""
        raise NotImplementedError

    def is_assigned_itself(self, value: Tensor) -> bool:
        """Whether `value` is all of `param.data`: `param.data += x` has written it and now assigns it."""
        return isinstance(value, RemoteTensor) and value.source is self._held_alias() and value.is_whole

    def leave_alias(self) -> None:
        """Leave the present value to the holders of `param.data`, as the parameter gets other memory."""
        alias = self._held_alias()
        if alias is not None:
            alias.keep(self)
        self._held = None

    def expect_own(self, value: Tensor) -> None:
        """Raise ConfigError if `param.data = value` would let the parameter share memory with another one."""
        other: Weight | None = getattr(value, ATTRIBUTE, None)
        if isinstance(value, RemoteTensor) and isinstance(value.source, Look):
            other = value.source.weight
        if other is not None and other is not self:
            allowed = (
                f"a value of its own: it would share memory with {other.name}. To tie the two assign the "
                "Parameter itself, module.weight = other.weight; to copy, .data.clone()"
            )
            raise ConfigError(f"{self.name}.data", tuple(value.shape), allowed)


class _Kept(RemoteValue):
    """The value that `param.data` had when the parameter was given other memory."""

    def __init__(self, weight: Weight) -> None:
        super().__init__(weight.name, weight.shape, weight.dtype, weight.device)
        # Of a whole model there may be no room on the device.
        self._tensor = weight.read(to_write=True).to("cpu")
        self._num_writes = 0

    @property
    def version(self) -> tuple[int, ...]:
        """A number that no weight has, and that of writes."""
        return -1, self._num_writes

    def read(self, *, to_write: bool = False) -> Tensor:
        return self._tensor.to(self.device, copy=to_write)

    def read_to_host(self) -> Tensor:
        return self._tensor.clone()

    def write(self, value: Tensor) -> None:
        self._tensor = value.to("cpu")
        self._num_writes += 1


class Look(RemoteValue):
    """A look at the value of a weight."""

    def __init__(self, value: Weight | Look) -> None:
        super().__init__(value.name, value.shape, value.dtype, value.device)
        self._value: RemoteValue = value

    @property
    def weight(self) -> Weight | None:
        """The weight whose value it is; None where that has got another one since."""
        value = self._value
        return value.weight if isinstance(value, Look) else value if isinstance(value, Weight) else None

    @property
    def version(self) -> tuple[int, ...] | None:
        return self._value.version

    def read(self, *, to_write: bool = False) -> Tensor:
        return self._value.read(to_write=to_write)

    def read_to_host(self) -> Tensor:
        return self._value.read_to_host()

    def write(self, value: Tensor) -> None:
        self._value.write(value)

    def count_write(self) -> None:
        self._value.count_write()


class Alias(Look):
    """The value behind `param.data`: holders of it keep the value when the parameter is given other memory."""

    def keep(self, weight: Weight) -> None:
        """Have the present value of `weight` from now on, whatever it becomes."""
        self._value = _Kept(weight)


class Counted(Look):
    """The value for `detach()`: unlike writes through `data`, its are known to autograd."""

    def write(self, value: Tensor) -> None:
        super().write(value)
        self.count_write()


class Recorded(Look):
    """A weight in a graph: when backward reads it, it must have the value that it had in the forward.

    A script that reads the tensor after a change sees the new value, as with any tensor that shares its memory.
    """

    def __init__(self, value: Weight | Look) -> None:
        super().__init__(value)
        self._recorded = value.version

    def read(self, *, to_write: bool = False) -> Tensor:
        """Read the value. Raises StateError in backward, or to write, if it has changed since."""
        if (to_write or current_graph_task_id() != NO_GRAPH_TASK) and self.version != self._recorded:
            raise StateError(
                f"{self.name} was updated between its use and the backward pass through it: "
                "call backward() before step() and before writing weights"
            )
        value = super().read()
        return value.clone() if to_write else value

    def write(self, value: Tensor) -> None:
        super().write(value)
        self._recorded = self.version


def weight_of(param: Tensor) -> Weight:
    """Return the weight of an offloaded parameter."""
    weight: Weight = getattr(param, ATTRIBUTE)
    return weight
