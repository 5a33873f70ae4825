"""The tensors of a parameter's optimizer states in a checkpoint: what is written, checked and loaded.

They have two forms, after the layout that the states had when they were saved: states in fp32, in the parameter's
shape; or the codes of the compact layout and their scales. What is stored says which: [Note: checkpoint format] in
states.py. Names are those after the parameter's: `NAME.STATE`. `codes` None is the fp32 form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from offloadzero.access.weight_access import WeightAccess
from offloadzero.checkpoint.format.safetensors_file import TensorSpec
from offloadzero.core.segments import SegmentKind
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import AnySpec, StateCodes


def codes_among(names: Collection[str], spec: AnySpec) -> StateCodes | None:
    """Return the form in which the states of a parameter are stored, by the names of those that are."""
    return spec.codes if SegmentKind.SCALES.value in names else None


def state_specs(spec: AnySpec, codes: StateCodes | None, shape: torch.Size) -> list[TensorSpec]:
    """Name, dtype and shape of each tensor of the states of a parameter of that shape."""
    if codes is None:
        return [(kind.value, torch.float32, shape) for kind in spec.states]
    return [(name, dtype, stored_shape) for name, _, dtype, stored_shape in codes.specs(shape)]


def state_names(spec: AnySpec) -> set[str]:
    """Return the names of the states of `spec` in either form."""
    return {name for codes in (None, spec.codes) for name, _, _ in state_specs(spec, codes, torch.Size(()))}


def read_states(weights: WeightAccess, record: Record, slot: ParamSlot) -> Iterator[torch.Tensor]:
    """Yield the tensors of `state_specs` in the form of the record's layout from the states' homes."""
    if record.codes is None:
        return (weights.states.read(record, slot, kind) for kind in record.spec.states)
    return iter(weights.states.read_codes(record, slot).values())


def write_states(
    weights: WeightAccess, record: Record, slot: ParamSlot, values: Mapping[str, torch.Tensor]
) -> None:
    """Set the states, in either layout, to those that `values` has by name: a compact layout rounds fp32 ones."""
    codes = codes_among(values, record.spec)
    if codes is not None:
        weights.states.write_codes(record, slot, codes, values)
        return
    for kind in record.spec.states:
        weights.states.write(record, slot, kind, values[kind.value])
