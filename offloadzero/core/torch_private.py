"""Every private name of torch that the package uses, looked up once.

[Note: torch versions]
These names carry no promise, so the versions of torch that are known to have them are stated here and nowhere else in
code. The look-up is all that decides: a newer torch that still has every name is taken, one that lacks a name is
refused when this module is imported, by name, before a model is touched. `_top_saved_tensors_default_hooks` is what
torch 2.6 and 2.7 lack.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MINIMUM_TORCH = (2, 8)
TESTED_TORCH = ("2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14")

PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]


def _look_up(name: str) -> Any:
    try:
        return operator.attrgetter(name)(torch)
    except AttributeError:
        oldest = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(
            f"offloadzero needs torch >= {oldest} (tested with {', '.join(TESTED_TORCH)}): "
            f"torch {torch.__version__} has no torch.{name}"
        ) from None


# Saved-tensor hooks that outlive a `with` block: pushed before a module's forward, popped after it.
push_saved_tensors_default_hooks: Callable[[PackHook, UnpackHook], None] = _look_up(
    "_C._autograd._push_saved_tensors_default_hooks"
)
pop_saved_tensors_default_hooks: Callable[[], None] = _look_up(
    "_C._autograd._pop_saved_tensors_default_hooks"
)
# The pair in force, None where there is none; False: also while tracing is off.
top_saved_tensors_default_hooks: Callable[[bool], tuple[PackHook, UnpackHook] | None] = _look_up(
    "_C._autograd._top_saved_tensors_default_hooks"
)

# The node that backward runs on this thread, None outside of a backward; and the number of the running backward.
current_autograd_node: Callable[[], torch.autograd.graph.Node | None] = _look_up("_C._current_autograd_node")
current_graph_task_id: Callable[[], int] = _look_up("_C._current_graph_task_id")
NO_GRAPH_TASK = -1

# What the format of torch.save() says a tensor is made with: of a storage of its dtype, or of bytes and a dtype.
rebuild_tensor: Callable[..., torch.Tensor] = _look_up("_utils._rebuild_tensor_v2")
rebuild_tensor_of_dtype: Callable[..., torch.Tensor] = _look_up("_utils._rebuild_tensor_v3")

# The number of holders of a storage (by its `_cdata`), the tensor that is asked included.
storage_use_count: Callable[[int], int] = _look_up("_C._storage_Use_Count")
has_storage: Callable[[torch.Tensor], bool] = _look_up("_C._has_storage")

# Makes tensors zero, on a GPU with one kernel for all.
foreach_zero: Callable[[Sequence[torch.Tensor]], None] = _look_up("_foreach_zero_")
foreach_copy: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = _look_up("_foreach_copy_")

# Whether one tensor can be given the memory of another: a module asks this before it moves its parameters.
may_share_memory: Any = _look_up("_has_compatible_shallow_copy_type")

_to_dlpack: Callable[[torch.Tensor], Any] = _look_up("_C._to_dlpack")
_from_dlpack: Callable[[Any], torch.Tensor] = _look_up("_C._from_dlpack")


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a storage of its own, whose holders can be counted; it keeps the memory alive."""
    return _from_dlpack(_to_dlpack(tensor))


# The function that makes instances of a tensor subclass.
DisableTorchFunctionSubclass: Any = _look_up("_C.DisableTorchFunctionSubclass")
make_wrapper_subclass: Callable[..., Any] = _look_up("Tensor._make_wrapper_subclass")
make_subclass: Callable[..., Any] = _look_up("Tensor._make_subclass")
DisableTorchDispatch: Any = _look_up("_C._DisableTorchDispatch")
is_any_autocast_enabled: Callable[[], bool] = _look_up("_C._is_any_autocast_enabled")
prim_device: Any = _look_up("ops.prim.device.default")  # asks a tensor subclass for its device
# What derivatives in forward mode ask of tensors' storages: whether they have the same number of elements, and zeros
# that lie in their storage as another tensor does.
has_same_storage_numel: Any = _look_up("ops.aten._has_same_storage_numel.default")
new_zeros_with_same_feature_meta: Any = _look_up("ops.aten._new_zeros_with_same_feature_meta.default")


@functools.cache
def autocast_key(device_type: str) -> Any:
    """The dispatch keys by which autocast takes a tensor for one of this type of device."""
    keys: Any = _look_up("_C.DispatchKey")
    key = getattr(keys, f"Autocast{device_type.upper()}", keys.Undefined)
    return _look_up("_C.DispatchKeySet")(key)


# The compiler must not trace into our wrappers of `forward`, but into what they call. torch.compiler.disable would say
# so and import the compiler, 1.5 s and 70 MiB, in every process.
_eval_frame: Any = _look_up("_C._dynamo.eval_frame")


_REASON = "weights of an offloaded model are fetched here; torch.export takes an ordinary copy, copy.deepcopy(model)"


def skip_frame(function: Callable[..., Any], *, with_calls: bool, inlined: bool = False) -> None:
    """Have the compiler run `function` as it is, and with `with_calls` also the functions that it calls.

    A graph ends where it is called; with `inlined` the compiler may trace it as a part of the function that calls it.
    """
    if not inlined:
        setattr(function, "_torchdynamo_disable", True)  # noqa: B010
        setattr(function, "_torchdynamo_disable_msg", _REASON)  # noqa: B010
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if with_calls else action.DEFAULT)
    each: Any = function
    while each is not None:
        _eval_frame.set_code_exec_strategy(each.__code__, strategy)
        each = getattr(each, "__wrapped__", None)


def skip_methods(kind: type) -> None:
    """Have the compiler run the functions, methods and properties that a class itself defines as they are."""
    for value in vars(kind).values():
        accessors = [getattr(value, name, None) for name in ("__func__", "fget", "fset")]
        for function in (value, *accessors):
            if isinstance(function, types.FunctionType):
                skip_frame(function, with_calls=True)


# What the compiler traces at present on this thread, None where it does not run.
_tracing_context: Callable[[], Any] = _look_up("_guards.TracingContext.try_get")


def end_graph(reason: str) -> None:
    """Have the compiler, where it traces, end the graph: it runs the operation as it is, and goes on after it.

    Raises its Unsupported, by which it does.
    """
    if _tracing_context() is not None:
        raise importlib.import_module("torch._dynamo.exc").Unsupported(reason)


# torch's method without its decorator, which imports the compiler to keep it out.
add_param_group: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.add_param_group)


def import_compiler() -> None:
    """Import the compiler, as torch.utils.checkpoint does in its first call.

    While it is imported, errors are raised and caught whose tracebacks are cycles: the frames of the first call, with
    its inputs, would stay until Python's collector runs.
    """
    importlib.import_module("torch._dynamo")


# Whether torch.jit.trace runs.
is_tracing: Callable[[], bool] = _look_up("_C._is_tracing")

# The innermost of the transforms of torch.func that run, None where none does.
running_transform: Callable[[], Any] = _look_up("_C._functorch.peek_interpreter_stack")
_pop_transform: Callable[[], Any] = _look_up("_C._functorch.pop_dynamic_layer_stack")
_push_transform: Callable[[Any], None] = _look_up("_C._functorch.push_dynamic_layer_stack")


@contextlib.contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Leave the transforms of torch.func for a while: inside of them each tensor that an operation makes is theirs.

    The context takes a microsecond: each forward asks for a running transform first.
    """
    left = []
    try:
        while running_transform() is not None:
            left.append(_pop_transform())
        yield
    finally:
        while left:
            _push_transform(left.pop())


# The value for a class whose __torch_function__ does nothing.
disabled_torch_function_impl: Any = _look_up("_C._disabled_torch_function_impl")
# The plain `tensor.data`, whatever the tensor's class. Callers disable torch functions.
get_data: Callable[[torch.Tensor], torch.Tensor] = _look_up("_C.TensorBase.data").__get__
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _look_up("_C.TensorBase.data").__set__

# Runs a function at the end of the backward that is on its way on this thread, and as a part of it still: the number of
# the running backward is that of this one there.
queue_backward_callback: Callable[[Callable[[], None]], None] = _look_up(
    "autograd.Variable._execution_engine.queue_callback"
)


class _Running:
    """Autograd holds it until the backward is over, or has failed."""

    def __call__(self) -> None:
        """Do nothing at the end."""


def running_backward() -> weakref.ref[Any]:
    """Return a reference that is dead when the backward that is on its way on this thread has ended."""
    running = _Running()
    queue_backward_callback(running)
    return weakref.ref(running)


# A subclass sees each operation below autograd while it is entered.
DispatchMode = TorchDispatchMode


class _CopyMode(TorchDispatchMode):
    """Below autograd the copy of a tensor is this one. Other operations come, too: a tensor is asked for its device."""

    def __init__(self, copy: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copy = copy

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._copy if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def as_copy_of(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Connect `result` to `tensor` in the graph as a copy of it is, by a node that lives as long as it is held.

    In torch 2.11 that of an autograd Function in Python ends with its tensor: `F.apply(x).grad_fn` has no
    `next_functions`.
    """
    with DisableTorchFunctionSubclass(), _CopyMode(result):
        return tensor.clone()


# Attention and recurrent layers on the CPU and their backward, and the products of a mixture of experts, which torch's
# counter of operations does not know.
cpu_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
cpu_lstm: Any = torch.ops.aten.mkldnn_rnn_layer
cpu_lstm_backward: Any = torch.ops.aten.mkldnn_rnn_layer_backward
grouped_matmul: Any = torch.ops.aten._grouped_mm


@contextlib.contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """Inside the block tensors have shapes, dtypes and sizes, but no memory. Imported late: it loads sympy.

    torch logs the traceback of an operation that fails there beside the error, which is enough.
    """
    fake_tensor: Any = importlib.import_module("torch._subclasses.fake_tensor")
    level = fake_tensor.log.level
    fake_tensor.log.setLevel(logging.CRITICAL)
    try:
        with fake_tensor.FakeTensorMode():
            yield
    finally:
        fake_tensor.log.setLevel(level)


def memory_of_dtensor(tensor: Any) -> torch.Tensor:
    """The very tensor in which a DTensor keeps what this rank has; of a parameter `to_local()` gives an alias of it."""
    memory: torch.Tensor = tensor._local_tensor
    return memory


def default_process_group_store() -> Any:
    """The key-value store in which the ranks of the default process group have found each other."""
    return _look_up("distributed.distributed_c10d._get_default_store")()


def timeout_of_process_group() -> timedelta:
    """The timeout of the default process group; a new group does not inherit it."""
    group = _look_up("distributed.distributed_c10d._get_default_group")()
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


@contextlib.contextmanager
def without_bound_device() -> Iterator[None]:
    """Inside the block the default process group has no device: new groups are not split off its communicator.

    Where a script has bound one, `init_process_group(device_id=...)`, a rank that is not in a new group takes part in a
    split of NCCL's default communicator, and waits there for all ranks, also where the new group is not NCCL's.
    """
    group = _look_up("distributed.distributed_c10d._get_default_group")()
    device = group.bound_device_id
    if device is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def is_process_group(group: Any) -> bool:
    """Whether torch still has a group: all end with the default one, also where the script has made that anew."""
    return group in _look_up("distributed.distributed_c10d._world").pg_map


def abort_process_group(group: Any) -> None:
    """End a group with the collectives that it has begun, which leave anything in their memory; NCCL's groups alone.

    torch's other end of a group, destroy_process_group(), waits for them.
    """
    _look_up("distributed.distributed_c10d._abort_process_group")(group)


def end_traced_collective(result: torch.Tensor) -> None:
    """Wait for the collective of a traced graph that gives `result`."""
    torch.ops._c10d_functional.wait_tensor(result)


def active_ddp_module() -> Any:
    """The DistributedDataParallel in whose forward the process is; None outside of any."""
    return _look_up("nn.parallel.distributed.DistributedDataParallel._get_active_ddp_module")()


def sharder_of(module: torch.nn.Module) -> str | None:
    """Return the name of torch's FSDP that has put parameters in the place of a module's; None where none has."""
    kinds = [
        kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.distributed.fsdp")
    ]
    if "FSDPModule" in kinds:
        return "fully_shard()"
    # The older FSDP leaves the class of the modules inside of it as it was, and marks them for the compiler.
    return "FullyShardedDataParallel" if kinds or is_marked_by_fsdp(module) else None


def is_marked_by_fsdp(module: torch.nn.Module) -> bool:
    """Whether FSDP has marked a module as one whose parameters it holds."""
    return "_is_fsdp_managed_module" in vars(module)
