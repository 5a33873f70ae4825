"""DeepSpeed's CPUAdam as a worker of adam.py, run by an interpreter that has deepspeed, without offloadzero.

    PYTHON adam_deepspeed.py NUM_PARAMS NUM_THREADS

It prints a line of JSON when it is ready; then, for every line "bare" or "zero" that it reads, it does such a step and
prints its seconds. It imports nothing of offloadzero.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

CLIPPED_AND_UNSCALED = 0.5


def make_steps(num_params: int, num_threads: int) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Return the two kinds of steps, and the versions."""
    import deepspeed  # type: ignore[import-not-found]
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(num_params) * 0.02)
    param.grad = torch.randn(num_params) * 1e-3
    grad_bf16, param_bf16 = param.grad.bfloat16(), param.detach().bfloat16()
    optimizer: Any = DeepSpeedCPUAdam([param], lr=1e-5, weight_decay=0.01, adamw_mode=True)

    def zero() -> None:
        """Do the host side of a ZeRO-Offload step: deepspeed/runtime/zero/stage_1_and_2.py, step()."""
        grad = param.grad
        if grad is None:
            raise AssertionError("the gradient is gone")
        grad.copy_(grad_bf16)
        grad.mul_(CLIPPED_AND_UNSCALED)
        optimizer.step()
        param_bf16.copy_(param.data)

    versions = {"deepspeed": str(deepspeed.__version__), "torch": str(torch.__version__)}
    return {"bare": optimizer.step, "zero": zero}, versions


def main() -> None:
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # deepspeed prints while it builds
        steps, versions = make_steps(int(sys.argv[1]), int(sys.argv[2]))
        for step in steps.values():
            step()
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        step = steps[line.strip()]
        begun_s = time.perf_counter()
        step()
        print(time.perf_counter() - begun_s, file=answers, flush=True)


if __name__ == "__main__":
    main()
