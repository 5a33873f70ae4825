"""The measurements that `offloadzero plan` makes of a machine, in a minute or two, and keeps.

[Note: what the probe measures]
| rate | by |
| --- | --- |
| operations per second | forward and backward of a transformer block, each by itself; fp16 on devices |
| the same of one model | its own micro batch: [Note: the micro batch is measured] in computation.py |
| share of the cores | the CPU time of both over their time on a clock |
| update on the host | Adam over 2^24 parameters of each layout, as `bench adam` runs it, on the threads of an engine |
| update on the device | the same, in the form that the device has |
| copies, landing | the native copy on one thread; the norm of a gradient on as many as an update |
| link | pinned copies of 256 MiB each way |
| drive | `bench nvme` for a third of the time: its row of the engine's default setting |
| what copies, updates and the drive cost a CPU that computes | [Note: work beside the computation] in computation.py |
| Python per unit | a tiny model of many units in the engine: what its own clock of hooks says |

The work of the host's cores is measured in their time, as [Note: the bound] in observe/bound.py measures a run.
Memory is read anew each time; rates are kept by facts that tell one machine from another, the drive among them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadzero.cli.bench.adam import Records
from offloadzero.cli.bench.nvme import measure_paths
from offloadzero.cli.output import Progress
from offloadzero.cli.plan.computation import (
    NotMeasuredError,
    best_s,
    block_micro_batch,
    block_rates,
    copies_beside,
    cores_s,
    drive_beside,
    micro_batch_rates,
    updates_beside,
)
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError, OffloadError
from offloadzero.memory.device import Device, find_device
from offloadzero.native import kernels
from offloadzero.native.hyper import AdamHyper
from offloadzero.observe.monitor import STEPS_FILE
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.hardware import (
    Hardware,
    Memory,
    describe,
    drive_bytes,
    drive_of,
    keep,
    kept_hardware,
    model_key,
    with_rates_of,
)
from offloadzero.planning.machine import (
    available_host_bytes,
    cores_beside_launching,
    host_bytes_before,
    nearest_directory,
    usable_cores,
)
from offloadzero.planning.model.shapes import ModelSource
from offloadzero.planning.step.forecast import COMPACT, COPY, DRIVE, DTYPE_NAMES, FP32, Computation, Rates
from offloadzero.update.spec import UpdateForm, device_form
from offloadzero.update.specs.adam import ADAM

PROBE_S = 45.0
MODEL_S = 15.0
_MIB = 1 << 20
LINK_BYTES, DRIVE_FILE_BYTES = 256 * _MIB, 512 * _MIB
_MEASURED = (torch.bfloat16, torch.float32)
_OF_DEVICES = (torch.float16,)  # a CPU hardly trains in it, and may need minutes for this block


def this_hardware(device_name: str | None, paths: Sequence[Path], *, fresh: bool) -> Hardware:
    """Describe this machine: its present memory, with rates that were kept or are measured. Raises OffloadError."""
    found = memory_only(device_name, paths) if fresh else without_measuring(device_name, paths)
    if found.rates == Rates():
        # Measuring takes memory, which was looked at before.
        found = replace(found, rates=measure(find_device(device_name), paths))
        _keep(found)
    return found


def without_measuring(device_name: str | None, paths: Sequence[Path]) -> Hardware:
    """Describe this machine: its present memory, and rates if some were kept, by which "auto" goes.

    Raises ConfigError.
    """
    found = memory_only(device_name, paths)
    kept = _kept(found.identity)
    return found if kept is None else replace(found, rates=kept.rates, of_models=kept.of_models)


def with_model(
    found: Hardware,
    device_name: str | None,
    source: ModelSource,
    *,
    dtype: torch.dtype | None,
    micro_batch: int,
    sequence: int,
    fresh: bool,
) -> Hardware:
    """Return this machine with the rates of a model's micro batch, kept or measured: [Note: rates of one model].

    `dtype` is that of its parameters; None: their own. Of a model that cannot be measured it has none, and standard
    error says why.
    """
    params = list(source.on_meta().parameters())
    if not params:
        return found
    dtype = dtype or max(params, key=torch.Tensor.numel).dtype
    name = DTYPE_NAMES.get(dtype, "")
    key = model_key(name, micro_batch * sequence, sum(map(torch.Tensor.numel, params)))
    if name not in found.rates.flops or (key in found.of_models and not fresh):
        return found
    block = found.rates.flops[name]
    device = find_device(device_name)
    # What this process holds by now is not free to it, as it is to the training that is planned.
    on_device = device.free_bytes()
    progress = Progress(MODEL_S)
    try:
        _say_if_busy(progress, "the model's computation")  # its time on a clock is kept, too
        progress.phase("the model's computation")
        computed = micro_batch_rates(
            source,
            device,
            dtype,
            micro_batch=micro_batch,
            sequence=sequence,
            room=available_host_bytes() if on_device is None else on_device,
            block=Computation(block, found.rates.gradient_flops.get(name, block)),
        )
    except NotMeasuredError as error:
        progress.say(f"The model's own computation is not measured, a standard block's is taken: {error}")
        return found
    _keep(found, key, computed)
    return with_rates_of(found, key, computed)


def memory_only(device_name: str | None, paths: Sequence[Path]) -> Hardware:
    """Describe this machine without any rate. Raises ConfigError."""
    device = find_device(device_name)
    return Hardware(
        memory=Memory(host=host_bytes_before(), device=device.free_bytes(), nvme=drive_bytes(paths)),
        rates=Rates(),
        num_cores=max(1, int(usable_cores())),
        device=device.name(),
        adam_form=device_form(ADAM, device.torch_device),
        process_bytes=resident_bytes(device.torch_device),
        identity=describe(device, paths),
    )


def resident_bytes(device: torch.device | None = None) -> int:
    """Return what a training process has resident beside its model, on the CPU or on `device`.

    It has loaded Python, torch and this package, and has taken a step.
    """
    _take_a_step(device or torch.device("cpu"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@cache
def _take_a_step(device: torch.device) -> None:
    """Take what torch takes in the first step of a process: its compiler, which comes with an optimizer, has 70 MB."""
    weight = torch.ones(256, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    (weight @ weight.detach()).float().sum().backward()
    optimizer.step()


# --- kept rates ---


def _keep(found: Hardware, key: str = "", computed: Computation | None = None) -> None:
    """Keep what was measured for the next time, which measures again where there is no place for it."""
    try:
        keep(found, key, computed)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        print(f"The measurement is not kept for the next time: {error}", file=sys.stderr, flush=True)


def _kept(identity: Mapping[str, Any]) -> Hardware | None:
    try:
        return kept_hardware(identity)
    except (ConfigError, OSError, RuntimeError) as error:  # cut short, of another version, or out of reach
        print(f"What was measured before is not used: {error}", file=sys.stderr, flush=True)
        return None


# --- measurements ---


def measure(device: Device, paths: Sequence[Path]) -> Rates:
    """[Note: what the probe measures]. `paths`: directories of drives; without any none is measured.

    Raises OffloadError where the device has too little free memory for it.
    """
    progress = Progress(PROBE_S)
    _say_if_busy(progress, "its computation, its drive and its link")
    is_cpu = device.free_bytes() is None
    dtypes = _MEASURED if is_cpu else (*_MEASURED, *_OF_DEVICES)
    try:
        progress.phase("computation")
        computed = {DTYPE_NAMES[dtype]: block_rates(device, dtype) for dtype in dtypes}
        rates = Rates(
            flops={name: block.forward for name, block in computed.items()},
            gradient_flops={name: block.backward for name, block in computed.items()},
            core_shares={name: block.core_share for name, block in computed.items() if is_cpu},
        )
        progress.phase("memory")
        num_threads = None if is_cpu else len(cores_beside_launching(sorted(os.sched_getaffinity(0)))) or None
        rates = replace(
            rates,
            update=host_update_rates(num_threads),
            copy=copy_rate(),
            landing=landing_rate(num_threads),
        )
        if not is_cpu:
            progress.phase("device")
            rates = replace(rates, **link_rates(device), device_update=device_update_rates(device))
        progress.phase("Python per unit")
        rates = replace(rates, unit_s=python_per_use(device))
        if paths:
            progress.phase("drive")
            rates = replace(rates, **drive_rates(paths, time_s=PROBE_S / 3))
        if is_cpu:
            progress.phase("work beside the computation")
            rates = rates_beside(rates, paths)
    except torch.OutOfMemoryError as error:  # of the device alone
        raise OffloadError(
            f"{device.name()} has too little free memory to be measured, {format_bytes(device.free_bytes() or 0)}: "
            "another process may hold it. `--no-time` plans the bytes without measuring"
        ) from error
    return rates


def _say_if_busy(progress: Progress, what: str) -> None:
    """Say it of other load alone: the average is over a minute, in which this process may have measured before."""
    load, num_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load - time.process_time() / 60.0 > num_cores / 2:
        progress.say(
            f"This machine is busy (load {load:.1f}): {what} will seem slow. Once it is idle, --fresh measures again."
        )


def products_per_s(dtype: torch.dtype) -> float:
    """Return the operations per second of the CPU in the three products of a layer's forward and backward."""
    width, num_tokens = 512, 64
    x, weight, grad = (torch.ones(rows, width, dtype=dtype) for rows in (num_tokens, width, num_tokens))

    def products() -> None:
        _ = x @ weight.t(), grad @ weight, grad.t() @ x

    clock = partial(cores_s, torch.get_num_threads())
    products()  # the first one chooses the code
    return 6.0 * num_tokens * width**2 / best_s(products, clock)


def host_update_rates(num_threads: int | None = None) -> dict[str, float]:
    """Return the bytes per second that Adam moves on so many threads (None: on all cores), by layout."""
    records, clock = Records(1 << 24), partial(cores_s, num_threads)
    num_threads = num_threads or len(os.sched_getaffinity(0))
    rates = {}
    for layout in (FP32, COMPACT):
        case, sample = records.adam(layout, kernels.active_isa(), num_threads)
        rates[layout] = case.bytes_per_param * case.num_params / best_s(sample, clock)
    return rates


def copy_rate() -> float:
    """Return the bytes per second of a copy in host memory by one thread; a copy counts its bytes once."""
    source, target = torch.zeros(64 * _MIB, dtype=torch.uint8), torch.zeros(64 * _MIB, dtype=torch.uint8)
    return source.nbytes / best_s(lambda: kernels.copy(target, source), time.process_time)


def landing_rate(num_threads: int | None = None) -> float:
    """Return the bytes per second of the norm of a gradient in bf16, on so many threads (None: on all cores)."""
    grad = torch.zeros(64 * _MIB, dtype=torch.bfloat16)
    return grad.nbytes / best_s(
        lambda: kernels.sq_norm(grad, num_threads=num_threads), partial(cores_s, num_threads)
    )


def link_rates(device: Device) -> dict[str, Any]:
    """Return the rates of both ways of pinned copies."""
    here = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there, stream = device.allocate(LINK_BYTES).zero_(), device.new_stream("copy")
    device.synchronize()
    if stream is None:
        raise AssertionError("copies to a device without streams are not measured")

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        with device.launching_on(stream):
            device.copy(target, source)

    ways = {"h2d": (there, here), "d2h": (here, there)}
    return {
        way: LINK_BYTES / best_s(partial(copy, *ends), finish=stream.synchronize)
        for way, ends in ways.items()
    }


def device_update_rates(device: Device, *, num_params: int = 1 << 24) -> dict[str, float]:
    """Return the bytes per second that Adam moves in the device's memory, by layout."""
    form, hyper = device_form(ADAM, device.torch_device), AdamHyper(1e-5, 0.9, 0.999, 1e-8, 0.01)
    stream = device.current_stream()
    rates = {}
    for layout in (FP32, COMPACT):
        compact = layout == COMPACT
        dtypes = {SegmentKind.PARAM: torch.bfloat16, SegmentKind.GRAD: torch.bfloat16}
        dtypes |= ADAM.state_dtypes(torch.bfloat16, compact=compact)
        sizes = dict.fromkeys(dtypes, num_params)
        if compact and ADAM.codes is not None:
            dtypes[SegmentKind.SCALES] = torch.float32
            sizes[SegmentKind.SCALES] = ADAM.codes.num_scales(num_params)
        buffers = {
            kind: torch.zeros(sizes[kind], dtype=dtype, device=device.torch_device)
            for kind, dtype in dtypes.items()
        }
        scratch_bytes = ADAM.scratch_bytes(form, num_params, compact=compact)
        scratch = device.allocate(scratch_bytes) if scratch_bytes else None
        moved = sum(b.nbytes * (1 if kind is SegmentKind.GRAD else 2) for kind, b in buffers.items())

        def step(
            buffers: dict[SegmentKind, torch.Tensor] = buffers, scratch: torch.Tensor | None = scratch
        ) -> None:
            # Triton launches on the current device, whichever the buffers are on.
            with nullcontext() if stream is None else device.launching_on(stream):
                ADAM.step(buffers, hyper=hyper, step=10, grad_scale=1.0, form=form, scratch=scratch)

        step()  # the first one compiles the kernel, which may take longer than all samples together
        device.synchronize()
        rates[layout] = moved / best_s(step, finish=device.synchronize)
    return rates


class _ManyUnits(nn.Module):
    """Blocks with hardly any computation."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().sum()


def python_per_use(device: Device, *, num_blocks: int = 48, num_steps: int = 8) -> float:
    """Return the seconds of Python in the hooks for each use of a unit, as a step's record has them."""
    import offloadzero
    from offloadzero.core.launch import not_launched

    # A shell in a launcher's job, or a pod, has the variables of ranks, for which a single process would wait.
    with not_launched(), tempfile.TemporaryDirectory(prefix="offloadzero-plan-") as directory:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "offloadzero": {
                "device": str(device.torch_device),
                "placement": "host",
                "observe": {"run_dir": directory},
            },
        }
        engine, *_ = offloadzero.initialize(model=_ManyUnits(num_blocks), config=config)
        try:
            x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device.torch_device)
            for _ in range(num_steps):
                engine.backward(engine(x))
                engine.step()
        finally:
            engine.close()
        lines = Path(directory, STEPS_FILE).read_text().splitlines()[2:]
    launch_s: list[float] = [json.loads(line)["launch_s"] for line in lines]
    return statistics.median(launch_s) / (2 * num_blocks)


def drive_rates(paths: Sequence[Path], *, time_s: float) -> dict[str, Any]:
    """Return rates of the engine's default setting by `bench nvme`: read, write, both at once, and their CPU time.

    Directories that do not exist yet are measured in the one that they would be made in. Of several on one drive only
    the first is measured: its rate is that of all of them together.
    """
    existing = {drive_of(path): nearest_directory(path) for path in reversed(paths)}
    result = measure_paths(
        [str(path) for path in reversed(existing.values())],
        size=str(DRIVE_FILE_BYTES),
        time_text=f"{time_s:.3f}s",
        write_limit=str(16 * DRIVE_FILE_BYTES),
    )
    rates = {}
    for row in result["results"]["traffic"]:
        name = f"nvme_{row['traffic']}"
        if "default" in row["roles"] or name not in rates:
            rates[name] = row["gb_per_s"] * 1e9
            rates["nvme_cpu_s_per_byte"] = row["cpu_s_per_gb"] / 1e9
    if "nvme_write" not in rates:
        # A fast drive has come to the write limit: its first write was at the default setting, too.
        rates["nvme_write"] = result["results"]["first_write"]["gb_per_s"] * 1e9
    return rates


def rates_beside(rates: Rates, paths: Sequence[Path]) -> Rates:
    """Add what other work, that of the first of the drives included, costs computation.

    [Note: work beside the computation].
    """
    fastest = max(_MEASURED, key=lambda dtype: rates.flops.get(DTYPE_NAMES[dtype], 0.0))
    compute = block_micro_batch(fastest)
    rates = replace(rates, holds={COPY: copies_beside(compute), **updates_beside(compute)})
    drive = drive_beside(compute, nearest_directory(paths[0])) if paths else None
    if drive is None:
        return rates
    return replace(rates, holds={**rates.holds, DRIVE: drive.hold_s_per_byte}, nvme_beside=drive.share)


def form_on(hardware: Hardware, spec: Any) -> UpdateForm:
    """Return the form of an optimizer's updates on the device of that machine, which need not be this one."""
    if hardware.device_is_cpu:
        return UpdateForm.NATIVE
    return hardware.adam_form if ADAM in spec.members else UpdateForm.TORCH
