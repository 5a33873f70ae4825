"""The measurements of computation for `offloadzero plan`: of a standard block, and of the micro batch that is planned.

[Note: the micro batch is measured]
Forward and backward are called in turn, as in a training, and gradients are dropped as they are complete: a backward
that runs again and again on one graph, and keeps its gradients, is a fifth slower.

A model of a shape with many bytes is measured with one block and with three: what two blocks add, as often as there are
blocks, and the rest once, head and loss, is the micro batch. The weights of few small blocks would lie in the caches of
a CPU, so a smaller model is measured whole, and so is one that is no shape. Both only where that takes no more than
half of the free memory; where a call would take longer than MOST_S, with fewer samples, then with shorter ones, which
changes a rate little. The weights of a shape are drawn for speed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from offloadzero.cli.plan_model import ModelSource
from offloadzero.errors import OffloadError
from offloadzero.memory.device import Device
from offloadzero.planning.activation_trace import (
    MicroBatchTrace,
    TraceError,
    loss_of_ids,
    trace_micro_batch,
)
from offloadzero.planning.probe import usable_cores
from offloadzero.planning.shapes import LLAMA, ModelShape
from offloadzero.planning.time_model import Computation

NUM_SAMPLES = 6
ENOUGH_S = 4.0  # of one measurement: what takes that long is not repeated
MOST_S = 2.0  # of a micro batch, by the rate of a standard block
FEW, MORE = 1, 3  # blocks of a model of a shape
MOST_WHOLE_BYTES = 1 << 30  # of its weights
LEAST_TOKENS = 128  # of a shortened sample


class NotMeasuredError(OffloadError, RuntimeError):
    """The model's own computation cannot be measured here."""


class _Seconds(NamedTuple):
    """The seconds of forward and backward: on a clock, and of the cores."""

    forward: float
    backward: float
    forward_cores: float
    backward_cores: float


class _Measured(NamedTuple):
    trace: MicroBatchTrace
    seconds: _Seconds


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
    """Make some calls in turn a few times. Returns the seconds by turn, call and clock; the first clock ends it."""
    turns = list[list[list[float]]]()
    while len(turns) < NUM_SAMPLES and sum(of_call[0] for turn in turns for of_call in turn) < ENOUGH_S:
        turn = []
        for call in calls:
            begun_s = [clock() for clock in clocks]
            call()
            finish()
            turn.append([clock() - begun for clock, begun in zip(clocks, begun_s, strict=True)])
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
    shape = ModelShape(LLAMA, width, 1, width // 128, 128, 11 * width // 4, width // 128)
    with torch.device("meta"):
        empty = shape.build()
    trace = trace_micro_batch(empty, dtype=dtype, micro_batch=1, sequence=num_tokens)
    model = shape.build().to(device.torch_device, dtype)
    return _rates(
        trace.forward_flops, trace.backward_flops, _time_micro_batches(model, device, 1, num_tokens), device
    )


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
        NotMeasuredError: it takes too much memory, or its own code fails.
    """
    weight_bytes = sum(param.numel() for param in source.on_meta().parameters()) * dtype.itemsize
    numbers: tuple[int, ...] = (source.num_blocks,)
    if source.num_blocks > MORE and weight_bytes > MOST_WHOLE_BYTES:
        numbers = (FEW, MORE)
    largest = _trace(source, numbers[-1], device, dtype, micro_batch, sequence)
    expected_s = largest.forward_flops / block.forward + largest.backward_flops / block.backward
    micro_batch, sequence = _shortened(micro_batch, sequence, MOST_S / expected_s)
    measured = [_measured(source, number, device, dtype, micro_batch, sequence, room) for number in numbers]
    if len(measured) == 1:
        trace, seconds = measured[0]
        return _rates(trace.forward_flops, trace.backward_flops, seconds, device)
    times = (source.num_blocks - FEW) / (MORE - FEW)
    few, more = measured
    return _rates(
        _grown(few.trace.forward_flops, more.trace.forward_flops, times),
        _grown(few.trace.backward_flops, more.trace.backward_flops, times),
        _Seconds(*(_grown(*both, times) for both in zip(few.seconds, more.seconds, strict=True))),
        device,
    )


def _shortened(micro_batch: int, sequence: int, share: float) -> tuple[int, int]:
    """Return the shape of a micro batch with about that share of the tokens, if it is less than all of them."""
    if share >= 1.0:
        return micro_batch, sequence
    samples = max(1, int(micro_batch * share))
    share *= micro_batch / samples
    return samples, max(min(sequence, LEAST_TOKENS), min(sequence, int(sequence * share)))


def _grown(few: float, more: float, times: float) -> float:
    """Return what grows by `more - few` that many times. A disturbed measurement of few blocks adds nothing."""
    return few + max(0.0, more - few) * times


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
    source: ModelSource,
    number: int,
    device: Device,
    dtype: torch.dtype,
    micro_batch: int,
    sequence: int,
    room: int,
) -> _Measured:
    trace = _trace(source, number, device, dtype, micro_batch, sequence)
    empty = source.on_meta(number)
    num_params = sum(param.numel() for param in empty.parameters())
    # A model that is no shape draws its weights in fp32. Gradients are as large as the weights.
    per_param = 2 * dtype.itemsize if source.num_blocks else max(4 + dtype.itemsize, 2 * dtype.itemsize)
    if num_params * per_param + trace.peak_bytes > room / 2:
        raise NotMeasuredError("it takes more than half of the memory")
    try:
        if source.num_blocks:
            model = _filled(empty, device, dtype)
        else:
            model = source.build().to(device.torch_device, dtype)
        return _Measured(trace, _time_micro_batches(model, device, micro_batch, sequence))
    except OffloadError:
        raise
    except Exception as error:  # any error of the model's code
        raise NotMeasuredError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def _filled(empty: nn.Module, device: Device, dtype: torch.dtype) -> nn.Module:
    """Return a model of a shape with weights for which products take as long as for any others."""
    model = empty.to(dtype).to_empty(device=device.torch_device)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.02, 0.02)
    return model


def _time_micro_batches(model: nn.Module, device: Device, micro_batch: int, sequence: int) -> _Seconds:
    """Return the medians of some micro batches: a forecast is of a step like most of them."""
    tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    ids = torch.arange(micro_batch * sequence, device=device.torch_device).view(micro_batch, sequence)
    ids %= min(tables, default=1)
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(_drop_gradient)
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
