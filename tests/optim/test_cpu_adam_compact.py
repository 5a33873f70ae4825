"""CPUAdam with the compact state layout: against the torch twin of its kernel, and to and from the fp32 layout."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offloadzero.arithmetic import compact_math
from offloadzero.core.constants import COMPACT_BLOCK
from offloadzero.errors import ConfigError
from offloadzero.native.hyper import AdamHyper
from offloadzero.optim.cpu_optimizers import CPUAdam
from offloadzero.update import adam_form
from offloadzero.update.spec import UpdateForm
from tests.optim.test_cpu_optimizers import SHAPES, clones, make_params, set_grads, train

CODES = ("master_remainder", "exp_avg_e2m5", "exp_avg_sq_e1m7", "scales")


def assert_same_state(
    one: CPUAdam, other: CPUAdam, params: list[nn.Parameter], others: list[nn.Parameter]
) -> None:
    for param, twin in zip(params, others, strict=True):
        assert torch.equal(param, twin)
        assert one.state[param].keys() == other.state[twin].keys()
        for key, value in one.state[param].items():
            assert torch.equal(value, other.state[twin][key]), key


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e-3, "weight_decay": 0.1},
        {"lr": 3e-3, "weight_decay": 0.05, "adamw_mode": False, "betas": (0.8, 0.95)},
        {"lr": 1e-2, "bias_correction": False, "eps": 1e-4},
    ],
)
@pytest.mark.parametrize("maximize", [False, True])
def test_the_steps_are_those_of_the_torch_twin(options: dict[str, Any], maximize: bool) -> None:
    params = make_params(torch.bfloat16)
    optimizer = CPUAdam(params, state_layout="compact", **options)
    optimizer.param_groups[0]["maximize"] = maximize
    expected = clones(params)
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    hyper = AdamHyper(
        lr=options["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=options.get("eps", 1e-8),
        weight_decay=options.get("weight_decay", 0.0),
        decoupled=options.get("adamw_mode", True),
        bias_correction=options.get("bias_correction", True),
    )
    states = [
        (
            torch.zeros(p.numel(), dtype=torch.int8),
            torch.zeros(p.numel(), dtype=torch.int8),
            torch.zeros(p.numel(), dtype=torch.uint8),
            torch.zeros(-(-p.numel() // COMPACT_BLOCK) * 2),
        )
        for p in params
    ]
    for step in range(1, 6):
        set_grads(step, params)
        optimizer.step()
        for param, twin, state in zip(params, expected, states, strict=True):
            assert param.grad is not None
            remainder, exp_avg, exp_avg_sq, scales = state
            adam_form.adam_step(
                twin.detach().view(-1),
                param.grad.view(-1),
                exp_avg,
                exp_avg_sq,
                hyper=hyper,
                step=step,
                grad_scale=-1.0 if maximize else 1.0,
                master=remainder,
                scales=scales,
                form=UpdateForm.TORCH,
            )
    for param, twin, state in zip(params, expected, states, strict=True):
        assert torch.equal(param, twin)
        for key, value in zip(CODES, state, strict=True):
            assert torch.equal(optimizer.state[param][key].view(-1), value), key
        assert optimizer.state[param]["step"] == 5


def test_its_state_dict_continues_bit_by_bit() -> None:
    params = make_params(torch.bfloat16)
    optimizer = CPUAdam(params, state_layout="compact")
    train(optimizer, params, range(1, 5))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = clones(params)
    restored = CPUAdam(others, state_layout="compact")
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert_same_state(optimizer, restored, params, others)
    train(optimizer, params, range(5, 9))
    train(restored, others, range(5, 9))
    assert_same_state(optimizer, restored, params, others)


def test_copies_keep_the_layout() -> None:
    params = make_params(torch.bfloat16)
    optimizer = CPUAdam(params, state_layout="compact")
    train(optimizer, params, range(1, 3))
    twin, others = copy.deepcopy((optimizer, params))
    train(optimizer, params, range(3, 5))
    train(twin, others, range(3, 5))
    assert_same_state(optimizer, twin, params, others)
    assert "scales" in twin.state[others[0]]


@pytest.mark.parametrize("source", ["CPUAdam", "AdamW"])
def test_an_fp32_state_loads_within_the_stated_error(source: str) -> None:
    params = make_params(torch.bfloat16)
    exact: torch.optim.Optimizer = CPUAdam(params) if source == "CPUAdam" else torch.optim.AdamW(params)
    for step in range(1, 8):
        set_grads(step, params)
        exact.step()
    others = clones(params)
    optimizer = CPUAdam(others, state_layout="compact")
    optimizer.load_state_dict(exact.state_dict())
    for param, twin in zip(params, others, strict=True):
        assert torch.equal(param, twin)  # loading leaves parameters alone
        state = optimizer.state[twin]
        assert state["step"] == 7
        assert set(state) == {"step", *CODES}
        scale_m, scale_s = state["scales"].view(-1, 2).unbind(1)
        m = compact_math.decode_exp_avg(state["exp_avg_e2m5"].view(-1), scale_m)
        s = compact_math.decode_exp_avg_sq(state["exp_avg_sq_e1m7"].view(-1), scale_s).sqrt()
        largest_m = largest_of_blocks(exact.state[param]["exp_avg"])
        largest_s = largest_of_blocks(exact.state[param]["exp_avg_sq"].float().sqrt())
        assert ((m - exact.state[param]["exp_avg"].view(-1).float()).abs() <= 0.0086 * largest_m).all()
        root = exact.state[param]["exp_avg_sq"].view(-1).float().sqrt()
        assert ((s - root).abs() <= largest_s / 380).all()
        low = exact.state[param].get("master_remainder", torch.zeros(param.shape, dtype=torch.int16))
        error = (state["master_remainder"].int() * 256 - low.int()).abs()
        assert (error <= torch.where(low > 127 * 256, 256, 128)).all()
    train(optimizer, others, range(8, 10))
    assert all(param.isfinite().all() for param in others)


def largest_of_blocks(values: Tensor) -> Tensor:
    padded = nn.functional.pad(values.reshape(-1).float(), (0, -values.numel() % COMPACT_BLOCK))
    return padded.view(-1, COMPACT_BLOCK).abs().amax(1).repeat_interleave(COMPACT_BLOCK)[: values.numel()]


def test_every_remainder_is_cut_to_the_nearest_that_keeps_the_parameter() -> None:
    low = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    param = nn.Parameter(torch.full((1 << 16,), 1.5, dtype=torch.bfloat16))
    exact = CPUAdam([param])
    param.grad = torch.ones_like(param)
    exact.step()
    saved = exact.state_dict()
    saved["state"][0]["master_remainder"] = low.to(torch.int16)
    optimizer = CPUAdam([param], state_layout="compact")
    optimizer.load_state_dict(saved)
    remainder = optimizer.state[param]["master_remainder"].to(torch.int32)
    choices = torch.arange(-128, 128, dtype=torch.int32) * 256
    for first in range(0, 1 << 16, 1 << 12):
        part = slice(first, first + (1 << 12))
        distance = (low[part, None] - choices).abs().amin(1)
        assert torch.equal((low[part] - remainder[part] * 256).abs(), distance)


def test_a_compact_state_loads_into_fp32_exactly() -> None:
    params = make_params(torch.bfloat16)
    optimizer = CPUAdam(params, state_layout="compact")
    train(optimizer, params, range(1, 6))
    others = clones(params)
    exact = CPUAdam(others)
    exact.load_state_dict(optimizer.state_dict())
    for param, twin in zip(params, others, strict=True):
        state = optimizer.state[param]
        scale_m, scale_s = state["scales"].view(-1, 2).unbind(1)
        m = compact_math.decode_exp_avg(state["exp_avg_e2m5"].view(-1), scale_m)
        v = compact_math.decode_exp_avg_sq(state["exp_avg_sq_e1m7"].view(-1), scale_s)
        assert torch.equal(exact.state[twin]["exp_avg"].view(-1), m)
        assert torch.equal(exact.state[twin]["exp_avg_sq"].view(-1), v)
        assert torch.equal(exact.state[twin]["master_remainder"].int(), state["master_remainder"].int() * 256)
        assert exact.state[twin]["step"] == 5
        assert set(exact.state[twin]) == {"step", "exp_avg", "exp_avg_sq", "master_remainder"}
    # And back: the codes that were there.
    again = CPUAdam(clones(params), state_layout="compact")
    again.load_state_dict(exact.state_dict())
    for param, twin in zip(params, again.param_groups[0]["params"], strict=True):
        for key in CODES[:3]:
            assert torch.equal(again.state[twin][key], optimizer.state[param][key]), key


def test_other_parameters_keep_the_fp32_layout() -> None:
    params = [
        nn.Parameter(torch.ones(300)),
        nn.Parameter(torch.ones(300, dtype=torch.float16)),
        nn.Parameter(torch.ones(20, 30, dtype=torch.bfloat16).t()),
        nn.Parameter(torch.ones(300, dtype=torch.bfloat16)),
    ]
    others = clones(params)
    others[2] = nn.Parameter(torch.ones(20, 30, dtype=torch.bfloat16).t())
    mixed, exact = CPUAdam(params, state_layout="compact"), CPUAdam(others)
    for step in range(1, 4):
        set_grads(step, params, others)
        mixed.step()
        exact.step()
    for param, twin in zip(params[:3], others[:3], strict=True):
        assert torch.equal(param, twin)
        assert mixed.state[param].keys() == exact.state[twin].keys()
    assert "scales" in mixed.state[params[3]]
    # A transposed parameter continues from compact codes of the same shape.
    source = [nn.Parameter(torch.ones(30, 20, dtype=torch.bfloat16))]
    compact = CPUAdam(source, state_layout="compact")
    train(compact, source, range(1, 3))
    target = nn.Parameter(torch.ones(20, 30, dtype=torch.bfloat16).t())
    transposed = CPUAdam([target], state_layout="compact")
    transposed.load_state_dict(compact.state_dict())
    scale_m = compact.state[source[0]]["scales"].view(-1, 2)[:, 0]
    m = compact_math.decode_exp_avg(compact.state[source[0]]["exp_avg_e2m5"].view(-1), scale_m)
    assert torch.equal(transposed.state[target]["exp_avg"], m.view(30, 20))
    assert transposed.state[target]["exp_avg"].stride() == target.stride()


def test_what_does_not_fit_is_refused_by_name() -> None:
    params = make_params(torch.bfloat16)
    with pytest.raises(ConfigError, match="state_layout = 'int8': allowed: fp32, compact"):
        CPUAdam(params, state_layout="int8")
    optimizer = CPUAdam(params, state_layout="compact")
    train(optimizer, params, range(1, 3))
    good = optimizer.state_dict()
    for key, value, words in [
        ("scales", torch.zeros(3), "shape"),
        ("exp_avg_e2m5", torch.zeros(SHAPES[1]), "torch.int8"),
        ("exp_avg_sq_e1m7", None, "missing"),
    ]:
        bad = copy.deepcopy(good)
        if value is None:
            del bad["state"][1][key]
        else:
            bad["state"][1][key] = value
        before = copy.deepcopy(optimizer.state_dict())
        for layout in ("compact", "fp32"):
            with pytest.raises(ConfigError, match=rf"state\[1\]\.{key}.*{words}"):
                CPUAdam(clones(params), state_layout=layout).load_state_dict(bad)
        with pytest.raises(ConfigError):
            optimizer.load_state_dict(bad)
        for index, state in before["state"].items():
            for name, tensor in state.items():
                assert torch.equal(tensor, optimizer.state_dict()["state"][index][name])
