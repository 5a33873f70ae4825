"""The states of an offloaded optimizer as scripts see them, in `optimizer.state` and `state_dict()`.

Their tensors stand for the states as those of a model's state dict for the weights: `exp_avg.mul_(0.5)` changes the
state. [Note: state dicts] in access/state_dict.py
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from offloadzero.access.state_dict import HostValue, StateTensor, state_tensor
from offloadzero.access.tensor import RemoteValue
from offloadzero.access.weight_access import WeightAccess
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError, StateError
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


class _State(RemoteValue):
    """One state of one parameter."""

    def __init__(
        self,
        weights: WeightAccess,
        record: Record,
        slot: ParamSlot,
        key: str,
        dtype: torch.dtype = torch.float32,
        shape: torch.Size | None = None,
    ) -> None:
        super().__init__(
            f"{slot.name}.{key}", slot.shape if shape is None else shape, dtype, torch.device("cpu")
        )
        self._weights = weights
        self._record = record
        self.slot = slot
        self.key = key

    @property
    def version(self) -> tuple[int, ...]:
        """Numbers that differ after each change of this value."""
        slot = self.slot  # whose master is written whenever it is
        kinds = [SegmentKind.PARAM if self.key == "master" else SegmentKind(self.key)]
        if self.key not in ("master", "step", *self._record.spec.states):  # codes, of which states are made
            kinds = [*self._record.spec.states, SegmentKind.SCALES]
        writes = sum(slot.num_writes[kind] for kind in kinds)
        return self._weights.num_updates(self._record), slot.step, writes

    def read_to_host(self) -> torch.Tensor:
        """Read the value from its home."""
        if self.key == "step":
            return torch.tensor(float(self._weights.homes.read_step(self._record, self.slot)), device="cpu")
        if self.key == "master":
            return self._weights.read_master(self._record, self.slot)
        if self.key in self._record.spec.states:
            return self._weights.states.read(self._record, self.slot, SegmentKind(self.key))
        if self._record.codes is None:
            raise AssertionError(f"{self.name} is no state")
        kinds = {name: kind for name, kind, *_ in self._record.codes.specs(self.slot.shape)}
        return self._weights.homes.read(self._record, self.slot, kinds[self.key]).view(self.shape)

    def write(self, value: torch.Tensor) -> None:
        """Write a value to its home."""
        if self.key == "step":
            self._weights.homes.write_step(self._record, self.slot, step_count(self.name, value))
        elif self.key == "master":
            self._weights.write(self._record, self.slot, value)
        elif self.key in self._record.spec.states:
            self._weights.states.write(self._record, self.slot, SegmentKind(self.key), value)
        else:
            raise StateError(
                f"{self.name}: the codes of the compact layout are not to be written: write "
                f"{' or '.join(self._record.spec.states)}, whose codes they are"
            )


def stands_for_another(value: object, slot: ParamSlot) -> bool:
    """Whether a value of a state dict is read from the states of another parameter than that of `slot`."""
    source = value.source if isinstance(value, StateTensor) else None
    state = source.value if isinstance(source, HostValue) else None
    return isinstance(state, _State) and state.slot is not slot


def step_count(name: str, value: Any) -> int:
    """Return the number of steps that a state holds, in torch as a tensor. Raises ConfigError for no whole number."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or number != int(number):
        raise ConfigError(name, value if isinstance(value, str) else number, "a whole number of steps")
    return int(number)


def read_states(weights: WeightAccess, record: Record, slot: ParamSlot) -> dict[str, torch.Tensor]:
    """Tensors that stand for one parameter's states, by the names of torch's optimizer."""
    states = [_State(weights, record, slot, kind.value) for kind in record.spec.states]
    if record.spec.counts_steps:
        states.append(_State(weights, record, slot, "step", shape=torch.Size()))
    if record.dtype != torch.float32:
        states.append(_State(weights, record, slot, "master"))
    if record.codes is not None:
        states += [
            _State(weights, record, slot, name, dtype, shape)
            for name, _, dtype, shape in record.codes.specs(slot.shape)
        ]
    at_once = not all(weights.homes.reads_alone(record, one) for one in record.segments.values())
    return {
        state.key: state_tensor(state, weights, at_once=at_once, taken_with="state_dict() or optimizer.state")
        for state in states
    }


class _States(dict[str, Any]):
    """A dict of states whose copies are ordinary ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # a form that torch.load() takes for safe


class StateDict(_States):
    """The dict that `optimizer.state_dict()` returns. Its `copy()` copies the tensors, too.

    torch's `load_state_dict` keeps the tensors that it is given, and its steps would write into these states; but it
    calls `copy()` first.
    """

    def copy(self) -> dict[str, Any]:
        """Return a copy that is independent of the optimizer."""
        return copy.deepcopy(dict(self))


class ParamStates(_States):
    """The value of `optimizer.state[param]`: assigning to an item writes it; items can neither be added nor removed."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self:
            self._refuse(key)
        self[key].copy_(torch.as_tensor(value, device="cpu"))

    def update(self, *others: Any, **more: Any) -> None:
        """Assign each item."""
        for key, value in dict(*others, **more).items():
            self[key] = value

    def __ior__(self, other: Any) -> ParamStates:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:  # noqa: ARG002 (dict's signature)
        """Return the item; one that does not exist cannot be added: StateError."""
        if key not in self:
            self._refuse(key)
        return self[key]

    def _refuse(self, key: str = "clear(), popitem()", *_: Any) -> NoReturn:
        raise StateError(
            f"optimizer.state[param]: {key}: an offloaded optimizer has the states {', '.join(self)}; what they hold "
            "can be changed, none can be added or removed"
        )

    __delitem__ = pop = popitem = clear = _refuse


class States(defaultdict[torch.Tensor, Any]):
    """The mapping `optimizer.state`: `state[param]` reads a parameter's states from their tiers; it shows no keys.

    Scripts that iterate over the keys would move the tensors that they find to the device. `bool(state)` is still True:
    with an optimizer whose `state` is empty torch's checkpoint functions take a step of zero gradients, so that there
    are states to save.
    """

    def __init__(self, read: Callable[[torch.Tensor], dict[str, Any] | None]) -> None:
        """`read` gives None for a parameter that was frozen when the model was offloaded."""
        super().__init__()
        self._read = read

    def __bool__(self) -> bool:
        return True

    def __missing__(self, param: torch.Tensor) -> dict[str, Any]:
        return ParamStates(self._read(param) or {})  # torch's is empty, too, for a frozen one

    def get(self, key: Any, default: Any = None) -> Any:
        """Return `states[key]`, or a default for a parameter that has no states."""
        try:
            values = self._read(key)
        except KeyError:
            return default
        return default if values is None else ParamStates(values)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse_states()

    __setitem__ = __delitem__ = __ior__ = clear = update = pop = popitem = setdefault = _refuse


def refuse_states() -> NoReturn:
    """Raise StateError: a call would replace states which are not here."""
    raise StateError(
        "optimizer.state of an offloaded optimizer cannot be replaced, the states live in their tiers: write into "
        'optimizer.state[param]["exp_avg"], or use load_state_dict() or '
        "offloadzero.zero.safe_set_full_optimizer_state(param, value, name)"
    )
