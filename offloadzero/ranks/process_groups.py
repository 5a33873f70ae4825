"""The ranks that train one model together, and their collectives. No other file calls torch's.

[Note: collectives in one order]
Collectives of one process group match by their order. So each thread that issues any has a group of its own, a
`Channel`, and its collectives are a function of facts that all ranks have in common: the order of use of the units, the
order of the records, results that they have agreed on before. Their order never depends on time. But a rank whose
script takes another branch would match another unit's bytes. Therefore the order of fetches is summed up as they are
submitted, and the sums, a few bytes in host memory, are compared before the weights are gathered: a departure is an
error on all ranks before any computes with it, or, where one rank waits for collectives that the others never issue,
the error is that of the group's timeout. The values that scripts write are summed up, too, and compared there and at
each step, as each rank keeps only its part of them.
"""

from __future__ import annotations

import functools
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offloadzero.config import PARTITION_KEY
from offloadzero.config.schema import MeshConfig
from offloadzero.core import interrupts
from offloadzero.core.interrupts import is_interrupt
from offloadzero.core.launch import launched_local_size
from offloadzero.core.torch_private import is_process_group, timeout_of_process_group, without_bound_device
from offloadzero.errors import ConfigError, RankError, StateError
from offloadzero.memory.checksums import crc32c_blocks
from offloadzero.observe.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    SCATTER,
    CollectiveCount,
    CollectiveCounter,
    tells_each,
    volume_bytes,
)
from offloadzero.observe.timeline import COLLECTIVES, OFF
from offloadzero.ranks.aborting import abort_groups
from offloadzero.ranks.agreement import agreed_totals
from offloadzero.ranks.comparing import digest, machine
from offloadzero.ranks.descriptors import make_room_for_groups
from offloadzero.ranks.failure_board import LOOK_UP_S, Board, first_line, is_fake, named
from offloadzero.ranks.group import Collectives, Group, TakenStep
from offloadzero.ranks.mesh import MeshGroups, any_groups, mesh_groups, numbers_of
from offloadzero.ranks.shard import ShardSpec, consecutive_groups, groups_of_equal_place
from offloadzero.ranks.stall_watch import WAITED_S, Standstill, Watch

# Between two looks of a channel before collectives. The store is one thread of one rank: if all of a thousand ranks
# asked it before each of some hundred collectives of a step, they would wait for it.
LOOK_AGAIN_S = 0.1

# Newer versions of torch have other names for these functions, and warn of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Recorder = Callable[[str, str, int], AbstractContextManager[None]]  # lane, name, bytes: Accelerator.span


class Channel(Collectives):
    """The collectives of one thread, in a process group of its own: [Note: collectives in one order]."""

    def __init__(
        self,
        group: Any,
        spec: ShardSpec,
        board: Board,
        *,
        is_on_host: bool,
        members: Sequence[int] | None = None,
    ) -> None:
        """Use `group`, in which this rank has the place that `spec` says.

        Args:
            is_on_host: tensors are in host memory, and a collective is over when its wait returns.
            members: the ranks of the group; None: all.
        """
        self._group = group
        self.spec = spec
        self.members = members = members or range(spec.world_size)
        self._who = f"rank {members[spec.rank]} of {spec.world_size}"
        if len(members) < dist.get_world_size():
            self._who = f"rank {members[spec.rank]}, with ranks {[*members]}"
        self._board = board
        self._place = len(board.begun)
        board.begun.append(0)
        self._is_on_host = is_on_host
        self.counter = CollectiveCounter()
        self.recorder: Recorder = OFF.span
        self.watch: Watch | None = None
        self._looked_s = -math.inf  # when nobody had failed
        self._tells_each = tells_each(spec.world_size) and not is_fake()
        self._is_closed = False
        self._is_in_collective = False
        self._is_aborted = False

    def all_gather(self, whole: Tensor, label: str) -> None:
        """Fill `whole`, shape (n,), with the parts of all ranks; this rank's part lies in its place there already."""
        data = whole.view(torch.uint8)  # not every backend knows every dtype
        start, stop = self.spec.kept_range(data.numel())
        self._run(ALL_GATHER, label, data, lambda: _all_gather(data, data[start:stop], **self._options))

    def reduce_scatter(self, whole: Tensor, label: str) -> Tensor:
        """Return the sum over the ranks of this rank's part of `whole`, shape (n,), which is overwritten."""
        start, stop = self.spec.kept_range(whole.numel())
        part = whole[start:stop]

        def begin() -> Any:
            # Gloo's own is an all-reduce of a copy, and its wait has no end before that: nobody could look up there.
            if self._is_on_host:
                return dist.all_reduce(whole, **self._options)
            return _reduce_scatter(part, whole, **self._options)

        self._run(REDUCE_SCATTER, label, whole, begin)
        return part

    def all_to_all(self, received: Tensor, sent: Tensor, label: str) -> None:
        """Send each rank its part of `sent` and fill `received` with theirs; both uint8, in the ranks' order."""
        self._run(ALL_TO_ALL, label, sent, lambda: dist.all_to_all_single(received, sent, **self._options))

    def all_reduce(self, values: Tensor, label: str, *, largest: bool = False) -> None:
        """Replace `values` by their sums over the ranks, or by the largest ones."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        self._run(ALL_REDUCE, label, values, lambda: dist.all_reduce(values, op=op, **self._options))

    def by_rank_unless_same(self, own: Sequence[int], label: str) -> list[list[int]] | None:
        """The numbers of each rank, by rank; None where all ranks have the same.

        Many ranks compare them in a few bytes, however many there are. Only where some differ do they tell which.
        """
        if self._tells_each:
            by_rank = self.by_rank(own, label)
            return None if all(values == by_rank[0] for values in by_rank) else by_rank
        values = torch.tensor(own, dtype=torch.int64, device="cpu")
        largest = torch.stack([values, -values])
        self.all_reduce(largest, label, largest=True)
        if torch.equal(largest[0], -largest[1]):
            return None
        return self.by_rank(own, label)

    def by_rank(self, own: Sequence[int], label: str) -> list[list[int]]:
        """The numbers of each rank, by rank; in a fake group, where nobody says anything, the others' are zero."""
        values, num_ranks = torch.tensor(own, dtype=torch.int64, device="cpu"), self.spec.world_size
        said = torch.zeros(num_ranks, len(own), dtype=torch.int64, device="cpu")
        said[self.spec.rank] = values
        if self._tells_each:
            sent = values.repeat(num_ranks, 1)
            self.all_to_all(said.view(torch.uint8), sent.view(torch.uint8), label)
        else:
            self.all_reduce(said, label)
        by_rank: list[list[int]] = said.tolist()
        return by_rank

    def broadcast(self, values: Tensor, label: str, *, source: int = 0) -> None:
        """Replace `values` by those of the group's first rank, or of the one at place `source`."""
        data = values.view(-1).view(torch.uint8)
        if data.numel():
            self._run(BROADCAST, label, data, lambda: dist.broadcast(data, group_src=source, **self._options))

    def scatter(self, part: Tensor, whole: Tensor, label: str, *, source: int = 0) -> None:
        """Fill `part` with this rank's part of `whole` on the rank at place `source`: uint8, shapes (n,), (n N,)."""
        parts = list(whole.chunk(self.spec.world_size)) if self.spec.rank == source else None
        self._run(SCATTER, label, whole, lambda: dist.scatter(part, parts, group_src=source, **self._options))

    def begin_submitted(self) -> None:
        """Count what was submitted to the calling thread, which begins it now."""
        if self.watch is not None:
            self.watch.begin()

    def report(self, error: BaseException) -> None:
        """Tell the ranks that wait in a collective of this board that this rank has failed."""
        self._board.report(error)

    def close(self) -> None:
        """Give the group's threads and connections back, after its last collective. A second call does nothing.

        A group that waits in a collective stays: to end it may wait for that for ever.
        """
        self._is_closed = True
        if self._group is None or self._is_in_collective:
            return
        group, self._group = self._group, None  # its threads end with the last reference
        if is_process_group(group) and not self._is_aborted:  # else it ended with torch's default group
            dist.destroy_process_group(group)

    def begin_abort(self) -> Any:
        """Close the channel, and return its group for `abort_groups`; None where the host waits, which looks up."""
        if self._is_on_host or self._is_closed:
            return None
        self._is_closed = self._is_aborted = True
        return self._group if is_process_group(self._group) else None

    @property
    def _options(self) -> dict[str, Any]:
        return {"group": self._group, "async_op": True}

    def _run(self, kind: str, label: str, data: Tensor, start: Callable[[], Any]) -> None:
        """Issue the collective that `start` begins over `data`, and wait for it, or for the end of a rank before it."""
        if self._is_closed:
            raise StateError(f"{label}: the {kind}: the engine of this model is closed")
        what = f"{label}: the {kind} ({self._who})"
        self._look_before(what)
        try:
            self._is_in_collective = True
            watch = None if self.watch is None or kind in (BROADCAST, SCATTER) else self.watch
            if watch is not None and watch.counts_collectives:
                watch.begin()
            volume = volume_bytes({kind: CollectiveCount(1, data.nbytes)})
            with self.recorder(COLLECTIVES, label, volume):
                self._board.begun[self._place] += 1
                work = start()
                if work is None:
                    raise AssertionError("the process is in no process group")
                self.counter.add(kind, data.nbytes)
                if self._is_on_host:
                    self._wait(work, what, watch)
                else:
                    work.wait()  # makes the stream wait, not the host
            self._is_in_collective = False
        except RankError:
            raise
        except StateError as error:  # a standstill
            self._board.report(error)
            raise
        except BaseException as error:
            if is_interrupt(error):  # the collective is abandoned, and all others of the group
                self._board.report(StateError(f"{type(error).__name__} in {what}"))
                raise
            if not isinstance(error, RuntimeError):
                raise
            text = self._said_within(LOOK_UP_S * 4)
            because = f": {text}" if text is not None else ""
            raise RankError(f"{what} has failed{because} ({first_line(error)})") from error

    def _look_before(self, what: str) -> None:
        """Look for failed ranks, now and then; a wait looks each time, and so does what follows this rank's own end."""
        now_s = time.monotonic()
        if self._board.has_ended or now_s - self._looked_s >= LOOK_AGAIN_S:
            self._look(what, self._board.begun[self._place] + 1)
            self._looked_s = now_s

    def _look(self, what: str, number: int) -> None:
        """Look for ranks that have failed, or have closed without the collective of that number."""
        self._board.look(what, self.members, (self._place, number))

    def _wait(self, work: Any, what: str, watch: Watch | None) -> None:
        look_up = timedelta(seconds=LOOK_UP_S)
        first_s = time.monotonic()
        while True:
            begun_s = time.monotonic()
            try:
                interrupts.wait(work.wait, look_up)
                return
            except RuntimeError:
                # Work that has failed need not be complete: only the time tells its errors from the end of a wait.
                if time.monotonic() - begun_s < LOOK_UP_S / 2:
                    raise
                if work.is_completed():  # since then, perhaps: the error is that of the wait, or its own
                    work.wait()
                    return
            self._look(what, self._board.begun[self._place])
            if watch is not None and time.monotonic() - first_s > WAITED_S:
                watch.look(what)

    def _said_within(self, wait_s: float) -> str | None:
        """Return the text of a failed rank, which may come a little later than its end."""
        until_s = time.monotonic() + wait_s
        while (text := self._board.text(self.members)) is None and time.monotonic() < until_s:
            time.sleep(LOOK_UP_S / 10)
        return text


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranks(Group):
    """The ranks of one model, of several processes; each channel is used by one thread."""

    board: Board

    def __post_init__(self) -> None:
        """Watch the channels in which scripts wait, and those of what they submit: [Note: a standstill]."""
        rank, group = self.control.rank, self.control.members[0]
        submitted = {"orders": self.order, "gradients": self.reductions, "decisions": self.steps}
        standstill = Standstill(self.board, submitted, rank=rank, group=group)
        for name in ("states", "control", "orders"):
            getattr(self, name).watch = Watch(standstill, name)
        for name in ("gradients", "decisions"):  # what is submitted there may take several collectives
            getattr(self, name).watch = Watch(standstill, name, counts_collectives=False)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return False

    def note_write(
        self, *what: object, values: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Count a write of the script's, which all ranks make, in the sum `writes`."""
        number = zlib.crc32(" ".join(map(str, what)).encode())
        if values is not None:
            data = values.detach().to("cpu", dtype or values.dtype).contiguous().view(-1).view(torch.uint8)
            number = zlib.crc32(crc32c_blocks(data).tobytes(), number)
        self.writes.note(number)

    def agree_on_step(self, step: TakenStep) -> Sequence[float]:
        """The squared norms of the parts of the gradient that the ranks have: [Note: what the ranks agree on]."""
        self.decisions.begin_submitted()
        return agreed_totals(self.decisions, self.across, step)

    def collectives(self) -> dict[str, CollectiveCount]:
        """Counts of this rank since the start, by purpose and kind: "gradients reduce-scatter"."""
        channels = [(name, part) for name, part in vars(self).items() if isinstance(part, Channel)]
        return {
            f"{name} {kind}": count
            for name, channel in channels
            for kind, count in channel.counter.counts.items()
        }

    def record(self, recorder: Recorder) -> None:
        """Record the collectives of parameters, gradients and activations, on the threads that issue them."""
        channels = (self.weights, self.updates, self.gradients, self.activations)
        for each in (*channels, self.near_weights, self.near_gradients, self.far_gradients):
            if isinstance(each, Channel):
                each.recorder = recorder

    def lost_text(self) -> str | None:
        """A text about a rank that has failed; None: none has, as far as is known."""
        return self.board.text()

    def abort(self) -> None:
        """End the collectives of the device: [Note: collectives that never end]. Threads may use the channels still."""
        channels = {name: part for name, part in vars(self).items() if isinstance(part, Channel)}
        groups = {name: each.begin_abort() for name, each in channels.items()}
        abort_groups({name: group for name, group in groups.items() if group is not None})

    def close(self) -> None:
        """Close the channels, when no thread uses one any more."""
        for part in vars(self).values():
            if isinstance(part, Channel):
                part.close()


def make_ranks(
    device: torch.device,
    *,
    mesh: MeshConfig | None = None,
    node_ranks: int = 1,
    reduces_codes: bool = False,
    divides_inputs: bool = False,
) -> Ranks:
    """Join the ranks of torch's default process group, all in one order. Raises ConfigError where their groups misfit.

    Args:
        mesh: this rank's place where only some ranks train the same part of the model.
        node_ranks: so many consecutive ones keep copies of weights together; 1: none do.
        reduces_codes: gradients go as codes, within machines and between them. A machine has `node_ranks` if that is
            more than 1, else those that the launcher says.
        divides_inputs: the ranks along the mesh's tensor-parallel axis keep inputs of checkpointed units together.
    """
    world = ShardSpec(dist.get_rank(), dist.get_world_size())
    channels = _Channels(world)
    on_device = dist.get_default_backend_for_device(device)  # NCCL for CUDA, gloo for the CPU
    everyone = channels.of_all("gloo")
    near, far = list[list[int]](), list[list[int]]()
    try:
        keys = {
            "zero_optimization.zero_hpz_partition_size": node_ranks,
            "zero_optimization.zero_quantized_gradients": reduces_codes,
            PARTITION_KEY: divides_inputs,
            "mpu": mesh is not None,
        }
        _expect_same_groups(everyone, mesh, keys)
        local_world_size = _local_world_size(everyone)
        groups = _agreed_groups(everyone, mesh)
        tensor = groups.tensor if groups is not None and divides_inputs else []
        if reduces_codes:
            size = node_ranks if node_ranks > 1 else _agreed_node_size(everyone, local_world_size)
            near, far = consecutive_groups(world, size), groups_of_equal_place(world, size)
    except ConfigError:  # on all ranks
        everyone.close()
        raise
    of_data = channels.of_all if groups is None else functools.partial(channels.of_own, groups=groups.data)
    control = everyone if groups is None else of_data("gloo")
    ranks = Ranks(
        spec=control.spec,
        local_world_size=local_world_size,
        weights=of_data(on_device),
        orders=of_data("gloo"),
        updates=of_data(on_device),
        gradients=of_data(on_device),
        decisions=of_data("gloo"),
        control=control,
        states=of_data("gloo"),
        board=channels.board,
        near_weights=channels.of_part(on_device, consecutive_groups(world, node_ranks)),
        near_gradients=channels.of_part(on_device, near),
        far_gradients=channels.of_part(on_device, far),
        everyone=None if groups is None else everyone,
        across=None if groups is None else channels.of_own("gloo", groups.across),
        part=0 if groups is None else groups.part_of(world.rank),
        tensor_rank=0 if mesh is None else mesh.tensor_rank,
        activations=channels.of_part(on_device, tensor),
        activation_orders=channels.of_part("gloo", tensor),
    )
    _begin_one_by_one(ranks, device)
    return ranks


def make_building_channel(members: Sequence[int] | None) -> Channel:
    """Make the channel in which ranks build a model together. All ranks of torch's default group call this.

    Args:
        members: the ranks that have the same part of the model, this one among them; None: all.

    Raises RankError where a rank has not come, is gone, or is about to start something else; ConfigError unless each
    is in one of the groups that they name.
    """
    world = ShardSpec(dist.get_rank(), dist.get_world_size())
    channels = _Channels(world, "zero.Init")
    if members is None or len(members) == world.world_size:
        return channels.of_all("gloo")
    if is_fake():  # nobody says in which groups the others are
        return channels.of_own("gloo", [members])
    everyone = channels.of_all("gloo")
    try:
        own = [int(rank in members) for rank in range(world.world_size)]
        by_rank = everyone.by_rank(own, "the comparison of data_parallel_group")
        groups = {tuple(rank for rank, is_in in enumerate(row) if is_in) for row in by_rank}
        if sum(map(len, groups)) != world.world_size:
            allowed = f"groups of which each rank is in one: the ranks name {sorted(groups)}"
            raise ConfigError("data_parallel_group", list(members), allowed)
        return channels.of_own("gloo", sorted(groups))
    finally:
        everyone.close()


class _Channels:
    """Makes this rank's channels. All ranks make the same ones, in one order."""

    def __init__(self, spec: ShardSpec, what: str = "an engine") -> None:
        self._spec = spec
        self._is_fake = is_fake()
        self._timeout = None if self._is_fake else timeout_of_process_group()
        self.board = Board(spec.rank)
        if self._timeout is not None:
            make_room_for_groups(spec.world_size)
            self.board.join(spec.world_size, self._timeout, what=what)

    def of_all(self, backend: str) -> Channel:
        """Make a channel of all ranks."""
        return Channel(self._new_group(backend), self._spec, self.board, is_on_host=backend == "gloo")

    def of_part(self, backend: str, groups: Sequence[Sequence[int]]) -> Channel | None:
        """Make the channel of the one of `groups` that this rank is in. All ranks make all of them."""
        own: Channel | None = None
        for members in groups:
            group = self._new_group(backend, [*members])
            if self._spec.rank in members:
                place = ShardSpec(members.index(self._spec.rank), len(members))
                own = Channel(group, place, self.board, is_on_host=backend == "gloo", members=members)
        return own

    def of_own(self, backend: str, groups: Sequence[Sequence[int]]) -> Channel:
        """Make the same where this rank is in one of `groups`."""
        own = self.of_part(backend, groups)
        if own is None:
            raise AssertionError(f"rank {self._spec.rank} is in none of {groups}")
        return own

    def _new_group(self, backend: str, members: list[int] | None = None) -> Any:
        spec, bound = self._spec, without_bound_device() if backend == "gloo" else nullcontext()
        backend = "fake" if self._is_fake else backend
        with named(f"the making of process groups (rank {spec.rank} of {spec.world_size})"), bound:
            return dist.new_group(members, backend=backend, timeout=self._timeout)


def _begin_one_by_one(ranks: Ranks, device: torch.device) -> None:
    """Do the first collective of each kind in each channel of devices. They are not counted.

    NCCL makes a communicator at its first collective, and connects the ranks for a kind at the first one of that. On
    the threads of several channels these would come in any order, beside kernels of another run, which may wait for
    each other. Here they come in one order, with no kernels.
    """
    gathering = (ranks.weights, ranks.updates, ranks.near_weights, ranks.activations)
    reducing = ranks.gradients
    firsts: list[tuple[Collectives, Any]] = [(each, each.all_gather) for each in filter(None, gathering)]
    firsts += [(reducing, reducing.reduce_scatter), (reducing, reducing.all_reduce)]
    for coded in filter(None, (ranks.near_gradients, ranks.far_gradients)):
        received = torch.zeros(coded.spec.world_size, device=device)
        firsts.append((coded, functools.partial(coded.all_to_all, received)))
    for each, begin in firsts:
        begin(torch.zeros(each.spec.world_size, device=device), "the first collective")
        if isinstance(each, Channel):
            each.counter = CollectiveCounter()


def _expect_same_groups(everyone: Channel, mesh: MeshConfig | None, own: Mapping[str, int]) -> None:
    """Raise ConfigError on all ranks unless they are about to make the same groups: else each would wait for others.

    `own` has what these follow from, by key.
    """
    by_rank = everyone.by_rank_unless_same([*own.values()], "the comparison of the ranks' groups")
    if by_rank is None:
        return
    for key, values in zip(own, zip(*by_rank, strict=True), strict=True):
        if odd := everyone.odd_ranks(values):
            allowed = f"the same on all ranks: ranks {odd} have another than rank 0"
            value = type(mesh.source).__name__ if key == "mpu" and mesh is not None else own[key] or None
            raise ConfigError(key, value, allowed)


def _agreed_groups(everyone: Channel, mesh: MeshConfig | None) -> MeshGroups | None:
    """Return the groups of the mesh that all ranks are in; None without one. ConfigError on all where it is none."""
    if mesh is None:
        return None
    if is_fake():  # nobody says in which groups the others are: any will do
        return any_groups(mesh, everyone.rank, everyone.spec.world_size)
    groups = mesh_groups(everyone.by_rank(numbers_of(mesh), "the groups of the mesh"))
    size = next(len(ranks) for ranks in groups.tensor if everyone.rank in ranks)
    if mesh.tensor_size not in (None, size):
        said = f"{mesh.tensor_size} tensor-parallel ranks in {type(mesh.source).__name__}"
        raise ConfigError("mpu", said, f"those that say another place along that axis: {size}")
    return groups


def _local_world_size(everyone: Channel) -> int:
    """Return the number of ranks on this machine: as the launcher says, else those with the same kernel."""
    own, spec = digest(machine()), everyone.spec
    by_rank = None if is_fake() else everyone.by_rank_unless_same([own], "which ranks are on a machine")
    return launched_local_size() or (spec.world_size if by_rank is None else by_rank.count([own]))


def _agreed_node_size(control: Channel, local_world_size: int) -> int:
    """Return the number of ranks of each machine. ConfigError on all ranks where machines have different ones."""
    by_rank = control.by_rank_unless_same([local_world_size], "the comparison of LOCAL_WORLD_SIZE")
    if by_rank is not None or control.spec.world_size % local_world_size:
        allowed = (
            "machines with equally many ranks, or zero_hpz_partition_size beside it: LOCAL_WORLD_SIZE is "
            f"{local_world_size} here, of {control.spec.world_size} ranks"
        )
        raise ConfigError("zero_optimization.zero_quantized_gradients", True, allowed)
    return local_world_size
