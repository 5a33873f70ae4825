"""One offloaded model from its start to its end."""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing.util
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from offloadzero import interrupts
from offloadzero.build import Ground, Loop, build_parts
from offloadzero.checkpoint.safetensors_file import is_known_dtype
from offloadzero.config import OffloadConfig, create_nvme_directories
from offloadzero.errors import ConfigError, StateError
from offloadzero.lifetime import EngineState, Resources, wait_for_collected
from offloadzero.memory.checksums import checksum_bytes
from offloadzero.memory.device import find_device
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.store import StoreSizes, TieredStore
from offloadzero.memory.tickets import Failures
from offloadzero.observe.clock import StepClock
from offloadzero.observe.collectives import CollectiveCount
from offloadzero.observe.monitor import StepMonitor
from offloadzero.planning.engine_plan import DTYPES, plan_engine
from offloadzero.planning.memory_plan import MemoryPlan, format_bytes
from offloadzero.planning.placement import describe_placement
from offloadzero.planning.rank_bytes import rank_bytes
from offloadzero.segments import SegmentKind, TierName
from offloadzero.sharding.shard_spec import WHOLE
from offloadzero.step.account import Hypers
from offloadzero.step.gradient_hook import GradientHooks
from offloadzero.streaming.hooks import ModelHooks
from offloadzero.streaming.original_form import OriginalForm
from offloadzero.streaming.spill import file_bytes, host_bytes
from offloadzero.streaming.units import UnitCut, checkpointed_modules, cut_units
from offloadzero.streaming.weights import WeightAccess
from offloadzero.update.records import Record
from offloadzero.update.spec import AnySpec

if TYPE_CHECKING:  # imported late, as it loads torch.distributed, which not every build of torch has
    from offloadzero.several_ranks import SeveralRanks

log = logging.getLogger("offloadzero")


class Runtime:
    """One model whose states live on device, host and NVMe."""

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig,
        *,
        spec: AnySpec,
        param_groups: Sequence[Mapping[str, object]],
        current_hypers: Callable[[], Hypers],
        before_backward: Callable[[], None] | None = None,
        keeps_after_step: bool = False,
        is_of_all_trainable: bool = False,
    ) -> None:
        """Take the states of `model` over: its parameters are placeholders from then on.

        Args:
            spec: the spec of the optimizer.
            param_groups: the groups of a torch optimizer; parameters in none of them are frozen.
            current_hypers: reads the hyperparameters by group index.
            before_backward: raises if no backward may begin now.
            keeps_after_step: gradients stay until they are dropped, unless the update runs in backward. This is torch's
                loop, without the engine's `step()` after each micro batch.
            is_of_all_trainable: a parameter that is in no group may not be unfrozen.

        Raises:
            ConfigError, BudgetError, AioError, StateError (the model is offloaded already). The model is then as it
            was: [Note: the original form].
        """
        _refuse_second(model)
        interrupts.install()
        self.config = config
        self.spec = spec
        self.model = model
        self.monitor = StepMonitor(config.observe)
        self.clock = StepClock(
            self.monitor.timeline, on_end=self.monitor.on_end, on_step=self.monitor.on_step
        )
        self.failures = Failures()
        self.resources = Resources(self.failures)
        self.resources.close_when_collected(self)
        self.resources.add(self.monitor.close)
        self.accelerator = Accelerator(find_device(config.device), self.monitor.timeline)
        self.several: SeveralRanks | None = None
        if config.world_size > 1:
            self.several = _join_ranks(self.accelerator.device, config, self.failures)
            self.resources.others_wait = True
            self.resources.add(self.several.close)
        marks = self.accelerator.marks()
        if marks is not None:
            self.clock.follow(marks)
        group_of = _group_of(param_groups)
        cut = cut_units(
            model,
            config.units,
            group_of=group_of,
            param_dtype=DTYPES[config.precision.param_dtype],
            spec=spec,
            compact=config.state_layout == "compact",
            shard=WHOLE if self.several is None else self.several.shard,
            gathers_params=self.several is not None and self.several.gathers_params,
            is_reduced=self.several is not None,
        )
        _expect_storable(cut.records)
        if self.several is not None:
            self.several.expect_same(cut.records)
        self.records = cut.records
        self.slots = {id(slot.param): (record, slot) for record in self.records for slot in record.slots}
        may_not_train = [
            slot
            for _, slot in self.slots.values()
            if not slot.trainable
            # A callable may have left out one that was not frozen.
            and (id(slot.param) in group_of or (is_of_all_trainable and not slot.param.requires_grad))
        ]
        self._original = OriginalForm(self.records)
        self._is_restored = False
        self.hooks: ModelHooks | None = None
        checkpointing = config.activation_checkpoints
        checkpointed = (
            checkpointed_modules(model, cut, config.units, checkpointing.units) if checkpointing else {}
        )
        in_memory = (host_bytes(slot.param) for record in self.records for slot in record.slots)
        self.plan = plan_engine(
            self.records,
            config,
            cut.together,
            self.accelerator.asynchronous,
            spec=spec,
            num_checkpointed=len(checkpointed),
            num_local_ranks=1 if self.several is None else self.several.ranks.local_world_size,
            movable_bytes=sum(in_memory),
        )
        try:
            if self.plan.tier_bytes(TierName.NVME) or (checkpointing and checkpointing.tier is TierName.NVME):
                create_nvme_directories(config.nvme_paths)
            with interrupts.uninterrupted:  # a file that is made is one that is closed
                self.store = _open_store(self, config)
                self.resources.add(self.store.close)
            self._build(
                cut,
                checkpointed,
                param_groups,
                Loop(
                    current_hypers=current_hypers,
                    before_backward=before_backward,
                    keeps_after_step=keeps_after_step,
                    may_not_train=may_not_train,
                ),
            )
            self.monitor.begin(
                self._description(),
                device_is_cpu=self.accelerator.asynchronous.free_bytes() is None,
                collectives=dict if self.several is None else self.several.ranks.collectives,
            )
            _live.add(self)
            if multiprocessing.parent_process() is not None:
                _close_at_exit_of_child(os.getpid())
            for notice in config.notices:
                log.info("%s", notice)
            self.monitor.timeline.take(0)  # moving the weights home is no part of a step
            self.clock.restart()
        except BaseException:
            self.undo()
            raise

    def _build(
        self,
        cut: UnitCut,
        checkpointed: Mapping[str, nn.Module],
        param_groups: Sequence[Mapping[str, object]],
        loop: Loop,
    ) -> None:
        _create_segments(cut.records, self.plan, self.store)
        if self.several is not None:
            self.several.agree_on_buffers(self.model)
        self._original.load(self.store, agree=_keep if self.several is None else self.several.agree)
        for record in cut.records:
            WeightAccess.begin_states(record, param_groups, self.store)
        ground = Ground(self.config, self.plan, self.store, self.clock, self.several)
        parts = build_parts(cut.records, ground, loop, self.resources)
        self.executor, self.weights, self.activations = parts.executor, parts.weights, parts.activations
        self.accumulation, self.coordinator = parts.accumulation, parts.coordinator
        self.parts = parts
        with interrupts.uninterrupted:  # hooks that are half in place could not be removed again
            self.hooks = ModelHooks(
                self.model,
                cut,
                executor=parts.executor,
                gradient_hook=GradientHooks(parts.coordinator, self.monitor.timeline).of,
                weights=parts.weights,
                timeline=self.monitor.timeline,
                checkpointed=checkpointed,
                activations=parts.activations,
            )
            self.weights.attach(self.records)
        _move_buffers(self.model, self.accelerator.device)

    def reserved_bytes(self, tier: TierName) -> int:
        """Bytes that the plan reserves in a tier, and the activation checkpoints so far."""
        beside = self.activations.reserved() if self.activations is not None else {}
        return self.plan.tier_bytes(tier) + beside.get(tier, 0)

    def memory_table(self) -> str:
        """Bytes per tier, the backing files and the file engine in use."""
        lines = [self.plan.table()]
        if self.config.placement.auto:
            lines.append(f"placement auto: {describe_placement(self.records, self.plan.placement)}")
        if self.several is not None:
            spec, stage = self.several.ranks.spec, self.config.zero_stage
            kept = rank_bytes(self.records, self.plan, gathers_params=self.several.gathers_params)
            lines.append(f"rank {spec.rank} of {spec.world_size}, stage {stage}: {kept.text()}")
        if self.store.nvme is not None:
            lines += [f"    {path}  {format_bytes(size)}" for path, size in self.store.nvme.files]
            lines.append(f"    file engine of parameters and states: {self.store.nvme.description}")
        for tier, size in (self.activations.reserved() if self.activations is not None else {}).items():
            lines.append(
                f"{tier.value:<8}{format_bytes(size):>12}  activation checkpoints so far, beside the plan"
            )
        for_inputs = self.activations.file_engine() if self.activations is not None else None
        if for_inputs is not None:
            lines.append(f"    file engine of activation checkpoints: {for_inputs}")
        return "\n".join(lines)

    def _description(self) -> dict[str, object]:
        """The facts that hold for the whole run, for the run directory."""
        tiers = {
            tier.value: [
                {"what": line.what, "num_bytes": line.num_bytes}
                for line in self.plan.lines
                if line.tier is tier and line.num_bytes
            ]
            for tier in TierName
        }
        return {
            "device": str(self.accelerator.device),
            "num_units": len(self.records),
            "num_parameters": sum(slot.num_elements for r in self.records for slot in r.slots),
            "file_engine": self.store.nvme.description if self.store.nvme is not None else None,
            "tiers": tiers,
        }

    def collectives(self) -> dict[str, CollectiveCount]:
        """Counts of this rank's collectives since the start, by purpose and kind; none with one process."""
        return {} if self.several is None else self.several.ranks.collectives()

    def read_by_first(self, work: Callable[[], None]) -> None:
        """Do work that reads all states and is done once. All ranks call this; the first one does the work."""
        if self.several is None:
            work()
        else:
            self.several.read_by_first(self.weights, work)

    def is_on_some_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        return flag if self.several is None else self.several.is_on_some(flag)

    def odd_ranks(self, what: str, text: str) -> list[int]:
        """The ranks whose `text` differs from that of the first one; `what` names the compared things in messages."""
        return [] if self.several is None else self.several.departures({what: text})[what]

    def together(self, what: str) -> AbstractContextManager[None]:
        """A block that fails on all ranks, at its end, where it fails on one of them."""
        return nullcontext() if self.several is None else self.several.together(what)

    def synchronize(self) -> None:
        """Block until all updates are home; raises what failed."""
        self.executor.wait_updates()
        self.failures.check()

    @property
    def state(self) -> EngineState:
        """The engine's state: what can be done with it now."""
        if self._is_restored:
            return EngineState.RESTORED
        if not self.resources.is_open and not self.failures.is_foreign:
            return EngineState.CLOSED
        is_stopped = self.failures.first is not None or self.failures.stop is not None
        return EngineState.FAILED if is_stopped else EngineState.OPEN

    def close(self) -> None:
        """Finish all updates, stop the threads, remove the files. Raises the first failure that no call has raised yet.

        In a forked child it does nothing: threads and files are the parent's. It may be interrupted and called again.
        """
        if not self.resources.is_open:
            return
        try:
            if self.failures.first is None:
                self.executor.wait_updates()
                self.clock.settle(wait=True)
        except Exception:
            raise
        except BaseException:
            self.failures.spoil(StateError("close() was interrupted: updates may be lost"))
            raise
        finally:
            try:
                self._release()
            finally:
                unseen = self.failures.unseen()
                closed = StateError("the engine of this model is closed")
                self.failures.record(closed, cause=_script_error() or StateError("it has closed its engine"))
        if unseen is not None:
            raise unseen

    def restore_model(self) -> None:
        """Make the model an ordinary one again, with its weights as they are now, and close the engine.

        Each parameter gets the dtype and the device that it had before; one that was fp32 gets its fp32 master. Raises
        the first failure that no call has raised yet, and StateError when the engine is closed.
        """
        if self.state in (EngineState.CLOSED, EngineState.RESTORED):
            raise StateError(f"the engine of this model is {self.state.value}: there is nothing to restore")
        if self.several is not None and self.several.shard.world_size > 1:
            raise StateError(
                "restore_model() over several ranks is not built where they divide the states: save_checkpoint(), or "
                "state_dict() on all ranks, gives the weights"
            )
        self.executor.wait_updates()
        if self.failures.unseen() is not None:
            self.failures.check()
        self._original.restore()
        self._is_restored = True
        if self.hooks is not None:
            self.hooks.remove()
        self.close()

    def undo(self) -> None:
        """Undo a start that failed, so that the model is as it was."""
        _live.discard(self)
        try:
            if self.hooks is not None:
                self.hooks.remove()
            self._original.restore()
            self._is_restored = True
        finally:
            self.resources.close()
            if not _live:
                interrupts.uninstall()

    def _release(self) -> None:
        try:
            if self.hooks is not None:
                self.hooks.remove_gradient_hooks()
                self.parts.window.drop_tensors()
        finally:
            self.resources.close()
            _live.discard(self)
            _closed.add(self)
            if not _live:
                interrupts.uninstall()


def _join_ranks(device: torch.device, config: OffloadConfig, failures: Failures) -> SeveralRanks:
    from offloadzero.several_ranks import join_ranks

    # Registered again, to run before the end of torch's process group, which was registered earlier: closing takes
    # collectives.
    atexit.register(_close_at_exit)
    return join_ranks(device, config, failures)


def _keep(values: torch.Tensor) -> None:
    """Do nothing: one rank agrees with itself."""


# The runtimes whose hooks are on a model, and those that were closed.
_live: weakref.WeakSet[Runtime] = weakref.WeakSet()
_closed: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _script_error() -> BaseException | None:
    """The error that ends the script, if one does: it is being handled, or has ended the main thread."""
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and not error.code else error


@atexit.register
def _close_at_exit() -> None:
    """Close all engines. A failure that no call has raised must not end in exit status 0."""
    for runtime in list(_live):
        try:
            runtime.close()
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    wait_for_collected()


@functools.cache
def _close_at_exit_of_child(process: int) -> None:  # noqa: ARG001 - once in each process
    """multiprocessing ends forked children (of its forkserver, too) without `atexit`, after finalizers of its own."""
    multiprocessing.util.Finalize(None, _close_at_exit, exitpriority=0)


def _refuse_second(model: nn.Module) -> None:
    """Raise StateError for a model that is offloaded already, or whose weights went with its engine."""
    for runtime in (*_live, *_closed):
        if runtime.state is EngineState.RESTORED:
            continue
        for name, param in model.named_parameters():
            if id(param) not in runtime.slots:
                continue
            if runtime.state is EngineState.CLOSED:
                raise StateError(
                    f"{name}: this model's engine was closed, and its weights went with it. Call restore_model() "
                    "instead of close() to go on with the model, or build it anew"
                )
            raise StateError(
                f"{name} is offloaded already, by another engine: restore_model() of that one gives the model back"
            )


def runtime_of(param: nn.Parameter) -> Runtime | None:
    """The runtime that holds a parameter's states."""
    return next((runtime for runtime in _live if id(param) in runtime.slots), None)


def _group_of(param_groups: Sequence[Mapping[str, object]]) -> dict[int, int]:
    groups: dict[int, int] = {}
    for index, group in enumerate(param_groups):
        params = group["params"]
        if not isinstance(params, list):
            raise AssertionError("a param group without a list of parameters")
        groups.update({id(param): index for param in params})
    return groups


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


def _open_store(runtime: Runtime, config: OffloadConfig) -> TieredStore:
    plan = runtime.plan
    of_inputs = plan.inputs.nvme if plan.inputs is not None else 0  # a file of their own
    fetched = plan.inputs.device if plan.inputs is not None else 0  # apart, too
    return TieredStore(
        runtime.accelerator,
        sizes=StoreSizes(
            device=plan.tier_bytes(TierName.DEVICE) - fetched,
            host=plan.tier_bytes(TierName.HOST) - (checksum_bytes(of_inputs) if config.aio.checksums else 0),
            nvme=plan.tier_bytes(TierName.NVME) - of_inputs,
            waiting=file_bytes(slot.param for record in runtime.records for slot in record.slots),
        ),
        nvme_paths=config.nvme_paths,
        aio=config.aio,
        failures=runtime.failures,
        poison=config.poison_released_leases,
    )


def _create_segments(records: Sequence[Record], plan: MemoryPlan, store: TieredStore) -> None:
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
            if plan.grads_have_homes or tier is TierName.DEVICE:
                record.segments[SegmentKind.GRAD] = store.create(
                    record.name, SegmentKind.GRAD, record.grad_dtype, record.state.kept_trainable, tier
                )


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                persistent = name not in module._non_persistent_buffers_set
                module.register_buffer(name, buffer.to(device), persistent=persistent)
