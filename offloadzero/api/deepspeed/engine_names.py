"""Answers of the engine about its configuration, under the names that DeepSpeed's engine has for them.

DeepSpeed's engine has a method for nearly every key of its JSON. Here they are rows of tables, which `Engine` looks in
for what it does not define: a method without arguments per row of ANSWERS and OFF, a value per row of VALUES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from offloadzero.config import OffloadConfig
from offloadzero.config.schema import LossScaleConfig
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.engine.runtime import Runtime
from offloadzero.errors import StateError
from offloadzero.update.spec import DTYPES


@dataclass(frozen=True)
class OffloadDevice:
    """The home of parameters or optimizer states, with the names of DeepSpeed's offload blocks."""

    device: str  # "cpu" | "nvme": the slowest tier that holds any
    nvme_path: Path | None
    pin_memory: bool
    ratio: float


_DEVICES = {TierName.NVME: "nvme", TierName.HOST: "cpu"}  # the slowest first


def offload_device(runtime: Runtime, *kinds: SegmentKind) -> OffloadDevice | None:
    """Return where the segments of these kinds were placed; None when all of them are on the device."""
    config = runtime.config
    used = {
        record.segments[kind].tier for record in runtime.records for kind in kinds if kind in record.segments
    }
    for tier, device in _DEVICES.items():
        if tier in used:
            path = config.nvme_paths[0] if tier.is_file else None
            return OffloadDevice(device, path, config.pin_memory, config.placement.host_update_ratio)
    return None


def _of_optimizer(runtime: Runtime) -> OffloadDevice | None:
    states = (state for member in runtime.spec.members for state in member.states)
    return offload_device(runtime, SegmentKind.MASTER, *states)


def _optimizer_device(runtime: Runtime) -> str | None:
    found = _of_optimizer(runtime)
    return None if found is None else found.device


def data_types(config: OffloadConfig) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the model and of the gradients that are added up, under DeepSpeed's names."""
    model = DTYPES[config.precision.param_dtype] or torch.float32
    return model, DTYPES[config.precision.grad_accum_dtype] or model


def _loss_scaling(config: OffloadConfig) -> LossScaleConfig:
    return config.precision.loss_scale or LossScaleConfig()


def _loss_scaling_arguments(runtime: Runtime) -> dict[str, Any]:
    scaling = _loss_scaling(runtime.config)
    return {
        "init_scale": 2.0**scaling.initial_scale_power,
        "scale_window": scaling.window,
        "min_scale": scaling.min_scale,
        "delayed_shift": scaling.hysteresis,
        "consecutive_hysteresis": scaling.consecutive_hysteresis,
    }


_OWN_OPTIONS = ("decoupled_weight_decay", "bias_correction")  # no argument of DeepSpeed's has these names


def _optimizer_params(runtime: Runtime) -> dict[str, Any] | None:
    config = runtime.config.optimizer
    if config is None:
        return None
    return {key: value for key, value in config.params.items() if key not in _OWN_OPTIONS}


def _scheduler_params(runtime: Runtime) -> dict[str, Any] | None:
    config = runtime.config.scheduler
    return None if config is None else dict(config.params)


ANSWERS: Mapping[str, Callable[[Runtime], Any]] = MappingProxyType(
    {
        # precision
        "bfloat16_enabled": lambda runtime: runtime.config.precision.param_dtype == "bf16",
        "fp16_enabled": lambda runtime: runtime.config.precision.param_dtype == "fp16",
        "get_data_types": lambda runtime: data_types(runtime.config),
        "dynamic_loss_scale": lambda runtime: _loss_scaling(runtime.config).static == 0,
        "dynamic_loss_scale_args": _loss_scaling_arguments,
        "initial_dynamic_scale": lambda runtime: 2.0 ** _loss_scaling(runtime.config).initial_scale_power,
        # ZeRO and where things live
        "zero_optimization": lambda runtime: runtime.config.zero_stage > 0,
        "zero_optimization_stage": lambda runtime: runtime.config.zero_stage,
        "zero_optimization_partition_gradients": lambda runtime: runtime.config.zero_stage >= 2,
        "zero_optimization_partition_weights": lambda runtime: runtime.config.zero_stage >= 3,
        "zero_offload_optimizer": _of_optimizer,
        "zero_offload_param": lambda runtime: offload_device(runtime, SegmentKind.PARAM),
        "zero_cpu_offload": lambda runtime: _optimizer_device(runtime) == "cpu",
        "zero_use_cpu_optimizer": lambda runtime: _optimizer_device(runtime) is not None,
        "zero_nvme_offload_optimizer": lambda runtime: _optimizer_device(runtime) == "nvme",
        "zero_partial_offload": lambda runtime: runtime.config.placement.host_update_ratio,
        "zero_max_live_parameters": lambda runtime: runtime.config.max_live_parameters,
        "zero_param_persistence_threshold": lambda runtime: runtime.config.units.min_leaf_elements,
        "zero_sub_group_size": lambda runtime: runtime.config.update.chunk_elements,
        "zero_gather_16bit_weights_on_model_save": lambda runtime: (
            runtime.config.gather_16bit_weights_on_save
        ),
        # training
        "gradient_clipping": lambda runtime: runtime.config.gradient_clipping,
        "steps_per_print": lambda runtime: runtime.config.steps_per_print,
        "zero_hpz_partition_size": lambda runtime: runtime.config.zero_plus_plus.node_ranks,
        "zero_quantized_gradients": lambda runtime: runtime.config.zero_plus_plus.quantized_gradients,
        "zero_quantized_nontrainable_weights": lambda runtime: (
            runtime.config.zero_plus_plus.quantized_nontrainable_weights
        ),
        "zero_quantized_weights": lambda runtime: runtime.config.zero_plus_plus.quantized_weights,
        "optimizer_params": _optimizer_params,
        "scheduler_name": lambda runtime: getattr(runtime.config.scheduler, "type", None),
        "scheduler_params": _scheduler_params,
        # ranks
        "get_data_parallel_rank": lambda runtime: runtime.group.spec.rank,
        "get_model_parallel_rank": lambda runtime: runtime.part or 0,
        "get_tensor_parallel_rank": lambda runtime: (
            0 if runtime.config.mesh is None else runtime.config.mesh.tensor_rank
        ),
        "get_sequence_parallel_group": lambda _: None,
        # nothing to do, nothing to tell
        "empty_partition_cache": lambda _: None,  # leases on the device have a fixed size: no cache
        "get_pld_theta": lambda _: None,
        "get_wall_clock_timers": lambda _: {},
    }
)

# Parts of DeepSpeed that are never on here: `engine.<name>()` is False.
OFF = (
    "amp_enabled",
    "autotuning_enabled",
    "curriculum_enabled_legacy",
    "curriculum_learning_enabled",
    "data_efficiency_enabled",
    "data_sampling_enabled",
    "dump_state",
    "eigenvalue_enabled",
    "elasticity_enabled",
    "flops_profiler_enabled",
    "fp16_auto_cast",
    "graph_harvesting",
    "load_universal_checkpoint",
    "memory_breakdown",
    "pld_enabled",
    "random_ltd_enabled",
    "sparse_gradients_enabled",
    "super_offload",
    "torch_autocast_enabled",
    "use_node_local_storage",
    "wall_clock_breakdown",
)

VALUES: Mapping[str, Callable[[Runtime], Any]] = MappingProxyType(
    {
        "communication_data_type": lambda runtime: (
            DTYPES[runtime.config.communication_dtype] or data_types(runtime.config)[0]
        ),
        "dp_world_size": lambda runtime: runtime.config.world_size,
        "global_rank": lambda runtime: runtime.group.control.rank,
        "has_moe_layers": lambda _: False,
        "mp_world_size": lambda runtime: runtime.group.num_parts,
        "mpu": lambda runtime: None if runtime.config.mesh is None else runtime.config.mesh.source,
        "pipeline_parallelism": lambda _: False,
        "seq_parallel_group": lambda _: None,
        "sequence_parallel_size": lambda _: 1,
        "world_size": lambda runtime: runtime.config.world_size * runtime.group.num_parts,
    }
)

# Methods of a module that would move or cast it: `engine.<name>()` is `engine.to(...)` with these arguments.
MOVES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "bfloat16": (torch.bfloat16,),
        "cpu": ("cpu",),
        "cuda": ("cuda",),
        "double": (torch.float64,),
        "float": (torch.float32,),
        "half": (torch.float16,),
        "type": (),
    }
)

NAMES = frozenset((*ANSWERS, *OFF, *VALUES))


def look_up(name: str, runtime: Runtime) -> Any:
    """Return the method or the value of a name; raises KeyError for a name that is in no table."""
    if name in VALUES:
        return VALUES[name](runtime)
    if name in OFF:
        return lambda: False
    answer = ANSWERS[name]
    return lambda: answer(runtime)


def expect_place(runtime: Runtime, place: torch.dtype | torch.Tensor | torch.device | str | int) -> None:
    """Raise StateError unless the parameters have that dtype, or the computation runs on that device."""
    device = runtime.accelerator.device
    if isinstance(place, torch.Tensor):
        expect_place(runtime, place.dtype)
        place = place.device
    if isinstance(place, torch.dtype):
        dtypes = {record.dtype for record in runtime.records}
        if dtypes != {place}:
            have = ", ".join(sorted(map(str, dtypes)))
            raise StateError(
                f"engine.to({place}): the parameters are {have}: the configuration's bf16 or fp16 "
                "block sets their dtype"
            )
        return
    asked = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    if asked.type != device.type or asked.index not in (None, device.index):
        raise StateError(
            f"engine.to({asked}): the engine computes on {device} and moves the weights by itself: "
            '"offloadzero": {"device": ...} sets the device'
        )
