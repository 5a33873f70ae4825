"""The measurements of computation with other work beside it, where the CPU is the device.

[Note: work beside the computation]
The threads of an operation end together: what runs beside them on one core holds all of them up, for as long as it
takes by itself and longer, as it shares caches and memory with them, and threads that wake move others to another core.
The other way round a drive delivers less while all cores compute. Copies and updates are measured in parts of a unit's
size with pauses, as in training, since work that goes on and on costs less by byte; the drive with the traffic of
optimizer states. Each is measured in turn with the computation alone: a machine is not as fast from one minute to the
next. Where a micro batch takes long there are fewer turns. By itself a drive moves so little that writes are left for
the time beside the computation, however fast it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from offloadzero.cli.bench.adam import Records
from offloadzero.cli.bench.points import MIB
from offloadzero.cli.bench.scratch import ending_signals_raise, scratch_files
from offloadzero.cli.bench.traffic import Limits, OptimizerStep, Pump, RandomMemory, WriteAllowance, wait_for
from offloadzero.io.engine import AioEngine
from offloadzero.native import kernels
from offloadzero.planning.step.rates import COMPACT, FP32

NUM_TURNS, MOST_S = 5, 8.0  # no turn begins later than that; there is one in any case
TURN_S, MOST_TURN_S = 0.4, 2.0  # of four micro batches; at most, if not even one takes longer
COPY_BYTES, COPY_PAUSE_S = 16 * MIB, 0.005
UPDATED_PARAMS, UPDATE_PAUSE_S = 1 << 23, 0.02
FILE_BYTES, MEMORY_BYTES = 512 * MIB, 64 * MIB
STATE_ELEMENTS = 1 << 20  # of a record in the drive's traffic
WRITE_LIMIT_BYTES = 8 << 30
LEAST_S = 1e-15  # by byte: nothing that could be measured

Compute = Callable[[], object]  # computes a micro batch
Work = Callable[[float], float]  # works for so many seconds, and returns its bytes per second


class DriveBeside(NamedTuple):
    """A drive and a computation at the same time."""

    hold_s_per_byte: float  # by which the computation takes longer
    share: float  # of the drive's rate, that it has there


def copies_beside(compute: Compute) -> float:
    """Return the seconds that computation loses for each byte of copies in host memory beside it."""
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    copies = _with_pauses(lambda: kernels.copy(target, source), source.nbytes, COPY_PAUSE_S)
    return _hold_s_per_byte(compute, copies)


def updates_beside(compute: Compute) -> dict[str, float]:
    """Return the seconds that computation loses for each byte that updates beside it move, by state layout."""
    records, found = Records(UPDATED_PARAMS), {}
    for layout in (FP32, COMPACT):
        case, update = records.adam(layout, kernels.active_isa(), len(os.sched_getaffinity(0)))
        num_bytes = int(case.bytes_per_param * case.num_params)
        found[layout] = _hold_s_per_byte(compute, _with_pauses(update, num_bytes, UPDATE_PAUSE_S))
    return found


def drive_beside(compute: Compute, path: Path) -> DriveBeside | None:
    """Measure the drive of a directory. None: it has moved nothing in a turn. Raises AioError."""
    memory, allowance = RandomMemory(MEMORY_BYTES), WriteAllowance(WRITE_LIMIT_BYTES)
    with ending_signals_raise(), scratch_files([str(path)]) as files:
        engine = AioEngine()
        try:
            engine.register_parts(memory.bytes)
            file = engine.open(files[0].path)
            for offset in range(0, FILE_BYTES, MEMORY_BYTES):
                wait_for(engine.write(file, memory.bytes, offset=offset))
            files[0].num_bytes = FILE_BYTES
            states = OptimizerStep(files, num_elements=STATE_ELEMENTS, memory=memory)

            def moves(seconds: float, max_bytes: int | None = None) -> float:
                limits = Limits(seconds, time.monotonic() + 2 * seconds, max_bytes)
                count = Pump(engine, [file], states, allowance).run(limits)
                return (count.bytes_read + count.bytes_written) / count.seconds if count.seconds else 0.0

            return _drive_beside(
                compute, moves, by_itself=lambda seconds: moves(seconds, WRITE_LIMIT_BYTES // NUM_TURNS)
            )
        finally:
            engine.close(cancel=True)


def _drive_beside(compute: Compute, moves: Work, *, by_itself: Work) -> DriveBeside | None:
    holds, shares = list[float](), list[float]()
    turn_s = _turn_s(compute)
    with ThreadPoolExecutor(1) as pool:
        for _ in _turns():
            rate = pool.submit(by_itself, turn_s).result()
            hold_s, beside = _turn(compute, moves, turn_s, pool)
            if not rate or not beside:
                break  # as much is written as may be, or the drive hangs
            holds.append(hold_s)
            shares.append(beside / rate)
    return DriveBeside(max(LEAST_S, median(holds)), min(1.0, median(shares))) if holds else None


def _hold_s_per_byte(compute: Compute, work: Work) -> float:
    turn_s = _turn_s(compute)
    with ThreadPoolExecutor(1) as pool:
        return max(LEAST_S, median(_turn(compute, work, turn_s, pool)[0] for _ in _turns()))


def _turn_s(compute: Compute) -> float:
    compute()  # the first time chooses the code
    one_s = _micro_batch_s(compute, lambda: True)
    return max(TURN_S, one_s, min(4 * one_s, MOST_TURN_S))


def _turns() -> Iterator[int]:
    begun_s = time.monotonic()
    for number in range(NUM_TURNS):
        if number and time.monotonic() - begun_s > MOST_S:
            return
        yield number


def _turn(compute: Compute, work: Work, turn_s: float, pool: ThreadPoolExecutor) -> tuple[float, float]:
    """Compute alone, then beside the work: return the seconds lost by byte, and the work's bytes per second there."""
    alone_s = _micro_batch_s(compute, pool.submit(time.sleep, turn_s).done)
    working = pool.submit(work, turn_s)
    beside_s = _micro_batch_s(compute, working.done)
    rate = working.result()
    return (1.0 - alone_s / beside_s) / rate if rate else 0.0, rate


def _with_pauses(call: Callable[[], object], num_bytes: int, pause_s: float) -> Work:
    """Return work that makes a call, which moves so many bytes, again and again."""

    def work(seconds: float) -> float:
        moved, begun_s = 0, time.perf_counter()
        while (took_s := time.perf_counter() - begun_s) < seconds:
            call()
            moved += num_bytes
            time.sleep(pause_s)
        return moved / took_s

    return work


def _micro_batch_s(compute: Compute, is_over: Callable[[], bool]) -> float:
    """Return the seconds of a micro batch until then; at least one is computed."""
    times_s = list[float]()
    while not times_s or not is_over():
        begun_s = time.perf_counter()
        compute()
        times_s.append(time.perf_counter() - begun_s)
    return median(times_s)
