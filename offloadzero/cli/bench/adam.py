"""`offloadzero bench adam`: the CPU optimizer beside the memory's rate.

`benchmarks/adam.py` adds torch's fused AdamW and DeepSpeed's CPUAdam to the same table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offloadzero.cli.output import check_output, show_result, text_table
from offloadzero.errors import ConfigError
from offloadzero.planning.machine import describe_machine, describe_versions

FORMAT = "offloadzero.bench.adam"
FORMAT_VERSION = 1
MIN_PARAMS = 1 << 20
PARAMS_MULTIPLE = 1 << 16
IN_CACHE_PARAMS = 1 << 16  # 0.9 MiB of fp32 state and gradient, 0.45 MiB of compact: the second-level cache
BYTES_PER_PARAM_KEPT = 12 + 5 + 2  # both records and the gradient
_PAUSE_S = 0.02  # until other runtimes' threads have stopped spinning

# A call that takes one sample and returns its seconds.
Sample = Callable[[], float]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "adam",
        help="the CPU optimizer: per layout, instruction set and thread count",
        description="Measures Adam on the CPU per layout, instruction set and number of threads, beside memory's "
        "ceiling for the same reads and writes. Samples of all are interleaved; results are medians.",
    )
    parser.add_argument("--params", type=int, default=1 << 26, help="parameters (default 67108864)")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each (default 9)")
    parser.add_argument("--json", metavar="FILE", help="everything, - for standard output")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Case:
    """One row of the results. `bytes_per_param` is its traffic: every byte read and every byte written."""

    what: str
    layout: str
    isa: str
    num_threads: int
    bytes_per_param: float
    num_params: int


Cases = list[tuple[Case, Sample]]


def run(args: argparse.Namespace) -> int:
    check(args)
    result = measured(kernel_cases(args.params, len(os.sched_getaffinity(0))), args.params, args.rounds)
    show_result(table(result), args.json, result)
    return 0


def check(args: argparse.Namespace, *, bytes_beside: int = 0) -> None:
    """Raise ConfigError for arguments that cannot be; `bytes_beside` of each parameter are of other cases."""
    check_output("--json", args.json)
    if args.params < MIN_PARAMS or args.params % PARAMS_MULTIPLE:
        raise ConfigError(
            "--params", args.params, f"allowed multiples of {PARAMS_MULTIPLE}, at least {MIN_PARAMS}"
        )
    if args.rounds < 1:
        raise ConfigError("--rounds", args.rounds, "allowed integers >= 1")
    per_param = BYTES_PER_PARAM_KEPT + bytes_beside
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if args.params * per_param > available:
        raise ConfigError(
            "--params", args.params, f"{per_param} bytes each are more than the {available} free"
        )


def timed(call: Callable[[], object], *, num_calls: int = 1) -> Sample:
    def sample() -> float:
        begun_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - begun_s) / num_calls

    return sample


# --- The kernels and the ceiling ---


def kernel_cases(num_params: int, num_cores: int) -> Cases:
    """Return the layouts x instruction sets x threads, the ceilings, and the kernels on data in the cache."""
    from offloadzero.native.kernels import Isa, active_isa, isa_supported

    counts = sorted({*(n for n in (1, 2, 4, 8, 16, 32, 64) if n <= num_cores), num_cores})
    isas = [isa for isa in Isa if isa_supported(isa)]
    memory, cached = Records(num_params), Records(IN_CACHE_PARAMS)
    cases: Cases = []
    for layout in ("fp32", "compact"):
        for num_threads in counts:
            cases += memory.ceilings(layout, num_threads)
            cases.append(memory.adam(layout, active_isa(), num_threads))
        others = [isa for isa in isas if isa != active_isa()]
        cases += [memory.adam(layout, isa, num_cores) for isa in others]
        cases += [cached.adam(layout, isa, 1, what="ours, in cache") for isa in isas if isa != Isa.SCALAR]
    return cases


class Records:
    """A gradient and both records of some parameters, in memory as the library allocates it."""

    def __init__(self, num_params: int) -> None:
        import torch

        from offloadzero.arithmetic.remainders import COMPACT_REMAINDER_DTYPE, REMAINDER_DTYPE
        from offloadzero.core.constants import num_scales
        from offloadzero.memory.arena import Arena, allocate_host, staggered
        from offloadzero.native.hyper import AdamHyper
        from offloadzero.native.kernels import compact_encode, split_master

        self.num_params = num_params
        self.hyper = AdamHyper(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
        generator = torch.Generator().manual_seed(0)

        memory = Arena("bench", allocate_host(num_params * BYTES_PER_PARAM_KEPT + (1 << 20)), poison=False)

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            """Allocate zeros in huge pages and a page apart, as in training."""
            return memory.lease(staggered(num_params * dtype.itemsize), "array").view(dtype, num_params)

        exp_avg = zeros(torch.float32).normal_(0.0, 1e-4, generator=generator)
        exp_avg_sq = zeros(torch.float32).normal_(0.0, 1e-3, generator=generator).square_()
        self.fp32 = (zeros(torch.bfloat16), zeros(REMAINDER_DTYPE), exp_avg, exp_avg_sq)
        self.compact = (
            zeros(torch.bfloat16),
            zeros(COMPACT_REMAINDER_DTYPE),
            zeros(torch.int8),
            zeros(torch.uint8),
        )
        self.scales = torch.zeros(num_scales(num_params))
        values = torch.empty(num_params).normal_(0.0, 1e-3, generator=generator)
        self.grad = zeros(torch.bfloat16).copy_(values)
        master = values.normal_(0.0, 0.02, generator=generator)
        split_master(master, self.fp32[0], self.fp32[1])
        compact_encode(master, exp_avg, exp_avg_sq, *self.compact, self.scales)

    def adam(self, layout: str, isa: Any, num_threads: int, *, what: str = "ours") -> tuple[Case, Sample]:
        """Return the case of one step of a layout. Data in the cache are timed over many calls."""
        from offloadzero.core.constants import COMPACT_BYTES_PER_PARAM
        from offloadzero.native.kernels import adam_step, compact_adam_step

        options: dict[str, Any] = {"hyper": self.hyper, "step": 10, "isa": isa, "num_threads": num_threads}

        def fp32_step() -> None:
            param, remainder, exp_avg, exp_avg_sq = self.fp32
            adam_step(param, self.grad, exp_avg, exp_avg_sq, master=remainder, **options)

        def compact_step() -> None:
            param, remainder, exp_avg, exp_avg_sq = self.compact
            compact_adam_step(param, self.grad, remainder, exp_avg, exp_avg_sq, self.scales, **options)

        num_bytes = 26 if layout == "fp32" else 2 * COMPACT_BYTES_PER_PARAM + 2
        case = Case(what, layout, isa.value, num_threads, num_bytes, self.num_params)
        step = fp32_step if layout == "fp32" else compact_step
        return case, timed(step, num_calls=1 if self.num_params > IN_CACHE_PARAMS else 200)

    def ceilings(self, layout: str, num_threads: int) -> Cases:
        """Return the cases that read and write the same arrays without arithmetic, with and without prefetching.

        One pass inverts the arrays' bits: a sample is two passes.
        """
        from offloadzero.native import _kernels
        from offloadzero.native.kernels import active_isa, isa_code

        record = self.fp32 if layout == "fp32" else self.compact  # the scales would be 1 % more
        arrays = tuple((t.data_ptr(), t.element_size()) for t in (*record, self.grad))
        num_bytes = sum(size for _, size in arrays) + sum(size for _, size in arrays[:-1])

        def stream(prefetch: bool) -> Callable[[], object]:
            code = isa_code(None)
            return lambda: _kernels.stream(
                arrays, len(arrays) - 1, prefetch, self.num_params, code, num_threads
            )

        return [
            (
                Case(what, layout, active_isa().value, num_threads, num_bytes, self.num_params),
                timed(stream(prefetch), num_calls=2),
            )
            for what, prefetch in (("ceiling", False), ("ceiling, prefetched", True))
        ]


# --- Samples and the table ---


def measured(cases: Cases, num_params: int, num_rounds: int) -> dict[str, Any]:
    """Run rounds over all cases, interleaved, after one that warms up; the result is the content of --json."""
    machine = describe_machine()
    seconds: dict[Case, list[float]] = {case: [] for case, _ in cases}
    for number in range(num_rounds + 1):
        print(f"round {number} of {num_rounds}", file=sys.stderr, flush=True)
        for case, sample in cases:
            time.sleep(_PAUSE_S)
            elapsed_s = sample()
            if number:
                seconds[case].append(elapsed_s)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "num_params": num_params,
        "num_rounds": num_rounds,
        "machine": machine,
        "load_average_after": os.getloadavg(),
        "versions": describe_versions("offloadzero", "torch", "numpy"),
        "results": _with_ceilings([_row(case, times) for case, times in seconds.items()]),
    }


def _row(case: Case, times: Sequence[float]) -> dict[str, Any]:
    rate = case.num_params / statistics.median(times) / 1e9
    return {
        **asdict(case),
        "gparam_per_s": rate,
        "gparam_per_s_max": case.num_params / min(times) / 1e9,
        "gb_per_s": rate * case.bytes_per_param,
        "seconds": list(times),
    }


def _with_ceilings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the kernels' rows in memory their GB/s as a share of the better ceiling of their layout and threads."""
    ceilings: dict[tuple[str, int], float] = {}
    for row in rows:
        if row["what"].startswith("ceiling"):
            key = (row["layout"], row["num_threads"])
            ceilings[key] = max(ceilings.get(key, 0.0), row["gb_per_s"])
    return [
        {**row, "share_of_ceiling": row["gb_per_s"] / ceilings[row["layout"], row["num_threads"]]}
        if row["what"] == "ours"
        else row
        for row in rows
    ]


def table(result: dict[str, Any]) -> list[str]:
    machine = result["machine"]
    header = ("what", "layout", "isa", "threads", "B/param", "Gparam/s", "GB/s", "of ceiling")
    body = [
        [
            *(row["what"], row["layout"], row["isa"], str(row["num_threads"])),
            *(f"{row['bytes_per_param']:.4g}", f"{row['gparam_per_s']:.2f}", f"{row['gb_per_s']:.1f}"),
            f"{row['share_of_ceiling']:.2f}" if "share_of_ceiling" in row else "",
        ]
        for row in result["results"]
    ]
    return [
        f"{machine['cpu']}, {machine['num_cores']} cores, {machine['kernel']}, load {machine['load_average'][0]:.2f}; "
        f"{result['num_params']} parameters, medians of {result['num_rounds']} interleaved samples",
        "",
        *text_table(header, body, num_left=3),
    ]
