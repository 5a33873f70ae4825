"""What scripts do between backward and step, where updates have been tried: test_versions.py says what is compared."""

from __future__ import annotations

import copy
import gc
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.tickets import Promise, Ticket
from offloadzero.step.decider import Decider
from offloadzero.step.job import Trial
from tests.support.cases import each_pair
from tests.support.faults import delays, observes
from tests.support.versions import (
    ADOPTED,
    AGAIN,
    ALL,
    CLIPS,
    NEVER_CLIPS,
    NUM_STEPS,
    NUM_TRIED,
    Run,
    compare,
    running,
    steps,
    trials,
)

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
    one.grad, other.grad = other.grad.clone(), one.grad.clone()


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


HOMES = ("nvme", "host")


@pytest.mark.parametrize(("name", "param_home", "grad_home"), each_pair(EDITS, HOMES, HOMES))
def test_what_a_script_does_between_backward_and_step(
    name: str, param_home: str, grad_home: str, tmp_path: Path
) -> None:
    edit, num_again = EDITS[name]

    def script(run: Run) -> None:
        for seed in range(3):
            run.backward(seed)
            if seed == 1:
                edit(run)
            run.step()

    placement = {"states": "nvme", "param": param_home, "master": "nvme", "grad": grad_home}
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


@pytest.mark.parametrize("takes_steps", [True, False])
def test_trials_of_former_steps_are_not_kept(takes_steps: bool, tmp_path: Path) -> None:
    """Nor do they wait for Python's collector."""
    with running(tmp_path, versions=True, by_engine=False) as run:
        others = [each for each in gc.get_objects() if isinstance(each, Trial)]
        gc.disable()
        try:
            for seed in range(3):
                run.backward(seed)
                (run.step if takes_steps else run.optimizer.zero_grad)()
            run.runtime.changes.wait_updates()
            kept = [each for each in gc.get_objects() if isinstance(each, Trial)]
            assert len(kept) <= len(others) + NUM_TRIED
        finally:
            gc.enable()


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


class TwoBlocks(nn.Module):
    """Blocks that a script may use apart from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.rest = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, block: int) -> Any:
        return self.blocks[block](x).square().mean()


def test_states_that_were_read_ahead_are_of_the_place_before(tmp_path: Path) -> None:
    """Of two micro batches the first tries its update and the second, as steps were clipped since, reads ahead."""

    def weights_after(*, versions: bool) -> tuple[Tensor, Counter[str]]:
        torch.manual_seed(0)
        decides = threading.Event()
        keys = {"gradient_clipping": 1.0, "bf16": None}
        with running(tmp_path, versions=versions, by_engine=False, make=TwoBlocks, **keys) as run:
            model, optimizer, runtime = run.model, run.optimizer, run.runtime
            x = torch.randn(4, 64)
            with observes("decider.decide", before=lambda _: decides.wait(20)):
                (model(x, 1) * 1e4).backward()  # clipped, and decided late
                run.step()
                model(x, 0).backward()
                decides.set()
                for trial in trials(runtime):
                    trial.ticket.wait()
                runtime.changes.wait_updates()
                (model.rest * 0.01).sum().backward()  # type: ignore[operator]
                run.step()
                runtime.changes.wait_updates()
            model(x, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            return run.states()["blocks.0 exp_avg"], run.counts

    expected, _ = weights_after(versions=False)
    found, counts = weights_after(versions=True)
    assert counts[ADOPTED] in (1, 2)  # whether that of the last step is over in time, its step decides
    assert torch.equal(found, expected)


def test_a_trial_comes_after_the_last_one_of_its_unit(tmp_path: Path) -> None:
    """A write of a trial that came to nothing is slow: it must not come after those of the next one, to that place."""

    def weights_after(*, versions: bool) -> tuple[Tensor, Counter[str]]:
        torch.manual_seed(0)
        goes_on, is_armed = threading.Event(), [False]
        submit = NvmeTier.submit

        def held(tier: NvmeTier, verb: str, *given: Any, **options: Any) -> Ticket:
            if verb != "write" or not options["label"].endswith("exp_avg") or not is_armed[0]:
                return submit(tier, verb, *given, **options)
            is_armed[0], written = False, Promise()

            def later() -> None:
                goes_on.wait(20)
                written.fulfil(submit(tier, verb, *given, **options))

            threading.Thread(target=later, daemon=True).start()
            return written

        keys = {"gradient_clipping": 1e6, "bf16": None}
        with (
            patch.object(NvmeTier, "submit", held),
            patch.object(Decider, "trial_scale", lambda _: 1.0),  # without a pause
            running(tmp_path, versions=versions, by_engine=False, make=TwoBlocks, **keys) as run,
        ):
            x = torch.randn(4, 64)
            for number in range(3):
                is_armed[0] = versions and number == 1
                run.model(x * (number + 1), 0).backward()
                if number == 1:
                    for trial in trials(run.runtime):
                        trial.ticket.wait_fulfilled()
                    run.optimizer.param_groups[0]["lr"] = 5e-3  # what was tried comes to nothing
                else:
                    threading.Timer(0.3, goes_on.set).start() if number else None
                    for trial in trials(run.runtime):
                        trial.ticket.wait()
                run.step()
                if number < 1:
                    run.runtime.changes.wait_updates()
            goes_on.set()
            return run.states()["blocks.0 exp_avg"], run.counts

    expected, _ = weights_after(versions=False)
    found, counts = weights_after(versions=True)
    assert counts[AGAIN] == 1
    assert torch.equal(found, expected)
