"""What scripts write into parameters of an offloaded model arrives and is trained on, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offloadzero
from offloadzero.errors import ConfigError, StateError
from tests.access.offloaded_stacks import adam, assert_same_weights, build, step
from tests.support.models import features


def test_a_model_that_is_moved_and_mapped_is_written(offloaded: Any) -> None:
    """The ways to one weight: test_access_table.py; to all of a model: tests/scripts/weights.py."""
    model, optimizer = offloaded()
    reference = build()
    plain = adam(reference)
    for seed in range(2):
        for net in (model, reference):
            net.to("cpu")
            net._apply(lambda t: t * 2)
        assert step(model, optimizer, seed) == pytest.approx(step(reference, plain, seed), rel=1e-5)
    # Where a gradient is nearly zero, AdamW's quotient is its sign: roundings show there.
    assert_same_weights(model, reference, rtol=1e-2, atol=1e-3)


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
    with pytest.raises(ConfigError, match=r"must stay torch.* bf16 and fp16 blocks set the precision"):
        model.half()


@pytest.mark.parametrize("how", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")])
def test_another_device_is_refused(how: Callable[[nn.Module], object], offloaded: Any) -> None:
    """torch would put new parameters in the place of those that cannot go there, and nothing would train them."""
    model, optimizer = offloaded()
    params = list(model.parameters())
    with pytest.raises(ConfigError, match=r"\.data = 'meta': must stay on cpu"):
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
    with pytest.raises(
        ConfigError,
        match=r"must keep the shape .* \(by resize_token_embeddings\(\), say\) before offload\(\)",
    ):
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
