"""What the log says of a run: once, with numbers, and what to do."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from offloadzero.errors import NonFiniteError
from offloadzero.step.decider import tells_skip
from tests.support.plain_form import offloaded
from tests.support.tiny import tokens


def messages(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    found = [record for record in caplog.records if about in record.getMessage()]
    assert all(record.levelno == logging.WARNING for record in found)
    return [record.getMessage() for record in found]


def train(model: nn.Module, optimizer: Any, *, factors: list[float]) -> None:
    for seed, factor in enumerate(factors):
        (optimizer.scale(model(tokens(seed))) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- a step that is skipped ---


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_skipped_step_is_told_of(placement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its number and the units whose gradient it was."""
    with offloaded(placement, tmp_path, update={"on_nonfinite": "skip"}) as (model, optimizer):
        weight: Any = model.blocks[1].up.weight
        train(model, optimizer, factors=[1.0])
        handle = weight.register_hook(lambda grad: grad * math.inf)
        train(model, optimizer, factors=[1.0])
        handle.remove()
        train(model, optimizer, factors=[1.0, math.nan])
    one, all_units = messages(caplog, "skip")
    assert one == "step 2 is skipped: the gradient of blocks.1 holds NaN or Inf"
    assert all_units.startswith("step 4 is skipped: the gradient of ")
    assert all(f"blocks.{i}" in all_units for i in range(4))


def test_a_skip_of_fp16_tells_of_the_loss_scale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    with offloaded("host", tmp_path, fp16=fp16) as (model, optimizer):
        train(model, optimizer, factors=[1.0, math.nan])
    (said,) = messages(caplog, "skip")
    assert said.startswith("step 2 is skipped: the gradient of ")
    assert said.endswith(" holds NaN or Inf. The loss scale was 16 and is 8")


def test_a_run_that_only_skips_does_not_flood_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = [number for number in range(1, 1001) if tells_skip(number)]
    assert told == [*range(1, 11), *range(100, 1001, 100)]
    with offloaded("host", tmp_path, update={"on_nonfinite": "skip"}) as (model, optimizer):
        train(model, optimizer, factors=[math.nan] * 13)
    said = messages(caplog, "skip")
    assert [re.findall(r"^step (\d+)", text) for text in said] == [[str(step)] for step in range(1, 11)]
    assert said[-1].endswith("It is the skip of number 10: from here on each 100th is told")


def test_a_step_that_stops_the_training_is_not_called_a_skip(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        train(model, optimizer, factors=[1.0])
        with pytest.raises(NonFiniteError):
            train(model, optimizer, factors=[math.nan, 1.0])
        optimizer.zero_grad()
    assert messages(caplog, "skip") == []
    (said,) = messages(caplog, "NaN or Inf")
    assert said.startswith("step 2 is not applied, and stops the training: the gradient of ")


# --- gradients of many units at once ---


def test_a_penalty_on_some_weights_of_each_unit_tells_of_memory_beside_the_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each unit: how many bytes, that the numbers are the same, and what to do."""
    with offloaded("host", tmp_path) as (model, optimizer):
        blocks: Any = model.blocks
        for _ in range(3):
            sum(block.up.weight.pow(2).sum() for block in blocks).backward()
            optimizer.step()
            optimizer.zero_grad()
        said = messages(caplog, "beside the plan")
        records = {record.name: record for record in optimizer.runtime.records}
    names = [text.split(":")[0] for text in said]
    assert names
    assert len(set(names)) == len(names)
    for name, text in zip(names, said, strict=True):
        num_bytes = records[name].num_trainable * 4
        assert f"a temporary buffer of {num_bytes} bytes on the device, beside the plan" in text
        assert "weight_decay" in text


def test_an_ordinary_loss_takes_nothing_beside_the_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with offloaded("host", tmp_path) as (model, optimizer):
        train(model, optimizer, factors=[1.0, 1.0])
    assert not caplog.records
