"""What torch does with device memory is launched on the current stream; its results are NaN until they are computed.

[Note: kernels that run later]
Under the mode an operation with a tensor in device memory gets its results at once, as empty device memory of the right
shapes, and what computes them goes into the stream. Views share memory and need no kernel. Whatever needs a value on
the host (item, nonzero) waits for the stream. A host tensor among the arguments is copied when the operation is
launched, as `.to(device)` would have done; one that is written makes the host wait. What only works on host memory
runs at once. In-place operations reach the memory through `.data`: a tensor's version counts what was dispatched.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.simulated.machine import Machine
from tests.simulated.memory import DeviceMemory, do_results_go_home, is_own_work, own_work

_ALIASES = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten._reshape_alias.default,
}
_RUNNING_STATISTICS = {torch.ops.aten.native_batch_norm.default: (3, 4)}  # written, and not in the schema
_NEEDS_HOST = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)


class Dispatch(TorchDispatchMode):
    """[Note: kernels that run later]."""

    def __init__(self, machine: Machine, memory: DeviceMemory) -> None:
        super().__init__()
        self._machine = machine
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the compiler is imported, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_own_work():
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if any(_has_own_dispatch(kind) for kind in types):
                return NotImplemented
            flat, spec = tree_flatten((args, kwargs))
            tensors = [value for value in flat if isinstance(value, torch.Tensor)]
            if not any(map(self._memory.holds, tensors)) or _is_view(func) or _is_meta(kwargs):
                return func(*args, **kwargs)
            self._memory.expect_no_other(tensors)
            with own_work():
                return self._on_device(func, args, kwargs, flat, spec)

    def _on_device(self, func: Any, args: Any, kwargs: Any, flat: list[Any], spec: Any) -> Any:
        if do_results_go_home():
            return self._on_host(func, args, kwargs)
        written = _written(func, args, kwargs)
        needs_host = any(tag in func.tags for tag in _NEEDS_HOST)
        if needs_host or any(not self._memory.holds(tensor) for tensor in written):
            return self._synchronously(func, args, kwargs)
        is_fresh = not written or len(written) < _num_returns(func)
        outputs: list[torch.Tensor] = []
        if is_fresh:
            metas = self._shapes(func, flat, spec)
            if metas is None:
                return self._synchronously(func, args, kwargs)
            outputs = [self._empty(meta) for meta in metas[0] if isinstance(meta, torch.Tensor)]
        later_args, later_kwargs = tree_unflatten([self._for_later(value) for value in flat], spec)
        targets = [self._memory.unowned(output) for output in outputs if output.numel()]

        def kernel() -> None:
            results = func(*later_args, **later_kwargs)
            if targets:
                fresh = [v for v in tree_flatten(results)[0] if isinstance(v, torch.Tensor) and v.numel()]
                for target, result in zip(targets, fresh, strict=True):
                    target.copy_(result)

        self._machine.launch(self._machine.current_stream, kernel)
        if not is_fresh:
            return _returned(func, written)
        values = iter(outputs)
        found, out_spec = metas
        return tree_unflatten([next(values) if isinstance(v, torch.Tensor) else v for v in found], out_spec)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._machine.current_stream.synchronize()
        return func(*args, **kwargs)

    def _synchronously(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = self._on_host(func, args, kwargs)
        flat, spec = tree_flatten(result)
        given = {id(value) for value in tree_flatten((args, kwargs))[0]}
        return tree_unflatten(
            [self._moved(value) if id(value) not in given else value for value in flat], spec
        )

    def _moved(self, value: Any) -> Any:
        """A result that was computed on the host, in device memory."""
        if not isinstance(value, torch.Tensor) or self._memory.holds(value):
            return value
        moved = self._empty(value)
        if not value.numel():
            return moved
        target, content = self._memory.unowned(moved), value.data
        self._machine.launch(self._machine.current_stream, partial(target.copy_, content))
        return moved

    def _for_later(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self._memory.unowned(value) if self._memory.holds(value) else value.data.clone()

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        size, stride = tuple(like.shape), tuple(like.stride())
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
        memory = self._memory.take(extent * like.dtype.itemsize)
        return memory.view(like.dtype).as_strided(size, stride)

    def _shapes(self, func: Any, flat: list[Any], spec: Any) -> tuple[list[Any], Any] | None:
        """The results' shapes and strides, as tensors without memory; None where only running it tells."""
        key = (func, spec, *(_signature(value) for value in flat))
        try:
            known = _known_shapes.get(key)
        except TypeError:  # an argument that does not hash
            key, known = None, None
        if known is not None:
            return known
        try:
            with FakeTensorMode(allow_non_fake_inputs=False) as mode:
                fakes = [
                    torch.empty_strided(v.shape, v.stride(), dtype=v.dtype)
                    if isinstance(v, torch.Tensor)
                    else v
                    for v in flat
                ]
                del mode
                args, kwargs = tree_unflatten(fakes, spec)
                found, out_spec = tree_flatten(func(*args, **kwargs))
        except (NotImplementedError, RuntimeError):
            return None
        shapes = [_Shape.of(v) for v in found]
        result = ([s.meta() if isinstance(s, _Shape) else s for s in shapes], out_spec)
        if key is not None:
            _known_shapes[key] = result
        return result


_known_shapes: dict[Any, tuple[list[Any], Any]] = {}


class _Shape:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._what = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(value) if isinstance(value, torch.Tensor) else value

    def meta(self) -> torch.Tensor:
        size, stride, dtype = self._what
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype)
    return (type(value), value)


def _has_own_dispatch(kind: type) -> bool:
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not torch._C._disabled_torch_dispatch_impl and kind is not torch.Tensor


def _is_view(func: Any) -> bool:
    if func in _ALIASES:
        return True
    schema = func._schema
    returned = [value.alias_info for value in schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _is_meta(kwargs: Any) -> bool:
    return kwargs.get("device") == torch.device("meta")


def _num_returns(func: Any) -> int:
    return len(func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if not writes and place not in _RUNNING_STATISTICS.get(func, ()):
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [
            v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor)
        ]
    return found


def _returned(func: Any, written: list[torch.Tensor]) -> Any:
    num = _num_returns(func)
    if num == 0:
        return None
    return written[0] if num == 1 else tuple(written[:num])
