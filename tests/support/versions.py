"""Trains with states of two places and with states of one, and counts what becomes of the updates that are tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import offloadzero
from offloadzero.engine.runtime import Runtime
from offloadzero.step.job import Trial, UpdateJob
from offloadzero.step.step_decision import TrialPolicy
from tests.support.tiny import TinyModel, make_engine, settings, tokens

ADOPTED, AGAIN, UNTRIED = "adopted", "again", "untried"
NUM_TRIED = 5  # of the six records of the model: the rest stays on the device
CLIPS = 1e-3
NEVER_CLIPS = 1e6
NUM_STEPS = 4
ALL = NUM_TRIED * NUM_STEPS


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many updates take a trial over, are done again after one has begun, or had none. Trials never pause."""
    counts: Counter[str] = Counter()
    tried = set[tuple[int, int]]()  # record and step
    begin, may_begin = UpdateJob.begin, Trial.may_begin

    def begin_counted(job: UpdateJob, *, grad_scale: float) -> None:
        begin(job, grad_scale=grad_scale)
        was_tried = (job.record.index, job.account.step) in tried
        counts[ADOPTED if job.adopted is not None else AGAIN if was_tried else UNTRIED] += 1

    def may_begin_noted(trial: Trial) -> bool:
        has_begun = may_begin(trial)
        if has_begun:
            tried.add((trial.record.index, trial.account.step))
        return has_begun

    after_step = TrialPolicy.after_step

    def without_pause(policy: TrialPolicy, **step: Any) -> TrialPolicy:
        return replace(after_step(policy, **step), pause=0)

    with (
        patch.object(UpdateJob, "begin", begin_counted),
        patch.object(Trial, "may_begin", may_begin_noted),
        patch.object(TrialPolicy, "after_step", without_pause),
    ):
        yield counts


def trials(runtime: Runtime) -> list[Trial]:
    """The updates that are tried of gradients that are home."""
    found = []
    for gradient in runtime.coordinator._gradients.values():
        gradient.landed.wait()
        if isinstance(gradient.trial, Trial):
            found.append(gradient.trial)
    return found


@dataclass
class Run:
    """A training: an engine's, or, with `engine` None, a plain loop's."""

    model: nn.Module
    optimizer: Any
    engine: Any
    counts: Counter[str]
    seen: list[Any] = field(default_factory=list)  # all that the script has seen

    @property
    def runtime(self) -> Runtime:
        runtime: Runtime = self.optimizer.runtime
        return runtime

    def backward(self, seed: int, *, waits: bool = True, times: float = 1.0) -> None:
        """A micro batch; `waits`: until its trials have ended, so that it is known which of them are adopted."""
        if self.engine is None:
            loss = self.model(tokens(seed)) * times
            loss.backward()
        else:
            loss = self.engine(tokens(seed)) * times
            self.engine.backward(loss)
        self.seen.append(loss.item())
        if waits:
            for trial in trials(self.runtime):
                trial.ticket.wait()

    def step(self) -> None:
        """The step, after which no gradient is left."""
        if self.engine is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.engine.step()
            if self.engine.is_gradient_accumulation_boundary() and self.engine.global_steps:
                self.seen.append(repr(self.engine.get_global_grad_norm()))

    def states(self) -> dict[str, Any]:
        """All segments of all records but the gradients', and the numbers of their updates."""
        runtime = self.runtime
        runtime.changes.wait_updates()
        states: dict[str, Any] = {}
        for record in runtime.records:
            states[f"{record.name} steps"] = [slot.step for slot in record.slots]
            for kind in record.layout:
                segment = record.segments[kind]
                values = torch.empty(segment.num_elements, dtype=segment.dtype)
                runtime.store.read(segment, values).wait()
                parts = [record.chunk_slice(kind, s.offset, s.offset + s.num_elements) for s in record.slots]
                states[f"{record.name} {kind}"] = torch.cat([values[part] for part in parts])
        return states


Script = Callable[[Run], None]


@contextmanager
def running(
    directory: Path,
    *,
    versions: bool,
    by_engine: bool,
    make: Callable[[], nn.Module] = lambda: TinyModel(width=16),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(
        m.parameters(), lr=1e-2
    ),
    **keys: Any,
) -> Iterator[Run]:
    """A fresh training."""
    torch.manual_seed(1)
    model = make()
    with counted() as counts:
        if by_engine:
            engine = make_engine(settings(directory, versions=versions, **keys), model)
            run = Run(engine.module, engine.optimizer, engine, counts)
        else:
            config = settings(directory, versions=versions, **{"optimizer": None, **keys})
            _, offloaded = offloadzero.offload(model, optimizer(model), config)
            run = Run(model, offloaded, None, counts)
        try:
            yield run
        finally:
            (run.optimizer if run.engine is None else run.engine).close()


def outcome(script: Script, directory: Path, **given: Any) -> tuple[list[Any], dict[str, Any], Counter[str]]:
    """What a script sees and leaves, and what became of the trials."""
    with running(directory, **given) as run:
        script(run)
        return run.seen, run.states(), run.counts


def compare(script: Script, directory: Path, *, by_engine: bool = False, **keys: Any) -> tuple[int, int]:
    """Run a script with states of one place and of two: bit by bit the same. Returns how many updates of the second run
    have taken a trial over, and how many were done again after one had begun.
    """
    seen, states, counts = outcome(script, directory, versions=False, by_engine=by_engine, **keys)
    assert set(counts) <= {UNTRIED}
    seen_now, states_now, counts_now = outcome(script, directory, versions=True, by_engine=by_engine, **keys)
    assert repr(seen_now) == repr(seen)
    assert states_now.keys() == states.keys()
    for name, values in states.items():
        now = states_now[name]
        assert torch.equal(now, values) if isinstance(values, torch.Tensor) else now == values, name
    assert counts_now.total() == counts.total()
    return counts_now[ADOPTED], counts_now[AGAIN]


def steps(run: Run, *, num_steps: int = NUM_STEPS, num_micro: int = 1, waits: bool = True) -> None:
    """A training of so many steps."""
    for seed in range(num_steps * num_micro):
        run.backward(seed, waits=waits)
        if run.engine is not None or seed % num_micro == num_micro - 1:
            run.step()
