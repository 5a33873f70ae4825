"""Units whose parameters come from the shards of all ranks: their fetches, their order, and reads of them.

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
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import torch

from offloadzero.errors import ConfigError, RankError, StateError
from offloadzero.memory.arena import Arena, BufferPool
from offloadzero.memory.checksums import crc32c_blocks
from offloadzero.memory.lanes import LaneTicket
from offloadzero.memory.store import Segment, TieredStore
from offloadzero.memory.tickets import FINISHED, Ticket
from offloadzero.observe.clock import StepClock
from offloadzero.segments import SegmentKind
from offloadzero.sharding.board import is_fake
from offloadzero.sharding.parts import gather_parts
from offloadzero.sharding.ranks import Ranks
from offloadzero.streaming.block_acts import Block, BlockAct
from offloadzero.streaming.coded_gather import CodedGather
from offloadzero.streaming.executor import Executor
from offloadzero.streaming.leased_unit import LeasedUnit
from offloadzero.streaming.near_copies import NearCopies
from offloadzero.streaming.residency import ResidencyPolicy
from offloadzero.streaming.unit_changes import UnitChanges
from offloadzero.streaming.unit_fetches import UnitFetches
from offloadzero.streaming.unit_reads import UnitReads
from offloadzero.streaming.weights import WeightAccess
from offloadzero.torch_private import NO_GRAPH_TASK, active_ddp_module, current_graph_task_id
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.kept import gathered_regions, kept_parts, kept_place, kept_regions
from offloadzero.update.records import Record

# The next act of a rank: a read, by the record's number, of its own or one that leads the others, a BlockAct, or one of
_ENDED, _FAILED, _FOLLOWS, _NORMS, _LOADS = -1, -2, -3, -7, -8


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


class GatheredWeights(WeightAccess):
    """Reads the shards of a parameter or a state on all ranks, which read the same ones in the same order.

    [Note: ranks say what they read]
    In a read each rank sends the others the part that it keeps, so one that reads something else would get a mixture,
    or, with another size, end the process inside of gloo. Before each read every rank tells the others what it is about
    to do, in numbers of a fixed size: a departure is an error on all of them, before any value is touched. A rank that
    has all parts goes on, and hears at its next collective of another one that failed in the read.

    [Note: the first rank reads, the others follow]
    Some work with all values is done by one rank alone, the writing of a checkpoint say. The first rank does it in
    `read_by_first`: its announcement before each read leads the others, which answer until it announces the end, or an
    error.
    """

    def __init__(
        self,
        store: TieredStore,
        changes: UnitChanges,
        reads: UnitReads,
        *,
        clock: StepClock,
        executor: GatheringExecutor,
        ranks: Ranks,
        records: Sequence[Record],
    ) -> None:
        super().__init__(store, changes, reads, clock=clock)
        self._executor = executor
        self._coded = executor.coded
        self._ranks = ranks
        self._records = records
        self._leads = self._follows = False
        self._has_departed = False

    def value(self, record: Record, slot: ParamSlot, *, to_write: bool = False) -> torch.Tensor:
        """Return the parameter on the device; one that a script is to edit is exact, and not what its codes mean."""
        if not to_write or not self._coded.is_coded(record, slot):
            return super().value(record, slot, to_write=to_write)
        if slot.trainable:
            self._changes.expect_step_taken(record.index)
        return self.read(record, slot).to(self.device)

    def commit_forward(self, record: Record, places: Iterable[int]) -> None:
        """Write parameters that a forward has changed in place; StateError where it had only their codes."""
        slots = [record.slots[place] for place in places]
        names = ", ".join(slot.name for slot in slots if self._coded.is_coded(record, slot))
        if names:
            self._executor.forget_written(record.index)
            raise StateError(
                f"{names}: written in place in a forward, whose weights came as int8 codes "
                "(zero_optimization.zero_quantized_weights, zero_quantized_nontrainable_weights): the rest of the "
                "parameter would lose its exact values. Write it outside of the forward"
            )
        super().commit_forward(record, [slot.index for slot in slots])

    # --- parameters that a script has gathered: [Note: gathered over several ranks] ---

    def gather(self, record: Record, slot: ParamSlot, memory: torch.Tensor) -> None:
        """Make a parameter an ordinary one with its exact values in `memory`."""
        # The others wait for this rank until the block ends.
        with self._store.failures.whole(f"GatheredParameters of {slot.name} over the ranks"):
            value = self.value(record, slot, to_write=self._coded.is_coded(record, slot))
            memory.copy_(value)
            self._reads.gather(record.index, slot.index, memory)

    def commit_gathered(self, indices: Collection[int]) -> None:  # noqa: ARG002
        """Write what a script has written into gathered parameters, all of them, where the outermost forward begins."""
        if not self._executor.is_running:
            for block in reversed(self.blocks):
                block.commit()

    def is_modifier(self, modifier_rank: int) -> bool:
        """Whether this rank is the one that may write. Raises ConfigError where there is no such rank."""
        spec = self._ranks.spec
        if not 0 <= modifier_rank < spec.world_size:
            allowed = f"None, or 0 to {spec.world_size - 1}: a rank among those that share the data"
            raise ConfigError("modifier_rank", modifier_rank, allowed)
        return modifier_rank == spec.rank

    def meet(self, act: BlockAct, block: Block) -> None:
        """Raise StateError on all ranks unless all do the same; where they enter, with the same parameters."""
        num, modifier_rank = len(block.places), block.modifier_rank
        first = block.places[0].slot.name
        label = f"GatheredParameters of {first}{f' and {num - 1} others' if num > 1 else ''}"
        with self._clock.waiting("state access"), self._store.failures.handed_over():
            self._say(act, num, act.number_of(modifier_rank), label=label)
            if act is BlockAct.ENTERS:
                self._expect_same_places(block, label)

    def _expect_same_places(self, block: Block, label: str) -> None:
        """Raise StateError unless all ranks gather the same parameters, after the same writes."""
        channel = self._ranks.states
        own = [
            (record.index << 32) + 2 * slot.index + (self.gathered_value(record, slot) is not None)
            for record, slot in block.places
        ]
        by_rank = channel.by_rank_unless_same([self._ranks.writes.value, *own], label)
        if by_rank is None:
            return
        writes, *places = zip(*by_rank, strict=True)
        for of_ranks in places:
            if len(set(of_ranks)) > 1:
                names = map(self._name_of, of_ranks)
                texts = [
                    f"rank {rank} gathers {name}" for rank, name in zip(channel.members, names, strict=True)
                ]
                raise StateError(
                    f"{', '.join(texts)} (this is rank {channel.rank}): all ranks must gather the same parameters"
                )
        channel.expect_same_writes(writes, label)

    def _name_of(self, number: int) -> str:
        """The name to a number that says which parameter a rank gathers, and whether it has gathered it before."""
        slot = self._records[number >> 32].slots[(number & 0xFFFFFFFF) // 2]
        return f"{slot.name} again" if number % 2 else slot.name

    def ranks_where(self, flags: Sequence[bool]) -> list[list[int]]:
        """The ranks on which each of `flags` holds. All ranks call this with as many."""
        if not flags:
            return []
        channel = self._ranks.states
        with self._clock.waiting("state access"), self._store.failures.handed_over():
            by_rank = channel.by_rank_unless_same([*map(int, flags)], "GatheredParameters")
        if by_rank is None:
            return [[*channel.members] if flag else [] for flag in flags]
        columns = zip(*by_rank, strict=True)
        return [[rank for rank, it in zip(channel.members, each, strict=True) if it] for each in columns]

    def on_ranks(self, ranks: Sequence[int]) -> str:
        """Name these ranks in a message."""
        return f" (ranks {[*ranks]})"

    def value_by(
        self, modifier_rank: int, record: Record, slot: ParamSlot, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the value that the parameter has on the rank that may write, in host memory."""
        told = torch.empty(slot.num_elements, dtype=record.dtype, device="cpu")
        if self.is_modifier(modifier_rank):
            told.copy_(value.detach().to("cpu").reshape(-1))
        with self._clock.waiting("state access"), self._store.failures.handed_over():
            self._ranks.states.broadcast(told, f"{slot.name}: GatheredParameters", source=modifier_rank)
        return told.view(slot.shape)

    # --- gradients, which are read elsewhere ---

    def announce_gradient(self, record: Record, slot: ParamSlot) -> None:
        """Tell the others that a gradient is read next: [Note: ranks say what they read].

        Raises StateError on all ranks unless all of them read it.
        """
        with self._clock.waiting("gradient access"), self._store.failures.handed_over():
            self._say(record.index, slot.index, len(record.spec.kinds))

    def announce_gradient_norms(self, num_records: int) -> None:
        """Tell the others that the norms of so many units' gradients are read next. Raises StateError unless all do."""
        with self._clock.waiting("gradient access"), self._store.failures.handed_over():
            self._say(_NORMS, num_records)

    def announce_load(self) -> None:
        """Tell the others that a checkpoint is loaded next: what is agreed on then has the sizes of nothing else.

        Raises StateError on all ranks unless all of them do.
        """
        with self._clock.waiting("state access"), self._store.failures.handed_over():
            self._say(_LOADS)

    # --- reads of all ranks ---

    def read_by_first(self, work: Callable[[], None]) -> None:
        """Do `work` on the first rank: [Note: the first rank reads, the others follow]. All ranks call this.

        Raises the error of `work`; on the other ranks a RankError with its text.
        """
        if not self._ranks.is_first:
            self._follow()
            return
        self._leads = True
        try:
            try:
                work()
            except BaseException as error:
                if not self._has_departed:  # else the others know already
                    with suppress(RankError):  # then the collective in which the error came has told them
                        self._give_up(f"{type(error).__name__}: {error}".encode())
                raise
            self._say(_ENDED)
        finally:
            self._leads = False

    def _give_up(self, why: bytes) -> None:
        self._say(_FAILED, num_said=len(why))
        said = torch.tensor(list(why), dtype=torch.uint8, device="cpu")
        self._ranks.states.broadcast(said, "what the first rank says")

    def _follow(self) -> None:
        while True:
            index, place, kind, num_said = self._say(_FOLLOWS)
            if index == _ENDED:
                return
            if index == _FAILED:
                said = torch.empty(num_said, dtype=torch.uint8, device="cpu")
                self._ranks.states.broadcast(said, "what the first rank says")
                raise RankError(
                    f"rank {self._ranks.states.members[0]}: {bytes(said.tolist()).decode(errors='replace')}"
                )
            record = self._records[index]
            self._follows = True
            try:
                self._read(record, record.slots[place], record.spec.kinds[kind])
            finally:
                self._follows = False

    def _say(
        self,
        what: int,
        place: int = 0,
        kind: int = 0,
        *,
        num_said: int = 0,
        label: str | None = None,
    ) -> list[int]:
        """Tell the others the next act: [Note: ranks say what they read]. Returns that of the first rank."""
        own = [what, place, kind, num_said, int(self._leads)]
        act = label or f"what the ranks do ({self._text(*own)})"
        if is_fake():
            raise StateError(f"{act}: the other ranks' parts are not there in torch's fake process group")
        by_rank = self._ranks.states.by_rank(own, act)
        first, *others = by_rank
        fitting = [_FOLLOWS, 0, 0, 0, 0] if first[-1] else first
        if first[0] == _FOLLOWS or any(other != fitting for other in others):
            members = self._ranks.states.members
            texts = [
                f"rank {rank} {self._text(*words)}" for rank, words in zip(members, by_rank, strict=True)
            ]
            self._has_departed = True
            raise StateError(
                f"{', '.join(texts)} (this is rank {self._ranks.states.rank}): all ranks must read the same weights "
                "and states in the same order, gather the same parameters, and save together"
            )
        return first[:-1]

    def _text(self, what: int, place: int, kind: int, _: int, leads: int) -> str:
        """Describe an act in an error message."""
        if what in (_FOLLOWS, _ENDED, _FAILED):
            return "saves"
        if what == _LOADS:
            return "loads a checkpoint"
        if what == _NORMS:
            return f"asks for the norms of the gradients of {place} units"
        if what < 0:
            return BlockAct(what).text(place, kind)
        record = self._records[what]
        kinds = [*record.spec.kinds, SegmentKind.GRAD]
        name = f"{record.slots[place].name} ({kinds[kind].value})"
        return f"reads {name}{' to save it' if leads else ''}"

    def _write(self, record: Record, slot: ParamSlot, parts: Mapping[SegmentKind, torch.Tensor]) -> None:
        """Write this rank's part of `parts`. A rank that writes other values is found at the next fetch or step."""
        for kind, values in parts.items():
            data = values.detach().contiguous().view(torch.uint8)
            name = f"{record.index} {slot.index} {kind.value}".encode()
            self._ranks.writes.note(zlib.crc32(crc32c_blocks(data).tobytes(), zlib.crc32(name)))
        super()._write(record, slot, parts)

    def write_step(self, record: Record, slot: ParamSlot, step: int) -> None:
        """Set the number of updates. A rank that sets another is found at the next fetch or step."""
        self._ranks.writes.note(zlib.crc32(f"{record.index} {slot.index} step {step}".encode()))
        super().write_step(record, slot, step)

    def _read_home(self, record: Record, slot: ParamSlot, segment: Segment, target: torch.Tensor) -> None:
        if record.shard.world_size == 1 or segment is record.whole_param:
            super()._read_home(record, slot, segment, target)
            return
        # The others wait for this rank until the block ends.
        with self._store.failures.whole(f"the read of {slot.name} over the ranks"):
            if not self._follows:
                self._say(record.index, slot.index, record.spec.kinds.index(segment.kind))
            parts = kept_parts(record, slot, segment.kind, target)
            if record.shard.rank in parts:
                start = kept_place(record, slot, segment.kind).start
                self._store.read(segment, parts[record.shard.rank], start=start).wait()
            gather_parts(self._ranks.states, target, parts, f"{slot.name}.{segment.kind.value}")
