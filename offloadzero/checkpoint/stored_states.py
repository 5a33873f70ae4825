"""The tensors of a parameter's optimizer states in a checkpoint: what is written, checked and loaded.

Two forms, after the layout that the states had when they were saved: fp32 states, and codes with their scales. What is
stored says which: [Note: checkpoint format] in states.py. Saving, checking and loading go by the forms here, so that a
tensor more is a line of `specs`, `read` and `write`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from offloadzero.access.weights import WeightAccess
from offloadzero.checkpoint.format.safetensors_file import TensorSpec
from offloadzero.core.segments import SegmentKind
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import AnySpec, StateCodes


class StoredStates(NamedTuple):
    """One form: of the compact layout, or where there are no codes of fp32. Names are those after the parameter's."""

    spec: AnySpec
    codes: StateCodes | None

    def specs(self, shape: torch.Size) -> list[TensorSpec]:
        """Name, dtype and shape of each tensor of a parameter of that shape."""
        if self.codes is None:
            return [(kind.value, torch.float32, shape) for kind in self.spec.states]
        return [(name, dtype, stored_shape) for name, _, dtype, stored_shape in self.codes.specs(shape)]

    def read(self, weights: WeightAccess, record: Record, slot: ParamSlot) -> Iterator[torch.Tensor]:
        """Yield the tensors of `specs` from the states' homes."""
        if self.codes is None:
            return (weights.states.read(record, slot, kind) for kind in self.spec.states)
        return iter(weights.states.read_codes(record, slot).values())

    def write(
        self, weights: WeightAccess, record: Record, slot: ParamSlot, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Set the states, in either layout, to the tensors of `specs`, which `values` has by name."""
        if self.codes is not None:
            weights.states.write_codes(record, slot, self.codes, values)
            return
        for kind in self.spec.states:
            weights.states.write(record, slot, kind, values[kind.value])


def form_of(record: Record) -> StoredStates:
    """Return the form in which the states of a record are saved."""
    return StoredStates(record.spec, record.codes)


def form_among(names: Collection[str], spec: AnySpec) -> StoredStates:
    """Return the form in which the states of a parameter are stored, by the names of those that are."""
    return StoredStates(spec, spec.codes if SegmentKind.SCALES.value in names else None)


def state_names(spec: AnySpec) -> set[str]:
    """Return the names of the states of `spec` in either form."""
    forms = [StoredStates(spec, codes) for codes in (None, spec.codes)]
    return {name for form in forms for name, _, _ in form.specs(torch.Size(()))}
