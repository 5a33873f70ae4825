"""The description of a machine, memory and rates, as a file that says which machine it describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from offloadzero.errors import ConfigError
from offloadzero.planning.fit import Memory
from offloadzero.planning.time_model import Rates
from offloadzero.update.spec import UpdateForm

FORMAT = "offloadzero.hardware"
FORMAT_VERSION = 1
_MAX = 1e24
_TABLES = ("flops", "update", "device_update")  # tables of Rates, by dtype or layout


@dataclass(frozen=True)
class Hardware:
    """One machine. `memory.nvme` has the bytes of the measured drives."""

    memory: Memory
    rates: Rates
    num_cores: int
    device: str | None = None  # its name; None: the CPU is the device
    adam_form: UpdateForm = UpdateForm.NATIVE  # the form of Adam's updates on the device
    process_bytes: int = 0  # of Python and torch, before there is a model
    memlock_bytes: int | None = None  # RLIMIT_MEMLOCK; None: no limit
    identity: Mapping[str, Any] = field(default_factory=dict)  # facts that tell it from other machines

    @property
    def device_is_cpu(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.memory.device is None

    def to_json(self) -> dict[str, Any]:
        """Return the object that `hardware_from_json` reads."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "adam_form": self.adam_form.value,
        }


def hardware_from_json(key: str, value: Mapping[str, Any]) -> Hardware:
    """Read the machine that a file describes, for a command's argument `key`. Raises ConfigError."""
    reader = _Reader(key, value)
    reader.expect(fields(Hardware), more=("format", "format_version"))
    form = reader.value.get("adam_form", UpdateForm.NATIVE.value)
    forms = [one.value for one in UpdateForm]
    if form not in forms:
        raise ConfigError(f"{key}.adam_form", form, f"one of {', '.join(forms)}", known_values=forms)
    device = reader.value.get("device")
    if device is not None and not isinstance(device, str):
        raise ConfigError(f"{key}.device", device, "a name, or null where the CPU is the device")
    rates = reader.table("rates")
    rates.expect(fields(Rates))
    memory = reader.table("memory")
    memory.expect(fields(Memory))
    found: dict[str, Any] = {name: rates.numbers(name) for name in _TABLES}
    found |= {one.name: rates.number(one.name) for one in fields(Rates) if one.name not in _TABLES}
    return Hardware(
        memory=Memory(
            host=memory.count("host") or 0, device=memory.count("device"), nvme=memory.count("nvme")
        ),
        rates=Rates(**found),
        num_cores=reader.count("num_cores") or 1,
        device=device,
        adam_form=UpdateForm(form),
        process_bytes=reader.count("process_bytes") or 0,
        memlock_bytes=reader.count("memlock_bytes"),
        identity=reader.table("identity").value,
    )


class _Reader:
    """Reads the numbers of an object in JSON; its errors have dotted names."""

    def __init__(self, name: str, value: Mapping[str, Any]) -> None:
        self._name = name
        self.value = value

    def expect(self, known: tuple[Any, ...], *, more: tuple[str, ...] = ()) -> None:
        """Raise ConfigError for a name that is none of a dataclass's fields."""
        names = [*(one.name for one in known), *more]
        for name in self.value:
            if name not in names:
                raise ConfigError(f"{self._name}.{name}", self.value[name], "no such entry", known_keys=names)

    def table(self, name: str) -> _Reader:
        """Return an object; an empty one where it is absent."""
        found = self.value.get(name)
        if found is None:
            found = {}
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self._name}.{name}", found, "an object")
        return _Reader(f"{self._name}.{name}", found)

    def number(self, name: str) -> float | None:
        """Return a positive number, or None: not known."""
        found = self.value.get(name)
        if found is None:
            return None
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not math.isfinite(found) or not 0 < found < _MAX:
            raise ConfigError(
                f"{self._name}.{name}", found, "a positive number, or null for one that is not known"
            )
        return float(found)

    def count(self, name: str) -> int | None:
        """Return a whole number, 0 included, or None."""
        found = self.value.get(name)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < _MAX:
            raise ConfigError(f"{self._name}.{name}", found, "a whole number of bytes, or null")
        return found

    def numbers(self, name: str) -> dict[str, float]:
        """Return positive numbers by name."""
        table = self.table(name)
        found = {key: table.number(key) for key in table.value}
        return {key: number for key, number in found.items() if number is not None}
