"""When gradients become updates: backward, step, clipping, loss scaling (floor 5).

[Note: two ways to step]
*In backward*: a record is updated as soon as its gradient has landed; `step()` only closes the account. Exact
when nothing about the update depends on other gradients.
*At the step*: `step()` hands the window's gradients to the update thread and returns. That thread waits until
they have landed, decides (global norm, finite or not), and updates in the order in which the next forward needs
the units; each unit's next fetch waits for its own update. No thread that launches computation ever waits for
the norm.

[Note: what an interrupted step leaves]
`step()` first does all that waits or may raise, and changes nothing by it; then it hands the gradients over, which is
done whole. So a step was taken or it was not. Where gradients are applied at the step, a backward that did not end, or
a gradient that is not finite, has changed no state: `zero_grad()` drops what is left and training goes on.

Where they are applied in backward, an interrupt that comes after the first update has begun waits for the end of that
backward, and `step()` closes the step. After a second one, or a gradient that is not finite, some units may have taken
the step and others not. That is no state to train on. It can be read and saved, and the error says which units are
which; a checkpoint that is loaded replaces it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from offloadzero.config import LossScaleConfig
from offloadzero.errors import NonFiniteError, OffloadError, StateError
from offloadzero.interrupts import uninterrupted, uninterrupted_from_start
from offloadzero.memory.store import Segment
from offloadzero.memory.tickets import FINISHED, Failures, Promise, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.optim.delivery import UpdateTicket
from offloadzero.optim.records import Record
from offloadzero.optim.spec import Hyper
from offloadzero.optim.staging import needs_slot
from offloadzero.optim.step_decision import LossScale, StepDecision, decide_step
from offloadzero.optim.update import RecordUpdate, UpdatePipeline
from offloadzero.step.collect import GradientCollector
from offloadzero.step.record_gradient import Account, BegunUpdate, RecordGradient
from offloadzero.streaming.executor import Executor
from offloadzero.torch_private import NO_GRAPH_TASK, current_graph_task_id, queue_backward_callback

log = logging.getLogger("offloadzero")

Hypers = Sequence[Hyper]


@dataclass(frozen=True)
class StepPolicy:
    """What decides over a step."""

    update_in_backward: bool
    keeps_gradients: bool  # from one backward to the next
    keeps_after_step: bool  # until they are dropped
    gradient_accumulation_steps: int
    max_norm: float  # 0 = no clipping
    skip_nonfinite: bool
    loss_scale: LossScaleConfig | None


@dataclass(eq=False)
class _Window:
    """The gradients of one step and what was decided over them."""

    step: int
    gradients: list[RecordGradient]
    tickets: dict[int, UpdateTicket]
    hypers: Hypers
    account: Account
    reads: Ticket = FINISHED  # of the weights before the step
    decided: Ticket = FINISHED
    decision: StepDecision | None = None


class _Backward:
    """A backward that takes gradients. autograd calls it at the end, and drops it when the backward fails."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    @uninterrupted_from_start
    def __call__(self) -> None:
        with uninterrupted:
            self._end()


class _Running:
    """Knows of a `_Backward` whether it may still come to its end."""

    # Autograd's thread needs the interpreter's lock for it and no more. Who asks while another thread really is in its
    # backward, which no script should, waits that long for the answer.
    LETS_GO_WITHIN_S = 2.0

    def __init__(self, backward: _Backward) -> None:
        self._is_over = is_over = threading.Event()
        self.reference = weakref.ref(backward, lambda _: is_over.set())

    def ask(self, clock: StepClock) -> bool:
        """Whether it runs.

        The error of a failed backward is raised where `backward()` was called as soon as it is known. With a device
        autograd's own thread may hold the failed graph for a moment longer.
        """
        if self.reference() is None or current_graph_task_id() != NO_GRAPH_TASK:
            return self.reference() is not None
        with clock.waiting("the end of a failed backward"):
            return not self._is_over.wait(self.LETS_GO_WITHIN_S)


UNFINISHED = (
    "the last backward did not finish: what it has left is not a gradient. Call optimizer.zero_grad() and repeat the "
    "micro batches since the last step"
)
MAX_NAMES = 12  # of units, in a message


def _names(names: Sequence[str]) -> str:
    """Units in a message."""
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


NUM_SKIPS_TOLD, TELL_SKIPS_EVERY = 10, 100


def tells_skip(num_skips: int) -> bool:
    """Whether the log tells of the skip of that number, from 1: a run that only skips does not flood it."""
    return num_skips <= NUM_SKIPS_TOLD or num_skips % TELL_SKIPS_EVERY == 0


@dataclass
class StepCounts:
    """What has happened so far."""

    micro_steps: int = 0
    global_steps: int = 0
    skipped_steps: int = 0


class Stepper:
    """Turns gradients into updates; the autograd hooks and the optimizer call it."""

    def __init__(
        self,
        policy: StepPolicy,
        *,
        executor: Executor,
        pipeline: UpdatePipeline,
        failures: Failures,
        clock: StepClock,
        current_hypers: Callable[[], Hypers],
    ) -> None:
        """`current_hypers` reads the hyperparameters by group index from the optimizer's param_groups."""
        self.policy = policy
        self.counts = StepCounts()
        # Who counts micro batches (the engine does), and what must hold before a backward begins.
        self.boundary: Callable[[], bool] | None = None
        self.before_backward: Callable[[], None] | None = None
        self._executor = executor
        self._pipeline = pipeline
        self._failures = failures
        self._clock = clock
        self._current_hypers = current_hypers
        self._scale = LossScale.initial(policy.loss_scale)
        self._num_skips = 0  # in this process
        self._in_backward = False
        self._backward: _Running | None = None  # the one that runs, unless it has failed
        self._window_micro_steps = 0
        self._hypers: Hypers = ()
        self._tickets: dict[int, UpdateTicket] = {}  # updates that backward has begun
        self._account = Account(0)  # of the step whose updates backward begins
        self._stopped = self._account  # the one that has stopped the training, if `Failures.stop` says it is
        self._last = _Window(0, [], {}, (), self._account)
        self.collector: GradientCollector  # set by `attach`: each needs the other
        self._staged_records: dict[int, Record] = {}  # those whose states an update reads first

    def attach(self, collector: GradientCollector) -> None:
        """The collector whose `on_begin`, `on_complete` and `on_sending` are this object's."""
        self.collector = collector
        records = [state.record for state in collector.gradients.values()]
        self._staged_records = {record.index: record for record in records if needs_slot(record)}

    # --- backward ---

    @property
    def loss_scale(self) -> float:
        """The factor of the loss for the next backward; waits for the last decision when it is dynamic."""
        if self.policy.loss_scale is not None:
            self._wait_decided()
        return self._scale.scale

    def loss_scale_state(self) -> dict[str, float]:
        """For checkpoints; waits for the last decision."""
        self._wait_decided()
        scale = self._scale
        return {
            "scale": scale.scale,
            "good_steps": scale.good_steps,
            "hysteresis_left": scale.hysteresis_left,
        }

    def restore(self, global_steps: int, skipped_steps: int, loss_scale: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""
        self.counts.global_steps = global_steps
        self.counts.skipped_steps = skipped_steps
        self._scale = replace(
            self._scale,
            scale=loss_scale["scale"],
            good_steps=int(loss_scale["good_steps"]),
            hysteresis_left=int(loss_scale["hysteresis_left"]),
        )

    def is_boundary(self) -> bool:
        """Whether the next (or running) backward is the last before `step()`."""
        if self.boundary is not None:
            return self.boundary()
        return (self._window_micro_steps + 1) % self.policy.gradient_accumulation_steps == 0

    def on_begin(self) -> None:
        """The first gradient of a backward has arrived, or one of a backward inside of it."""
        if not self._is_running():
            self.expect_whole()
        if not self._in_backward:
            self._begin_backward()

    def _is_running(self) -> bool:
        return self._backward is not None and self._backward.ask(self._clock)

    def begin_window(self) -> None:
        """Before the first micro batch of a step, where the step drops gradients: nothing of earlier ones is left."""
        self._failures.check()
        if self._window_micro_steps or self._tickets:
            return
        if self._in_backward or self.collector.has_gradients():
            self.discard_gradients()

    def expect_whole(self) -> None:
        """Refuse to go on from a backward that did not finish, unless all that it has left was dropped since."""
        if not self._in_backward:
            return
        self._expect_one_step()
        if self._is_running() or self.collector.has_gradients():
            raise StateError(UNFINISHED)
        self.discard_gradients()

    # --- a step that was applied in part ---

    def _expect_one_step(self) -> None:
        """Refuse to go on where a backward that did not finish has updated some units."""
        if self._in_backward and self._tickets and not self._is_running() and self._failures.stop is None:
            self._wait_begun()
            if self._account.applied:
                said = f"the last backward did not finish: {self._applied_text(self._account)}"
                self._stop(self._account, StateError(said))
        self._failures.check()

    def _stop(self, account: Account, error: OffloadError) -> None:
        account.refused = error
        self._stopped = account
        self._failures.stop_training(error)

    def _wait_begun(self) -> None:
        """Block until it is known which of the updates that backward has begun are applied."""
        if not self._tickets:
            return
        with self._clock.waiting("gradient landing"), self._failures.handed_over():
            for ticket in self._tickets.values():
                ticket.wait_fulfilled()

    def _applied_text(self, account: Account) -> str:
        """What of a step that was not applied as a whole is in the weights."""
        applied = list(account.applied)
        others = [s.record.name for s in self.collector.gradients.values() if s.record.name not in applied]
        if not applied:
            return "nothing of it was applied"
        return (
            f"the weights are updated in backward, and of step {account.step} the updates of {len(applied)} units were "
            f"applied ({_names(applied)}) and those of {len(others)} were not ({_names(others)}). Training cannot go "
            "on from there. The states can be saved as they are; load_checkpoint() of an earlier checkpoint makes them "
            "whole"
        )

    @property
    def partial_step(self) -> str | None:
        """What of a step is in the states that is not counted as one; None: nothing, they are whole."""
        if self._tickets and not self._is_running():
            self._wait_begun()
        if self._failures.stop is not None and self._stopped.applied:
            return self._applied_text(self._stopped)
        if not self._tickets or not self._account.applied:
            return None
        if self._in_backward:
            return self._applied_text(self._account)
        return f"step {self._account.step} was applied in backward, and step() was not called"

    def give_up_step(self) -> None:
        """Drop the step that was begun, whatever of it was applied: a checkpoint replaces the states."""
        with uninterrupted:
            self._tickets = {}
            self._executor.close_updates()
            self._in_backward = False
            self._window_micro_steps = 0
            self.collector.abandon_window()

    def resolve(self, *, is_whole: bool) -> None:
        """Go on after `give_up_step`; unless `is_whole`, only from states that were all those of one step."""
        if is_whole or not self._stopped.applied:
            self._failures.resolve()

    def _begin_backward(self) -> None:
        self._failures.check()
        self.collector.expect_frozen()
        if self.before_backward is not None:
            self.before_backward()
        if self._tickets:
            raise StateError(
                "backward() after the last micro batch of a step and before step(): the weights are updated in "
                "backward. Set gradient_accumulation_steps to the number of backward passes per step, or "
                '"offloadzero": {"update": {"in_backward": false}}'
            )
        last_micro_batch = self.is_boundary()
        if not last_micro_batch and not self.policy.keeps_gradients:
            raise StateError(
                "backward() of a micro batch that is not the last of its step, but gradients are not kept: set "
                "gradient_accumulation_steps to the number of backward passes per step, or "
                '"offloadzero": {"update": {"in_backward": false}}'
            )
        self._in_backward = True
        self.collector.last_micro_batch = last_micro_batch
        self._hypers = self._current_hypers() if self._updates_now else ()
        self._account = Account(self.counts.global_steps + 1)
        if last_micro_batch and not self._updates_now:
            order = self._executor.step_order(list(self._staged_records))
            # The forward has waited for the last update of each unit it used, not for those of the others: what
            # is still being written back must not be read.
            home = itertools.takewhile(lambda index: self._executor.update_ticket(index).done(), order)
            self._pipeline.read_ahead([self._staged_records[index] for index in home])
        backward = _Backward(self._end_backward)
        self._backward = _Running(backward)
        queue_backward_callback(backward)

    @property
    def _updates_now(self) -> bool:
        return self.policy.update_in_backward and self.collector.last_micro_batch

    def _end_backward(self) -> None:
        self._backward = None  # whatever is raised now, it runs no more
        try:
            self.collector.flush()
        finally:
            uninterrupted.until = None
        self._clock.timeline.lap("backward: the rest", leaves_model=True)
        self._in_backward = False
        self.collector.end_backward()
        self._window_micro_steps += 1
        self.counts.micro_steps += 1

    def on_complete(self, state: RecordGradient) -> None:
        """All gradients of a record have arrived (called in backward)."""
        index = state.record.index
        if self._clock.timeline.is_on:
            self._clock.timeline.lap(f"backward {state.record.name}", is_part=True)
        self._executor.gradients_complete(index)

    def on_sending(self, state: RecordGradient) -> None:
        """They begin to land (called in backward)."""
        if self._updates_now:
            index, ticket = state.record.index, UpdateTicket()
            self._executor.begin_update(index, ticket, in_backward=True)
            state.update = BegunUpdate(ticket, self._hypers, self._account)
            self._tickets[index] = ticket
            # Half of the updates are no state to stop at.
            uninterrupted.until = None if self._backward is None else self._backward.reference

    def on_landed(self, state: RecordGradient) -> None:
        """A record's gradient of the whole window is home (called on the landing thread)."""
        begun = state.update
        if begun is None:
            return
        account = begun.account
        if account.refused is None:
            account.refused = self._failures.stop  # of the step before
        if account.refused is None and not state.is_finite:
            self._refuse(account, [state])
        if account.refused is not None:
            state.release()
            begun.ticket.fulfil()
            return
        account.applied.append(state.record.name)
        self._pipeline.submit(self._update(state, begun.ticket, begun.hypers, grad_scale=1.0))

    def _refuse(self, account: Account, gradients: Sequence[RecordGradient]) -> None:
        """The step goes no further: of those gradients some are not finite."""
        names = [state.record.name for state in gradients if not state.is_finite]
        error = NonFiniteError(
            f"step {account.step}: the gradient of {_names(names)} holds NaN or Inf; {self._applied_text(account)}. "
            + ("" if account.applied else "zero_grad() lets training go on without this step. ")
            + '("offloadzero": {"update": {"on_nonfinite": "skip"}} skips such steps.)'
        )
        self._stop(account, error)

    # --- step ---

    def step(self) -> None:
        """Apply the window's gradients: [Note: two ways to step]."""
        self._failures.check()
        self.expect_whole()
        self.collector.expect_frozen()
        if self._tickets and list(self._current_hypers()) != list(self._hypers):
            raise StateError(
                "the optimizer's param_groups have changed since backward(), which has updated the weights with the "
                'old ones: change them after step(), or set "offloadzero": {"update": {"in_backward": false}}'
            )
        if self.policy.update_in_backward:
            self.collector.expect_untouched()
        else:
            self.collector.settle()
        hypers = self._hypers
        if not self._tickets:
            hypers = self._current_hypers()
            for state in self.collector.gradients.values():
                if state.present:
                    self._executor.wait_updatable(state.record.index)
        # All that may raise has been done. From here on nothing waits.
        with self._failures.whole("step()"):
            self._take_step(hypers)
        self._clock.finish_step(self.counts.global_steps)

    def _take_step(self, hypers: Hypers) -> None:
        account = self._account if self._tickets else Account(self.counts.global_steps + 1)
        window = _Window(account.step, self.collector.take_window(), self._tickets, hypers, account)
        self._tickets = {}
        self._executor.close_updates()
        self._last = window
        if window.gradients and not window.tickets:
            self._step_at_once(window)
        self._window_micro_steps = 0
        self.counts.global_steps += 1
        self._executor.finish_step()

    def _step_at_once(self, window: _Window) -> None:
        window.reads = self._executor.reads()  # an evaluation since backward, say
        window.decided = decided = Promise()

        def decide() -> None:
            try:
                self._decide(window, order)
                decided.fulfil()
            except BaseException as error:
                self._failures.record(error)  # before anyone who waits can see it
                for ticket in window.tickets.values():
                    ticket.fail(error)
                decided.fail(error)
                raise

        for state in window.gradients:
            ticket = window.tickets[state.record.index] = UpdateTicket()
            self._executor.begin_update(state.record.index, ticket)
        order = self._executor.step_order(list(window.tickets))
        self._pipeline.submit(decide)

    def _decide(self, window: _Window, order: Sequence[int]) -> None:
        """On the update thread: all gradients are known now."""
        for state in window.gradients:
            state.landed.wait()
        window.reads.wait()
        scale = self._scale
        decision = decide_step(
            [sq_norm for state in window.gradients for sq_norm in state.sq_norms_by_slot()],
            loss_scale=scale.scale,
            max_norm=self.policy.max_norm,
        )
        window.decision = decision
        self._scale = scale.after_step(finite=decision.apply)
        if decision.apply:
            states = {state.record.index: state for state in window.gradients}
            self._pipeline.submit_first(
                [
                    self._update(states[i], window.tickets[i], window.hypers, grad_scale=decision.grad_scale)
                    for i in order
                ]
            )
            return
        if not self.policy.skip_nonfinite:
            self._refuse(window.account, window.gradients)  # before anyone who waits can see it
        self.counts.skipped_steps += 1
        self._tell_skip(window, scale.scale)
        for state in window.gradients:
            state.release()
            window.tickets[state.record.index].fulfil()

    def _tell_skip(self, window: _Window, scale: float) -> None:
        self._num_skips += 1
        if not tells_skip(self._num_skips):
            return
        names = [state.record.name for state in window.gradients if not state.is_finite]
        log.warning(
            "step %d is skipped: the gradient of %s holds NaN or Inf%s%s",
            window.step,
            _names(names),
            f". The loss scale was {scale:.10g} and is {self._scale.scale:.10g}"
            if self.policy.loss_scale
            else "",
            f". It is the skip of number {self._num_skips}: from here on each {TELL_SKIPS_EVERY}th is told"
            if self._num_skips >= NUM_SKIPS_TOLD
            else "",
        )

    def _update(
        self, state: RecordGradient, ticket: UpdateTicket, hypers: Hypers, *, grad_scale: float
    ) -> RecordUpdate:
        for slot in state.present_slots:
            slot.step += 1
        grad = state.in_memory()
        source: torch.Tensor | Segment | None = grad if grad is not None else state.home
        if source is None:
            raise AssertionError(f"{state.record.name} has no gradient")
        return RecordUpdate(
            record=state.record,
            ranges=state.ranges(),
            hypers=hypers,
            grad=source,
            grad_scale=grad_scale,
            on_consumed=state.release,
            ticket=ticket,
        )

    def discard_gradients(self, *, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero (`optimizer.zero_grad()`)."""
        with uninterrupted:
            self._failures.check_readable()
            self._expect_droppable()
            self._tickets = {}
            self._executor.close_updates()
            self._in_backward = False
            if set_to_none or self.policy.update_in_backward:
                self.collector.abandon_window()
            else:
                self.collector.zero_window()
            self._window_micro_steps = 0

    def _expect_droppable(self) -> None:
        """Refuse where the weights have some of the gradients. What has stopped the training and was seen is over."""
        self._wait_begun()  # the landing thread says what was applied, and what stops the training
        stop = self._failures.stop
        if stop is None or self._stopped.applied or not self._failures.stop_was_raised:
            self._expect_one_step()
            if self._tickets and self._account.applied:
                raise StateError(
                    "zero_grad() without step() after a backward that has updated the weights: call step(), which "
                    'closes that step, or set "offloadzero": {"update": {"in_backward": false}} to be able to drop '
                    "gradients"
                )
            return
        if self._last.account is self._stopped and self._last.tickets and self._last.decision is None:
            self.counts.skipped_steps += 1  # step() had closed it
        self._failures.resolve()

    # --- what was decided ---

    def _wait_decided(self) -> None:
        with self._clock.waiting("decision"), self._failures.handed_over():
            self._last.decided.wait()

    def _wait_last_landed(self) -> None:
        """What is decided as gradients land is decided over all of the last step."""
        with self._clock.waiting("gradient landing"), self._failures.handed_over():
            for state in self._last.gradients:
                state.landed.wait()

    def was_applied(self) -> bool:
        """Whether the last step changed the weights; waits for the decision."""
        self._wait_decided()
        if self._last.decision is not None:
            return self._last.decision.apply
        self._wait_last_landed()
        return bool(self._last.gradients) and self._last.account.refused is None

    def grad_norm(self) -> float:
        """The global gradient norm of the last step, before clipping; waits for it. NaN if not finite."""
        self._wait_decided()
        if self._last.decision is not None:
            return self._last.decision.grad_norm
        self._wait_last_landed()
        sq_norms = [sq_norm for state in self._last.gradients for sq_norm in state.sq_norms_by_slot()]
        return decide_step(sq_norms, loss_scale=1.0, max_norm=0.0).grad_norm
