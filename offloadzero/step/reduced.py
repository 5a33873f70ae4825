"""Gradients that are means over several ranks: collected, reduced, landed and decided over together.

[Note: what the ranks agree on]
At the end of each backward the ranks tell each other which parameters have got a gradient, and whether the window
closes: a parameter that some rank has used has a gradient on all of them, zeros where it was not used, as with DDP. At
the step they add up the squares of their shards, so that norm, clipping, loss scale and the skip of a step that is not
finite are one decision. The number of the step, a digest of its hyperparameters and one of the values that scripts have
written come along: ranks that differ in one of them stop. In a mesh each group then tells its sum to the groups of the
other parts of the model: [Note: the axes of a mesh].
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offloadzero.errors import StateError, abbreviated
from offloadzero.memory.arena import BufferPool, PooledBuffer
from offloadzero.memory.lanes import Lane
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import AllOf, Ticket
from offloadzero.sharding.comparing import digest
from offloadzero.sharding.group import Collectives
from offloadzero.sharding.mesh import is_divided_by_tensor_parallelism
from offloadzero.sharding.ranks import Ranks
from offloadzero.step.account import Account
from offloadzero.step.coded_reduce import CodedReduce
from offloadzero.step.collect import GradientCollector
from offloadzero.step.coordinator import StepCoordinator
from offloadzero.step.decider import Decider
from offloadzero.step.job import StepJobs, UpdateJob
from offloadzero.step.landing import Landing, Place
from offloadzero.step.piecewise_reduce import PiecewiseReduce
from offloadzero.step.record_gradient import Borrowed, Brought, RecordGradient, WindowGradients
from offloadzero.step.reduce_order import ReduceOrder
from offloadzero.torch_private import DisableTorchFunctionSubclass
from offloadzero.update.records import Record

log = logging.getLogger("offloadzero.gradients")

_NO_GRADIENTS = -1.0  # told in the place of a sum of squares


class ReducingCollector(GradientCollector):
    """Takes gradients into leases, wherever their home is: the gradients of each backward are reduced by themselves."""

    # A lease may wait for a rank that comes to its reduction only at the end of backward, while that rank waits for
    # this one's next fetch. So the wait has an end, after which a gradient takes more memory and has the same numbers.
    LEASE_WITHIN_S = 2.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._left_with_script: dict[str, None] = {}  # parameters, in the order of backward

    def _wait_for_lease(self, leases: BufferPool, record: Record) -> PooledBuffer:
        with self._clock.waiting("gradient lease"), self._store.failures.handed_over():
            lease = leases.take_within(self.LEASE_WITHIN_S)
        return self._temporary_lease(leases, record) if lease is None else lease

    def _tell_temporary(self, record: Record, num_leases: int, num_bytes: int) -> None:
        log.info(
            "%s: its gradient comes while all %d gradient leases wait for other ranks: it takes a temporary buffer of "
            "%d bytes on the device, beside the plan. The numbers are the same. That is so where some rank completes a "
            "unit's gradient only at the end of backward, an expert without a token say",
            record.name,
            num_leases,
            num_bytes,
        )

    def _keep_with_script(self, state: RecordGradient, number: int) -> RecordGradient | None:
        self._left_with_script.setdefault(state.record.trainable_slots[number].name)
        return None

    def abandon(self) -> None:
        """Forget what was collected, and what was left with the script."""
        super().abandon()
        self._left_with_script.clear()

    def expect_all_reduced(self) -> None:
        """Raise StateError where a backward has added to a tensor of the script's own, which no other rank has."""
        for name in self._left_with_script:
            raise StateError(
                f"{name}.grad was assigned before a backward, which has added this rank's gradient to it, and not the "
                "mean over the ranks: assign it after the backward, or drop all gradients with zero_grad()"
            )

    def fill(self, gradient: RecordGradient, places: Sequence[int]) -> None:
        """Make zeros of the slots of which another rank has a gradient, and this one none."""
        if gradient.flat is None:
            self._begin(gradient)
        for place in places:
            handle = self._handles[gradient.record.index][place]
            gradient.targets[place].zero_()
            gradient.arrive(place)
            with DisableTorchFunctionSubclass():
                if handle.param.grad is None:
                    handle.param.grad = handle.tensor


class ReducedLanding(Landing):
    """Reduces gradients on their way home: each rank keeps its shard, or all of them where nothing is divided."""

    def __init__(
        self,
        store: TieredStore,
        *,
        ranks: Ranks,
        coded: CodedReduce,
        pieces: PiecewiseReduce | None,
        wire_dtype: torch.dtype | None,
        **more: Any,
    ) -> None:
        """Make the landing.

        Args:
            pieces: for gradients that are not `coded` and whose dtype is not `wire_dtype`; None: there are none.
            wire_dtype: that of what is not `coded`; None: the gradients' own.
        """
        super().__init__(store, **more)
        self._coded = coded
        self._pieces = pieces
        self._ranks = ranks
        self._wire_dtype = wire_dtype

    def send(self, brought: Brought, place: Place | None, *, before: Ticket, job: UpdateJob | None) -> None:
        """Reduce a record's gradient of this backward and take it home. Waits for nothing.

        `place` must be None: it is found after the reduction. `before`: the home may be written after it.
        """
        gradient, lease = brought.gradient, brought.lease
        if lease is None or place is not None:
            raise AssertionError(f"{gradient.record.name} has no gradient lease")
        if not gradient.landed.done():
            before = AllOf([before, gradient.landed])
        done = gradient.begin_landing()
        arrived: list[Place] = []
        self._ranks.reductions.note(gradient.record.index)
        accelerator, leases = self._store.accelerator, brought.leases

        def reduce() -> None:
            self._ranks.gradients.begin_submitted()
            try:
                part = self._reduced(gradient.record, brought)
                before.wait()  # after the collective, in which other ranks wait for this one
                arrived.append(self._bring(brought, part))
            finally:
                if not lease.temporary:
                    leases.give_back(lease, last_use=accelerator.launched())

        def merge() -> None:
            if not arrived[0].in_place:
                self._merge(gradient, arrived[0], brought.places, brought.earlier, brought.factors)

        copied = self._d2h.submit(reduce, fence=accelerator.fence(), label=gradient.record.name)
        self._land(gradient, done, [copied], merge, job, held=lease)

    def _reduced(self, record: Record, brought: Brought) -> Tensor:
        """Return this rank's part of the mean over the ranks: divided first, as DistributedDataParallel does."""
        flat, codes = brought.flat, self._coded.wire_of(record)
        if codes is not None:
            return self._coded.reduce(record, codes, flat, brought.places)
        if self._pieces is not None and self._wire_dtype != record.dtype:
            return self._pieces.reduce(record, flat)
        flat.div_(self._ranks.spec.world_size)
        label = f"{record.name}.grad"
        if record.shard.world_size > 1:
            return self._ranks.gradients.reduce_scatter(flat, label)
        self._ranks.gradients.all_reduce(flat, label)
        return flat

    def _bring(self, brought: Brought, part: Tensor) -> Place:
        """Copy or add `part` to its place; on the lane from the device, whose stream has reduced it."""
        gradient, home = brought.gradient, brought.gradient.home
        record = gradient.record
        if home is None:
            raise AssertionError(f"{record.name}: its gradient has no home")
        if home.is_on_device:
            self._add(gradient, home.memory, part, brought.places, brought.earlier, brought.factors)
            return Place(home.memory, None, in_place=True)
        same_dtype = record.grad_dtype == record.dtype
        if not brought.earlier and same_dtype and home.is_in_host_memory:
            place = Place(home.memory, None, in_place=True)
        else:
            buffer = Borrowed(self._staging.take(), self._staging)
            place = Place(buffer.view(record.dtype, record.kept_trainable), buffer, in_place=False)
        self._store.accelerator.copy(place.flat, part)
        return place


class AgreeingDecider(Decider):
    """Decides over the gradients of all ranks: [Note: what the ranks agree on]."""

    def __init__(self, *args: Any, ranks: Ranks, **more: Any) -> None:
        super().__init__(*args, **more)
        self._ranks = ranks
        self._writes: dict[Account, int] = {}

    def note_writes(self, account: Account) -> None:
        """Note that the step is taken now: later writes of scripts belong to the next one."""
        self._writes[account] = self._ranks.writes.value

    def _sq_norms(self, step: StepJobs) -> Sequence[float]:
        channel, number = self._ranks.decisions, step.account.step
        channel.begin_submitted()
        hypers, writes = digest(repr(step.account.hypers)), self._writes.pop(step.account)
        totals, steps, by_rank = _told(channel, self._own_total(step), number, [hypers, writes])
        if len(set(steps)) > 1:
            raise StateError(
                f"the ranks take different steps: {dict(zip(channel.members, steps, strict=True))}"
            )
        if odd := channel.odd_ranks(by_rank[0]):
            raise StateError(
                f"step {number}: the hyperparameters of ranks {odd} are not those of rank {channel.members[0]}; "
                f"rank {channel.rank} has {abbreviated(step.account.hypers)}. All ranks must set the same ones: a "
                "scheduler that goes by the loss needs the mean over the ranks"
            )
        channel.expect_same_writes(by_rank[1], f"step {number}")
        totals = _of_gradients(totals)
        is_divided = any(job.record.shard.world_size > 1 for job in step.jobs)
        of_part = totals if is_divided else totals[:1]
        return (
            of_part if self._ranks.across is None else self._of_all_parts(self._ranks.across, of_part, number)
        )

    def _own_total(self, step: StepJobs) -> float:
        """The sum of this rank's squared norms: [Note: the axes of a mesh].

        NaN where some gradient is not finite, _NO_GRADIENTS where there is none.
        """
        if not step.jobs:
            return _NO_GRADIENTS
        own = step.sq_norms()
        if not all(map(math.isfinite, own)):
            return math.nan
        if self._ranks.tensor_rank:
            own = [
                job.gradient.sq_norm_of(slot)
                for job in step.jobs
                for slot in job.gradient.present_slots
                if is_divided_by_tensor_parallelism(slot.param)
            ]
        return math.fsum(own)

    @staticmethod
    def _of_all_parts(across: Collectives, of_part: Sequence[float], number: int) -> Sequence[float]:
        """The sums of all parts of the model, which the ranks tell those of their place in the other groups."""
        own = math.fsum(of_part) if all(map(math.isfinite, of_part)) else math.nan
        totals, steps, _ = _told(across, own if of_part else _NO_GRADIENTS, number, [])
        if len(set(steps)) > 1:
            raise StateError(
                f"the ranks take different steps: {dict(zip(across.members, steps, strict=True))}"
            )
        return _of_gradients(totals)

    def _non_finite(self, step: StepJobs) -> Sequence[str]:
        found = [not job.gradient.is_finite for job in step.jobs]
        flags = torch.tensor(found, dtype=torch.uint8, device="cpu")
        if step.jobs:
            self._ranks.decisions.all_reduce(flags, f"step {step.account.step}", largest=True)
        names = [job.record.name for job, flag in zip(step.jobs, flags.tolist(), strict=True) if flag]
        return names or ["a unit of another part of the model"]


def _of_gradients(totals: Sequence[float]) -> list[float]:
    return [total for total in totals if total != _NO_GRADIENTS]


def _told(
    channel: Collectives, total: float, number: int, more: Sequence[int]
) -> tuple[list[float], list[int], list[list[int]]]:
    """Return the sums of all ranks and the numbers of their steps, both by rank, and `more` of them, each by rank."""
    # The bits, which arrive as they are, NaN too.
    bits = int(torch.tensor(total, dtype=torch.float64, device="cpu").view(torch.int64))
    totals, steps, *others = zip(*channel.by_rank([bits, number, *more], f"step {number}"), strict=True)
    return torch.tensor(totals, device="cpu").view(torch.float64).tolist(), [*steps], [*map(list, others)]


class ReducingCoordinator(StepCoordinator):
    """Turns the gradients of all ranks into one step: [Note: what the ranks agree on]."""

    _decider: AgreeingDecider
    collector: ReducingCollector

    def __init__(self, *args: Any, ranks: Ranks, store: TieredStore, **more: Any) -> None:
        super().__init__(*args, **more)
        self._ranks = ranks
        self._order = ReduceOrder(self._gradients)
        expect_first_order = weakref.WeakMethod(self._expect_first_order)

        def before_backward() -> None:
            if (call := expect_first_order()) is not None:
                call()

        self._executor.call_before_backward(before_backward)
        self._has_begun = False
        self._has_learnt = False
        self._writes_before = ranks.writes.value  # those of the script until the last step
        # The lane of new weights of units that stay whole on the device.
        self._publishing: Lane = store.accelerator.lane("new-weights", store.failures)

    def _begin_backward(self) -> None:
        super()._begin_backward()
        self._expect_first_order()
        self._order.begin()

    def _expect_first_order(self) -> None:
        """Expect them in the reversed order of the first rank's forward: [Note: when a gradient is reduced].

        The ranks come here in the first backward: with their first gradient, or before they fetch anything. The first
        gradient of one, an expert's say, may come before a fetch for which it would wait here, and another's after it.
        """
        if self._has_begun:
            return
        self._has_begun = True
        self._executor.call_before_backward(None)
        used = dict.fromkeys(index for index in self._executor.take_entered() if index in self._gradients)
        # What may never come is last, so nothing waits for it.
        unused = (index for index in reversed(self._gradients) if index not in used)
        order = torch.tensor([*reversed(used), *unused], dtype=torch.int64, device="cpu")
        self._order.learn(self._of_first_rank(order, "the order of the first gradients"))

    def _of_first_rank(self, order: Tensor, label: str) -> list[int]:
        """Return the first rank's order, by a collective that ends with all ranks: [Note: a standstill]."""
        if self._ranks.control.spec.rank:
            order.fill_(-1)
        self._ranks.control.all_reduce(order, label, largest=True)
        return order.tolist()

    def complete(self, gradient: RecordGradient) -> None:
        """Reduce the gradients that are next, now that a record's is collected."""
        self._gradients_complete(gradient)
        record = gradient.record
        for index in self._order.complete(record.index, record.name):
            self._reduce(self._gradients[index])

    def _reduce(self, gradient: RecordGradient) -> None:
        before = self._changes.update_ticket(gradient.record.index)
        brought = self.collector.hand_over(gradient, closes=self._closes_window)
        self._landing.send(brought, None, before=before, job=None)

    def _send_rest(self) -> None:
        present, everywhere = self._agree_on_present()
        for index in self._order.rest([index for index, places in present.items() if places]):
            gradient = self._gradients[index]
            self.collector.fill(gradient, sorted(present[index].difference(gradient.arrived)))
            self._reduce(gradient)
        for gradient in self._gradients.values():
            if gradient.arrived:
                raise StateError(
                    f"{gradient.record.name} gets a gradient after all of its gradients in one backward (a reentrant "
                    "checkpoint?): over several ranks that is not built"
                )
            if self._closes_window and gradient.present and not gradient.closed:
                self._landing.close(gradient, job=None)
        self._learn_order(everywhere)
        self._executor.end_backward()

    def _agree_on_present(self) -> tuple[dict[int, frozenset[int]], list[int]]:
        """Return the slots with a gradient on some rank, by record, and the records complete on all ranks before."""
        gradients: WindowGradients = self._gradients
        counts = [len(gradient.sq_norms) for gradient in gradients.values()]
        flags = torch.zeros(sum(counts) + len(counts) + 2, dtype=torch.uint8, device="cpu")
        *slots, late, closing = flags.split([*counts, len(counts), 2])
        completed = self._order.completed
        for number, (gradient, own) in enumerate(zip(gradients.values(), slots, strict=True)):
            index = gradient.record.index
            late[number] = index not in completed
            if index in completed:
                own.fill_(1)
            elif gradient.arrived:
                own[torch.tensor(list(gradient.arrived), device="cpu")] = 1
        closing[int(self._closes_window)] = 1
        self._ranks.control.all_reduce(flags, "the end of a backward", largest=True)
        if bool(closing.all()):
            raise StateError(
                "this micro batch is the last of its step on some ranks and not on others: all ranks must take equally "
                "many, and set the same accumulation boundaries"
            )
        present = {
            index: frozenset(own.nonzero().view(-1).tolist())
            for index, own in zip(gradients, slots, strict=True)
        }
        return present, [
            index for index, is_late in zip(gradients, late.tolist(), strict=True) if not is_late
        ]

    def _learn_order(self, everywhere: Sequence[int]) -> None:
        if self._has_learnt:
            self._order.expect_only(everywhere)
            return
        completed = [index for index in self._order.completed if index in everywhere]
        order = torch.tensor(completed, dtype=torch.int64, device="cpu")
        self._ranks.control.broadcast(order, "the order of gradients")
        self._order.learn(order.tolist())
        self._has_learnt = True

    def step(self) -> None:
        """Apply the window's gradients, which are those of all ranks."""
        self.collector.expect_all_reduced()
        super().step()

    def discard_gradients(self, *, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero (`optimizer.zero_grad()`), on all ranks."""
        self._expect_backward_ended()
        self._wait_decided()  # [Note: where a refused step is told]
        self._ranks.writes.note(int(set_to_none))
        super().discard_gradients(set_to_none=set_to_none)

    def give_up_step(self) -> None:
        """Drop the step that was begun, on all ranks: a checkpoint replaces the states."""
        self._expect_backward_ended()
        super().give_up_step()

    def _expect_backward_ended(self) -> None:
        """Raise after an error or Ctrl-C in backward: the other ranks wait in collectives that will not complete."""
        self._failures.check_readable()
        if self._in_backward:
            lost = StateError(
                "a backward of this rank did not come to its end, and the other ranks wait for what it has not sent: "
                "over several ranks nothing goes on from there. Start again from a checkpoint"
            )
            self._failures.spoil(lost)
            raise lost

    def _step_at_once(self, account: Account, jobs: Sequence[UpdateJob]) -> StepJobs:
        reads = self._changes.launched_reads()
        for job in jobs:
            self._changes.begin_update(job.record.index, self._published(job))
        order = self._executor.step_order([job.record.index for job in jobs])
        # Where another part of the model has gradients, the ranks of this one decide with it; and with other ranks of
        # this part where these may have gradients, as the script here has dropped all.
        has_edited, self._writes_before = (
            self._writes_before != self._ranks.writes.value,
            self._ranks.writes.value,
        )
        is_decided = not jobs and self._ranks.across is None and not has_edited
        step = StepJobs(
            account, jobs, before=self._last.decided, reads=reads, order=None if is_decided else order
        )
        if not is_decided:
            self._decider.note_writes(account)
            self._ranks.steps.note(account.step)
            self._pipeline.submit(functools.partial(self._decider.decide, step))
        self._executor.step_decided_by(step.decided)
        return step

    def _published(self, job: UpdateJob) -> Ticket:
        """Return a ticket that is done when the device has the weights that all ranks have updated."""
        whole = job.record.whole_param
        if whole is None:
            return job.ticket
        params, label = whole.memory[: job.record.num_trainable], f"{job.record.name}.param"
        return self._publishing.submit(
            lambda: self._ranks.updates.all_gather(params, label), after=[job.ticket], label=job.record.name
        )
