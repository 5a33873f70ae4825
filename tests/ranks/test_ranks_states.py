"""What ranks divide, as a whole: inputs on each tier, models given back, checkpoints, values of unusual forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offloadzero
from offloadzero.activations import store as activations
from offloadzero.core.segments import TierName
from offloadzero.zero import GatheredParameters, safe_get_full_fp32_param
from tests.support.cases import each_pair
from tests.support.ranks import Found, run_in_turn
from tests.support.sharded import (
    GLOBAL_BATCH,
    config_of,
    digest,
    engine_of,
    make_odd_model,
    micro_batch,
    said_of,
    train,
)

WORLD_SIZES = (2, 3)
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
COMPACT: dict[str, Any] = {"offloadzero": {"state_layout": "compact"}, **BF16}
Cases = dict[int, dict[str, tuple[int, str, dict[str, Any]]]]  # by number of ranks: stage, placement, keys


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def found(directory: Path) -> dict[int, Found]:
    """By number of ranks: the functions of this file, one after the other in the same processes."""
    works: dict[int, tuple[Callable[[int, str], Any], ...]] = {
        2: (train_on_tiers, restore, save, start_with_forms, restore_alone),
        3: (train_on_tiers, restore, load),
    }
    other = engine_of(config_of("resident", 0, directory), seed=6)
    other.save_checkpoint(directory / "other", tag="global_step2")
    other.close()
    return {size: run_in_turn(works[size], size, directory, timeout_s=120) for size in WORLD_SIZES}


# --- activation checkpoints of each rank on its host or drive ---

PLANNED = {"input_bytes": "64KiB"}
ON_TIERS: Cases = {
    2: {
        "stage 0, accumulation": (0, "host", {"accumulation": 2}),
        "stage 1": (1, "nvme", {"bf16": {"enabled": True}}),
        "stage 3, codes": (3, "nvme", {"zero_optimization": {"zero_quantized_weights": True}}),
    },
    3: {"stage 3, accumulation": (3, "host", {"accumulation": 2})},
}
ON_TIERS_NAMES = [name for cases in ON_TIERS.values() for name in cases]
ON_TIERS_CELLS = each_pair(ON_TIERS_NAMES, ("host", "nvme"), (False, True))


def cells_of(case: str) -> list[tuple[str, bool]]:
    """The tiers of its inputs, and whether their bytes are planned."""
    return [(tier, planned) for name, tier, planned in ON_TIERS_CELLS if name == case]


def train_on_tiers(rank: int, directory: str) -> dict[str, Any]:
    """By case: losses, norm and masters by tier, inputs planned and not; and the bytes that inputs have taken there."""
    found: dict[str, Any] = {}
    world_size = dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "MIN_BYTES", 1)
        for name, (stage, placement, over) in ON_TIERS[world_size].items():
            for tier, is_planned in [("device", False), *cells_of(name)]:
                own = {"offloadzero": {"activation_checkpoints": {"tier": tier}}}
                if is_planned:
                    own["offloadzero"]["activation_checkpoints"] |= PLANNED
                config = config_of(placement, stage, Path(directory), world_size=world_size, **over, **own)
                engine = engine_of(config)
                losses = train(engine, rank, world_size, num_steps=3)
                params = dict(engine.module.named_parameters())
                masters = digest({key: safe_get_full_fp32_param(param) for key, param in params.items()})
                store = engine._runtime.activations
                assert store is not None
                taken = 0 if tier == "device" else store.reserved().get(TierName(tier), 0)
                numbers = [losses, engine.get_global_grad_norm(), masters]
                found[f"{name} {tier} {is_planned}"] = [numbers, taken]
                engine.close()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_are_those_with_inputs_on_the_device(world_size: int, found: dict[int, Found]) -> None:
    for of_rank in found[world_size]["train_on_tiers"]:
        for name in ON_TIERS[world_size]:
            expected, _ = of_rank[f"{name} device False"]
            for tier, is_planned in cells_of(name):
                numbers, taken = of_rank[f"{name} {tier} {is_planned}"]
                assert numbers == expected, (name, tier, is_planned)
                assert (taken > 0) != is_planned, (name, tier)


# --- restore_model() where the ranks divide the states ---

RESTORED: Cases = {
    2: {
        "stage 0, host": (0, "host", BF16),
        "stage 2, nvme": (2, "nvme", BF16),
        "stage 3, nvme": (3, "nvme", BF16),
    },
    3: {"stage 1, host": (1, "host", {}), "stage 3, compact": (3, "host", COMPACT)},
}


def restore(rank: int, directory: str) -> dict[str, Any]:
    """By case: the masters of a trained engine, the model that it gave back, and how that trains on."""
    found, world_size = {}, dist.get_world_size()
    for name, (stage, placement, over) in RESTORED[world_size].items():
        config = config_of(placement, stage, Path(directory), world_size=world_size, **over)
        engine = engine_of(config, seed=rank)
        train(engine, rank, world_size, num_steps=2)
        model = engine.module
        assert isinstance(model, torch.nn.Module)
        masters = {key: safe_get_full_fp32_param(param) for key, param in model.named_parameters()}
        with GatheredParameters(next(model.parameters())):
            refused = said_of(engine.restore_model)
        engine.restore_model()
        ordinary = make_odd_model()
        alike = all(
            (type(ours), ours.dtype, ours.device) == (type(theirs), theirs.dtype, theirs.device)
            for ours, theirs in zip(model.parameters(), ordinary.parameters(), strict=True)
        )
        values = {key: param.detach().clone() for key, param in model.named_parameters()}
        again, *_ = offloadzero.initialize(model=model, config=config)
        losses = train(again, rank, world_size, num_steps=1)
        again.close()
        found[name] = {
            "masters": digest(masters),
            "values": digest(values),
            "refused": refused,
            "alike": alike,
            "losses": losses,
        }
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_rank_gets_the_whole_model(world_size: int, found: dict[int, Found]) -> None:
    by_rank = found[world_size]["restore"]
    for of_rank in by_rank:
        for name, of_case in of_rank.items():
            assert of_case["values"] == of_case["masters"] == by_rank[0][name]["masters"], name
            assert of_case["alike"], name
            assert of_case["refused"].startswith("StateError: restore_model() inside of GatheredParameters")
            assert all(loss == loss for loss in of_case["losses"])  # numbers


def restore_alone(rank: int, directory: str) -> list[str]:
    """One rank gives the model back, the other reads a weight, and trains."""
    engine = engine_of(config_of("host", 3, Path(directory), world_size=2))
    weight = engine.module.get_parameter("wide.weight")
    texts = [said_of(engine.restore_model if rank else lambda: safe_get_full_fp32_param(weight))]
    texts.append(said_of(lambda: train(engine, rank, 2, num_steps=1)))
    return texts


def test_a_rank_that_restores_alone_is_an_error_on_all(found: dict[int, Found]) -> None:
    for text, later in found[2]["restore_alone"]:
        assert text.startswith("StateError: rank 0 reads wide.weight (param), rank 1 reads "), text
        assert later != "nothing"


# --- checkpoints: written once, readable at any number of ranks, stage and placement ---


def state_of(engine: Any) -> dict[str, str]:
    """The bits of all weights and optimizer states."""
    states = engine.optimizer.state_dict()["state"]
    named = {f"{number}.{name}": value for number, one in states.items() for name, value in one.items()}
    return digest({**engine.module.state_dict(), **named})


def save(rank: int, directory: str) -> dict[str, Any]:
    engine = engine_of(config_of("nvme", 3, Path(directory), world_size=2), seed=rank)
    train(engine, rank, 2, num_steps=2)
    with pytest.warns(UserWarning, match="client_state differs between the ranks, and rank 0's is saved"):
        engine.save_checkpoint(directory, tag="by rank", client_state={"rank": rank}, save_latest=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = dict.fromkeys((["a", "b"], ["b", "a"])[rank], 0)  # a set of texts has an order per process
        engine.save_checkpoint(directory, tag="of two", client_state={"ranks": [0, 1], "same": same})
    engine.save_16bit_model(directory)
    loss = engine(micro_batch(9, rank, 2)).item()
    found = {"state": state_of(engine), "loss": loss, "steps": engine.global_steps}
    engine.close()
    return found


def load(rank: int, directory: str) -> dict[str, Any]:
    """At every stage, from weights of their own; what is not there, or not the same, is refused on all ranks."""
    found = {}
    for stage, placement in ((0, "host"), (2, "host"), (3, "resident")):
        engine = engine_of(config_of(placement, stage, Path(directory), world_size=3), seed=7)
        engine.load_checkpoint(directory)
        found[str(stage)] = [state_of(engine), engine.global_steps]
        try:
            engine.load_checkpoint(directory if rank else "/nonexistent", tag="of two")
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {error}"
        try:
            engine.load_checkpoint(directory if rank != 1 else f"{directory}/other")
        except Exception as error:
            found["another"] = f"{type(error).__name__}: {error}"
        assert state_of(engine) == found[str(stage)][0]
        train(engine, rank, 3, num_steps=1)
        engine.close()
    return found


def test_a_checkpoint_of_two_ranks_is_one_of_any_number(found: dict[int, Found], directory: Path) -> None:
    saved = found[2]["save"]
    assert saved[0]["state"] == saved[1]["state"]
    engine = engine_of(config_of("resident", 0, directory), seed=5)
    engine.load_checkpoint(directory)
    assert (state_of(engine), engine.global_steps) == (saved[0]["state"], 2)
    with torch.no_grad():
        losses = [engine(micro_batch(9, rank, 2)).item() for rank in range(2)]
    engine.close()
    assert torch.allclose(torch.tensor(losses), torch.tensor([one["loss"] for one in saved]), rtol=1e-5)
    assert GLOBAL_BATCH % 3 == 0
    loaded = found[3]["load"]
    for of_rank in loaded:
        for stage in "023":
            assert of_rank[stage] == [saved[0]["state"], 2]
    refusals = [of_rank["refused"] for of_rank in loaded]
    assert refusals[0].startswith("CheckpointError: there is no checkpoint 'of two' in /nonexistent")
    for text in refusals[1:]:
        assert text.startswith(
            "RankError: load_checkpoint(), before anything has changed, has failed on ranks [0]"
        )
    for of_rank in loaded:
        assert "ranks [1] load another checkpoint than rank 0" in of_rank["another"]
        assert of_rank["another"].startswith(f"CheckpointError: {directory}")


# --- values of unusual forms ---

FROZEN = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.bfloat16)


class Quantized(nn.Module):
    """A unit that trains in part."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.lin = nn.Linear(40, 40)
        self.frozen = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + self.frozen.float().mean()


class Forms(nn.Module):
    """Its values follow from `first`."""

    def __init__(self, first: int) -> None:
        super().__init__()
        torch.manual_seed(first)
        values = (torch.arange(1001) + first) % 7
        self.blocks = nn.ModuleList(Quantized(values.to(dtype)) for dtype in FROZEN)
        self.register_buffer("expanded", torch.full((1,), float(first)).expand(4))
        self.register_buffer("sparse", (torch.eye(4) * (first + 1)).to_sparse(), persistent=False)
        self.register_buffer("strided", torch.full((4, 4), float(first)).t()[:, ::2])
        with torch.inference_mode():
            self.register_buffer("inference", torch.full((4,), float(first)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean() + self.expanded.sum()

    def values(self) -> list[list[float]]:
        """All but the trained ones, as lists."""
        buffers = [self.expanded, self.sparse.to_dense(), self.strided, self.inference]
        frozen = [block.frozen.data for block in self.blocks]
        return [value.float().flatten().tolist() for value in [*buffers, *frozen]]


def start_with_forms(rank: int, directory: str) -> list[list[list[float]]]:
    """By stage."""
    found = []
    for stage in (1, 3):
        config = config_of("host", stage, Path(directory), world_size=2)
        config["offloadzero"]["units"]["patterns"] = ["blocks.?"]
        engine, *_ = offloadzero.initialize(model=Forms(first=3 + rank), config=config)
        loss = engine(torch.ones(2, 40))
        assert abs(loss.item() - Forms(first=3)(torch.ones(2, 40)).item()) < 1e-5 * loss.item()
        engine.backward(loss)
        engine.step()
        module = engine.module
        assert isinstance(module, Forms)
        found.append(module.values())
        engine.close()
    return found


def test_buffers_and_frozen_parameters_are_the_first_ranks(found: dict[int, Found]) -> None:
    """Of unusual forms and dtypes, too."""
    expected = Forms(first=3).values()
    assert expected != Forms(first=4).values()
    assert found[2]["start_with_forms"] == [[expected] * 2] * 2
