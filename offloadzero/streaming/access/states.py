"""The states of an optimizer, one parameter at a time, in and out of their homes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError
from offloadzero.streaming.access.homes import HomeAccess
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.record_state import segment_slice
from offloadzero.update.records import Record
from offloadzero.update.spec import StateCodes


class StateAccess:
    """Reads and writes states in either layout, between steps."""

    def __init__(self, homes: HomeAccess) -> None:
        self._homes = homes

    def read(self, record: Record, slot: ParamSlot, kind: SegmentKind) -> torch.Tensor:
        """Read a state of the optimizer: a new fp32 host tensor in the parameter's shape."""
        values = self._homes.read(record, slot, kind)
        if record.codes is not None:
            values = record.codes.decode(kind, values, self._homes.read(record, slot, SegmentKind.SCALES))
        return values.view(slot.shape)

    def write(self, record: Record, slot: ParamSlot, kind: SegmentKind, value: torch.Tensor) -> None:
        """Set a state of the optimizer; the compact layout rounds it.

        Raises ConfigError for another number of elements, and for a frozen parameter.
        """
        flat = value.detach().to("cpu", torch.float32).reshape(-1).contiguous()
        if flat.numel() != slot.num_elements:
            raise ConfigError(f"{slot.name}.{kind}", tuple(value.shape), f"shape {tuple(slot.shape)}")
        parts = {kind: flat}
        if record.codes is not None:
            scales = self._homes.read(record, slot, SegmentKind.SCALES)
            parts = {kind: record.codes.encode(kind, flat, scales), SegmentKind.SCALES: scales}
        self._homes.write(record, slot, parts)

    def write_step(self, record: Record, slot: ParamSlot, step: int) -> None:
        """Set the number of updates that the parameter's states have seen."""
        self._homes.write_step(record, slot, step)

    def reset(self, record: Record, slot: ParamSlot, group: Mapping[str, object]) -> None:
        """Reset all states, with codes and scales, to those before the first step under the options of `group`."""
        parts = {}
        for kind in (*record.spec.states, *([SegmentKind.SCALES] if record.compact else [])):
            part = segment_slice(kind, slot.offset, slot.offset + slot.num_elements)
            parts[kind] = torch.full(
                (part.stop - part.start,),
                record.spec.initial_value(kind, group),
                dtype=record.segments[kind].dtype,
                device="cpu",
            )
        self._homes.write(record, slot, parts)

    def read_codes(self, record: Record, slot: ParamSlot) -> dict[str, torch.Tensor]:
        """Read the states of the compact layout as stored, by name (`StateCodes.specs`); empty in the fp32 layout."""
        if record.codes is None:
            return {}
        return {
            name: self._homes.read(record, slot, kind).view(shape)
            for name, kind, _, shape in record.codes.specs(slot.shape)
        }

    def write_codes(
        self, record: Record, slot: ParamSlot, codes: StateCodes, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Set all states to a result of `read_codes`, of this run or of one in either layout.

        Raises ConfigError for codes of another dtype or shape.
        """
        expect_codes(slot, codes, values)
        flat = {kind: values[name].reshape(-1) for name, kind, _, _ in codes.specs(slot.shape)}
        if record.codes is None:
            scales = flat.pop(SegmentKind.SCALES)
            flat = {kind: codes.decode(kind, coded, scales) for kind, coded in flat.items()}
        self._homes.write(record, slot, flat)


def expect_codes(slot: ParamSlot, codes: StateCodes, values: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError unless the codes have the dtypes and shapes of `codes.specs`."""
    for name, _, dtype, shape in codes.specs(slot.shape):
        if values[name].shape != shape or values[name].dtype != dtype:
            given = f"{values[name].dtype} {tuple(values[name].shape)}"
            raise ConfigError(f"{slot.name}.{name}", given, f"{dtype} {tuple(shape)}")


def are_codes_of(slot: ParamSlot, codes: StateCodes, values: Mapping[str, torch.Tensor]) -> bool:
    """Whether the codes among `values`, as `read_codes` returns them, belong to the states among them."""
    expect_codes(slot, codes, values)
    scales = values[SegmentKind.SCALES].reshape(-1)
    return all(
        torch.equal(codes.decode(kind, values[name].reshape(-1), scales), values[kind].reshape(-1).float())
        for kind, name in codes.names.items()
    )
