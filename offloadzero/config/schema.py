"""The frozen configuration: every part of the engine has one dataclass here.

All sizes are in bytes unless a name says otherwise. Objects are built by `offloadzero.config.load_config`,
which validates; nothing below re-checks what the loader has checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offloadzero.segments import SegmentKind, TierName

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


@dataclass(frozen=True)
class LossScaleConfig:
    """Loss scaling for fp16: `static` = 0.0 means dynamic (Micikevicius et al. 2018, section 3.2)."""

    static: float = 0.0
    initial_scale_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    consecutive_hysteresis: bool = False  # each good step restores the hysteresis, not the doubling alone


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

    device: int | None = None
    host: int | None = None
    nvme: int | None = None


@dataclass(frozen=True)
class PlacementRule:
    """Homes for the segments of the units whose name matches the glob `units`; later rules win."""

    units: str = "*"
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
class UnitConfig:
    """The cut into units: `patterns` are globs of module names, empty = the default cut."""

    patterns: tuple[str, ...] = ()
    # Leaf modules outside the repeated blocks with at least this many elements are units of their own.
    min_leaf_elements: int = 100_000
    # Unit leases the device arena holds beside homes when no device budget is given.
    prefetch_units: int = 2


@dataclass(frozen=True)
class ActivationConfig:
    """Units that keep only their inputs for backward, and the tier that holds those inputs until then."""

    units: tuple[str, ...] = ()  # globs of unit names; empty = those of the unit cut's first rule
    tier: TierName = TierName.DEVICE
    input_bytes: int | None = None  # of one call of a unit; None: the first step shows it


@dataclass(frozen=True)
class UpdateConfig:
    """Settings of updates. `in_backward`: "auto" updates a unit as soon as its gradient has landed if that is exact."""

    in_backward: bool | None = None  # None = auto
    on_nonfinite: str = "error"  # "error" | "skip"; fp16 always skips
    chunk_elements: int = 4 * 1024 * 1024
    num_chunks_in_flight: int = 3
    num_threads: int | None = None  # None = the cores this process may use, or `cores`
    cores: tuple[int, ...] = ()  # CPUs to which the update's threads are bound; empty = any


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

    backend: str = "auto"
    block_size: int = 1024 * 1024
    queue_depth: int = 32
    num_threads: int = 1
    checksums: bool = False  # swap files get checksums, verified when they are read
    transfer_timeout_s: float | None = None  # None: no limit


@dataclass(frozen=True)
class ZeroPlusPlusConfig:
    """Fewer bytes between the ranks of stage 3 (ZeRO++, arXiv 2306.10209)."""

    quantized_weights: bool = False  # qwZ: weights are gathered as int8 codes
    quantized_nontrainable_weights: bool = False  # those that do not train are
    # hpZ: consecutive ranks, of one machine, that keep a copy of what was gathered for the next time; 1: none do.
    node_ranks: int = 1
    quantized_gradients: bool = (
        False  # qgZ: gradients are reduced as int4 codes, within a machine and then across
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

    step_line: bool = False
    run_dir: Path | None = None
    trace_steps: tuple[tuple[int, int], ...] = ()
    nvme_shared: bool = False  # reads and writes of the drive share one limit


@dataclass(frozen=True)
class OffloadConfig:
    """The whole configuration, validated."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    gradient_clipping: float | None = None  # 0.0: off; None: initialize() and offload() have own defaults
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    zero_stage: int = 0
    world_size: int = 1  # ranks that train the model together, each on its part of the data
    mesh: MeshConfig | None = None  # None: each rank has the whole model
    communication_dtype: str | None = (
        None  # "bf16" | "fp16" | "fp32", of gradients between ranks; None: each gradient's own
    )
    zero_plus_plus: ZeroPlusPlusConfig = field(default_factory=ZeroPlusPlusConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    budgets: BudgetConfig = field(default_factory=BudgetConfig)
    nvme_paths: tuple[Path, ...] = ()
    placement_tokens: int | None = None  # of a micro batch, for "auto" by time; None: by bytes
    pin_memory: bool = True
    state_layout: str = "fp32"  # one of STATE_LAYOUTS: the layout of the optimizer states of bf16 parameters
    units: UnitConfig = field(default_factory=UnitConfig)
    activation_checkpoints: ActivationConfig | None = None  # None: autograd keeps the inputs that it needs
    partition_activations: bool = (
        False  # the ranks along the tensor-parallel axis keep a part each of those inputs
    )
    update: UpdateConfig = field(default_factory=UpdateConfig)
    aio: AioConfig = field(default_factory=AioConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    # stage3_max_live_parameters, when given: parameters (elements) on the device at once.
    max_live_parameters: int | None = None
    gather_16bit_weights_on_save: bool = False
    poison_released_leases: bool = False  # fill released leases with NaN (tests)
    device: str | None = None  # None = "cuda" if there is one, else "cpu"
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
