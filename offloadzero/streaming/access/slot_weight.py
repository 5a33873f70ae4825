"""Parameters of an offloaded model as scripts' operations see them outside of their module's forward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import increment_version

from offloadzero.core.segments import SegmentKind
from offloadzero.core.torch_private import DisableTorchFunctionSubclass
from offloadzero.errors import ConfigError
from offloadzero.parameters.weight import Alias, HeldAlias, expect_own_value, offload_parameter
from offloadzero.streaming.access.weights import WeightAccess
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


class SlotWeight:
    """One parameter for a script's operations: a `Weight` of offloadzero.parameters."""

    def __init__(self, access: WeightAccess, record: Record, slot: ParamSlot) -> None:
        self._access = access
        self._record = record
        self._slot = slot
        self._alias = HeldAlias()

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self._slot.name

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self._slot.shape

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's dtype."""
        return self._record.dtype

    @property
    def device(self) -> torch.device:
        """The device on which the computation runs."""
        return self._access.device

    @property
    def history(self) -> tuple[int, int]:
        """The numbers of the unit's updates begun so far, and of writes to this parameter."""
        return self._access.num_updates(self._record), self._slot.num_writes[SegmentKind.PARAM]

    def read(self) -> torch.Tensor:
        """Return the value on the device; not to be written."""
        return self._access.value(self._record, self._slot)

    def read_to_write(self) -> torch.Tensor:
        """Return the value on the device, in memory of its own."""
        return self._access.value(self._record, self._slot, to_write=True)

    def write(self, value: torch.Tensor) -> None:
        """Write a value to its home."""
        self._access.replace(self._record, self._slot, value)

    def count_write(self) -> None:
        """Count a write in the module's forward, where graphs begin; a write elsewhere makes all graphs stale."""
        if self._access.is_in_forward(self._record):
            with DisableTorchFunctionSubclass():
                increment_version(self._slot.param)

    def alias(self) -> Alias:
        """Return the tensor that stands for the value until `assign`."""
        return self._alias.of(self)

    def assign(self, value: torch.Tensor) -> None:
        """Do `param.data = value`. Raises ConfigError for another shape, dtype or device."""
        if self._alias.stands_for(value):
            return
        expect_alike(self.name, value, shape=self.shape, dtype=self.dtype)
        if value.device.type != self.device.type:
            raise ConfigError(f"{self.name}.data", str(value.device), f"device {self.device}")
        expect_own_value(self, value)
        value = value.detach().clone()
        self._alias.fix(self)
        self.write(value)
        self.count_write()  # refused: in torch a graph over the former memory would go on with it


def answer_for(records: Iterable[Record], access: WeightAccess) -> None:
    """Let `access` answer for the parameters of `records` outside their forwards: [Note: a parameter away]."""
    for record in records:
        for slot in record.slots:
            offload_parameter(slot.param, SlotWeight(access, record, slot))


def expect_alike(name: str, value: torch.Tensor, *, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise ConfigError unless `value` has the dtype and shape of the parameter of that name."""
    if value.dtype != dtype:
        allowed = f"{dtype}: the configuration says the precision (its bf16 and fp16 blocks)"
        raise ConfigError(f"{name}.data", value.dtype, allowed)
    if value.shape != shape:
        before = "what changes it (resize_token_embeddings(), say) comes before offload()"
        raise ConfigError(f"{name}.data", tuple(value.shape), f"shape {tuple(shape)}: {before}")
