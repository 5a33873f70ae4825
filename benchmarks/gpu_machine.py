"""What `gpu.py` has to know of a machine: whether it can run there, and its memory.

python benchmarks/gpu_machine.py look DEVICE           what it is; builds native modules that are missing
python benchmarks/gpu_machine.py take BYTES SECONDS    host memory, taken once and given back
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from offloadzero.planning.machine import describe_machine, describe_versions  # noqa: E402

NATIVE_MODULES = ("io._aio", "native._kernels", "native._termination")
GIB = 1 << 30
CANNOT_RUN = 3  # exit status

# --- what the machine is ---


def look(device: str) -> dict[str, Any]:
    """Return the facts for the report."""
    torch = importlib.import_module("torch")
    link = "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max"
    machine = describe_machine()
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        **describe_versions("torch", "triton"),
        **{key: machine[key] for key in ("cpu", "num_cores", "kernel")},
        "host_gib": available_memory() / GIB,
        "driver": _output_of("nvidia-smi", link, "--format=csv,noheader"),
        "commit": _output_of("git", "describe", "--always", "--dirty"),
    }
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        found |= {"device_gib": total / GIB, "device_free_gib": free / GIB}
    return found


def make_modules() -> str:
    """Use the native modules that lie in the tree, which any x86-64 machine loads, or build them; say which."""
    absent = _absent_modules()
    if not absent:
        return "used as they are"
    command = [sys.executable, str(ROOT / "setup.py"), "--quiet", "build_ext", "--inplace", "--force"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    for name in NATIVE_MODULES:
        importlib.import_module(f"offloadzero.{name}")
    return f"built, for lack of {', '.join(absent)}"


def _absent_modules() -> list[str]:
    absent = []
    for name in NATIVE_MODULES:
        try:
            importlib.import_module(f"offloadzero.{name}")
        except ImportError as error:  # not there, or made for another machine
            absent.append(f"{name} ({error})")
    return absent


def _output_of(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


# --- memory ---


def available_memory() -> int:
    """Return the bytes of host memory that an engine takes to be free."""
    from offloadzero.planning.machine import available_host_bytes

    return available_host_bytes()


LEAST_FREE = GIB  # what is left to others while memory is taken
PATIENCE_S = 8.0  # for memory that a machine shows while it is taken


def take_memory(num_bytes: int, *, seconds: float) -> int:
    """Take host memory once, bit by bit, as far as there is any; return how much was taken: 0 where enough is shown.

    Some virtual machines get their memory as they use it. Until then they show little as available, and an engine is
    refused what the machine does not show.
    """
    from offloadzero.memory.arena import allocate_host
    from offloadzero.memory.pages import populate

    end_s, taken = time.monotonic() + seconds, list[Any]()
    if available_memory() >= num_bytes:
        return 0
    while len(taken) * GIB < num_bytes and time.monotonic() < end_s:
        until_s = min(time.monotonic() + PATIENCE_S, end_s)
        while available_memory() < LEAST_FREE + GIB:
            if time.monotonic() > until_s:
                return len(taken) * GIB
            time.sleep(0.05)
        taken.append(allocate_host(GIB))
        populate(taken[-1], num_threads=len(os.sched_getaffinity(0)))
    return len(taken) * GIB


def main() -> int:
    if sys.argv[1] == "take":
        taken = take_memory(int(sys.argv[2]), seconds=float(sys.argv[3]))
        print(json.dumps({"taken_gib": taken / GIB, "host_gib": available_memory() / GIB}))
        return 0
    missing = [name for name in ("torch", "numpy", "pytest") if importlib.util.find_spec(name) is None]
    if missing:
        print(json.dumps({"missing": f"{', '.join(missing)}: {sys.executable} does not have it"}))
        return CANNOT_RUN
    torch = importlib.import_module("torch")
    if sys.argv[2] != "cpu" and not torch.cuda.is_available():
        print(
            json.dumps(
                {"missing": f"a CUDA device: torch {torch.__version__} finds none; --device cpu needs none"}
            )
        )
        return CANNOT_RUN
    print(json.dumps({"modules": make_modules()}), flush=True)
    print(json.dumps({"machine": look(sys.argv[2])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
