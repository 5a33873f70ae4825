"""Builds the parts of one engine in one order: each is finished when it is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offloadzero.config import OffloadConfig
from offloadzero.interrupts import uninterrupted
from offloadzero.lifetime import Resources
from offloadzero.memory.arena import Arena, BufferPool, Lease
from offloadzero.memory.store import TieredStore
from offloadzero.native.cpu_adam import set_cores
from offloadzero.observe.clock import StepClock
from offloadzero.planning.memory_plan import NUM_GRAD_LEASES, NUM_STAGING_LEASES, MemoryPlan
from offloadzero.planning.probe import cores_beside_launching
from offloadzero.segments import TierName
from offloadzero.step.account import Accounts, Hypers
from offloadzero.step.accumulation import Accumulation
from offloadzero.step.collect import GradientCollector
from offloadzero.step.coordinator import StepCoordinator, StepPolicy
from offloadzero.step.decider import Decider
from offloadzero.step.landing import Landing
from offloadzero.step.param_grad import GradientAccess
from offloadzero.step.record_gradient import WindowGradients
from offloadzero.step.window import GradientWindow
from offloadzero.streaming.activation_memory import PlannedMemory
from offloadzero.streaming.activations import ActivationStore, make_activation_store
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.weights import WeightAccess
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.pipeline import UpdatePipeline
from offloadzero.update.records import Record

if TYPE_CHECKING:  # it loads torch.distributed, which not every build of torch has
    from offloadzero.several_ranks import SeveralRanks


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
    several: SeveralRanks | None = None  # None: this process alone trains the model

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
        memory = lease.bytes if lease is not None else torch.empty(0)
        return Arena("unit lease", memory, poison=self.config.poison_released_leases)

    def update_threads(self) -> tuple[Sequence[int], int | None]:
        """The cores that updates keep to (empty: any), and the number of their threads (None: that of the cores)."""
        update = self.config.update
        cores = update.cores
        if not cores and update.num_threads is None and self.store.accelerator.has_streams:
            cores = cores_beside_launching(sorted(os.sched_getaffinity(0)))
        num_threads = update.num_threads or len(cores) or None
        if num_threads is None and self.several is not None:  # the ranks of a machine share its cores
            num_threads = max(1, len(os.sched_getaffinity(0)) // self.several.ranks.local_world_size)
        return cores, num_threads


@dataclass(frozen=True)
class Parts:
    """The parts of an engine, all of them whole."""

    executor: Executor
    weights: WeightAccess
    pipeline: UpdatePipeline
    activations: ActivationStore | None
    decider: Decider
    landing: Landing
    window: GradientWindow
    collector: GradientCollector
    accumulation: Accumulation
    coordinator: StepCoordinator


def build_parts(records: Sequence[Record], ground: Ground, loop: Loop, resources: Resources) -> Parts:
    """Build the parts in their order, each from those before it. `resources` then has all that must be closed."""
    config, plan, store, clock = ground.config, ground.plan, ground.store, ground.clock
    if config.pin_memory:
        store.pin()
    several = ground.several
    executor = _build_executor(records, ground, several)
    cores, num_threads = ground.update_threads()
    pipeline = _build_pipeline(ground, cores, num_threads)
    with uninterrupted:  # a file that is made is one that is closed
        activations = _build_activation_store(ground) if config.activation_checkpoints else None
        if activations is not None:
            resources.add(activations.close)
    policy = StepPolicy(
        update_in_backward=plan.update_in_backward,
        keeps_gradients=plan.grads_have_homes,
        loss_scale=config.precision.loss_scale if config.precision.param_dtype == "fp16" else None,
    )
    accounts = Accounts(store.failures, [record.name for record in records if record.num_trainable])
    make_decider = Decider if several is None else several.decider
    decider = make_decider(
        accounts,
        failures=store.failures,
        max_norm=config.gradient_clipping or 0.0,
        skip_nonfinite=config.precision.param_dtype == "fp16" or config.update.on_nonfinite == "skip",
        loss_scale=policy.loss_scale,
    )
    window = _build_window(records, ground, loop, executor, num_threads)
    collector = _build_collector(ground, window, executor, several)
    landing = _build_landing(ground, decider, pipeline, cores, num_threads, several)
    accumulation = Accumulation(
        config.batch,
        keeps_gradients=policy.keeps_gradients,
        ends_with_step=not loop.keeps_after_step,
        world_size=config.world_size,
    )
    make_coordinator = StepCoordinator if several is None else several.coordinator(store)
    make_weights = WeightAccess if several is None else several.weights(records)
    coordinator = make_coordinator(
        policy,
        executor=executor,
        window=window,
        collector=collector,
        landing=landing,
        decider=decider,
        accounts=accounts,
        pipeline=pipeline,
        failures=store.failures,
        clock=clock,
        accumulation=accumulation,
        current_hypers=loop.current_hypers,
        before_backward=loop.before_backward,
    )
    return Parts(
        executor=executor,
        weights=make_weights(store, executor, clock=clock),
        pipeline=pipeline,
        activations=activations,
        decider=decider,
        landing=landing,
        window=window,
        collector=collector,
        accumulation=accumulation,
        coordinator=coordinator,
    )


def _build_executor(records: Sequence[Record], ground: Ground, several: SeveralRanks | None) -> Executor:
    staging_bytes = ground.plan.param_staging_bytes
    make: Any = Executor
    if several is not None:
        codes = ground.device_lease("weight codes", ground.plan.weight_code_bytes)
        make = several.executor(ground.store, None if codes is None else codes.bytes, _near_copies(ground))
    executor: Executor = make(
        records,
        ground.store,
        unit_arena=ground.unit_arena(),
        staging=ground.host_pool("parameter staging", NUM_STAGING_LEASES, staging_bytes, for_files=True),
        clock=ground.clock,
    )
    return executor


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


def _build_window(
    records: Sequence[Record], ground: Ground, loop: Loop, executor: Executor, num_threads: int | None
) -> GradientWindow:
    in_backward = ground.plan.update_in_backward
    gradients = WindowGradients(records)
    access = GradientAccess(
        ground.store,
        clock=ground.clock,
        num_threads=num_threads,
        gradients=gradients,
        previous_update=executor.update_ticket,
        updates_in_backward=in_backward,
    )
    return GradientWindow(
        gradients,
        access,
        keeps_after_step=loop.keeps_after_step and not in_backward,
        may_not_train=loop.may_not_train,
    )


def _build_collector(
    ground: Ground, window: GradientWindow, executor: Executor, several: SeveralRanks | None
) -> GradientCollector:
    plan, device = ground.plan, ground.store.device
    shared = [
        device.lease(plan.device_grad_bytes, f"gradient lease {i}")
        for i in range(NUM_GRAD_LEASES if plan.device_grad_bytes else 0)
    ]
    own = {
        index: device.lease(num_bytes, "gradient lease of its own")
        for index, num_bytes in plan.own_grad_bytes.items()
    }
    make = GradientCollector if several is None else several.collector
    return make(
        window.gradients,
        window.handles,
        ground.store,
        device_leases=ground.device_pool(shared),
        own_leases={index: ground.device_pool([lease]) for index, lease in own.items()},
        clock=ground.clock,
        previous_update=executor.update_ticket,
        updates_in_backward=plan.update_in_backward,
    )


def _build_landing(
    ground: Ground,
    decider: Decider,
    pipeline: UpdatePipeline,
    cores: Sequence[int],
    num_threads: int | None,
    several: SeveralRanks | None,
) -> Landing:
    plan = ground.plan
    make: Any = Landing
    if several is not None:
        codes = ground.device_lease("gradient codes", plan.gradient_code_bytes)
        make = several.landing(None if codes is None else codes.bytes)
    landing: Landing = make(
        ground.store,
        passing=ground.host_pool(
            "passing gradient", plan.num_host_grads, plan.host_grad_bytes, for_files=plan.grads_on_files
        ),
        staging=ground.host_pool("gradient staging", plan.num_grad_staging, plan.grad_staging_bytes),
        norm_scratch=ground.device_lease("norm scratch", plan.norm_scratch_bytes),
        clock=ground.clock,
        num_threads=num_threads,
        cores=cores,
        decider=decider,
        pipeline=pipeline,
    )
    return landing


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
        pin_memory=config.pin_memory,
        nvme_paths=config.nvme_paths,
        aio=config.aio,
    )


def _planned_inputs(ground: Ground) -> PlannedMemory | None:
    inputs, store = ground.plan.inputs, ground.store
    if inputs is None:
        return None
    label = "activation checkpoint"
    return PlannedMemory(
        inputs.input_bytes,
        # Not of the store's arena: a tensor that autograd saves and that lies there is a weight.
        device=store.accelerator.allocate(inputs.device),
        host=Arena(label, store.host.lease(inputs.host, label).bytes),
        nvme_bytes=inputs.nvme,
    )
