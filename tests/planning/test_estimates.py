"""What the estimators under DeepSpeed's names say against engines that start with the configurations of their rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn

import offloadzero
from offloadzero.api.deepspeed.estimators import Estimate
from offloadzero.config import load_config
from offloadzero.core.segments import TierName
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.swap_file import MARK_BYTES
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.model.shapes import read_model
from tests.support import models
from tests.support.ranks import run_ranks
from tests.support.tiny import TinyModel

WIDTH = 40

Live = Callable[..., Estimate]
LIVE: Mapping[int, Live] = {
    2: offloadzero.estimate_zero2_model_states_mem_needs_all_live,
    3: offloadzero.estimate_zero3_model_states_mem_needs_all_live,
}
zero2_cold = offloadzero.estimate_zero2_model_states_mem_needs_all_cold
zero3_cold = offloadzero.estimate_zero3_model_states_mem_needs_all_cold
# DeepSpeed's rows, then those with files.
PLACEMENTS = {
    2: [("none", "cpu"), ("none", "none"), ("none", "nvme")],
    3: [
        *[("cpu", "cpu"), ("none", "cpu"), ("none", "none")],
        *[("nvme", "nvme"), ("cpu", "nvme"), ("none", "nvme")],
    ],
}


class Uniform(nn.Module):
    """Square layers, and half of one."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        self.layers.append(nn.Linear(WIDTH, WIDTH // 2, bias=False))


def build_frozen() -> nn.Module:
    model = TinyModel()
    model.blocks[0].requires_grad_(False)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "tied": TinyModel,
    "odd sizes": models.OddSizes,
    "partly frozen": build_frozen,
    "llama": lambda: read_model("llama:64/3/4/101/96/2").build(),
}


def counted(model: nn.Module, config: dict[str, Any]) -> dict[str, int]:
    """The bytes of an engine's arenas and files, by the option of DeepSpeed that asks for them."""
    # What is needed: second places are taken where there is room.
    engine, *_ = offloadzero.initialize(model=model, config={**config, "offloadzero": {"versions": False}})
    try:
        store, table = engine.optimizer.runtime.store, engine.memory_table()
        files = [] if store.nvme is None else [path for path, _ in store.nvme.files]
        found = {
            TierName.DEVICE: store.device.num_bytes,
            TierName.HOST: store.host.num_bytes,
            TierName.NVME: sum(path.stat().st_size - MARK_BYTES for path in files),
        }
    finally:
        engine.close()
    for tier, size in found.items():
        assert (f"{tier.value:<8}{format_bytes(size):>12}" in table) == bool(size)
    return {tier.value: size for tier, size in found.items()}


def expect_rows(estimate: Estimate, found: list[dict[str, int]], *, num_local: int = 1) -> None:
    """Each row has what an engine of one rank has, for the ranks of a node where they share it."""
    assert [(row.offload_param, row.offload_optimizer) for row in estimate.rows] == PLACEMENTS[estimate.stage]
    assert [(row.cpu_bytes, row.gpu_bytes, row.nvme_bytes) for row in estimate.rows] == [
        (num_local * one["host"], one["device"], num_local * one["nvme"]) for one in found
    ]
    for row in estimate.rows:
        assert bool(row.nvme_bytes) == ("nvme" in (row.offload_param, row.offload_optimizer))
    by_placement = {(row.offload_param, row.offload_optimizer): row for row in estimate.rows}
    resident, offloaded = by_placement["none", "none"], by_placement["none", "cpu"]
    assert resident.cpu_bytes < offloaded.cpu_bytes
    assert resident.gpu_bytes > offloaded.gpu_bytes


@pytest.mark.parametrize("stage", LIVE)
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_with_a_row_s_configuration_has_its_bytes(name: str, stage: int, tmp_path: Path) -> None:
    estimate = LIVE[stage](MODELS[name](), nvme_path=tmp_path)
    assert estimate.num_params == sum(param.numel() for param in MODELS[name]().parameters())
    assert estimate.built_bytes == 4 * estimate.num_params
    expect_rows(estimate, [counted(MODELS[name](), row.config) for row in estimate.rows])


def count_of_rank(rank: int, configs: list[dict[str, Any]]) -> list[dict[str, int]]:
    torch.manual_seed(rank)
    return [counted(TinyModel(), config) for config in configs]


def test_the_ranks_of_a_node_together_have_what_is_said_of_its_cpu(tmp_path: Path) -> None:
    """Two ranks over gloo, each with its engine: host memory and files are added up, devices have the same."""
    estimates = [live(TinyModel(), num_gpus_per_node=2, nvme_path=str(tmp_path)) for live in LIVE.values()]
    rows = [estimate.rows[-1] for estimate in estimates]  # a device, the host and files have something
    by_rank = run_ranks(count_of_rank, 2, tmp_path / "ranks", [row.config for row in rows])
    for row, found in zip(rows, zip(*by_rank, strict=True), strict=True):
        assert row.cpu_bytes == sum(one["host"] for one in found)
        assert row.nvme_bytes == sum(one["nvme"] for one in found)
        assert [one["device"] for one in found] == [row.gpu_bytes] * 2
    assert [one.built_bytes for one in estimates] == [2 * 4 * one.num_params for one in estimates]


@pytest.mark.parametrize("stage", LIVE)
def test_one_of_many_ranks_has_its_part_of_a_node(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process group of three nodes with four ranks, of which one is there."""
    estimate = LIVE[stage](models.OddSizes(), 4, 3, nvme_path=str(tmp_path))
    assert (estimate.num_gpus_per_node, estimate.num_nodes) == (4, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    dist.init_process_group("fake", rank=11, world_size=12)
    try:
        found = [counted(models.OddSizes(), row.config) for row in estimate.rows]
    finally:
        dist.destroy_process_group()
    expect_rows(estimate, found, num_local=4)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_two_numbers_are_a_model_of_equal_layers(num_ranks: int, tmp_path: Path) -> None:
    cold = zero3_cold(5.5 * WIDTH**2, float(WIDTH**2), num_ranks, nvme_path=str(tmp_path))
    assert cold == LIVE[3](Uniform(), num_ranks, nvme_path=str(tmp_path))
    assert (cold.num_params, cold.num_units, cold.largest_unit_params) == (8800, 6, 1600)
    if num_ranks == 1:
        expect_rows(cold, [counted(Uniform(), row.config) for row in cold.rows])


def test_one_number_is_a_decoder_of_that_size(tmp_path: Path) -> None:
    """T5's three billion of DeepSpeed's documents: with 24 blocks a width of 3,072, 12 x 3,072² each."""
    cold = zero2_cold(2851e6, 8, 1)
    assert (cold.num_units, cold.num_params) == (24, 2851_000_000)
    assert cold.largest_unit_params == pytest.approx(12 * 3072**2, rel=0.05)
    small = zero2_cold(WIDTH**2 // 2, nvme_path=str(tmp_path))
    assert small.num_units == 1
    expect_rows(small, [counted(Uniform(0), row.config) for row in small.rows])


def test_the_cold_form_is_near_the_live_one() -> None:
    """By the largest block and the number of parameters of a model of which most is blocks."""
    model = read_model("llama:7b").on_meta()
    total = sum(param.numel() for param in model.parameters())
    block = sum(param.numel() for param in model.get_submodule("model.layers.0").parameters())
    for live, cold in (
        (LIVE[3](model, 8, 2), zero3_cold(total, block, 8, 2)),
        (LIVE[2](model, 8, 2), zero2_cold(total, 8, 2)),
    ):
        for one, other in zip(live.rows, cold.rows, strict=True):
            assert other.cpu_bytes == pytest.approx(one.cpu_bytes, rel=0.05)
            assert other.gpu_bytes == pytest.approx(one.gpu_bytes, rel=0.05)
            assert other.nvme_bytes == pytest.approx(one.nvme_bytes, rel=0.05)


@pytest.mark.parametrize("stage", LIVE)
def test_what_is_printed_is_what_is_given_back(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    estimate = LIVE[stage](TinyModel(), 2, additional_buffer_factor=1.5)
    head, hardware, software, columns, *lines = capsys.readouterr().out.splitlines()
    assert head == "Estimated memory needed for params, optim states and gradients for a:"
    assert hardware == "HW: Setup with 1 node, 2 GPUs per node."
    assert f"{estimate.num_params:,} total params" in software
    assert [column.strip() for column in columns.split("|")] == [
        *("per CPU", "per GPU", "NVMe of a node", "Options")
    ]
    table, notes = lines[: len(estimate.rows)], lines[len(estimate.rows) :]
    for row, line in zip(estimate.rows, table, strict=True):
        cpu, gpu, nvme, options = (cell.strip() for cell in line.split("|"))
        assert (cpu, gpu, nvme) == tuple(map(format_bytes, (row.cpu_bytes, row.gpu_bytes, row.nvme_bytes)))
        said = dict(option.strip().split("=") for option in options.split(","))
        param = {"offload_param": row.offload_param} if stage == 3 else {}
        assert said == {**param, "offload_optimizer": row.offload_optimizer}
    assert notes[0].startswith("Planned for AdamW in bf16 with clipping")
    for row in estimate.rows:
        config = load_config(row.config)
        assert (config.zero_stage, config.precision.param_dtype) == (stage, "bf16")
        assert (config.gradient_clipping, config.warnings) == (1.0, ())
        assert config.optimizer is not None
        assert config.optimizer.type == "AdamW"
    assert format_bytes(estimate.built_bytes) in notes[1]
    assert notes[2] == "additional_buffer_factor = 1.5 changes nothing: buffers are counted."


def test_a_model_stays_as_it_is_wherever_it_is(tmp_path: Path) -> None:
    model = TinyModel()
    before = {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    expected = LIVE[3](model, nvme_path=str(tmp_path))
    assert {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()} == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert list(tmp_path.iterdir()) == []
    with torch.device("meta"):
        assert LIVE[3](TinyModel(), nvme_path=str(tmp_path)) == expected
    for row in expected.rows:  # away, under zero.Init
        with offloadzero.zero.Init(config_dict_or_path=row.config):
            model = TinyModel()
        assert LIVE[3](model, nvme_path=str(tmp_path)) == expected


def test_a_model_that_is_offloaded_has_its_own_table() -> None:
    engine, *_ = offloadzero.initialize(model=TinyModel(), config=LIVE[3](TinyModel()).rows[0].config)
    with pytest.raises(StateError, match=r"emb\.weight is offloaded already: .* memory_table\(\)"):
        LIVE[3](engine.module)
    engine.close()


def test_the_arguments_are_deepspeeds() -> None:
    common = ["num_gpus_per_node", "num_nodes", "additional_buffer_factor"]
    for function, first in (
        (LIVE[2], ["model"]),
        (LIVE[3], ["model"]),
        (zero2_cold, ["total_params"]),
        (zero3_cold, ["total_params", "largest_layer_params"]),
    ):
        given = inspect.signature(function).parameters.values()
        by_position = [one for one in given if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert [one.name for one in by_position] == [*first, *common]
        assert [one.default for one in by_position[-3:]] == [1, 1, None]


WRONG: Mapping[str, Callable[[], object]] = {
    "model = 'Engine': an nn.Module": lambda: LIVE[3](type("Engine", (), {})()),  # type: ignore[arg-type]
    "model = 'Identity': a module with parameters": lambda: LIVE[2](nn.Identity()),
    "num_gpus_per_node = 0: a whole number": lambda: LIVE[3](TinyModel(), 0),
    "num_gpus_per_node = True: a whole number": lambda: LIVE[2](TinyModel(), True),
    "num_gpus_per_node = 65537: ": lambda: zero2_cold(1000, 65537),
    "num_nodes = -1: a whole number": lambda: LIVE[3](TinyModel(), 1, -1),
    "num_nodes = 8193: a whole number at least 1 and at most 8192": lambda: zero3_cold(1000, 10, 8, 8193),
    "num_nodes = 1.5: a whole number": lambda: LIVE[2](TinyModel(), 1, 1.5),  # type: ignore[arg-type]
    "additional_buffer_factor = 'no': a finite number": lambda: LIVE[3](TinyModel(), 1, 1, "no"),  # type: ignore[arg-type]
    "total_params = 0: a whole number": lambda: zero2_cold(0),
    "total_params = nan: a whole number": lambda: zero3_cold(float("nan"), 1),
    "total_params = 1e.17: a whole number": lambda: zero2_cold(1e17),
    "largest_layer_params = 1001: a whole number at least 1 and at most 1000": lambda: zero3_cold(1000, 1001),
    "largest_layer_params = 5: at least 500, so that": lambda: zero3_cold(1e6, 5),
    "zero_optimization.offload_optimizer.nvme_path = 5": lambda: zero2_cold(1000, nvme_path=5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", WRONG)
def test_nonsense_is_named_and_nothing_is_printed(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=message):
        WRONG[message]()
    assert capsys.readouterr().out == ""
