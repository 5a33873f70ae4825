"""Cuts and plans one model, takes its memory, and builds the parts of its engine: each is finished when it is made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from offloadzero.access.agreement import Announcements
from offloadzero.access.gathered import ScriptBlocks
from offloadzero.access.home_access import HomeAccess
from offloadzero.access.parameter import is_offloaded
from offloadzero.access.weight_access import WeightAccess
from offloadzero.activations.store import ActivationStore, make_activation_store
from offloadzero.checkpoint.format.safetensors_file import is_known_dtype
from offloadzero.config import OffloadConfig, create_nvme_directories
from offloadzero.config.schema import ZeroPlusPlusConfig
from offloadzero.core.interrupts import uninterrupted
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.engine.join import expect_same_homes, expect_same_model
from offloadzero.engine.lifetime import Resources
from offloadzero.engine.planned_model import may_lie_in_files, reads_in_place, uses_of
from offloadzero.errors import ConfigError
from offloadzero.memory.arena import ALIGN_BYTES, Arena, BufferPool, Lease
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.mapped_files import MappedFiles
from offloadzero.memory.store import StoreSizes, TieredStore
from offloadzero.memory.swap_file import KeptFile
from offloadzero.memory.tickets import Failures
from offloadzero.native.kernels import set_cores
from offloadzero.observe.clock import StepClock
from offloadzero.planning.engine_plan import plan_engine
from offloadzero.planning.machine import cores_beside_launching
from offloadzero.planning.memory_plan import NUM_GRAD_LEASES, NUM_STAGING_LEASES, MemoryPlan
from offloadzero.ranks.group import Group
from offloadzero.ranks.shard import WHOLE, divides_params, divides_states
from offloadzero.step.accumulation import Accumulation
from offloadzero.step.collect import GradientCollector
from offloadzero.step.coordinator import StepCoordinator, StepPolicy
from offloadzero.step.decider import Decider
from offloadzero.step.gradient_order import GradientOrder
from offloadzero.step.job import Hypers
from offloadzero.step.landing import Landing
from offloadzero.step.param_grad import GradientAccess
from offloadzero.step.record_gradient import WindowGradients
from offloadzero.step.reduction import Reduction
from offloadzero.step.script_gradients import GradientWindow
from offloadzero.streaming.building.coded_parameters import attached_tensors, is_coded
from offloadzero.streaming.building.units import UnitCut, cut_units
from offloadzero.streaming.building.waiting_parameters import file_bytes, host_bytes
from offloadzero.streaming.coded_gather import CodedGather
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.unit_gather import HpzCopies, UnitGather
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept_elements import param_parts
from offloadzero.update.pipeline import UpdatePipeline
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES, AnySpec
from offloadzero.update.wire_codes import wire_regions

log = logging.getLogger("offloadzero")


@dataclass(frozen=True)
class ScriptLoop:
    """The script's way of training: the calls that its loop makes."""

    current_hypers: Callable[[], Hypers]  # reads the hyperparameters by group index
    before_backward: Callable[[], None] | None  # raises if no backward may begin now
    # True: gradients stay until they are dropped, unless the update runs in backward. This is torch's loop, which does
    # not call the engine's `step()` after each micro batch.
    keeps_after_step: bool
    # Frozen when the model was offloaded, and its to train when they are not.
    may_not_train: Sequence[ParamSlot]


# --- the model, cut and planned ---


def cut_model(
    model: nn.Module,
    config: OffloadConfig,
    *,
    group_of: Mapping[int, int],
    spec: AnySpec,
    group_specs: Sequence[AnySpec],
    group: Group,
) -> UnitCut:
    """Cut the model into units whose states can be kept and saved, the same ones on all ranks.

    Args:
        group_of: id of a parameter -> index of its optimizer group; parameters that are absent are frozen.
        group_specs: the specs of these groups, each `spec` or one that this leaves them to.

    Raises:
        ConfigError: those of `cut_units`; a dtype that no checkpoint can hold; codes that would be coded between ranks;
            other units than the other ranks have.
    """
    cut = cut_units(
        model,
        config.units,
        group_of=group_of,
        param_dtype=DTYPES[config.precision.param_dtype],
        spec=spec,
        group_specs=group_specs,
        compact=config.state_layout == "compact",
        shard=group.spec if divides_states(config.zero_stage) else WHOLE,
        gathers_params=divides_params(config.zero_stage),
        is_reduced=not group.is_alone,
    )
    _expect_storable(cut.records)
    _expect_whole_codes(cut.records, config.zero_plus_plus)
    expect_same_model(group, config, cut.records)
    return cut


def _expect_storable(records: Sequence[Record]) -> None:
    """Raise now for a dtype that no checkpoint can hold, and not when the first one is saved."""
    for record in records:
        if not is_known_dtype(record.dtype):
            raise ConfigError(
                f"{record.slots[0].name}.dtype",
                str(record.dtype).removeprefix("torch."),
                "frozen parameters: dtypes that safetensors knows. Keep it as another (torch.view_as_real() of a "
                "complex one, its bytes as torch.uint8)",
            )


def _expect_whole_codes(records: Sequence[Record], config: ZeroPlusPlusConfig) -> None:
    """Refuse weights of codes in the memory of floats that would go between ranks as codes of these: as others."""
    for record in records:
        coded = {index for region in wire_regions(record, config).values() for index in region.coded}
        for slot in record.slots:
            if slot.index in coded and is_coded(slot.param):
                raise ConfigError(
                    f"{slot.name}.dtype",
                    str(record.dtype).removeprefix("torch."),
                    "codes in bytes (bnb_4bit_quant_storage: torch.uint8): zero_optimization.zero_quantized_weights "
                    "and zero_quantized_nontrainable_weights would make others of these",
                )


def find_sources(records: Sequence[Record], config: OffloadConfig, group: Group) -> None:
    """Note of frozen parameters where their values lie in files that need no copy: [Note: weights in place].

    A parameter has a source on all ranks or on none, as they plan alike.
    """
    if config.frozen_weights == "copy" or not config.nvme_paths:
        return
    frozen = [(record, slot) for record, slot in may_lie_in_files(records) if not is_offloaded(slot.param)]
    if not frozen:
        return
    mapped = MappedFiles()
    for record, slot in frozen:
        source = mapped.find(slot.param.data) if slot.param.dtype == record.dtype else None
        if source is not None and reads_in_place(config, source.file.status.st_dev):
            slot.source = source
    lacking = torch.tensor([slot.source is None for _, slot in frozen], dtype=torch.uint8, device="cpu")
    group.control.all_reduce(lacking, "the parameters that lie in files", largest=True)
    for (_, slot), is_lacking in zip(frozen, lacking.tolist(), strict=True):
        slot.source = None if is_lacking else slot.source
    copied = [slot.name for _, slot in frozen if slot.source is None]
    if config.frozen_weights == "in_place" and copied:
        log.warning(
            'offloadzero.frozen_weights is "in_place", and %d of %d frozen parameters are copied (%s): their memory is '
            "no file that is mapped on this filesystem, in the dtype that is trained in, and unwritten",
            len(copied), len(frozen), ", ".join(copied[:3]),
        )  # fmt: skip


def plan_cut(
    cut: UnitCut,
    config: OffloadConfig,
    accelerator: Accelerator,
    *,
    spec: AnySpec,
    num_checkpointed: int,
    group: Group,
) -> MemoryPlan:
    """Plan the memory of a model that is cut, whose parameters give theirs back. Raises BudgetError.

    ConfigError: "auto" has chosen other homes on other ranks.
    """
    mapped = MappedFiles()  # whose pages count as free already
    plan = plan_engine(
        cut.records,
        config,
        cut.together,
        accelerator.asynchronous,
        spec=spec,
        num_checkpointed=num_checkpointed,
        movable_bytes=sum(host_bytes(slot.param, mapped) for record in cut.records for slot in record.slots),
        arriving_bytes=sum(
            each.tensor.nbytes
            for record in cut.records
            for slot in record.slots
            for each in attached_tensors(slot.param)
            if each.tensor.device != accelerator.device
        ),
        uses=uses_of(cut),
        group=group,
    )
    if config.placement.auto:
        expect_same_homes(group, plan.placement)
    return plan


# --- the memory ---


def open_store(
    records: Sequence[Record],
    config: OffloadConfig,
    plan: MemoryPlan,
    accelerator: Accelerator,
    *,
    failures: Failures,
    clock: StepClock,
    kept: KeptFile | None = None,
) -> TieredStore:
    """Take the memory of all tiers, apart from that of activation checkpoints; make the directories of all files.

    `kept`: the swap file of a durable run.
    """
    checkpointing = config.activation_checkpoints
    has_files = any(plan.placement[record.index, SegmentKind.PARAM].is_file for record in records)
    if plan.tier_bytes(TierName.NVME) or has_files or (checkpointing and checkpointing.tier.is_file):
        create_nvme_directories(config.nvme_paths)
    of_inputs = plan.inputs.nvme if plan.inputs is not None else 0  # a file of their own
    fetched = plan.inputs.device if plan.inputs is not None else 0  # apart, too
    return TieredStore(
        accelerator,
        sizes=StoreSizes(
            device=plan.tier_bytes(TierName.DEVICE) - fetched,
            host=plan.tier_bytes(TierName.HOST) - (checksum_bytes(of_inputs) if config.aio.checksums else 0),
            # All parameters may lie in other files, which takes the engine that reads them.
            nvme=max(plan.tier_bytes(TierName.NVME) - of_inputs, ALIGN_BYTES * has_files),
            waiting=file_bytes(slot.param for record in records for slot in record.slots),
            most_nvme=None if config.budgets.nvme is None else config.budgets.nvme - of_inputs,
        ),
        nvme_paths=config.nvme_paths,
        aio=config.aio,
        failures=failures,
        clock=clock,
        poison=config.poison_released_leases,
        kept=kept,
    )


def create_segments(records: Sequence[Record], plan: MemoryPlan, store: TieredStore) -> None:
    """Make the homes of all records, which hold zeros."""
    for record in records:
        record.is_tried = record.index in plan.versioned
        for kind, (dtype, num_elements) in record.layout.items():
            tier = plan.placement[record.index, kind]
            parts = param_parts(record) if kind is SegmentKind.PARAM and tier.is_file else []
            record.segments[kind] = store.create(
                record.name,
                kind,
                dtype,
                num_elements,
                tier,
                parts,
                versions=(record.index, kind) in plan.second_places,
            )
        if record.keeps_whole_params:
            whole = record.segments[SegmentKind.PARAM]
            start, stop = record.shard.kept_range(record.num_trainable)
            record.whole_param = whole
            record.segments[SegmentKind.PARAM] = replace(
                whole, num_elements=stop - start, place=whole.memory[start:stop]
            )
        if record.num_trainable:
            tier = plan.placement[record.index, SegmentKind.GRAD]
            if plan.grads_have_homes or tier.is_device:
                record.segments[SegmentKind.GRAD] = store.create(
                    record.name, SegmentKind.GRAD, record.grad_dtype, record.kept_trainable, tier
                )


# --- the parts ---


class Parts:
    """The parts of an engine, built in their order, each from those before it. `resources` closes them."""

    def __init__(
        self,
        records: Sequence[Record],
        config: OffloadConfig,
        plan: MemoryPlan,
        store: TieredStore,
        *,
        group: Group,
        loop: ScriptLoop,
        resources: Resources,
    ) -> None:
        """Build all of them."""
        self._config, self._plan, self._store, self._group = config, plan, store, group
        failures = store.failures
        if config.pin_memory:
            store.pin()
        coded = CodedGather(
            self._device_memory("weight codes", plan.weight_code_bytes), config=config.zero_plus_plus
        )
        self.executor = executor = self._make_executor(records, coded)
        self.changes = changes = executor.changes
        cores, num_threads = self._update_threads()
        self.pipeline = self._make_pipeline(cores, num_threads)
        self.activations = self._make_activations(resources) if config.activation_checkpoints else None
        policy = StepPolicy(
            update_in_backward=plan.update_in_backward,
            keeps_gradients=plan.grads_have_homes,
            loss_scale=config.precision.loss_scale if config.precision.param_dtype == "fp16" else None,
        )
        decider = Decider(
            [record.name for record in records if record.num_trainable],
            group=group,
            failures=failures,
            max_norm=config.gradient_clipping or 0.0,
            skip_nonfinite=config.precision.param_dtype == "fp16" or config.update.on_nonfinite == "skip",
            loss_scale=policy.loss_scale,
        )
        self.announcements = Announcements(group.states, records)
        homes = HomeAccess(store, changes, group=group, announcements=self.announcements)
        self.weights = WeightAccess(store, homes, changes, executor, is_coded=coded.is_coded)
        self.blocks = ScriptBlocks(
            self.weights,
            executor,
            group=group,
            records=records,
            announcements=self.announcements,
            store=store,
        )
        gradients = WindowGradients(records)
        access = GradientAccess(
            store,
            homes,
            group=group,
            announcements=self.announcements,
            num_threads=num_threads,
            gradients=gradients,
            previous_update=changes.update_ticket,
            updates_in_backward=plan.update_in_backward,
        )
        self.window = GradientWindow(
            gradients,
            access,
            keeps_after_step=loop.keeps_after_step and not plan.update_in_backward,
            may_not_train=loop.may_not_train,
        )
        collector = self._make_collector()
        self.landing = self._make_landing(decider, cores, num_threads)
        self.accumulation = Accumulation(
            config.batch,
            keeps_gradients=policy.keeps_gradients,
            ends_with_step=not loop.keeps_after_step,
            world_size=config.world_size,
        )
        keeps_whole = any(record.whole_param is not None for record in records)
        self.coordinator = StepCoordinator(
            policy,
            group=group,
            order=GradientOrder(group, gradients, executor),
            executor=executor,
            changes=changes,
            window=self.window,
            collector=collector,
            landing=self.landing,
            decider=decider,
            pipeline=self.pipeline,
            failures=failures,
            clock=store.clock,
            publishing=store.accelerator.lane("new-weights", failures) if keeps_whole else None,
            accumulation=self.accumulation,
            current_hypers=loop.current_hypers,
            before_backward=loop.before_backward,
        )

    @uninterrupted  # a file that is made is one that is closed
    def _make_activations(self, resources: Resources) -> ActivationStore:
        return resources.make(
            lambda: make_activation_store(self._config, self._plan, self._store, group=self._group)
        )

    def _make_executor(self, records: Sequence[Record], coded: CodedGather) -> Executor:
        group, plan, store = self._group, self._plan, self._store
        near = None
        if group.near_weights is not None:
            arenas = {TierName.DEVICE: store.device, TierName.HOST: store.host}
            copies = {
                index: arenas[tier].lease(num_bytes, "copy for near ranks").bytes
                for index, (tier, num_bytes) in plan.near_copies.items()
            }
            near = HpzCopies(store.accelerator, copies, weights=group.near_weights)
        memory = self._device_memory("unit leases", plan.unit_lease_bytes)
        if memory is None:
            memory = torch.empty(0, device="cpu")
        return Executor(
            records,
            store,
            unit_arena=Arena("unit lease", memory, poison=store.poison),
            staging=self._host_pool(
                "parameter staging", NUM_STAGING_LEASES, plan.param_staging_bytes, for_files=True
            ),
            group=group,
            gather=UnitGather(group, store.accelerator, coded=coded, near=near),
        )

    def _make_pipeline(self, cores: Sequence[int], num_threads: int | None) -> UpdatePipeline:
        plan, store = self._plan, self._store
        slots = [store.host.lease(plan.slot_bytes, f"update slot {i}") for i in range(plan.num_slots)]
        store.register(slots, may_pin=self._config.pin_memory)
        pipeline = UpdatePipeline(
            store,
            slot_leases=slots,
            chunk_elements=self._config.update.chunk_elements,
            num_threads=num_threads,
            form=plan.device_form,
            scratch=self._device_memory("update scratch", plan.update_scratch_bytes),
        )
        if cores:
            pipeline.submit(lambda: set_cores(cores))
        return pipeline

    def _make_collector(self) -> GradientCollector:
        plan, device = self._plan, self._store.device
        num_shared = NUM_GRAD_LEASES if plan.device_grad_bytes else 0
        shared = [device.lease(plan.device_grad_bytes, f"gradient lease {i}") for i in range(num_shared)]
        own = {
            index: device.lease(num_bytes, "gradient lease of its own")
            for index, num_bytes in plan.own_grad_bytes.items()
        }
        return GradientCollector(
            self.window.gradients,
            self.window.handles,
            self._store,
            device_leases=self._pool(shared),
            own_leases={index: self._pool([lease]) for index, lease in own.items()},
            previous_update=self.changes.update_ticket,
            updates_in_backward=plan.update_in_backward,
        )

    def _make_landing(self, decider: Decider, cores: Sequence[int], num_threads: int | None) -> Landing:
        plan = self._plan
        return Landing(
            self._store,
            passing=self._host_pool(
                "passing gradient", plan.num_host_grads, plan.host_grad_bytes, for_files=plan.grads_on_files
            ),
            staging=self._host_pool("gradient staging", plan.num_grad_staging, plan.grad_staging_bytes),
            norm_scratch=self._device_memory("norm scratch", plan.norm_scratch_bytes),
            num_threads=num_threads,
            cores=cores,
            reduction=Reduction(
                self._group,
                codes=self._device_memory("gradient codes", plan.gradient_code_bytes),
                pieces=self._device_memory("gradient pieces", plan.gradient_piece_bytes),
                config=self._config,
            ),
            decider=decider,
            pipeline=self.pipeline,
        )

    def _device_memory(self, label: str, num_bytes: int) -> torch.Tensor | None:
        """Lease memory of the device, uint8; None where nothing is planned."""
        return self._store.device.lease(num_bytes, label).bytes if num_bytes else None

    def _pool(self, leases: Sequence[Lease]) -> BufferPool:
        """Make a pool of leases, in which the threads that wait for one take turns."""
        return BufferPool(leases, failures=self._store.failures, poison=self._store.poison)

    def _host_pool(self, label: str, count: int, num_bytes: int, *, for_files: bool = False) -> BufferPool:
        """Make a pool of buffers in host memory; `for_files`: the file engine reads and writes them."""
        leases: list[Lease] = []
        if num_bytes:
            leases = [self._store.host.lease(num_bytes, f"{label} {i}") for i in range(count)]
        if for_files:
            self._store.register(leases, may_pin=self._config.pin_memory)
        return self._pool(leases)

    def _update_threads(self) -> tuple[Sequence[int], int | None]:
        """The cores that updates keep to (empty: any), and the number of their threads (None: that of the cores)."""
        update = self._config.update
        cores = update.cores
        if not cores and update.num_threads is None and self._store.accelerator.has_streams:
            cores = cores_beside_launching(sorted(os.sched_getaffinity(0)))
        num_threads = update.num_threads or len(cores) or None
        if num_threads is None and not self._group.is_alone:  # the ranks of a machine share its cores
            num_threads = max(1, len(os.sched_getaffinity(0)) // self._group.local_world_size)
        return cores, num_threads
