"""Operations that a trace counts beside the products of a transformer, and names that it keeps for want of a formula.

The oracles are torch's own counter on runs in which torch takes the same work apart, and formulas by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from offloadzero.planning.model.trace import CallForm, MicroBatchTrace, trace_call

BATCH, LENGTH, WIDTH = 3, 5, 8


def trace(build: Callable[[], nn.Module], *args: Any) -> MicroBatchTrace:
    with torch.device("meta"):
        model = build()
    return trace_call(model, CallForm(args, {}), dtype=None)


class Weight(nn.Module):
    """A function of one parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self._function = function

    def forward(self) -> Tensor:
        return self._function(self.weight)


def of_weight(function: Callable[[Tensor], Tensor], *shape: int) -> MicroBatchTrace:
    return trace(lambda: Weight(function, *shape))


# --- counted ---


@pytest.mark.parametrize(("num_layers", "bidirectional"), [(1, False), (2, True)])
def test_an_lstm_has_the_operations_of_its_steps(num_layers: int, bidirectional: bool) -> None:
    """The CPU runs a layer as one operation, but in fp64, where torch multiplies matrices, which its counter knows."""

    def build() -> nn.Module:
        return nn.LSTM(WIDTH, 2 * WIDTH, num_layers, batch_first=True, bidirectional=bidirectional)

    x = torch.zeros(BATCH, LENGTH, WIDTH, requires_grad=True)
    states = torch.zeros(num_layers * (1 + bidirectional), BATCH, 2 * WIDTH, requires_grad=True)
    found = trace(build, x, (states, states))
    x, states = x.double(), states.double()
    with FlopCounterMode(display=False) as forward:
        output, _ = build().double()(x, (states, states))
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert found.uncounted == ()
    assert found.forward_flops == forward.get_total_flops() > 0
    assert found.backward_flops == backward.get_total_flops() == 2 * found.forward_flops


@pytest.mark.parametrize(
    ("function", "flops"),
    [
        (lambda w: w @ torch.ones(WIDTH), 2 * WIDTH**2),
        (lambda w: torch.addmv(torch.ones(WIDTH), w, torch.ones(WIDTH)), 2 * WIDTH**2),
        (lambda w: w[0] @ torch.ones(WIDTH), 2 * WIDTH),
        (lambda w: torch.addbmm(torch.ones(WIDTH, 2), *_batches(w)), 2 * 3 * WIDTH * WIDTH * 2),
    ],
    ids=["mv", "addmv", "dot", "addbmm"],
)
def test_products_of_other_forms(function: Callable[[Tensor], Tensor], flops: int) -> None:
    found = of_weight(function, WIDTH, WIDTH)
    assert (found.forward_flops, found.uncounted) == (flops, ())


def _batches(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.expand(3, WIDTH, WIDTH), torch.ones(3, WIDTH, 2)


def test_a_part_that_infers_is_taken_apart() -> None:
    """Where torch infers, a layer comes as one operation: a frozen tower had no operations."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(WIDTH, WIDTH, bias=True)
            self.head = nn.Linear(WIDTH, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                seen = self.tower(x) @ torch.ones(WIDTH, WIDTH)
            return self.head(seen.clone())  # type: ignore[no-any-return]

    found = trace(Frozen, torch.zeros(BATCH, LENGTH, WIDTH))
    assert found.uncounted == ()
    assert found.forward_flops == 2 * BATCH * LENGTH * (2 * WIDTH * WIDTH + WIDTH)


# --- of other packages ---

# As the package of this name declares them, as far as they matter here; it is not installed.
_FLASH = torch.library.Library("flash_attn", "FRAGMENT")
_FLASH.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v, float p) -> (Tensor, Tensor)")
_FLASH.define(
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) dq, "
    "Tensor(b!) dk, Tensor(c!) dv) -> Tensor"
)


@torch.library.register_fake("flash_attn::_flash_attn_forward", lib=_FLASH)
def _(q: Tensor, k: Tensor, v: Tensor, p: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])


@torch.library.register_fake("flash_attn::_flash_attn_backward", lib=_FLASH)
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(lse)


class Flash(torch.autograd.Function):
    """Attention of (batch, length, heads, width)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        into = [torch.empty_like(one) for one in (q, k, v)]
        torch.ops.flash_attn._flash_attn_backward(grads[0], q, k, v, out, lse, *into)
        return tuple(into)


@pytest.mark.parametrize("num_shared", [4, 2], ids=["own keys", "shared keys"])
def test_flash_attention_has_the_operations_of_torch_s_own(num_shared: int) -> None:
    def parts_of(w: Tensor) -> list[Tensor]:
        return [torch.zeros(BATCH, LENGTH, heads, 16) * w for heads in (4, num_shared, num_shared)]

    def theirs(w: Tensor) -> Tensor:
        return Flash.apply(*parts_of(w))  # type: ignore[no-any-return, no-untyped-call]

    def ours(w: Tensor) -> Tensor:
        parts = [one.transpose(1, 2) for one in parts_of(w)]
        return F.scaled_dot_product_attention(*parts, enable_gqa=num_shared != 4)

    found, expected = of_weight(theirs, 1), of_weight(ours, 1)
    assert found.uncounted == expected.uncounted == ()
    assert found.forward_flops == expected.forward_flops == 4 * BATCH * 4 * LENGTH**2 * 16
    assert found.backward_flops == expected.backward_flops == 10 * BATCH * 4 * LENGTH**2 * 16


@torch.library.custom_op("offloadzero_tests::scan", mutates_args=())
def scan(x: Tensor) -> Tensor:
    """An operation whose name says nothing."""
    return x.clone()


@scan.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operation_of_another_package_needs_a_formula() -> None:
    def of_scan(w: Tensor) -> Tensor:
        return w + scan(w.detach())

    assert of_weight(of_scan, 7).uncounted == ("offloadzero_tests.scan",)
    operation = torch.ops.offloadzero_tests.scan
    try:
        register_flop_formula(operation)(lambda shape, **_: 100 * shape[0])
        found = of_weight(of_scan, 7)
    finally:
        del flop_registry[operation]
    assert (found.forward_flops, found.uncounted) == (700, ())


# --- named ---


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda w: nn.functional.bilinear(w, w, torch.ones(4, WIDTH, WIDTH)), "aten._trilinear"),
        (lambda w: torch.cdist(w, w), "aten._cdist_forward"),
        (lambda w: torch.cdist(torch.ones(30, WIDTH), w.repeat(30, 1)), "aten._euclidean_dist"),
        (lambda w: torch.fft.rfft(w).abs(), "aten._fft_r2c"),
        (torch.linalg.inv, "aten.linalg_inv_ex"),
        (torch.linalg.cholesky, "aten.linalg_cholesky_ex"),
        (lambda w: torch.linalg.qr(w)[0], "aten.linalg_qr"),
        (torch.linalg.svdvals, "aten._linalg_svd"),
        (torch.linalg.matrix_exp, "aten.linalg_matrix_exp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_formula_is_named(function: Callable[[Tensor], Tensor], name: str) -> None:
    assert name in of_weight(function, WIDTH, WIDTH).uncounted


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w.norm(),
        lambda w: torch.linalg.vector_norm(w),
        lambda w: torch.linalg.cross(w[:, :3], w[:, 3:6]),
        lambda w: F.cosine_similarity(w, w),
        lambda w: F.interpolate(w[None, None], scale_factor=2, mode="bilinear"),
        lambda w: F.interpolate(w[None, None, None], scale_factor=2, mode="trilinear"),
        lambda w: F.interpolate(w[None], scale_factor=2, mode="linear"),
        lambda w: torch._weight_norm(w, torch.ones(WIDTH, 1), 0),
        lambda w: torch.complex(w, w).abs(),
        lambda w: w.cumsum(0).sort()[0].detach() + w,
        lambda w: torch.outer(w[0], w[1]),
    ],
)
def test_what_costs_no_more_than_memory_has_no_name(function: Callable[[Tensor], Tensor]) -> None:
    found = of_weight(function, WIDTH, WIDTH)
    assert (found.flops, found.uncounted) == (0, ())


def test_a_profiled_part_is_no_operation() -> None:
    def profiled(w: Tensor) -> Tensor:
        with torch.profiler.record_function("a part"):
            return w + 1

    assert of_weight(profiled, 2).uncounted == ()
