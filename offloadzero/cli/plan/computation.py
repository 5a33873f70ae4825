"""The measurements of computation for `offloadzero plan`: a block, the planned micro batch, and work beside it.

[Note: the micro batch is measured]
Forward and backward are called in turn, as in a training, and gradients are dropped as they are complete: a backward
that runs again and again on one graph, and keeps its gradients, is a fifth slower.

A model of a shape with many bytes is measured with one block and with three: what two blocks add, as often as there are
blocks, and the rest once, head and loss, is the micro batch. The weights of few small blocks would lie in the caches of
a CPU, so a smaller model is measured whole, and so is one that is no shape. Both only where that takes no more than
half of the free memory; where a call would take longer than MOST_S, with fewer samples, then with shorter ones, which
changes a rate little. One that would take longer than LONGEST_S even so is not measured: blocks of a hundred billion
parameters on a CPU, or any in bf16 on a CPU that is slow in it. Weights are the same few numbers again and again, since
drawing them takes seconds for each billion; what products take does not depend on them. So a model is made without
memory, as for its plan, and then given some.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from offloadzero.cli.bench.adam import Records
from offloadzero.cli.bench.traffic import (
    MIB,
    NUM_CHUNKS_IN_FLIGHT,
    RandomMemory,
    ScratchFile,
    Traffic,
    Workload,
    WriteAllowance,
    chunk_segments,
    pump,
    wait_for,
)
from offloadzero.errors import OffloadError
from offloadzero.io.engine import AioEngine
from offloadzero.memory.device import Device
from offloadzero.native import kernels
from offloadzero.observe.texts import duration_text
from offloadzero.planning.machine import usable_cores
from offloadzero.planning.model.shapes import LLAMA, ModelShape, ModelSource
from offloadzero.planning.model.trace import (
    MicroBatchTrace,
    TraceError,
    give_storages,
    loss_of_ids,
    trace_micro_batch,
)
from offloadzero.planning.step.forecast import COMPACT, FP32, Computation

NUM_SAMPLES = 6
ENOUGH_S = 4.0  # of one measurement: what takes that long is not repeated
MOST_S = 2.0  # of a micro batch, by the rate of a standard block
LONGEST_S = 10.0  # of one that is shortened as far as it may be; it runs twice at least
FEW, MORE = 1, 3  # blocks of a model of a shape
MOST_WHOLE_BYTES = 1 << 30  # of its weights
LEAST_TOKENS = 128  # of a shortened sample
_NUM_DRAWN = 1 << 20  # numbers that are drawn for weights


class NotMeasuredError(OffloadError, RuntimeError):
    """The model's own computation cannot be measured here."""


class _Seconds(NamedTuple):
    """The seconds of forward and backward: on a clock, and of the cores."""

    forward: float
    backward: float
    forward_cores: float
    backward_cores: float


def best_s(
    call: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    *,
    finish: Callable[[], object] = lambda: None,
) -> float:
    """Return the seconds of the shortest of some calls: other load only makes calls longer.

    `finish` waits for launched work. The bound that a run is compared with takes the best rates, too:
    [Note: the bound] in observe/bound.py.
    """
    return min(times_s for ((times_s,),) in _samples((call,), (clock,), finish))


def _samples(
    calls: Sequence[Callable[[], object]],
    clocks: Sequence[Callable[[], float]],
    finish: Callable[[], object],
) -> list[list[list[float]]]:
    """Make some calls in turn a few times. Returns the seconds by turn, call and clock; the first clock ends it.

    A clock of the processor's time may tick in hundredths of a second: where it has not, it is the time on a clock.
    """
    turns = list[list[list[float]]]()
    while len(turns) < NUM_SAMPLES and sum(of_call[0] for turn in turns for of_call in turn) < ENOUGH_S:
        turn = []
        for call in calls:
            begun_s, now_s = [clock() for clock in clocks], time.perf_counter()
            call()
            finish()
            took_s = time.perf_counter() - now_s
            turn.append([clock() - begun or took_s for clock, begun in zip(clocks, begun_s, strict=True)])
        turns.append(turn)
    return turns


def cores_s(num_threads: int | None = None) -> float:
    """Return the CPU time of this process over the cores that it computes on, whatever else runs there.

    These are all of its cores; with fewer threads the idle cores do not make them faster.
    """
    num_cores = usable_cores()
    return time.process_time() / (num_cores if num_threads is None else min(num_threads, num_cores))


def block_rates(device: Device, dtype: torch.dtype) -> Computation:
    """Return the rates of a block's forward and of its backward: of a width of 4096, on the CPU 1024.

    Each has its own: the products of backward have other layouts, for which a library may lack the fast code. So have
    those in bf16 on a CPU without instructions for it: the product of a gradient with a weight takes the time of ten.
    """
    width, num_tokens = (1024, 256) if device.free_bytes() is None else (4096, 4096)
    shape = _block_shape(width)
    with torch.device("meta"):
        empty = shape.build()
    trace = trace_micro_batch(empty, dtype=dtype, micro_batch=1, sequence=num_tokens)
    model = shape.build().to(device.torch_device, dtype)
    return _rates(
        trace.forward_flops, trace.backward_flops, _time_micro_batches(model, device, 1, num_tokens), device
    )


def block_micro_batch(dtype: torch.dtype) -> Callable[[], object]:
    """Return a call that computes a micro batch of two standard blocks on the CPU, forward and backward."""
    model = _block_shape(1024, num_blocks=2).build().to(dtype)
    ids = _ids(model, 1, 256, torch.device("cpu"))
    return lambda: loss_of_ids(model, ids).backward()


def _block_shape(width: int, *, num_blocks: int = 1) -> ModelShape:
    return ModelShape(LLAMA, width, num_blocks, width // 128, 128, 11 * width // 4, width // 128)


def micro_batch_rates(
    source: ModelSource,
    device: Device,
    dtype: torch.dtype,
    *,
    micro_batch: int,
    sequence: int,
    room: int,
    block: Computation,
) -> Computation:
    """[Note: the micro batch is measured].

    Args:
        room: bytes that are free on the device.
        block: the rates of a standard block, from which follows how long it would take.

    Raises:
        NotMeasuredError: it takes too much memory or too long, or its own code fails.
    """
    weight_bytes = sum(param.numel() for param in source.on_meta().parameters()) * dtype.itemsize
    numbers: tuple[int, ...] = (source.num_blocks,)
    if source.num_blocks > MORE and weight_bytes > MOST_WHOLE_BYTES:
        numbers = (FEW, MORE)
    # What cannot be measured is refused before it takes time: a trace of many blocks takes seconds.
    num_params = sum(param.numel() for param in source.on_meta(numbers[-1]).parameters())

    def expect_room(activation_bytes: int = 0) -> None:  # beside weights and gradients
        if 2 * dtype.itemsize * num_params + activation_bytes > room / 2:
            raise NotMeasuredError("it takes more than half of the memory")

    expect_room()
    largest = _trace(source, numbers[-1], device, dtype, micro_batch, sequence)
    shape = _smaller_shape(micro_batch, sequence, MOST_S / _expected_s(largest, block))
    if shape != (micro_batch, sequence):
        largest = _trace(source, numbers[-1], device, dtype, *shape)
    expected_s = _expected_s(largest, block)
    if expected_s > LONGEST_S:
        raise NotMeasuredError(f"{largest.num_tokens} tokens alone would take {duration_text(expected_s)}")
    expect_room(largest.peak_bytes)
    traces = [*(_trace(source, number, device, dtype, *shape) for number in numbers[:-1]), largest]
    seconds = [_measured(source, number, device, dtype, *shape) for number in numbers]
    if len(numbers) == 1:
        return _rates(largest.forward_flops, largest.backward_flops, seconds[0], device)
    times = (source.num_blocks - FEW) / (MORE - FEW)
    (few, more), (few_s, more_s) = traces, seconds
    if any(of_more <= of_few for of_few, of_more in zip(few_s, more_s, strict=True)):
        raise NotMeasuredError(f"{MORE} blocks took no longer than {FEW}: something else ran meanwhile")
    return _rates(
        _grown(few.forward_flops, more.forward_flops, times),
        _grown(few.backward_flops, more.backward_flops, times),
        _Seconds(*(_grown(*both, times) for both in zip(few_s, more_s, strict=True))),
        device,
    )


def _expected_s(trace: MicroBatchTrace, block: Computation) -> float:
    return trace.forward_flops / block.forward + trace.backward_flops / block.backward


def _smaller_shape(micro_batch: int, sequence: int, share: float) -> tuple[int, int]:
    """Return the shape of a micro batch with about that share of the tokens, if it is less than all of them."""
    if share >= 1.0:
        return micro_batch, sequence
    samples = max(1, int(micro_batch * share))
    share *= micro_batch / samples
    return samples, max(min(sequence, LEAST_TOKENS), min(sequence, int(sequence * share)))


def _grown(few: float, more: float, times: float) -> float:
    return few + (more - few) * times


def _trace(
    source: ModelSource, number: int, device: Device, dtype: torch.dtype, micro_batch: int, sequence: int
) -> MicroBatchTrace:
    try:
        trace = trace_micro_batch(
            source.on_meta(number),
            dtype=dtype,
            micro_batch=micro_batch,
            sequence=sequence,
            on_cpu=device.free_bytes() is None,
        )
    except TraceError as error:
        raise NotMeasuredError(str(error)) from error
    if trace.uncounted:
        raise NotMeasuredError(f"what {', '.join(trace.uncounted)} computes is not counted")
    if not trace.forward_flops or not trace.backward_flops:
        raise NotMeasuredError("it computes nothing that is counted")
    return trace


def _measured(
    source: ModelSource, number: int, device: Device, dtype: torch.dtype, micro_batch: int, sequence: int
) -> _Seconds:
    try:
        model = source.on_meta(number).to(dtype)
        with device.torch_device:
            give_storages(model)  # a tied head stays one, as it does not with to_empty()
        for param in model.parameters():
            _fill(param)
        return _time_micro_batches(model, device, micro_batch, sequence)
    except OffloadError:
        raise
    except Exception as error:  # any error of the model's code
        raise NotMeasuredError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _fill(param: nn.Parameter) -> None:
    """Draw a few numbers and copy them to all places: a copy runs on all cores, drawing on one."""
    with torch.no_grad():
        drawn, *others = param.view(-1).split(_NUM_DRAWN)
        drawn.uniform_(-0.02, 0.02) if drawn.is_floating_point() else drawn.zero_()  # of codes
        for part in others:
            part.copy_(drawn[: part.numel()])


def _time_micro_batches(model: nn.Module, device: Device, micro_batch: int, sequence: int) -> _Seconds:
    """Return the medians of some micro batches: a forecast is of a step like most of them."""
    ids = _ids(model, micro_batch, sequence, device.torch_device)
    losses = list[torch.Tensor]()
    clocks = (time.perf_counter, partial(cores_s, torch.get_num_threads()))
    halves = (lambda: losses.append(loss_of_ids(model, ids)), lambda: losses.pop().backward())
    for half in halves:  # the first time chooses the code, and takes memory
        half()
    device.synchronize()
    samples = _samples(halves, clocks, device.synchronize)
    (forward, forward_cores), (backward, backward_cores) = (
        [median(of_clock) for of_clock in zip(*of_half, strict=True)]
        for of_half in zip(*samples, strict=True)
    )
    return _Seconds(forward, backward, forward_cores, backward_cores)


def _ids(model: nn.Module, micro_batch: int, sequence: int, device: torch.device) -> torch.Tensor:
    """Return ids for a micro batch of a model, whose gradients are dropped from now on."""
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_drop_gradient)
    tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    return torch.arange(micro_batch * sequence, device=device).view(micro_batch, sequence) % min(
        tables, default=1
    )


def _drop_gradient(param: torch.Tensor) -> None:
    """Free a gradient when it is complete, as the engine does: what lives on makes the products slower."""
    param.grad = None


def _rates(forward_flops: float, backward_flops: float, seconds: _Seconds, device: Device) -> Computation:
    if device.free_bytes() is not None:
        return Computation(forward_flops / seconds.forward, backward_flops / seconds.backward)
    of_cores = seconds.forward_cores + seconds.backward_cores
    return Computation(
        forward_flops / seconds.forward_cores,
        backward_flops / seconds.backward_cores,
        min(1.0, of_cores / (seconds.forward + seconds.backward)),
    )


NUM_TURNS, MOST_BESIDE_S = 5, 8.0  # no turn begins later than that; there is one in any case
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
    with closing(ScratchFile(str(path))) as scratch:
        engine = AioEngine()
        try:
            engine.register_parts(memory.bytes)
            file = scratch.open(engine)
            for offset in range(0, FILE_BYTES, MEMORY_BYTES):
                wait_for(engine.write(file, memory.bytes, offset=offset))
            scratch.num_bytes = FILE_BYTES
            states = Workload(
                [scratch],
                Traffic.MIXED,
                segments=chunk_segments(STATE_ELEMENTS),
                num_slots=NUM_CHUNKS_IN_FLIGHT,
                memory=memory,
            )

            def moves(seconds: float, max_bytes: int | None = None) -> float:
                count = pump(
                    *(engine, [file], states, allowance),
                    seconds=seconds,
                    deadline_s=time.monotonic() + 2 * seconds,
                    max_bytes=max_bytes,
                )
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
        if number and time.monotonic() - begun_s > MOST_BESIDE_S:
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
