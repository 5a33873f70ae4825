"""Parameters of an offloaded model as scripts see them: in their module's forward, and outside of it.

[Note: a parameter away]
Between the uses of its module a parameter has no value in memory: its `data` is one NaN expanded to its shape. Its
class is then `AwayParameter`, and every operation of a script arrives in `__torch_function__`: those that need no value
(shape, dtype, grad, hooks) pass; for all others a remote tensor stands for the parameter, so reads wait for the update
and return the value at home, and writes are committed there. With gradients on, the remote tensor is connected to the
parameter: autograd saves the remote tensor, no copy of a weight is kept for backward, and the gradient arrives at the
parameter.

In its module's forward its class is `PresentParameter`, an ordinary parameter for every operation and for the compiler.
Only `data` and `detach()` are remote tensors there too: their results may be kept, and the memory soon belongs to
another unit.

An operation that is written in C++ and takes the parameter itself (no Python function of torch) sees the NaN outside of
the forward; inside a forward the read of a module's attribute brings the weight to the device for such operations.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import swap_tensors

from offloadzero.access.pickling import ByValue
from offloadzero.access.script_collectives import is_taken_untold, refuse_untold
from offloadzero.access.tensor import RemoteTensor, StandIn
from offloadzero.access.trees import map_leaves
from offloadzero.access.weight_value import ATTRIBUTE, Counted, Look, Recorded, Weight, weight_of
from offloadzero.core.torch_private import (
    DisableTorchFunctionSubclass,
    as_copy_of,
    disabled_torch_function_impl,
    get_data,
    has_storage,
    make_subclass,
    may_share_memory,
    running_transform,
    set_data,
)
from offloadzero.errors import StateError

_COMPILER = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx")


def value_of(away: Tensor) -> RemoteTensor:
    """Return the tensor that stands for a parameter, or for a kept view of one."""
    return RemoteTensor(weight_of(away).alias()) if isinstance(away, _Offloaded) else kept_value(away)


class _LeafTensor(RemoteTensor):
    """The tensor of a parameter in a graph. As with any leaf, writing it is an error where gradients are recorded."""

    @property
    def _detached_type(self) -> type[RemoteTensor]:
        return RemoteTensor

    def _check_write(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.source.name}: a leaf Variable that requires grad is being used in an in-place operation."
            )


def _leaf_tensor(away: Tensor) -> Tensor:
    if isinstance(away, _Offloaded):
        return _LeafTensor(Recorded(weight_of(away)))
    value = kept_value(away)
    source: Any = value.source
    return value.with_source(Recorded(source), kind=_LeafTensor)


class _Offloaded(ByValue, nn.Parameter):  # type: ignore[misc]
    """The common part of both classes of an offloaded parameter."""

    def _value(self) -> nn.Parameter:
        return nn.Parameter(value_of(self).read(), requires_grad=self.requires_grad)

    def __copy__(self) -> Tensor:
        """Return an ordinary parameter, of the class that this one had, with that class's attributes."""
        made = self._ordinary()
        vars(made).update(self._attributes())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return an ordinary parameter, of the class that this one had, with copies of that class's attributes."""
        memo[id(self)] = made = self._ordinary()
        vars(made).update(copy.deepcopy(self._attributes(), memo))
        return made

    def _ordinary(self) -> Tensor:
        original, value = original_of(type(self)), self._value()
        made: Tensor = (
            value if original is nn.Parameter else make_subclass(original, value.data, self.requires_grad)
        )
        return made

    def _attributes(self) -> dict[str, Any]:
        """Those of a class of its own, as torch copies none of a plain parameter."""
        own = {} if original_of(type(self)) is nn.Parameter else vars(self)
        return {name: value for name, value in own.items() if name != ATTRIBUTE}

    @property
    def data(self) -> Tensor:
        """The value, without a graph; for the compiler, which is about to use a present one's memory, the memory."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(_COMPILER) and isinstance(self, PresentParameter):
            return get_data(self)
        return value_of(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        weight_of(self).assign(value)

    def detach(self) -> Tensor:
        """The value, without a graph."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.parameter":
            raise StateError(
                f"{weight_of(self).name}: a new Parameter cannot share memory with an offloaded one: do this before "
                "offloading, or take a copy with clone()"
            )
        return RemoteTensor(Counted(weight_of(self).alias()))

    def data_ptr(self) -> int:
        """The address of the value; to torch's recurrent layers the same one for all parameters.

        With cuDNN `flatten_parameters()` gives their weights other memory, which no update would write. It leaves those
        alone that share memory.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.modules.rnn":
            return 0
        return super().data_ptr()

    # C++ takes the memory of the tensors of these methods without asking.

    def apply_(self, _: Any) -> NoReturn:
        """Refuse, as the tensors that stand for the value do."""
        value_of(self)._refuse("apply_()")

    def map_(self, *_: Any) -> NoReturn:
        """Refuse, as the tensors that stand for the value do."""
        value_of(self)._refuse("map_()")

    def set_(self, *given: Any, **__: Any) -> Tensor:
        """Refuse: the memory of a weight belongs to its tier.

        In a forward a parametrization comes and goes that leaves the parameter as it is: PEFT's for experts.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.parametrize":
            if given[0] is self and weight_of(self).is_computed_with:
                return cast("Tensor", self)
            raise StateError(
                f"{weight_of(self).name}: register parametrizations before offload(), of parameters that still have "
                "memory of their own, or call restore_model() first"
            )
        raise StateError(
            f"{weight_of(self).name}: set_() would give the parameter memory of its own: write its value with copy_() "
            "under torch.no_grad(), or assign param.data"
        )

    def new_tensor(self, *arguments: Any, **options: Any) -> Tensor:
        """Return a tensor with the parameter's dtype, on the device."""
        return value_of(self).new_tensor(*arguments, **options)


class PresentParameter(_Offloaded):
    """A parameter in its module's forward: [Note: a parameter away]."""

    __torch_function__ = disabled_torch_function_impl


class AwayParameter(_Offloaded):
    """A parameter outside its module's forward: [Note: a parameter away]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is may_share_memory and isinstance(args[0], _Offloaded):
            return True  # `module.to()` then assigns `data`, which checks it, and makes no new parameter
        if func in _NEED_NO_VALUE:
            if (
                func in _ASKED_BY_VMAP
                and sys._getframe(1).f_globals.get("__name__") == "torch._functorch.vmap"
            ):
                _refuse_transform(args[0])
            if is_taken_untold(func):
                refuse_untold(value_of(args[0]).source.name, "a parameter that is away")
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _BACKWARDS:
            return _run_backward(func, args, kwargs or {})
        return _answer(func, args, kwargs or {})


class KeptView(ByValue, torch.Tensor):  # type: ignore[misc]
    """A view that a module's own forward made of a weight, and that a script keeps after the weight has left.

    For autograd it is still a view of the parameter; each operation reads and writes the weight wherever it is.
    """

    VALUE = "_offloadzero_value"

    __torch_function__ = AwayParameter.__torch_function__

    @property
    def data(self) -> Tensor:
        """The value, without a graph. Raises StateError when it is assigned."""
        return kept_value(self).detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        given = f"data of {tuple(value.shape)}"
        raise StateError(
            f"{kept_value(self).source.name}: {given} is assigned to a view of it: assign to the parameter"
        )

    def _value(self) -> Tensor:
        return kept_value(self).read()


def kept_value(kept: Tensor) -> RemoteTensor:
    """Return the tensor that stands for a kept view."""
    value: RemoteTensor = getattr(kept, KeptView.VALUE)
    return value


def recorded(tensor: RemoteTensor | AwayParameter) -> RemoteTensor:
    """Return autograd's form of a remote tensor: reading it in backward is an error if the value has changed."""
    if isinstance(tensor, AwayParameter):  # a Function of the script's saves its argument
        tensor = value_of(tensor)
    source = tensor.source
    if isinstance(source, Look) and not isinstance(tensor, _LeafTensor):
        return tensor.with_source(Recorded(source))
    return tensor


# --- views that a script keeps: [Note: kept views] in streaming/leased_unit.py ---


def tensors_over(storage: int) -> Iterator[list[Tensor]]:
    """Yield Python's ordinary tensors over a storage, which is given by its address, in lists: the youngest first.

    Most are views that a forward has just made, among the few thousand objects of the collector's young generations;
    a look at all takes 20 ms. Objects set aside by `gc.freeze()` are not even among all.
    """
    for generation in (0, 1, None):
        # An object of another class than torch.Tensor may lie about its class, or have no storage.
        tensors = [one for one in gc.get_objects(generation) if type(one) is Tensor]
        yield [one for one in tensors if _storage_of(one) == storage]


def _storage_of(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or not has_storage(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def keep_view(tensor: Tensor, param: nn.Parameter, byte_offset: int) -> None:
    """Turn `tensor`, which looks at the memory of `param` from `byte_offset` on, into a view of the parameter.

    One that takes no part in a graph, and that Python alone holds, becomes a remote tensor, which has no memory. Any
    other becomes a `KeptView`: for operations that do not look at the class (autograd's own, in C++) it holds a copy of
    the present value. Raises StateError for a view that goes beyond the parameter's end.
    """
    weight = weight_of(param)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if byte_offset + span * tensor.itemsize > weight.shape.numel() * weight.dtype.itemsize:
        raise StateError(
            f"{weight.name}: a view that is kept goes beyond the parameter's end: keep a clone()"
        )
    size, stride = tensor.size(), tensor.stride()
    dtype, offset = tensor.dtype, byte_offset // tensor.itemsize

    def view(value: Tensor) -> Tensor:
        whole = value.view(-1).view(dtype)
        return whole.as_strided(size, stride, int(whole.storage_offset()) + offset)

    with torch.inference_mode(False), torch.no_grad():
        like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        value = RemoteTensor(weight.alias(), (view,), like, storage_offset=int(tensor.storage_offset()))
        if not tensor.requires_grad:
            with contextlib.suppress(RuntimeError):  # C++, or a weak reference, holds it as well
                swap_tensors(tensor, value)
                return
        flat = torch.as_strided(torch.detach(tensor), (span,), (1,)).clone()
        set_data(tensor, flat.as_strided(size, stride))
    tensor.__class__ = KeptView
    setattr(tensor, KeptView.VALUE, value)


def is_offloaded(param: Tensor) -> bool:
    """Whether a `Weight` answers for the parameter."""
    return isinstance(param, _Offloaded)


_MOVES = ("to", "cpu", "cuda", "xpu", "hpu", "ipu")


@functools.cache
def classes_of(original: type[nn.Parameter]) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """Return the classes of a parameter of class `original`, present and away."""
    if original is nn.Parameter:
        return PresentParameter, AwayParameter
    # Libraries ask for the class by its name. Its own ways of moving, which may quantise, would take its memory.
    names = {
        "__module__": original.__module__,
        **{each: getattr(torch.Tensor, each) for each in _MOVES if hasattr(torch.Tensor, each)},
    }
    return (
        type(original.__name__, (PresentParameter, original), dict(names)),
        type(original.__name__, (AwayParameter, original), dict(names)),
    )


def offload_parameter(param: nn.Parameter, weight: Weight) -> None:
    """Let `weight`, and no earlier one, answer for the parameter."""
    setattr(param, ATTRIBUTE, weight)  # first: an object of the class without it could not be read
    if is_offloaded(param):
        return
    try:
        param.__class__ = classes_of(type(param))[1]
    except TypeError:  # a class that forbids this is left as it is
        delattr(param, ATTRIBUTE)
        raise


def restore_parameter(param: nn.Parameter) -> None:
    """Undo `offload_parameter`: an ordinary parameter, whose `data` is for the caller to set."""
    if isinstance(param, _Offloaded):
        original: Any = original_of(type(param))
        param.__class__ = original
        delattr(param, ATTRIBUTE)


def present_class_of(away: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that a parameter of class `away` has in the forward of its module."""
    return classes_of(original_of(away))[0]


def original_of(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that a parameter of this class had before it was offloaded, or has."""
    tensors = (cls for cls in kind.__mro__ if issubclass(cls, Tensor))
    return cast(type[nn.Parameter], next(cls for cls in tensors if not issubclass(cls, _Offloaded)))


def _refuse_transform(param: Tensor) -> NoReturn:
    raise StateError(
        f"{weight_of(param).name}: torch.func's transforms need memory that stays where it is: give them "
        "p.detach()"
    )


def _answer(func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Run an operation with remote tensors in the place of parameters that are away."""
    own = _METHODS_OF_REMOTE.get(func)
    if own is not None:
        return own(value_of(args[0]), *args[1:], **keywords)
    if func in _SEEN_AS_ANOTHER and args[1:] and args[0] is args[1] and isinstance(args[0], AwayParameter):
        return _remote(args[0], _connect_as_copy)  # with no other node before the parameter's own
    standing: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor that is away, its stand-in

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, AwayParameter | KeptView):
            return leaf
        if id(leaf) not in standing:
            standing[id(leaf)] = (leaf, _remote(leaf))
        return standing[id(leaf)][1]

    def away(result: Any) -> Any:
        return next((one for one, remote in standing.values() if remote is result), result)

    args, keywords = map_leaves(stand_in, (args, dict(keywords)))
    return map_leaves(away, func(*args, **keywords))


def _connect(away: Tensor) -> Tensor:
    connected: Tensor = StandIn.apply(away, _leaf_tensor)  # type: ignore[no-untyped-call]
    return connected


def _connect_as_copy(away: Tensor) -> Tensor:
    return as_copy_of(away, _leaf_tensor(away))


def _remote(away: Tensor, connect: Callable[[Tensor], Tensor] = _connect) -> Tensor:
    with DisableTorchFunctionSubclass():
        is_connected = away.requires_grad and torch.is_grad_enabled()
    if is_connected:
        if running_transform() is not None:
            _refuse_transform(away)
        return connect(away)
    return value_of(away)


def _run_backward(func: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Run `torch.autograd.grad` or `torch.autograd.backward`, among whose tensors are some that are away.

    Hooks, Functions and recomputations of the script's run inside and read weights, so torch functions must be on
    there. The inputs are therefore given by their places in the graph, which no torch function answers for.
    """
    of_grad = func is torch.autograd.grad
    inputs = args[1] if of_grad else keywords.get("inputs") or ()
    with DisableTorchFunctionSubclass():
        tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
        has_places = all(one.requires_grad and (of_grad or one.is_leaf) for one in tensors)
        if not has_places or any(isinstance(one, AwayParameter | KeptView) for one in args[0]):
            return func(*args, **keywords)  # most of these are errors of torch's
        places = tuple(
            get_gradient_edge(one) if isinstance(one, AwayParameter | KeptView) else one for one in inputs
        )
    if not of_grad:
        return func(*args, **{**keywords, "inputs": places})
    if not keywords.get("materialize_grads"):
        return func(args[0], places, *args[2:], **keywords)
    found = func(args[0], places, *args[2:], **{**keywords, "allow_unused": True, "materialize_grads": False})
    in_graph = bool(keywords.get("create_graph"))
    return tuple(
        torch.zeros_like(one, requires_grad=in_graph) if grad is None else grad
        for one, grad in zip(inputs, found, strict=True)
    )


# --- functions that need no value

_GETTERS = (
    "_backward_hooks _base _cdata _grad _grad_fn _post_accumulate_grad_hooks _version device dtype grad grad_dtype "
    "grad_fn is_cpu is_cuda is_ipu is_leaf is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse "
    "is_sparse_csr is_vulkan is_xla is_xpu itemsize layout name names nbytes ndim output_nr requires_grad retains_grad "
    "shape volatile"
)
_SETTERS = "_backward_hooks _grad _post_accumulate_grad_hooks grad grad_dtype names requires_grad"
_METHODS = (
    "__hash__ __len__ _is_view dim element_size get_device has_names is_complex is_conj is_distributed "
    "is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed ndimension nelement "
    "numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size"
)
_FUNCTIONS = (
    "_has_compatible_shallow_copy_type is_complex is_conj is_floating_point is_inference is_neg is_same_size is_signed "
    "numel"
)


def _found(owner: Any, names: str, accessor: str = "") -> set[Any]:
    """Return those of these functions that this torch has, as `__torch_function__` receives them."""
    attributes = (getattr(owner, name, None) for name in names.split())
    found = (getattr(one, accessor, None) if accessor else one for one in attributes)
    return {one for one in found if one is not None}


# Methods of torch that would take values from memory that is not there.
_METHODS_OF_REMOTE: Mapping[Any, Any] = {
    getattr(torch.Tensor, name): getattr(RemoteTensor, name)
    for name in ["numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "share_memory_", "__dlpack__"]
}

# `p.view_as(p).grad_fn.next_functions[0][0]` is how torch and scripts find the node that adds up a leaf's gradient.
_SEEN_AS_ANOTHER = (torch.Tensor.view_as, torch.Tensor.expand_as)
_ASKED_BY_VMAP = (torch.Tensor.size, torch.Tensor.dim)  # called before it wraps the memory of its arguments
_NEED_NO_VALUE = frozenset(
    _found(torch.Tensor, _GETTERS, "__get__")
    | _found(torch.Tensor, _SETTERS, "__set__")
    | _found(torch.Tensor, _SETTERS, "__delete__")
    | _found(torch.Tensor, _METHODS)
    | _found(torch, _FUNCTIONS)
)
_BACKWARDS = frozenset(_found(torch.autograd, "backward grad"))
