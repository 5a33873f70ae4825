"""Cuts and plans one model, takes its memory, and builds the parts of its engine: each is finished when it is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from offloadzero.access.agreement import Announcements
from offloadzero.access.gathered import ScriptBlocks
from offloadzero.access.homes import HomeAccess
from offloadzero.access.weights import WeightAccess
from offloadzero.activations.input_parts import InputParts
from offloadzero.activations.memory import PlannedMemory
from offloadzero.activations.store import ActivationStore, make_activation_store
from offloadzero.checkpoint.format.safetensors_file import is_known_dtype
from offloadzero.config import OffloadConfig, create_nvme_directories
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.engine.lifetime import Resources
from offloadzero.engine.planned_model import uses_of
from offloadzero.engine.same_model import expect_same_homes, expect_same_model
from offloadzero.errors import ConfigError
from offloadzero.memory.arena import Arena, BufferPool, Lease
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.store import StoreSizes, TieredStore
from offloadzero.memory.tickets import Failures
from offloadzero.native.kernels import set_cores
from offloadzero.observe.clock import StepClock
from offloadzero.planning.engine_plan import plan_engine
from offloadzero.planning.machine import cores_beside_launching
from offloadzero.planning.memory_plan import NUM_GRAD_LEASES, NUM_STAGING_LEASES, MemoryPlan
from offloadzero.ranks.group import Group
from offloadzero.ranks.shard import WHOLE, divides_params, divides_states
from offloadzero.step.account import Accounts, Hypers
from offloadzero.step.accumulation import Accumulation
from offloadzero.step.collect import GradientCollector
from offloadzero.step.coordinator import StepCoordinator, StepPolicy
from offloadzero.step.decider import Decider
from offloadzero.step.gradient_order import GradientOrder
from offloadzero.step.landing import Landing
from offloadzero.step.param_grad import GradientAccess
from offloadzero.step.record_gradient import WindowGradients
from offloadzero.step.reduction.coded import CodedReduce
from offloadzero.step.reduction.piecewise import PiecewiseReduce
from offloadzero.step.reduction.reduction import Reduction
from offloadzero.step.window import GradientWindow
from offloadzero.streaming.building.spill import file_bytes, host_bytes
from offloadzero.streaming.building.units import UnitCut, checkpointed_modules, cut_units
from offloadzero.streaming.coded_gather import CodedGather
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.hpz_copies import NearCopies
from offloadzero.streaming.unit_changes import UnitChanges
from offloadzero.streaming.unit_gather import UnitGather
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.pipeline import UpdatePipeline
from offloadzero.update.records import Record
from offloadzero.update.spec import DTYPES, AnySpec


@dataclass(frozen=True)
class Loop:
    """The script's way of training: the calls that its loop makes."""

    current_hypers: Callable[[], Hypers]  # reads the hyperparameters by group index
    before_backward: Callable[[], None] | None  # raises if no backward may begin now
    # True: gradients stay until they are dropped, unless the update runs in backward. This is torch's loop, which does
    # not call the engine's `step()` after each micro batch.
    keeps_after_step: bool
    may_not_train: Sequence[
        ParamSlot
    ]  # frozen when the model was offloaded, and its to train when they are not


@dataclass(frozen=True)
class Ground:
    """The things that all parts stand on, and their ways to get memory."""

    config: OffloadConfig
    plan: MemoryPlan
    store: TieredStore
    clock: StepClock
    group: Group

    def device_lease(self, label: str, num_bytes: int) -> Lease | None:
        """Lease memory of the device, or return None where nothing is planned."""
        return self.store.device.lease(num_bytes, label) if num_bytes else None

    def device_pool(self, leases: Sequence[Lease]) -> BufferPool:
        """Make a pool of leases, in which the threads that wait for one take turns."""
        poison = self.config.poison_released_leases
        return BufferPool(leases, failures=self.store.failures, poison=poison)

    def host_pool(self, label: str, count: int, num_bytes: int, *, for_files: bool = False) -> BufferPool:
        """Make a pool of buffers in host memory; `for_files`: the file engine reads and writes them."""
        leases: list[Lease] = []
        if num_bytes:
            leases = [self.store.host.lease(num_bytes, f"{label} {i}") for i in range(count)]
        if for_files:
            self.store.register(leases, may_pin=self.config.pin_memory)
        poison = self.config.poison_released_leases
        return BufferPool(leases, failures=self.store.failures, poison=poison)

    def unit_arena(self) -> Arena:
        """The part of the device arena from which units are leased."""
        lease = self.device_lease("unit leases", self.plan.unit_lease_bytes)
        memory = lease.bytes if lease is not None else torch.empty(0, device="cpu")
        return Arena("unit lease", memory, poison=self.config.poison_released_leases)

    def update_threads(self) -> tuple[Sequence[int], int | None]:
        """The cores that updates keep to (empty: any), and the number of their threads (None: that of the cores)."""
        update = self.config.update
        cores = update.cores
        if not cores and update.num_threads is None and self.store.accelerator.has_streams:
            cores = cores_beside_launching(sorted(os.sched_getaffinity(0)))
        num_threads = update.num_threads or len(cores) or None
        if num_threads is None and not self.group.is_alone:  # the ranks of a machine share its cores
            num_threads = max(1, len(os.sched_getaffinity(0)) // self.group.local_world_size)
        return cores, num_threads


@dataclass(frozen=True)
class Parts:
    """The parts of an engine, all of them whole."""

    executor: Executor
    changes: UnitChanges
    weights: WeightAccess
    blocks: ScriptBlocks
    announcements: Announcements  # of this rank to the others
    pipeline: UpdatePipeline
    activations: ActivationStore | None
    decider: Decider
    landing: Landing
    window: GradientWindow
    collector: GradientCollector
    accumulation: Accumulation
    coordinator: StepCoordinator


# --- the model, cut and planned ---


def cut_model(
    model: nn.Module,
    config: OffloadConfig,
    *,
    group_of: Mapping[int, int],
    spec: AnySpec,
    group: Group,
) -> UnitCut:
    """Cut the model into units whose states can be kept and saved, the same ones on all ranks.

    Args:
        group_of: id of a parameter -> index of its optimizer group; parameters that are absent are frozen.

    Raises:
        ConfigError: those of `cut_units`; a dtype that no checkpoint can hold; other units than the other ranks have.
    """
    cut = cut_units(
        model,
        config.units,
        group_of=group_of,
        param_dtype=DTYPES[config.precision.param_dtype],
        spec=spec,
        compact=config.state_layout == "compact",
        shard=group.spec if divides_states(config.zero_stage) else WHOLE,
        gathers_params=divides_params(config.zero_stage),
        is_reduced=not group.is_alone,
    )
    _expect_storable(cut.records)
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


def find_checkpointed(model: nn.Module, cut: UnitCut, config: OffloadConfig) -> dict[str, nn.Module]:
    """Return the modules by name whose forward is run again in backward. Raises ConfigError."""
    checkpointing = config.activation_checkpoints
    return checkpointed_modules(model, cut, config.units, checkpointing.units) if checkpointing else {}


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
    plan = plan_engine(
        cut.records,
        config,
        cut.together,
        accelerator.asynchronous,
        spec=spec,
        num_checkpointed=num_checkpointed,
        movable_bytes=sum(host_bytes(slot.param) for record in cut.records for slot in record.slots),
        uses=uses_of(cut),
        group=group,
    )
    if config.placement.auto:
        expect_same_homes(group, plan.placement)
    return plan


# --- the memory ---


def make_directories(config: OffloadConfig, plan: MemoryPlan) -> None:
    """Make the directories of files, if the engine has any."""
    checkpointing = config.activation_checkpoints
    if plan.tier_bytes(TierName.NVME) or (checkpointing and checkpointing.tier.is_file):
        create_nvme_directories(config.nvme_paths)


def open_store(
    records: Sequence[Record],
    config: OffloadConfig,
    plan: MemoryPlan,
    accelerator: Accelerator,
    *,
    failures: Failures,
) -> TieredStore:
    """Take the memory of all tiers, apart from that of activation checkpoints."""
    of_inputs = plan.inputs.nvme if plan.inputs is not None else 0  # a file of their own
    fetched = plan.inputs.device if plan.inputs is not None else 0  # apart, too
    return TieredStore(
        accelerator,
        sizes=StoreSizes(
            device=plan.tier_bytes(TierName.DEVICE) - fetched,
            host=plan.tier_bytes(TierName.HOST) - (checksum_bytes(of_inputs) if config.aio.checksums else 0),
            nvme=plan.tier_bytes(TierName.NVME) - of_inputs,
            waiting=file_bytes(slot.param for record in records for slot in record.slots),
        ),
        nvme_paths=config.nvme_paths,
        aio=config.aio,
        failures=failures,
        poison=config.poison_released_leases,
    )


def create_segments(records: Sequence[Record], plan: MemoryPlan, store: TieredStore) -> None:
    """Make the homes of all records, which hold zeros."""
    for record in records:
        for kind, (dtype, num_elements) in record.layout().items():
            tier = plan.placement[record.index, kind]
            record.segments[kind] = store.create(record.name, kind, dtype, num_elements, tier)
        if record.state.keeps_whole_params:
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
                    record.name, SegmentKind.GRAD, record.grad_dtype, record.state.kept_trainable, tier
                )


# --- the parts ---


def build_parts(records: Sequence[Record], ground: Ground, loop: Loop, resources: Resources) -> Parts:
    """Build the parts in their order, each from those before it. `resources` then has all that must be closed."""
    config, plan, store, clock = ground.config, ground.plan, ground.store, ground.clock
    if config.pin_memory:
        store.pin()
    codes = ground.device_lease("weight codes", plan.weight_code_bytes)
    coded = CodedGather(None if codes is None else codes.bytes, config=config.zero_plus_plus)
    executor = _build_executor(records, ground, coded)
    cores, num_threads = ground.update_threads()
    pipeline = _build_pipeline(ground, cores, num_threads)
    activations = None
    if config.activation_checkpoints:
        activations = resources.make(lambda: _build_activation_store(ground))
    policy = StepPolicy(
        update_in_backward=plan.update_in_backward,
        keeps_gradients=plan.grads_have_homes,
        loss_scale=config.precision.loss_scale if config.precision.param_dtype == "fp16" else None,
    )
    accounts = Accounts(store.failures, [record.name for record in records if record.num_trainable])
    decider = _build_decider(ground, accounts, policy)
    changes = executor.changes
    group, failures = ground.group, store.failures
    announcements = Announcements(group, records)
    homes = HomeAccess(store, changes, clock=clock, group=group, announcements=announcements)
    weights = WeightAccess(store, homes, changes, executor, is_coded=coded.is_coded)
    blocks = ScriptBlocks(
        weights,
        executor,
        group=group,
        records=records,
        announcements=announcements,
        clock=clock,
        failures=failures,
    )
    gradients = WindowGradients(records)
    access = GradientAccess(
        store,
        homes,
        group=group,
        announcements=announcements,
        clock=clock,
        num_threads=num_threads,
        gradients=gradients,
        previous_update=changes.update_ticket,
        updates_in_backward=plan.update_in_backward,
    )
    window = GradientWindow(
        gradients,
        access,
        keeps_after_step=loop.keeps_after_step and not plan.update_in_backward,
        may_not_train=loop.may_not_train,
    )
    collector = _build_collector(ground, window, changes)
    landing = _build_landing(ground, decider, pipeline, cores, num_threads)
    accumulation = Accumulation(
        config.batch,
        keeps_gradients=policy.keeps_gradients,
        ends_with_step=not loop.keeps_after_step,
        world_size=config.world_size,
    )
    keeps_whole = any(record.whole_param is not None for record in records)
    coordinator = StepCoordinator(
        policy,
        group=ground.group,
        order=GradientOrder(ground.group, window.gradients, executor),
        executor=executor,
        changes=changes,
        window=window,
        collector=collector,
        landing=landing,
        decider=decider,
        accounts=accounts,
        pipeline=pipeline,
        failures=store.failures,
        clock=clock,
        publishing=store.accelerator.lane("new-weights", store.failures) if keeps_whole else None,
        accumulation=accumulation,
        current_hypers=loop.current_hypers,
        before_backward=loop.before_backward,
    )
    return Parts(
        executor=executor,
        changes=changes,
        weights=weights,
        blocks=blocks,
        announcements=announcements,
        pipeline=pipeline,
        activations=activations,
        decider=decider,
        landing=landing,
        window=window,
        collector=collector,
        accumulation=accumulation,
        coordinator=coordinator,
    )


def _build_executor(records: Sequence[Record], ground: Ground, coded: CodedGather) -> Executor:
    group, accelerator, near = ground.group, ground.store.accelerator, None
    if group.near_weights is not None:
        near = NearCopies(accelerator, _near_copies(ground), weights=group.near_weights)
    staging_bytes = ground.plan.param_staging_bytes
    return Executor(
        records,
        ground.store,
        unit_arena=ground.unit_arena(),
        staging=ground.host_pool("parameter staging", NUM_STAGING_LEASES, staging_bytes, for_files=True),
        clock=ground.clock,
        group=group,
        gather=UnitGather(group, accelerator, coded=coded, near=near),
    )


def _near_copies(ground: Ground) -> dict[int, torch.Tensor]:
    """Lease the memory, by record, for copies of weights that the ranks of a machine keep together."""
    arenas = {TierName.DEVICE: ground.store.device, TierName.HOST: ground.store.host}
    return {
        index: arenas[tier].lease(num_bytes, "copy for near ranks").bytes
        for index, (tier, num_bytes) in ground.plan.near_copies.items()
    }


def _build_pipeline(ground: Ground, cores: Sequence[int], num_threads: int | None) -> UpdatePipeline:
    config, plan, store = ground.config, ground.plan, ground.store
    slots = [store.host.lease(plan.slot_bytes, f"update slot {i}") for i in range(plan.num_slots)]
    store.register(slots, may_pin=config.pin_memory)
    pipeline = UpdatePipeline(
        store,
        slot_leases=slots,
        chunk_elements=config.update.chunk_elements,
        num_threads=num_threads,
        form=plan.device_form,
        scratch=ground.device_lease("update scratch", plan.update_scratch_bytes),
    )
    if cores:
        pipeline.submit(lambda: set_cores(cores))
    return pipeline


def _build_decider(ground: Ground, accounts: Accounts, policy: StepPolicy) -> Decider:
    config = ground.config
    return Decider(
        accounts,
        group=ground.group,
        failures=ground.store.failures,
        max_norm=config.gradient_clipping or 0.0,
        skip_nonfinite=config.precision.param_dtype == "fp16" or config.update.on_nonfinite == "skip",
        loss_scale=policy.loss_scale,
    )


def _build_collector(ground: Ground, window: GradientWindow, changes: UnitChanges) -> GradientCollector:
    plan, device = ground.plan, ground.store.device
    shared = [
        device.lease(plan.device_grad_bytes, f"gradient lease {i}")
        for i in range(NUM_GRAD_LEASES if plan.device_grad_bytes else 0)
    ]
    own = {
        index: device.lease(num_bytes, "gradient lease of its own")
        for index, num_bytes in plan.own_grad_bytes.items()
    }
    return GradientCollector(
        window.gradients,
        window.handles,
        ground.store,
        device_leases=ground.device_pool(shared),
        own_leases={index: ground.device_pool([lease]) for index, lease in own.items()},
        clock=ground.clock,
        previous_update=changes.update_ticket,
        updates_in_backward=plan.update_in_backward,
    )


def _build_landing(
    ground: Ground,
    decider: Decider,
    pipeline: UpdatePipeline,
    cores: Sequence[int],
    num_threads: int | None,
) -> Landing:
    plan = ground.plan
    return Landing(
        ground.store,
        passing=ground.host_pool(
            "passing gradient", plan.num_host_grads, plan.host_grad_bytes, for_files=plan.grads_on_files
        ),
        staging=ground.host_pool("gradient staging", plan.num_grad_staging, plan.grad_staging_bytes),
        norm_scratch=ground.device_lease("norm scratch", plan.norm_scratch_bytes),
        clock=ground.clock,
        num_threads=num_threads,
        cores=cores,
        reduction=_build_reduction(ground),
        decider=decider,
        pipeline=pipeline,
    )


def _build_reduction(ground: Ground) -> Reduction:
    config, plan, group = ground.config, ground.plan, ground.group
    codes = ground.device_lease("gradient codes", plan.gradient_code_bytes)
    memory = ground.device_lease("gradient pieces", plan.gradient_piece_bytes)
    dtype, pieces = DTYPES[config.communication_dtype], None
    if memory is not None and dtype is not None:
        pieces = PiecewiseReduce(group, memory.bytes, dtype=dtype)
    coded = CodedReduce(group, None if codes is None else codes.bytes, config=config.zero_plus_plus)
    return Reduction(group, coded=coded, pieces=pieces, wire_dtype=dtype)


def _build_activation_store(ground: Ground) -> ActivationStore:
    config, budgets = ground.config, ground.config.budgets
    if config.activation_checkpoints is None:
        raise AssertionError("no activation checkpoints are configured")
    return make_activation_store(
        config.activation_checkpoints.tier,
        store=ground.store,
        clock=ground.clock,
        budgets={TierName.HOST: budgets.host, TierName.NVME: budgets.nvme},
        planned_bytes={tier: ground.plan.tier_bytes(tier) for tier in TierName},
        planned=_planned_inputs(ground),
        parts=_build_input_parts(ground),
        pin_memory=config.pin_memory,
        nvme_paths=config.nvme_paths,
        aio=config.aio,
    )


def _build_input_parts(ground: Ground) -> InputParts | None:
    """What brings inputs away in parts and back whole; None where no other rank has the same ones."""
    gathers, orders = ground.group.activations, ground.group.activation_orders
    if gathers is None or orders is None:
        return None
    return InputParts(gathers, orders, ground.store.accelerator)


def _planned_inputs(ground: Ground) -> PlannedMemory | None:
    inputs, store = ground.plan.inputs, ground.store
    if inputs is None:
        return None
    label = "activation checkpoint"
    return PlannedMemory(
        inputs.input_bytes,
        inputs.kept_bytes,
        # Not of the store's arena: a tensor that autograd saves and that lies there is a weight.
        device=store.accelerator.allocate(inputs.device),
        host=Arena(label, store.host.lease(inputs.host, label).bytes),
        nvme_bytes=inputs.nvme,
    )
