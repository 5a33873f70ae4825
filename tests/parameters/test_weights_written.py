"""What scripts write into parameters of an offloaded model arrives and is trained on, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.errors import ConfigError, StateError
from tests.parameters.offloaded_stacks import adam, assert_same_weights, build, step
from tests.support.models import features


def write_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.75)


def write_data_of_kept(model: nn.Module) -> None:
    kept = [param.data for param in model.parameters()]
    for data in kept:
        data.clamp_(-0.05, 0.05)


def write_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.01)
            param.view(-1)[0] = 0.5


def write_init(model: nn.Module) -> None:
    torch.manual_seed(3)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)


def write_assign(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone() * 1.5


def write_augmented(model: nn.Module) -> None:
    for param in model.parameters():
        param.data += 0.125


def write_detached(model: nn.Module) -> None:
    for param in model.parameters():
        param.detach()[..., 0].zero_()


def write_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def write_lists(model: nn.Module) -> None:
    params = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(params, 0.9)
        torch._foreach_lerp_(params, [torch.zeros_like(p) for p in params], 0.25)


def write_state(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def write_moved(model: nn.Module) -> None:
    model.to("cpu")
    model._apply(lambda t: t * 2)


WRITES = [
    write_data,
    write_data_of_kept,
    write_no_grad,
    write_init,
    write_assign,
    write_augmented,
    write_detached,
    write_vector,
    write_lists,
    write_state,
    write_moved,
]


@pytest.mark.parametrize("dtype", [None, "bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_arrives_and_is_trained_on(
    write: Callable[[nn.Module], None], dtype: Any, offloaded: Any
) -> None:
    model, optimizer = offloaded(dtype=dtype)
    reference = build().to(torch.bfloat16 if dtype else torch.float32)
    write(model)
    write(reference)
    assert_same_weights(model, reference, rtol=0.0, atol=0.0)
    if dtype is None:
        plain = adam(reference)
        for seed in range(2):
            assert step(model, optimizer, seed) == pytest.approx(step(reference, plain, seed), rel=1e-5)
            write(model)
            write(reference)
        # Where a gradient is nearly zero, AdamW's quotient is its sign: roundings show there.
        assert_same_weights(model, reference, rtol=1e-2, atol=1e-3)
    else:
        step(model, optimizer, 0)


def test_unchanged_elements_keep_their_master(offloaded: Any) -> None:
    model, optimizer = offloaded(dtype="bf16")
    step(model, optimizer, 0)
    param = model.get_parameter("blocks.0.up.weight")
    before = offloadzero.zero.safe_get_full_fp32_param(param)
    with torch.no_grad():
        param[0, 0] = 3.0
    after = offloadzero.zero.safe_get_full_fp32_param(param)
    assert after[0, 0] == 3.0
    after[0, 0] = before[0, 0]
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda p: p.detach().double(), "dtype|float64"),
        (lambda p: p.detach().clone()[:1], "shape"),
        (lambda p: torch.empty(p.shape, device="meta"), "device"),
    ],
)
def test_data_of_another_kind_is_refused(value: Any, message: str, offloaded: Any) -> None:
    model, _ = offloaded()
    param = model.get_parameter("blocks.0.up.weight")
    with pytest.raises(ConfigError, match=rf"blocks\.0\.up\.weight\.data.*({message})"):
        param.data = value(param)


def test_another_precision_is_refused(offloaded: Any) -> None:
    model, _ = offloaded()
    with pytest.raises(ConfigError, match="the configuration says the precision"):
        model.half()


@pytest.mark.parametrize("how", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")])
def test_another_device_is_refused(how: Callable[[nn.Module], object], offloaded: Any) -> None:
    """torch would put new parameters in the place of those that cannot go there, and nothing would train them."""
    model, optimizer = offloaded()
    params = list(model.parameters())
    with pytest.raises(ConfigError, match=r"\.data = 'meta': device cpu"):
        how(model)
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    step(model, optimizer, 0)


def test_a_parameter_is_not_swapped_for_another(offloaded: Any) -> None:
    """torch would exchange what makes it this engine's parameter, without a word."""
    model, optimizer = offloaded()
    param = model.get_parameter("blocks.0.up.weight")
    other = nn.Parameter(torch.zeros(param.shape))
    value = param.clone()
    for pair in ((param, other), (other, param)):
        with pytest.raises(RuntimeError, match="Cannot swap"):
            torch.utils.swap_tensors(*pair)
    assert torch.equal(param, value)
    step(model, optimizer, 0)


def test_resized_embeddings_are_refused(offloaded: Any) -> None:
    """As transformers does it."""
    model, _ = offloaded()
    param = model.get_parameter("blocks.0.up.weight")
    with pytest.raises(ConfigError, match=r"resize_token_embeddings\(\), say\) comes before offload\(\)"):
        param.data = torch.cat([param.data, param.data])


def test_an_optimizer_that_steps_in_backward_is_told_so(offloaded: Any) -> None:
    model, _ = offloaded()

    def update(param: nn.Parameter) -> None:
        torch.optim.SGD([param], lr=0.1).step()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    with pytest.raises(
        StateError, match="Or written in backward, by an optimizer that steps in gradient hooks"
    ):
        model(features(0)).backward()
