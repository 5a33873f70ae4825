"""A model cut and planned as by the engine, before there is one: from its parameters' names, shapes and dtypes.

[Note: a model that is nowhere]
`initialize()` and `offload()` cut a model into units and plan the bytes of every tier before they move anything. They
need names, shapes and dtypes, which a model on the meta device has as well. So the plan of a model without memory is
made by the engine's own functions, and equals the plan that the engine makes of the real model.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadzero.checkpoint.format.safetensors_file import SafetensorsReader
from offloadzero.config import (
    OffloadConfig,
    settle_for_initialize,
    settle_for_offload,
    settle_partition,
)
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.engine.join import expect_built
from offloadzero.memory.mapped_files import FileRange, UnopenedFile
from offloadzero.planning.engine_plan import plan_records
from offloadzero.planning.hardware import Hardware
from offloadzero.planning.machine import nearest_directory
from offloadzero.planning.memory_plan import MemoryPlan
from offloadzero.planning.step.work import Uses
from offloadzero.planning.update_rules import keeps_gradients, with_kept_gradients
from offloadzero.ranks.shard import WHOLE, ShardSpec, divides_params, divides_states
from offloadzero.streaming.building.coded_parameters import attached_bytes, num_weights
from offloadzero.streaming.building.units import Site, UnitCut, checkpointed_modules, cut_units
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES, AnySpec, UpdateForm
from offloadzero.update.specs import spec_of_type
from offloadzero.update.specs.adam import ADAM


class Loop(str, Enum):
    """The script's way of starting: it decides on clipping and on how long gradients are kept."""

    INITIALIZE = "initialize"
    OFFLOAD = "offload"


@dataclass(frozen=True)
class PlannedModel:
    """A model's records and the memory that the engine reserves for them."""

    class_name: str  # of the model
    config: OffloadConfig  # the configuration as the loop settles it
    spec: AnySpec
    cut: UnitCut
    plan: MemoryPlan
    checkpointed: tuple[str, ...]  # units that keep only their inputs for backward
    buffer_bytes: int  # of buffers, and of scales of coded weights, which lie on the device beside the plan
    built_bytes: int  # of the parameters in the dtypes in which the script makes them

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of all units."""
        return self.cut.records

    @property
    def num_parameters(self) -> int:
        """The number of weights, without padding."""
        return sum(num_weights(slot.param) for record in self.records for slot in record.slots)

    @property
    def in_place_bytes(self) -> int:
        """The bytes of frozen weights that are read from the model's own files, on nvme of all ranks together."""
        on_files = [r for r in self.records if self.plan.placement[r.index, SegmentKind.PARAM].is_file]
        return sum(
            slot.num_elements * record.dtype.itemsize
            for record in on_files
            for slot in record.slots
            if slot.source is not None
        )

    @property
    def num_trainable(self) -> int:
        """The number of elements that the optimizer updates, without padding."""
        return sum(slot.num_elements for record in self.records for slot in record.trainable_slots)


class ModelPlanner:
    """Plans one model for many configurations, and cuts it once for those that cut it alike.

    Their plans share the records.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Path] = ()) -> None:
        """Plan `model`, whose weights lie in the files `weights`, if it has any on this machine."""
        self._model = model
        self._weights = weights
        of_buffers = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
        self._buffer_bytes = of_buffers + attached_bytes(model)
        self._built_bytes = sum(param.numel() * param.itemsize for param in model.parameters())
        self._file = UnopenedFile(str(weights[0].parent) if weights else "the model's files")
        self._cuts: dict[Hashable, UnitCut] = {}

    def plan(
        self,
        config: OffloadConfig,
        *,
        loop: Loop = Loop.INITIALIZE,
        available: Mapping[TierName, int],
        form: UpdateForm = UpdateForm.NATIVE,
        hardware: Hardware | None = None,
    ) -> PlannedModel:
        """Plan the memory that the engine reserves for the model; its parameters that require gradients are trained.

        The engines of `config.world_size` ranks reserve the same: their shards have one size.

        Args:
            available: bytes by tier for `"placement": "auto"`; none of a device whose memory is the host's.
            form: the form of the updates on the device.
            hardware: the measured machine, for "auto" by time; None: it goes by bytes.

        Raises:
            ConfigError, BudgetError: those of the engine.
        """
        config = settle_partition(settle(config, loop))
        if config.world_size > 1:
            expect_built(config)
        spec = spec_of_type(config.optimizer.type) if config.optimizer is not None else ADAM
        spec.expect_layout(config.state_layout)
        cut = self._cut(config, spec)
        checkpointed = checkpointed_modules(self._model, cut, config)
        plan = plan_records(
            cut.records,
            config,
            together=cut.together,
            available=available,
            form=form,
            num_checkpointed=len(checkpointed),
            uses=uses_of(cut),
            hardware=hardware,
        )
        return PlannedModel(
            class_name=type(self._model).__name__,
            config=config,
            spec=spec,
            cut=cut,
            plan=plan,
            checkpointed=tuple(checkpointed),
            buffer_bytes=self._buffer_bytes,
            built_bytes=self._built_bytes - _in_place_bytes(cut.records),
        )

    def _cut(self, config: OffloadConfig, spec: AnySpec) -> UnitCut:
        """Return the cut for a settled configuration."""
        is_several = config.world_size > 1
        is_divided = is_several and divides_states(config.zero_stage)
        settings: dict[str, Any] = {
            "param_dtype": DTYPES[config.precision.param_dtype],
            "compact": config.state_layout == "compact",
            "shard": ShardSpec(0, config.world_size) if is_divided else WHOLE,
            "gathers_params": is_several and divides_params(config.zero_stage),
            "is_reduced": is_several,
        }
        # Planning gives the gradients of the records their dtype: plans with another one have records of their own.
        grad_dtype = keeps_gradients(config) and config.precision.grad_accum_dtype
        source = self._source(config)
        key = (config.units, spec.name, grad_dtype, source, *settings.values())
        if key not in self._cuts:
            names = {id(param): name for name, param in self._model.named_parameters()}
            trained = [param for param in self._model.parameters() if param.requires_grad]
            groups = spec.config_groups([{"params": trained}], {}, names)
            self._cuts[key] = cut_units(
                self._model,
                config.units,
                group_of={id(p): index for index, group in enumerate(groups) for p in group["params"]},
                spec=spec,
                group_specs=[spec.of_group(group) for group in groups],
                **settings,
            )
            if source is not None:
                self._note_sources(self._cuts[key].records, source, config)
        return self._cuts[key]

    def _note_sources(self, records: Sequence[Record], source: FileRange, config: OffloadConfig) -> None:
        """Note of frozen parameters that they lie in the model's files: where these have a tensor of that form.

        Libraries may give a tensor another name, and what they merge while they load (experts, say) has another shape
        and memory of its own. Raises CheckpointError for a file that is not whole.
        """
        held: Counter[tuple[torch.Size, torch.dtype]] = Counter()
        for path in self._weights:
            with SafetensorsReader(path) as reader:
                held.update((entry.shape, entry.dtype) for entry in reader.entries.values())
        for record, slot in may_lie_in_files(records):
            form = slot.shape, record.dtype
            keeps_dtype = config.frozen_weights == "in_place" or slot.param.dtype == record.dtype
            if keeps_dtype and (held[form] or not self._weights):
                held[form] -= 1
                slot.source = source

    def _source(self, config: OffloadConfig) -> FileRange | None:
        """Where frozen weights lie that are read in place; None: they are copied."""
        drives = {os.stat(path).st_dev for path in self._weights}
        drive = drives.pop() if len(drives) == 1 else None
        return FileRange(self._file, 0) if reads_in_place(config, drive) else None


def reads_in_place(config: OffloadConfig, drive: int | None) -> bool:
    """Whether frozen weights are read from files on a drive (`st_dev`), if they lie there: [Note: weights in place]."""
    if config.frozen_weights != "auto":
        return config.frozen_weights == "in_place" and bool(config.nvme_paths)
    # Of another drive nobody has said that it is as fast, nor one of several as they are together.
    drives = {os.stat(nearest_directory(path)).st_dev for path in config.nvme_paths}
    return drives == {drive} and not config.aio.checksums


def may_lie_in_files(records: Sequence[Record]) -> list[tuple[Record, ParamSlot]]:
    """The frozen parameters that leave the device."""
    return [
        (record, slot)
        for record in records
        for slot in record.slots
        if not slot.trainable and not record.keeps_whole_params
    ]


def _in_place_bytes(records: Sequence[Record]) -> int:
    return sum(slot.param.nbytes for record in records for slot in record.slots if slot.source is not None)


def settle(config: OffloadConfig, loop: Loop) -> OffloadConfig:
    """Fill in the open settings as the way of starting does."""
    if loop is Loop.OFFLOAD:
        # offload() trains with the optimizer that it is given.
        return with_kept_gradients(settle_for_offload(config))
    return settle_for_initialize(config)


def uses_of(cut: UnitCut) -> Uses:
    """Return the records in the order in which a micro batch uses them, which is that of the sites in the model.

    Backward needs no weights of an embedding, nor of the first module if it is a single one: the model's inputs need no
    gradients. A model whose forward goes another way than its modules are listed is used in another order.
    """
    forward: list[int] = []
    backward: list[int] = []
    for site in cut.sites:
        forward += site.records
        is_leaf = next(site.module.children(), None) is None
        if not isinstance(site.module, nn.Embedding) and not (is_leaf and site is _first_called(cut)):
            backward += site.records
    return Uses(tuple(forward), tuple(reversed(backward)))


def _first_called(cut: UnitCut) -> Site:
    """Return the first site that is not the model itself, which holds the resident records."""
    return next((site for site in cut.sites if site.name), cut.sites[0])
