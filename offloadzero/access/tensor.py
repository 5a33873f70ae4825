"""Tensors whose value lives elsewhere: they stand for a weight or a gradient that is not on the device.

[Note: remote tensors]
A weight that is away and a gradient that has landed have no storage on the device. A script gets for them (as
`param.data`, `param.grad`) a tensor subclass without storage that knows where the value is. Each operation on it
reads the value, computes with an ordinary tensor, and, where its schema says that it writes an argument, writes the
value back. So a kept tensor cannot become stale: it is as alive as an alias of a resident weight is.

Views (`t.view(-1)`, `t[0]`, `t.t()`) are remote tensors of the same value: they remember how they were made, and
replay it on the value when they are used. A write into a view reads the whole value, writes into the view of it, and
writes the whole value back.

Uses that need memory to point at (`data_ptr()`, a writable numpy array, `set_`) are errors that name the tensor. torch
accepts `other.data = tensor` where both are of one backend, and `other` would then have no memory, and no Python code
to say so. So to C++ a remote tensor is one of the meta backend, and asks Python for its device. Read-only copies
(`numpy()`, `tolist()`, pickling, `copy.deepcopy`) give the present value.

What a remote tensor reads and writes is a `RemoteValue`, which has a version. There are three: a parameter's `Weight`
(weight_value.py) and the looks at it, of `param.data`, a graph or a state dict; a parameter's gradient
(gradient.py); and a state of the optimizer (api/optimizer_states.py). Below all of them home_access.py reads and
writes where the bytes live.

One operation at a time holds the value: memory is bounded by the largest parameter, not by the model. Operations on
lists (`torch._foreach_*`) are taken element by element for that reason.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from offloadzero.access import script_collectives as collectives
from offloadzero.access.pickling import ArrayByValue
from offloadzero.access.trees import leaves_of, map_leaves
from offloadzero.core.torch_private import (
    autocast_key,
    disabled_torch_function_impl,
    end_graph,
    has_same_storage_numel,
    make_wrapper_subclass,
    new_zeros_with_same_feature_meta,
    prim_device,
)
from offloadzero.errors import StateError
from offloadzero.memory.pages import FreedMemory

META = torch.device("meta")

TorchOp = Any  # torch._ops.OpOverload: its class has no public name


class RemoteValue:
    """A value that lives elsewhere: what a remote tensor reads and writes.

    `name` is for errors: `blocks.3.mlp.weight`, or its gradient. `device` is where a read brings the value.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.device = device

    @property
    def version(self) -> tuple[int, ...] | None:
        """Numbers that differ after each change of the value, and only then; None where nobody counts."""
        return None

    def read(self, *, to_write: bool = False) -> Tensor:
        """Return the value, contiguous and on the device.

        It is read-only, and there until two other values have been read; with `to_write` it is the caller's, who may
        give it to `write`.
        """
        raise NotImplementedError

    def read_to_host(self) -> Tensor:
        """Return the value in new host memory, the caller's."""
        raise NotImplementedError

    def write(self, value: Tensor) -> None:
        """Replace the value by one of its shape and dtype. The memory then belongs to this object."""
        raise NotImplementedError

    def count_write(self) -> None:
        """Tell autograd, where it looks, that the value has been written."""


View = Callable[[Tensor], Tensor]  # makes a view of its tensor


class RemoteTensor(ArrayByValue, torch.Tensor):  # type: ignore[misc]
    """A tensor without storage: [Note: remote tensors]."""

    _source: RemoteValue
    _views: tuple[View, ...]  # applied to the value in this order

    __torch_function__ = disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        source: RemoteValue,
        views: tuple[View, ...] = (),
        like: Tensor | None = None,
        *,
        storage_offset: int = 0,
    ) -> RemoteTensor:
        """Make the tensor. `like` has the dtype, shape and strides of the last view (on the meta device)."""
        if like is None:
            like = torch.empty(source.shape, dtype=source.dtype, device="meta")
        tensor = cls._without_memory(like, source.device, storage_offset)
        tensor._source = source
        tensor._views = views
        return tensor

    @classmethod
    def _without_memory(cls, like: Tensor, device: torch.device, storage_offset: int) -> RemoteTensor:
        """Make a tensor of this class that has neither source nor views yet."""
        return asking_for_device(cls, like, device, storage_offset)

    @property
    def source(self) -> RemoteValue:
        """The object that has the value."""
        return self._source

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device to which `read()` brings the value."""
        return self._source.device

    @property
    def _detached_type(self) -> type[RemoteTensor]:
        return type(self)

    def is_complex(self) -> bool:
        """Whether the dtype is complex. Raises StateError for the source of a scatter, which asks before it begins."""
        collectives.expect_not_scattered(self, self._source.name)
        return super().is_complex()

    @property
    def data(self) -> Tensor:
        """The same value, without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self._refuse_data(value)

    def _refuse_data(self, value: Tensor) -> NoReturn:
        raise StateError(
            f"{self._source.name}: data of {tuple(value.shape)} is assigned to a tensor that stands for the value: "
            "write it with copy_(), or assign to the parameter, param.data, or its gradient, param.grad"
        )

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is the value itself, or a view of all of it with the same shape and order."""
        if not self._views:
            return True
        source = self._source
        return (
            (self.shape, self.dtype) == (source.shape, source.dtype)
            and self.is_contiguous()
            and self.storage_offset() == 0
            and not self.is_neg()
        )

    def with_source(self, source: RemoteValue, *, kind: type[RemoteTensor] | None = None) -> RemoteTensor:
        """The same view of another value of the same shape and dtype, as a tensor of class `kind`."""
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return (kind or type(self))(source, self._views, like, storage_offset=int(self.storage_offset()))

    def read(self) -> Tensor:
        """Return the present value as an ordinary tensor with no other holder."""
        return self._view_in(self._source.read(to_write=True))

    _value = read

    def _check_write(self) -> None:
        """Raise if the tensor must not be written now."""

    def _view_in(self, value: Tensor) -> Tensor:
        for view in self._views:
            value = view(value)
        return value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: TorchOp,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is prim_device:
            return args[0]._source.device
        keywords = dict(kwargs or {})
        _refuse_what_needs_memory(func, args)
        if func.is_view:
            return _view(func, args, keywords)
        if func in _OF_LAYOUT:
            return _compute_of_layouts(func, args, keywords)
        return _compute(func, args, keywords)

    # --- methods that need the value in memory ---

    def tolist(self) -> Any:
        """Return the value as nested lists."""
        return self.read().tolist()

    def new_tensor(  # type: ignore[override]
        self, data: Any, dtype: Any = None, device: Any = None, **options: Any
    ) -> Tensor:
        """Return a tensor of `data` with this one's dtype, on the device to which `read()` brings the value."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **options)

    def apply_(self, _: Any) -> NoReturn:
        """Raise: C++ would take the memory."""
        self._refuse("apply_()")

    def map_(self, *_: Any) -> NoReturn:
        """Raise: C++ would take the memory."""
        self._refuse("map_()")

    def __dlpack__(self, **_: Any) -> NoReturn:
        self._refuse("__dlpack__()")

    def data_ptr(self) -> int:
        """Raise: there is no memory to point at."""
        self._refuse("data_ptr()")

    def untyped_storage(self) -> NoReturn:
        """Raise: there is no storage."""
        end_graph(f"{self._source.name} is away, and has no memory for a compiled graph to read")
        self._refuse("untyped_storage()")

    def share_memory_(self) -> NoReturn:
        """Raise: there is no storage."""
        self._refuse("share_memory_()")

    def _refuse(self, what: str) -> NoReturn:
        raise StateError(
            f"{self._source.name}: {what} needs the value in memory, and it lives elsewhere: take a copy with "
            "clone(), or use it inside offloadzero.zero.GatheredParameters"
        )


class StandIn(torch.autograd.Function):
    """The autograd function of a tensor that a call makes to stand for another: its gradient is that one's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG004 (torch's)
        return make(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


def asking_for_device(
    kind: type[RemoteTensor], like: Tensor, device: torch.device, storage_offset: int
) -> RemoteTensor:
    """Make a tensor without memory: C++ asks Python for its device, and autocast treats it as one of `device`."""
    tensor: RemoteTensor = make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=storage_offset,
        dtype=like.dtype,
        device=META,
        dispatch_device=True,
        _extra_dispatch_keys=autocast_key(device.type),
    )
    return tensor


# Operations that would give a remote tensor memory of its own, or another shape in place.
_REFUSED = re.compile(
    r"(set_|resize_|resize_as_|as_strided|as_strided_|set_data|t_|transpose_|swapaxes_|swapdims_|squeeze_|unsqueeze_)(\.|$)"
)


def _refuse_what_needs_memory(func: TorchOp, args: tuple[Any, ...]) -> None:
    name = func._schema.name.removeprefix("aten::")
    if _REFUSED.match(name):
        next(argument for argument in args if isinstance(argument, RemoteTensor))._refuse(f"{name}()")


def _view(func: TorchOp, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Make a view of the same value. The first argument of all view operations is the viewed tensor."""
    base = args[0]
    if not isinstance(base, RemoteTensor):
        return _compute(func, args, keywords)

    def view(tensor: Tensor, index: int | None = None) -> Any:
        made = func(tensor, *args[1:], **keywords)
        return made if index is None else made[index]  # `split` makes several

    made = view(torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta"))

    def remote(last: View, like: Tensor) -> RemoteTensor:
        views = base._views if func in _SAME else (*base._views, last)
        offset = int(base.storage_offset()) + int(like.storage_offset())
        kind = base._detached_type if func in _SAME else type(base)
        return kind(base._source, views, like, storage_offset=offset)

    # As in torch a view is an inference tensor where the viewed tensor is one, whatever the present mode.
    is_other = torch.is_inference_mode_enabled() and not base.is_inference()
    with torch.inference_mode(False) if is_other else contextlib.nullcontext():
        if isinstance(made, Tensor):
            return remote(view, made)
        return [remote(partial(view, index=index), one) for index, one in enumerate(made)]


# What derivatives in forward mode ask of a tensor's storage. A value that is read may lie in a unit's memory, whose
# size and offsets are not those of the tensor.
_OF_LAYOUT = (has_same_storage_numel, new_zeros_with_same_feature_meta)


def _compute_of_layouts(func: TorchOp, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Run an operation that needs no values, but the places of tensors in their storages."""
    made = func(*[_layout_of(argument) for argument in args], **keywords)
    if not isinstance(made, Tensor) or made.device != META:
        return made
    device = next(argument.device for argument in args if isinstance(argument, RemoteTensor))
    zeros = torch.zeros(made.untyped_storage().nbytes() // made.itemsize, dtype=made.dtype, device=device)
    return zeros.as_strided(made.shape, made.stride(), made.storage_offset())


def _layout_of(argument: Any) -> Any:
    """Return a tensor without memory that lies in its storage as a remote tensor lies in its value."""
    if not isinstance(argument, RemoteTensor):
        return argument
    source = argument._source
    return argument._view_in(torch.empty(source.shape, dtype=source.dtype, device=META))


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _written(func: TorchOp) -> Callable[[int, str], bool]:
    """Whether an argument of an operation, given by place and name, is written."""
    places = collectives.written_places(func) | {
        i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    }
    names = {func._schema.arguments[i].name for i in places}
    return lambda place, name: place in places or name in names


def _compute(func: TorchOp, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Run an operation on values: read its arguments, and write back the changed ones."""
    if _is_list_operation(func, args):
        return _one_by_one(func, args, keywords)
    leaves = leaves_of((args, keywords))
    sources = {id(leaf._source) for leaf in leaves if isinstance(leaf, RemoteTensor)}
    between_ranks = collectives.is_collective(func)
    values = _Values(copy=between_ranks or len(sources) > 2)
    is_written = _written(func)
    real_args = [values.of(argument, write=is_written(place, "")) for place, argument in enumerate(args)]
    real_keywords = {
        name: values.of(argument, write=is_written(-1, name)) for name, argument in keywords.items()
    }
    if between_ranks:
        values.expect_an_end(func)
    result = func(*real_args, **real_keywords)
    if between_ranks and values.written:
        collectives.wait_for(func, result)
    values.write_back()
    _freed.add(sum(value.nbytes for value in values.read.values()))
    return map_leaves(values.given_for, result)


# A loop over a model allocates and frees one value after the other, of many sizes.
_freed = FreedMemory(trim_bytes=32 * 1024 * 1024)


class _Values:
    """The values for one operation, one for each source, so that aliases stay aliases.

    A value that a source returns is there until two others have been read: in a step it is a unit's memory, which
    another unit gets. An operation on more values takes copies.
    """

    def __init__(self, *, copy: bool) -> None:
        self._copy = copy
        self.read: dict[int, Tensor] = {}  # those that are in memory, by the id of the source
        self.written: dict[int, tuple[RemoteValue, Tensor]] = {}  # those that the operation writes
        self._given: list[tuple[Tensor, RemoteTensor]] = []  # the tensors that stand for written arguments

    def of(self, argument: Any, *, write: bool) -> Any:
        """Return the argument with values in the place of remote tensors."""
        if isinstance(argument, RemoteTensor):
            return self._value(argument, write=write)
        if isinstance(argument, list | tuple):
            return type(argument)(self.of(one, write=write) for one in argument)
        return argument

    def _value(self, remote: RemoteTensor, *, write: bool) -> Tensor:
        source = remote._source
        key = id(source)
        if write:
            remote._check_write()
        if key not in self.read or (write and key not in self.written):
            self.read[key] = source.read(to_write=write or self._copy)
        if write:
            self.written[key] = (source, self.read[key])
        value = remote._view_in(self.read[key])
        if write:
            self._given.append((value, remote))
        return value

    def expect_an_end(self, func: TorchOp) -> None:
        """Raise StateError where the operation writes a value and its end cannot be waited for."""
        for source, _ in self.written.values():
            collectives.expect_an_end(func, source.name)

    def write_back(self) -> None:
        """Write back the values that the operation has changed."""
        for source, value in self.written.values():
            source.write(value)

    def given_for(self, result: Any) -> Any:
        """Return the script's tensor for a result: never memory that is about to be another's."""
        for value, remote in self._given:
            if value is result:  # the result of an in-place operation
                return remote
        if type(result) is Tensor and any(_shares_memory(result, value) for value in self.read.values()):
            return result.clone()  # `_unsafe_view` and others that say they copy
        return result


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _is_list_operation(func: TorchOp, args: tuple[Any, ...]) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("_foreach_") and isinstance(args[0], list | tuple) and len(args[0]) > 1


def _one_by_one(func: TorchOp, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Do a list operation element by element, with never more than one value of a list in memory."""
    count = len(args[0])

    def at(index: int, argument: Any) -> Any:
        per_element = isinstance(argument, list | tuple) and len(argument) == count
        return [argument[index]] if per_element else argument

    results = [
        func(*[at(i, a) for a in args], **{name: at(i, a) for name, a in keywords.items()})
        for i in range(count)
    ]
    if any(result is None for result in results):
        return None
    return [one for result in results for one in result]
