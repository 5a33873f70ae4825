"""The time in which ranks compare a few numbers over gloo: each tells each, or they find the largest in a reduction.

    python benchmarks/host_collectives.py [--ranks 2 3 4 8 16] [--rounds 5] [--report FILE.md]

All ranks are processes of this machine, so more of them than cores wait for a core as well. In each round both ways
take a turn of 100 comparisons of two numbers, which is what precedes each gather of a unit; the figures are the medians
of the rounds, wall time of rank 0 and CPU time of all its threads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from offloadzero.observe import collectives  # noqa: E402
from offloadzero.ranks import process_groups  # noqa: E402

NUM_COMPARISONS = 100
WAYS = {"each to each": sys.maxsize, "reduction": 1}  # by the most ranks of which each tells each


def compare(rank: int, num_ranks: int, num_rounds: int, folder: str) -> None:
    """One rank; the first one leaves its samples (wall seconds, CPU seconds), by way, in `folder`."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    several = process_groups.make_ranks(torch.device("cpu"))
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    order = random.Random(0)
    for number in range(num_rounds + 1):
        for way in order.sample([*WAYS], len(WAYS)):
            with patch.object(collectives, "MOST_TELLING_EACH", WAYS[way]):
                several.control.by_rank([number], "all begin together")
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
                for _ in range(NUM_COMPARISONS):
                    several.orders.expect_same(number, 0, "a unit")
                taken = (time.perf_counter() - begun_s, time.process_time() - begun_cpu_s)
            if number:  # the first round makes the connections
                samples[way].append(taken)
    several.close()
    if rank == 0:
        Path(folder, "samples.json").write_text(json.dumps(samples))
    dist.destroy_process_group()


def row(num_ranks: int, num_rounds: int) -> str:
    """The row of the table for so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=compare, args=(rank, num_ranks, num_rounds, folder))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"a rank of {num_ranks} has failed")
        samples = json.loads(Path(folder, "samples.json").read_text())
    cells = [str(num_ranks)]
    for column in (0, 1):
        medians = [statistics.median(sample[column] for sample in samples[way]) for way in WAYS]
        cells += [f"{1e3 * median / NUM_COMPARISONS:.2f}" for median in medians]
        ratios = [
            each[column] / other[column] for each, other in zip(*(samples[way] for way in WAYS), strict=True)
        ]
        cells.append(f"{statistics.median(ratios):.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    lines = [
        "# Comparisons of a few numbers between ranks",
        "",
        f"`MOST_TELLING_EACH` of offloadzero/observe/collectives.py is {collectives.MOST_TELLING_EACH}. Milliseconds "
        "for one comparison, wall time and CPU time of a rank, and the median of the rounds' ratios.",
        "",
        f"- date: {datetime.date.today()}",
        f"- machine: {os.cpu_count()} cores, {platform.machine()}; kernel {platform.release()}",
        f"- Python {platform.python_version()}, torch {torch.__version__}",
        f"- command: `python benchmarks/host_collectives.py {' '.join(sys.argv[1:])}`",
        "",
        "| ranks | each to each, ms | reduction, ms | ratio | CPU, each to each, ms | CPU, reduction, ms | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(row(num_ranks, given.rounds) for num_ranks in given.ranks),
        "",
    ]
    print("\n".join(lines))
    if given.report is not None:
        given.report.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
