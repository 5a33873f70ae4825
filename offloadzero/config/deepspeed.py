"""Reads a DeepSpeed JSON (as version 0.19.8 does) into the schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from offloadzero.config.block import Block
from offloadzero.config.keys import DEEPSPEED_KEYS, MIN_SUB_GROUP_ELEMENTS, NOT_OFFLOADED
from offloadzero.config.readers import (
    MAX_COUNT,
    NvmePath,
    is_auto,
    own_keys,
    read_bool,
    read_enum,
    read_float,
    read_int,
    read_mapping,
    read_num_bytes,
    read_nvme_paths,
    read_str,
)
from offloadzero.config.schema import (
    ACCUMULATION_STEPS,
    DEFAULT_GRADIENT_CLIPPING,
    KNOWN_OPTIMIZERS,
    MICRO_BATCH,
    MUON_ADAM_LR,
    OPTIMIZERS,
    TORCH_ADAMW_DECAY,
    TRAIN_BATCH,
    AioConfig,
    BatchConfig,
    LeafModuleConfig,
    LossScaleConfig,
    OffloadConfig,
    OptimizerConfig,
    PlacementConfig,
    PlacementRule,
    PrecisionConfig,
    SchedulerConfig,
    UnitConfig,
    UpdateConfig,
    ZeroPlusPlusConfig,
    resolve_batch,
)
from offloadzero.core.constants import (
    CHUNK_MULTIPLE,
    GRID_BYTES,
    MAX_IO_BLOCK_BYTES,
    MAX_IO_DEPTH,
    MAX_IO_THREADS,
)
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import ConfigError

_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
MAX_FP32 = 3.4e38  # the update computes in fp32
# Arguments that torch's param groups have under another name.
_GROUP_NAMES = {"adam_w_mode": "decoupled_weight_decay"}
_OFFLOAD_TIERS = {"cpu": TierName.HOST, "nvme": TierName.NVME}


@dataclass
class Reading:
    """The side results of one load: notices, and the nvme directories that the keys name."""

    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    nvme_paths: list[NvmePath] = field(default_factory=list)
    # Keys that would have had to name a directory; the error blames one of them when no key names any.
    nvme_path_wanted: list[str] = field(default_factory=list)
    inputs_on_host: bool = False  # activation_checkpointing.cpu_checkpointing

    def top(self, value: object) -> Block:
        """The whole configuration, whose foreign keys DeepSpeed passes over."""
        return Block("", value, table=DEEPSPEED_KEYS[""], notices=self.notices, warnings=self.warnings)

    def block(self, path: str, value: object) -> Block:
        return Block(path, value, table=DEEPSPEED_KEYS[path], notices=self.notices)

    def sub_block(self, parent: Block, name: str, path: str) -> Block:
        return parent.sub_block(name, table=DEEPSPEED_KEYS[path], notices=self.notices)


def read_deepspeed(top: Block, *, world_size: int, reading: Reading) -> OffloadConfig:
    """Read all keys but the `offloadzero` block; nvme paths and notices go to `reading`. Raises ConfigError."""
    precision = _read_precision(top, reading)
    for name in ("checkpoint", "tensor_parallel"):
        reading.sub_block(top, name, name)
    checkpointing = reading.sub_block(top, "activation_checkpointing", "activation_checkpointing")
    reading.inputs_on_host = checkpointing.read("cpu_checkpointing", read_bool, reading.inputs_on_host)
    zero = _read_zero(top, reading)
    return OffloadConfig(
        batch=_read_batch(top, world_size=world_size),
        precision=precision,
        gradient_clipping=_read_clipping(top, reading),
        optimizer=_read_optimizer(top, reading.notices),
        scheduler=_read_scheduler(top, reading.notices),
        zero_stage=zero.stage,
        world_size=world_size,
        communication_dtype=top.read("communication_data_type", _read_dtype, None),
        zero_plus_plus=_read_zero_plus_plus(zero, world_size),
        placement=_read_placement(zero, reading),
        pin_memory=_read_pin_memory(zero),
        units=_read_units(zero.block, reading),
        partition_activations=checkpointing.read(
            "partition_activations", read_bool, OffloadConfig.partition_activations
        ),
        update=_read_update(zero.block, reading),
        aio=_read_aio(top, reading),
        max_live_parameters=zero.block.read(
            "max_live_parameters", read_int, OffloadConfig.max_live_parameters, minimum=0
        ),
        gather_16bit_weights_on_save=zero.block.read(
            "gather_16bit_weights_on_model_save", read_bool, OffloadConfig.gather_16bit_weights_on_save
        ),
        steps_per_print=_read_steps_per_print(top),
    )


def _read_clipping(top: Block, reading: Reading) -> float | None:
    if is_auto(top.raw("gradient_clipping")):
        reading.warnings.append(
            f'gradient_clipping is "auto", which nobody has resolved: gradients are clipped at a norm of '
            f"{DEFAULT_GRADIENT_CLIPPING}, DeepSpeed's default. Write a number; 0 turns clipping off."
        )
        return DEFAULT_GRADIENT_CLIPPING
    return top.read("gradient_clipping", read_float, None, minimum=0)


def _read_steps_per_print(top: Block) -> int | None:
    # accelerate writes infinity to mean "never".
    if top.raw("steps_per_print") == math.inf:
        return None
    return top.read("steps_per_print", read_int, None, minimum=1)


def _read_precision(top: Block, reading: Reading) -> PrecisionConfig:
    fp16 = reading.sub_block(top, "fp16", "fp16")
    bf16 = reading.sub_block(top, "bf16", "bf16")
    loss_scale = fp16.read_fields(LossScaleConfig())  # checked whether or not fp16 is on
    use_fp16 = fp16.read("enabled", read_bool, False)
    use_bf16 = bf16.read("enabled", read_bool, False)
    if use_fp16 and use_bf16:
        raise ConfigError(
            bf16.dotted("enabled"), True, f"{fp16.dotted('enabled')} is true as well: choose one"
        )
    types = reading.sub_block(top, "data_types", "data_types")
    param_dtype = "fp16" if use_fp16 else "bf16" if use_bf16 else None
    if types.read("param_dtype", _read_dtype, None) not in (None, param_dtype or "fp32"):
        raise ConfigError(
            types.dotted("param_dtype"),
            types.raw("param_dtype"),
            f"contradicts fp16 and bf16, which say {param_dtype or 'neither'}",
        )
    return PrecisionConfig(
        param_dtype=param_dtype,
        loss_scale=loss_scale if use_fp16 else None,
        grad_accum_dtype=types.read("grad_accum_dtype", _read_dtype, None),
    )


def _read_dtype(key: str, value: object) -> str:
    return _DTYPES[read_enum(key, value, _DTYPES)]


@dataclass(frozen=True)
class _Zero:
    """The zero_optimization block and the two offload blocks inside it."""

    block: Block
    stage: int
    param: Block
    optimizer: Block


def _read_zero(top: Block, reading: Reading) -> _Zero:
    """Read the block, also in its oldest form, a bare `"zero_optimization": true`, which means stage 1."""
    if isinstance(top.raw("zero_optimization"), bool):
        block = reading.block("zero_optimization", {"stage": top.raw("zero_optimization")})
    else:
        block = reading.sub_block(top, "zero_optimization", "zero_optimization")
    return _Zero(
        block=block,
        stage=_read_stage(block),
        param=_offload_block(block, "offload_param", "cpu_offload_param", reading),
        optimizer=_offload_block(block, "offload_optimizer", "cpu_offload", reading),
    )


def _read_stage(block: Block) -> int:
    value = block.raw("stage")
    if isinstance(value, bool):
        return int(value)
    if value is not None and value not in (0, 1, 2, 3):
        raise ConfigError(block.dotted("stage"), value, "allowed 0, 1, 2, 3")
    return block.read("stage", read_int, OffloadConfig.zero_stage)


def _offload_block(zero: Block, name: str, old_name: str, reading: Reading) -> Block:
    """Read the offload block, or make the one that its old boolean name stands for."""
    path = f"zero_optimization.{name}"
    if not zero.read(old_name, read_bool, False):
        return reading.sub_block(zero, name, path)
    if name in zero:
        raise ConfigError(
            zero.dotted(old_name), True, f"the old name of {path}, which is given too: keep one"
        )
    return reading.block(path, {"device": "cpu"})


def _read_placement(zero: _Zero, reading: Reading) -> PlacementConfig:
    """Read the rules of placement. A segment that no rule names stays on the device."""
    param_tier = _offload_tier(zero.param, stage=zero.stage, min_stage=3, reading=reading)
    optimizer_tier = _offload_tier(zero.optimizer, stage=zero.stage, min_stage=1, reading=reading)
    ratio = zero.optimizer.read(
        "ratio", read_float, PlacementConfig().host_update_ratio, minimum=0, maximum=1
    )
    rules: list[PlacementRule] = []
    if param_tier is not None:
        rules.append(PlacementRule(tiers=MappingProxyType({SegmentKind.PARAM: param_tier})))
    if optimizer_tier is None:
        return PlacementConfig(rules=tuple(rules))
    rules.append(PlacementRule(tiers=MappingProxyType({SegmentKind.STATES: optimizer_tier})))
    return PlacementConfig(rules=tuple(rules), host_update_ratio=ratio)


def _offload_tier(block: Block, *, stage: int, min_stage: int, reading: Reading) -> TierName | None:
    device = block.read("device", read_enum, NOT_OFFLOADED, allowed=(NOT_OFFLOADED, *_OFFLOAD_TIERS))
    if device == NOT_OFFLOADED:
        return None
    if stage < min_stage == 3:
        reading.warnings.append(
            f"{block.dotted('device')} = {device!r} has no effect at stage {stage}: as in DeepSpeed, parameters leave "
            "the device at zero_optimization.stage 3 alone"
        )
        return None
    if stage < min_stage:
        raise ConfigError(
            block.dotted("device"), device, f"needs zero_optimization.stage {min_stage} to 3; it is {stage}"
        )
    if device == "nvme":
        paths = block.read("nvme_path", read_nvme_paths, ())
        reading.nvme_paths.extend(paths)
        if not paths:
            reading.nvme_path_wanted.append(block.dotted("nvme_path"))
    return _OFFLOAD_TIERS[device]


def _read_zero_plus_plus(zero: _Zero, world_size: int) -> ZeroPlusPlusConfig:
    """Read the keys of ZeRO++, which change nothing on one rank."""
    block = zero.block
    config = block.read_fields(ZeroPlusPlusConfig())
    config = replace(config, node_ranks=max(1, config.node_ranks))
    for name, key in own_keys(ZeroPlusPlusConfig):
        value = getattr(config, name)
        if value != getattr(ZeroPlusPlusConfig(), name) and zero.stage < 3:
            allowed = f"needs zero_optimization.stage 3; it is {zero.stage}"
            raise ConfigError(block.dotted(key.name), value, allowed)
    if world_size > 1 and world_size % config.node_ranks:
        allowed = f"ranks of a machine, by which the {world_size} ranks can be divided"
        raise ConfigError(block.dotted("zero_hpz_partition_size"), config.node_ranks, allowed)
    return config


def _read_pin_memory(zero: _Zero) -> bool:
    """Decide for the one arena that serves both blocks: it is pinned unless every block with the key says no."""
    wishes = [
        zero.block.read("cpu_offload_use_pin_memory", read_bool, None),
        zero.param.read("pin_memory", read_bool, None),
        zero.optimizer.read("pin_memory", read_bool, None),
    ]
    written = [wish for wish in wishes if wish is not None]
    return any(written) if written else OffloadConfig.pin_memory


def _read_units(zero: Block, reading: Reading) -> UnitConfig:
    default = UnitConfig().min_leaf_elements
    leaves = reading.sub_block(zero, "leaf_module", "zero_optimization.leaf_module")
    return UnitConfig(
        min_leaf_elements=zero.read("param_persistence_threshold", read_int, default, minimum=0),
        leaf_modules=leaves.read_fields(LeafModuleConfig()),
    )


def _read_update(zero: Block, reading: Reading) -> UpdateConfig:
    """Read the settings of the update. `sub_group_size` only bounds a tile: 1e9, its usual value, is no buffer size."""
    default = UpdateConfig()
    given: int | None = zero.read("sub_group_size", read_int, None, minimum=1)
    if given is None:
        return default
    if given >= default.chunk_elements:
        reading.notices.append(
            f"{zero.dotted('sub_group_size')}: accepted, changes nothing: the update's pieces are smaller"
            f" ({default.chunk_elements} elements, set by offloadzero.update.chunk_elements)"
        )
        return default
    return UpdateConfig(chunk_elements=_round_up(max(given, MIN_SUB_GROUP_ELEMENTS), CHUNK_MULTIPLE))


def _read_aio(top: Block, reading: Reading) -> AioConfig:
    aio = reading.sub_block(top, "aio", "aio")
    default = AioConfig()
    given = aio.read("block_size", read_num_bytes, default.block_size, minimum=1, maximum=MAX_IO_BLOCK_BYTES)
    block_size = _round_up(given, GRID_BYTES)
    if block_size != given:
        reading.notices.append(f"{aio.dotted('block_size')}: {given} is rounded up to {block_size}")
    return AioConfig(
        block_size=block_size,
        queue_depth=aio.read("queue_depth", read_int, default.queue_depth, minimum=1, maximum=MAX_IO_DEPTH),
        num_threads=aio.read(
            "intra_op_parallelism", read_int, default.num_threads, minimum=1, maximum=MAX_IO_THREADS
        ),
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --- batch, optimizer, scheduler ---


def _read_batch(top: Block, *, world_size: int) -> BatchConfig:
    """Read the three sizes. Raises ConfigError, with the product, where they and `world_size` contradict each other."""
    train, micro, steps = (
        top.read(key, _read_size, None) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION_STEPS)
    )
    batch = resolve_batch(train, micro, steps, world_size=world_size)
    follows = {
        TRAIN_BATCH: batch.train_batch_size is not None,
        MICRO_BATCH: batch.micro_batch_size is not None,
        ACCUMULATION_STEPS: train is not None and micro is not None,  # one size alone resolves no "auto"
    }
    return replace(
        batch,
        managed=top.read("managed_gradient_accumulation", read_bool, batch.managed),
        unresolved=tuple(key for key, known in follows.items() if is_auto(top.raw(key)) and not known),
    )


def _read_size(key: str, value: object) -> int | None:
    return None if is_auto(value) else read_int(key, value, minimum=1, maximum=MAX_COUNT)


def _read_optimizer(top: Block, notices: list[str]) -> OptimizerConfig | None:
    """Read the block; None without one, or with an empty one. Raises ConfigError."""
    if not top.raw("optimizer"):
        return None
    block = top.sub_block("optimizer", table=DEEPSPEED_KEYS["optimizer"], notices=notices)
    name = _read_type(block)
    params = block.sub_block("params", table=DEEPSPEED_KEYS["optimizer.params"], notices=notices)
    arguments = {key: params.read(key, _READERS[key], default) for key, default in OPTIMIZERS[name].items()}
    _expect_arguments(name, params)
    # DeepSpeed makes torch.optim's class then, whose AdamW decays where nothing is said; its own do not.
    torch_adamw = arguments.pop("torch_adam", False) and arguments["adam_w_mode"]
    if name == "Muon":  # whose own default it keeps
        lr = arguments["lr"]
        defaults = {"muon_lr": lr, "adam_lr": lr if "lr" in params else MUON_ADAM_LR}
        arguments.update({key: rate for key, rate in defaults.items() if arguments[key] is None})
    elif torch_adamw and "weight_decay" not in params:
        arguments["weight_decay"] = TORCH_ADAMW_DECAY
    if name == "AdamW" and not arguments["adam_w_mode"]:
        raise ConfigError(params.dotted("adam_w_mode"), False, 'contradicts the type "AdamW": write "Adam"')
    options = {_GROUP_NAMES.get(key, key): value for key, value in arguments.items()}
    return OptimizerConfig(name, MappingProxyType(options))


def _expect_arguments(name: str, params: Block) -> None:
    """Refuse arguments of other optimizers."""
    for key in _READERS:
        if key in params and key not in OPTIMIZERS[name]:
            allowed = f"{name} takes {', '.join(OPTIMIZERS[name])}"
            raise ConfigError(params.dotted(key), params.raw(key), allowed)


def _read_type(block: Block) -> str:
    """Read the type in its canonical spelling; like DeepSpeed it compares the names without regard to case."""
    key = block.dotted("type")
    available = ", ".join(OPTIMIZERS)
    if "type" not in block:
        raise ConfigError(key, None, f"the name of an optimizer: available are {available}")
    given = read_str(key, block.raw("type"))
    by_lower = {name.lower(): name for name in (*OPTIMIZERS, *KNOWN_OPTIMIZERS)}
    name = by_lower.get(given.lower())
    if name is None:
        raise ConfigError(
            key, given, f"unknown optimizer: available are {available}", known_values=OPTIMIZERS
        )
    if name not in OPTIMIZERS:
        raise ConfigError(key, given, f"known, not built yet: available are {available}")
    return name


def _read_lr(key: str, value: object) -> float | None:
    return None if is_auto(value) else _read_magnitude(key, value)


def _read_betas(key: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigError(key, value, "two numbers, each at least 0 and below 1")
    first, second = (read_float(f"{key}[{index}]", beta, minimum=0) for index, beta in enumerate(value))
    if first >= 1 or second >= 1:
        raise ConfigError(key, value, "two numbers, each at least 0 and below 1")
    return first, second


def _read_magnitude(key: str, value: object) -> float:
    return read_float(key, value, minimum=0, maximum=MAX_FP32)


# Arguments by name, whatever the optimizer.
_READERS: Mapping[str, Callable[[str, object], Any]] = MappingProxyType(
    {
        "lr": _read_lr,
        "muon_lr": _read_magnitude,
        "adam_lr": _read_magnitude,
        "betas": _read_betas,
        "eps": _read_magnitude,
        "weight_decay": _read_magnitude,
        "lr_decay": _read_magnitude,
        "initial_accumulator_value": _read_magnitude,
        "momentum": _read_magnitude,
        "dampening": _read_magnitude,
        "nesterov": read_bool,
        "adam_w_mode": read_bool,
        "bias_correction": read_bool,
        "torch_adam": read_bool,
    }
)


def _read_scheduler(top: Block, notices: list[str]) -> SchedulerConfig | None:
    """Read the block; None without one, or with an empty one.

    The schedule's own parameters, and an "auto" among them, are checked where the schedule is built.
    Raises ConfigError where the block has parameters and names no type, and for a key that is not known.
    """
    if not top.raw("scheduler"):
        return None
    block = top.sub_block("scheduler", table=DEEPSPEED_KEYS["scheduler"], notices=notices)
    params = block.read("params", read_mapping, {})
    if "type" not in block and not params:
        return None
    name = block.raw("type")
    if not isinstance(name, str) or not name or is_auto(name):
        raise ConfigError(block.dotted("type"), name, "the name of a learning-rate schedule")
    return SchedulerConfig(type=name, params=MappingProxyType(dict(params)))
