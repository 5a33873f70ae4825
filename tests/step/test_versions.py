"""Updates that are tried in backward, [Note: versions] in update/pipeline.py: the bits are those of states that have
one place, and it is known how many trials are adopted and how many are done again.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offloadzero.core.fail_points import Point
from offloadzero.errors import NonFiniteError
from tests.support.faults import delays, fails, observes
from tests.support.tiny import TinyModel
from tests.support.versions import (
    ADOPTED,
    ALL,
    CLIPS,
    NEVER_CLIPS,
    NUM_TRIED,
    UNTRIED,
    Run,
    compare,
    running,
    steps,
    trials,
)

# --- settings ---

WIDE = partial(TinyModel, width=48)  # a block has four chunks
MUON = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1}}
STATES_ON_NVME = {"param": "nvme", "states": "nvme"}


def of_type(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2, "weight_decay": 0.1, **params}}}


SETTINGS: dict[str, dict[str, Any]] = {
    "clipping that never bites": {},
    "updates at the step": {"gradient_clipping": 0.0, "update": {"in_backward": False}},
    "gradients on nvme": {"placement": {**STATES_ON_NVME, "grad": "nvme"}},
    "gradients on the host": {"placement": {**STATES_ON_NVME, "grad": "host"}},
    "weights on the host": {"placement": {"param": "host", "states": "nvme"}},
    "non-finite steps are skipped": {"gradient_clipping": 0.0, "update": {"on_nonfinite": "skip"}},
    "fp32": {"bf16": None},
    "compact": {"state_layout": "compact"},
    "checksums": {"aio": {"checksums": True}},
    "many chunks": {"make": WIDE, "update": {"chunk_elements": 4096, "num_chunks_in_flight": 2}},
    "one chunk in flight": {"make": WIDE, "update": {"chunk_elements": 4096, "num_chunks_in_flight": 1}},
    "Lion": of_type("Lion"),
    "SGD": of_type("SGD", momentum=0.9),
    "SGD without states": of_type("SGD"),
    "Adagrad": of_type("Adagrad"),
    "checkpointed inputs": {"activation_checkpoints": {"units": ["blocks.*"], "tier": "nvme", "input_bytes": "1MiB"}},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_all_trials_of_steps_that_are_applied_as_they_are_are_adopted(name: str, tmp_path: Path) -> None:
    keys = {"gradient_clipping": NEVER_CLIPS, **SETTINGS[name]}
    assert compare(steps, tmp_path, by_engine=True, **keys) == (ALL, 0)


@pytest.mark.parametrize("layout", ["fp32", "compact"])
def test_micro_batches_add_up_before_a_trial(layout: str, tmp_path: Path) -> None:
    script = partial(steps, num_steps=3, num_micro=3)
    keys = {"gradient_clipping": NEVER_CLIPS, "gradient_accumulation_steps": 3, "state_layout": layout}
    assert compare(script, tmp_path, by_engine=True, **keys) == (3 * NUM_TRIED, 0)


def test_a_step_that_is_clipped_takes_no_trial_and_the_next_one_tries_nothing(tmp_path: Path) -> None:
    keys = {"gradient_clipping": CLIPS}
    assert compare(steps, tmp_path, by_engine=True, **keys) == (0, 0)  # the first gradient says it
    with running(tmp_path, versions=True, by_engine=True, **keys) as run:
        steps(run, num_steps=1)
        run.backward(7)
        assert not trials(run.runtime)


def test_clipping_that_bites_in_some_steps(tmp_path: Path) -> None:
    """One of six, whose norm is 9.2; those of what is tried are 8.1 together, so all of its trials have run."""
    keys = {"gradient_clipping": 8.5}
    script = partial(steps, num_steps=6)
    assert compare(script, tmp_path, by_engine=True, **keys) == (5 * NUM_TRIED, NUM_TRIED)


def test_trials_come_back_when_most_steps_are_not_clipped(tmp_path: Path) -> None:
    """Of the last eight steps at least half must have been applied as they are."""

    def script(run: Run) -> None:
        for seed in range(6):
            run.backward(seed, times=100.0 if seed < 2 else 1.0)
            run.step()

    # The first gradient of step 0 ends its trials; steps 1 to 3 have none; those of 4 and 5 are adopted.
    assert compare(script, tmp_path, by_engine=True, gradient_clipping=30.0) == (2 * NUM_TRIED, 0)


def test_matrices_that_are_updated_whole(tmp_path: Path) -> None:
    keys = {"optimizer": MUON, "gradient_clipping": NEVER_CLIPS}
    adopted, again = compare(steps, tmp_path, by_engine=True, **keys)
    assert (adopted > 0, again) == (True, 0)


def test_a_loss_scale_that_overflows_and_grows(tmp_path: Path) -> None:
    scale = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 2, "hysteresis": 1}

    def script(run: Run) -> None:
        for seed in range(10):
            run.backward(seed, times=1e30 if seed == 3 else 1.0)
            run.step()
            run.seen.append((run.engine.loss_scale, run.engine.skipped_steps))
        assert run.engine.skipped_steps >= 2

    adopted, again = compare(script, tmp_path, by_engine=True, bf16=None, fp16=scale)
    assert adopted >= 7 * NUM_TRIED
    assert again == 0  # a skipped step begins no job


# --- gradients that are not finite ---


def poisons(model: nn.Module, block: int) -> Any:
    """From this block's output backwards every gradient is NaN."""

    def poison(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: grad * float("nan"))

    return model.blocks[block].register_forward_hook(poison)  # type: ignore[union-attr, index]


@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_step_that_is_skipped_takes_no_trial(block: int, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for seed in range(4):
            handle = poisons(run.model, block) if seed == 1 else None
            run.backward(seed)
            if handle is not None:
                handle.remove()
            run.step()

    keys = {"update": {"on_nonfinite": "skip"}}
    assert compare(script, tmp_path, by_engine=True, **keys) == (3 * NUM_TRIED, 0)


@pytest.mark.parametrize("by_engine", [True, False])
def test_a_step_that_is_refused_takes_no_trial(by_engine: bool, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.backward(0)
        run.step()
        handle = poisons(run.model, 1)
        run.backward(1)
        handle.remove()
        run.optimizer.step()
        run.runtime.coordinator._wait_decided()
        with pytest.raises(NonFiniteError) as caught:
            run.optimizer.step()
        run.seen.append(str(caught.value))
        run.optimizer.zero_grad()
        run.backward(2)
        run.step()

    keys = {"gradient_clipping": NEVER_CLIPS}
    assert compare(script, tmp_path, by_engine=by_engine, **keys) == (2 * NUM_TRIED, 0)


# --- models ---


class Odd(TinyModel):
    """Blocks of which steps leave out some, whole or in part; one has an unused parameter, one a frozen one."""

    def __init__(self) -> None:
        super().__init__(width=16)
        self.blocks[3].unused = nn.Parameter(torch.ones(8))  # type: ignore[union-attr]
        self.blocks[2].up.bias.requires_grad_(False)  # type: ignore[union-attr]
        self.used = [0, 1, 2, 3]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.emb(tokens[:, :-1])
        for number in self.used:
            hidden = self.blocks[number](hidden)
        return self.head(self.norm(hidden)).float().pow(2).mean()


def test_units_that_get_gradients_in_part(tmp_path: Path) -> None:
    """Whole ones are adopted: the embedding, and blocks 0 and 1 where they are used."""

    def script(run: Run) -> None:
        for seed, used in enumerate([[0, 1, 2, 3], [1, 2], [0, 3], [0, 1, 2, 3]]):
            run.model.used = used  # type: ignore[assignment]
            run.backward(seed)
            run.step()

    assert compare(script, tmp_path, make=Odd)[0] == 4 + 3 + 3


def test_a_backward_over_other_units_leaves_the_trials_of_the_first(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for first, second in [([0, 1, 2, 3], [2, 3]), ([1], [0])]:
            for seed, used in enumerate([first, second]):
                run.model.used = used  # type: ignore[assignment]
                run.backward(seed)
            run.step()

    assert compare(script, tmp_path, make=Odd) == (6, 0)


class Checkpointed(TinyModel):
    def __init__(self) -> None:
        super().__init__(width=16)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.emb(tokens[:, :-1])
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(self.norm(hidden)).float().pow(2).mean()


def test_activation_checkpoints_of_the_model(tmp_path: Path) -> None:
    assert compare(steps, tmp_path, make=Checkpointed) == (ALL, 0)


# --- time ---

POINTS: tuple[Point, ...] = (
    "update.stage",
    "update.compute",
    "nvme.read",
    "nvme.write",
    "landing.measure",
    "landing.merge",
    "decider.decide_one",
    "decider.decide",
    "lane.launch",
)


@pytest.mark.parametrize("point", POINTS)
def test_trials_that_come_late_or_never(point: Point, tmp_path: Path, faults: ExitStack) -> None:
    faults.enter_context(delays(point, 0.003))
    for keys in ({"gradient_clipping": NEVER_CLIPS}, {"gradient_clipping": 0.5, "aio": {"checksums": True}}):
        compare(partial(steps, waits=False), tmp_path, by_engine=True, **keys)


def test_a_trial_that_has_not_begun_is_given_up_at_the_step(tmp_path: Path) -> None:
    """The pipeline is held in the first trial till the step is taken: that one is adopted, the others never begin."""
    with running(tmp_path, versions=True, by_engine=True, gradient_clipping=NEVER_CLIPS) as run:
        goes_on, has_begun, staged = threading.Event(), threading.Event(), list[object]()

        def hold(name: object) -> None:
            staged.append(name)
            has_begun.set()
            goes_on.wait(10)

        with observes("update.stage", before=hold):
            run.backward(0, waits=False)
            tried = trials(run.runtime)
            assert has_begun.wait(10)
            run.engine.step()
            goes_on.set()
            run.runtime.changes.wait_updates()
        assert [trial.is_given_up for trial in tried] == [True] * NUM_TRIED
        assert run.counts == {ADOPTED: 1, UNTRIED: NUM_TRIED}
        assert len(staged) == NUM_TRIED + 1  # each is updated once, and the rest


@pytest.mark.parametrize("by_engine", [True, False])
def test_an_engine_is_closed_before_the_step(by_engine: bool, tmp_path: Path, faults: ExitStack) -> None:
    """Its weights are those before the step, and nothing hangs."""
    faults.enter_context(delays("update.stage", 0.02))
    left = []
    for versions in (False, True):
        keys = {"gradient_clipping": NEVER_CLIPS}
        with running(tmp_path, versions=versions, by_engine=by_engine, **keys) as run:
            steps(run, num_steps=2)
            run.backward(2, waits=False)
            states = run.states()
        left.append(states)
    assert all(map(torch.equal, *[[v for v in s.values() if isinstance(v, Tensor)] for s in left]))


# --- errors ---


@pytest.mark.parametrize("point", ["nvme.write", "update.stage", "update.compute"])
@pytest.mark.parametrize("at", [1, 4])
def test_an_error_in_a_trial_stops_the_engine_as_one_in_the_update_does(
    point: Point, at: int, tmp_path: Path
) -> None:
    for versions in (False, True):
        with running(tmp_path, versions=versions, by_engine=True, gradient_clipping=NEVER_CLIPS) as run:
            steps(run, num_steps=1)
            run.runtime.changes.wait_updates()

            def train(run: Run = run) -> None:
                run.backward(1, waits=False)
                run.engine.step()
                run.runtime.changes.wait_updates()

            with fails(point, OSError("no such drive"), at=at), pytest.raises(OSError, match="no such drive"):
                train()
            with pytest.raises(OSError, match="no such drive"):
                run.backward(2, waits=False)


# --- the second place ---


def test_a_trial_leaves_the_present_states_alone(tmp_path: Path) -> None:
    """Until it is adopted, and then all segments change their places at once."""
    with running(tmp_path, versions=True, by_engine=False) as run:
        before = run.states()
        records = [record for record in run.runtime.records if record.has_versions]
        places = [[record.segments[kind].extent for kind in record.layout] for record in records]
        run.backward(0)
        now = run.states()
        assert all(torch.equal(now[n], v) for n, v in before.items() if isinstance(v, Tensor))
        run.step()
        run.runtime.changes.wait_updates()
        assert len(records) == NUM_TRIED
        for record, old in zip(records, places, strict=True):
            assert not {record.segments[kind].extent for kind in record.layout} & {*old}


def test_updates_that_run_in_backward_anyway_have_no_second_place(tmp_path: Path) -> None:
    with running(tmp_path, versions=True, by_engine=True) as run:
        assert not any(record.has_versions for record in run.runtime.records)
        assert not [
            line for line in run.runtime.plan.lines if line.what == "second places" and line.num_bytes
        ]
        steps(run)
