"""Updates that are tried in backward, [Note: versions] in update/pipeline.py: the bits are those of states that have
one place, and it is known how many trials are adopted and how many are done again.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
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
from tests.support.ranks import run_ranks
from tests.support.sharded import config_of, digest, engine_of, micro_batch
from tests.support.tiny import TinyModel
from tests.support.versions import (
    ADOPTED,
    AGAIN,
    NUM_TRIED,
    UNTRIED,
    Run,
    compare,
    counted,
    running,
    trials,
)

CLIPS = 1e-3
NEVER_CLIPS = 1e6
NUM_STEPS = 4
ALL = NUM_TRIED * NUM_STEPS


def steps(run: Run, *, num_steps: int = NUM_STEPS, num_micro: int = 1, waits: bool = True) -> None:
    for seed in range(num_steps * num_micro):
        run.backward(seed, waits=waits)
        if run.engine is not None or seed % num_micro == num_micro - 1:
            run.step()


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
    "masters on the host": {"placement": {**STATES_ON_NVME, "master": "host"}},
    "a moment on nvme": {"placement": {"param": "host", "states": "host", "exp_avg": "nvme"}},
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


# --- what scripts do between backward and step ---

Edit = Callable[[Run], object]


def param(run: Run, name: str = "blocks.1.up.weight") -> Any:
    return run.model.get_parameter(name)


def group(**options: Any) -> Edit:
    return lambda run: run.optimizer.param_groups[0].update(options)


def of_grad(edit: Callable[[Tensor], object]) -> Edit:
    return lambda run: edit(param(run).grad)


def assign(make: Callable[[Tensor], Tensor | None]) -> Edit:
    def edit(run: Run) -> None:
        param(run).grad = make(param(run).grad)

    return edit


def swap(run: Run) -> None:
    one, other = param(run), param(run, "blocks.2.up.weight")
    one.grad, other.grad = other.grad, one.grad


def write_weight(run: Run) -> None:
    with torch.no_grad():
        param(run).mul_(0.5)


def write_state(run: Run) -> None:
    run.optimizer.state[param(run)]["exp_avg"].add_(0.25)


def see_states(run: Run) -> None:
    run.seen += [
        copy.deepcopy(run.optimizer.state_dict()),
        {n: v.clone() for n, v in run.model.state_dict().items()},
    ]


def load_states(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def clip(run: Run, norm: float) -> None:
    run.seen.append(torch.nn.utils.clip_grad_norm_(run.model.parameters(), norm))


def backward_after_zero_grad(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(31)


def step_before(run: Run) -> None:
    run.optimizer.step()  # and once more, with the same gradients


# What a script does, and how many of the step's trials are done again then.
EDITS: dict[str, tuple[Edit, int]] = {
    "nothing": (lambda _: None, 0),
    "another lr": (group(lr=3e-3), NUM_TRIED),
    "another weight decay": (group(weight_decay=0.3), NUM_TRIED),
    "a factor": (of_grad(lambda grad: grad.mul_(0.5)), 1),
    "a factor that rounds": (of_grad(lambda grad: grad.mul_(1.1)), 1),
    "zeros": (of_grad(lambda grad: grad.zero_()), 1),
    "an element": (of_grad(lambda grad: grad[0].fill_(3.0)), 1),
    "a look": (lambda run: run.seen.append(param(run).grad.clone()), 0),
    "assigned": (assign(lambda grad: grad.clone() * 2), 1),
    "assigned the same": (assign(lambda grad: grad.clone()), 1),
    "dropped": (assign(lambda _: None), 1),
    "swapped": (swap, 2),
    "clipped": (partial(clip, norm=CLIPS), NUM_TRIED),
    "not clipped": (partial(clip, norm=NEVER_CLIPS), 0),
    "a weight": (write_weight, 1),
    "a state": (write_state, 1),
    "states seen": (see_states, 0),
    "states loaded": (load_states, NUM_TRIED),
    "zero_grad and another backward": (backward_after_zero_grad, 0),
    "another backward": (lambda run: run.backward(31), 0),
    "another backward, scaled": (lambda run: run.backward(31, times=0.5), 0),
}


# The homes of parameters, masters and gradients.
HOMES = {
    "nvme": ("nvme", "nvme", "nvme"),
    "gradients on host": ("nvme", "nvme", "host"),
    "mixed": ("host", "host", "host"),
}


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("name", EDITS)
def test_what_a_script_does_between_backward_and_step(name: str, homes: str, tmp_path: Path) -> None:
    edit, num_again = EDITS[name]

    def script(run: Run) -> None:
        for seed in range(3):
            run.backward(seed)
            if seed == 1:
                edit(run)
            run.step()

    placement = {"states": "nvme", **dict(zip(("param", "master", "grad"), HOMES[homes], strict=True))}
    adopted, again = compare(script, tmp_path, placement=placement)
    assert (adopted, again) == (3 * NUM_TRIED - num_again, num_again)


@pytest.mark.parametrize("name", EDITS)
def test_what_a_script_does_while_trials_run(name: str, tmp_path: Path, faults: ExitStack) -> None:
    """How many are adopted then is a question of time."""
    faults.enter_context(delays("update.compute", 0.01))

    def script(run: Run) -> None:
        for seed in range(3):
            run.backward(seed, waits=False)
            EDITS[name][0](run)
            run.step()

    compare(script, tmp_path)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9),
    "SGD without states": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_steps_with_the_same_gradients_take_a_trial_once(name: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for seed in range(2):
            run.backward(seed)
            run.optimizer.step()
            run.step()

    assert compare(script, tmp_path, optimizer=OPTIMIZERS[name]) == (2 * NUM_TRIED, 0)


def test_gradients_that_are_dropped_before_the_step_is_decided(tmp_path: Path, faults: ExitStack) -> None:
    """As in most loops: zero_grad() right after step()."""
    faults.enter_context(delays("decider.decide", 0.02))
    assert compare(steps, tmp_path) == (ALL, 0)


def test_a_loop_that_always_clips_goes_on_trying_where_that_changes_nothing(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for seed in range(NUM_STEPS):
            run.backward(seed)
            clip(run, NEVER_CLIPS)
            run.step()

    assert compare(script, tmp_path) == (ALL, 0)


def test_a_checkpoint_between_backward_and_step(tmp_path: Path) -> None:
    """What is saved there is the states before the step; what is loaded there replaces the gradients."""

    def script(run: Run) -> None:
        run.backward(0)
        run.step()
        run.backward(1)
        run.engine.save_checkpoint(tmp_path / "saved", tag="before")
        run.step()
        run.backward(2)
        run.engine.load_checkpoint(tmp_path / "saved", tag="before")
        run.seen.append(copy.deepcopy(run.optimizer.state_dict()))
        run.backward(3)
        run.step()

    keys = {"gradient_clipping": NEVER_CLIPS}
    assert compare(script, tmp_path, by_engine=True, **keys) == (3 * NUM_TRIED, 0)


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
        goes_on, staged = threading.Event(), list[object]()

        def hold(name: object) -> None:
            staged.append(name)
            goes_on.wait(10)

        with observes("update.stage", before=hold):
            run.backward(0, waits=False)
            tried = trials(run.runtime)
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


def test_a_state_is_written_while_its_trial_runs(tmp_path: Path) -> None:
    """The write waits for the trial, which nobody adopts."""
    with running(tmp_path, versions=True, by_engine=False) as run:
        order: list[str] = []
        with (
            observes("update.compute", before=lambda _: order.append("begun"), about="blocks.1"),
            delays("update.compute", 0.2, about="blocks.1"),
            observes("update.compute", after=lambda _: order.append("computed"), about="blocks.1"),
        ):
            run.backward(0, waits=False)
            while not order:
                pass
            write_state(run)
            order.append("written")
            run.step()
            run.runtime.changes.wait_updates()
        assert order == ["begun", "computed", "written", "begun", "computed"]


# --- several ranks ---


def train_sharded(rank: int, directory: str) -> dict[str, Any]:
    """By case: losses, bits of weights and states, and what became of the trials."""
    found: dict[str, Any] = {}
    for stage, clipping in [(1, NEVER_CLIPS), (2, NEVER_CLIPS), (3, NEVER_CLIPS), (3, 0.05), (3, 0.0)]:
        for versions in (False, True):
            keys = {"gradient_clipping": clipping, "offloadzero": {"versions": versions}}
            config = config_of("nvme", stage, Path(directory), world_size=2, **keys)
            with counted() as counts:
                engine = engine_of(config)
                seen: list[Any] = []
                for seed in range(3):
                    loss = engine(micro_batch(seed, rank, 2))
                    engine.backward(loss)
                    for trial in trials(engine._runtime):
                        trial.ticket.wait()
                    engine.step()
                    seen += [loss.item(), engine.get_global_grad_norm()]
                states = digest(dict(engine.module.state_dict()))
                for number, of_one in engine.optimizer.state_dict()["state"].items():
                    states |= digest({f"{number} {name}": torch.as_tensor(v) for name, v in of_one.items()})
                engine.close()
            found[f"{stage} {clipping} {versions}"] = [seen, states, dict(counts)]
    return found


def test_ranks_adopt_trials_each_for_itself(tmp_path: Path) -> None:
    """Where each rank has a part of the weights; else all weights are on each, and no record is on nvme whole."""
    for found in run_ranks(train_sharded, 2, tmp_path, str(tmp_path)):
        for case in {name.rsplit(" ", 1)[0] for name in found}:
            (seen, states, before), (now, states_now, counts) = found[f"{case} False"], found[f"{case} True"]
            assert (now, states_now) == (seen, states), case
            assert set(before) == {UNTRIED}
            is_plain = case in (f"3 {NEVER_CLIPS}", "3 0.0")
            assert (counts.get(ADOPTED, 0) > 0) == is_plain, (case, counts)
            assert counts.get(AGAIN, 0) == 0 or not is_plain
