"""The ranks that train one model together, each a process: how they join, and what they agree on.

[Note: what the ranks agree on]
At the end of each backward the ranks tell each other which parameters have got a gradient, and whether the window
closes: a parameter that some rank has used has a gradient on all of them, zeros where it was not used, as with DDP. At
the step they add up the squares of their shards, so that norm, clipping, loss scale and the skip of a step that is not
finite are one decision. The number of the step, a digest of its hyperparameters and one of the values that scripts have
written come along: ranks that differ in one of them stop. In a mesh each group then tells its sum to the groups of the
other parts of the model: [Note: the axes of a mesh].

[Note: descriptors of ranks]
Each of gloo's groups has a connection to every other rank. An engine has some groups in host memory, so with a few
hundred ranks their connections alone are more descriptors than the 1,024 that a process may usually have at first. It
may raise that limit itself, up to a second one, which is higher as a rule. Where a connection has no descriptor, gloo
ends the process.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offloadzero.config import PARTITION_KEY
from offloadzero.config.schema import MeshConfig
from offloadzero.core.launch import launched_local_size
from offloadzero.core.torch_private import timeout_of_process_group, without_bound_device
from offloadzero.errors import ConfigError, StateError, abbreviated
from offloadzero.memory.checksums import crc32c_blocks
from offloadzero.observe.collectives import CollectiveCount, CollectiveCounter
from offloadzero.ranks.channel import Channel, Recorder, abort_groups
from offloadzero.ranks.deadlock import DeadlockDetector, Watch
from offloadzero.ranks.failure_store import FailureStore, is_fake, named
from offloadzero.ranks.group import Collectives, Group, TakenStep, digest, machine
from offloadzero.ranks.mesh import MeshGroups, any_groups, mesh_groups, numbers_of
from offloadzero.ranks.shard import ShardSpec, consecutive_groups, groups_of_equal_place

_NO_GRADIENTS = -1.0  # told in the place of a sum of squares

LEAST_GROUPS = 4  # of one engine, in host memory
MOST_GROUPS = 14  # of one engine, with its parts of the device: on the CPU these are gloo's, too
BESIDE_CONNECTIONS = 5  # of one group
SPARE = 256  # files of the script, of the drive, of checkpoints

# The least timeout of the collectives of commits: a drive that stands still keeps background threads waiting alone.
_COMMITS_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranks(Group):
    """The ranks of one model, of several processes; each channel is used by one thread."""

    failure_store: FailureStore

    def __post_init__(self) -> None:
        """Watch the channels in which scripts wait, and those of what they submit: [Note: deadlocks]."""
        rank, group = self.control.rank, self.control.members[0]
        submitted = {"orders": self.order, "gradients": self.reductions, "decisions": self.steps}
        detector = DeadlockDetector(self.failure_store, submitted, rank=rank, group=group)
        for name in ("states", "control", "orders"):
            getattr(self, name).watch = Watch(detector, name)
        for name in ("gradients", "decisions"):  # what is submitted there may take several collectives
            getattr(self, name).watch = Watch(detector, name, counts_collectives=False)

    @property
    def is_alone(self) -> bool:
        return False

    def note_write(
        self, *what: object, values: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        number = zlib.crc32(" ".join(map(str, what)).encode())
        if values is not None:
            data = values.detach().to("cpu", dtype or values.dtype).contiguous().view(-1).view(torch.uint8)
            number = zlib.crc32(crc32c_blocks(data).tobytes(), number)
        self.writes.note(number)

    def agree_on_step(self, step: TakenStep) -> Sequence[float]:
        """The squared norms of the parts of the gradient that the ranks have: [Note: what the ranks agree on]."""
        decisions, number = self.decisions, step.number
        decisions.begin_submitted()
        own = _NO_GRADIENTS if step.sq_norm is None else step.sq_norm
        totals, (hypers, writes) = _told(decisions, own, number, [digest(repr(step.hypers)), step.writes])
        if odd := decisions.odd_ranks(hypers):
            raise StateError(
                f"step {number}: the hyperparameters of ranks {odd} are not those of rank {decisions.members[0]}; "
                f"rank {decisions.rank} has {abbreviated(step.hypers)}. All ranks must set the same ones: a "
                "scheduler that goes by the loss needs the mean over the ranks"
            )
        decisions.expect_same_writes(writes, f"step {number}")
        of_part = totals if step.is_divided else totals[:1]
        if self.across is None:
            return of_part
        own = math.fsum(of_part) if all(map(math.isfinite, of_part)) else math.nan
        return _told(self.across, own if of_part else _NO_GRADIENTS, number, [])[0]

    def collectives(self) -> dict[str, CollectiveCount]:
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
        return self.failure_store.text()

    def abort(self) -> None:
        channels = {name: part for name, part in vars(self).items() if isinstance(part, Channel)}
        groups = {name: each.begin_abort() for name, each in channels.items()}
        abort_groups({name: group for name, group in groups.items() if group is not None})

    def close(self) -> None:
        for part in vars(self).values():
            if isinstance(part, Channel):
                part.close()


def _told(
    channel: Collectives, total: float, number: int, more: Sequence[int]
) -> tuple[list[float], list[list[int]]]:
    """Return the sums of the ranks that have gradients, and `more` of all ranks, each by rank.

    Raises StateError where they take steps of other numbers.
    """
    # The bits, which arrive as they are, NaN too.
    bits = int(torch.tensor(total, dtype=torch.float64, device="cpu").view(torch.int64))
    by_rank = channel.by_rank([bits, number, *more], f"step {number}")
    totals, steps, *others = zip(*by_rank, strict=True)
    if len(set(steps)) > 1:
        raise StateError(f"the ranks take different steps: {dict(zip(channel.members, steps, strict=True))}")
    values = torch.tensor(totals, device="cpu").view(torch.float64).tolist()
    return [value for value in values if value != _NO_GRADIENTS], [*map(list, others)]


def make_ranks(
    device: torch.device,
    *,
    mesh: MeshConfig | None = None,
    node_ranks: int = 1,
    reduces_codes: bool = False,
    divides_inputs: bool = False,
    commits: bool = False,
) -> Ranks:
    """Join the ranks of torch's default process group, all in one order. Raises ConfigError where their groups misfit.

    Args:
        mesh: this rank's place where only some ranks train the same part of the model.
        node_ranks: so many consecutive ones keep copies of weights together; 1: none do.
        reduces_codes: gradients go as codes, within machines and between them. A machine has `node_ranks` if that is
            more than 1, else those that the launcher says.
        divides_inputs: the ranks along the mesh's tensor-parallel axis keep inputs of checkpointed units together.
        commits: the run is durable.
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
            "offloadzero.durable": commits,
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
        commits=channels.of_all("gloo", least_timeout=_COMMITS_TIMEOUT) if commits else Collectives(),
        failure_store=channels.failure_store,
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
        self.failure_store = FailureStore(spec.rank)
        if self._timeout is not None:
            make_room_for_groups(spec.world_size)
            self.failure_store.join(spec.world_size, self._timeout, what=what)

    def of_all(self, backend: str, *, least_timeout: timedelta = timedelta()) -> Channel:
        """Make a channel of all ranks, with the timeout of the default group, or a longer one."""
        group = self._new_group(backend, least_timeout=least_timeout)
        return Channel(group, self._spec, self.failure_store, is_on_host=backend == "gloo")

    def of_part(self, backend: str, groups: Sequence[Sequence[int]]) -> Channel | None:
        """Make the channel of the one of `groups` that this rank is in. All ranks make all of them."""
        own: Channel | None = None
        for members in groups:
            group = self._new_group(backend, [*members])
            if self._spec.rank in members:
                place = ShardSpec(members.index(self._spec.rank), len(members))
                own = Channel(group, place, self.failure_store, is_on_host=backend == "gloo", members=members)
        return own

    def of_own(self, backend: str, groups: Sequence[Sequence[int]]) -> Channel:
        """Make the same where this rank is in one of `groups`."""
        own = self.of_part(backend, groups)
        if own is None:
            raise AssertionError(f"rank {self._spec.rank} is in none of {groups}")
        return own

    def _new_group(
        self, backend: str, members: list[int] | None = None, *, least_timeout: timedelta = timedelta()
    ) -> Any:
        spec, bound = self._spec, without_bound_device() if backend == "gloo" else nullcontext()
        backend = "fake" if self._is_fake else backend
        timeout = None if self._timeout is None else max(self._timeout, least_timeout)
        with named(f"the making of process groups (rank {spec.rank} of {spec.world_size})"), bound:
            return dist.new_group(members, backend=backend, timeout=timeout)


def make_room_for_groups(num_ranks: int) -> None:
    """Raise the limit of this process as far as the groups of an engine need it, and as it may be raised.

    ConfigError: it may not be raised as far as any engine over so many ranks needs it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, of_group = len(os.listdir("/proc/self/fd")), num_ranks + BESIDE_CONNECTIONS
    least, needed = used + LEAST_GROUPS * of_group, used + MOST_GROUPS * of_group + SPARE
    if hard != resource.RLIM_INFINITY:
        if hard < least:
            allowed = f"{needed} or more for {num_ranks} ranks: the connections of their groups are {least} at least"
            raise ConfigError("ulimit -Hn", hard, allowed)
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
