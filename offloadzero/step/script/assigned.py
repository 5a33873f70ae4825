"""Gradients that scripts have assigned or dropped, brought home before the step.

[Note: gradients assigned from gradients]
`a.grad, b.grad = b.grad, a.grad` and `p.grad = p.grad.t()` put tensors into `param.grad` that stand for a gradient in
some home, another parameter's or the parameter's own. So each home is read by all that are assigned from it before it
is overwritten. Where parameters have passed their gradients on in a ring, one of them is copied first. One value is in
memory at a time, and one such copy.

A swap is brought home before the next backward, too: where that backward brings a parameter's gradient, the home is for
that one alone. A gradient that is the `grad` of several parameters, its own among them or not, stays: there autograd
adds for all of them, as it does in torch.

If an interrupt comes on the way, the parameter has the plain value in its `grad`, and the next step takes that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from offloadzero.access.gradient import GradientTensor, GradientValue
from offloadzero.core.fail_points import through
from offloadzero.core.torch_private import DisableTorchFunctionSubclass
from offloadzero.step.record_gradient import RecordGradient
from offloadzero.step.script.param_grad import GradientAccess, GradientHandle, expect_dense

Place = TypeVar("Place")


class Change(NamedTuple):
    """A parameter whose `param.grad` differs from the gradient that backward has brought; None: it was dropped."""

    state: RecordGradient
    handle: GradientHandle
    grad: Tensor | None


def assignment_order(reads: Mapping[Place, Place]) -> Iterator[tuple[Place, bool]]:
    """Order assignments so that each place is assigned after all have read it; `reads` gives the source of each.

    A place with True: its source is to be copied now, and the place comes again when it can be assigned.
    """
    num_readers = Counter(source for target, source in reads.items() if source != target)

    def assign(target: Place) -> Iterator[tuple[Place, bool]]:
        while True:
            yield target, False
            source = reads[target]
            num_readers[source] -= 1
            if num_readers[source] != 0 or source not in reads or source == target:
                return
            target = source

    for target in [target for target in reads if not num_readers[target]]:
        yield from assign(target)
    for target, source in reads.items():
        if num_readers[target] > 0:  # the place is in a ring
            yield target, True
            num_readers[source] -= 1
            yield from assign(source)


def passed_on(changes: Sequence[Change]) -> list[Change]:
    """Choose what to bring home before another backward: gradients that another parameter has got, and only that one.

    The parameters that gave them away come along as dropped: their present `grad` is for their next gradient, or the
    step.
    """
    changed = {change.handle.source for change in changes}
    worn = [(change, change.grad) for change in changes if isinstance(change.grad, GradientTensor)]
    num_wearers = Counter(grad.source for _, grad in worn)
    got = {
        change.handle.source: grad.source
        for change, grad in worn
        if grad.source in changed
        and grad.source is not change.handle.source
        and num_wearers[grad.source] == 1
        and not grad.requires_grad
    }
    given = set(got.values())
    return [
        change if change.handle.source in got else change._replace(grad=None)
        for change in changes
        if change.handle.source in got or change.handle.source in given
    ]


def bring_home(changes: Sequence[Change], access: GradientAccess) -> None:
    """Make assigned gradients the gradients, and leave dropped ones out: [Note: gradients assigned from gradients]."""
    by_source: dict[GradientValue, Change] = {change.handle.source: change for change in changes}
    reads = {
        source: change.grad.source
        for source, change in by_source.items()
        if isinstance(change.grad, GradientTensor)
    }
    for source, is_to_be_copied in assignment_order(reads):
        _take(by_source[source], access, keep=reads[source] not in by_source, is_to_be_copied=is_to_be_copied)
    for source, change in by_source.items():
        if source not in reads and change.grad is not None:
            _put(change, change.grad, access)
    for change in changes:
        if change.grad is None:
            access.drop(change.state, change.handle.slot)
            change.handle.drop()


def _take(change: Change, access: GradientAccess, *, keep: bool, is_to_be_copied: bool) -> None:
    """Store the gradient that `param.grad` stands for; `keep`: it goes on to stand for it."""
    param = change.handle.param
    with DisableTorchFunctionSubclass():
        value = param.grad
        if isinstance(value, GradientTensor):
            value = value.read()
            if not keep:
                param.grad = value
        if value is None or is_to_be_copied:
            return
        _put(change, value, access)
        if not keep:
            param.grad = change.handle.tensor


def _put(change: Change, value: Tensor, access: GradientAccess) -> None:
    expect_dense(change.handle.slot, value)
    change.handle.drop()
    slot = change.handle.slot
    through("gradient.store", access.store, slot.name)(change.state, slot, value)
