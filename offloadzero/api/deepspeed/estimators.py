"""DeepSpeed's estimators of memory, under its names: the figures are the engine's own plan.

[Note: estimates that are plans]
DeepSpeed's estimators multiply numbers of parameters by bytes and by a factor for buffers. Here each row of their table
is a configuration, which is planned for one of the ranks by the functions that the engine itself calls: homes, leases,
staging and padding. An engine that starts with the row's configuration on so many ranks reserves the row's bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offloadzero.config import load_config
from offloadzero.config.readers import read_float, read_int
from offloadzero.core.segments import TierName
from offloadzero.engine.planned_model import ModelPlanner
from offloadzero.engine.runtime import runtime_of
from offloadzero.errors import ConfigError, StateError
from offloadzero.memory.device import find_device
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.model.shapes import MAX_SIZE, num_blocks_of_size
from offloadzero.ranks.shard import MAX_RANKS, divides_params
from offloadzero.update.spec import device_form
from offloadzero.update.specs.adam import ADAM

_MAX_LAYERS = 2000  # of the cold form: each is planned

NvmePath = str | os.PathLike[str] | list[str] | None

_NONE, _CPU, _NVME = "none", "cpu", "nvme"
_STAGE2_ROWS = ((_NONE, _CPU), (_NONE, _NONE), (_NONE, _NVME))
_STAGE3_ROWS = (
    *((_CPU, _CPU), (_NONE, _CPU), (_NONE, _NONE)),  # DeepSpeed's
    *((_NVME, _NVME), (_CPU, _NVME), (_NONE, _NVME)),
)


@dataclass(frozen=True)
class PlacementEstimate:
    """The bytes that one placement reserves for parameters, gradients, optimizer states and the buffers between them.

    `offload_param` and `offload_optimizer` are the devices of these blocks, "none", "cpu" or "nvme"; `config` is the
    whole configuration, as `initialize()` takes it.
    """

    offload_param: str
    offload_optimizer: str
    cpu_bytes: int  # host memory of one node, for all its ranks
    gpu_bytes: int  # of one rank's device
    nvme_bytes: int  # files on one node, of all its ranks
    config: dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """The memory that a model takes under one stage of ZeRO, placement by placement."""

    stage: int
    num_nodes: int
    num_gpus_per_node: int
    num_params: int
    num_units: int
    largest_unit_params: int
    built_bytes: int  # host memory of one node for the models that its processes build without zero.Init
    rows: tuple[PlacementEstimate, ...]

    def text(self) -> str:
        """Return the table, in the form of DeepSpeed's."""
        nodes, gpus = _counted(self.num_nodes, "node"), _counted(self.num_gpus_per_node, "GPU")
        lines = [
            "Estimated memory needed for params, optim states and gradients for a:",
            f"HW: Setup with {nodes}, {gpus} per node.",
            f"SW: Model with {self.num_params:,} total params, {self.largest_unit_params:,} in the largest of "
            f"{_counted(self.num_units, 'unit')}.",
            f"{'per CPU':>11} | {'per GPU':>10} | NVMe of a node | Options",
        ]
        for row in self.rows:
            sizes = [format_bytes(size) for size in (row.cpu_bytes, row.gpu_bytes, row.nvme_bytes)]
            options = f"offload_optimizer={row.offload_optimizer}"
            if divides_params(self.stage):
                options = f"offload_param={row.offload_param:4}, {options}"
            lines.append(f"{sizes[0]:>11} | {sizes[1]:>10} | {sizes[2]:>14} | {options}")
        built = format_bytes(self.built_bytes)
        lines += [
            "Planned for AdamW in bf16 with clipping; activations and the model's buffers are beside it.",
            f"Without zero.Init each process first builds the whole model: {built} per CPU.",
        ]
        return "\n".join(lines)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float | None = None,
    *,
    nvme_path: NvmePath = None,
) -> Estimate:
    """Print and return what ZeRO's stage 3 takes of a model, for each placement: [Note: estimates that are plans].

    Args:
        model: any module, on the meta device too; it stays as it is.
        num_gpus_per_node: the ranks that share the host memory and the drives of a node.
        num_nodes: how many such nodes train together.
        additional_buffer_factor: DeepSpeed's; it changes nothing here, as buffers are counted.
        nvme_path: the directory, or the list of them, for the configurations that have files; by default that of
            temporary files. Nothing is written there.

    Raises:
        ConfigError: an argument that is out of range, or a model that the engine refuses.
        StateError: the model is offloaded already.
    """
    _expect_model(model)
    return _print_estimate(model, 3, num_gpus_per_node, num_nodes, additional_buffer_factor, nvme_path)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float | None = None,
    *,
    nvme_path: NvmePath = None,
) -> Estimate:
    """Print and return the same of a model that is known by two whole numbers.

    Planned are layers of `largest_layer_params` each, and a smaller one for what is left of `total_params`. A layer is
    what comes to the device at once: of a transformer the larger of a block and the embedding.

    Raises:
        ConfigError: an argument that is out of range, or so small a layer that there would be more than 2,000.
    """
    model = _uniform_model(*_read_sizes(total_params, largest_layer_params))
    return _print_estimate(model, 3, num_gpus_per_node, num_nodes, additional_buffer_factor, nvme_path)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float | None = None,
    *,
    nvme_path: NvmePath = None,
) -> Estimate:
    """Print and return what ZeRO's stage 2 takes of a model; arguments and errors are those of stage 3's form."""
    _expect_model(model)
    return _print_estimate(model, 2, num_gpus_per_node, num_nodes, additional_buffer_factor, nvme_path)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float | None = None,
    *,
    nvme_path: NvmePath = None,
) -> Estimate:
    """Print and return the same of a model that is known by its number of parameters alone.

    Planned are as many equal layers as a decoder of that size has blocks: [Note: models of a shape].

    Raises:
        ConfigError: an argument that is out of range.
    """
    total = _read_total(total_params)
    model = _uniform_model(total, -(-total // num_blocks_of_size(total)))
    return _print_estimate(model, 2, num_gpus_per_node, num_nodes, additional_buffer_factor, nvme_path)


def _print_estimate(
    model: nn.Module,
    stage: int,
    num_gpus_per_node: object,
    num_nodes: object,
    additional_buffer_factor: object,
    nvme_path: object,
) -> Estimate:
    num_local = read_int("num_gpus_per_node", num_gpus_per_node, minimum=1, maximum=MAX_RANKS)
    nodes = read_int("num_nodes", num_nodes, minimum=1, maximum=MAX_RANKS // num_local)
    notice = ""
    if additional_buffer_factor is not None:
        factor = read_float("additional_buffer_factor", additional_buffer_factor, minimum=0)
        notice = f"\nadditional_buffer_factor = {factor:g} changes nothing: buffers are counted."
    estimate = _estimate(model, stage, num_local=num_local, num_nodes=nodes, nvme_path=nvme_path)
    print(estimate.text() + notice, flush=True)
    return estimate


def _estimate(model: nn.Module, stage: int, *, num_local: int, num_nodes: int, nvme_path: object) -> Estimate:
    form = device_form(ADAM, find_device(None).torch_device)
    sources = {
        (param, optimizer): _configuration(stage, param, optimizer, nvme_path)
        for param, optimizer in (_STAGE3_ROWS if divides_params(stage) else _STAGE2_ROWS)
    }
    planned = [
        # What there is matters to "auto" alone, which no row has.
        ModelPlanner(model).plan(
            replace(load_config(source, world_size=num_local * num_nodes), versions=False),  # what is needed
            available={},
            form=form,
        )
        for source in sources.values()
    ]
    first = planned[0]
    return Estimate(
        stage=stage,
        num_nodes=num_nodes,
        num_gpus_per_node=num_local,
        num_params=first.num_parameters,
        num_units=len(first.records),
        largest_unit_params=max(record.num_params for record in first.records),
        built_bytes=num_local * sum(param.numel() * param.itemsize for param in model.parameters()),
        rows=tuple(
            PlacementEstimate(
                offload_param=param,
                offload_optimizer=optimizer,
                cpu_bytes=num_local * found.plan.tier_bytes(TierName.HOST),
                gpu_bytes=found.plan.tier_bytes(TierName.DEVICE),
                nvme_bytes=num_local * found.plan.tier_bytes(TierName.NVME),
                config=source,
            )
            for ((param, optimizer), source), found in zip(sources.items(), planned, strict=True)
        ),
    )


def _configuration(stage: int, param: str, optimizer: str, nvme_path: object) -> dict[str, Any]:
    """Return a row's configuration: the settings that most scripts have, and clipping, which is DeepSpeed's default."""
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": _block(optimizer, nvme_path)}
    if divides_params(stage):
        zero["offload_param"] = _block(param, nvme_path)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def _block(device: str, nvme_path: object) -> dict[str, Any]:
    if device != _NVME:
        return {"device": device}
    return {"device": device, "nvme_path": tempfile.gettempdir() if nvme_path is None else nvme_path}


def _expect_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError("model", type(model).__name__, "an nn.Module")
    for name, param in model.named_parameters():
        if runtime_of(param) is not None:
            raise StateError(
                f"{name} is offloaded already: estimate before that, or read the engine's memory_table()"
            )


def _read_total(total_params: object) -> int:
    return read_int("total_params", total_params, minimum=1, maximum=int(MAX_SIZE))


def _read_sizes(total_params: object, largest_layer_params: object) -> tuple[int, int]:
    total = _read_total(total_params)
    largest = read_int("largest_layer_params", largest_layer_params, minimum=1, maximum=total)
    if -(-total // largest) > _MAX_LAYERS:
        allowed = f"at least {-(-total // _MAX_LAYERS):,}, so that there are at most {_MAX_LAYERS:,} layers"
        raise ConfigError("largest_layer_params", largest, allowed)
    return total, largest


class _Layer(nn.Module):
    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_params, dtype=torch.float32, device="meta"))


class _Uniform(nn.Module):
    def __init__(self, sizes: Iterable[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(_Layer, sizes))


def _uniform_model(total: int, largest: int) -> nn.Module:
    num_largest, rest = divmod(total, largest)
    return _Uniform([largest] * num_largest + [rest] * bool(rest))


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
