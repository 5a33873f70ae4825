"""`optimizer.state` of an offloaded optimizer: what it answers without holding anything (floor 6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from offloadzero.errors import StateError


class States(defaultdict[torch.Tensor, Any]):
    """Empty, as the states live in the tiers; an item is read from there: new host tensors, not to be written.

    It says that it is empty because those who iterate over it move what they find to the device.
    """

    def __init__(self, read: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, param: torch.Tensor) -> dict[str, Any]:
        return self._read(param)

    def get(self, key: Any, default: Any = None) -> Any:
        """As `states[key]`, with a default for what the optimizer does not hold."""
        try:
            return self._read(key)
        except KeyError:
            return default

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse()

    def __delitem__(self, key: Any) -> NoReturn:
        self._refuse()

    def clear(self) -> NoReturn:
        """Refused: there is nothing here to clear."""
        self._refuse()

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the states are not here."""
        self._refuse()

    def pop(self, *_: Any) -> NoReturn:
        """Refused: the states are not here."""
        self._refuse()

    def setdefault(self, key: Any, default: Any = None) -> NoReturn:  # noqa: ARG002 (dict's signature)
        """Refused: the states are not here."""
        self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise StateError(
            "optimizer.state of an offloaded optimizer cannot be changed, the states live in their tiers: use "
            "load_state_dict(), or offloadzero.zero.safe_set_full_optimizer_state(param, value, name)"
        )
