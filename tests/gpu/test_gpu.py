"""What only a CUDA device can show of trainings: parity with the resident run and with torch, memory there."""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadzero import NonFiniteError, offload, zero
from offloadzero.core.segments import SegmentKind, TierName
from tests.support.matrices import batch_of, matrices
from tests.support.small_gpt import SmallGpt
from tests.support.tiny import TinyModel, all_states, make_engine, settings, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1024 * 1024


# --- training ---


PLACEMENTS: dict[str, Any] = {
    "host": "host",
    "nvme": "nvme",
    "mixed": {"param": "host", "master": "nvme", "exp_avg": "device", "exp_avg_sq": "nvme"},
    "gradients on nvme": {"param": "nvme", "master": "host", "exp_avg": "host", "exp_avg_sq": "host", "grad": "nvme"},
    "device homes": {"param": "device", "master": "host", "exp_avg": "host", "exp_avg_sq": "nvme"},
}  # fmt: skip


def trained(
    directory: Path, placement: Any, *, clipping: float, accumulation: int = 1, **own: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and all states after five steps on CUDA."""
    config = settings(
        directory,
        placement=placement,
        device="cuda",
        gradient_clipping=clipping,
        gradient_accumulation_steps=accumulation,
        **own,
    )
    torch.manual_seed(1)
    engine = make_engine(config, SmallGpt())
    losses = []
    for seed in range(5 * accumulation):
        loss = engine(tokens(seed, batch=4, length=33).cuda())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    states = all_states(engine)
    engine.close()
    return [float(loss) for loss in losses], states


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_placement_is_invisible(tmp_path: Path, placement: str, clipping: float, accumulation: int) -> None:
    expected = trained(tmp_path, "device", clipping=clipping, accumulation=accumulation)
    found = trained(tmp_path, PLACEMENTS[placement], clipping=clipping, accumulation=accumulation)
    assert all(map(math.isfinite, found[0]))
    assert found[0] == expected[0]
    for name, state in expected[1].items():
        assert torch.equal(state, found[1][name]), name
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_placement_of_compact_states_is_invisible(tmp_path: Path, clipping: float) -> None:
    expected = trained(tmp_path, "device", clipping=clipping, state_layout="compact")
    assert any(name.endswith(".scales") for name in expected[1])
    for placement in ("host", "mixed"):
        found = trained(tmp_path, PLACEMENTS[placement], clipping=clipping, state_layout="compact")
        assert found[0] == expected[0]
        for name, state in expected[1].items():
            assert torch.equal(state, found[1][name]), name


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_placement_is_invisible_to_muon(tmp_path: Path, placement: str) -> None:
    muon = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-2, "weight_decay": 0.1}}
    expected = trained(tmp_path, "device", clipping=0.5, optimizer=muon)
    found = trained(tmp_path, PLACEMENTS[placement], clipping=0.5, optimizer=muon)
    assert found[0] == expected[0]
    assert all(torch.equal(state, found[1][name]) for name, state in expected[1].items())


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_a_muon_of_fp32_matrices_has_torchs_bits(tmp_path: Path, placement: str) -> None:
    def losses(model: Any, optimizer: Any) -> list[float]:
        found = []
        for seed in range(4):
            loss = model(batch_of(seed).cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = matrices().cuda()
    expected = losses(plain, torch.optim.Muon(plain.parameters(), lr=0.02))
    config = settings(tmp_path, placement=placement, device="cuda", bf16=None, gradient_clipping=None)
    model = matrices()
    model, optimizer = offload(model, torch.optim.Muon(model.parameters(), lr=0.02), config)
    assert losses(model, optimizer) == expected
    optimizer.close()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_small_leases_and_chunks_are_invisible(tmp_path: Path, clipping: float) -> None:
    expected = trained(tmp_path, "nvme", clipping=clipping)
    small = {"units": {"min_leaf_elements": 1000, "prefetch_units": 1}, "update": {"chunk_elements": 4096}}
    found = trained(tmp_path, "nvme", clipping=clipping, **small)
    assert found[0] == expected[0]
    assert all(torch.equal(state, found[1][name]) for name, state in expected[1].items())


@pytest.mark.usefixtures("deterministic")
def test_it_trains_as_plain_torch_does(tmp_path: Path) -> None:
    """fp32, resident, torch.optim.AdamW: the losses agree to a few roundings."""
    torch.manual_seed(1)
    model = SmallGpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    plain = []
    for seed in range(5):
        loss = model(tokens(seed, batch=4, length=33).cuda())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    losses, _ = trained(tmp_path, "host", clipping=0.5, bf16=None)
    assert losses == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_stops_it(tmp_path: Path, placement: str, clipping: float) -> None:
    engine = make_engine(settings(tmp_path, placement=placement, device="cuda", gradient_clipping=clipping))
    loss = engine(tokens(0).cuda())
    engine.backward(loss)
    engine.step()
    engine.synchronize()

    def spoil() -> None:
        engine.backward(engine(tokens(1).cuda()) * math.nan)
        engine.step()
        engine.synchronize()

    with pytest.raises(NonFiniteError):
        spoil()
    runtime = engine.optimizer.runtime
    for record in runtime.records:
        for kind, segment in record.segments.items():
            if kind is not SegmentKind.GRAD:
                target = torch.empty(segment.num_elements, dtype=segment.dtype)
                runtime.store.read(segment, target).wait()
                assert not target.is_floating_point() or bool(target.isfinite().all()), segment.label
    engine.close()


@pytest.mark.parametrize("placement", ["host", "nvme", "device"])
def test_gathering_and_states_on_the_device(tmp_path: Path, placement: str) -> None:
    engine = make_engine(settings(tmp_path, placement=placement, device="cuda"))
    engine.backward(engine(tokens(0).cuda()))
    engine.step()
    weight = engine.module.blocks[1].up.weight
    before = zero.safe_get_full_fp32_param(weight)
    with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        assert weight.is_cuda
        weight[0].fill_(2.0)
    after = zero.safe_get_full_fp32_param(weight)
    assert bool((after[0] == 2.0).all())
    assert torch.equal(after[1:], before[1:])
    assert engine.module.state_dict()["blocks.1.up.weight"].device.type == "cpu"
    engine.backward(engine(tokens(1).cuda()))
    engine.step()
    engine.close()


def test_buffers_are_where_the_computation_is(tmp_path: Path) -> None:
    class WithBuffer(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return super().forward(batch) * self.scale

    engine = make_engine(settings(tmp_path, placement="host", device="cuda"), WithBuffer())
    assert engine.module.scale.is_cuda
    assert engine(tokens(0).cuda()).isfinite()
    engine.close()


# --- memory ---


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_the_peak_is_the_budget_and_the_activations(tmp_path: Path, placement: str) -> None:
    """300M parameters, 600 MB in bf16, in a budget of 260 MiB."""
    torch.manual_seed(1)
    model = TinyModel(width=2048, num_blocks=12).bfloat16()
    largest_bytes = 2 * max(param.numel() for param in model.parameters())
    param_bytes = 2 * sum(param.numel() for param in model.parameters())

    # What the computation takes beside weights and gradients, on the resident model.
    resident = model.cuda()
    batch = tokens(0, batch=4, length=65).cuda()
    resident(batch).backward()  # cuBLAS has its workspace from here on
    resident.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        resident(batch)
    loss = resident(batch)
    activation_bytes = torch.cuda.max_memory_allocated() - before
    del loss, resident
    model = model.cpu()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()  # cuBLAS's workspaces and the batch

    budget = 260 * MIB
    config = settings(
        tmp_path,
        placement=placement,
        device="cuda",
        budgets={"device": budget},
        poison_released_leases=False,
        gradient_clipping=1.0,
        gradient_accumulation_steps=2,
    )
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(config, model)
    plan = engine.optimizer.runtime.plan
    assert plan.tier_bytes(TierName.DEVICE) <= budget
    for _ in range(4):
        engine.backward(engine(batch))
        engine.step()
    engine.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    engine.close()
    # Autograd makes a weight's gradient before it is copied into its lease, and the next one meanwhile.
    assert peak <= budget + activation_bytes + 3 * largest_bytes
    assert peak < param_bytes, "not even the weights would have fitted"


def test_close_gives_the_device_memory_back(tmp_path: Path) -> None:
    for _ in range(2):  # the first time cuBLAS takes its workspace
        gc.collect()
        base = torch.cuda.memory_allocated()
        engine = make_engine(settings(tmp_path, placement="host", device="cuda"))
        engine.backward(engine(tokens(0).cuda()))
        engine.step()
        held = torch.cuda.memory_allocated() - base
        assert held >= engine.optimizer.runtime.plan.tier_bytes(TierName.DEVICE)
        engine.close()
        del engine
    gc.collect()
    assert torch.cuda.memory_allocated() == base


def test_a_budget_beyond_the_device_is_refused(tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info()
    config = settings(tmp_path, placement="host", device="cuda", budgets={"device": free * 2})
    engine = make_engine(config)  # a budget is a limit: what is taken is what the model needs
    assert engine.optimizer.runtime.plan.tier_bytes(TierName.DEVICE) < free
    engine.close()


# --- activation checkpoints ---


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_checkpoints_leave_the_device_and_change_nothing(tmp_path: Path, tier: str) -> None:
    """32 inputs of 8 MiB each; a few of them are on the device at once."""
    batch = tokens(0, batch=64, length=129).cuda()
    outcomes = {}
    for name in ("device", tier):
        torch.manual_seed(1)
        config = settings(
            tmp_path,
            placement="host",
            device="cuda",
            poison_released_leases=False,
            activation_checkpoints={"tier": name},
        )
        engine = make_engine(config, TinyModel(width=512, num_blocks=32))
        losses = []
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = engine(batch)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        outcomes[name] = losses, all_states(engine), held
        engine.close()
    input_bytes = 64 * 128 * 512 * 2
    assert outcomes["device"][0] == outcomes[tier][0]
    for key, value in outcomes["device"][1].items():
        assert torch.equal(value, outcomes[tier][1][key]), key
    assert outcomes["device"][2] - outcomes[tier][2] >= 24 * input_bytes
