"""The group of ranks that train one model together. This process alone is the trivial group, with the same verbs.

[Note: one path for any number of ranks]
What a step does is written once, in the verbs of its group. Those of the trivial group are the identity: they copy
nothing, begin no thread and wait for nobody, and a value of one rank is what all ranks have. The only other group is
that of several processes: process_groups.py.

Beside the verbs one thing differs. Ranks issue collectives in one order, which must follow from facts that all of them
have in common: [Note: collectives in one order] in channel.py. So where one process may go by what is done
already, they go by the order of use alone, and they meet where a script may go on after an error. `is_alone` says which
it is.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offloadzero.errors import RankError, StateError
from offloadzero.observe.collectives import CollectiveCount, tells_each
from offloadzero.ranks.shard import WHOLE, ShardSpec


class OrderSum:
    """A number that is the same for two orders of collectives only if they are the same orders."""

    MODULUS = (1 << 61) - 1

    def __init__(self) -> None:
        self.value = 0
        self.number = 0

    def note(self, index: int) -> None:
        """Count a collective over the record of that number, or a write with that digest, as the next one."""
        self.number += 1
        self.value = (self.value * 1_000_003 + index + 1) % self.MODULUS


def digest(text: str) -> int:
    """A number of 56 bits that ranks compare in the place of `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def machine() -> str:
    """A text that processes have in common which share a machine's memory and cores, also in other containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


class Collectives:
    """The collectives of one thread; those of one rank, as here, leave everything as it is."""

    spec: ShardSpec = WHOLE
    members: Sequence[int] = (0,)  # the ranks of the group

    def all_gather(self, whole: Tensor, label: str) -> None:
        """Fill `whole`, shape (n,), with the parts of all ranks; this rank's part lies in its place there already."""

    def reduce_scatter(self, whole: Tensor, label: str) -> Tensor:  # noqa: ARG002
        """Return the sum over the ranks of this rank's part of `whole`, shape (n,), which is overwritten."""
        return whole

    def all_reduce(self, values: Tensor, label: str, *, largest: bool = False) -> None:
        """Replace `values` by their sums over the ranks, or by the largest ones."""

    def broadcast(self, values: Tensor, label: str, *, source: int = 0) -> None:
        """Replace `values` by those of the group's first rank, or of the one at place `source`."""

    def all_to_all(self, received: Tensor, sent: Tensor, label: str) -> None:  # noqa: ARG002
        """Send each rank its part of `sent` and fill `received` with theirs; both uint8, in the ranks' order."""
        received.copy_(sent)

    def by_rank(self, own: Sequence[int], label: str, *, advice: str = "") -> list[list[int]]:  # noqa: ARG002
        """The numbers of each rank, by rank; in a fake group, where nobody says anything, the others' are zero.

        `advice`: for a rank for which the others do not come.
        """
        return [[*own]]

    def by_rank_unless_same(self, own: Sequence[int], label: str) -> list[list[int]] | None:  # noqa: ARG002
        """The numbers of each rank, by rank; None where all ranks have the same."""
        return None

    def ranks_where(self, flags: Sequence[bool], label: str) -> list[list[int]]:
        """The ranks on which each of `flags` holds. All ranks call this with as many."""
        by_rank = self.by_rank_unless_same([*map(int, flags)], label)
        if by_rank is None:
            return [[*self.members] if flag else [] for flag in flags]
        columns = zip(*by_rank, strict=True)
        return [[rank for rank, it in zip(self.members, each, strict=True) if it] for each in columns]

    def texts(self, own: str, label: str) -> list[str]:
        """The text of each rank, by rank."""
        said = own.encode()
        longest = max(size for (size,) in self.by_rank([len(said)], label))
        by_rank = self.by_rank([*said.ljust(longest, b"\0")], label)
        return [bytes(text).rstrip(b"\0").decode(errors="replace") for text in by_rank]

    def begin_submitted(self) -> None:
        """Count what was submitted to the calling thread, which begins it now."""

    @property
    def rank(self) -> int:
        """This rank among all there are."""
        return self.members[self.spec.rank]

    def odd_ranks(self, by_rank: Sequence[object]) -> list[int]:
        """The ranks whose value differs from that of the group's first one."""
        return [rank for rank, value in zip(self.members, by_rank, strict=True) if value != by_rank[0]]

    def expect_same(self, order: int, writes: int, label: str) -> None:
        """Raise StateError unless all ranks have fetched in the same order, and written the same values, so far."""
        by_rank = self.by_rank_unless_same([order, writes], f"{label}: the comparison of the ranks' orders")
        if by_rank is None:
            return
        orders, writes_by_rank = zip(*by_rank, strict=True)
        if len(set(orders)) > 1:
            raise StateError(
                f"{label}: the ranks fetch weights in different orders: ranks {self.odd_ranks(orders)} in another "
                f"order than rank {self.members[0]} (this is rank {self.rank}). All ranks must run the same forwards, "
                "evaluations too, and read the same weights. If the data choose which modules run (experts), make "
                "these modules one unit: zero.set_z3_leaf_modules(model, [class of the module that holds them]), "
                "zero_optimization.leaf_module or offloadzero.units.patterns"
            )
        self.expect_same_writes(writes_by_rank, label)

    def expect_same_writes(self, by_rank: Sequence[int], label: str) -> None:
        """Raise StateError unless the sums over the values that scripts have written are the same on all ranks."""
        odd = self.odd_ranks(by_rank)
        if odd:
            raise StateError(
                f"{label}: the scripts of ranks {odd} have written other values into parameters, states or gradients "
                f"than that of rank {self.members[0]}, so the parts that the ranks keep no longer fit together. All "
                "ranks must write the same values, or none: load_state_dict(), param.data, "
                "param.grad, zero_grad(), safe_set_full_fp32_param(), load_checkpoint()"
            )


class TakenStep(NamedTuple):
    """What a rank tells the others of the step that it takes: [Note: what the ranks agree on]."""

    number: int
    hypers: object
    writes: int  # the sum of the values that scripts had written when it was taken
    # Of the gradients for which this rank speaks, NaN if one is not finite; None: there are none.
    sq_norm: float | None
    is_divided: bool  # each rank has a part of the gradients


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """The ranks of one model; each member with collectives is used by one thread. By itself it is the trivial group."""

    spec: ShardSpec = WHOLE
    local_world_size: int = 1  # ranks on this machine
    weights: Collectives = field(default_factory=Collectives)  # fetches of units
    orders: Collectives = field(default_factory=Collectives)  # the comparison before each fetch; host memory
    updates: Collectives = field(default_factory=Collectives)  # new weights of units that stay
    gradients: Collectives = field(default_factory=Collectives)
    decisions: Collectives = field(default_factory=Collectives)  # the decisions over steps; host memory
    # Used by the script's thread and that of its backward; host memory:
    control: Collectives = field(default_factory=Collectives)
    states: Collectives = field(default_factory=Collectives)  # states that scripts read; host memory
    # Of a durable run, and of checkpoints that it saves in the background while there are no commits; host memory:
    commits: Collectives = field(default_factory=Collectives)
    near_weights: Collectives | None = None  # fetches, among ranks of a machine that keep copies of weights
    near_gradients: Collectives | None = None  # codes of gradients, within a machine
    far_gradients: Collectives | None = None  # the same, between the ranks of equal place in their machines
    # In a mesh the others are those of this rank's data-parallel group: [Note: the axes of a mesh].
    everyone: Collectives | None = None  # as control, over all ranks
    across: Collectives | None = None  # decisions, among ranks that have the whole model together
    part: int = 0  # the number of the part of the model that the group trains
    tensor_rank: int = 0
    # Inputs of checkpointed units, which the ranks along the tensor-parallel axis keep together.
    activations: Collectives | None = None
    activation_orders: Collectives | None = None  # the comparison before each gather of one; host memory
    order: OrderSum = field(default_factory=OrderSum)
    writes: OrderSum = field(default_factory=OrderSum)  # the sum of the values that scripts write
    # Gradients that were handed to their lane, and steps that are decided over.
    reductions: OrderSum = field(default_factory=OrderSum)
    steps: OrderSum = field(default_factory=OrderSum)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with: [Note: one path for any number of ranks]."""
        return True

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes what its group keeps."""
        return self.spec.rank == 0

    @property
    def num_parts(self) -> int:
        """The number of parts of the model, each with a group of ranks of its own."""
        return 1 if self.across is None else self.across.spec.world_size

    @property
    def agreements(self) -> Collectives:
        """The collectives of what the scripts of all ranks agree on."""
        return self.control if self.everyone is None else self.everyone

    def note_write(
        self, *what: object, values: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Count a write of the script's, which all ranks make: another one is found at the next comparison.

        `values` are compared as those of `dtype`, if that is given.
        """

    # --- agreements; all ranks call these together ---

    def agree(self, values: Tensor) -> None:
        """Overwrite a host tensor with that of the first rank that trains the same part of the model."""
        self.control.broadcast(values, "the first values")

    def agree_on_step(self, step: TakenStep) -> Sequence[float]:
        """The squared norms of the parts of the gradient that the ranks have; none where no rank has a gradient."""
        return [] if step.sq_norm is None else [step.sq_norm]

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the least of each value on any rank."""
        negative = -torch.tensor(values, dtype=torch.int64, device="cpu")
        self.agreements.all_reduce(negative, "the least of all ranks", largest=True)
        return [-value for value in negative.tolist()]

    def agreed_number(self) -> int:
        """A number that all ranks have in common, and that no other call gives again; 0 with one rank."""
        if self.is_alone:
            return 0
        number = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device="cpu")
        self.agreements.broadcast(number, "a number for all ranks")
        return int(number)

    def departures(self, *, of_all: Mapping[str, str], of_part: Mapping[str, str]) -> dict[str, list[int]]:
        """The ranks whose text differs from the first one's, by key. All ranks have the same keys.

        `of_part` are compared among the ranks that train the same part of the model alone.
        """
        if self.everyone is None:
            return self._departures(self.control, {**of_all, **of_part})
        return self._departures(self.everyone, of_all) | self._departures(self.control, of_part)

    @staticmethod
    def _departures(channel: Collectives, texts: Mapping[str, str]) -> dict[str, list[int]]:
        own = [digest(text) for text in texts.values()]
        by_rank = channel.by_rank_unless_same(own, f"the comparison of the ranks' {' and '.join(texts)}")
        if by_rank is None:
            return {key: [] for key in texts}
        by_text = zip(*by_rank, strict=True)
        return {key: channel.odd_ranks(said) for key, said in zip(texts, by_text, strict=True)}

    def is_on_some(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank."""
        flags = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        self.agreements.all_reduce(flags, "a question to all ranks", largest=True)
        return bool(flags)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Raise RankError at the end of the block where another rank has failed in it. All ranks have such a block."""
        spec = self.agreements.spec
        failed = torch.zeros(spec.world_size, dtype=torch.uint8, device="cpu")
        failed[spec.rank] = 1
        try:
            yield
            failed[spec.rank] = 0
        finally:
            self.agreements.all_reduce(failed, what)
        ranks = failed.nonzero().view(-1).tolist()
        if ranks:
            raise RankError(f"{what} has failed on ranks {ranks}, and not on rank {spec.rank}")

    # --- its life ---

    def collectives(self) -> dict[str, CollectiveCount]:
        """Counts of this rank since the start, by purpose and kind: "gradients reduce-scatter"."""
        return {}

    def lost_text(self) -> str | None:
        """A text about a rank that has failed; None: none has, as far as is known."""
        return None

    def abort(self) -> None:
        """End the collectives of the device: [Note: collectives that never end]. Threads may use the channels still."""

    def close(self) -> None:
        """Leave the other ranks, when no thread uses a channel any more."""


def gather_parts(channel: Collectives, whole: Tensor, parts: Mapping[int, Tensor], label: str) -> None:
    """Fill the host tensor `whole`, shape (n,), with the parts of all ranks, which have agreed that this is next.

    A few ranks send theirs one after the other. Of many ranks each adds its own to zeros, on which all work at once.

    Args:
        parts: views of `whole` which together are all of it, by the rank that has the values; without those of none.
    """
    if tells_each(channel.spec.world_size):
        for rank, part in parts.items():
            channel.broadcast(part, label, source=rank)
        return
    for rank, part in parts.items():
        if rank != channel.spec.rank:
            part.zero_()
    channel.all_reduce(whole.view(torch.uint8), label)
