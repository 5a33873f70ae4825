"""The work and memory of one micro batch: floating-point operations, and the bytes of activations.

[Note: a micro batch that is not computed]
Forward and backward run on tensors that have shapes and no memory, through torch's own autograd. Every tensor is
counted while it is alive: those that autograd saves, those that recomputation makes again, those that an operation
needs for a while, the logits. Parameters do not count, which have their place in the plan, nor do gradients of
parameters once they are complete. Dropout in torch's attention is drawn in the kernel on devices; the CPU keeps all
probabilities for it, in the square of the sequence. Memory that a kernel takes for itself is not seen, nor the rest
that an allocator keeps or rounds up.

Operations are counted by operations.py. Where torch infers, composed operations come as one: they are taken apart.

[Note: blocks that are traced alike]
A trace takes time in proportion to its operations, and a search for a change asks for six of them. In a model of a
shape all blocks are equal: with each, the log of a micro batch gets the same events once more in forward and once more
in backward. Where they come in is seen in the logs of one and of two blocks. The log of three, which is traced as
well, must be the one that follows; then the log of many is known to the last event. Where it is not, or other modules
than all blocks are checkpointed, all blocks are traced.

[Note: holes in the heap]
On the CPU torch's memory is the C library's, and what glibc does not map by itself (32 MiB and more) comes from its
heap. What is between two tensors that live is no room for a larger one, nor for one as large: before 2.38 an aligned
one needs 96 bytes more. Measured were holes of 0.5 to 0.9 times the most that lives there at once, and, where few large
ones are much of it, of four to twelve times the largest, an embedding's gradient mostly. They are not given back. So
HOLES of the most, or LARGEST_HOLES of the size of the largest, are counted beside activations.
"""

from __future__ import annotations

import inspect
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from offloadzero.core.torch_private import DispatchMode, fake_tensor_mode
from offloadzero.errors import OffloadError
from offloadzero.memory.arena import align_up
from offloadzero.planning.checkpointed_inputs import input_key, may_leave
from offloadzero.planning.model.operations import formula_of, is_heavy
from offloadzero.planning.model.shapes import next_token_loss

MOST_IN_HEAP, HOLES, LARGEST_HOLES = 32 << 20, 0.5, 5  # [Note: holes in the heap]
FEW = (2, 3, 4)  # [Note: blocks that are traced alike]
MIN_BLOCKS = 10  # of fewer a trace is as fast
_BETWEEN_RANKS = ("c10d", "_c10d_functional", "c10d_functional")  # torch's namespaces of collectives
# Of arguments, those that no call changes.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

T = TypeVar("T")


class TraceError(OffloadError, RuntimeError):
    """The model cannot be run on tensors without memory, or is not called with token ids."""


@dataclass(frozen=True)
class CallInputs:
    """The bytes of those inputs of one call of a checkpointed unit that would leave the device.

    A tensor that several calls get, a table of positions say, leaves once and comes back for each of them.
    """

    sent: int  # inputs that no earlier call has got
    home: int  # of `sent`, each tensor rounded up to pages
    fetched: int  # all inputs of the call
    own: int  # inputs of no other call


@dataclass(frozen=True)
class MicroBatchTrace:
    """Forward and backward of one micro batch: [Note: a micro batch that is not computed]."""

    num_tokens: int
    forward_flops: int
    backward_flops: int  # recomputation included
    kept_bytes: int  # when the forward has ended
    peak_bytes: int
    # Of what is alive beside the inputs of checkpointed units that have one call.
    peak_without_inputs: int = 0
    inputs: tuple[CallInputs, ...] = ()  # by call of a checkpointed unit
    input_bytes: int = 0  # of the call with the most, each tensor rounded up to pages
    largest_input_bytes: int = 0  # of one tensor, rounded up to pages
    heap_bytes: int = 0  # the most that is alive at once in storages of less than MOST_IN_HEAP
    largest_in_heap: int = 0  # the bytes of the largest of these storages
    # Operations that have no formula; without them the FLOPs are a part of all.
    uncounted: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops

    @property
    def hole_bytes(self) -> int:
        """The bytes of a process on the CPU that no tensor has: [Note: holes in the heap]."""
        return max(int(HOLES * self.heap_bytes), LARGEST_HOLES * self.largest_in_heap)

    @property
    def recomputed_flops(self) -> int:
        """Of those of backward the ones of forwards that run again: what is more than the gradients take.

        The gradients of a product of matrices are two products of the same size.
        """
        return min(self.forward_flops, max(0, self.backward_flops - 2 * self.forward_flops))

    @property
    def home_bytes(self) -> int:
        """The bytes of the inputs of all calls where they wait for backward."""
        return sum(call.home for call in self.inputs)


class Event(Enum):
    """A change of the counts; each event has an amount."""

    FLOPS = "operations"
    MADE = "bytes of a new storage"
    GONE = "its bytes, negative, when it is freed"
    INPUT = "bytes that are inputs of one call from now on; negative: no longer"
    FORWARD_ENDS = "nothing"


@dataclass(frozen=True)
class LoggedCall:
    """One call of a checkpointed unit; `aligned` is the sum of its inputs, each rounded up to pages."""

    inputs: CallInputs
    aligned: int
    largest: int  # of `aligned`, one tensor


@dataclass(frozen=True)
class TraceLog:
    """A micro batch, event by event."""

    num_tokens: int
    events: list[tuple[Event, int]]
    calls: list[LoggedCall]
    uncounted: frozenset[str]


def trace_micro_batch(
    model: nn.Module,
    *,
    dtype: torch.dtype | None,
    micro_batch: int,
    sequence: int,
    checkpointed: Collection[str] = (),
    on_cpu: bool = True,
) -> MicroBatchTrace:
    """Trace `model(ids)`, ids of shape (micro_batch, sequence), whose result is or has a loss, or is logits.

    `model` is on the meta device, and must not be used afterwards. `checkpointed` names modules that keep only their
    inputs, `dtype` is that of floating-point parameters (None: their own). `on_cpu`: the CPU is the device. Raises
    TraceError.
    """
    return trace_of(_log_of_ids(model, micro_batch, sequence, checkpointed, dtype=dtype, on_cpu=on_cpu))


def _log_of_ids(
    model: nn.Module, micro_batch: int, sequence: int, checkpointed: Collection[str], **keys: Any
) -> TraceLog:
    def loss_of(model: nn.Module) -> Tensor:
        return loss_of_ids(model, torch.zeros(micro_batch, sequence, dtype=torch.long))

    return _log(model, loss_of, num_tokens=micro_batch * sequence, checkpointed=checkpointed, **keys)


def trace_blocks(
    build: Callable[[int], nn.Module],
    num_blocks: int,
    *,
    dtype: torch.dtype | None,
    micro_batch: int,
    sequence: int,
    checkpointed: Collection[str] = (),
    on_cpu: bool = True,
) -> MicroBatchTrace:
    """Return `trace_micro_batch` of `build(num_blocks)`: [Note: blocks that are traced alike].

    `build` makes a model of so many equal blocks on the meta device. Raises TraceError.
    """

    def log(number: int, names: Collection[str]) -> TraceLog:
        return _log_of_ids(build(number), micro_batch, sequence, names, dtype=dtype, on_cpu=on_cpu)

    def names(number: int) -> set[str]:
        container = next(iter(checkpointed)).rpartition(".")[0]
        return {f"{container}.{index}" for index in range(number)}

    if num_blocks >= MIN_BLOCKS and (not checkpointed or set(checkpointed) == names(num_blocks)):
        short, longer, check = (log(number, names(number) if checkpointed else ()) for number in FEW)
        if _grown(short, longer, 2) == check:
            found = _grown(short, longer, num_blocks - FEW[0])
            if found is not None:
                return trace_of(found)
    return trace_of(log(num_blocks, checkpointed))


def _grown(short: TraceLog, long: TraceLog, times: int) -> TraceLog | None:
    """Return the log of `times` more blocks than in `short`, `long` being that of one more; None if they differ."""
    events = _inserted(short.events, long.events, times)
    calls = _inserted(short.calls, long.calls, times)
    if events is None or calls is None or short.num_tokens != long.num_tokens:
        return None
    return TraceLog(short.num_tokens, events, calls, short.uncounted | long.uncounted)


def _inserted(short: Sequence[T], long: Sequence[T], times: int) -> list[T] | None:
    """Return `short` with what `long` has more, at up to two places, inserted so many times."""
    num_more, most = len(long) - len(short), len(short)
    start = next((i for i in range(most) if short[i] != long[i]), most)
    end = next((i for i in range(most - start) if short[-1 - i] != long[-1 - i]), most - start)
    middle = list(short[start : most - end])
    for first in range(num_more + 1):
        second = start + first + len(middle)
        if list(long[start + first : second]) == middle:
            return [
                *short[:start],
                *list(long[start : start + first]) * times,
                *middle,
                *list(long[second : len(long) - end]) * times,
                *short[most - end :],
            ]
    return None


class CallForm:
    """The arguments of a call of a model, without the memory of their tensors."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the form of `model(*args, **kwargs)`. The arguments themselves are not kept."""
        leaves, self._structure = _pytree.tree_flatten((args, kwargs))
        self._leaves = [_form_of(leaf) for leaf in leaves]

    @property
    def num_tokens(self) -> int:
        """The number of elements of the first tensor of integers, token ids mostly; 0 without one."""
        tensors = (leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        return next((one.numel() for one in tensors if one.dtype in (torch.int64, torch.int32)), 0)

    def call(self, model: nn.Module) -> Any:
        """Call a model so, with tensors of the running mode. Raises TraceError."""
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, type):
                raise TraceError(f"{type(model).__name__} is called with an object: {leaf.__name__}")
            if isinstance(leaf, Tensor):
                leaf = torch.zeros(leaf.shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)
            leaves.append(leaf)
        args, kwargs = _pytree.tree_unflatten(leaves, self._structure)
        return model(*args, **kwargs)


def _form_of(leaf: Any) -> Any:
    """Return a tensor without memory, a plain value itself, and of an argument that a call may change its type."""
    if isinstance(leaf, Tensor) and not leaf.is_nested:  # a nested one may have no shape
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def trace_call(
    model: nn.Module,
    form: CallForm,
    *,
    dtype: torch.dtype | None,
    checkpointed: Collection[str] = (),
    on_cpu: bool = True,
) -> MicroBatchTrace:
    """Trace a call of a model and the backward of what it gives: of its loss, or of all its results.

    The other arguments are those of `trace_micro_batch`. Raises TraceError.
    """

    def loss_of(model: nn.Module) -> Tensor:
        output = form.call(model)
        found = getattr(output, "loss", None)
        results = [found] if isinstance(found, Tensor) else _pytree.tree_leaves(output)
        trained = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
        if not trained:
            raise TraceError(f"{type(model).__name__} gives nothing that has a backward")
        return torch.stack([one.sum().float() for one in trained]).sum()

    log = _log(
        model, loss_of, dtype=dtype, num_tokens=form.num_tokens, checkpointed=checkpointed, on_cpu=on_cpu
    )
    return trace_of(log)


def _log(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    dtype: torch.dtype | None,
    num_tokens: int,
    checkpointed: Collection[str],
    on_cpu: bool,
) -> TraceLog:
    counter = _Counter()
    inputs = _Inputs(counter)
    try:
        if dtype is not None:
            model.to(dtype)
        for name in checkpointed:
            module = model.get_submodule(name)
            setattr(module, "forward", partial(_checkpointed, module.forward, inputs))  # noqa: B010
        with fake_tensor_mode():
            give_storages(model)
            counter.ignore(model)
            with counter, nullcontext() if on_cpu else _DropoutInKernel():
                loss = loss_of(model)
                counter.events.append((Event.FORWARD_ENDS, 0))
                loss.backward()
    except TraceError:
        raise
    except Exception as error:  # any error of the model's code, `to()` included, on tensors without values
        # In torch 2.11 a call of checkpoint() that fails has its hooks in force as long as its frame is held.
        traceback.clear_frames(error.__traceback__)
        raise TraceError(f"{type(model).__name__}: {type(error).__name__}: {error}") from error
    return TraceLog(num_tokens, counter.events, inputs.by_call(), frozenset(counter.uncounted))


class _DropoutInKernel(TorchFunctionMode):
    """Lets attention keep no probabilities for dropout, as the kernels of devices do: they draw it anew in backward."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


def trace_of(log: TraceLog) -> MicroBatchTrace:
    flops = forward_flops = live = of_inputs = kept = peak = peak_without_inputs = in_heap = heap = 0
    for event, amount in log.events:
        if event is Event.FLOPS:
            flops += amount
        elif event is Event.INPUT:
            of_inputs += amount
        elif event is Event.FORWARD_ENDS:
            forward_flops, kept = flops, live
        else:
            live += amount
            if abs(amount) < MOST_IN_HEAP:
                in_heap += amount
                heap = max(heap, in_heap)
            if event is Event.MADE:
                peak = max(peak, live)
                peak_without_inputs = max(peak_without_inputs, live - of_inputs)
    sizes = [size for event, size in log.events if event is Event.MADE and size < MOST_IN_HEAP]
    return MicroBatchTrace(
        num_tokens=log.num_tokens,
        forward_flops=forward_flops,
        backward_flops=flops - forward_flops,
        kept_bytes=kept,
        peak_bytes=peak,
        peak_without_inputs=peak_without_inputs,
        inputs=tuple(call.inputs for call in log.calls),
        input_bytes=max((call.aligned for call in log.calls), default=0),
        largest_input_bytes=max((call.largest for call in log.calls), default=0),
        heap_bytes=heap,
        largest_in_heap=max(sizes, default=0),
        uncounted=tuple(sorted(log.uncounted)),
    )


class _Inputs:
    """The inputs that would leave the device, by call. Their keys are valid in forward, while a graph holds them."""

    def __init__(self, counter: _Counter) -> None:
        self._counter = counter
        self.calls: list[dict[object, int]] = []  # sizes by `input_key`

    def note(self, leaves: Iterable[object]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
        call = {input_key(tensor): tensor for tensor in tensors if may_leave(tensor)}
        self.calls.append({key: tensor.nbytes for key, tensor in call.items()})
        for tensor in call.values():
            self._counter.note_input(tensor)

    def by_call(self) -> list[LoggedCall]:
        num_calls = Counter(key for call in self.calls for key in call)
        known: set[object] = set()
        found = []
        for call in self.calls:
            first = [size for key, size in call.items() if key not in known]
            call_inputs = CallInputs(
                sent=sum(first),
                home=sum(map(align_up, first)),
                fetched=sum(call.values()),
                own=sum(size for key, size in call.items() if num_calls[key] == 1),
            )
            aligned = [align_up(size) for size in call.values()]
            found.append(LoggedCall(call_inputs, sum(aligned), max(aligned, default=0)))
            known |= call.keys()
        return found


def _checkpointed(forward: Callable[..., Any], inputs: _Inputs, *args: Any, **kwargs: Any) -> Any:
    inputs.note(_pytree.tree_leaves((args, kwargs)))
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def loss_of_ids(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss that a script would take from the model's output. Raises TraceError."""
    names = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {}
    if "labels" in names:
        # PEFT's models hand on what they do not name.
        hands_on = any(name.kind is name.VAR_KEYWORD for name in names.values())
        is_known = hands_on and hasattr(getattr(model, "config", None), "use_cache")
        has_cache = "use_cache" in names or is_known
        given = {"labels": ids, **({"use_cache": False} if has_cache else {})}
    output = model(ids, **given)
    found = getattr(output, "loss", None)
    found = getattr(output, "logits", output) if found is None else found
    if isinstance(found, Tensor) and found.ndim == 0:
        return found
    if isinstance(found, Tensor) and found.ndim == 3:
        return next_token_loss(found, ids)
    raise TraceError(
        f"{type(model).__name__} gives {type(output).__name__} for token ids: no loss and no logits"
    )


def give_storages(model: nn.Module) -> None:
    """Remake parameters and buffers in the running mode; a tied parameter stays one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in made:
                empty = torch.empty(param.shape, dtype=param.dtype)
                made[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
            setattr(module, name, made[id(param)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))


class _Counter(DispatchMode):
    """Counts operations, and the bytes of the storages that are alive, except for ignored ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[Event, int]] = []
        self.uncounted: set[str] = set()
        self._inputs: dict[int, int] = {}  # bytes by the storage's address, of live inputs of one call
        self._shared: set[int] = set()
        self._known: dict[int, weakref.ref[Any]] = {}  # by the storage's address

    def ignore(self, model: nn.Module) -> None:
        """Ignore a tensor: a parameter, a buffer, or a gradient that is complete."""
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_drop_gradient)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # two of three calls: FakeTensor asks its tensors for their device
            return func(*args, **kwargs)
        if func.namespace in _BETWEEN_RANKS:  # the other ranks are not in it: it would not come back
            raise TraceError(f"its own code sends between ranks: {func.overloadpacket}")
        if torch.is_inference_mode_enabled():
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        count = formula_of(func)
        if count is not None:
            self.events.append((Event.FLOPS, count(*args, **kwargs, out_val=output)))
        elif is_heavy(func):
            self.uncounted.add(str(func.overloadpacket))
        for leaf in _pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return output

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is not None:
            return
        self._known[key] = weakref.ref(storage, partial(self._forget, key, num_bytes))
        self.events.append((Event.MADE, num_bytes))

    def note_input(self, tensor: Tensor) -> None:
        """Count a tensor as the input of a call from now on, unless another call has it as well."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._inputs or key in self._shared:
            self._forget_input(key)
            self._shared.add(key)
        elif key in self._known:
            self._inputs[key] = storage.nbytes()
            self.events.append((Event.INPUT, storage.nbytes()))

    def _forget(self, key: int, num_bytes: int, _: object) -> None:
        self._known.pop(key, None)
        self._forget_input(key)
        self._shared.discard(key)
        self.events.append((Event.GONE, -num_bytes))

    def _forget_input(self, key: int) -> None:
        if key in self._inputs:
            self.events.append((Event.INPUT, -self._inputs.pop(key)))


def _drop_gradient(param: Tensor) -> None:
    param.grad = None
