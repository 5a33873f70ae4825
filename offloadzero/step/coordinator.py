"""The coordinator of a step, which knows all of its stages and turns gradients into updates.

[Note: a gradient's way]
A parameter's gradient is copied into its unit's gradient lease on the device the moment autograd has it, or, where it
is small, together with the others of its unit (collect.py). When the unit's last gradient has arrived the lease goes to
the host in one copy, and from there, on the landing thread, into its home, where micro batches add up (landing.py). If
some parameters take no part, the rest of their units' gradients lands at the end of backward; parameters without a
gradient are left out of the norm and of the update, as torch.optim leaves out parameters whose grad is None. A gradient
whose update runs on the device is accumulated in its home there and never leaves. `param.grad` stands for it all the
way: [Note: the life of param.grad].

[Note: one direction]
A stage knows the next one and none before it: it returns its result, or hands it on. The hook on a gradient asks the
collector, and tells the coordinator when a backward begins and when a record's gradient is complete. The coordinator
makes a job and hands it to the landing, which hands it to the decider, and that to the update pipeline; the job itself
gives back the memory that it holds.

[Note: two ways to step]
*In backward*: a record is updated as soon as its gradient has landed; `step()` only closes the account. Exact
when nothing about the update depends on other gradients.
*At the step*: `step()` hands the window's gradients to the update thread and returns. That thread waits until
they have landed, decides (global norm, finite or not), and updates in the order in which the next forward needs
the units; each unit's next fetch waits for its own update. No thread that launches computation ever waits for
the norm.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from offloadzero.config import LossScaleConfig
from offloadzero.core.fail_points import through
from offloadzero.core.interrupts import hold_until, uninterrupted
from offloadzero.core.torch_private import (
    NO_GRAPH_TASK,
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    queue_backward_callback,
)
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.lanes import Lane
from offloadzero.memory.tickets import Failures, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.ranks.group import Group
from offloadzero.step.accumulation import Accumulation
from offloadzero.step.collect import GradientCollector
from offloadzero.step.decider import Decider
from offloadzero.step.gradient_order import GradientOrder
from offloadzero.step.job import Account, Hypers, StepJobs, Trial, UpdateJob
from offloadzero.step.landing import Landing
from offloadzero.step.record_gradient import RecordGradient
from offloadzero.step.script_gradients import GradientWindow
from offloadzero.step.step_decision import decide_step
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.unit_changes import UnitChanges
from offloadzero.update.pipeline import UpdatePipeline
from offloadzero.update.staging import needs_slot


@dataclass(frozen=True)
class StepPolicy:
    """The settings that decide how steps are taken."""

    update_in_backward: bool
    keeps_gradients: bool  # from one backward to the next
    loss_scale: LossScaleConfig | None


class _Backward:
    """A backward that takes gradients. Autograd calls the object at its end, and drops it when the backward fails."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    @uninterrupted
    def __call__(self) -> None:
        self._end()


class _Running:
    """Knows whether a `_Backward` may still come to its end."""

    # Autograd's thread needs no more than the interpreter's lock to drop it. If another thread really is in its
    # backward, which no script should do, the question waits that long.
    LETS_GO_WITHIN_S = 2.0

    def __init__(self, backward: _Backward) -> None:
        self._is_over = is_over = threading.Event()
        self.reference = weakref.ref(backward, lambda _: is_over.set())

    def ask(self, clock: StepClock) -> bool:
        """Whether the backward runs.

        The error of a failed backward is raised where `backward()` was called as soon as it is known. With a device
        autograd's own thread may hold the failed graph for a moment longer.
        """
        if self.reference() is None or current_graph_task_id() != NO_GRAPH_TASK:
            return self.reference() is not None
        with clock.waiting("the end of a failed backward"):
            return not self._is_over.wait(self.LETS_GO_WITHIN_S)


UNFINISHED = (
    "the last backward did not finish, so its gradients are incomplete. Call optimizer.zero_grad() and repeat the "
    "micro batches since the last step"
)


class StepCoordinator:
    """Turns gradients into updates; the autograd hooks and the optimizer call it."""

    def __init__(
        self,
        policy: StepPolicy,
        *,
        group: Group,
        order: GradientOrder,
        executor: Executor,
        changes: UnitChanges,
        window: GradientWindow,
        collector: GradientCollector,
        landing: Landing,
        decider: Decider,
        pipeline: UpdatePipeline,
        failures: Failures,
        clock: StepClock,
        publishing: Lane | None,
        accumulation: Accumulation,
        current_hypers: Callable[[], Hypers],
        before_backward: Callable[[], None] | None,
    ) -> None:
        """Connect the stages.

        Args:
            order: in which a backward's gradients leave the device.
            publishing: gathers new weights of units that stay whole on each rank's device; None: there are none.
            current_hypers: reads the hyperparameters by group index from the optimizer's param_groups.
            before_backward: raises if no backward may begin now.
        """
        self.policy = policy
        self.global_steps = 0
        self._accumulation = accumulation
        self._before_backward = before_backward
        self.collector = collector
        self._group = group
        self._is_alone = group.is_alone
        self._writes_before = group.writes.value  # those of the script until the last step
        self._publishing = publishing
        self._order = order
        self._executor = executor
        self._changes = changes
        self._window = window
        self._gradients = window.gradients
        self._landing = landing
        self._decider = decider
        self._pipeline = pipeline
        self._failures = failures
        self._clock = clock
        self._current_hypers = current_hypers
        self._in_backward = False
        self._closes_window = True  # whether the running backward is that of the last micro batch
        self._backward: _Running | None = None  # the running backward, unless it has failed
        self._jobs: dict[int, UpdateJob] = {}  # the jobs that backward has begun
        self._account = Account(0)  # of the step whose updates backward begins, or tries
        self._last = StepJobs(self._account)
        records = [gradient.record for gradient in self._gradients.values()]
        # The records whose states are read first by an update.
        self._staged_records = {record.index: record for record in records if needs_slot(record)}
        self._tries = any(record.is_tried for record in records)
        self._trial_scale: float | None = None  # the factor of updates that the running backward tries

    # --- backward ---

    @property
    def loss_scale(self) -> float:
        """The factor of the loss for the next backward; waits for the last decision when the scale is dynamic."""
        if self.policy.loss_scale is not None:
            self._wait_decided()
        return self._decider.scale.scale

    def loss_scale_state(self) -> dict[str, float]:
        """The state of loss scaling for checkpoints; waits for the last decision."""
        self._wait_decided()
        scale = self._decider.scale
        return {
            "scale": scale.scale,
            "good_steps": scale.good_steps,
            "hysteresis_left": scale.hysteresis_left,
        }

    def restore(self, global_steps: int, skipped_steps: int, loss_scale: Mapping[str, float]) -> None:
        """Take over the counters and the loss scale of a checkpoint."""
        self.global_steps = global_steps
        self._decider.restore(skipped_steps, loss_scale)

    def begin_backward(self, index: int, number: int) -> None:
        """Begin a backward, or one inside of it, whose first gradient is in its parameter's `grad`.

        The parameter is given by the numbers of its record and of its slot there. Raises StateError where none may
        begin: `step()` has to come first, or an earlier one did not finish.
        """
        with DisableTorchFunctionSubclass():
            first = self._window.set_aside(index, number)
            try:
                if not self._is_running():
                    # With create_graph=True it is a new tensor that was added to.
                    if torch.is_grad_enabled() and number in self._gradients[index].arrived:
                        raise StateError(UNFINISHED)
                    self.expect_whole()
                if not self._in_backward:
                    through("step.begin_backward", self._begin_backward)()
                first.show_assigned()
                is_nested = self.collector.is_in_backward
                if not (is_nested or self.policy.update_in_backward or torch.is_grad_enabled()):
                    self._window.expect_values()
            except BaseException:
                first.drop()
                raise
            first.show()
            self.collector.begin_backward()

    def _is_running(self) -> bool:
        return self._backward is not None and self._backward.ask(self._clock)

    def begin_window(self) -> None:
        """Drop earlier gradients before the first micro batch of a step, where the step drops gradients."""
        self._failures.check()
        if self._accumulation.num_backwards or self._jobs:
            return
        if self._in_backward or self._window.has_gradients():
            self.discard_gradients()

    def expect_whole(self) -> None:
        """Refuse to go on from a backward that did not finish, unless all of its gradients were dropped since."""
        if not self._in_backward:
            return
        self._expect_one_step()
        if self._is_running() or self._window.has_gradients():
            raise StateError(UNFINISHED)
        self.discard_gradients()

    # --- a step that was applied in part ---

    def _expect_one_step(self) -> None:
        """Refuse to go on where a backward that did not finish has updated some units."""
        if self._in_backward and self._jobs and not self._is_running() and self._failures.stop is None:
            self._wait_begun()
            if self._account.applied:
                said = f"the last backward did not finish: {self._decider.applied_text(self._account)}"
                self._decider.stop(self._account, StateError(said))
        self._failures.check()

    def _wait_begun(self) -> None:
        """Block until it is known which of the updates that backward has begun will be applied."""
        if not self._jobs:
            return
        with self._clock.waiting("gradient landing"), self._failures.handed_over():
            for job in self._jobs.values():
                job.ticket.wait_fulfilled()

    @property
    def partial_step(self) -> str | None:
        """A text about updates in the states that belong to no counted step; None: there are none."""
        if self._jobs and not self._is_running():
            self._wait_begun()
        if self._failures.stop is not None and self._decider.stopped.applied:
            return self._decider.applied_text(self._decider.stopped)
        if not self._jobs or not self._account.applied:
            return None
        if self._in_backward:
            return self._decider.applied_text(self._account)
        return f"step {self._account.step} was applied in backward, and step() was not called"

    @uninterrupted
    def give_up_step(self) -> None:
        """Drop the step that was begun, even if a part of it was applied: a checkpoint replaces the states."""
        self._expect_backward_ended()
        self._jobs = {}
        self._changes.close_updates()
        self._in_backward = False
        self._accumulation.drop_backwards()
        self.collector.abandon()
        self._gradients.end_trials()
        self._window.drop()

    def resolve(self, *, is_whole: bool) -> None:
        """Go on after `give_up_step`, also after a partial step if `is_whole`: the new states are those of one step."""
        if is_whole or not self._decider.stopped.applied:
            self._failures.resolve()

    def _begin_backward(self) -> None:
        self._failures.check()
        self._window.expect_frozen()
        if self._before_backward is not None:
            self._before_backward()
        if self._jobs:
            raise StateError(
                "backward() a second time before step(), but the first backward has already updated the weights. Set "
                "gradient_accumulation_steps to the number of backward passes per step, or "
                '"offloadzero": {"update": {"in_backward": false}}'
            )
        last_micro_batch = self._accumulation.is_boundary()
        if not last_micro_batch and not self.policy.keeps_gradients:
            raise StateError(
                "this micro batch is not the last of its step, but backward updates the weights and keeps no "
                "gradients: set gradient_accumulation_steps to the number of backward passes per step, or "
                '"offloadzero": {"update": {"in_backward": false}}'
            )
        self._in_backward = True
        self._closes_window = last_micro_batch
        hypers = self._current_hypers() if self._updates_now else self._begin_trials()
        self._account = Account(self.global_steps + 1, hypers)
        if last_micro_batch and not self._updates_now and self._trial_scale is None:
            order = self._executor.step_order(list(self._staged_records))
            # The forward has waited for the units it used. States that are still being written must not be read.
            home = itertools.takewhile(lambda index: self._changes.update_ticket(index).done(), order)
            self._pipeline.read_ahead([self._staged_records[index] for index in home])
        backward = _Backward(self._end_backward)
        self._backward = _Running(backward)
        queue_backward_callback(backward)
        self._order.begin_backward()

    @property
    def _updates_now(self) -> bool:
        return self.policy.update_in_backward and self._closes_window

    def _end_backward(self) -> None:
        self._backward = None  # after an error below, too, it no longer runs
        try:
            self._send_rest()
        finally:
            hold_until(None)
        self._clock.timeline.lap("backward: the rest", leaves_model=True)
        self._in_backward = False
        self.collector.end_backward()
        self._accumulation.end_backward()

    def complete(self, gradient: RecordGradient) -> None:
        """Send home the gradients that are next, now that this backward brings no more of a record's."""
        self._gradients_complete(gradient)
        for index in self._order.complete(gradient.record):
            self._send(self._gradients[index])

    def _send(self, gradient: RecordGradient) -> None:
        """Send a record's gradient home.

        The waits come first. An error there leaves everything as it was; after them there are no errors.
        """
        place = self._landing.reserve(gradient)
        before = self._changes.update_ticket(gradient.record.index)  # the job's ticket replaces it
        try:
            job = self._begin_job(gradient)
        except BaseException:
            if place is not None:
                place.give_back()
            raise
        brought = self.collector.hand_over(gradient, closes=self._closes_window)
        self._landing.send(brought, place, before=before, job=job)

    def _send_rest(self) -> None:
        """Send home, at the end of backward, the gradients of records some of whose parameters took no part.

        The last micro batch closes records that only earlier ones have reached, too.
        """
        for index, places in self._order.end_backward(closes_window=self._closes_window).items():
            gradient = self._gradients[index]
            self.collector.fill(gradient, sorted(places.difference(gradient.arrived)))
            self._gradients_complete(gradient)
            self._send(gradient)
        for gradient in self._gradients.values():
            if gradient.arrived:
                raise StateError(
                    f"{gradient.record.name} gets a gradient after all of its gradients in one backward (a reentrant "
                    "checkpoint?), which is not supported over several ranks"
                )
            if self._closes_window and gradient.present and not gradient.closed:
                # It has no gradient of this micro batch, whose operations may have read the weights all the same.
                self._gradients_complete(gradient)
                self._landing.close(gradient, job=self._begin_job(gradient))
        if not self._is_alone and self._executor.residency.current >= 0:  # all ranks have come to the end
            self._executor.end_use(self._executor.residency.current)

    def _gradients_complete(self, gradient: RecordGradient) -> None:
        record = gradient.record
        if self._clock.timeline.is_on:
            self._clock.timeline.lap(f"backward {record.name}", is_part=True)
        if self._is_alone:  # else until the next use, or the end of the backward: [Note: what a rank fetches]
            self._executor.end_use(record.index)

    def _begin_job(self, gradient: RecordGradient) -> UpdateJob | Trial | None:
        """Begin the job that follows the landing, if the update runs in backward or is tried there."""
        if not self._updates_now:
            return self._trial(gradient)
        job = self._make_job(gradient, self._account)
        self._changes.begin_update(gradient.record.index, job.ticket, in_backward=True)
        self._jobs[gradient.record.index] = job
        # Training cannot stop with half of the updates done.
        hold_until(None if self._backward is None else self._backward.reference)
        return job

    def _begin_trials(self) -> Hypers:
        """Decide whether this backward tries updates, and with what: [Note: versions] in update/pipeline.py."""
        self._trial_scale = None
        if self._tries and self._closes_window:
            with contextlib.suppress(ConfigError):  # step() raises it, unless the script sets what is missing
                hypers, self._trial_scale = self._current_hypers(), self._decider.trial_scale()
                return hypers
        return ()

    def _trial(self, gradient: RecordGradient) -> Trial | None:
        """Return the update to try when the gradient has landed: [Note: versions] in update/pipeline.py."""
        if self._trial_scale is None or not gradient.record.is_tried:
            return None
        before, count = self._changes.update_ticket(gradient.record.index), self._decider.trial_count
        return Trial(gradient, self._account, before=before, grad_scale=self._trial_scale, count=count)

    def _make_job(self, gradient: RecordGradient, account: Account) -> UpdateJob:
        return UpdateJob(gradient, account, before=self._changes.update_ticket(gradient.record.index))

    @property
    def skipped_steps(self) -> int:
        """The steps that were not applied."""
        return self._decider.num_skipped

    # --- step ---

    def step(self) -> None:
        """Apply the window's gradients: [Note: two ways to step].

        Raises what has failed before, and StateError where a backward did not finish, a parameter without states is to
        be trained, or options or gradients have changed since a backward that has updated the weights.
        """
        self.collector.expect_all_reduced()
        self._failures.check()
        self.expect_whole()
        self._window.expect_frozen()
        if self._jobs and list(self._current_hypers()) != list(self._account.hypers):
            raise StateError(
                "the optimizer's param_groups have changed since backward(), but backward has already updated the "
                "weights with the old ones: change them after step(), or set "
                '"offloadzero": {"update": {"in_backward": false}}'
            )
        if self.policy.update_in_backward:
            self._window.expect_untouched()
        else:
            self._window.settle()
        account = self._account
        if not self._jobs:
            account = Account(self.global_steps + 1, self._current_hypers())
            for gradient in self._gradients.present():
                self._changes.wait_updatable(gradient.record.index)
        # All calls that may raise are done. From here on nothing waits.
        with self._failures.whole("step()"):
            self._take_step(account)
        self._clock.finish_step(self.global_steps)

    def _take_step(self, account: Account) -> None:
        for gradient in self._gradients.present():
            if gradient.is_unmeasured and not gradient.closed:  # the step comes before the last micro batch
                self._landing.measure(gradient, gradient.landed)
        self._gradients.end_trials(of_absent=True)
        gradients, jobs = self._window.close(), self._jobs
        self._jobs = {}
        self._changes.close_updates()
        if jobs:
            account.close()
            self._last = StepJobs(account, [jobs[index] for index in sorted(jobs)], before=self._last.decided)
        else:
            self._last = self._step_at_once(
                account, [self._make_job(gradient, account) for gradient in gradients]
            )
        self._accumulation.drop_backwards()
        self.global_steps += 1
        self._executor.finish_step()

    def _step_at_once(self, account: Account, jobs: Sequence[UpdateJob]) -> StepJobs:
        reads = self._changes.launched_reads()  # of an evaluation since backward, say
        for job in jobs:
            ticket = job.ticket if self._publishing is None else self._published(job, self._publishing)
            self._changes.begin_update(job.record.index, ticket)
        order = self._executor.step_order([job.record.index for job in jobs])
        # Where another part of the model has gradients, the ranks of this one decide with it; and with other ranks of
        # this part where these may have gradients, as the script here has dropped all.
        writes, group = self._group.writes.value, self._group
        is_decided = not jobs and group.across is None and writes == self._writes_before
        self._writes_before = writes
        step = StepJobs(
            account,
            jobs,
            before=self._last.decided,
            reads=reads,
            order=None if is_decided else order,
            writes=writes,
        )
        if not is_decided:
            group.steps.note(account.step)
            self._pipeline.submit(functools.partial(self._decider.decide, step))
        if not self._is_alone:
            self._executor.step_decided_by(step.decided)
        return step

    def _published(self, job: UpdateJob, lane: Lane) -> Ticket:
        """Return a ticket that is done when the device has the weights that all ranks have updated."""
        whole, group = job.record.whole_param, self._group
        if whole is None:
            return job.ticket
        params, label = whole.memory[: job.record.num_trainable], f"{job.record.name}.param"
        return lane.submit(
            lambda: group.updates.all_gather(params, label), after=[job.ticket], label=job.record.name
        )

    def _expect_backward_ended(self) -> None:
        """Over several ranks, raise after an error or Ctrl-C in backward: the others wait for what will not come."""
        if self._is_alone:
            return
        self._failures.check_readable()
        if self._in_backward:
            lost = StateError(
                "a backward of this rank did not come to its end, and the other ranks wait for what it has not sent: "
                "over several ranks nothing goes on from there. Start again from a checkpoint"
            )
            self._failures.spoil(lost)
            raise lost

    @uninterrupted
    def discard_gradients(self, *, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero (`optimizer.zero_grad()`).

        Raises StateError where a backward has updated weights, all or some, and what has failed and was not raised yet.
        """
        self._expect_backward_ended()
        if not self._is_alone:
            self._wait_decided()  # [Note: where a refused step is told]
        self._group.note_write("zero_grad", set_to_none)
        self._failures.check_readable()
        self._expect_droppable()
        self._jobs = {}
        self._changes.close_updates()
        self._in_backward = False
        self.collector.abandon()
        self._gradients.end_trials()
        if set_to_none or self.policy.update_in_backward:
            self._window.drop()
        else:
            self._window.zero()
        self._accumulation.drop_backwards()

    def _expect_droppable(self) -> None:
        """Refuse where the weights have some of the gradients. Resolve an error that was raised."""
        self._wait_begun()  # the landing thread says which were applied, and what stops the training
        stop = self._failures.stop
        if stop is None or self._decider.stopped.applied or not self._failures.stop_was_raised:
            self._expect_one_step()
            if self._jobs and self._account.applied:
                raise StateError(
                    "zero_grad() before step(), but backward has already updated the weights: call step() first, or "
                    'set "offloadzero": {"update": {"in_backward": false}} to be able to drop gradients'
                )
            return
        if self._decider.stopped.is_closed:
            self._decider.count_skip()
        self._failures.resolve()

    # --- results of decisions ---

    def _wait_decided(self) -> None:
        with self._clock.waiting("decision"), self._failures.handed_over():
            self._last.decided.wait()

    def _wait_last_landed(self) -> None:
        """Wait until all of the last step has been decided, where that is done as gradients land."""
        with self._clock.waiting("gradient landing"), self._failures.handed_over():
            for gradient in self._last.gradients:
                gradient.landed.wait()

    def was_applied(self) -> bool:
        """Whether the last step has changed the weights; waits for the decision."""
        self._wait_decided()
        if self._last.decision is not None:
            return self._last.decision.apply
        self._wait_last_landed()
        return bool(self._last.jobs) and self._last.account.refused is None

    def grad_norm(self) -> float:
        """The global gradient norm of the last step, before clipping; waits for it. NaN if not finite."""
        self._wait_decided()
        if self._last.decision is not None:
            return self._last.decision.grad_norm
        self._wait_last_landed()
        return decide_step(self._last.sq_norms(), loss_scale=1.0, max_norm=0.0).grad_norm
