"""Units whose parameters come from the shards of all ranks: their fetches, and their order.

[Note: what a rank fetches]
Each rank brings its shard of a unit from its own home into the shard's place in the unit's lease, over its own link and
from its own drive, and an all-gather in place fills the rest in. All of it is one task of the lane `fetch`, so the
collectives come in the order in which the fetches were submitted: [Note: collectives in one order].

That order must follow from the order of use alone. With a single rank a unit that has arrived but has not been used may
leave again at once; when it has arrived is a matter of time. Here it counts as arriving until the computation has
waited for it. And with a single rank a unit that has all of its gradients is free to leave right then; ranks whose
data go different ways (experts that got no token) see this at different moments. Here the end of a use is the next use,
or the end of the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from offloadzero.errors import ConfigError
from offloadzero.memory.arena import Arena, BufferPool
from offloadzero.memory.lanes import LaneTicket
from offloadzero.memory.store import TieredStore
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.sharding.ranks import Ranks
from offloadzero.streaming.coded_gather import CodedGather
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.leased_unit import LeasedUnit
from offloadzero.streaming.near_copies import NearCopies
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_fetches import UnitFetches
from offloadzero.torch_private import NO_GRAPH_TASK, active_ddp_module, current_graph_task_id
from offloadzero.update.kept import gathered_regions, kept_regions
from offloadzero.update.records import Record


class GatheredFetches(UnitFetches):
    """Fetches this rank's shard of a unit and gathers those of the others: [Note: what a rank fetches]."""

    def __init__(
        self,
        store: TieredStore,
        *,
        staging: BufferPool,
        clock: StepClock,
        ranks: Ranks,
        coded: CodedGather,
        near: NearCopies | None,
    ) -> None:
        super().__init__(store, staging=staging, clock=clock)
        self._ranks = ranks
        self._coded = coded
        self._near = near
        self.before_backward: Callable[[], None] | None = None  # called before each fetch of a backward

    def submit(self, unit: LeasedUnit, target: torch.Tensor) -> LaneTicket:
        """Fetch a unit, after its last update, into `target`, device, shape (num_elements,)."""
        if not unit.record.is_gathered:
            return super().submit(unit, target)
        if self.before_backward is not None and current_graph_task_id() != NO_GRAPH_TASK:
            self.before_backward()
        ranks, near = self._ranks, self._near
        ranks.order.note(unit.record.index)
        if near is not None and near.is_current(unit):
            return self._submit_near(unit, target, near)
        if near is not None:
            near.renew(unit)
        return self._fetcher.submit(
            unit.home,
            target,
            after=[unit.updated],
            fence=self._store.accelerator.fence(),
            label=unit.record.name,
            copy=functools.partial(self._gather, unit.record, ranks.order.value, ranks.writes.value),
        )

    def _submit_near(self, unit: LeasedUnit, target: torch.Tensor, near: NearCopies) -> LaneTicket:
        """Fetch a unit from the copies that the ranks of this machine keep: [Note: near copies]."""
        record, label = unit.record, f"{unit.record.name}.param"
        order, writes = self._ranks.order.value, self._ranks.writes.value
        targets = [target]  # the lane lets go of it before the ticket is done

        def gather() -> None:
            self._ranks.orders.expect_same(order, writes, label)
            near.gather(record, targets.pop(), label)

        return self._lane.submit(gather, fence=self._store.accelerator.fence(), label=record.name)

    def _gather(
        self, record: Record, order: int, writes: int, target: torch.Tensor, kept: torch.Tensor
    ) -> None:
        """Gather a unit on the lane's thread; `order` sums up the fetches until then, `writes` the writes."""
        label = f"{record.name}.param"
        self._ranks.orders.expect_same(order, writes, label)
        shards, first = kept_regions(record, kept), 0
        for region, shard in zip(gathered_regions(record, target), shards, strict=True):
            self._gather_region(record, first, region, shard, label)
            first += region.numel()
        if self._near is not None:
            self._near.keep(record, target)

    def _gather_region(
        self, record: Record, first: int, region: torch.Tensor, shard: torch.Tensor, label: str
    ) -> None:
        """Gather one region, which begins with the record's element `first`."""
        wire = self._coded.region_at(record, first)
        is_here = record.param_home.is_on_device
        copy = self._store.accelerator.copy_inside if is_here else self._store.accelerator.copy
        if wire is not None:
            self._coded.gather(wire, region, shard, self._ranks.weights, label, copy=copy)
            return
        start, stop = record.shard.kept_range(region.numel())
        copy(region[start:stop], shard)
        self._ranks.weights.all_gather(region, label)

    def forget(self, index: int) -> None:
        """Have the unit's next fetch read the home, and not the copy that the ranks of a machine keep."""
        if self._near is not None:
            self._near.forget(index)

    def read_home(self, unit: LeasedUnit) -> torch.Tensor:
        """Read the unit's parameters into memory of their own on the device, shape (num_elements,)."""
        if not unit.record.is_gathered:
            return super().read_home(unit)
        record = unit.record
        target = self._store.accelerator.allocate(record.num_elements * record.dtype.itemsize)
        target = target.view(record.dtype)
        with self._clock.waiting("fetch"), self._store.failures.handed_over():
            self.submit(unit, target).order_compute()
        return target


class OrderedResidency(ResidencyPolicy):
    """The residency policy that decides by the order of use alone: [Note: what a rank fetches]."""

    @staticmethod
    def _is_arriving(unit: LeasedUnit) -> bool:  # noqa: ARG004
        return True


class GatheringExecutor(Executor):
    """The executor of units of which each rank keeps a shard.

    [Note: where a refused step is told]
    After a step whose gradients are not finite a script may go on, from the line where it got the error. That must be
    the same line on all ranks: between two such lines a rank may have begun a fetch that the others never issue. One
    process raises the error as soon as it knows it, and where the first units are frozen their forward waits for
    nothing. Several ranks wait for the decision where a step's forward begins, and in `zero_grad()`; the weights of
    trainable units are not there before it in any case.
    """

    def __init__(
        self,
        records: Sequence[Record],
        store: TieredStore,
        *,
        unit_arena: Arena,
        staging: BufferPool,
        clock: StepClock,
        ranks: Ranks,
        coded: CodedGather,
        near: NearCopies | None,
    ) -> None:
        self._ranks = ranks
        self.coded = coded
        self._near = near
        self._decided: Ticket = FINISHED  # the decision over the last step
        self._entered: (
            dict[int, None] | None
        ) = {}  # units by the order of their first forward; None: asked for
        self._params = frozenset(id(slot.param) for record in records for slot in record.slots)
        super().__init__(records, store, unit_arena=unit_arena, staging=staging, clock=clock)

    def _make_residency(self, arena_bytes: int) -> ResidencyPolicy:
        return OrderedResidency(self.units, arena_bytes=arena_bytes)

    def _make_fetches(self, staging: BufferPool) -> UnitFetches:
        self._gathered_fetches = GatheredFetches(
            self._store,
            staging=staging,
            clock=self._clock,
            ranks=self._ranks,
            coded=self.coded,
            near=self._near,
        )
        return self._gathered_fetches

    def call_before_backward(self, call: Callable[[], None] | None) -> None:
        """Have `call` called before each fetch that a backward asks for; None: no longer."""
        self._gathered_fetches.before_backward = call

    def step_decided_by(self, decided: Ticket) -> None:
        """Let no forward of the next step begin before `decided`: [Note: where a refused step is told]."""
        self._decided = decided

    def enter_forward(self, indices: Sequence[int], *, is_root: bool) -> None:
        """Begin the forward of a site. Raises NonFiniteError where the last step was refused, on all ranks here.

        ConfigError: DistributedDataParallel is around the model.
        """
        if not self._num_forwards:
            self._expect_unwrapped()
        if not self._num_forwards and not self.is_evaluating:
            if not self._decided.done():
                with self._clock.waiting("decision"), self._store.failures.handed_over():
                    self._decided.wait()
            self._store.failures.check()
        super().enter_forward(indices, is_root=is_root)
        if self._entered is not None and not self.is_evaluating:
            self._entered.update(dict.fromkeys(indices))

    def _expect_unwrapped(self) -> None:
        wrapper = active_ddp_module()
        if wrapper is not None and any(id(param) in self._params for param in wrapper.module.parameters()):
            allowed = (
                "the module in it: its gradients are averaged over the ranks here. Frameworks that wrap the model so "
                "(accelerate's prepare(), the Trainer of transformers) do not train it over several ranks"
            )
            raise ConfigError("model", type(wrapper).__name__, allowed)

    def take_entered(self) -> list[int]:
        """Return the units of this rank's first forwards, in their order; it is noted until this is called."""
        entered, self._entered = self._entered, None
        return list(entered or ())

    def gradients_complete(self, index: int) -> None:
        """Do nothing: the use goes on until the next one, or the end of the backward: [Note: what a rank fetches]."""

    def end_backward(self) -> None:
        """End the uses of this backward, whose end all ranks have reached."""
        if self.residency.current >= 0:
            super().gradients_complete(self.residency.current)
