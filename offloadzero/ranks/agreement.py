"""The decision over a step as several ranks come to it: one, from the gradients of all.

[Note: what the ranks agree on]
At the end of each backward the ranks tell each other which parameters have got a gradient, and whether the window
closes: a parameter that some rank has used has a gradient on all of them, zeros where it was not used, as with DDP. At
the step they add up the squares of their shards, so that norm, clipping, loss scale and the skip of a step that is not
finite are one decision. The number of the step, a digest of its hyperparameters and one of the values that scripts have
written come along: ranks that differ in one of them stop. In a mesh each group then tells its sum to the groups of the
other parts of the model: [Note: the axes of a mesh].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from offloadzero.errors import StateError, abbreviated
from offloadzero.ranks.comparing import digest
from offloadzero.ranks.group import Collectives, TakenStep

_NO_GRADIENTS = -1.0  # told in the place of a sum of squares


def agreed_totals(decisions: Collectives, across: Collectives | None, step: TakenStep) -> Sequence[float]:
    """The squared norms of the parts of the gradient that the ranks have told over `decisions`, and `across` groups."""
    own = _NO_GRADIENTS if step.sq_norm is None else step.sq_norm
    more = [digest(repr(step.hypers)), step.writes]
    totals, (hypers, writes) = _told(decisions, own, step.number, more)
    if odd := decisions.odd_ranks(hypers):
        raise StateError(
            f"step {step.number}: the hyperparameters of ranks {odd} are not those of rank {decisions.members[0]}; "
            f"rank {decisions.rank} has {abbreviated(step.hypers)}. All ranks must set the same ones: a "
            "scheduler that goes by the loss needs the mean over the ranks"
        )
    decisions.expect_same_writes(writes, f"step {step.number}")
    of_part = totals if step.is_divided else totals[:1]
    if across is None:
        return of_part
    own = math.fsum(of_part) if all(map(math.isfinite, of_part)) else math.nan
    return _told(across, own if of_part else _NO_GRADIENTS, step.number, [])[0]


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
