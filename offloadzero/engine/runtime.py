"""One offloaded model from its start to its end."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import multiprocessing.util
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from offloadzero.access.weight_access import answer_for
from offloadzero.config import OffloadConfig
from offloadzero.core import interrupts
from offloadzero.core.interrupts import uninterrupted
from offloadzero.core.segments import TierName
from offloadzero.engine.build import (
    Parts,
    ScriptLoop,
    create_segments,
    cut_model,
    find_sources,
    open_store,
    plan_cut,
)
from offloadzero.engine.durable import DurableRun, open_run
from offloadzero.engine.join import agree_on_buffers, join_ranks
from offloadzero.engine.lifetime import EngineState, Resources, wait_for_collected
from offloadzero.errors import RankError, StateError
from offloadzero.memory.device import find_device, make_current
from offloadzero.memory.lanes import Accelerator
from offloadzero.memory.tickets import Failures
from offloadzero.observe.clock import StepClock
from offloadzero.observe.forecast import MakeForecast, PlannedStep
from offloadzero.observe.monitor import StepMonitor
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.placement import describe_placement
from offloadzero.planning.placement_rules import idle_rules
from offloadzero.planning.zero_formulas import rank_bytes
from offloadzero.ranks.group import Group
from offloadzero.ranks.shard import divides_params
from offloadzero.step.gradient_hook import GradientHooks
from offloadzero.step.job import Hypers
from offloadzero.streaming.building.coded_parameters import attached_bytes, move_attached, num_weights
from offloadzero.streaming.building.leaf_modules import idle_leaf_modules
from offloadzero.streaming.building.original_form import OriginalForm, write_states
from offloadzero.streaming.building.units import UnitCut, checkpointed_modules
from offloadzero.streaming.hooks import ModelHooks
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import AnySpec

log = logging.getLogger("offloadzero")


class Runtime:
    """One model whose states live on device, host and NVMe."""

    @torch.inference_mode(False)  # a script may offload in the midst of an evaluation, and train later
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
        self.number = next(_numbers)
        interrupts.install()
        self.config: OffloadConfig = config
        self.spec, self.model = spec, model
        self.monitor = StepMonitor(config.observe)
        self.failures = Failures()
        self.resources = Resources(self.failures)
        self.resources.close_when_collected(self)
        self.resources.add(self.monitor.close)
        self.accelerator = Accelerator(find_device(config.device), self.monitor.timeline)
        # Else a new thread's is the first one, where a look at an event makes a context of half a gigabyte.
        self.failures.begin_threads_by(functools.partial(make_current, self.accelerator.device))
        self.group: Group = _join_ranks(self.accelerator, config, self.resources)
        self.clock = _make_clock(self.monitor, self.accelerator)
        group_of = _group_of(param_groups)
        group_specs = [spec.of_group(group) for group in param_groups]
        cut = cut_model(
            model, config, group_of=group_of, spec=spec, group_specs=group_specs, group=self.group
        )
        self._cut, self.records = cut, cut.records
        self.slots = {id(slot.param): (record, slot) for record in self.records for slot in record.slots}
        loop = ScriptLoop(
            current_hypers=current_hypers,
            before_backward=before_backward,
            keeps_after_step=keeps_after_step,
            may_not_train=_may_not_train(self.records, group_of, is_of_all_trainable=is_of_all_trainable),
        )
        find_sources(self.records, config, self.group)
        self._original = OriginalForm(self.records)
        self.on_restore: list[Callable[[], None]] = []  # called when the model is an ordinary one again
        self.on_close: list[Callable[[], None]] = []  # called last by close(); may raise what nobody was told
        self._is_restored = False
        self.hooks: ModelHooks | None = None
        checkpointed = checkpointed_modules(model, cut, config)
        self._checkpointed = tuple(checkpointed)
        self.durable: DurableRun | None = None
        try:
            self._open = open_run(config, self.group, model, self.resources)
            self.plan = plan_cut(
                cut,
                self._open.config,
                self.accelerator,
                spec=spec,
                num_checkpointed=len(checkpointed),
                group=self.group,
            )
            self._take_memory()
            self._build(cut, checkpointed, param_groups, loop)
            self._go_live()
        except BaseException:
            self.undo()
            raise

    @uninterrupted  # a file that is made is one that is closed
    def _take_memory(self) -> None:
        self.store = self.resources.make(
            lambda: open_store(
                self.records,
                self.config,
                self.plan,
                self.accelerator,
                failures=self.failures,
                clock=self.clock,
                kept=self._open.kept_file,
            )
        )

    def _build(
        self,
        cut: UnitCut,
        checkpointed: Mapping[str, nn.Module],
        param_groups: Sequence[Mapping[str, object]],
        loop: ScriptLoop,
    ) -> None:
        """Move the states to their homes, build the parts and put the hooks on the model."""
        create_segments(cut.records, self.plan, self.store)
        agree_on_buffers(self.group, self.model)
        self.durable = self._open.begin(self.model, self.records, self.store)
        self._original.load(self.store, self.group)
        for record in cut.records:
            write_states(record, param_groups, self.store)
        if self.durable is not None:
            self.durable.take_over()
        self.parts = parts = Parts(
            cut.records,
            self.config,
            self.plan,
            self.store,
            group=self.group,
            loop=loop,
            resources=self.resources,
        )
        self.executor, self.changes = parts.executor, parts.changes
        self.weights, self.blocks, self.activations = parts.weights, parts.blocks, parts.activations
        self.weights.engine = weakref.ref(self)
        self.accumulation, self.coordinator = parts.accumulation, parts.coordinator
        self._attach(checkpointed)
        _move_buffers(self.model, self.accelerator.device)
        move_attached(self.model, self.accelerator.device)

    @uninterrupted  # hooks that are half in place could not be removed again
    def _attach(self, checkpointed: Mapping[str, nn.Module]) -> None:
        parts = self.parts
        self.hooks = ModelHooks(
            self.model,
            self._cut,
            executor=parts.executor,
            gradient_hook=GradientHooks(parts.coordinator, self.monitor.timeline).of,
            weights=parts.weights,
            blocks=parts.blocks,
            timeline=self.monitor.timeline,
            checkpointed=checkpointed,
            activations=parts.activations,
        )
        answer_for(self.records, self.weights)

    def _go_live(self) -> None:
        """Begin the reports, and be one of the runtimes that the end of the process closes."""
        self.monitor.begin(
            self._description(),
            device_is_cpu=self.accelerator.asynchronous.free_bytes() is None,
            collectives=self.group.collectives,
            forecast=self._prepare_forecast(),
            num_local_ranks=self.group.local_world_size,
            is_first=self.group.is_first,
        )
        _live.add(self)
        if multiprocessing.parent_process() is not None:
            _close_at_exit_of_child(os.getpid())
        if self.group.is_first:
            for notice in self.config.notices:
                log.info("%s", notice)
            leaves = idle_leaf_modules(self.model, self.config.units.leaf_modules)
            for line in (*idle_rules(self.records, self.config), *leaves):
                log.warning("%s", line)
        self.monitor.timeline.take(0)  # moving the weights home is no part of a step
        self.clock.restart()

    def _prepare_forecast(self) -> MakeForecast | None:
        """Return what makes the forecast of a step when the first one has run; it must not hold the engine.

        Of several ranks the first one makes it.
        """
        if not self.group.is_first or self.hooks is None or not self.monitor.is_on:
            return None
        from offloadzero.engine.forecast import (  # late: a run without reports needs none of it
            FirstStep,
            forecast_step,
        )

        monitor, reference = self.monitor, weakref.ref(self)
        first = FirstStep(self.accelerator.device, is_over=lambda: monitor.has_steps)
        self.hooks.tell_calls(first.see)

        def make(rates: Mapping[str, float]) -> PlannedStep:
            runtime = reference()
            if runtime is None:
                raise AssertionError("an engine that is gone has taken a step")
            return forecast_step(
                runtime.model,
                runtime._cut,
                runtime.plan,
                runtime.config,
                checkpointed=runtime._checkpointed,
                device=runtime.accelerator.asynchronous,
                first=first,
                num_local_ranks=runtime.group.local_world_size,
                shown_rates=rates,
            )

        return make

    def reserved_bytes(self, tier: TierName) -> int:
        """Bytes that the plan reserves in a tier, and the activation checkpoints so far."""
        beside = self.activations.reserved() if self.activations is not None else {}
        return self.plan.tier_bytes(tier) + beside.get(tier, 0)

    def memory_table(self) -> str:
        """Bytes per tier, the backing files and the file engine in use."""
        lines = [self.plan.table()]
        if self.config.placement.auto:
            lines.append(f"placement auto: {describe_placement(self.records, self.plan.placement)}")
            lines += [f"    {line}" for line in self.plan.choice]
        if not self.group.is_alone:
            spec, stage = self.group.spec, self.config.zero_stage
            kept = rank_bytes(
                self.records,
                self.plan.placement,
                grads_have_homes=self.plan.grads_have_homes,
                gathers_params=divides_params(stage),
            )
            lines.append(f"rank {spec.rank} of {spec.world_size}, stage {stage}: {kept.text()}")
        if self.store.nvme is not None:
            lines += [f"    {path}  {format_bytes(size)}" for path, size in self.store.nvme.files]
            lines.append(f"    file engine of parameters and states: {self.store.nvme.description}")
        if self.durable is not None:
            lines.append(f"    {self.durable.description}")
        if self.store.in_place is not None:
            in_place = self.store.in_place.num_bytes
            lines += [
                f"    {path}  {format_bytes(size)} of frozen weights, in place"
                for path, size in in_place.items()
            ]
        for tier, size in (self.activations.reserved() if self.activations is not None else {}).items():
            lines.append(
                f"{tier.value:<8}{format_bytes(size):>12}  activation checkpoints so far, beside the plan"
            )
        if beside := attached_bytes(self.model):
            lines.append(f"device  {format_bytes(beside):>12}  scales of coded weights, beside the plan")
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
            "num_parameters": sum(num_weights(slot.param) for r in self.records for slot in r.slots),
            "file_engine": self.store.nvme.description if self.store.nvme is not None else None,
            "tiers": tiers,
        }

    def read_by_first(self, work: Callable[[], None]) -> None:
        """Do work that reads all states and is done once. All ranks call this; the first one does the work."""
        self.weights.homes.read_by_first(work)

    def announce(self, act: str) -> None:
        """Raise StateError on all ranks unless all begin that act now: what they agree on has sizes of its own."""
        with self.clock.waiting("state access"), self.store.failures.handed_over():
            self.parts.announcements.announce(act)

    def odd_ranks(self, what: str, text: str, *, of_part: str) -> list[int]:
        """The ranks whose `text` differs from that of the first one; `what` names the compared things in messages.

        `of_part` is compared among the ranks that train the same part of the model alone.
        """
        found = self.group.departures(of_all={what: text}, of_part={f"{what} of a part": of_part})
        return sorted({rank for odd in found.values() for rank in odd})

    @property
    def part(self) -> int | None:
        """The number of the part of the model that this rank trains; None: all of it."""
        return self.group.part if self.group.num_parts > 1 else None

    def synchronize(self) -> None:
        """Block until all updates are home; raises what failed."""
        self.changes.wait_updates()
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
        if self.resources.is_open:
            self._close()
        self.resources.forget_owner()
        self.failures.raise_unseen()
        if not self.failures.is_foreign:
            for call in self.on_close:
                call()

    def _close(self) -> None:
        lost = self._lost_to_another()
        try:
            if self.failures.first is None and lost is None:
                self.changes.wait_updates()
                for value in list(self.weights.in_state_dicts):
                    with suppress(StateError):  # between backward and its step, say, it has no value any more
                        value.keep()
                self.clock.settle(wait=True)
            elif lost is not None and _script_error() is None and not self.changes.is_updated():
                self.failures.record(lost)
        except BaseException as error:
            if interrupts.is_interrupt(error):
                self.failures.spoil(StateError("close() was interrupted: updates may be lost"))
            raise
        finally:
            script_error = _script_error()
            tells_first = script_error is not None and not self.group.is_alone
            try:
                # The other ranks may wait for this one, and the end of its groups for them.
                if tells_first:
                    self._record_end(script_error)
                self._release(has_failed=script_error is not None or lost is not None)
            finally:
                if not tells_first:
                    self._record_end(script_error)

    def _lost_to_another(self) -> RankError | None:
        """The error of a rank that has failed, where work of the device may wait for that rank for ever."""
        text = self.group.lost_text() if self.accelerator.has_streams else None
        return None if text is None else RankError(f"the last updates are given up: {text}")

    def _record_end(self, script_error: BaseException | None) -> None:
        """Record that the engine is closed, and why for the other ranks."""
        closed = StateError(
            "the engine of this model is closed: close() takes the weights with it, restore_model() keeps them"
        )
        cause = script_error or StateError("it has closed its engine")
        self.failures.end(closed, cause=cause, has_failed=script_error is not None)

    def restore_model(self) -> None:
        """Make the model an ordinary one again, with its weights as they are now, and close the engine.

        Each parameter gets the dtype and the device that it had before; one that was fp32 gets its fp32 master. All
        ranks call this together, and each gets the whole model. Raises the first failure that no call has raised yet,
        and StateError when the engine is closed, a parameter gathered, or the model in its forward.
        """
        if self.state in (EngineState.CLOSED, EngineState.RESTORED):
            raise StateError(f"the engine of this model is {self.state.value}: there is nothing to restore")
        if self.blocks.open:
            raise StateError("restore_model() inside of GatheredParameters: end the block before")
        if self.executor.is_in_forward:
            raise StateError("restore_model() inside of the model's forward, which goes on with its weights")
        self.changes.wait_updates()
        if self.failures.unseen() is not None:
            self.failures.check()
        self._original.restore(self.weights)
        self._is_restored = True
        if self.hooks is not None:
            self.hooks.remove()
        for call in self.on_restore:
            call()
        self.close()

    def cast_gradients(self) -> None:
        """Give gradients from before the start the model's new dtype and device; `undo()` brings the former back."""
        self._original.cast_gradients(self.accelerator.device)

    def forget_gradients(self) -> None:
        """Free the former gradients: the start will not be undone any more."""
        self._original.forget_gradients()

    def undo(self) -> None:
        """Undo a start that failed, so that the model is as it was."""
        _live.discard(self)
        try:
            if self.hooks is not None:
                self.hooks.remove()
            self._original.restore()
            self._is_restored = True
        finally:
            self.resources.close(has_failed=True)
            if not _live:
                interrupts.uninstall()

    def _release(self, *, has_failed: bool) -> None:
        try:
            if self.hooks is not None:
                self.hooks.remove_gradient_hooks()
                self.parts.window.drop_tensors()
        finally:
            self.resources.close(has_failed=has_failed)
            _live.discard(self)
            _closed.add(self)
            if not _live:
                interrupts.uninstall()


def _make_clock(monitor: StepMonitor, accelerator: Accelerator) -> StepClock:
    """Make the clock of the steps, which counts the time of the device's streams where there are any."""
    clock = StepClock(monitor.timeline, on_end=monitor.on_end, on_step=monitor.on_step)
    marks = accelerator.marks()
    if marks is not None:
        clock.follow(marks)
    return clock


def _join_ranks(accelerator: Accelerator, config: OffloadConfig, resources: Resources) -> Group:
    """Join the other ranks, which `resources` leaves in the end; this process may be alone."""
    if not config.is_of_several:
        return Group()
    # Registered again, to run before the end of torch's process group, which was registered earlier: closing takes
    # collectives.
    atexit.register(_close_at_exit)
    ranks = resources.make(lambda: join_ranks(accelerator.device, config, resources.failures))
    ranks.record(accelerator.span)
    resources.wait_with_others(ranks.abort)
    return ranks


_numbers = itertools.count()  # numbers of runtimes, which ranks make in one order
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
    # In the order of their making: a set has another one on each rank, and the end of a group may wait for others.
    # A close() that was interrupted may have left a failure untold.
    untold = [runtime for runtime in _closed if runtime.failures.unseen() is not None]
    for runtime in sorted([*_live, *untold], key=lambda each: each.number):
        try:
            runtime.weights.in_state_dicts.clear()  # nobody reads them any more
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
    # Once, and not for each engine that was closed before.
    named = [(name, id(param)) for name, param in model.named_parameters()]
    for runtime in (*_live, *_closed):
        if runtime.state is EngineState.RESTORED:
            continue
        for name, number in named:
            if number not in runtime.slots:
                continue
            if runtime.state is EngineState.CLOSED:
                raise StateError(
                    f"{name}: this model's engine was closed, and the weights are gone with it. Build the model again, "
                    "or call restore_model() instead of close() to keep it"
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


def _may_not_train(
    records: Sequence[Record], group_of: Mapping[int, int], *, is_of_all_trainable: bool
) -> list[ParamSlot]:
    """The parameters of the optimizer that are frozen now, and have no states."""
    return [
        slot
        for record in records
        for slot in record.slots
        if not slot.trainable
        # A callable may have left out one that was not frozen.
        and (id(slot.param) in group_of or (is_of_all_trainable and not slot.param.requires_grad))
    ]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                persistent = name not in module._non_persistent_buffers_set
                module.register_buffer(name, buffer.to(device), persistent=persistent)
