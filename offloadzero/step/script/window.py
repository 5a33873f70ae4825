"""The gradients of one accumulation window, and the changes that scripts make to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offloadzero.access.gradient import GradientTensor, GradientValue
from offloadzero.core.fail_points import through
from offloadzero.core.torch_private import DisableTorchFunctionSubclass
from offloadzero.errors import StateError
from offloadzero.step.record_gradient import RecordGradient, WindowGradients
from offloadzero.step.script.assigned import Change, bring_home, passed_on
from offloadzero.step.script.param_grad import (
    KEEP_KEY,
    GradientAccess,
    GradientHandle,
    ParamGradient,
    drop_gradients,
)
from offloadzero.update.flat_layout import ParamSlot


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
        others: list[tuple[RecordGradient, GradientHandle, torch.Tensor]] = []
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
        bring_home(others, self._access)

    def settle_passed_on(self) -> None:
        """Bring swapped gradients home before another backward: [Note: gradients assigned from gradients]."""
        if self.gradients.present():
            others = [change for change in self._changed() if not change.handle.is_own(change.grad)]
            bring_home(passed_on(others), self._access)

    def _settle_own(self, gradient: RecordGradient, slot: ParamSlot) -> None:
        if slot.index not in gradient.present:
            raise StateError(
                f"{slot.name}.grad was lost with a backward that did not finish: call optimizer.zero_grad()"
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
                f"{slot.name}.grad was {'dropped' if grad is None else 'assigned'} before step(), but weights are "
                f"updated in backward: set {KEEP_KEY} to keep gradients until the step"
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


def _wear_zeros(gradient: RecordGradient, handle: GradientHandle) -> None:
    """Make the gradient zero, in no graph."""
    handle.param.grad = handle.tensor
    gradient.clear(handle.slot)


def _zero(grad: torch.Tensor) -> None:
    """Make a script's own gradient zero as torch.optim's zero_grad does; it may be a view."""
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()
