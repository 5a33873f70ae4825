"""The numbers of a small GPT in each placement: bitwise alike, near plain torch's, and the device update's bits.

    python benchmarks/gpu_right.py --device cuda [--only "host, half on the device: clipping"]

Each case is a training of NUM_STEPS steps in this process, and prints one line of JSON as soon as it has run: whether
its losses, weights and optimizer states are, bit by bit, those of the same training with all states on the device, and
how far losses and weights are from a plain loop in torch, with torch.optim.AdamW on fp32 masters. Exit status 1 where
one of them is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used

import torch  # noqa: E402

from offloadzero.memory.device import find_device  # noqa: E402
from offloadzero.update.adam_form import triton_problem  # noqa: E402
from tests.support.small_gpt import SmallGpt  # noqa: E402
from tests.support.tiny import tokens  # noqa: E402
from tests.support.training import (  # noqa: E402
    Config,
    Outcome,
    differences,
    make_config,
    merge,
    run_engine,
    run_plain,
)

NUM_STEPS = 4
CLIPPING = 0.5  # the gradients' norm is above 1
TOLERANCE = 1e-3  # of losses and weights beside plain torch's
ON_HOST = {"device": "cpu"}
HALF = {"stage": 3, "offload_param": ON_HOST, "offload_optimizer": {**ON_HOST, "ratio": 0.5}}

PLACEMENTS: dict[str, Config] = {
    "device": {"offloadzero": {"placement": "device"}},
    "host": {"offloadzero": {"placement": "host"}},
    "nvme": {"offloadzero": {"placement": "nvme"}},
    "host, half on the device": {"zero_optimization": HALF},
}
VARIANTS: dict[str, Config] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "compact": {"offloadzero": {"state_layout": "compact"}},
    "checkpoints on the host": {"offloadzero": {"activation_checkpoints": {"tier": "host"}}},
}


class Case(NamedTuple):
    """One training. Its reference is the same one with all states, and inputs of checkpoints, on the device."""

    placement: str
    variant: str
    clips: bool

    @property
    def name(self) -> str:
        return f"{self.placement}: {self.variant}{', clipping' if self.clips else ''}"

    @property
    def reference(self) -> Case:
        variant = "plain" if self.variant.startswith("checkpoints") else self.variant
        return Case("device", variant, self.clips)

    def config(self, directory: Path, device: str) -> Config:
        config = make_config("host", directory, clipping=CLIPPING if self.clips else 0.0)
        del config["offloadzero"]["placement"]  # a share on the device goes without
        # Some biases have no gradient but rounding, of which Adam makes whole steps where eps is small.
        own = {"offloadzero": {"device": device}, "optimizer": {"params": {"eps": 1e-4}}}
        return merge(merge(merge(config, own), VARIANTS[self.variant]), PLACEMENTS[self.placement])


CASES = [
    Case(placement, variant, clips)
    for variant in VARIANTS
    for clips in (True, False)
    for placement in PLACEMENTS
]


def loop(case: Case, device: torch.device, engine: Any, *, num_steps: int = NUM_STEPS) -> list[float]:
    """Train; no loss is asked for before the end."""
    losses = []
    for seed in range(num_steps * VARIANTS[case.variant].get("gradient_accumulation_steps", 1)):
        loss = engine(tokens(seed, batch=4, length=33).to(device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def distance(found: Outcome, expected: Outcome) -> float:
    """Return the larger of the relative distances of the losses and of all weights; NaN is infinite."""

    def flat(outcome: Outcome) -> torch.Tensor:
        return torch.cat([outcome.weights[name].cpu().double().flatten() for name in expected.weights])

    pairs = [(torch.tensor(found.losses), torch.tensor(expected.losses)), (flat(found), flat(expected))]
    distances = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    return max(one if one == one else float("inf") for one in distances)


def check(case: Case, directory: Path, device: str, known: dict[Any, Outcome]) -> dict[str, Any]:
    """Run one case, and what it is compared with where that has not run: `known`."""
    there = find_device(device).torch_device
    for needed in (case.reference, case):
        if needed not in known:
            known[needed] = run_engine(
                SmallGpt, partial(loop, needed, there), needed.config(directory, device)
            )
    plain = ("torch", case.reference)
    if plain not in known:
        config = case.reference.config(directory, device)
        known[plain] = run_plain(lambda: SmallGpt().to(there), partial(loop, case.reference, there), config)
    unlike = differences(known[case], known[case.reference])
    of_torch = distance(known[case], known[plain])
    problem = None
    if unlike:
        problem = f"not bitwise as with all on the device: {', '.join(unlike[:4])}"
    elif not of_torch <= TOLERANCE:
        problem = f"{of_torch:.1e} from plain torch, {TOLERANCE:.0e} is allowed"
    return {"problem": problem, "of_torch": of_torch}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nvme-dir", default=".")
    parser.add_argument("--only", help="one case, for two steps, compared with nothing")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory(dir=args.nvme_dir, prefix="gpu-right-") as folder:
        if args.only:
            case = next(case for case in CASES if case.name == args.only)
            short = partial(loop, case, find_device(args.device).torch_device, num_steps=2)
            run_engine(SmallGpt, short, case.config(Path(folder), args.device))
            return 0
        return run(args.device, Path(folder))


def run(device: str, folder: Path) -> int:
    """Run all cases; return the exit status."""
    is_good, known = True, dict[Any, Outcome]()
    if device != "cpu":
        problem = triton_problem(find_device(device).torch_device)
        print(json.dumps({"triton": problem or "the host kernel's bits"}), flush=True)
        is_good = problem is None
    for case in CASES:
        try:
            found = check(case, folder, device, known)
        except Exception as error:  # of one case: the others have their own
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        is_good = is_good and "error" not in found and found["problem"] is None
        print(json.dumps({"cases": {case.name: found}}), flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
