"""The tensors of a parameter's optimizer states in a checkpoint: what is written, checked and loaded.

Two forms, after the layout that the states had when they were saved: fp32 states, and codes with their scales. What is
stored says which: [Note: checkpoint format] in states.py. Saving, checking and loading go by the forms here, so that a
tensor more is a line of `specs`, `read` and `write`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping

import torch

from offloadzero.access.weights import WeightAccess
from offloadzero.checkpoint.format.safetensors_file import TensorSpec
from offloadzero.core.segments import SegmentKind
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import AnySpec, StateCodes


class StoredStates(ABC):
    """One form. Names are those after the parameter's: `NAME.STATE`."""

    @abstractmethod
    def specs(self, shape: torch.Size) -> list[TensorSpec]:
        """Name, dtype and shape of each tensor of a parameter of that shape."""

    @abstractmethod
    def read(self, weights: WeightAccess, record: Record, slot: ParamSlot) -> Iterator[torch.Tensor]:
        """Yield the tensors of `specs` from the states' homes."""

    @abstractmethod
    def write(
        self, weights: WeightAccess, record: Record, slot: ParamSlot, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Set the states, in either layout, to the tensors of `specs`, which `values` has by name."""


class Fp32States(StoredStates):
    """States in fp32, in the parameter's shape, under their names in the spec."""

    def __init__(self, spec: AnySpec) -> None:
        self._kinds = spec.states

    def specs(self, shape: torch.Size) -> list[TensorSpec]:
        """Name, dtype and shape of each state."""
        return [(kind.value, torch.float32, shape) for kind in self._kinds]

    def read(self, weights: WeightAccess, record: Record, slot: ParamSlot) -> Iterator[torch.Tensor]:
        """Yield each state."""
        return (weights.states.read(record, slot, kind) for kind in self._kinds)

    def write(
        self, weights: WeightAccess, record: Record, slot: ParamSlot, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Set each state; a compact layout rounds it."""
        for kind in self._kinds:
            weights.states.write(record, slot, kind, values[kind.value])


class CodedStates(StoredStates):
    """The codes of the compact layout, and their scales."""

    def __init__(self, codes: StateCodes) -> None:
        self._codes = codes

    def specs(self, shape: torch.Size) -> list[TensorSpec]:
        """Name, dtype and shape of each array of codes, and of the scales."""
        return [(name, dtype, stored_shape) for name, _, dtype, stored_shape in self._codes.specs(shape)]

    def read(self, weights: WeightAccess, record: Record, slot: ParamSlot) -> Iterator[torch.Tensor]:
        """Yield the codes and the scales as they are."""
        return iter(weights.states.read_codes(record, slot).values())

    def write(
        self, weights: WeightAccess, record: Record, slot: ParamSlot, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Set the codes and scales; the fp32 layout gets what they stand for."""
        weights.states.write_codes(record, slot, self._codes, values)


def form_of(record: Record) -> StoredStates:
    """Return the form in which the states of a record are saved."""
    return Fp32States(record.spec) if record.codes is None else CodedStates(record.codes)


def form_among(names: Collection[str], spec: AnySpec) -> StoredStates:
    """Return the form in which the states of a parameter are stored, by the names of those that are."""
    if spec.codes is not None and SegmentKind.SCALES.value in names:
        return CodedStates(spec.codes)
    return Fp32States(spec)


def state_names(spec: AnySpec) -> set[str]:
    """Return the names of the states of `spec` in either form."""
    forms = [Fp32States(spec), *([CodedStates(spec.codes)] if spec.codes is not None else [])]
    return {name for form in forms for name, _, _ in form.specs(torch.Size(()))}
