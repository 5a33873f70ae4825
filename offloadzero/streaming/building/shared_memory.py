"""Parameters that share memory with other parameters or with buffers.

[Note: memory that is shared]
In torch two parameters over the same elements are one weight: a write to one is seen in the other. Offloaded, each has
a home of its own, and they would silently drift apart. So an element that belongs to a parameter that is trained, and
to another parameter or to a buffer, is refused by both names. Parameters that share one storage, each with elements of
its own (one flat buffer), train as in torch; only later writes of a script to the buffer do not reach them. Frozen
parameters that share elements train, too, as no update changes them. Of both cases there is a notice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offloadzero.core.torch_private import DisableTorchFunctionSubclass, has_storage
from offloadzero.errors import ConfigError

log = logging.getLogger("offloadzero")

_SLACK_BYTES = 4096  # an allocation may be larger by so much than the tensor it was made for


@dataclass(frozen=True)
class _Span:
    """The memory of one tensor: byte addresses [start, stop) of one kind of device, gaps included."""

    place: int  # the number of the tensor in the model
    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    itemsize: int
    is_param: bool
    is_trained: bool

    @property
    def is_dense(self) -> bool:
        """Whether there are no gaps."""
        num_elements = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            num_elements *= size if stride else 1
        return num_elements * self.itemsize == self.stop - self.start

    def mark(self, taken: torch.Tensor, first: int) -> torch.Tensor:
        """This tensor's bytes in a map of bytes that begins at address `first`."""
        size, stride = (*self.shape, self.itemsize), (*self.strides, 1)
        return taken.as_strided(size, stride, self.start - first)


@dataclass
class _Members:
    """The parameters over one storage."""

    storage_bytes: int
    names: list[str] = field(default_factory=list)
    num_bytes: int = 0

    def give_notice(self) -> None:
        """Log the notice, unless the storage was made for one parameter."""
        if len(self.names) == 1 and self.storage_bytes <= self.num_bytes + _SLACK_BYTES:
            return
        num_more = len(self.names) - 1
        log.info(
            "%s%s: views of a larger buffer. Parameters have memory of their own from here on: what is written into "
            "the buffer does not reach them",
            self.names[0],
            f" and {num_more} more parameters" if num_more else "",
        )


def expect_memory_of_its_own(model: nn.Module, *, group_of: Mapping[int, int]) -> None:
    """Refuse a parameter that shares elements with another or with a buffer: [Note: memory that is shared].

    `group_of`: id of a parameter -> its optimizer group; others are not trained.

    Raises:
        ConfigError: two of them share elements; the message names both.
    """
    by_device: dict[torch.device, list[_Span]] = {}
    by_storage: dict[int, _Members] = {}
    with DisableTorchFunctionSubclass():
        for place, (name, tensor, is_param) in enumerate(_tensors(model)):
            if tensor.layout is not torch.strided or not has_storage(tensor) or not tensor.data_ptr():
                continue  # it has no elements, is on the meta device, or is of a class of its own
            is_trained = is_param and tensor.requires_grad and id(tensor) in group_of
            span = _span(place, name, tensor, is_param=is_param, is_trained=is_trained)
            by_device.setdefault(tensor.device, []).append(span)
            if is_param:
                storage = tensor.untyped_storage()
                members = by_storage.setdefault(storage.data_ptr(), _Members(storage.nbytes()))
                members.names.append(name)
                members.num_bytes += span.stop - span.start
    refused = [pair for spans in by_device.values() if (pair := _first_sharing(spans)) is not None]
    if refused:
        _refuse(*min(refused, key=_places))
    for members in by_storage.values():
        members.give_notice()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, param in model.named_parameters():
        yield name, param, True
    for name, buffer in model.named_buffers():
        yield name, buffer, False


def _span(place: int, name: str, tensor: torch.Tensor, *, is_param: bool, is_trained: bool) -> _Span:
    itemsize = tensor.itemsize
    shape, strides = tuple(tensor.shape), tuple(stride * itemsize for stride in tensor.stride())
    start = tensor.data_ptr()
    length = itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return _Span(place, name, start, start + length, shape, strides, itemsize, is_param, is_trained)


def _first_sharing(spans: Sequence[_Span]) -> tuple[_Span, _Span] | None:
    """Return a pair that must not share elements, the first in the model's order: addresses differ from run to run."""
    first: tuple[_Span, _Span] | None = None
    reaching: list[_Span] = []  # those that begin before the present one and may reach it
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        reaching = [one for one in reaching if one.stop > span.start]
        for one in reaching:
            pair = (one, span) if one.place < span.place else (span, one)
            if first is not None and _places(pair) > _places(first):
                continue
            if (one.is_trained or span.is_trained) and _share_elements(one, span):
                first = pair
        reaching.append(span)
    return first


def _places(pair: tuple[_Span, _Span]) -> tuple[int, int]:
    return pair[0].place, pair[1].place


def _share_elements(one: _Span, other: _Span) -> bool:
    """Whether two tensors with overlapping spans share elements: columns of one matrix may interleave."""
    if one.is_dense and other.is_dense:
        return True
    first, stop = min(one.start, other.start), max(one.stop, other.stop)
    taken = torch.zeros(stop - first, dtype=torch.bool, device="cpu")
    one.mark(taken, first).fill_(True)
    return bool(other.mark(taken, first).any())


def _refuse(one: _Span, other: _Span) -> None:
    if not one.is_param or not other.is_param:
        param, buffer = (one, other) if one.is_param else (other, one)
        raise ConfigError(
            "model",
            buffer.name,
            f"a buffer that shares memory with the parameter {param.name} would not follow it: give it memory of its "
            f"own (clone()), or look the parameter up where it is used",
        )
    raise ConfigError(
        "model",
        other.name,
        f"a parameter that shares memory with {one.name} would be trained apart from it: tie them by assigning the "
        f"Parameter itself, {other.name} = {one.name}, or give it memory of its own (clone())",
    )
