"""The gradients of one accumulation window, and the changes that scripts make to them, brought home before the step.

[Note: gradients assigned from gradients]
`a.grad, b.grad = b.grad, a.grad` and `p.grad = p.grad.t()` put tensors into `param.grad` that stand for a gradient in
some home, another parameter's or in another form, where the next gradient or another assigned one would be written.
That is an error at the step and at another backward: a copy has a value of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offloadzero.access.gradient import GradientTensor
from offloadzero.core.fail_points import through
from offloadzero.core.torch_private import DisableTorchFunctionSubclass
from offloadzero.errors import StateError
from offloadzero.step.param_grad import (
    KEEP_KEY,
    GradientAccess,
    GradientHandle,
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
        for index, handles in self.handles.items():
            for handle in handles:
                handle.source.take_contribution()
                with DisableTorchFunctionSubclass():
                    grad = handle.param.grad
                if isinstance(grad, GradientTensor):
                    handle.param.grad = handle.tensor  # in no graph
                    self.gradients[index].clear(handle.slot)
                elif grad is not None:
                    _zero(grad)

    # --- before a backward, before a step ---

    def set_aside(self, index: int, number: int) -> SetAside:
        """Set aside the gradient with which a backward begins; numbers give the parameter's record and slot."""
        return SetAside(self.handles[index][number])

    def settle(self) -> None:
        """Bring assigned gradients home before the step, and leave dropped ones out.

        Raises StateError for a lost one, and for one that was assigned from another.
        """
        changed = list(self._changed())
        _expect_values(changed)
        for state, handle, grad in changed:
            if handle.is_own(grad):
                self._settle_own(state, handle.slot)
                continue
            handle.drop()
            if grad is None:
                self._access.drop(state, handle.slot)
                continue
            expect_dense(handle.slot, grad)
            through("gradient.store", self._access.store, handle.slot.name)(state, handle.slot, grad)

    def expect_values(self) -> None:
        """Refuse another backward where a gradient was assigned from another one. Raises StateError."""
        if self.gradients.present():
            _expect_values(self._changed())

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


def _expect_values(changed: Iterable[Change]) -> None:
    """Raise StateError for a gradient that stands for another one: [Note: gradients assigned from gradients]."""
    for _, handle, grad in changed:
        if isinstance(grad, GradientTensor) and not handle.is_own(grad):
            form = " in another form" if grad.source is handle.source else ""
            raise StateError(
                f"{handle.slot.name}.grad is a gradient that was {grad.source.name}{form}, whose place is needed for "
                "another one: assign a copy, clone()"
            )


def _zero(grad: Tensor) -> None:
    """Make a script's own gradient zero as torch.optim's zero_grad does; it may be a view."""
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()
