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
from tests.simulated.memory import DeviceMemory, do_results_go_home, is_own_work, no_modes, own_work
from tests.simulated.operations import has_own_dispatch, is_view, needs_host, num_returns, tensors_in, written
from tests.simulated.placing import expect_together


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
            if any(has_own_dispatch(kind) for kind in types):
                return NotImplemented
            if is_view(func) or _is_meta(kwargs):
                return func(*args, **kwargs)
            tensors = list(tensors_in((args, kwargs)))
            if not any(map(self._memory.holds, tensors)):
                return func(*args, **kwargs)
            self._memory.expect_no_other(tensors)
            expect_together(func, tensors, self._memory.holds)
            with own_work():
                return self._on_device(func, args, kwargs)

    def _on_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        if do_results_go_home():
            return self._on_host(func, args, kwargs)
        changed = written(func, args, kwargs)
        if needs_host(func) or not all(map(self._memory.holds, changed)):
            return self._synchronously(func, args, kwargs)
        flat, spec = tree_flatten((args, kwargs))
        is_fresh = not changed or len(changed) < num_returns(func)
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
                fresh = [tensor for tensor in tensors_in(results) if tensor.numel()]
                for target, result in zip(targets, fresh, strict=True):
                    target.copy_(result)

        self._machine.launch(self._machine.current_stream, kernel)
        if not is_fresh:
            return _returned(func, changed)
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

    def moved(self, tensor: torch.Tensor, *, is_empty: bool = False) -> torch.Tensor:
        """A tensor of the host's in device memory, as `.to(device)` gives it; with `is_empty` without its content."""
        with own_work(), torch.no_grad():
            moved: torch.Tensor = self._empty(tensor) if is_empty else self._moved(tensor.detach())
        return moved.requires_grad_(tensor.requires_grad)

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
        over = self._memory.unowned_or_none(value)
        return value.data.clone() if over is None else over

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        size, stride = tuple(like.shape), tuple(like.stride())
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
        memory = self._memory.take(extent * like.dtype.itemsize)
        with no_modes():
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


def _is_meta(kwargs: Any) -> bool:
    return kwargs.get("device") == torch.device("meta")


def _returned(func: Any, written: list[torch.Tensor]) -> Any:
    num = num_returns(func)
    if num == 0:
        return None
    return written[0] if num == 1 else tuple(written[:num])
