"""Gradients are there after backward, and what a script does with them is what plain torch does."""

from __future__ import annotations

import re
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import offloadzero
from offloadzero import OffloadError
from tests.scripts import gradient_loops, gradient_params, gradients
from tests.scripts.common import (
    AUTOCAST_TOLERANCES,
    LM,
    Result,
    Wrap,
    adamw,
    assert_matches,
    cases,
    make_config,
    offloaded,
    reference,
    run,
    start,
    tokens,
    train,
)
from tests.support.schedules import Slowness

SCRIPTS = {**gradients.SCRIPTS, **gradient_loops.SCRIPTS, **gradient_params.SCRIPTS}


def same_bits(one: Result, other: Result) -> bool:
    return (one.losses, one.grad_norms) == (other.losses, other.grad_norms) and all(
        torch.equal(values[key], value)
        for values, others in ((one.weights, other.weights), (one.notes, other.notes))
        for key, value in others.items()
    )


@pytest.mark.parametrize(("name", "placement"), cases(SCRIPTS, ["host", "mixed", "nvme"]))
def test_gradients_are_those_of_torch_wherever_they_live(name: str, placement: str, tmp_path: Path) -> None:
    """Near them with everything on the device, and there and elsewhere the same bits."""
    script = SCRIPTS[name]
    tolerances = AUTOCAST_TOLERANCES if name == "autocast" else {}
    resident = run(script, offloaded("stage 1", tmp_path))
    assert_matches(resident, reference(script), **tolerances)
    assert same_bits(run(script, offloaded(placement, tmp_path)), resident)


UNDER_DELAYS = [
    "noise", "kept and put back", "accumulate", "accumulate_zero_grad_to_zeros", "accumulate_over_all_steps",
    "model_zero_grad", "scaled_between_backwards",
]  # fmt: skip


@pytest.mark.parametrize("name", UNDER_DELAYS)
def test_random_delays_change_nothing(name: str, tmp_path: Path, faults: ExitStack) -> None:
    expected = run(SCRIPTS[name], offloaded("stage 1", tmp_path))
    faults.enter_context(Slowness(zlib.crc32(name.encode())).everywhere())
    for placement in ("host", "mixed"):
        assert same_bits(run(SCRIPTS[name], offloaded(placement, tmp_path)), expected), placement


@pytest.mark.parametrize("name", gradient_params.SCRIPTS_THAT_MAY_BE_REFUSED)
def test_followed_or_refused_by_name(name: str, tmp_path: Path) -> None:
    script, words = gradient_params.SCRIPTS_THAT_MAY_BE_REFUSED[name]
    expected = reference(script)
    try:
        result = run(script, offloaded("host", tmp_path))
    except OffloadError as error:
        assert re.search(words, str(error)), error  # noqa: PT017
    else:
        assert_matches(result, expected)


@pytest.mark.parametrize("placement", ["host", "stage 1"])
def test_an_optimizer_of_another_copy_is_refused(placement: str, tmp_path: Path) -> None:
    """It would train nothing."""
    wrap = offloaded(placement, tmp_path)
    with pytest.raises(OffloadError, match="optimizer"):
        wrap(LM(), adamw(LM()))
    wrap.close()


def test_without_a_clipping_key_nothing_clips(tmp_path: Path) -> None:
    """The plain form clips if its configuration says so."""

    def script(wrap: Wrap) -> Result:
        # a norm of 100 and more
        return train(*start(wrap, lr=1e-2), loss_of=lambda model, step: 100 * model(tokens(step)))

    assert_matches(run(script, offloaded("host", tmp_path)), run(script, Wrap()))


def test_gradients_of_the_engine(tmp_path: Path) -> None:
    """initialize(): between backward() and step() too, or a named error."""
    torch.manual_seed(0)
    plain = LM()
    plain(tokens(0)).backward()
    torch.manual_seed(0)
    made = LM()
    config = {**make_config("host", tmp_path), "gradient_clipping": 0.0}
    engine, *_ = offloadzero.initialize(model=made, optimizer=adamw(made), config=config)
    engine.backward(engine(tokens(0)))
    try:
        found = [p.grad.clone() for p in engine.module.parameters()]
    except OffloadError as error:
        assert "in_backward" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, [p.grad for p in plain.parameters()])
    engine.close()
