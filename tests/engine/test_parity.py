"""Where the states live, and how they are moved, does not change a bit: DESIGN's first invariant."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadzero
from tests.support import parity
from tests.support.cases import IN_FULL, each_pair
from tests.support.parity import CASES, Case, batches, case_config, make_model, run_case, run_row, train
from tests.support.training import (
    PLACEMENTS,
    Outcome,
    assert_same,
    one_step,
    run_engine,
    run_plain,
    snapshot,
    worst_relative_difference,
)

# As many as in docs/how-it-works.md, which `python -m tests.support.parity` makes, or fewer of the same: nearer to
# plain PyTorch, as the distance grows from step to step. A learning rate of nine tenths is 0.2 % away after five, a run
# without clipping 0.07 % after six.
STEPS = {} if IN_FULL else {"num_steps": 3, "num_plain_steps": 6}
PLAIN_TOLERANCE = parity.PLAIN_TOLERANCE if IN_FULL else 5e-4
VARIATION_STEPS = 4 if IN_FULL else 3
CELLS = each_pair((1, 3), (0.0, 1.0), (False, True), PLACEMENTS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matrix(case: Case, tmp_path: Path) -> None:
    placements = [place for *values, place in CELLS if Case(*values) == case]
    row = run_row(case, tmp_path, placements=placements, **STEPS)
    assert placements
    assert row.differences == {placement: [] for placement in placements}
    assert row.worst_plain <= PLAIN_TOLERANCE


def test_the_model_of_the_matrix_learns_and_uses_every_tier(tmp_path: Path) -> None:
    """Equal numbers mean little if nothing is learnt, or if nothing is moved."""
    case = Case(accumulation=1, clipping=1.0, checkpointing=False)
    engine, *_ = offloadzero.initialize(model=make_model(case), config=case_config(case, "mixed", tmp_path))
    losses = train(engine, case, parity.NUM_STEPS)
    table = engine.memory_table()
    engine.close()
    assert losses[-1] < losses[0] - 0.3
    for kind in ("param", "master", "exp_avg", "exp_avg_sq"):
        assert table.count(f"home: {kind} ") == 3, table
    assert "home: grad" in table.split("nvme")[1], table


@pytest.mark.parametrize("dtype", ["bf16", None])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_compared_is_what_the_state_dicts_say(
    placement: str, dtype: str | None, tmp_path: Path
) -> None:
    """An outcome's values come from segments read as wholes."""
    case = Case(accumulation=1, clipping=0.0, checkpointing=False)
    engine, *_ = offloadzero.initialize(
        model=make_model(case), config=case_config(case, placement, tmp_path, dtype=dtype)
    )
    train(engine, case, 2)
    outcome, named, numbered = snapshot(engine, []), engine.module.state_dict(), engine.optimizer.state_dict()
    engine.close()
    assert outcome.weights.keys() == named.keys()
    assert all(torch.equal(value, named[name]) for name, value in outcome.weights.items())
    assert outcome.states.keys() == numbered["state"].keys()
    for number, states in numbered["state"].items():
        assert outcome.states[number].keys() == states.keys()
        assert all(torch.equal(value, outcome.states[number][key]) for key, value in states.items())


def own(**block: Any) -> dict[str, Any]:
    return {"offloadzero": block}


MANY_LIVE = {"zero_optimization": {"stage3_max_live_parameters": 10**9}}
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "two units prefetched": (
        "nvme",
        {"zero_optimization": {"stage3_max_live_parameters": 30_000}},
    ),
    "a device budget in bytes": ("mixed", own(budgets={"device": "384KiB"})),
    "all units on the device": ("nvme", MANY_LIVE),
    "all units on the device, from host": ("host", MANY_LIVE),
    "io_uring": ("nvme", own(aio={"backend": "io_uring"})),
    "native_aio": ("nvme", own(aio={"backend": "native_aio"})),
    "aiofiles": ("nvme", own(aio={"backend": "aiofiles"})),
    "file blocks of 4096 bytes": ("mixed", {"aio": {"block_size": 4096, "queue_depth": 2}}),
    "two file threads": ("mixed", {"aio": {"block_size": 8192, "intra_op_parallelism": 2}}),
    "one update thread": ("mixed", own(update={"num_threads": 1})),
    "two update threads": ("mixed", own(update={"num_threads": 2})),
    "smallest chunks": ("mixed", own(update={"chunk_elements": 4096})),
    "smallest chunks, one in flight": (
        "nvme",
        own(update={"chunk_elements": 4096, "num_chunks_in_flight": 1}),
    ),
    "many chunks in flight": ("nvme", own(update={"chunk_elements": 4096, "num_chunks_in_flight": 7})),
    "part of the update on the device": (
        "host",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    ),
    "gradients on files": (
        "nvme",
        own(
            placement=dict.fromkeys(("param", "master", "exp_avg", "exp_avg_sq", "grad"), "nvme"),
            update={"in_backward": False},
        ),
    ),
    "update after backward": ("mixed", own(update={"in_backward": False})),
}


@functools.cache
def resident(case: Case) -> Outcome:
    """The run with everything on the device."""
    with tempfile.TemporaryDirectory() as directory:
        return run_case(case, "resident", directory, num_steps=VARIATION_STEPS)


ACCUMULATION = 3 if IN_FULL else 2


@pytest.mark.parametrize(
    ("name", "accumulation", "clipping"), each_pair(VARIATIONS, (1, ACCUMULATION), (0.0, 1.0))
)
def test_how_states_are_moved_changes_nothing(
    name: str, accumulation: int, clipping: float, tmp_path: Path
) -> None:
    placement, over = VARIATIONS[name]
    case = Case(accumulation, clipping, False)
    found = run_case(case, placement, tmp_path, num_steps=VARIATION_STEPS, **over)
    assert_same(found, resident(case))


@pytest.mark.parametrize("case", [Case(1, 0.0, False), Case(ACCUMULATION, 1.0, False)], ids=str)
def test_striping_over_two_directories_changes_nothing(case: Case, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    over = own(nvme_path=[str(path) for path in paths])
    assert_same(run_case(case, "nvme", tmp_path, num_steps=VARIATION_STEPS, **over), resident(case))


@pytest.mark.parametrize(
    "units",
    [
        {"min_leaf_elements": 0},
        {"min_leaf_elements": 10**9},
        {"patterns": ["blocks.*.up", "blocks.*.down", "tokens"]},
        {"patterns": ["blocks"]},
    ],
    ids=str,
)
def test_how_units_are_cut_changes_nothing_without_clipping(units: dict[str, Any], tmp_path: Path) -> None:
    """With clipping the norm is a sum over units, whose rounding depends on the cut."""
    case = Case(ACCUMULATION, 0.0, False)
    outcome = run_case(case, "nvme", tmp_path, num_steps=VARIATION_STEPS, **own(units=units))
    outcome.norm = resident(case).norm
    assert_same(outcome, resident(case))


DYNAMIC = {"loss_scale": 0, "initial_scale_power": 7, "loss_scale_window": 2, "hysteresis": 1}
DTYPES: dict[str, tuple[str | None, dict[str, Any], float]] = {
    "fp32": (None, {}, 5e-5 if IN_FULL else 1e-5),
    "fp16, fixed scale": ("fp16", {}, 1e-3),
    "fp16, dynamic scale": ("fp16", {"fp16": DYNAMIC}, 1e-3),
}
DTYPE_STEPS = 10 if IN_FULL else 5


@functools.cache
def plain_losses(case: Case, dtype: str | None) -> list[float]:
    config = case_config(case, "resident", "", dtype=dtype)
    return run_plain(lambda: make_model(case), lambda engine: train(engine, case, DTYPE_STEPS), config).losses


DTYPE_CASES = Case(1, 0.0, False), Case(2, 1.0, True)
DTYPE_CELLS = each_pair(DTYPES, DTYPE_CASES, ("host", "nvme", "mixed"))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("case", DTYPE_CASES, ids=str)
def test_dtypes(name: str, case: Case, tmp_path: Path) -> None:
    dtype, over, tolerance = DTYPES[name]

    def run(placement: str) -> Outcome:
        return run_case(case, placement, tmp_path, num_steps=DTYPE_STEPS, dtype=dtype, **over)

    reference = run("resident")
    for placement in [place for *cell, place in DTYPE_CELLS if cell == [name, case]]:
        assert_same(run(placement), reference)
    assert worst_relative_difference(reference.losses, plain_losses(case, dtype)) < tolerance


def test_the_dynamic_scale_moved_in_the_test_above(tmp_path: Path) -> None:
    case = Case(1, 0.0, False)
    config = case_config(case, "nvme", tmp_path, dtype="fp16", fp16=DYNAMIC)
    scales: list[float] = []

    def loop(engine: Any) -> list[float]:
        losses = []
        for tokens, targets in batches(5):
            losses.append(one_step(engine, tokens, targets))
            scales.append(engine.loss_scale)
        return losses

    run_engine(lambda: make_model(case), loop, config)
    assert scales == [128.0, 128.0, 256.0, 256.0, 512.0]


def test_gradients_accumulated_in_fp32(tmp_path: Path) -> None:
    """`data_types.grad_accum_dtype`: the same bits everywhere, and nearer to plain fp32 accumulation."""
    case = Case(3, 1.0, False)
    over = {"data_types": {"grad_accum_dtype": "fp32"}}
    reference = run_case(case, "resident", tmp_path, num_steps=VARIATION_STEPS, **over)
    for placement in ("host", "nvme", "mixed"):
        assert_same(run_case(case, placement, tmp_path, num_steps=VARIATION_STEPS, **over), reference)
