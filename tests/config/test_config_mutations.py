"""Mutated configurations: each is accepted or ends in an error of ours, in bounded time; no third outcome.

`OFFLOADZERO_CONFIG_MUTATIONS=5000` for the campaign, `OFFLOADZERO_CONFIG_MUTATIONS_SEED` for another than seed 0.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.config import load_config
from offloadzero.errors import ConfigError, OffloadError, abbreviated
from tests.config.config_mutations import mutated, mutated_text, seeds

NUM_CASES = int(os.environ.get("OFFLOADZERO_CONFIG_MUTATIONS", "400"))
NUM_TRAINED = max(10, NUM_CASES // 12)
FIRST_SEED = int(os.environ.get("OFFLOADZERO_CONFIG_MUTATIONS_SEED", "0"))
MAX_LOAD_S = 5.0
MAX_TRAIN_S = 60.0
MAX_MESSAGE_CHARS = 1200


class _TooSlow(BaseException):
    """No handler of the package may take it for a failure."""


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _TooSlow(f"more than {limit_s} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def outcome(call: Callable[[], object], *, limit_s: float, allowed: type[Exception]) -> str:
    """ "accepted", the name of an error of ours, or a description of what must not be."""
    try:
        with time_limit(limit_s):
            call()
    except allowed as error:
        text = str(error)
        text.encode()
        return (
            type(error).__name__
            if len(text) < MAX_MESSAGE_CHARS
            else f"FOUND: {len(text)} characters of error"
        )
    except BaseException:
        return f"FOUND: {traceback.format_exc(limit=-6)}"
    return "accepted"


def cases(directory: Path) -> Iterator[tuple[int, str, Any]]:
    """(seed, kind, source): a dict, or the path of a file with mutated text."""
    whole = seeds(directory)
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_CASES):
        random_ = random.Random(seed)
        name = random_.choice(sorted(whole))
        if random_.random() < 0.4:
            file = directory / "mutated.json"
            file.write_bytes(mutated_text(whole[name], random_))
            yield seed, f"text of {name}", file
        else:
            yield seed, f"values of {name}", mutated(whole[name], random_)


def try_all(
    tried: Iterable[tuple[int, str, Any]],
    call: Callable[[Any], object],
    *,
    limit_s: float,
    allowed: type[Exception],
) -> Counter[str]:
    """How often each outcome came; another than those that are allowed is named with its seed and its source."""
    counts: Counter[str] = Counter()
    found: list[str] = []
    slowest_s = 0.0
    for seed, kind, source in tried:
        begin_s = time.perf_counter()
        result = outcome(functools.partial(call, source), limit_s=limit_s, allowed=allowed)
        slowest_s = max(slowest_s, time.perf_counter() - begin_s)
        counts[result.split(":")[0]] += 1
        if result.startswith("FOUND"):
            shown = source.read_bytes()[:3000] if isinstance(source, Path) else abbreviated(source)
            found.append(f"seed {seed}, {kind}: {result}\nfrom {shown!r}")
    print(f"{counts.total()} from seed {FIRST_SEED} on: {dict(counts)}; the slowest took {slowest_s:.2f} s")
    assert not found, "\n".join(found[:5])
    return counts


def test_every_mutated_configuration_is_accepted_or_refused(tmp_path: Path) -> None:
    counts = try_all(cases(tmp_path), load_config, limit_s=MAX_LOAD_S, allowed=ConfigError)
    assert counts["accepted"] > NUM_CASES // 20
    assert counts["ConfigError"] > NUM_CASES // 4


# --- and with what is accepted a step is made, or an error of ours ends it ------------------------------


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Linear(12, 4))


def one_step(source: Any) -> None:
    model = tiny_model()
    given: dict[str, Any] = {}
    if load_config(source).optimizer is None:
        given["optimizer"] = torch.optim.AdamW(model.parameters())
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = offloadzero.initialize(model=model, config=source, **given)
        try:
            for _ in range(min(engine.gradient_accumulation_steps(), 3)):
                dtype = next(model.parameters()).dtype
                engine.backward(engine(torch.ones(3, 8, dtype=dtype)).float().square().mean())
                engine.step()
            engine.synchronize()
        finally:
            engine.close()


def accepted(tried: Iterable[tuple[int, str, Any]]) -> Iterator[tuple[int, str, Any]]:
    for seed, kind, source in tried:
        with contextlib.suppress(ConfigError):
            load_config(source)
            yield seed, kind, source


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_accepted_configuration_trains_or_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = itertools.islice(accepted(cases(tmp_path)), NUM_TRAINED)
    counts = try_all(first, one_step, limit_s=MAX_TRAIN_S, allowed=OffloadError)
    assert counts["accepted"] > NUM_TRAINED // 2
