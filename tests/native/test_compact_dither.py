"""[Note: dithered codes] in csrc/cpu_adam/cpu_adam.h: what a step adds to the codes, and that it averages out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from offloadzero.core.constants import COMPACT_BLOCK
from offloadzero.native.kernels import Isa
from tests.native.compact_records import Record
from tests.native.kernel_states import ADAMW, ISAS
from tests.native.test_compact_kernels import X, Y, oracle_step, step_of_m, step_of_s

UNIT_M, UNIT_S = 2**18, 2**16  # of a code, in patterns


def dither(step: int) -> np.ndarray:
    """[Note: dithered codes] in patterns: exp_avg's, exp_avg_sq's. Shape (2, COMPACT_BLOCK), int64."""
    reversed_bits = [int(f"{e:07b}"[::-1], 2) for e in range(COMPACT_BLOCK)]
    starts = (reversed_bits, range(COMPACT_BLOCK))
    phases = [
        [((start << 25) + step * increment) % 2**32 for start in row]
        for row, increment in zip(starts, (0x9E3779B9, 0x6A09E667), strict=True)
    ]
    cut = np.array(phases) >> 18
    return np.stack([(cut[0] << 4) + 8, (cut[1] << 2) + 2])


def moments_of(grad: Tensor, *, step: int, isa: Isa, record: Record | None = None) -> Record:
    """A record whose moments, before rounding, are the gradient and its square."""
    record = record or Record.empty(grad.numel())
    record.step(grad, hyper=replace(ADAMW, lr=0.0, beta1=0.0, beta2=0.0), step=step, isa=isa)
    return record


def patterns_above_1(values: np.ndarray, *, span: float) -> np.ndarray:
    """bits(y) - bits(1) of rows of one block; the sum in y is rounded to fp64 first, which decides nothing here."""
    largest = np.abs(values).max(axis=1, keepdims=True)
    inverse = np.float32(span) / largest
    y = (np.abs(values).astype(np.float64) * inverse + 1).astype(np.float32)
    return y.view(np.int32) - np.float32(1).view(np.int32)


@pytest.mark.parametrize("step", [1, 2, 1000, 2**32 + 12345])
@pytest.mark.parametrize("isa", ISAS)
def test_codes_are_the_dithered_ones_cut_off(isa: Isa, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(64 * COMPACT_BLOCK + 77, generator=generator)
    record = moments_of(grad, step=step, isa=isa)
    blocks = torch.nn.functional.pad(grad, (0, -grad.numel() % COMPACT_BLOCK)).view(-1, COMPACT_BLOCK).numpy()
    exact = patterns_above_1(blocks, span=14.75), patterns_above_1(blocks, span=2.984375)
    for_m, for_s = dither(step)
    c, nearest, k = (
        codes.ravel()[: grad.numel()]
        for codes in (
            (exact[0] + for_m) // UNIT_M,
            (exact[0] + UNIT_M // 2) // UNIT_M,
            (exact[1] + for_s) // UNIT_S,
        )
    )
    assert (record.exp_avg.numpy().view(np.uint8) == c + 128 * np.signbit(grad.numpy())).all()
    assert (record.exp_avg_sq.numpy() == np.maximum(k, 1)).all()
    assert (nearest != c).mean() == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("isa", ISAS)
def test_codes_that_are_integers_stay(isa: Isa) -> None:
    """Every code at many places of a block that has the largest one too, whatever the step and the scale."""
    n = 255 * COMPACT_BLOCK
    block, place = torch.arange(n) // COMPACT_BLOCK, torch.arange(n) % COMPACT_BLOCK
    is_largest = place == block % COMPACT_BLOCK
    codes = (2 * place + block) % 255
    q = torch.where(is_largest, 127, codes - 127)
    k = torch.where(is_largest, 255, codes + 1)
    scale = torch.exp(torch.linspace(-30, 10, 255))[block]
    m = q.sign() * torch.from_numpy(X).float()[q.abs()] * scale
    s = torch.from_numpy(Y).float()[k] * scale
    c = torch.where(q < 0, q.abs() + 128, q).to(torch.uint8).view(torch.int8)
    record = Record.empty(n)
    for step in (*range(1, 40), 2**14, 2**31 - 1, 2**32 + 7):
        assert torch.equal(moments_of(m, step=step, isa=isa, record=record).exp_avg, c)
        assert torch.equal(moments_of(s, step=step, isa=isa, record=record).exp_avg_sq, k.to(torch.uint8))


@pytest.mark.parametrize("start", [0.2, 0.4, 0.8])
@pytest.mark.parametrize("gradient", [0.0, 0.001, 0.2, 0.9])
def test_moments_follow_their_averages_beside_a_large_element(gradient: float, start: float) -> None:
    """Every step moves sqrt(v) by less than half a code, and m at last: over the steps the fp64 mean is met.

    Rounding to nearest leaves m 4 to 9 codes off and sqrt(v), wherever it should move, at its start, 6 to 50 off.
    """
    n, num_steps, num_settling = 2 * COMPACT_BLOCK, 400, 150
    grad = torch.full((n,), gradient)
    grad[::COMPACT_BLOCK] = 1.0
    root = torch.where(grad == 1.0, 1.0, start)
    record = Record.of(torch.zeros(n), root, root.square())
    exact: tuple[np.ndarray, ...] = (np.zeros(n), root.double().numpy(), root.double().square().numpy())
    errors = []
    for step in range(1, num_steps + 1):
        record.step(grad, hyper=replace(ADAMW, lr=0.0), step=step)
        exact = oracle_step(exact, grad.double().numpy(), ADAMW, step)
        _, m, v = (x.double().numpy() for x in record.decode())
        x, exact_s = exact[1] / exact[1].max(), np.sqrt(exact[2])
        # The largest s is 1, and each goes one way: its coarsest codes are those at its start or here.
        of_s = (np.sqrt(v) - exact_s) / step_of_s(np.maximum(start, exact_s))
        errors.append(((m / exact[1].max() - x) / step_of_m(x), of_s))
    of_m, of_s = (np.stack(kind)[num_settling:, 1:COMPACT_BLOCK] for kind in zip(*errors, strict=True))
    # In codes. All elements on average, and each over the steps.
    assert np.abs(of_m.mean()) < 0.1
    assert np.abs(of_m.mean(axis=0)).max() < 0.5
    assert np.abs(of_s.mean(axis=1)).max() < 0.6
    assert np.abs(of_s.mean(axis=0)).max() < 3
