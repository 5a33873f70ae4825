"""The frozen configuration: every part of the engine has one dataclass here.

All sizes are in bytes unless a name says otherwise. Objects are built by `offloadzero.config.load_config`,
which validates; nothing below re-checks what the loader has checked. A field made by `own_key` or `own_block` is a key
of the `offloadzero` block, of which it says everything: [Note: a key is its field] in `readers.py`. DeepSpeed's keys
set the others; they are in `keys.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offloadzero.config.readers import (
    own_block,
    own_key,
    read_bool,
    read_bool_or_auto,
    read_cores,
    read_device,
    read_durable,
    read_enum,
    read_float,
    read_int,
    read_multiple,
    read_num_bytes,
    read_path,
    read_steps,
    read_str,
    read_str_list,
    read_tier,
)
from offloadzero.core.constants import (
    CHUNK_MULTIPLE,
    COMPACT_CHUNK_MULTIPLE,
    GRID_BYTES,
    MAX_UPDATE_THREADS,
    SPARED_CORES,
)
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import ConfigError

# --- the optimizers that a configuration can name ---

TORCH_ADAMW_DECAY = 0.01  # torch.optim.AdamW's default
MUON_ADAM_LR = 3e-4  # DeepSpeed's, of what Muon leaves to AdamW where no rate is given

_ADAM: Mapping[str, Any] = MappingProxyType(
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "adam_w_mode": True,
        "bias_correction": True,
        "torch_adam": False,
    }
)
# For each type, the arguments it takes and their defaults; offloadzero.update.specs has its update.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Adam": _ADAM,
        "AdamW": _ADAM,
        "Lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
        "Adagrad": {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "eps": 1e-10,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
        },
        "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        "Muon": {
            "lr": 0.02,
            "muon_lr": None,
            "adam_lr": None,
            "momentum": 0.95,
            "weight_decay": 0.0,
            "betas": (0.9, 0.95),
            "eps": 1e-10,
            "adam_w_mode": True,
            "torch_adam": False,
        },
    }
)
# Arguments of DeepSpeed's own and of torch.optim (2.13) that a script may carry over.
KNOWN_OPTIMIZERS = (
    *("Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD"),
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop"),
    "SparseAdam",
)


# --- the configuration ---

DEFAULT_GRADIENT_CLIPPING = 1.0  # DeepSpeed's
STATE_LAYOUTS = ("fp32", "compact")


@dataclass(frozen=True)
class BatchConfig:
    """train_batch_size = micro_batch_size * gradient_accumulation_steps * world size, already resolved.

    `managed` False: the caller decides when a step is complete. `unresolved`: the keys whose value is "auto" and does
    not follow from the others.
    """

    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    managed: bool = True
    unresolved: tuple[str, ...] = ()


TRAIN_BATCH = "train_batch_size"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION_STEPS = "gradient_accumulation_steps"


def resolve_batch(train: int | None, micro: int | None, steps: int | None, *, world_size: int) -> BatchConfig:
    """Fill in what is None. One size alone means one accumulation step; with none all sizes stay None.

    Raises ConfigError where the train batch is not the product of the others and `world_size`.
    """
    if train is None or micro is None:
        steps = BatchConfig.gradient_accumulation_steps if steps is None else steps
        if train is None:
            return BatchConfig(None if micro is None else micro * steps * world_size, micro, steps)
        micro = _divide(
            train,
            by=steps * world_size,
            product=f"{MICRO_BATCH} * {steps} ({ACCUMULATION_STEPS}) * {world_size} (ranks)",
        )
    elif steps is None:
        steps = _divide(
            train,
            by=micro * world_size,
            product=f"{micro} ({MICRO_BATCH}) * {ACCUMULATION_STEPS} * {world_size} (ranks)",
        )
    if micro * steps * world_size != train:
        raise ConfigError(
            TRAIN_BATCH,
            train,
            f"must equal {MICRO_BATCH} * {ACCUMULATION_STEPS} * ranks = {micro} * {steps} * {world_size}"
            f" = {micro * steps * world_size}",
        )
    return BatchConfig(train, micro, steps)


def _divide(train: int, *, by: int, product: str) -> int:
    quotient, rest = divmod(train, by)
    if rest or quotient < 1:
        raise ConfigError(TRAIN_BATCH, train, f"must equal {product}: not a multiple of {by}")
    return quotient


@dataclass(frozen=True)
class LossScaleConfig:
    """Loss scaling for fp16: `static` = 0.0 means dynamic (Micikevicius et al. 2018, section 3.2)."""

    static: float = own_key(
        0.0,
        "a fixed loss scale, 0 for a dynamic one; {default} when absent",
        read_float,
        name="loss_scale",
        minimum=0,
    )
    initial_scale_power: int = own_key(
        16,
        "the dynamic scale starts at 2 to this power; {default} when absent",
        read_int,
        minimum=0,
        maximum=127,
    )
    window: int = own_key(
        1000,
        "good steps before the one with which the scale doubles; {default} when absent",
        read_int,
        name="loss_scale_window",
        minimum=1,
    )
    hysteresis: int = own_key(
        2, "overflows before the scale halves; {default} when absent", read_int, minimum=1
    )
    min_scale: float = own_key(
        1.0, "the dynamic scale's floor; {default} when absent", read_float, name="min_loss_scale", minimum=0
    )
    consecutive_hysteresis: bool = own_key(
        False,
        "true: an overflow is forgotten with the next good step, not only when the scale doubles; {default} when "
        "absent",
        read_bool,
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes. `param_dtype` None keeps the model's own dtypes; `grad_accum_dtype` None is the parameter's dtype."""

    param_dtype: str | None = None  # "bf16" | "fp16" | "fp32"
    loss_scale: LossScaleConfig | None = None  # only with fp16
    grad_accum_dtype: str | None = None  # "bf16" | "fp16" | "fp32"


@dataclass(frozen=True)
class OptimizerConfig:
    """The JSON's `optimizer` block: a type, and all options of a param group under torch's names.

    `params["lr"]` None: the value is "auto", and has not been resolved.
    """

    type: str
    params: MappingProxyType[str, Any]


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning-rate schedule by name, with its keyword arguments as written ("auto" among them)."""

    type: str
    params: MappingProxyType[str, Any]


@dataclass(frozen=True)
class BudgetConfig:
    """Bytes each tier may use; None lets the planner choose from what the machine has."""

    device: int | None = own_key(None, 'bytes, such as 17179869184 or "16GiB"', read_num_bytes)
    host: int | None = own_key(None, "bytes", read_num_bytes)
    nvme: int | None = own_key(None, "bytes", read_num_bytes)


@dataclass(frozen=True)
class PlacementRule:
    """Homes for the segments of the units whose name matches the glob `units`; later rules win."""

    units: str = own_key("*", "a glob of unit names; {default} when absent; later rules win", read_str)
    tiers: MappingProxyType[SegmentKind, TierName] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class PlacementConfig:
    """The rules, in order. `host_update_ratio` is the share of the optimizer state kept off the device.

    `auto`: the planner chooses every home from the budgets, and ignores the rules and the ratio.
    """

    rules: tuple[PlacementRule, ...] = ()
    host_update_ratio: float = 1.0
    auto: bool = False


@dataclass(frozen=True)
class LeafModuleConfig:
    """Modules that are one unit each, if not part of one, whatever their forward uses of them."""

    classes: tuple[str, ...] = own_key(
        (), "names of classes, with or without that of their file's module", read_str_list
    )
    names: tuple[str, ...] = own_key((), "names of modules, as named_modules() has them", read_str_list)
    name_suffixes: tuple[str, ...] = own_key((), "ends of such names", read_str_list)


@dataclass(frozen=True)
class UnitConfig:
    """The cut into units: `patterns` are globs of module names, empty = the default cut."""

    patterns: tuple[str, ...] = own_key(
        (), "globs of module names that are units; the default cut when absent", read_str_list
    )
    # Leaf modules outside the repeated blocks.
    min_leaf_elements: int = own_key(
        100_000,
        "layers outside the blocks with at least so many elements are units of their own; {default} when absent",
        read_int,
        minimum=0,
    )
    # Unit leases the device arena holds beside homes when no device budget is given.
    prefetch_units: int = own_key(
        2,
        "units fetched ahead, without a device budget or max_live_parameters; {default} when absent",
        read_int,
        minimum=1,
    )
    leaf_modules: LeafModuleConfig = LeafModuleConfig()  # zero_optimization.leaf_module


@dataclass(frozen=True)
class ActivationConfig:
    """Units that keep only their inputs for backward, and the tier that holds those inputs until then."""

    units: tuple[str, ...] = own_key(
        (), "globs of unit names; every repeated block (or unit of units.patterns) when absent", read_str_list
    )
    tier: TierName = own_key(
        TierName.DEVICE,
        "where the inputs wait for backward: device, host or nvme; {default} when absent",
        read_tier,
    )
    input_bytes: int | None = own_key(
        None,
        f"bytes of the inputs of one unit's call, each rounded up to {GRID_BYTES} (times the ranks along tp under "
        "partition_activations): their room on host or nvme is then planned; taken in the first step when absent",
        read_num_bytes,
        minimum=1,
    )


@dataclass(frozen=True)
class UpdateConfig:
    """Settings of updates. `in_backward` None is "auto": as soon as a unit's gradient has landed, if that is exact."""

    in_backward: bool | None = own_key(
        None,
        'true, false or "auto": update a unit as soon as that is exact; offload() takes "auto" as false, so that '
        "scripts can use `param.grad`",
        read_bool_or_auto,
        auto_is_absent=False,
    )
    on_nonfinite: str = own_key(
        "error",
        "error or skip, when a gradient holds NaN or Inf; {default} when absent; fp16 always skips",
        read_enum,
        allowed=("error", "skip"),
    )
    chunk_elements: int = own_key(
        2 * 1024 * 1024,
        f"elements per pipelined piece, a multiple of {CHUNK_MULTIPLE} (of {COMPACT_CHUNK_MULTIPLE} with state_layout "
        "compact); {default} when absent",
        read_multiple,
        of=CHUNK_MULTIPLE,
    )
    num_chunks_in_flight: int = own_key(
        8,
        "pieces being read, updated and written at once; {default} when absent",
        read_int,
        minimum=1,
        maximum=1024,
    )
    num_threads: int | None = own_key(  # None: also those of `cores`
        None,
        "threads of the update; the cores this process may use when absent",
        read_int,
        minimum=1,
        maximum=MAX_UPDATE_THREADS,
    )
    cores: tuple[int, ...] = own_key(
        (),
        "the CPUs its threads keep to, [2, 3] say; any when absent; a GPU's launching thread keeps "
        + ", ".join(f"{spared} of {cores}" for cores, spared in sorted(SPARED_CORES.items())),
        read_cores,
    )


class AioBackend(str, Enum):
    """The interface by which the file engine moves blocks."""

    AUTO = "auto"
    """The first of io_uring, native_aio, aiofiles that this machine allows; logged once with the reason."""
    IO_URING = "io_uring"
    """Linux io_uring (kernel 5.6 or later); many container runtimes forbid it."""
    NATIVE_AIO = "native_aio"
    """Linux native AIO, the kernel interface under libaio. Asynchronous on direct files only: on a buffered
    file the engine's thread does the transfers one after the other."""
    AIOFILES = "aiofiles"
    """The `aiofiles` package on Python threads: portable, buffered, one transfer per file at a time."""


@dataclass(frozen=True)
class AioConfig:
    """The file engine: `backend` is the value of an AioBackend."""

    backend: str = own_key(
        AioBackend.AUTO.value,
        "auto, io_uring, native_aio or aiofiles; one asked for by name never falls back",
        read_enum,
        auto_is_absent=False,
        allowed=tuple(backend.value for backend in AioBackend),
    )
    block_size: int = 1024 * 1024
    queue_depth: int = 32
    num_threads: int = 1
    checksums: bool = own_key(
        False,
        "keep a CRC-32C of each 4 KiB block on nvme and verify what is read; {default} when absent",
        read_bool,
    )
    transfer_timeout_s: float | None = own_key(
        None,
        "seconds in which a transfer must be complete once it is asked for, at least {minimum}; no limit when absent",
        read_float,
        minimum=0.1,
        maximum=1e6,
    )


@dataclass(frozen=True)
class ZeroPlusPlusConfig:
    """Fewer bytes between the ranks of stage 3 (ZeRO++, arXiv 2306.10209)."""

    node_ranks: int = own_key(  # hpZ
        1,
        "number of consecutive ranks, those of a machine, that share a copy of each unit after its first gather in a "
        "step; divides the number of ranks; 1 for none; {default} when absent; needs stage 3",
        read_int,
        name="zero_hpz_partition_size",
        minimum=0,
    )
    quantized_weights: bool = own_key(  # qwZ
        False,
        "weights are gathered from the ranks as int8 codes, of half the bytes of bf16; needs stage 3",
        read_bool,
        name="zero_quantized_weights",
    )
    quantized_nontrainable_weights: bool = own_key(
        False,
        "the same for frozen weights only; needs stage 3. Their homes keep the exact weights",
        read_bool,
        name="zero_quantized_nontrainable_weights",
    )
    quantized_gradients: bool = own_key(  # qgZ
        False,
        "gradients are reduced as int4 codes, within a machine and then across machines, in a quarter of the bytes of "
        "bf16; needs stage 3",
        read_bool,
        name="zero_quantized_gradients",
    )


@dataclass(frozen=True)
class MeshConfig:
    """A rank's place in a mesh of ranks, of which one axis is data-parallel and the others divide the model."""

    data_ranks: tuple[int, ...]  # those that train this rank's part of the model, itself included, in order
    # The place along the tensor-parallel axis: a parameter that is not divided along it counts once in the norm, at 0.
    tensor_rank: int = 0
    pipeline_rank: int = 0  # the place along the pipeline, where `source` says it
    tensor_size: int | None = None  # the places along the tensor-parallel axis, where `source` says it
    source: object = field(default=None, compare=False, repr=False)  # what `initialize(mpu=...)` was given


@dataclass(frozen=True)
class ObserveConfig:
    """The parts of each step that are recorded or printed. `trace_steps` are ranges of steps, both ends included."""

    step_line: bool = own_key(
        False,
        "print a line per step: its time, its bound, its largest waits; {default} when absent",
        read_bool,
    )
    run_dir: Path | None = own_key(
        None, "a directory for a record per step; `offloadzero report` makes a page of it", read_path
    )
    trace_steps: tuple[tuple[int, int], ...] = own_key(
        (), 'steps whose lanes are traced into run_dir: [3, 4], "10-12"', read_steps
    )
    nvme_shared: bool = own_key(
        False, "the drive has one limit for reads and writes together; {default} when absent", read_bool
    )


@dataclass(frozen=True)
class OffloadConfig:
    """The whole configuration, validated."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    gradient_clipping: float | None = (
        None  # 0.0: off; None: initialize() has DEFAULT_GRADIENT_CLIPPING, offload() 0.0
    )
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_stage: int = 0
    world_size: int = 1  # ranks that train the model together, each on its part of the data
    mesh: MeshConfig | None = None  # None: each rank has the whole model
    communication_dtype: str | None = (
        None  # "bf16" | "fp16" | "fp32", of gradients between ranks; None: each gradient's own
    )
    zero_plus_plus: ZeroPlusPlusConfig = field(default_factory=ZeroPlusPlusConfig)
    pin_memory: bool = True
    budgets: BudgetConfig = own_block(
        BudgetConfig, "bytes each tier may use; from what the machine has when absent"
    )
    placement: PlacementConfig = own_block(
        PlacementConfig,
        "a tier for everything, tiers by segment, a list of rules, or auto; wins over offload_*",
        auto_is_absent=False,
    )
    placement_tokens: int | None = own_key(
        None,
        "tokens of a micro batch: auto takes the fastest placement by what `offloadzero plan` has measured of this "
        "machine; by bytes when absent",
        read_int,
        minimum=1,
        maximum=1 << 40,
    )
    nvme_paths: tuple[Path, ...] = own_key(
        (), "a directory or a list of them (striped), after those of the offload blocks", name="nvme_path"
    )
    frozen_weights: str = own_key(
        "auto",
        "where frozen weights on nvme are read from: in_place, the model's own files (from_pretrained); copy, the swap "
        "files; auto, in_place if these files are on the drive of nvme_path and checksums are off; {default} when "
        "absent",
        read_enum,
        auto_is_absent=False,
        allowed=("auto", "in_place", "copy"),
    )
    versions: bool | None = own_key(
        None,
        'true, false or "auto": second places for states on nvme, so that updates which wait for the norm of all '
        "gradients can be tried in backward; auto when absent: where there is room for them",
        read_bool_or_auto,
        auto_is_absent=False,
    )
    durable: int = own_key(
        0,
        "true: the files in nvme_path stay, and after a kill or a power failure engine.resume() goes on from the last "
        "step; a number: from the last one that is a multiple of it; false when absent",
        read_durable,
    )
    state_layout: str = own_key(  # of the optimizer states of bf16 parameters
        STATE_LAYOUTS[0],
        "fp32 (exact), or compact: 5.06 bytes per bf16 parameter, moments in 8 bits",
        read_enum,
        allowed=STATE_LAYOUTS,
    )
    units: UnitConfig = own_block(UnitConfig, "how the model is cut")
    activation_checkpoints: ActivationConfig | None = (
        own_key(  # None: autograd keeps the inputs that it needs
            None,
            "units keep only their inputs for backward and compute the rest again; off when absent, {} is on",
        )
    )
    partition_activations: bool = (
        False  # the ranks along the tensor-parallel axis keep a part each of those inputs
    )
    update: UpdateConfig = own_block(UpdateConfig, "how the optimizer's update runs")
    aio: AioConfig = own_block(AioConfig, "which file engine")
    observe: ObserveConfig = own_block(
        ObserveConfig, "what of each step is shown and recorded (docs/measuring.md)"
    )
    # stage3_max_live_parameters, when given: parameters (elements) on the device at once.
    max_live_parameters: int | None = None
    gather_16bit_weights_on_save: bool = False
    device: str | None = own_key(None, 'cpu, cuda or cuda:N; "cuda" if there is one when absent', read_device)
    poison_released_leases: bool = own_key(
        False, "fill released leases with NaN (a debugging aid)", read_bool
    )
    steps_per_print: int | None = None
    # One line for each DeepSpeed key that is accepted and changes nothing here, or was left at "auto".
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # for the user: a value may not be the one meant

    @property
    def is_of_several(self) -> bool:
        """Whether the process trains together with others, which have other data or another part of the model."""
        return self.world_size > 1 or self.mesh is not None

    @property
    def num_input_parts(self) -> int:
        """The number of ranks that keep an input of a checkpointed unit together."""
        if self.mesh is None or not self.partition_activations:
            return 1
        return self.mesh.tensor_size or 1
