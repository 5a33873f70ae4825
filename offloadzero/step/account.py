"""The account of one step: its hyperparameters, and the part of it that was applied.

[Note: what an interrupted step leaves]
`step()` first does all that waits or may raise, and this changes nothing; then it hands the gradients over, which is
done as a whole. So a step was taken or it was not. Where gradients are applied at the step, a backward that did not
end, or a gradient that is not finite, has changed no state: `zero_grad()` drops the gradients and training goes on.

Where they are applied in backward, an interrupt that comes after the first update has begun waits for the end of that
backward, and `step()` closes the step. After a second interrupt, or a gradient that is not finite, some units may have
taken the step and others not. Training cannot go on from that state. It can be read and saved, and the error says which
units are which; a checkpoint that is loaded replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offloadzero.errors import NonFiniteError, OffloadError
from offloadzero.memory.tickets import Failures
from offloadzero.update.spec import Hyper

Hypers = Sequence[Hyper]  # by group index

MAX_NAMES = 12  # units named in a message


def names_text(names: Sequence[str]) -> str:
    """Return the names of units for a message."""
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


@dataclass(eq=False)
class Account:
    """One step: its hyperparameters, and the units that it has updated: [Note: what an interrupted step leaves]."""

    step: int
    hypers: Hypers = ()
    applied: list[str] = field(default_factory=list)  # units that backward has updated, by name
    refused: OffloadError | None = None  # the error for which backward updates no more units
    is_closed: bool = False  # step() has come after the backward that updates

    def close(self) -> None:
        """Note that step() has come after the backward that updates."""
        self.is_closed = True

    def note_applied(self, name: str) -> None:
        """Note that backward updates the unit of that name."""
        self.applied.append(name)

    def refuse(self, error: OffloadError | None) -> None:
        """Let backward update no more units, because of `error`; None: nothing stands against them."""
        self.refused = error


class Accounts:
    """Knows which units of a step were updated, and stops the training over a step that goes no further."""

    def __init__(self, failures: Failures, units: Sequence[str]) -> None:
        """Make the accounts. `units` are the names of the units that train."""
        self._failures = failures
        self._units = tuple(units)
        self.stopped = Account(0)  # the account that has stopped the training, if `Failures.stop` says so

    def stop(self, account: Account, error: OffloadError) -> None:
        """Stop the step here, and let no other begin."""
        account.refuse(error)
        self.stopped = account
        self._failures.stop_training(error)

    def refuse(self, account: Account, names: Sequence[str]) -> None:
        """Stop the step here: the gradients of the units of those names are not finite."""
        error = NonFiniteError(
            f"step {account.step}: the gradient of {names_text(names)} holds NaN or Inf; {self.applied_text(account)}. "
            + ("" if account.applied else "zero_grad() lets training go on without this step. ")
            + '("offloadzero": {"update": {"on_nonfinite": "skip"}} skips such steps.)'
        )
        self.stop(account, error)

    def applied_text(self, account: Account) -> str:
        """Return a text about the units that a step has updated which was not applied as a whole."""
        applied = list(account.applied)
        others = [name for name in self._units if name not in applied]
        if not applied:
            return "nothing of it was applied"
        return (
            f"the weights are updated in backward, and of step {account.step} the updates of {len(applied)} units were "
            f"applied ({names_text(applied)}) and those of {len(others)} were not ({names_text(others)}). Training "
            "cannot go on from there. The states can be saved as they are; load_checkpoint() of an earlier checkpoint "
            "makes them whole"
        )
