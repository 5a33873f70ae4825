"""Random training runs under random delays, each with its undisturbed resident twin.

One number draws everything: the model (depth, odd sizes, frozen, tied and unused parameters, blocks left out), where
its segments live, the budgets, the way of updating, the loop over it, and how slow each part of the engine is.
"""

from __future__ import annotations

import functools
import random
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offloadzero.core.fail_points import Point, listening
from offloadzero.io.engine import AioEngine
from tests.support.faults import begun_later
from tests.support.training import Config, Outcome, run_engine

MAX_DELAY_S = 0.003
LATENESS = 4  # times that long a file operation may be late: it is meant to be overtaken by whole updates
VOCABULARY = 61

# Where the parts are slow, lanes and files aside.
PARTS: Mapping[Point, str] = {
    "update.compute": "compute",
    "update.stage": "compute",
    "landing.merge": "land",
    "landing.measure": "land",
    "decider.decide": "decide",
    "step.begin_backward": "train",
    "step.step": "train",
}


class Slowness:
    """Sleeps drawn from a seed, in every thread; which parts are slow is drawn too."""

    def __init__(self, seed: int, *, slowest: str | None = None) -> None:
        """`slowest`: a part that is always slow."""
        self._random = random.Random(seed)
        self._slowest = slowest
        self._lock = threading.Lock()
        self._factors: dict[str, float] = {}

    def draw_s(self, part: str) -> float:
        with self._lock:
            if part not in self._factors:
                # Some parts are fast, some slow: uniform noise everywhere keeps the order of things.
                self._factors[part] = self._random.choice((0.0, 0.2, 1.0))
            chance, amount = self._random.random(), self._random.random()
        if part == self._slowest:
            return MAX_DELAY_S * (0.5 + 0.5 * amount)
        return MAX_DELAY_S * self._factors[part] * amount if chance < 0.5 else 0.0

    def sleep(self, part: str) -> None:
        duration_s = self.draw_s(part)
        if duration_s:
            time.sleep(duration_s)

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`function` with a sleep before and one after."""

        def slow(*arguments: Any, **options: Any) -> Any:
            self.sleep(part)
            result = function(*arguments, **options)
            self.sleep(part)
            return result

        return slow

    def everywhere(self) -> AbstractContextManager[None]:
        """Lanes' tasks (each lane is a part), file operations, chunks of Adam, landings, decisions."""
        return listening(self._slow_at)

    def _slow_at(self, point: Point, work: Callable[..., Any], about: Any) -> Callable[..., Any]:
        if point == "lane.launch":
            return self._slow_lane(work, f"lane {about}")
        if point in ("nvme.read", "nvme.write"):
            return self._late(self._slow_file_operation(work, about.engine), point.removeprefix("nvme."))
        return self.around(work, PARTS[point]) if point in PARTS else work

    def _slow_lane(self, launch: Callable[..., Any], part: str) -> Callable[..., Any]:
        def slow(task: Callable[[], None], fence: Any) -> Any:
            self.sleep(part)
            return launch(self.around(task, part), fence)

        return slow

    def _slow_file_operation(self, submit: Callable[..., Any], engine: AioEngine) -> Callable[..., Any]:
        """The engine's own fault: the completion is seen late, other operations overtake."""

        def slow(verb: str, *arguments: Any, **options: Any) -> Any:
            delay_ms = int(1000 * self.draw_s(verb) + 0.5)
            if delay_ms:
                engine.inject("delay", 1, delay_ms)
            return submit(verb, *arguments, **options)

        return slow

    def _late(self, submit: Callable[..., Any], verb: str) -> Callable[..., Any]:
        """A file operation that touches its memory late: it is submitted from another thread, after a while."""

        def late(*arguments: Any, **options: Any) -> Any:
            delay_s = LATENESS * self.draw_s(f"late {verb}")
            begin = functools.partial(submit, *arguments, **options)
            return begun_later(begin, delay_s) if delay_s else begin()

        return late


# --- what is trained


@dataclass(frozen=True)
class BlockForm:
    """One block of a random model."""

    hidden: int
    frozen: str  # "no" | "up" | "all"
    unused: int  # elements of a parameter that takes no part
    checkpointed: bool


class RandomBlock(nn.Module):
    """Residual MLP: (..., width) -> the same shape."""

    def __init__(self, width: int, form: BlockForm) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, form.hidden)
        self.down = nn.Linear(form.hidden, width)
        if form.unused:
            self.unused = nn.Parameter(torch.ones(form.unused))
        if form.frozen == "up":
            self.up.requires_grad_(False)
        elif form.frozen == "all":
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class RandomModel(nn.Module):
    """Embedding, blocks of different sizes, head. forward(ids, blocks in use) gives the loss."""

    def __init__(self, width: int, forms: Sequence[BlockForm], *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(RandomBlock(width, form) for form in forms)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self._forms = forms

    def forward(self, ids: Tensor, use: Sequence[int]) -> Tensor:
        h = self.emb(ids[:, :-1])
        for index in use:
            block = self.blocks[index]
            if self._forms[index].checkpointed and torch.is_grad_enabled():
                h = checkpoint(block, h, use_reentrant=False)
            else:
                h = block(h)
        return F.cross_entropy(self.head(h).float().flatten(0, 1), ids[:, 1:].flatten())


class AddedRows(nn.Module):
    """Its backward needs no weights: a graph may outlive a step."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(-1, 1, num_elements))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.rows.dtype) + self.rows


class SumModel(nn.Module):
    """Adds vectors of an odd size. forward(ids, blocks in use) gives the loss."""

    def __init__(self, num_elements: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AddedRows(num_elements) for _ in range(depth))
        self._num_elements = num_elements

    def forward(self, ids: Tensor, use: Sequence[int]) -> Tensor:
        h = torch.linspace(0, 1, self._num_elements) * ids.float().mean()
        for index in use:
            h = self.blocks[index](h)
        return h.float().pow(2).mean()


def token_ids(seed: int) -> Tensor:
    """Shape (2, 8)."""
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))


# --- the draw


@dataclass(frozen=True)
class Schedule:
    """A random run: `placed` and `resident` are its configurations but for the directory."""

    make_model: Callable[[], nn.Module]
    outlives: bool  # backward runs through graphs from before the last step
    loop: Callable[[Any], list[float]]
    placed: Config
    resident: Config

    @property
    def updates_at_step(self) -> bool:
        """Clipping and fp16 must know all gradients first; else the configuration says."""
        in_backward = self.placed["offloadzero"]["update"].get("in_backward", True)
        return bool(self.placed["gradient_clipping"] or "fp16" in self.placed or not in_backward)


TIERS = ("device", "host", "nvme")


def draw_schedule(seed: int) -> Schedule:
    """The run number `seed`."""
    draw = random.Random(seed)
    depth = draw.randint(2, 6)
    sums = draw.random() < 0.25
    outlives = sums and draw.random() < 0.8
    if sums:
        make_model: Callable[[], nn.Module] = functools.partial(
            SumModel, draw.choice((511, 4097, 9001)), depth
        )
    else:
        forms = tuple(_draw_block(draw) for _ in range(depth))
        make_model = functools.partial(
            RandomModel, draw.choice((15, 25, 33)), forms, tied=draw.random() < 0.4
        )
    clipping, dtype = (
        draw.choice((0.0, 0.0, 0.5)),
        draw.choice(("bf16", "bf16", "bf16", "bf16", "fp16", "fp32")),
    )
    accumulation = draw.choice((1, 1, 1, 2, 3))
    update: Config = {"chunk_elements": draw.choice((4096, 4096, 8192, 1 << 20))}
    update["num_chunks_in_flight"], update["num_threads"] = draw.choice((1, 2, 3, 5)), draw.choice((1, 2))
    if draw.random() < 0.2:
        update["in_backward"] = False
    config: Config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "offloadzero": {
            "device": "cpu",
            "poison_released_leases": True,
            "update": update,
            "units": {"min_leaf_elements": draw.choice((256, 10**6)), "prefetch_units": draw.randint(1, 3)},
        },
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"loss_scale": 128.0} if dtype == "fp16" else {})}
    zero: Config = {"stage": 3}
    if draw.random() < 0.7:
        zero["stage3_max_live_parameters"] = draw.choice((1, 6_000, 20_000, 10**6))
    loop = _draw_loop(draw, depth, accumulation, outlives=outlives)
    placement = _draw_placement(draw, depth)
    own = config["offloadzero"]
    return Schedule(
        make_model,
        outlives,
        loop,
        placed={**config, "zero_optimization": zero, "offloadzero": {**own, "placement": placement}},
        resident={**config, "zero_optimization": zero, "offloadzero": {**own, "placement": "device"}},
    )


def _draw_block(draw: random.Random) -> BlockForm:
    return BlockForm(
        hidden=draw.choice((1, 31, 129, 257)),
        frozen=draw.choice(("no", "no", "no", "no", "up", "all")),
        unused=draw.choice((0, 0, 0, 1, 511)),
        checkpointed=draw.random() < 0.2,
    )


def _draw_placement(draw: random.Random, depth: int) -> list[dict[str, str]]:
    """A rule for all units, whose tier some segments share, and rules for some units of their own."""

    def rule(units: str) -> dict[str, str]:
        usual, likeness = draw.choice(("device", "host", "nvme", "nvme")), draw.choice((0.4, 0.8, 1.0))
        kinds = ("param", "master", "exp_avg", "exp_avg_sq", "grad")
        tiers = {kind: usual if draw.random() < likeness else draw.choice(TIERS) for kind in kinds}
        return {"units": units, **tiers}

    own = [index for index in range(depth) if draw.random() < 0.4]
    return [rule("*"), *(rule(f"*.{index}") for index in own)]


def _draw_loop(
    draw: random.Random, depth: int, accumulation: int, *, outlives: bool
) -> Callable[[Any], list[float]]:
    """Training, with blocks left out now and then, evaluations, and reads of weights in between.

    `outlives`: the forward of each micro batch runs before the step of the micro batch before it.
    """
    num_steps = draw.choice((3, 4))
    uses = [
        tuple(i for i in range(depth) if draw.random() < 0.8) or (0,) for _ in range(num_steps * accumulation)
    ]
    if draw.random() < 0.5:
        uses = [tuple(range(depth))] * len(uses)
    evaluates = draw.random() < 0.3
    reads = draw.random() < 0.3

    def loop(engine: Any) -> list[float]:
        losses = []
        ahead = None
        for number, use in enumerate(uses):
            loss = engine(token_ids(number), use) if ahead is None else ahead
            following = number + 1
            ahead = (
                engine(token_ids(following), uses[following]) if outlives and following < len(uses) else None
            )
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if evaluates:
                with torch.no_grad():
                    losses.append(engine(token_ids(1000), tuple(range(depth))).item())
            if reads:
                weights = engine.module.blocks[number % depth].state_dict()
                losses += [float(value.float().sum()) for value in weights.values()]
        return losses

    return loop


# --- the two runs


@functools.cache
def reference(seed: int) -> Outcome:
    """The undisturbed resident run."""
    schedule = draw_schedule(seed)
    return run_engine(schedule.make_model, schedule.loop, schedule.resident)


def disturbed(seed: int, *, slowest: str | None = None) -> Outcome:
    """The placed run under delays."""
    schedule = draw_schedule(seed)
    with Slowness(seed, slowest=slowest).everywhere(), tempfile.TemporaryDirectory() as directory:
        own = {**schedule.placed["offloadzero"], "nvme_path": str(Path(directory))}
        return run_engine(schedule.make_model, schedule.loop, {**schedule.placed, "offloadzero": own})
