"""All optimizers' kernels: the same bits everywhere; Lion's, Adagrad's and SGD's: the right ones (fp64 in numpy)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from offloadzero.errors import ConfigError
from offloadzero.native.hyper import AdagradHyper, LionHyper, SgdHyper
from offloadzero.native.kernels import Isa, adagrad_step, lion_step, sgd_step
from tests.native import compact_records
from tests.native.compact_records import Record
from tests.native.kernel_states import ADAMW, FLOATS, ISAS, L2, LAYOUTS, State, make_grad, make_state, place
from tests.support.cases import case, loop_over

LION = LionHyper(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1)
ADAGRAD = AdagradHyper(lr=1e-2, lr_decay=0.1, eps=1e-10, weight_decay=0.01)
NO_L2 = replace(ADAGRAD, weight_decay=0.0)
SGD = SgdHyper(lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01)
NESTEROV = SgdHyper(lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=True)
NO_MOMENTUM = SgdHyper(lr=1e-2, momentum=0.0, dampening=0.5, weight_decay=0.01)
# How a kernel is compiled once more: layout and type of the gradient.
FORMS = {f"{layout}, {dtype}": (layout, dtype) for layout in LAYOUTS for dtype in FLOATS}
SIZES = [1, 15, 16, 17, 511, 4097, 100_003]


def one_moment(layout: str, n: int) -> State:
    state = make_state(layout, n)
    return State(state.param, state.master, state.moments[:1])


def one_square(layout: str, n: int) -> State:
    state = one_moment(layout, n)
    return State(state.param, state.master, (state.exp_avg.square(),))


def step_adam(state: State, grad: Tensor, **kwargs: object) -> None:
    state.step(grad, **{"hyper": ADAMW, "step": 3, **kwargs})


def step_lion(state: State, grad: Tensor, **kwargs: object) -> None:
    lion_step(state.param, grad, *state.moments, master=state.master, **{"hyper": LION, **kwargs})


def step_adagrad(state: State, grad: Tensor, **kwargs: object) -> None:
    arguments = {"hyper": ADAGRAD, "step": 3, **kwargs}
    adagrad_step(state.param, grad, *state.moments, master=state.master, **arguments)


def step_sgd(state: State, grad: Tensor, **kwargs: object) -> None:
    arguments = {"hyper": SGD, "step": 3, **kwargs}
    sgd_step(state.param, grad, *state.moments, master=state.master, **arguments)


def step_compact(state: Record, grad: Tensor, **kwargs: object) -> None:
    state.step(grad, **{"hyper": ADAMW, "step": 3, **kwargs})


def compact(n: int) -> Record:
    return Record.of(*compact_records.make_state(n))


Step = Callable[..., None]
IN_EACH_LAYOUT: dict[str, tuple[Step, Callable[[str, int], State]]] = {
    "adamw": (step_adam, make_state),
    "adam_l2": (partial(step_adam, hyper=L2), make_state),
    "lion": (step_lion, one_moment),
    "adagrad": (step_adagrad, one_square),
    "adagrad_no_decay": (partial(step_adagrad, hyper=NO_L2), one_square),
    "sgd": (step_sgd, one_moment),
    "sgd_nesterov": (partial(step_sgd, hyper=NESTEROV), one_moment),
    "sgd_no_momentum": (partial(step_sgd, hyper=NO_MOMENTUM), one_moment),
}
# A step, and the state of so many elements that it begins from.
KERNELS: dict[str, tuple[Step, Callable[[int], State | Record]]] = {
    **{
        f"{name}, {layout}": (step, partial(begin, layout))
        for name, (step, begin) in IN_EACH_LAYOUT.items()
        for layout in LAYOUTS
    },
    "adamw, compact": (step_compact, compact),
    "adam_l2, compact": (partial(step_compact, hyper=L2), compact),
}


@pytest.mark.parametrize("name", KERNELS)
def test_step_same_bits_for_every_isa_thread_count_and_alignment(name: str) -> None:
    for grad_dtype, n in itertools.product(FLOATS, SIZES):
        with case(grad_dtype, n):
            check_same_bits(name, grad_dtype, n)


def check_same_bits(name: str, grad_dtype: torch.dtype, n: int) -> None:
    step, begin = KERNELS[name]
    start, grad = begin(n), make_grad(n, grad_dtype)
    expected = start.copy()
    step(expected, grad, grad_scale=0.37, isa=Isa.SCALAR, num_threads=1)
    is_kept = torch.equal(expected.tensors()[-1], start.tensors()[-1])
    assert is_kept == name.startswith("sgd_no_momentum")
    assert not np.array_equal(expected.weights(), start.weights())
    for (isa, offset), num_threads in zip(itertools.product(ISAS, (0, 1, 7)), itertools.cycle((1, 2, 3))):
        actual = start.copy(offset=offset)
        step(actual, place(grad, offset), grad_scale=0.37, isa=isa, num_threads=num_threads)
        with case(isa, f"{offset=}", f"{num_threads=}"):
            actual.assert_same_bits(expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", IN_EACH_LAYOUT)
def test_step_same_bits_however_a_range_is_cut(name: str, isa: Isa) -> None:
    n = 40_001
    step, begin = IN_EACH_LAYOUT[name]
    for layout in LAYOUTS:
        start, grad = begin(layout, n), make_grad(n, torch.bfloat16)
        whole, cut = start.copy(), start.copy()
        step(whole, grad, num_threads=2, isa=isa)
        for first, last in itertools.pairwise([0, 1, 18, 4096, 40_000, n]):
            step(cut.piece(first, last), grad[first:last], isa=isa)
        cut.assert_same_bits(whole)


@loop_over(FORMS)
def test_lion_against_fp64(layout: str, grad_dtype: torch.dtype) -> None:
    """1e-6 * max(|weight|, lr) elementwise, where rounding cannot decide the sign of the update."""
    n, grad_scale = 9_973, 0.125
    state = one_moment(layout, n)
    for step in range(6):
        grad = make_grad(n, grad_dtype, seed=step)
        p, m = state.weights().astype(np.float64), state.exp_avg.double().numpy()
        g = grad.double().numpy() * grad_scale
        update = LION.beta1 * m + (1 - LION.beta1) * g
        is_sure = (np.abs(update) > 1e-6 * (np.abs(m) + np.abs(g)) + 1e-43) | (update == 0)
        p = p * (1 - LION.lr * LION.weight_decay) - LION.lr * np.sign(update)
        m = LION.beta2 * m + (1 - LION.beta2) * g
        step_lion(state, grad, grad_scale=grad_scale)
        bound = 1e-6 * np.maximum(np.abs(p), LION.lr)
        assert (np.abs(state.weights() - p) <= bound)[is_sure].all()
        assert is_sure.mean() > 0.99
        assert (np.abs(state.exp_avg.numpy() - m) <= 5e-7 * (np.abs(m) + np.abs(g)) + 1e-44).all()


@pytest.mark.parametrize("isa", ISAS)
def test_lion_sign_of_zeros_subnormals_and_nan(isa: Isa) -> None:
    grad = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 5.0, -5.0, math.nan, math.inf] * 4)
    state = State(torch.ones(32), None, (torch.zeros(32),))
    hyper = LionHyper(lr=0.25, beta1=0.5, beta2=0.99, weight_decay=0.0)
    step_lion(state, grad, hyper=hyper, isa=isa)
    expected = torch.tensor([1.0, 1.0, 0.75, 1.25, 0.75, 1.25, math.nan, 0.75] * 4)
    assert torch.equal(state.param.isnan(), expected.isnan())
    assert torch.equal(state.param.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("hyper", [ADAGRAD, NO_L2], ids=["l2", "no_decay"])
def test_adagrad_against_fp64(hyper: AdagradHyper) -> None:
    for name, form in FORMS.items():
        with case(name):
            check_adagrad(*form, hyper)


def check_adagrad(layout: str, grad_dtype: torch.dtype, hyper: AdagradHyper) -> None:
    n, grad_scale = 9_973, 0.125
    state = one_square(layout, n)
    for step in range(1, 7):
        grad = make_grad(n, grad_dtype, seed=step)
        p, v = state.weights().astype(np.float64), state.exp_avg.double().numpy()
        g_alone = grad.double().numpy() * grad_scale
        g = g_alone + hyper.weight_decay * p
        v = v + g * g
        rate = hyper.lr / (1 + (step - 1) * hyper.lr_decay)
        expected = p - rate * g / (np.sqrt(v) + hyper.eps)
        step_adagrad(state, grad, hyper=hyper, step=step, grad_scale=grad_scale)
        fits = v < 1e38
        # What L2 cancels is rounded relative to what was there, and squares below fp32 are lost.
        cancelled = (np.abs(g_alone) + hyper.weight_decay * np.abs(p)) / (np.abs(g) + 1e-30)
        scale = np.maximum(np.abs(p), hyper.lr) * (1 + 0.1 * cancelled)
        normal = np.abs(g) > 1e-15
        assert (np.abs(state.weights() - expected) <= 1e-6 * scale)[fits & normal].all()
        assert (fits & normal).mean() > 0.99
        error = np.abs(state.exp_avg.numpy()[fits] - v[fits])
        assert (error <= (1e-6 * v * (1 + cancelled) + 1e-44)[fits]).all()


@pytest.mark.parametrize("hyper", [SGD, NESTEROV, NO_MOMENTUM], ids=["momentum", "nesterov", "none"])
def test_sgd_against_torch_in_fp64(hyper: SgdHyper) -> None:
    for name, form in FORMS.items():
        with case(name):
            check_sgd(*form, hyper)


def check_sgd(layout: str, grad_dtype: torch.dtype, hyper: SgdHyper) -> None:
    n, grad_scale = 9_973, 0.125
    state = one_moment(layout, n)
    state.exp_avg.zero_()
    exact = torch.nn.Parameter(torch.from_numpy(state.weights()).double())
    options = {"momentum": hyper.momentum, "dampening": hyper.dampening, "nesterov": hyper.nesterov}
    torchs = torch.optim.SGD([exact], lr=hyper.lr, weight_decay=hyper.weight_decay, **options)
    largest = torch.zeros(n, dtype=torch.float64)  # gradient so far, to which rounding is relative
    for step in range(1, 7):
        grad = make_grad(n, grad_dtype, seed=step)
        exact.grad = grad.double() * grad_scale
        torchs.step()
        step_sgd(state, grad, hyper=hyper, step=step, grad_scale=grad_scale)
        torch.maximum(largest, exact.grad.abs() + hyper.weight_decay * exact.detach().abs(), out=largest)
        bound = 1e-6 * (exact.detach().abs() + 10 * hyper.lr * largest) + 1e-44
        assert bool(((torch.from_numpy(state.weights()).double() - exact.detach()).abs() <= bound).all()), (
            step
        )
        if hyper.momentum:
            buffer = torchs.state[exact]["momentum_buffer"]
            assert bool(((state.exp_avg.double() - buffer).abs() <= 1e-5 * largest + 1e-44).all())


def test_mistakes_are_named() -> None:
    n = 8
    state, grad = one_square("fp32", n), torch.zeros(n)
    with pytest.raises(ConfigError, match=r"^exp_avg "):
        lion_step(state.param, grad, torch.zeros(7), hyper=LION)
    with pytest.raises(ConfigError, match=r"^square_sum "):
        adagrad_step(state.param, grad, torch.zeros(n, dtype=torch.float64), hyper=ADAGRAD, step=1)
    with pytest.raises(ConfigError, match=r"^step "):
        step_adagrad(state, grad, step=0)
    with pytest.raises(ConfigError, match=r"^param .*no master"):
        lion_step(torch.zeros(n).half(), grad, torch.zeros(n), hyper=LION)
    with pytest.raises(ConfigError, match=r"^beta2 "):
        replace(LION, beta2=1.0)
    with pytest.raises(ConfigError, match=r"^momentum_buffer "):
        sgd_step(state.param, grad, torch.zeros(7), hyper=SGD, step=1)
    with pytest.raises(ConfigError, match=r"^nesterov = True: needs a momentum above 0 and a dampening of 0"):
        replace(NESTEROV, momentum=0.0)
    with pytest.raises(ConfigError, match=r"^dampening "):
        replace(SGD, dampening=math.nan)
    with pytest.raises(ConfigError, match=r"^lr_decay "):
        replace(ADAGRAD, lr_decay=-0.1)
    with pytest.raises(ConfigError, match=r"^hyper "):
        step_lion(state, grad, grad_scale=1e300)
