"""Parameters of an offloaded model, read and written by scripts as those of an ordinary one.

The reference is the same script on the same model without this library, in fp32.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadzero
from offloadzero.access.parameter import AwayParameter, PresentParameter
from offloadzero.errors import StateError
from tests.access.offloaded_stacks import adam, assert_same_weights, build, step
from tests.support.cases import case
from tests.support.models import WIDTH, Block, Stack, features
from tests.support.training import make_config

# --- reads


def test_parameters_are_those_of_the_last_step(offloaded: Any) -> None:
    """Right after step(), whose updates are still on their way."""
    model, optimizer = offloaded()
    reference = build()
    plain = adam(reference)
    for seed in range(4):
        step(model, optimizer, seed)
        step(reference, plain, seed)
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(ours, AwayParameter), name
            torch.testing.assert_close(ours.norm(), theirs.norm(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours.data.clone(), theirs.data, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ours.detach() * 1.0, theirs.detach(), rtol=1e-4, atol=1e-6)
    vector = nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(vector, nn.utils.parameters_to_vector(reference.parameters()))


def test_shape_dtype_and_gradient_need_no_value(offloaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = offloaded()
    monkeypatch.setattr(optimizer.runtime.weights, "value", None)  # a read would fail
    for name, param in model.named_parameters():
        reference = build().get_parameter(name)
        assert param.shape == reference.shape
        assert param.stride() == reference.stride()
        assert param.is_contiguous()
        assert (param.dtype, param.device, param.numel(), param.nbytes, param.is_leaf, len(param)) == (
            reference.dtype,
            reference.device,
            reference.numel(),
            reference.nbytes,
            True,
            len(reference),
        )
        assert param.requires_grad
        assert isinstance(param, nn.Parameter)
        assert {param: 1}[param] == 1


# --- gradients through parameters that are away


def penalty_of_views(model: nn.Module) -> Tensor:
    return sum(param.view(-1)[1:].abs().sum() + param.flatten()[0] for param in model.parameters())  # type: ignore[return-value]


def penalty_of_products(model: nn.Module) -> Tensor:
    weight = model.get_parameter("blocks.1.up.weight")
    return (weight @ weight.t()).sum() + F.layer_norm(weight, (weight.shape[1],), weight[0]).pow(2).sum()


@pytest.mark.parametrize("penalty", [penalty_of_views, penalty_of_products])
def test_a_penalty_on_the_weights_trains_them(penalty: Callable[[nn.Module], Tensor], offloaded: Any) -> None:
    model, optimizer = offloaded()
    reference = build()
    plain = adam(reference)
    for seed in range(3):
        losses = []
        for net, opt in ((model, optimizer), (reference, plain)):
            loss = net(features(seed)) + 1e-2 * penalty(net)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same_weights(model, reference)


def test_a_graph_over_a_weight_that_was_updated_since_is_refused(offloaded: Any) -> None:
    model, optimizer = offloaded()
    weight = model.get_parameter("blocks.0.up.weight")
    stale = (weight**2).sum()
    step(model, optimizer, 0)
    with pytest.raises((StateError, RuntimeError), match=r"blocks\.0\.up\.weight was updated between"):
        stale.backward()


def test_writing_a_leaf_with_gradients_on_is_torchs_error(offloaded: Any) -> None:
    model, _ = offloaded()
    param = model.get_parameter("blocks.0.up.weight")
    before = model.state_dict()["blocks.0.up.weight"]
    for write in (lambda: param.add_(1), lambda: param.view(-1)[0].fill_(1), lambda: param.__setitem__(0, 1)):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            write()
    assert torch.equal(model.state_dict()["blocks.0.up.weight"], before)


# --- what operations leave behind

OPERATIONS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "graph": lambda p: (p * 2).sum(),
    "write": lambda p: p.data.mul_(1.0),
    "view": lambda p: p.detach().view(-1)[0].item(),
    "list": lambda p: torch._foreach_norm([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "named result": lambda p: p.detach().max(dim=0).values,
}


def test_an_operation_leaves_nothing_for_the_collector(offloaded: Any) -> None:
    model, _ = offloaded()
    param = model.get_parameter("blocks.0.up.weight")
    for operation in OPERATIONS.values():
        operation(param)
    while gc.collect():  # engines of other tests go in more than one round: their threads end meanwhile
        time.sleep(0.01)
    gc.disable()
    try:
        for name, operation in OPERATIONS.items():
            for _ in range(5):
                operation(param)
            with case(name):
                assert gc.collect() == 0
    finally:
        gc.enable()


# --- in the forward


def test_classes_follow_the_forward(offloaded: Any) -> None:
    seen: list[type] = []

    class Looking(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(type(self.up.weight))
            return super().forward(x)

    model, optimizer = offloaded(lambda: Stack(Looking))
    step(model, optimizer, 0)
    assert set(seen) == {PresentParameter}
    assert {type(p) for p in model.parameters()} == {AwayParameter}


# --- foreign saved-tensor hooks


def test_weights_saved_by_other_hooks_keep_their_value(offloaded: Any) -> None:
    """A read outside of any site, under a pair of hooks that keeps the object it is given."""
    model, optimizer = offloaded()
    step(model, optimizer, 0)
    weight = model.get_parameter("blocks.1.up.weight")
    weight.requires_grad_(False)
    value = model.state_dict()["blocks.1.up.weight"]
    x = torch.randn(3, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = F.linear(x, weight).square().sum()
    model(features(1))  # other units take the leases
    out.backward()
    expected = 2 * (x.detach() @ value.t()) @ value
    torch.testing.assert_close(x.grad, expected)
    weight.requires_grad_(True)


# --- copies


def in_another_process(results: Any, tensors: dict[str, Tensor]) -> None:
    results.put({name: (type(one), one.requires_grad, one.tolist()) for name, one in tensors.items()})


def test_tensors_that_are_sent_to_another_process(tmp_path: Path) -> None:
    """It gets values: what stands for them has no memory to share."""
    model = build()
    config = make_config("nvme", tmp_path, dtype=None)
    config.pop("optimizer")
    model, optimizer = offloadzero.offload(model, adam(model), config)
    model(features(0)).backward()
    param = model.get_parameter("blocks.0.up.weight")
    frozen = model.get_parameter("blocks.0.up.bias").requires_grad_(False)
    assert param.grad is not None
    sent = {
        "parameter": param,
        "frozen": frozen,
        "data": param.data,
        "view": param.data[1:3].t(),
        "grad": param.grad,
    }
    sent["state"] = model.state_dict()["blocks.0.up.weight"]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=in_another_process, args=(results, sent))
    child.start()
    got = results.get(timeout=60)
    child.join()
    assert child.exitcode == 0
    for name, one in sent.items():
        kind = nn.Parameter if one is param or one is frozen else Tensor
        assert got[name] == (kind, one is param, one.tolist()), name
    optimizer.close()


def test_a_write_into_the_state_dict_arrives(offloaded: Any) -> None:
    model, optimizer = offloaded()
    reference = build()
    plain = adam(reference)
    for net in (model, reference):
        state = net.state_dict()
        state["blocks.0.up.weight"].mul_(0.5)
        state["blocks.1.up.weight"][0].fill_(0.25)
        state["blocks.1.up.bias"].view(-1)[1:] = -0.5
        torch._foreach_add_([state["blocks.0.norm.weight"], state["blocks.0.norm.bias"]], 0.125)
    assert_same_weights(model, reference, rtol=0.0, atol=0.0)
    for seed in range(2):
        assert step(model, optimizer, seed) == pytest.approx(step(reference, plain, seed), rel=1e-5)


def test_a_state_dict_is_of_ordinary_tensors_for_those_who_read_it(offloaded: Any) -> None:
    model, optimizer = offloaded()
    state = model.state_dict()
    value = state["blocks.0.up.weight"]
    assert type(value * 2) is Tensor
    assert type(value.clone()) is Tensor
    assert type(copy.deepcopy(state)["blocks.0.up.weight"]) is Tensor
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["blocks.0.up.weight"]) is Tensor
    assert torch.equal(loaded["blocks.0.up.weight"], value)
    address = value.data_ptr()
    before = value.clone()
    step(model, optimizer, 0)
    assert torch.equal(value, model.blocks[0].up.weight)  # as torch's, it follows the weight
    assert not torch.equal(value, before)
    assert value.data_ptr() == address
    in_memory = (ctypes.c_float * value.numel()).from_address(address)
    assert torch.equal(torch.frombuffer(in_memory, dtype=torch.float32).view(value.shape), value.cpu())


def test_keep_vars_gives_the_parameters(offloaded: Any) -> None:
    model, _ = offloaded()
    state = model.state_dict(keep_vars=True)
    assert all(state[name] is param for name, param in model.named_parameters())


LOOKS: dict[str, Callable[[Any], Tensor]] = {
    "data": lambda p: p.data,
    "detach()": lambda p: p.detach(),
    "data, transposed": lambda p: p.data.t(),
    "a row": lambda p: p.detach()[1],
}


@pytest.mark.parametrize("name", LOOKS)
def test_an_alias_is_given_no_other_data(name: str, offloaded: Any) -> None:
    model, _ = offloaded()
    p = model.blocks[1].up.weight
    before, t = p.detach().clone(), LOOKS[name](p)
    with pytest.raises(
        StateError, match=r"blocks\.1\.up\.weight: data of .* is assigned to a tensor that stands for"
    ):
        t.data = torch.ones(t.shape)
    assert torch.equal(p.detach(), before)
