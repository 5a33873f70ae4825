"""How many host buffers gradients take turns in: the step's time with so many, and with others, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero.arithmetic import device_math
from offloadzero.planning import memory_plan
from tests.observe.test_device_time import MS, NUM_BLOCKS, WIDTH, Case, timed_engine, train_step

# Milliseconds of backward, of the way home and of adding what came, of one unit. The longest is 20 in each.
SLOWEST = {"compute": (20, 15, 15), "d2h": (15, 20, 15), "merge": (15, 15, 20)}


def merge_period_ms(
    backward: float, d2h: float, merge: float, directory: Path, patch: pytest.MonkeyPatch
) -> float:
    """From one unit's gradient being added to the next one's, late in the second micro batch of a step."""
    accumulate = device_math.accumulate
    case = Case(backward=backward, d2h=d2h, keys={"gradient_accumulation_steps": 2})
    added_at_s: list[float] = []
    with timed_engine(case, directory, patch, is_observed=False) as (engine, device):

        def slowly(*args: Any, **kwargs: Any) -> None:
            accumulate(*args, **kwargs)
            device.hosts.now_s += merge * MS
            added_at_s.append(device.hosts.now_s)

        patch.setattr(device_math, "accumulate", slowly)
        for _ in range(3):
            added_at_s.clear()
            engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
            engine.step()
            train_step(engine, device)
            device.synchronize()
    assert len(added_at_s) == NUM_BLOCKS
    return (added_at_s[-1] - added_at_s[-4]) / 3 / MS


@pytest.mark.parametrize("slowest", SLOWEST)
def test_micro_batches_add_up_at_the_pace_of_the_slowest(
    slowest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert merge_period_ms(*SLOWEST[slowest], tmp_path, monkeypatch) == pytest.approx(20)


def step_ms(num_passing: int | None, directory: Path, patch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Of a step whose updates take three times as long as backward: its time, its waits for buffers."""
    case = Case(backward=20, update=60)
    directory.mkdir()
    with patch.context() as inside:
        if num_passing is not None:
            inside.setattr(memory_plan, "NUM_PASSING_GRADS", num_passing)
        with timed_engine(case, directory, inside) as (engine, device):
            for _ in range(5):
                train_step(engine, device)
                device.synchronize()
            report = engine.last_step_report()
    return report.step_s / MS, report.waits_s.get("gradient buffer on the host", 0.0) / MS


def test_more_passing_buffers_shorten_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """[Note: gradients in passing]: with more of them backward waits less, and the next forward as much longer."""
    found = {num: step_ms(num, tmp_path / str(num), monkeypatch) for num in (None, 1, 2, 3, NUM_BLOCKS)}
    (as_is, _), (with_all, wait_with_all) = found[None], found[NUM_BLOCKS]
    assert wait_with_all == 0 < found[2][1]
    for num in (2, 3):
        assert found[num][0] == pytest.approx(with_all, rel=0.03)
    assert as_is == pytest.approx(with_all, rel=0.03)
    assert found[1][0] > as_is
