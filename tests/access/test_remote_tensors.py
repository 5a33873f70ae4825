"""Tensors whose value lives elsewhere behave as an alias of it: each operation beside the same on the value itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offloadzero.access.gradient import GradientTensor, GradientValue
from offloadzero.access.tensor import RemoteTensor
from offloadzero.errors import StateError

ROWS, COLUMNS = 4, 7

_kinds: list[type[RemoteTensor]] = []


@pytest.fixture(autouse=True, params=[RemoteTensor, GradientTensor])
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `make` makes."""
    _kinds.append(request.param)
    yield
    _kinds.pop()


class Elsewhere(GradientValue):
    """A value that counts how often it is moved, and of which nothing is known without reading it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__("blocks.0.weight", value.shape, value.dtype, torch.device("cpu"))
        self.value = value.clone()
        self.num_reads = 0
        self.num_writes = 0

    def read(self, *, to_write: bool = False) -> Tensor:
        self.num_reads += 1
        return self.value.clone() if to_write else self.value

    def write(self, value: Tensor) -> None:
        self.num_writes += 1
        self.value = value

    def norm(self) -> float | None:
        return None

    def scale(self, factor: float) -> bool:  # noqa: ARG002
        return False

    def clear(self) -> None:
        self.write(torch.zeros_like(self.value))

    def accept(self, contribution: Tensor) -> bool:  # noqa: ARG002
        return False

    def is_worn(self, tensor: Tensor) -> bool:  # noqa: ARG002
        return False


def make(dtype: torch.dtype = torch.float32) -> tuple[RemoteTensor, Elsewhere, Tensor]:
    """A remote tensor, where its value is, and an ordinary tensor of that value."""
    value = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).to(dtype)
    source = Elsewhere(value)
    return remote_of(source), source, value.clone()


def remote_of(source: Elsewhere) -> RemoteTensor:
    """A remote tensor of the kind that is tested."""
    return _kinds[-1](source)


def set_item(t: Tensor) -> None:
    t[1:, ::2] = 7.0


def set_masked(t: Tensor) -> None:
    t[t > 0] = 0.5


def split_and_zero(t: Tensor) -> None:
    t.split(2)[1].zero_()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda t: t.mul_(2),
    "augmented": lambda t: t.__iadd__(1),
    "clamp_": lambda t: t.clamp_(-0.5, 0.5),
    "copy_": lambda t: t.copy_(torch.ones(COLUMNS)),
    "zero_": lambda t: t.zero_(),
    "row": lambda t: t[0].fill_(3),
    "view": lambda t: t.view(-1)[5].fill_(9),
    "transposed": lambda t: t.t()[1].add_(t.t()[2]),
    "view of a view": lambda t: t[1:].t()[0].mul_(3),
    "split": split_and_zero,
    "item": set_item,
    "mask": set_masked,
    "data": lambda t: t.data.mul_(0.25),
    "detach": lambda t: t.detach().sub_(1),
    "out": lambda t: torch.add(torch.ones(ROWS, COLUMNS), 1, out=t),
    "list": lambda t: torch._foreach_mul_([t, torch.ones(3)], 2.0),
    "both sides": lambda t: t.add_(t.flip(0)),
    "init": lambda t: torch.nn.init.constant_(t, 0.125),
    "diagonal": lambda t: t.diagonal().fill_(4),
    "unbind": lambda t: t.unbind(1)[3].fill_(5),
    "expand": lambda t: t[0].view(1, -1).expand(2, -1)[0].mul_(2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_arrives(name: str, dtype: torch.dtype) -> None:
    remote, source, expected = make(dtype)
    before = expected.clone()
    WRITES[name](remote)
    WRITES[name](expected)
    assert torch.equal(source.value, expected)
    assert not torch.equal(source.value, before)
    assert source.num_writes == 1


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda t: t.norm(),
    "sum of a view": lambda t: t[:, 1].sum(),
    "item": lambda t: torch.tensor(t[2, 3].item()),
    "list": lambda t: torch.tensor(t.tolist()),
    "numpy": lambda t: torch.tensor(t.numpy()),
    "asarray": lambda t: torch.tensor(__import__("numpy").asarray(t)),
    "isfinite": lambda t: torch.isfinite(t),
    "cat": lambda t: torch.cat([t.view(-1), torch.ones(3), t[0]]),
    "matmul": lambda t: torch.ones(2, ROWS) @ t,
    "clone": lambda t: t.clone(),
    "to": lambda t: t.to(torch.float64),
    "reshape": lambda t: t.t().reshape(-1).clone(),
    "iteration": lambda t: sum(row.sum() for row in t),
    "histogram": lambda t: t.histc(5),
    "list norm": lambda t: torch._foreach_norm([t, t])[1],
    "deepcopy": lambda t: copy.deepcopy(t),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "in place of another": lambda t: torch.zeros(ROWS, COLUMNS).lerp_(t, 0.25),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_gives_the_value_as_an_ordinary_tensor(name: str) -> None:
    remote, source, expected = make()
    source.value = source.value * 2  # changed since the tensor was made
    result = READS[name](remote)
    assert type(result) is Tensor
    assert torch.equal(result, READS[name](expected * 2))
    assert source.num_writes == 0


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": lambda t: torch.vmap(lambda row: row * 2 + row.sum())(t),
    "grad": lambda t: torch.func.grad(lambda x: (x**2).sum())(t),
    "jvp": lambda t: torch.func.jvp(lambda x: x**2, (t,), (torch.ones(ROWS, COLUMNS),))[1],
    "per-sample": lambda t: torch.vmap(torch.func.grad(lambda row: (row**3).sum()))(t),
    "jacrev": lambda t: torch.func.jacrev(lambda x: (x**2).sum(0))(t),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name: str) -> None:
    remote, _, expected = make()
    torch.testing.assert_close(TRANSFORMS[name](remote), TRANSFORMS[name](expected))


def test_a_reference_kept_is_as_alive_as_an_alias() -> None:
    remote, source, _ = make()
    row = remote[1]
    source.write(torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS))
    assert torch.equal(row.clone(), torch.arange(7.0, 14.0))
    row.zero_()
    assert source.value[1].abs().sum() == 0
    assert source.value[2].sum() != 0


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a part": lambda t: t[1:3],
    "flat": lambda t: t.view(-1),
    "flattened": lambda t: t.flatten(),
    "transposed": lambda t: t.t(),
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "one of a list": lambda t: t.split(2)[1],
    "a view of a view": lambda t: t.detach()[1:][:2].t(),
}


@pytest.mark.parametrize("is_made_inside", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_inference_mode_has_made(name: str, is_made_inside: bool) -> None:
    """It reads and writes the value, in the mode and after it."""
    with torch.inference_mode(is_made_inside):
        remote, source, _ = make()
    expected = source.value.clone()
    with torch.inference_mode():
        view, expected_view = VIEWS[name](remote), VIEWS[name](expected)
        assert isinstance(view, RemoteTensor)
        assert view.is_inference() is is_made_inside
        assert torch.equal(view.clone(), expected_view)
        view.mul_(2)
        expected_view.mul_(2)
        assert torch.equal(source.value, expected)
    assert torch.equal(view.clone(), expected_view)
    view[1:].add_(1)
    expected_view[1:].add_(1)
    assert torch.equal(source.value, expected)


def test_shape_and_strides_need_no_value() -> None:
    remote, source, expected = make()
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2], lambda t: t.view(COLUMNS, ROWS)):
        ours, theirs = view(remote), view(expected)
        assert (ours.shape, ours.stride(), ours.storage_offset(), ours.dtype) == (
            theirs.shape,
            theirs.stride(),
            theirs.storage_offset(),
            theirs.dtype,
        )
        assert ours.is_contiguous() == theirs.is_contiguous()
    assert source.num_reads == 0


def test_a_graph_over_it_gives_the_gradient_of_the_value() -> None:
    remote, _, expected = make()
    for leaf in (remote.detach().requires_grad_(), expected.requires_grad_()):
        ((leaf * leaf.t().sum()).sum() + leaf.view(-1)[3] ** 2).backward()
        expected_grad = leaf.grad
    remote_leaf = remote.detach().requires_grad_()
    ((remote_leaf * remote_leaf.t().sum()).sum() + remote_leaf.view(-1)[3] ** 2).backward()
    torch.testing.assert_close(remote_leaf.grad, expected_grad)


def test_backward_adds_to_a_gradient_that_is_elsewhere() -> None:
    remote, source, expected = make()
    param = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    param.grad = remote
    (param.sum() * 2).backward()
    assert param.grad is remote
    assert torch.equal(source.value, expected + 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.data_ptr(),
        lambda t: t.untyped_storage(),
        lambda t: t.resize_(3),
        lambda t: t.set_(torch.ones(3)),
        lambda t: t.share_memory_(),
        lambda t: torch.from_dlpack(t),
    ],
    ids=["data_ptr", "storage", "resize_", "set_", "share_memory_", "dlpack"],
)
def test_what_needs_memory_is_an_error_that_names_it(use: Callable[[Tensor], Any]) -> None:
    remote, source, expected = make()
    with pytest.raises(StateError, match=r"blocks\.0\.weight: .* needs the (value|gradient) in memory"):
        use(remote)
    assert torch.equal(source.value, expected)


ORDINARY: dict[str, Callable[[], Tensor]] = {
    "tensor": lambda: torch.zeros(ROWS, COLUMNS),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(ROWS, COLUMNS)),
    "buffer": lambda: torch.zeros(2 * ROWS, COLUMNS)[ROWS:],
    "empty": lambda: torch.zeros(0),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_tensor_cannot_be_given_memory_that_is_not_there(name: str) -> None:
    remote, _, _ = make()
    for value in (remote, remote.t(), remote[1:], remote.detach().requires_grad_()):
        ordinary = ORDINARY[name]()
        before = ordinary.detach().clone()
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            ordinary.data = value
        assert torch.equal(ordinary, before)


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(ROWS, COLUMNS)])
def test_it_is_given_no_other_data(value: Tensor) -> None:
    remote, source, before = make()
    for one in (remote, remote.data, remote.t()):
        with pytest.raises(
            StateError, match=r"blocks\.0\.weight: data of .* is assigned to a tensor that stands for"
        ):
            one.data = value
    assert torch.equal(source.value, before)


@pytest.mark.parametrize("where", ["cpu", "no autocast"])
def test_autocast_takes_it_as_the_value(where: str) -> None:
    remote, _, expected = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "cpu"):
        assert torch.equal(remote @ remote.t(), expected @ expected.t())
        assert torch.equal(torch.nn.functional.linear(expected, remote[:2]), expected @ expected[:2].t())
    leaves = [remote.detach().requires_grad_(), expected.requires_grad_()]
    for leaf in leaves:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "cpu"):
            out = torch.nn.functional.linear(torch.ones(2, COLUMNS), leaf)
        out.float().square().sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert leaves[0].grad.dtype == leaves[1].grad.dtype
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_done_in_place_under_autocast_gives_the_tensor_back(enabled: bool) -> None:
    remote, source, expected = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        assert remote.mul_(2) is remote
        assert torch._foreach_add_([remote], 1.0)[0] is remote
        remote.t()[1:].zero_()
        expected.mul_(2).add_(1).t()[1:].zero_()
    assert torch.equal(source.value, expected)


class Intercepting(Tensor):
    """A class that has torch's own way with operations on it."""


def test_beside_a_class_that_intercepts_operations_it_is_the_value() -> None:
    remote, _, expected = make()
    other = torch.ones(ROWS, COLUMNS).as_subclass(Intercepting)
    for result in (remote + other, other + remote, torch.cat([other, remote])):
        assert type(result) is Intercepting
    assert torch.equal(remote + other, expected + other)


def test_where_it_is_is_where_the_value_comes() -> None:
    remote, source, _ = make()
    for one in (remote, remote.t()):
        assert one.device == source.device
        assert (one.is_cpu, one.is_meta, one.is_cuda, one.layout) == (True, False, False, torch.strided)
        assert torch.empty_like(one).device == source.device
        assert torch.zeros(2, device=one.device).device == source.device
        assert one.to("cpu").device == source.device
    assert source.num_writes == 0


def test_a_list_operation_holds_one_value_at_a_time() -> None:
    held: list[int] = []

    class Counted(Elsewhere):
        def read(self, *, to_write: bool = False) -> Tensor:
            held.append(1)
            return super().read(to_write=to_write)

        def write(self, value: Tensor) -> None:
            assert sum(held) == 1
            held.pop()
            super().write(value)

    sources = [Counted(torch.full((3,), float(i))) for i in range(5)]
    torch._foreach_add_([remote_of(s) for s in sources], [torch.ones(3)] * 5, alpha=2)
    assert [s.value[0].item() for s in sources] == [2, 3, 4, 5, 6]
