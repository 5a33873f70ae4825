"""The kernels of Lion, Adagrad and SGD: the same bits everywhere, and the right ones (fp64 in numpy)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from offloadzero.errors import ConfigError
from offloadzero.native import kernels
from offloadzero.native.hyper import AdagradHyper, LionHyper, SgdHyper
from offloadzero.native.kernels import Isa, adagrad_step, lion_step, sgd_step
from tests.support.cases import case, loop_over

ISAS = [isa for isa in Isa if kernels.isa_supported(isa)]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = {
    "bf16_split": (torch.bfloat16, torch.int16),
    "fp32": (torch.float32, None),
    "fp16_master": (torch.float16, torch.float32),
    "bf16_master": (torch.bfloat16, torch.float32),
}
LION = LionHyper(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1)
ADAGRAD = AdagradHyper(lr=1e-2, lr_decay=0.1, eps=1e-10, weight_decay=0.01)
NO_L2 = replace(ADAGRAD, weight_decay=0.0)
SGD = SgdHyper(lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01)
NESTEROV = SgdHyper(lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=True)
NO_MOMENTUM = SgdHyper(lr=1e-2, momentum=0.0, dampening=0.5, weight_decay=0.01)
# How a kernel is compiled once more: layout and type of the gradient.
FORMS = {f"{layout}, {dtype}": (layout, dtype) for layout in LAYOUTS for dtype in FLOATS}
SIZES = [1, 15, 16, 17, 4097, 100_003]


@dataclass
class State:
    param: Tensor
    master: Tensor | None
    moment: Tensor

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.param, self.master, self.moment) if t is not None]

    def copy(self, *, offset: int = 0) -> State:
        master = None if self.master is None else place(self.master, offset)
        return State(place(self.param, offset), master, place(self.moment, offset))

    def weights(self) -> np.ndarray:
        if self.master is None:
            return self.param.numpy().copy()
        if self.master.dtype == torch.float32:
            return self.master.numpy().copy()
        hi = self.param.view(torch.int16).numpy().astype(np.int64)
        bits = (hi * 65536 + self.master.numpy().astype(np.int64)) % 2**32
        return bits.astype(np.uint32).view(np.float32)

    def assert_same_bits(self, other: State) -> None:
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def place(values: Tensor, offset: int) -> Tensor:
    buffer = torch.empty(values.numel() + offset, dtype=values.dtype)
    buffer[offset:] = values
    return buffer[offset:]


def make_state(layout: str, n: int, *, positive: bool, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(n, generator=generator) * 0.05
    moment = torch.randn(n, generator=generator) * 1e-3
    if n > 1000:
        weights[:4] = torch.tensor([0.0, -0.0, 1e-40, -1e-20])
        moment[8:13] = torch.tensor([0.0, -0.0, 1e-42, -3e-39, 1e10])
    moment = moment.square() if positive else moment
    param_dtype, master_dtype = LAYOUTS[layout]
    if master_dtype == torch.int16:
        param, remainder = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        kernels.split_master(weights, param, remainder)
        return State(param, remainder, moment)
    return State(weights.to(param_dtype), None if master_dtype is None else weights.clone(), moment)


def make_grad(n: int, dtype: torch.dtype, *, seed: int = 100) -> Tensor:
    grad = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e-2
    if n > 1000:
        grad[4:12] = torch.tensor([0.0, -0.0, 1e-7, 1e-40, -1e-45, 65504.0, -1e18, 3e38])
    return grad.clamp(-65504, 65504).to(dtype) if dtype == torch.float16 else grad.to(dtype)


def step_lion(state: State, grad: Tensor, **kwargs: object) -> None:
    lion_step(state.param, grad, state.moment, master=state.master, **{"hyper": LION, **kwargs})


def step_adagrad(state: State, grad: Tensor, **kwargs: object) -> float | None:
    arguments = {"hyper": ADAGRAD, "step": 3, **kwargs}
    return adagrad_step(state.param, grad, state.moment, master=state.master, **arguments)


def step_adagrad_without_decay(state: State, grad: Tensor, **kwargs: object) -> None:
    step_adagrad(state, grad, hyper=NO_L2, **kwargs)


def step_sgd(state: State, grad: Tensor, **kwargs: object) -> None:
    sgd_step(state.param, grad, state.moment, master=state.master, **{"hyper": SGD, "step": 3, **kwargs})


def step_nesterov(state: State, grad: Tensor, **kwargs: object) -> None:
    step_sgd(state, grad, hyper=NESTEROV, **kwargs)


def step_without_momentum(state: State, grad: Tensor, **kwargs: object) -> None:
    step_sgd(state, grad, hyper=NO_MOMENTUM, **kwargs)


Step = Callable[..., None]
STEPS: dict[str, Step] = {
    "lion": step_lion,
    "adagrad": step_adagrad,
    "adagrad_no_decay": step_adagrad_without_decay,
    "sgd": step_sgd,
    "sgd_nesterov": step_nesterov,
    "sgd_no_momentum": step_without_momentum,
}


def is_positive(name: str) -> bool:
    return name.startswith("adagrad")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STEPS)
def test_step_same_bits_for_every_isa_thread_count_and_alignment(name: str, layout: str) -> None:
    for grad_dtype, n in itertools.product(FLOATS, SIZES):
        with case(grad_dtype, n):
            check_same_bits(name, layout, grad_dtype, n)


def check_same_bits(name: str, layout: str, grad_dtype: torch.dtype, n: int) -> None:
    start, grad = make_state(layout, n, positive=is_positive(name)), make_grad(n, grad_dtype)
    expected = start.copy()
    STEPS[name](expected, grad, grad_scale=0.37, isa=Isa.SCALAR, num_threads=1)
    assert torch.equal(expected.moment, start.moment) == (name == "sgd_no_momentum")
    assert not np.array_equal(expected.weights(), start.weights())
    for (isa, offset), num_threads in zip(itertools.product(ISAS, (0, 1, 7)), itertools.cycle((1, 2, 3))):
        actual = start.copy(offset=offset)
        STEPS[name](actual, place(grad, offset), grad_scale=0.37, isa=isa, num_threads=num_threads)
        with case(isa, f"{offset=}", f"{num_threads=}"):
            actual.assert_same_bits(expected)


@pytest.mark.parametrize("name", STEPS)
def test_step_same_bits_however_a_range_is_cut(name: str) -> None:
    n = 40_001
    start, grad = make_state("bf16_split", n, positive=is_positive(name)), make_grad(n, torch.bfloat16)
    whole, cut = start.copy(), start.copy()
    STEPS[name](whole, grad, num_threads=2)
    for begin, end in itertools.pairwise([0, 1, 18, 4096, 40_000, n]):
        piece = State(*(t[begin:end] for t in cut.tensors()))
        STEPS[name](piece, grad[begin:end])
    cut.assert_same_bits(whole)


@loop_over(FORMS)
def test_lion_against_fp64(layout: str, grad_dtype: torch.dtype) -> None:
    """1e-6 * max(|weight|, lr) elementwise, where rounding cannot decide the sign of the update."""
    n, grad_scale = 9_973, 0.125
    state = make_state(layout, n, positive=False)
    for step in range(6):
        grad = make_grad(n, grad_dtype, seed=step)
        p, m = state.weights().astype(np.float64), state.moment.double().numpy()
        g = grad.double().numpy() * grad_scale
        update = LION.beta1 * m + (1 - LION.beta1) * g
        is_sure = (np.abs(update) > 1e-6 * (np.abs(m) + np.abs(g)) + 1e-43) | (update == 0)
        p = p * (1 - LION.lr * LION.weight_decay) - LION.lr * np.sign(update)
        m = LION.beta2 * m + (1 - LION.beta2) * g
        step_lion(state, grad, grad_scale=grad_scale)
        bound = 1e-6 * np.maximum(np.abs(p), LION.lr)
        assert (np.abs(state.weights() - p) <= bound)[is_sure].all()
        assert is_sure.mean() > 0.99
        assert (np.abs(state.moment.numpy() - m) <= 5e-7 * (np.abs(m) + np.abs(g)) + 1e-44).all()


@pytest.mark.parametrize("isa", ISAS)
def test_lion_sign_of_zeros_subnormals_and_nan(isa: Isa) -> None:
    grad = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 5.0, -5.0, math.nan, math.inf] * 4)
    state = State(torch.ones(32), None, torch.zeros(32))
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
    state = make_state(layout, n, positive=True)
    for step in range(1, 7):
        grad = make_grad(n, grad_dtype, seed=step)
        p, v = state.weights().astype(np.float64), state.moment.double().numpy()
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
        error = np.abs(state.moment.numpy()[fits] - v[fits])
        assert (error <= (1e-6 * v * (1 + cancelled) + 1e-44)[fits]).all()


@pytest.mark.parametrize("hyper", [SGD, NESTEROV, NO_MOMENTUM], ids=["momentum", "nesterov", "none"])
def test_sgd_against_torch_in_fp64(hyper: SgdHyper) -> None:
    for name, form in FORMS.items():
        with case(name):
            check_sgd(*form, hyper)


def check_sgd(layout: str, grad_dtype: torch.dtype, hyper: SgdHyper) -> None:
    n, grad_scale = 9_973, 0.125
    state = make_state(layout, n, positive=False)
    state.moment.zero_()
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
            assert bool(((state.moment.double() - buffer).abs() <= 1e-5 * largest + 1e-44).all())


def test_mistakes_are_named() -> None:
    n = 8
    state, grad = make_state("fp32", n, positive=True), torch.zeros(n)
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
