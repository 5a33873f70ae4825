"""The gradients of one accumulation window, and the changes that scripts make to them, brought home before the step.

[Note: gradients assigned from gradients]
`a.grad, b.grad = b.grad, a.grad` and `p.grad = p.grad.t()` put tensors into `param.grad` that stand for a gradient in
some home, another parameter's or the parameter's own. So all of them are read before one is written. A parameter has
the plain value in its `grad` meanwhile: if an interrupt comes on the way, the next step takes that.

In another backward the home of a gradient that its parameter has given away would get the next one: that is an error. A
gradient that is the `grad` of its parameter and of others stays: there autograd adds for all of them, as it does in
torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offloadzero.access.gradient import GradientTensor, GradientValue
from offloadzero.core.fail_points import through
from offloadzero.core.torch_private import DisableTorchFunctionSubclass
from offloadzero.errors import StateError
from offloadzero.step.param_grad import (
    KEEP_KEY,
    GradientAccess,
    GradientHandle,
    ParamGradient,
    drop_gradients,
    expect_dense,
)
from offloadzero.step.record_gradient import RecordGradient, WindowGradients
from offloadzero.update.flat_layout import ParamSlot


class Change(NamedTuple):
    """A parameter whose `param.grad` differs from the gradient that backward has brought; None: it was dropped."""

    state: RecordGradient
    handle: GradientHandle
    grad: Tensor | None


class GradientWindow:
    """Brings the changes that scripts make to `param.grad` home: [Note: the life of param.grad]."""

    def __init__(
        self,
        gradients: WindowGradients,
        access: GradientAccess,
        *,
        keeps_after_step: bool,
        may_not_train: Sequence[ParamSlot],
    ) -> None:
        """Open the first window.

        Args:
            keeps_after_step: gradients stay until they are dropped, as torch's do; else the step drops them.
            may_not_train: parameters of the optimizer that were frozen when the model was offloaded.
        """
        self.gradients = gradients
        self.handles = {index: access.handles(gradient.record) for index, gradient in gradients.items()}
        self._access = access
        self._keeps_after_step = keeps_after_step
        self._may_not_train = tuple(may_not_train)

    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient."""
        with DisableTorchFunctionSubclass():
            for handles in self.handles.values():
                for handle in handles:
                    if handle.param.grad is not None:
                        return True
        return False

    # --- the end of a window ---

    def close(self) -> list[RecordGradient]:
        """Return the window's gradients, in the records' order, for a step that takes them."""
        present = self.gradients.present()
        if self._keeps_after_step:
            return [gradient.as_of_now() for gradient in present]
        self.drop()
        return present

    def drop(self) -> None:
        """Begin a new window, in which no parameter has a gradient yet."""
        self.gradients.renew()
        self.drop_tensors()

    def drop_tensors(self) -> None:
        """Set every parameter's gradient to None."""
        with DisableTorchFunctionSubclass():
            for handles in self.handles.values():
                drop_gradients(handles)
            for slot in self._may_not_train:
                slot.param.grad = None

    def zero(self) -> None:
        """Begin a new window, in which the present gradients are zero."""
        self.gradients.renew()
        others: list[tuple[RecordGradient, GradientHandle, Tensor]] = []
        zeroed: set[GradientValue] = set()
        for index, handles in self.handles.items():
            for handle in handles:
                handle.source.take_contribution()
                with DisableTorchFunctionSubclass():
                    grad = handle.param.grad
                if handle.is_own(grad):
                    _wear_zeros(self.gradients[index], handle)
                    zeroed.add(handle.source)
                elif grad is not None:
                    others.append((self.gradients[index], handle, grad))
        for gradient, handle, grad in others:
            source = grad.source if isinstance(grad, GradientTensor) else None
            if source in zeroed:  # another parameter's gradient, which both still have as `grad`
                handle.param.grad = grad.detach() if grad.requires_grad else grad
            elif isinstance(source, ParamGradient):
                _wear_zeros(gradient, handle)  # that gradient is in no home any more
            else:
                _zero(grad)

    # --- before a backward, before a step ---

    def set_aside(self, index: int, number: int) -> SetAside:
        """Set aside the gradient with which a backward begins; numbers give the parameter's record and slot."""
        return SetAside(self.handles[index][number])

    def settle(self) -> None:
        """Bring assigned gradients home before the step, and leave dropped ones out. StateError for a lost one."""
        others = []
        for change in self._changed():
            if change.handle.is_own(change.grad):
                self._settle_own(change.state, change.handle.slot)
            else:
                others.append(change)
        given_up = {change.handle.source for change in others}  # their parameters wear others now
        found = [(change, _read_assigned(change, given_up)) for change in others]
        for (state, handle, grad), value in found:
            handle.drop()
            if value is None:
                self._access.drop(state, handle.slot)
                continue
            expect_dense(handle.slot, value)
            through("gradient.store", self._access.store, handle.slot.name)(state, handle.slot, value)
            if isinstance(grad, GradientTensor) and grad.source in given_up:
                with DisableTorchFunctionSubclass():
                    handle.param.grad = handle.tensor

    def expect_none_given_away(self) -> None:
        """Refuse another backward where a gradient was given away: [Note: gradients assigned from gradients].

        The home of such a gradient is for its parameter's next one.
        """
        if not self.gradients.present():
            return
        others = {c.handle.source: c for c in self._changed() if not c.handle.is_own(c.grad)}
        for source, (_, handle, grad) in others.items():
            if isinstance(grad, GradientTensor) and grad.source is not source and grad.source in others:
                raise StateError(
                    f"{handle.slot.name}.grad is the gradient of {grad.source.name}, whose memory this backward will "
                    "overwrite: assign a clone() of it, or call step() before"
                )

    def _settle_own(self, gradient: RecordGradient, slot: ParamSlot) -> None:
        if slot.index not in gradient.present:
            raise StateError(
                f"{slot.name}.grad is incomplete, because its backward did not finish: call optimizer.zero_grad()"
            )
        if slot.index in gradient.zeroed:
            zeros = torch.zeros(slot.num_elements, dtype=gradient.record.dtype, device="cpu")
            through("gradient.store", self._access.store, slot.name)(gradient, slot, zeros)

    def _changed(self) -> Iterator[Change]:
        """Yield the parameters whose `param.grad` is not the gradient that backward has brought."""
        for index, gradient in self.gradients.items():
            handles = self.handles[index]
            is_whole = gradient.is_full and not gradient.zeroed
            with DisableTorchFunctionSubclass():
                # For most records nothing is left to look at.
                grads = [(h, h.param.grad) for h in handles if not is_whole or h.param.grad is not h.tensor]
            for handle, grad in grads:
                is_present = handle.slot.index in gradient.present
                if grad is handle.tensor:
                    if not is_present or gradient.zeroed:
                        yield Change(gradient, handle, grad)
                elif grad is not None or is_present:
                    yield Change(gradient, handle, grad)

    # --- refusals ---

    def expect_untouched(self) -> None:
        """Refuse a gradient that was dropped or assigned where the update has already run in backward."""
        for gradient, handle, grad in self._changed():
            if handle.is_own(grad):
                continue
            slot = handle.slot
            slot.param.grad = handle.tensor if slot.index in gradient.present else None
            raise StateError(
                f"{slot.name}.grad was {'dropped' if grad is None else 'assigned'} before step(), but backward has "
                f"already updated the weights: set {KEEP_KEY} to keep gradients until the step"
            )

    def expect_frozen(self) -> None:
        """Refuse to train a parameter that was frozen when the model was offloaded: it has no states."""
        with DisableTorchFunctionSubclass():
            for slot in self._may_not_train:
                if slot.param.requires_grad:
                    raise StateError(
                        f"{slot.name}: was frozen when the model was offloaded, so it has no optimizer state: unfreeze "
                        "it before offload() or initialize() (it may be frozen again right after)"
                    )


class SetAside:
    """A gradient that autograd has put into `param.grad`, out of sight until it is known whether its backward may
    begin.

    The caller disables torch functions.
    """

    def __init__(self, handle: GradientHandle) -> None:
        self._handle = handle
        self._grad = grad = handle.param.grad
        self._is_remote = isinstance(grad, GradientTensor)
        if not handle.is_own(grad):
            handle.param.grad = None  # its state before this backward, unless the tensor is the script's own

    def show_assigned(self) -> None:
        """Put a gradient tensor that a script has assigned back in its place."""
        if self._is_remote:
            self._handle.param.grad = self._grad

    def show(self) -> None:
        """Put any other tensor back in its place."""
        if not self._is_remote:
            self._handle.param.grad = self._grad

    def drop(self) -> None:
        """Forget this backward's gradient, so that it is not there for the next one."""
        self._handle.source.take_contribution()


def _read_assigned(change: Change, given_up: Container[GradientValue]) -> Tensor | None:
    """Return the value that was assigned; one that is read from a home whose parameter has given it up is worn."""
    grad = change.grad
    if not isinstance(grad, GradientTensor):
        return grad
    value = grad.read()
    if grad.source in given_up:
        with DisableTorchFunctionSubclass():
            change.handle.param.grad = value
    return value


def _wear_zeros(gradient: RecordGradient, handle: GradientHandle) -> None:
    """Make the gradient zero, in no graph."""
    handle.param.grad = handle.tensor
    gradient.clear(handle.slot)


def _zero(grad: Tensor) -> None:
    """Make a script's own gradient zero as torch.optim's zero_grad does; it may be a view."""
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()
