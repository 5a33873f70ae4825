"""The trace of many equal blocks from those of a few.

[Note: blocks that are traced alike]
A trace takes time in proportion to its operations, and a search for a change asks for six of them. In a model of a
shape all blocks are equal: with each, the log of a micro batch gets the same events once more in forward and once more
in backward. Where they come in is seen in the logs of two and of three blocks: a single one is both the first, which
sends the tensors that all checkpointed blocks get, and the last. The log of four, which is traced as well, must be the
one that follows; then the log of many is known to the last event. Where it is not, or other modules than all blocks are
checkpointed, all blocks are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import nn

from offloadzero.planning.activation_trace import MicroBatchTrace, TraceLog, log_micro_batch, trace_of

FEW = (2, 3, 4)
MIN_BLOCKS = 10  # of fewer a trace is as fast

T = TypeVar("T")


def trace_blocks(
    build: Callable[[int], nn.Module],
    num_blocks: int,
    *,
    dtype: torch.dtype | None,
    micro_batch: int,
    sequence: int,
    checkpointed: Collection[str] = (),
    on_cpu: bool = True,
) -> MicroBatchTrace:
    """Return `trace_micro_batch` of `build(num_blocks)`: [Note: blocks that are traced alike].

    `build` makes a model of so many equal blocks on the meta device. Raises TraceError.
    """

    def log(number: int, names: Collection[str]) -> TraceLog:
        return log_micro_batch(
            build(number),
            dtype=dtype,
            micro_batch=micro_batch,
            sequence=sequence,
            checkpointed=names,
            on_cpu=on_cpu,
        )

    container = next(iter(checkpointed), "").rpartition(".")[0]
    is_known = not checkpointed or set(checkpointed) == _names(container, num_blocks)
    if num_blocks >= MIN_BLOCKS and is_known:
        short, longer, check = (
            log(number, _names(container, number) if checkpointed else ()) for number in FEW
        )
        if _grown(short, longer, 2) == check:
            found = _grown(short, longer, num_blocks - FEW[0])
            if found is not None:
                return trace_of(found)
    return trace_of(log(num_blocks, checkpointed))


def _names(container: str, number: int) -> set[str]:
    return {f"{container}.{index}" for index in range(number)}


def _grown(short: TraceLog, long: TraceLog, times: int) -> TraceLog | None:
    """Return the log of `times` more blocks than in `short`, `long` being that of one more; None if they differ."""
    events = _inserted(short.events, long.events, times)
    calls = _inserted(short.calls, long.calls, times)
    if events is None or calls is None or short.num_tokens != long.num_tokens:
        return None
    return TraceLog(short.num_tokens, events, calls, short.uncounted | long.uncounted)


def _inserted(short: Sequence[T], long: Sequence[T], times: int) -> list[T] | None:
    """Return `short` with what `long` has more, at up to two places, inserted so many times."""
    num_more, most = len(long) - len(short), len(short)
    start = next((i for i in range(most) if short[i] != long[i]), most)
    end = next((i for i in range(most - start) if short[-1 - i] != long[-1 - i]), most - start)
    middle = list(short[start : most - end])
    for first in range(num_more + 1):
        second = start + first + len(middle)
        if list(long[start + first : second]) == middle:
            return [
                *short[:start],
                *list(long[start : start + first]) * times,
                *middle,
                *list(long[second : len(long) - end]) * times,
                *short[most - end :],
            ]
    return None
