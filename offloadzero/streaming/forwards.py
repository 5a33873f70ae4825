"""Callables that stand for a module's `forward`; hooks.py puts them there.

[Note: torch's encoder]
In evaluation torch's `nn.TransformerEncoder` packs padded sequences into nested tensors, and fills with zeros what was
padded; it does so only where the weights of its first layer are ordinary tensors, which it asks before any layer's
forward. As a rule the layers are units: without more, the encoder would give what its layers make of the padding, and
a mean over the positions, say, would be another. So its forward finds the parameters of the first layer in the class
that they have in that layer's forward. The layers then get nested tensors, which they take where all of their weights
come with their own forward; where units are cut finer the encoder stays with ordinary tensors.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from offloadzero.access.parameter import AwayParameter, present_class_of
from offloadzero.core.interrupts import uninterrupted
from offloadzero.core.torch_private import sharder_of, skip_frame
from offloadzero.errors import StateError

_EXPORTERS = ("torch.jit", "torch._jit_internal", "torch.export", "torch._export")


def refuse_export() -> NoReturn:
    """Raise StateError: an exporter would take weights that come and go."""
    raise StateError(
        "torch.jit and torch.export need weights that stay in memory, and those of an offloaded model do not: export "
        "an ordinary copy, copy.deepcopy(model), or call restore_model() first"
    )


def expect_not_sharded(module: nn.Module) -> None:
    """Raise StateError where FSDP has taken a module, and with it parameters that the engine does not know."""
    sharder = sharder_of(module)
    if sharder is not None:
        raise StateError(
            f"{sharder} has replaced the parameters of an offloaded model, and nothing would train the new ones: leave "
            "it out (zero_optimization.stage 3 divides the parameters over the ranks), or call restore_model() first"
        )


class Forward:
    """Stands for a module's `forward`; a copy of the module has its own forward again."""

    def __init__(self, module: nn.Module) -> None:
        functools.update_wrapper(self, module.forward)  # scripts look at the signature
        self._module = module
        self._own = module.__dict__.get("forward")  # set on the instance: a compiled one, say
        self._of_class = type(module).forward
        self._forward = module.forward
        module.forward = self

    def _bind_anew(self) -> None:
        """Take the forward that the module's class has now: a script has set it there, or has changed the class."""
        kind = type(self._module)
        self._of_class = kind.forward
        if self._own is None:
            found = inspect.getattr_static(kind, "forward")
            bind = getattr(type(found), "__get__", None)  # an object that is called need not have it
            self._forward = found if bind is None else bind(found, self._module, kind)

    def tell_calls(self, tell: Callable[[Any, Any], bool]) -> None:
        """Show the arguments of calls that train, positional and by name, to `tell`, until it returns False."""
        forward = self._forward

        def telling(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not tell(args, kwargs):
                self._forward = forward
            return forward(*args, **kwargs)

        skip_frame(telling, with_calls=False)
        self._forward = telling

    def remove(self) -> None:
        """Restore the module's forward; the last object put on comes first.

        A forward that a script has put in the place of this object stays, and one that it has taken away stays away. It
        may call this object, which then does what the module's forward did.
        """
        if self._module.__dict__.get("forward") is self:
            if self._own is None:
                del self._module.forward
            else:
                self._module.forward = self._own
        self.__class__ = _RemovedForward
        for name in ("_hooks", "_records", "_timeline"):
            vars(self).pop(name, None)  # a script that keeps the object keeps no engine with it

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError: the object has no code of its own. A compiler asks for the module's."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if name in ("__code__", "__globals__") and caller.startswith(_EXPORTERS):
            refuse_export()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        module = copy.deepcopy(self._module, memo)
        return types.MethodType(type(module).forward, module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._own is not None:
            return self._own.__reduce_ex__(protocol)
        return getattr, (self._module, "forward")  # the class's forward: the copy has none of its own yet


class _RemovedForward(Forward):
    """An object that was removed: a script's own forward may have kept it, to call it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if type(self._module).forward is not self._of_class:
            self._bind_anew()
        return self._forward(*args, **kwargs)


class EncoderForward(Forward):
    """The forward of torch's encoder whose layers are units: [Note: torch's encoder]."""

    @staticmethod
    def is_needed(module: nn.Module, needed: Mapping[int, set[int]], record_of: Mapping[int, int]) -> bool:
        """Whether `module` is torch's encoder, and the forward of each layer brings all of the layer's units.

        Args:
            module: any module of the model.
            needed: id of a module -> the units that its forward brings.
            record_of: id of a parameter -> its unit.
        """
        if (
            not isinstance(module, nn.TransformerEncoder)
            or type(module).forward is not nn.TransformerEncoder.forward
        ):
            return False
        return all(
            needed.get(id(layer), set()) >= {record_of[id(param)] for param in layer.parameters()}
            for layer in module.layers
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if type(self._module).forward is not self._of_class:
            self._bind_anew()
        layers: Any = self._module.layers
        first: nn.Module = layers[0]
        if first.training:
            return self._forward(*args, **kwargs)
        asked: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        try:
            for module in first.modules():
                for name in module._parameters:
                    # This read brings the unit, which is used next, to the device.
                    param = module._parameters[name]
                    if isinstance(param, AwayParameter):
                        asked.append((param, type(param)))
            for param, away in asked:
                param.__class__ = present_class_of(away)
            return self._forward(*args, **kwargs)
        finally:
            for param, away in asked:
                param.__class__ = away


_Entry = tuple[dict[str, Any], str, torch.Tensor | None]  # in which dict, its name there, what it is


class FoundTensors:
    """The parameters and buffers that a forward finds, for what computes it again when they may be others.

    `torch.func.functional_call` gives a model other ones and takes them away at the end of its forward: backward would
    compute with the model's own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._found: list[_Entry] = [
            (tensors, name, tensor)
            for part in module.modules()
            for tensors in (part._parameters, part._buffers)
            for name, tensor in tensors.items()
        ]

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `forward`, which finds them again."""
        # `get` and not a read, which would bring a unit to the device.
        others = [entry for entry in self._found if entry[0].get(entry[1], entry[2]) is not entry[2]]
        if not others:
            return forward(*args, **kwargs)
        present: list[_Entry] = [(tensors, name, tensors.get(name)) for tensors, name, _ in others]
        try:
            _put(others)
            return forward(*args, **kwargs)
        finally:
            _put(present)


@uninterrupted
def _put(entries: Iterable[_Entry]) -> None:
    for tensors, name, tensor in entries:
        tensors[name] = tensor


skip_frame(Forward._bind_anew, with_calls=True)
skip_frame(EncoderForward.__call__, with_calls=False)
