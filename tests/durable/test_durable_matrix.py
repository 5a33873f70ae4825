"""Durable training is bit by bit the plain one, in every kind of training, and a new process goes on with its bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durable.runs import KINDS, NUM_STEPS, digest, make, plain_digests, train_step
from tests.support.cases import IN_FULL

# The others are in the campaigns, and some of them in every run of kills and images.
QUICK = (
    "nvme",
    "device",
    "host",
    "compact",
    "adapter",
    "fp16",
    "skip",
    "accumulation without clipping",
    "sometimes clipped",
    "host parameters",
    "no clipping mixed",
    "muon mixed",
    "every second mixed",
    "script writes, every third",
    "checksums",
    "auto",
)


@pytest.mark.parametrize(
    "name", [name for name in KINDS if KINDS[name].num_ranks == 1 and (IN_FULL or name in QUICK)]
)
def test_a_durable_run_has_the_bits_of_a_plain_one_and_goes_on_with_them(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    every = int(kind.own.get("durable", 1))
    plain = plain_digests(kind, tmp_path)
    engine = make(kind, tmp_path)
    assert engine.resume() is None
    assert digest(engine) == plain[0]
    for number in range(NUM_STEPS):
        train_step(engine, kind, number)
        assert digest(engine) == plain[number + 1], number
        if number not in (1, 4):
            continue
        engine.close()
        engine = make(kind, tmp_path)
        newest = (number + 1) // every * every
        # While a checkpoint is being written no commit is made.
        oldest = max((step for step in kind.saves if step <= number), default=newest)
        at = (engine.resume() or {"next": 0})["next"]
        assert oldest <= at <= newest
        assert digest(engine) == plain[at], number
        for again in range(at, number + 1):
            train_step(engine, kind, again)
    engine.close()
