"""The rates that bound a step on this machine, and a hardware file of them for `offloadzero plan`.

    python benchmarks/gpu_rates.py --device cuda --hardware OUT/hardware.json

One line of JSON for each as soon as it is measured: medians of a few samples. Copies go through the lanes and the
registered memory that an engine has, updates through its kernels. The file has the format that is written by hand
(docs/plan.md, Clusters), of one machine with one device and without drives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from gpu_machine import available_memory  # noqa: E402

from offloadzero.cli.plan.computation import block_rates  # noqa: E402
from offloadzero.memory.arena import allocate_host  # noqa: E402
from offloadzero.memory.device import find_device  # noqa: E402
from offloadzero.memory.lanes import Accelerator  # noqa: E402
from offloadzero.memory.pages import populate  # noqa: E402
from offloadzero.memory.tickets import Failures  # noqa: E402
from offloadzero.native.hyper import AdamHyper  # noqa: E402
from offloadzero.update.adam_form import adam_step  # noqa: E402
from offloadzero.update.spec import UpdateForm, device_form  # noqa: E402
from offloadzero.update.specs.adam import ADAM  # noqa: E402

MIB, GIB, GB = 1 << 20, 1 << 30, 1e9
NUM_SAMPLES, NUM_CORES = 3, len(os.sched_getaffinity(0))
UPDATE_BYTES = 26  # of memory per parameter: DESIGN, the state layouts
HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
UNIT_US = 300.0  # Python for each use of a unit; the slice `where` measures it


class Rates:
    """Measures on one device, at sizes that leave its caches."""

    def __init__(self, device: str) -> None:
        self.accelerator = Accelerator(find_device(device))
        self.device = self.accelerator.asynchronous
        self.on_cuda = self.device.free_bytes() is not None
        self.found: dict[str, float] = {}

    def tell(self, **found: float) -> None:
        self.found |= found
        print(json.dumps({"rates": found}), flush=True)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call until its work is done, after one that warms up."""
        times = []
        for _ in range(NUM_SAMPLES + 1):
            self.device.synchronize()
            start_s = time.perf_counter()
            call()
            self.device.synchronize()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:])

    def products(self) -> None:
        """Ten products of random bf16 matrices: zeros would be faster."""
        size = 8192 if self.on_cuda else 512
        a, b = (torch.randn(size, size, device=self.device.torch_device).bfloat16() for _ in range(2))
        seconds = self.seconds(lambda: [torch.mm(a, b) for _ in range(10)])
        self.tell(matmul_tflops=20 * size**3 / seconds / 1e12)

    def block(self) -> None:
        """Forward and backward of a transformer block, the forward twice, as `offloadzero plan` measures them."""
        found = block_rates(self.device, torch.bfloat16)
        self.tell(block_tflops=2 / (1 / found.forward + 1 / found.backward) / 1e12)

    def copies(self) -> None:
        """Alone each way, and both at once, through a lane for each way; before that, what pinning takes."""
        num_bytes = 4 * GIB if self.on_cuda else 64 * MIB
        buffer = allocate_host(2 * num_bytes)
        start_s = time.perf_counter()
        populate(buffer, num_threads=NUM_CORES)
        populated_s = time.perf_counter()
        self.device.pin(buffer, label="the buffers of this measurement")
        pinned_s, tens = time.perf_counter(), 2 * num_bytes / (10 * GB)
        if self.on_cuda:  # the CPU pins nothing
            taking_s, pinning_s = populated_s - start_s, pinned_s - populated_s
            self.tell(take_s_per_10gb=taking_s / tens, pin_s_per_10gb=pinning_s / tens)
        here, there = buffer.split(num_bytes), [self.device.allocate(num_bytes).zero_() for _ in range(2)]
        ways = {"h2d": (there[0], here[0]), "d2h": (here[1], there[1])}
        lanes = {way: self.accelerator.lane(way, Failures()) for way in ways}

        def gbps(*wanted: str) -> float:
            def call() -> None:
                copies = [lanes[way].submit(partial(self.accelerator.copy, *ways[way])) for way in wanted]
                for copy in copies:
                    copy.wait()

            return len(wanted) * num_bytes / self.seconds(call) / GB

        self.tell(h2d_gbps=gbps("h2d"), d2h_gbps=gbps("d2h"), both_gbps=gbps("h2d", "d2h"))
        for lane in lanes.values():
            lane.close()
        self.device.unpin(buffer)

    def updates(self) -> None:
        """AdamW over records as an engine has them, on all cores and in the device's form."""
        there = self.device.torch_device
        places = {"host": torch.device("cpu"), "device": there} if self.on_cuda else {"host": there}
        count = (256 if self.on_cuda else 4) * MIB
        for name, place in places.items():
            tile = torch.randn(MIB, device=place).bfloat16()  # to draw all of it takes longer than to measure
            param, grad = (tile.repeat(count // MIB) for _ in range(2))
            master = torch.zeros(count, dtype=torch.int16, device=place)
            moments = [torch.zeros(count, device=place) for _ in range(2)]
            form = UpdateForm.NATIVE if name == "host" else device_form(ADAM, place)
            keys = {"hyper": HYPER, "step": 1, "grad_scale": 1.0, "master": master, "form": form}
            rate = count / self.seconds(partial(adam_step, param, grad, *moments, **keys))
            self.tell(**{f"{name}_adam_gparams": rate / 1e9, f"{name}_adam_gbps": UPDATE_BYTES * rate / GB})

    def hardware(self) -> dict[str, Any]:
        """Return the file's content."""
        found, host_gib = self.found, available_memory() / GIB
        device_bytes = self.device.free_bytes()
        return {
            "format": "offloadzero.cluster",
            "format_version": 1,
            "machines": 1,
            "gpus_per_machine": 1,
            "gpu": {
                "name": self.device.name() or "cpu",
                "memory_gib": host_gib / 2 if device_bytes is None else device_bytes / GIB,
                "tflops": found["block_tflops"],
                "memory_gb_per_s": found.get("device_adam_gbps", found["host_adam_gbps"]),
            },
            "host": {"memory_gib": host_gib, "gb_per_s": found["host_adam_gbps"], "cores": NUM_CORES},
            "pcie": {"to_gpu_gb_per_s": found["h2d_gbps"], "from_gpu_gb_per_s": found["d2h_gbps"]},
            "unit_us": UNIT_US,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hardware", type=Path, required=True, help="the file to write")
    args = parser.parse_args()
    rates = Rates(args.device)
    for measure in (rates.products, rates.block, rates.copies, rates.updates):
        measure()
    args.hardware.write_text(json.dumps(rates.hardware(), indent=1) + "\n")


if __name__ == "__main__":
    main()
