"""The gradients of one accumulation window, and what scripts have made of them (floor 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from offloadzero.errors import StateError
from offloadzero.parameters.gradient import GradientSource, GradientTensor
from offloadzero.step.assigned import Change, bring_home, passed_on
from offloadzero.step.param_grad import (
    KEEP_KEY,
    GradientAccess,
    GradientHandle,
    ParamGradient,
    drop_gradients,
)
from offloadzero.step.record_gradient import RecordGradient, WindowGradients
from offloadzero.torch_private import DisableTorchFunctionSubclass
from offloadzero.update.flat_layout import ParamSlot


class GradientWindow:
    """Settles what scripts have done to `param.grad` with what is at home: [Note: the life of param.grad]."""

    def __init__(
        self,
        gradients: WindowGradients,
        access: GradientAccess,
        *,
        keeps_after_step: bool,
        may_not_train: Sequence[ParamSlot],
    ) -> None:
        """Args:
        keeps_after_step: gradients stay until they are dropped, as torch's do; else the step drops them.
        may_not_train: parameters that the optimizer would train, had they not been frozen when the model was offloaded.
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

    # --- its end ---

    def close(self) -> list[RecordGradient]:
        """Its gradients, in the records' order, for a step that takes them."""
        present = self.gradients.present()
        if self._keeps_after_step:
            return [gradient.as_of_now() for gradient in present]
        self.drop()
        return present

    def drop(self) -> None:
        """A new window, in which no parameter has a gradient yet."""
        self.gradients.renew()
        self.drop_tensors()

    def drop_tensors(self) -> None:
        """No parameter has a gradient any more."""
        with DisableTorchFunctionSubclass():
            for handles in self.handles.values():
                drop_gradients(handles)
            for slot in self._may_not_train:
                slot.param.grad = None

    def zero(self) -> None:
        """A new window, in which the gradients that are there are zero."""
        self.gradients.renew()
        others: list[tuple[RecordGradient, GradientHandle, torch.Tensor]] = []
        zeroed: set[GradientSource] = set()
        for index, handles in self.handles.items():
            for handle in handles:
                handle.source.contribution = None
                with DisableTorchFunctionSubclass():
                    grad = handle.param.grad
                if handle.is_own(grad):
                    _wear_zeros(self.gradients[index], handle)
                    zeroed.add(handle.source)
                elif grad is not None:
                    others.append((self.gradients[index], handle, grad))
        for gradient, handle, grad in others:
            source = grad.source if isinstance(grad, GradientTensor) else None
            if source in zeroed:  # another parameter's gradient, which both go on to wear
                handle.param.grad = grad.detach() if grad.requires_grad else grad
            elif isinstance(source, ParamGradient):
                _wear_zeros(gradient, handle)  # nobody's gradient is at home there any more
            else:
                _zero(grad)

    # --- before a backward, before a step ---

    def set_aside(self, index: int, number: int) -> SetAside:
        """The gradient with which a backward begins: that of a parameter, by its record and its slot there."""
        return SetAside(self.handles[index][number])

    def settle(self) -> None:
        """Before the step: what scripts have assigned comes home, what they have dropped is left out."""
        others = []
        for change in self._changed():
            if change.handle.is_own(change.grad):
                self._settle_own(change.state, change.handle.slot)
            else:
                others.append(change)
        bring_home(others, self._access)

    def settle_passed_on(self) -> None:
        """Before another backward of the window: [Note: gradients assigned from gradients]."""
        if self.gradients.present():
            others = [change for change in self._changed() if not change.handle.is_own(change.grad)]
            bring_home(passed_on(others), self._access)

    def _settle_own(self, gradient: RecordGradient, slot: ParamSlot) -> None:
        if slot.index not in gradient.present:
            raise StateError(
                f"{slot.name}.grad was lost with a backward that did not finish: call optimizer.zero_grad()"
            )
        if slot.index in gradient.zeroed:
            zeros = torch.zeros(slot.num_elements, dtype=gradient.record.dtype)
            self._access.store(gradient, slot, zeros)

    def _changed(self) -> Iterator[Change]:
        """The parameters, with `param.grad`, where that is not the gradient that backward has brought."""
        for index, gradient in self.gradients.items():
            handles = self.handles[index]
            is_whole = gradient.is_full and not gradient.zeroed
            with DisableTorchFunctionSubclass():
                # Of most records nothing is left to look at.
                grads = [(h, h.param.grad) for h in handles if not is_whole or h.param.grad is not h.tensor]
            for handle, grad in grads:
                is_present = handle.slot.index in gradient.present
                if grad is handle.tensor:
                    if not is_present or gradient.zeroed:
                        yield Change(gradient, handle, grad)
                elif grad is not None or is_present:
                    yield Change(gradient, handle, grad)

    # --- what is refused ---

    def expect_untouched(self) -> None:
        """Where the update has run in backward, a gradient that was dropped or assigned since is an error."""
        for gradient, handle, grad in self._changed():
            if handle.is_own(grad):
                continue
            slot = handle.slot
            slot.param.grad = handle.tensor if slot.index in gradient.present else None
            raise StateError(
                f"{slot.name}.grad was {'dropped' if grad is None else 'assigned'} before step(), but weights are "
                f"updated in backward: set {KEEP_KEY} to keep gradients until the step"
            )

    def expect_unchanged(self, world_size: int) -> None:
        """Where gradients are those of several ranks, one that a rank has dropped or assigned is an error."""
        for _, handle, grad in self._changed():
            raise StateError(
                f"{handle.slot.name}.grad was {'dropped' if grad is None else 'assigned'} before step(): it is "
                f"the mean over {world_size} ranks, and edits of that are not built"
            )

    def expect_frozen(self) -> None:
        """A parameter that was frozen when the model was offloaded has no states to train it with."""
        with DisableTorchFunctionSubclass():
            for slot in self._may_not_train:
                if slot.param.requires_grad:
                    raise StateError(
                        f"{slot.name}: was frozen when the model was offloaded, so it has no optimizer state: unfreeze "
                        "it before offload() or initialize() (it may be frozen again right after)"
                    )


class SetAside:
    """What autograd has put into a parameter's `grad`: out of sight until it is known whether its backward may begin.

    The caller disables torch functions.
    """

    def __init__(self, handle: GradientHandle) -> None:
        self._handle = handle
        self._grad = grad = handle.param.grad
        self._is_remote = isinstance(grad, GradientTensor)
        if not handle.is_own(grad):
            handle.param.grad = None  # as it was before this backward, unless it is the script's own

    def show_assigned(self) -> None:
        """A gradient tensor, which a script has put there, is in its place again."""
        if self._is_remote:
            self._handle.param.grad = self._grad

    def show(self) -> None:
        """It is in its place again, whatever it is."""
        if not self._is_remote:
            self._handle.param.grad = self._grad

    def drop(self) -> None:
        """What this backward has brought is not taken, and must not be there for the next one."""
        self._handle.source.contribution = None


def _wear_zeros(gradient: RecordGradient, handle: GradientHandle) -> None:
    """The gradient is there, in no graph, and zero."""
    handle.param.grad = handle.tensor
    gradient.present |= {handle.slot.index}
    gradient.zeroed.add(handle.slot.index)


def _zero(grad: torch.Tensor) -> None:
    """A script's own gradient, which may be a view: as torch.optim's zero_grad does it."""
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()
