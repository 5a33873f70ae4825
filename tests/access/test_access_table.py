"""No cell of the access table is wrong: a read gives the value, a write arrives, or a named error says why not.

Weights that are away in fp32, some ways in bf16 and under zero.Init; every state and dtype with
OFFLOADZERO_TEST_STEPS=50.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.access import access_table
from tests.access.access_table import PLACES, STATES, Cell
from tests.access.access_ways import KEPT_READS, MADE_READS, READS, UNUSUAL_WRITES, WRITES
from tests.scripts.common import NUM_STEPS

LONG = NUM_STEPS >= 50
BF16_WAYS = (
    "parameters()",
    ".data",
    "state_dict()",
    "norm",
    "mul_",
    ".data.copy_",
    ".data =",
    "load_state_dict",
)


def cases(names: Iterable[str]) -> list[Any]:
    """(way, state, dtype)."""
    return [
        pytest.param(name, state, dtype, id=f"{name}-{state}-{str(dtype).removeprefix('torch.')}")
        for name in names
        for state in (STATES if LONG else ("away", "built"))
        for dtype in (torch.float32, torch.bfloat16)
        if LONG or name in BF16_WAYS or name in MADE_READS or (dtype, state) == (torch.float32, "away")
        if LONG or (dtype, state) != (torch.bfloat16, "built")
        if (name, dtype) != ("numpy", torch.bfloat16)  # numpy has no bf16
    ]


def assert_right(cells: dict[str, Cell]) -> None:
    wrong = {place: f"{cell.verdict} {cell.message}" for place, cell in cells.items() if not cell.is_right}
    assert not wrong, wrong


@pytest.mark.parametrize(("name", "state", "dtype"), cases(READS))
def test_a_read_gives_the_value(name: str, state: str, dtype: torch.dtype) -> None:
    cells = access_table.judge_reads(name, state, dtype)
    assert_right(cells)
    # A weight that cannot be read at all between two steps would be no library for ordinary scripts.
    assert cells["before the forward"].verdict in ("equal", "torch's error")
    assert cells["after step"].verdict in ("equal", "torch's error")
    assert cells["training"].verdict == "equal"


@pytest.mark.parametrize(("name", "state", "dtype"), cases(KEPT_READS))
def test_what_was_taken_before_a_step_is_read_after_it(name: str, state: str, dtype: torch.dtype) -> None:
    assert_right(access_table.judge_reads(name, state, dtype))


@pytest.mark.parametrize(("name", "state", "dtype"), cases(MADE_READS))
def test_what_a_forward_made_of_a_weight_is_read_after_it(name: str, state: str, dtype: torch.dtype) -> None:
    cells = access_table.judge_reads(name, state, dtype)
    assert {cell.verdict for cell in cells.values()} == {"equal"}, cells


@pytest.mark.parametrize(("name", "state", "dtype"), cases(WRITES))
def test_a_write_arrives(name: str, state: str, dtype: torch.dtype) -> None:
    cells = access_table.judge_writes(name, state, dtype)
    assert_right(cells)
    assert cells["before the forward"].verdict == "equal"
    assert cells["after step"].verdict == "equal"


@pytest.mark.parametrize(("name", "state", "dtype"), cases(UNUSUAL_WRITES))
def test_an_unusual_write_arrives_or_is_refused(name: str, state: str, dtype: torch.dtype) -> None:
    assert_right(access_table.judge_writes(name, state, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_plain_run_sees_every_write(dtype: torch.dtype) -> None:
    """Else a cell could be equal because nothing was written. And what torch refuses is what it documents."""
    nothing = access_table.run_writes("plain", dtype, lambda *_: None, (), reads_back=True)
    places = PLACES if LONG else ("before the forward", "forward: own, after its use", "after step")
    for name in (*WRITES, *UNUSUAL_WRITES):
        if name == "numpy" and dtype == torch.bfloat16:
            continue
        for place in places:
            written = access_table.plain_writes(name, dtype, (place,), True)
            if written.failure is None:
                assert not access_table.same(written.end, nothing.end, dtype), (name, place)
            else:
                assert "modified by an inplace operation" in str(written.failure), (name, place)


def test_the_plain_run_moves_in_every_step() -> None:
    """Else the value of the step before would pass."""
    for dtype in (torch.float32, torch.bfloat16):
        seen = access_table.plain_reads("state_dict()", dtype)["after step"]
        per_step = len(PLACES["after step"]) * 2
        for now, then in zip(seen[per_step:], seen, strict=False):
            assert not access_table.same(now, then, dtype)
