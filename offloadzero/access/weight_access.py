"""Weights in and out of their homes, one parameter at a time, and for a script's operations."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from offloadzero.access.agreement import Announcements
from offloadzero.access.home_access import Changes, HomeAccess, StateAccess
from offloadzero.access.parameter import offload_parameter
from offloadzero.access.tensor import RemoteTensor
from offloadzero.access.weight_value import Weight
from offloadzero.arithmetic import device_math
from offloadzero.arithmetic.remainders import REMAINDER_DTYPE
from offloadzero.core.interrupts import uninterrupted_throughout
from offloadzero.core.segments import SegmentKind
from offloadzero.core.torch_private import DisableTorchFunctionSubclass
from offloadzero.errors import BudgetError, ConfigError, StateError
from offloadzero.memory.store import TieredStore
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record


class Units(Protocol):
    """The units on the device, for reads and writes of single parameters; `index` is a record's, `place` a slot's."""

    @property
    def is_running(self) -> bool:
        """Whether a module is in its forward, or backward runs an operation on this thread."""

    def on_device(self, index: int) -> torch.Tensor | None:
        """The unit's parameters, shape (num_elements,), for an operation now; None where its home should be read."""

    def pinned_parameters(self, index: int) -> torch.Tensor | None:
        """The parameters of a unit whose module is in its forward, shape (num_elements,); else None."""

    def forget_written(self, index: int) -> None:
        """Have the weights fetched again after the unit's forward: what was written in it does not go home."""

    def gather(self, index: int, place: int, value: torch.Tensor) -> None:
        """Make a parameter an ordinary one in `value` until `scatter`."""

    def scatter(self, index: int, place: int) -> torch.Tensor:
        """Undo `gather`; return the memory that the parameter has now."""

    def gathered_in(self, index: int) -> Mapping[int, torch.Tensor]:
        """The memory of the parameters that a script has gathered, by slot."""


class WeightAccess:
    """Reads and edits parameters, between steps and in forwards; `states` are their optimizer's."""

    def __init__(
        self,
        store: TieredStore,
        homes: HomeAccess,
        changes: Changes,
        units: Units,
        *,
        is_coded: Callable[[Record, ParamSlot], bool],
    ) -> None:
        """Make the access. `is_coded` knows which parameters come to a forward as codes."""
        self.homes = homes
        self._is_coded = is_coded
        self.states = StateAccess(homes)
        self._store = store
        self._changes = changes
        self._units = units
        # What tensors of state dicts stand for, and the engine, which lives as long as one of them.
        self.in_state_dicts: weakref.WeakSet[Any] = weakref.WeakSet()
        self.engine: Callable[[], object] = lambda: None
        # By the id of a slot whose master was loaded: how many updates and writes it had, and a hash of its parameter.
        self._masters_loaded: dict[int, tuple[int, int, bytes]] = {}

    def pinned(self, announcements: Announcements) -> WeightAccess:
        """Return an access to the weights of records that are pinned; ranks tell by `announcements` what they read."""
        homes = self.homes.pinned(announcements)
        return WeightAccess(self._store, homes, self._changes, self._units, is_coded=self._is_coded)

    def read(self, record: Record, slot: ParamSlot) -> torch.Tensor:
        """Read the parameter in its own dtype: a new host tensor in its shape."""
        return self.homes.read(record, slot, SegmentKind.PARAM).view(slot.shape)

    def read_master(self, record: Record, slot: ParamSlot) -> torch.Tensor:
        """Read the fp32 master weight: a new host tensor in the parameter's shape."""
        return self._master_of(record, slot, self.homes.read(record, slot, SegmentKind.PARAM)).view(
            slot.shape
        )

    def _master_of(self, record: Record, slot: ParamSlot, param: torch.Tensor) -> torch.Tensor:
        """Return the fp32 master weight to the parameter's values, both of shape (num_elements,)."""
        if not slot.trainable or SegmentKind.MASTER not in record.segments:
            return param.float()
        return device_math.join_master(param, self.homes.read(record, slot, SegmentKind.MASTER))

    def write(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> None:
        """Set the parameter and its master; fp32 values keep all their bits.

        Raises ConfigError for another number of elements.
        """
        self.homes.write(record, slot, self._parts(record, slot, value))

    def _parts(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> dict[SegmentKind, torch.Tensor]:
        """Return what the parameter's homes hold where it has this value."""
        if value.numel() != slot.num_elements:  # torch would broadcast a single one
            raise ConfigError(slot.name, tuple(value.shape), f"shape {tuple(slot.shape)}")
        flat, segment = _on_host(value), record.segments.get(SegmentKind.MASTER)
        if segment is None or not slot.trainable:
            return {SegmentKind.PARAM: _rounded(flat, record.dtype)}
        param = torch.zeros(slot.num_elements, dtype=record.dtype, device="cpu")
        master = torch.zeros(slot.num_elements, dtype=segment.dtype, device="cpu")
        encode(slot, flat, param, master, base=slot.offset)
        return {SegmentKind.PARAM: param, SegmentKind.MASTER: master}

    def load_master(self, record: Record, slot: ParamSlot, master: torch.Tensor) -> None:
        """Set the parameter to the fp32 master that an optimizer's state dict has of it."""
        parts = self._parts(record, slot, master)
        self.homes.write(record, slot, parts)
        self._masters_loaded[id(slot)] = self._version(record, slot, parts[SegmentKind.PARAM])

    def load(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> None:
        """Set the parameter to the value that a model's state dict has of it.

        A script may load the optimizer before the model. So a master that the optimizer's has given, and that no step
        and no write has changed since, stays where all of the value is what it is rounded to.
        """
        loaded = self._masters_loaded.get(id(slot))
        if loaded is not None and value.dtype == record.dtype:
            flat = _on_host(value)
            if loaded == self._version(record, slot, flat):
                # The same bits, once more: several ranks note their writes, and one that loads other values is found.
                self.homes.write(record, slot, {SegmentKind.PARAM: flat}, has_changes=False)
                return
        self.write(record, slot, value)

    def _version(self, record: Record, slot: ParamSlot, flat: torch.Tensor) -> tuple[int, int, bytes]:
        """What tells whether a parameter is still, with its master, what it was when it had the values `flat`."""
        digest = hashlib.sha256(memoryview(flat.view(torch.uint8).numpy())).digest()  # type: ignore[arg-type]
        return self.num_updates(record), slot.num_writes[SegmentKind.PARAM], digest

    # --- operations of scripts on parameters ---

    @property
    def device(self) -> torch.device:
        """The device on which the computation runs."""
        return self._store.accelerator.device

    def num_updates(self, record: Record) -> int:
        """The number of the record's updates begun so far."""
        return self._changes.num_updates(record.index)

    @property
    def is_running(self) -> bool:
        """Whether a module is in its forward, or backward runs an operation on this thread."""
        return self._units.is_running

    def is_in_forward(self, record: Record) -> bool:
        """Whether a module that needs the record computes."""
        return self._units.pinned_parameters(record.index) is not None

    def value(
        self, record: Record, slot: ParamSlot, *, to_write: bool = False, is_exact: bool = False
    ) -> torch.Tensor:
        """Return the parameter on the device, in its shape, for an operation that is launched next.

        `to_write`: exact, and in memory of its own; otherwise it may be the unit's, and must not be written.
        `is_exact`: also where what is on the device is what its codes mean.
        """
        if slot.trainable:
            self._changes.expect_step_taken(record.index)
        reads_home = self._store.is_closed or ((to_write or is_exact) and self._is_coded(record, slot))
        flat = None if reads_home else self._units.on_device(record.index)
        if flat is None:
            return self.read(record, slot).to(self.device)
        value = slot.view_in(flat)
        return value.clone() if to_write else value

    def host_value(self, record: Record, slot: ParamSlot) -> torch.Tensor:
        """Return the parameter in host memory, in its shape, where no step is missing after backward's updates."""
        if slot.trainable:
            self._changes.expect_step_taken(record.index)
        return self.read(record, slot)

    @uninterrupted_throughout
    def replace(self, record: Record, slot: ParamSlot, value: torch.Tensor) -> None:
        """Write a script's changes to a parameter. Elements whose bits are unchanged keep their fp32 master."""
        new = value.detach().to("cpu").reshape(-1)
        if slot.trainable and SegmentKind.MASTER in record.segments:
            home = self.homes.read(record, slot, SegmentKind.PARAM)
            changed = bits(new) != bits(home)
            if not bool(changed.any()):
                return
            new = torch.where(changed, new.float(), self._master_of(record, slot, home))
        self.write(record, slot, new)
        flat = self._units.pinned_parameters(record.index)
        if flat is not None:
            slot.view_in(flat).copy_(value)

    @uninterrupted_throughout  # its reads, too: after an interrupt the missing commits would be unknown
    def commit_forward(self, record: Record, places: Iterable[int]) -> None:
        """Write the changes made in place to these slots' parameters in the forward that now ends.

        Raises StateError where it had only their codes, BudgetError where one has no room.
        """
        flat, slots = self._units.pinned_parameters(record.index), [record.slots[place] for place in places]
        if flat is None:
            raise AssertionError(f"{record.name} is in no forward")
        names = ", ".join(slot.name for slot in slots if self._is_coded(record, slot))
        if names:
            self._units.forget_written(record.index)
            raise StateError(
                f"{names}: written in place in a forward, whose weights came as int8 codes "
                "(zero_optimization.zero_quantized_weights, zero_quantized_nontrainable_weights): the rest of the "
                "parameter would lose its exact values. Write it outside of the forward"
            )
        try:
            for slot in slots:
                new = slot.view_in(flat).detach().to("cpu", copy=True).reshape(-1)
                self._commit_in_place(record, slot, new)
        except BudgetError:  # a weight that was read in place has no room elsewhere, and keeps its value
            self._units.forget_written(record.index)
            raise

    def _commit_in_place(self, record: Record, slot: ParamSlot, new: torch.Tensor) -> None:
        """Write the changes made in a forward to a parameter, also where the forward has written the home itself.

        Then the former value is lost, and only the master tells which elements changed: an fp32 one shows it. A
        remainder stays as it is, less than half a step of the new value, except where there is no such number.
        """
        segment = record.segments.get(SegmentKind.MASTER)
        parts = {SegmentKind.PARAM: new}
        if segment is not None and slot.trainable:
            master = parts[SegmentKind.MASTER] = self.homes.read(record, slot, SegmentKind.MASTER)
            if master.dtype == torch.float32:
                changed = bits(new) != bits(master.to(record.dtype))
                master[changed] = new[changed].float()
            else:
                master[(new == 0) | ~new.isfinite()] = 0
        self.homes.write(record, slot, parts)


class SlotWeight(Weight):
    """One parameter of an offloaded model."""

    def __init__(self, access: WeightAccess, record: Record, slot: ParamSlot) -> None:
        super().__init__(slot.name, slot.shape, record.dtype, access.device)
        self._access = access
        self._record = record
        self._slot = slot

    @property
    def version(self) -> tuple[int, int]:
        """The numbers of the unit's updates begun so far, and of writes to this parameter."""
        return self._access.num_updates(self._record), self._slot.num_writes[SegmentKind.PARAM]

    @property
    def is_computed_with(self) -> bool:
        return self._access.is_running

    def read(self, *, to_write: bool = False) -> torch.Tensor:
        return self._access.value(self._record, self._slot, to_write=to_write)

    def read_to_host(self) -> torch.Tensor:
        return self._access.host_value(self._record, self._slot)

    def write(self, value: torch.Tensor) -> None:
        self._access.replace(self._record, self._slot, value)

    def count_write(self) -> None:
        """Count a write in the module's forward, where graphs begin; a write elsewhere makes all graphs stale."""
        if self._access.is_in_forward(self._record):
            with DisableTorchFunctionSubclass():
                increment_version(self._slot.param)

    def assign(self, value: torch.Tensor) -> None:
        """Do `param.data = value`. Raises ConfigError for another shape, dtype or device."""
        if self.is_assigned_itself(value):
            return
        expect_alike(self.name, value, shape=self.shape, dtype=self.dtype)
        if value.device.type != self.device.type:
            raise ConfigError(
                f"{self.name}.data",
                str(value.device),
                f"must stay on {self.device}: the engine moves the weights by itself "
                '("offloadzero": {"device": ...} sets the device)',
            )
        self.expect_own(value)
        value = value.detach().clone()
        self.leave_alias()
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
        allowed = f"must stay {dtype}: the configuration's bf16 and fp16 blocks set the precision"
        raise ConfigError(f"{name}.data", value.dtype, allowed)
    if value.shape != shape:
        before = "change it (by resize_token_embeddings(), say) before offload()"
        raise ConfigError(f"{name}.data", tuple(value.shape), f"must keep the shape {tuple(shape)}: {before}")


def _on_host(value: torch.Tensor) -> torch.Tensor:
    """Return a value in host memory, flat and contiguous; that of a parameter that is away is read."""
    flat = value.detach().to("cpu").reshape(-1)
    return (flat.read() if isinstance(flat, RemoteTensor) else flat).contiguous()


def bits(values: torch.Tensor) -> torch.Tensor:
    """The patterns of floating-point values as integers: NaN equals itself, -0 differs from 0."""
    return values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def _rounded(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter without a master, rounded as a trained one is, so that checkpoints have the same bits."""
    if (flat.dtype, dtype) != (torch.float32, torch.bfloat16):
        return flat.to(dtype).contiguous()
    param, remainder = torch.empty_like(flat, dtype=dtype), torch.empty_like(flat, dtype=REMAINDER_DTYPE)
    device_math.split_master(flat, param, remainder)
    return param


def encode(
    slot: ParamSlot, value: torch.Tensor, param: torch.Tensor, master: torch.Tensor | None, *, base: int = 0
) -> None:
    """Write `value` into a parameter and its master, both flat and starting at element `base` of the record."""
    flat = value.reshape(-1)
    start, stop = slot.offset - base, slot.offset - base + slot.num_elements
    target = param[start:stop]
    if master is None or not slot.trainable:
        target.copy_(flat)
    else:
        device_math.split_master(flat.float(), target, master[start:stop])
