"""Every key that the loader knows, its effect here, and the reason: the source of docs/config.md's tables.

A table maps the path of a JSON object ("" is the top level) to its keys. A key in no table is a ConfigError. Here are
DeepSpeed's keys, with the defaults of the fields that they set; ours are declared with their fields, in `schema.py`:
[Note: a key is its field]. `make docs` writes the tables of the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from offloadzero.config.readers import own_keys, shown
from offloadzero.config.schema import (
    DEFAULT_GRADIENT_CLIPPING,
    MUON_ADAM_LR,
    OPTIMIZERS,
    TORCH_ADAMW_DECAY,
    ActivationConfig,
    AioConfig,
    BatchConfig,
    BudgetConfig,
    LeafModuleConfig,
    LossScaleConfig,
    ObserveConfig,
    OffloadConfig,
    PlacementConfig,
    PlacementRule,
    UnitConfig,
    UpdateConfig,
    ZeroPlusPlusConfig,
)
from offloadzero.core.constants import GRID_BYTES, MAX_AIOFILES_THREADS, MAX_IO_DEPTH, MAX_IO_THREADS


class Action(str, Enum):
    """The loader's treatment of a key."""

    USE = "use"  # honoured as DeepSpeed means it
    MAP = "map"  # read as a setting of this package
    ALIAS = "alias"  # another spelling of the key that the note names
    ACCEPT = "accept"  # checked for its type, changes nothing, one line in OffloadConfig.notices
    REFUSE = "refuse"  # a ConfigError with the reason, unless the value says "off"


class Kind(str, Enum):
    """The type an accepted or refused value must have."""

    ANY = "any"
    BOOL = "bool"
    NUMBER = "number"
    TEXT = "text"
    SWITCHED = "switched"  # a JSON object that is off unless something in it says "enabled": true


@dataclass(frozen=True)
class KeySpec:
    """One known key. A value in `off` asks for nothing: no line when accepted, no error when refused.

    `auto_is_absent`: "auto" leaves the default, and a notice says so; else the key's reader understands "auto".
    """

    action: Action
    note: str
    kind: Kind = Kind.ANY
    off: tuple[object, ...] = ()
    auto_is_absent: bool = True


KeyTable = Mapping[str, KeySpec]


def _use(note: str, *, auto_is_absent: bool = True) -> KeySpec:
    return KeySpec(Action.USE, note, auto_is_absent=auto_is_absent)


def _map(note: str) -> KeySpec:
    return KeySpec(Action.MAP, note)


def _alias(canonical: str) -> KeySpec:
    return KeySpec(Action.ALIAS, canonical)


def _accept(note: str, kind: Kind = Kind.ANY, *off: object) -> KeySpec:
    return KeySpec(Action.ACCEPT, note, kind, off)


def _refuse(note: str, kind: Kind = Kind.BOOL, *off: object) -> KeySpec:
    return KeySpec(Action.REFUSE, note, kind, off or ((False,) if kind is Kind.BOOL else ()))


_BOOL, _NUMBER, _TEXT, _SWITCHED = Kind.BOOL, Kind.NUMBER, Kind.TEXT, Kind.SWITCHED

_TRACKER = "metrics are not sent to trackers from here; log what the engine reports"
_LEASES = "leases are sized from the units and the budgets (offloadzero.budgets)"
_COLLECTIVES = "not needed: over several ranks each unit has one collective"
_PIPELINE = "reads, the update and writes always overlap (offloadzero.update.num_chunks_in_flight)"
_REPLACEMENT = "what stays on the device follows from the recorded order of use (offloadzero.budgets.device)"
_SCHEDULED_BITS = "not built; ignoring it would change what is trained"

NOT_OFFLOADED = "none"  # the device of an offload block that moves nothing
MIN_SUB_GROUP_ELEMENTS = 65_536


def _default_of(argument: str) -> str:
    """Return the default of an optimizer's argument, that of the first type that takes it first."""
    defaults = {name: taken[argument] for name, taken in OPTIMIZERS.items() if argument in taken}
    usual = next(iter(defaults.values()))
    others = [f"{name}: {shown(default)}" for name, default in defaults.items() if default != usual]
    return shown(usual) + (f" ({', '.join(others)})" if others else "")


def _declared(config_class: type) -> KeyTable:
    """Return the keys that fields declare: [Note: a key is its field]."""
    return {
        key.name: KeySpec(Action.USE, key.note, auto_is_absent=key.auto_is_absent)
        for _, key in own_keys(config_class)
    }


_TOP: dict[str, KeySpec] = {
    "train_batch_size": _use(
        "samples per optimizer step = micro batch * accumulation * ranks", auto_is_absent=False
    ),
    "train_micro_batch_size_per_gpu": _use("samples per forward on one rank", auto_is_absent=False),
    "gradient_accumulation_steps": _use(
        f"micro batches per optimizer step; {BatchConfig.gradient_accumulation_steps} when it does not follow",
        auto_is_absent=False,
    ),
    "managed_gradient_accumulation": _use(
        f"{shown(BatchConfig.managed)} when absent; false: every engine.step() updates, with all gradients since the "
        "last"
    ),
    "max_grad_norm": _refuse("write gradient_clipping instead", Kind.ANY),
    "gradient_clipping": _use(
        "largest global gradient norm, 0 is off; absent: offload() does not clip, initialize() clips at "
        f"{DEFAULT_GRADIENT_CLIPPING}",
        auto_is_absent=False,
    ),
    "optimizer": _use("the optimizer to build"),
    "scheduler": _use("the learning-rate schedule to build"),
    "fp16": _use("fp16 parameters with loss scaling"),
    "bf16": _use("bf16 parameters"),
    "bfloat16": _alias("bf16"),
    "data_types": _use("the dtype gradients are accumulated in"),
    "tensor_parallel": _use("refused where it asks for more than one device"),
    "zero_optimization": _use("what is offloaded; `true` is stage 1"),
    "aio": _use("the file engine"),
    "activation_checkpointing": _use(
        "where activation checkpoints wait, and whether tensor-parallel ranks divide them"
    ),
    "checkpoint": _use("accepted, nothing in it is needed here"),
    "offloadzero": _use("our own block, below"),
    "steps_per_print": _use("a progress line every so many optimizer steps; infinity is never"),
    "wall_clock_breakdown": _accept("every step's waits are measured anyway", _BOOL, False),
    "memory_breakdown": _accept("the tiers' bytes are reported anyway", _BOOL, False),
    "dump_state": _accept("print the OffloadConfig instead", _BOOL, False),
    "zero_allow_untested_optimizer": _accept(
        "an optimizer passed in is used or refused by its type", _BOOL, False
    ),
    "zero_force_ds_cpu_optimizer": _accept("the update runs where the optimizer state lives", _BOOL),
    "prescale_gradients": _accept(_COLLECTIVES, _BOOL, False),
    "gradient_predivide_factor": _accept(_COLLECTIVES, _NUMBER, 1),
    "gradient_allreduce_op": _refuse("gradients are not summed over ranks: allowed mean", _TEXT, "mean"),
    "communication_data_type": _use("the dtype in which gradients go between ranks, if not their own"),
    "seq_parallel_communication_data_type": _accept("there is no sequence parallelism", _TEXT),
    "seq_parallel_comm_data_type": _alias("seq_parallel_communication_data_type"),
    "sequence_parallel_size": _refuse("sequence parallelism is not built: allowed 1", _NUMBER, 1),
    "use_data_before_expert_parallelism": _accept("there is no expert parallelism", _BOOL, False),
    "disable_python_gc": _accept("Python's garbage collector is left alone", _BOOL, False),
    "vocabulary_size": _accept("in DeepSpeed it only warns of an unaligned size", _NUMBER),
    "log_level": _accept("set the level of Python's logger offloadzero", _TEXT),
    "timers": _accept("every step's waits are measured anyway", _SWITCHED),
    "disable_allgather": _accept(_COLLECTIVES, _BOOL, False),
    "allgather_size": _accept(_COLLECTIVES, _NUMBER),
    "graph_harvesting": _accept("kernels are launched as the model launches them", _BOOL, False),
    "sparse_gradients": _refuse("sparse gradients are not built"),
    "sparse_attention": _refuse("the model's attention is used as it is", Kind.ANY),
    "dataloader_drop_last": _refuse("not built: pass a DataLoader with drop_last=True"),
    "tensorboard": _accept(_TRACKER, _SWITCHED),
    "wandb": _accept(_TRACKER, _SWITCHED),
    "csv_monitor": _accept(_TRACKER, _SWITCHED),
    "comet": _accept(_TRACKER, _SWITCHED),
    "monitor_config": _accept(_TRACKER, _SWITCHED),
    "flops_profiler": _accept("no profile is printed; use torch.profiler", _SWITCHED),
    "comms_logger": _accept(_COLLECTIVES, _SWITCHED),
    "autotuning": _accept("the placement is planned from the budgets, nothing is tuned by trial", _SWITCHED),
    "compile": _accept("compile the model's blocks with torch.compile before wrapping", _SWITCHED),
    "nebula": _accept("checkpoints are written by this package", _SWITCHED),
    "datastates": _accept("checkpoints are written by this package", _SWITCHED),
    "pipeline": _accept("there is no pipeline parallelism", Kind.ANY),
    "elasticity": _refuse("it would choose the batch size, which is not built", _SWITCHED),
    "amp": _refuse("apex AMP changes the numbers and is not built: use bf16 or fp16", _SWITCHED),
    "torch_autocast": _refuse("not built here: open torch.autocast in the script", _SWITCHED),
    "compression_training": _refuse(_SCHEDULED_BITS, _SWITCHED),
    "data_efficiency": _refuse(_SCHEDULED_BITS, _SWITCHED),
    "curriculum_learning": _refuse(_SCHEDULED_BITS, _SWITCHED),
    "progressive_layer_drop": _refuse(_SCHEDULED_BITS, _SWITCHED),
    "quantize_training": _refuse(_SCHEDULED_BITS, _SWITCHED),
    "weight_quantization": _refuse("quantized weights are not built; they change the numbers", Kind.ANY, {}),
    "eigenvalue": _refuse(_SCHEDULED_BITS, _SWITCHED),
    "hybrid_engine": _refuse("generation inside training is not built", _SWITCHED),
    "expert_parallel": _refuse("expert parallelism is not built", _SWITCHED),
}

_OPTIMIZER: dict[str, KeySpec] = {
    "type": _use("Adam, AdamW, Lion, Adagrad, SGD or Muon, in any case", auto_is_absent=False),
    "params": _use("the optimizer's arguments"),
    "legacy_fusion": _accept("there is one fused update", _BOOL, False),
}

_OPTIMIZER_PARAMS: dict[str, KeySpec] = {
    "lr": _use(f"learning rate, at least 0; {_default_of('lr')} when absent", auto_is_absent=False),
    "muon_lr": _use("Muon: its rate of matrices; that of lr when absent"),
    "adam_lr": _use(
        f"Muon: the rate of what it leaves to AdamW; that of lr when absent, {MUON_ADAM_LR} where lr is absent too"
    ),
    "betas": _use(f"Adam, Lion, Muon: two numbers in [0, 1); {_default_of('betas')} when absent"),
    "eps": _use(
        "Adam, Adagrad, Muon: at least 0 (above it for Adam's L2 decay in compact states); "
        f"{_default_of('eps')} when absent"
    ),
    "weight_decay": _use(f"at least 0; {_default_of('weight_decay')} when absent"),
    "lr_decay": _use(
        f"Adagrad: the rate of step k is lr / (1 + (k - 1) * lr_decay); {_default_of('lr_decay')} when absent"
    ),
    "initial_accumulator_value": _use(
        f"Adagrad: its sums before the first step; {_default_of('initial_accumulator_value')} when absent"
    ),
    "momentum": _use(
        f"SGD, Muon: the share of its buffer that a step keeps; {_default_of('momentum')} when absent"
    ),
    "dampening": _use(
        f"SGD: a gradient's share in its buffer is 1 - dampening; {_default_of('dampening')} when absent"
    ),
    "nesterov": _use(f"SGD: Nesterov's momentum; {_default_of('nesterov')} when absent"),
    "adam_w_mode": _use(
        f'{_default_of("adam_w_mode")} when absent; with true "Adam" means AdamW (decoupled weight decay)'
    ),
    "bias_correction": _use(f"Adam: {_default_of('bias_correction')} when absent"),
    "torch_adam": _use(
        "Adam, Muon: the update is this package's own either way; with true, weight_decay of AdamW (adam_w_mode), "
        f"if that is the type and it is not given, is torch's {TORCH_ADAMW_DECAY}"
    ),
    "ns_method": _accept(
        "Muon's iteration is torch.optim.Muon's, in bf16; in exact arithmetic gram is the same",
        _TEXT,
        "standard",
    ),
    "per_head_muon": _refuse("Muon of each attention head by itself is not built"),
    "foreach": _accept("there is one fused update", _BOOL, False),
    "fp32_optimizer_states": _refuse(
        "offloadzero.state_layout = compact gives smaller optimizer states: allowed true", Kind.BOOL, True
    ),
    "amsgrad": _refuse("AMSGrad's third moment is not built"),
    "max_grad_norm": _refuse("write gradient_clipping at the top level instead", Kind.ANY),
}

_SCHEDULER: dict[str, KeySpec] = {
    "type": _use(
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest or a torch scheduler",
        auto_is_absent=False,
    ),
    "params": _use("the schedule's arguments, checked when it is built"),
}

_FP16: dict[str, KeySpec] = {
    "enabled": _use("parameters and gradients in fp16; when neither is on they keep the model's dtypes"),
    **_declared(LossScaleConfig),
    "auto_cast": _accept("inputs are not cast: hand over floating-point inputs in fp16", _BOOL, False),
    "fused_mode": _accept("there is one fused update", _BOOL),
    "fp16_master_weights_and_grads": _refuse("the master weight is always exact fp32"),
}

_BF16: dict[str, KeySpec] = {
    "enabled": _use(
        "parameters and gradients in bf16, the fp32 master weight exact; "
        "when neither is on they keep the model's dtypes"
    ),
    "immediate_grad_update": _accept("a gradient leaves the device as soon as it is complete", _BOOL),
    "check_grad_overflow": _accept("gradients are always checked (offloadzero.update.on_nonfinite)", _BOOL),
    "bf16_master_weights_and_grads": _refuse("the master weight is always exact fp32"),
    "bf16_optimizer_states": _refuse("offloadzero.state_layout = compact gives smaller optimizer states"),
}

_ZERO: dict[str, KeySpec] = {
    "stage": _use(
        "0, 1, 2 or 3, `true` is 1: which offload blocks are allowed, and what ranks divide; 0, nothing, when absent"
    ),
    "offload_param": _use("home of the parameters at stage 3; below it a warning says that it has no effect"),
    "offload_optimizer": _use("home of master weights and moments; needs stage 1, 2 or 3"),
    "cpu_offload": _map('old name of offload_optimizer {"device": "cpu"}'),
    "cpu_offload_param": _map('old name of offload_param {"device": "cpu"}'),
    "cpu_offload_params": _alias("cpu_offload_param"),
    "cpu_offload_use_pin_memory": _map("old name of pin_memory"),
    "max_live_parameters": _map(
        "parameters leased on the device at once, at least a unit; a device budget wins"
    ),
    "stage3_max_live_parameters": _alias("max_live_parameters"),
    "param_persistence_threshold": _map("units.min_leaf_elements: smaller leaves join the resident unit"),
    "stage3_param_persistence_threshold": _alias("param_persistence_threshold"),
    "sub_group_size": _map(f"an upper bound on update.chunk_elements, at least {MIN_SUB_GROUP_ELEMENTS}"),
    "gather_16bit_weights_on_model_save": _use(
        "for a script to ask the engine; save_16bit_model saves the whole model either way"
    ),
    "stage3_gather_16bit_weights_on_model_save": _alias("gather_16bit_weights_on_model_save"),
    "gather_fp16_weights_on_model_save": _alias("gather_16bit_weights_on_model_save"),
    "stage3_gather_fp16_weights_on_model_save": _alias("gather_16bit_weights_on_model_save"),
    "prefetch_bucket_size": _accept(
        "whole units are fetched ahead as far as the leases allow (offloadzero.budgets)",
        _NUMBER,
    ),
    "stage3_prefetch_bucket_size": _alias("prefetch_bucket_size"),
    "max_reuse_distance": _accept(_REPLACEMENT, _NUMBER),
    "stage3_max_reuse_distance": _alias("max_reuse_distance"),
    "model_persistence_threshold": _accept(_REPLACEMENT, _NUMBER),
    "stage3_model_persistence_threshold": _alias("model_persistence_threshold"),
    "module_granularity_threshold": _accept("units are cut by offloadzero.units", _NUMBER, 0),
    "stage3_module_granularity_threshold": _alias("module_granularity_threshold"),
    "leaf_module": _use(
        "modules that are one unit each, if not part of one, whatever their forward uses of them: experts"
    ),
    "use_all_reduce_for_fetch_params": _accept(_COLLECTIVES, _BOOL, False),
    "stage3_use_all_reduce_for_fetch_params": _alias("use_all_reduce_for_fetch_params"),
    "allgather_sequential": _accept(_COLLECTIVES, _BOOL, False),
    "stage3_allgather_sequential": _alias("allgather_sequential"),
    "partition_stream_chunk_size": _accept("parameters are moved unit by unit", _NUMBER, 0),
    "stage3_partition_stream_chunk_size": _alias("partition_stream_chunk_size"),
    "compute_grad_norm": _accept("the gradient norm is always known", _BOOL, True),
    "parameter_alignment": _accept("the flat layout aligns what needs it", _BOOL, False),
    "overlap_comm": _accept("transfers always overlap the computation", _BOOL),
    "contiguous_gradients": _accept("a unit's gradients are one flat buffer", _BOOL),
    "reduce_scatter": _accept(_COLLECTIVES, _BOOL),
    "reduce_bucket_size": _accept(_COLLECTIVES, _NUMBER),
    "use_multi_rank_bucket_allreduce": _accept(_COLLECTIVES, _BOOL),
    "allgather_partitions": _accept(_COLLECTIVES, _BOOL),
    "allgather_bucket_size": _accept(_COLLECTIVES, _NUMBER),
    "round_robin_gradients": _accept("a gradient leaves the device as soon as it is complete", _BOOL, False),
    "ignore_unused_parameters": _accept(
        "a parameter without a gradient is left as it is, as in torch", _BOOL
    ),
    "load_from_fp32_weights": _accept("a checkpoint holds the master weights", _BOOL),
    "elastic_checkpoint": _accept("a checkpoint holds whole tensors, whatever the placement", _BOOL, False),
    "legacy_stage1": _accept("there is one stage 1", _BOOL, False),
    "memory_efficient_linear": _accept("the model's linear layers are used as they are", _BOOL),
    "override_module_apply": _accept("Module.apply gathers inside zero.Init, else it is left alone", _BOOL),
    "pipeline_loading_checkpoint": _accept("checkpoints are read unit by unit", _BOOL, False),
    "log_trace_cache_warnings": _accept(
        "a change in the order of use shows as waits in the step report", _BOOL, False
    ),
    "enable_sanity_checks": _accept(
        "offloadzero.poison_released_leases and offloadzero.aio.checksums are the checks there are",
        _BOOL,
        False,
    ),
    "save_muon_momentum_buffer_in_memory": _accept(
        "Muon's momentum lives where the optimizer's states do (offloadzero.placement.momentum_buffer)",
        _BOOL,
        False,
    ),
    **_declared(ZeroPlusPlusConfig),
    "zeropp_loco_param": _refuse("feedback of the errors of quantized gradients is not built", Kind.ANY),
    "mics_shard_size": _refuse("MiCS shard groups are not built: allowed -1", _NUMBER, -1),
    "mics_hierarchical_params_gather": _refuse("MiCS shard groups are not built"),
    "zenflow": _refuse("updates with stale gradients are not built; they change the numbers", Kind.ANY),
}

_OFFLOAD_PARAM: dict[str, KeySpec] = {
    "device": _use(f"none, cpu (our host tier) or nvme; {NOT_OFFLOADED} when absent"),
    "nvme_path": _use("a directory or a list of them (striped), needed by nvme, read only then"),
    "pin_memory": _use(
        "host memory is page-locked and, for io_uring, registered; "
        f"{shown(OffloadConfig.pin_memory)} when absent, false only if all say so"
    ),
    "buffer_count": _accept(_LEASES, _NUMBER),
    "buffer_size": _accept(_LEASES, _NUMBER),
    "max_in_cpu": _accept("the host tier's share is offloadzero.budgets.host", _NUMBER),
}

_OFFLOAD_OPTIMIZER: dict[str, KeySpec] = {
    "device": _OFFLOAD_PARAM["device"],
    "nvme_path": _OFFLOAD_PARAM["nvme_path"],
    "pin_memory": _OFFLOAD_PARAM["pin_memory"],
    "ratio": _use(
        "share of the optimizer state kept off the device, 0 to 1; "
        f"{shown(PlacementConfig.host_update_ratio)} when absent"
    ),
    "buffer_count": _accept(_LEASES, _NUMBER),
    "buffer_size": _accept(_LEASES, _NUMBER),
    "pipeline": _accept(_PIPELINE, _BOOL),
    "pipeline_read": _accept(_PIPELINE, _BOOL),
    "pipeline_write": _accept(_PIPELINE, _BOOL),
    "fast_init": _accept("the state is written once, at its home", _BOOL),
    "super_offload": _accept(
        "the update overlaps backward or the next forward, and is exact; its share on the device follows from ratio",
        _BOOL,
        False,
    ),
    "cpuadam_cores_perc": _accept("the update's threads are offloadzero.update.num_threads", _NUMBER),
    "convert_grad_on_cpu": _accept("gradients are converted inside the fused update", _BOOL),
}

_AIO: dict[str, KeySpec] = {
    "block_size": _use(
        f"bytes per request, rounded up to a multiple of {GRID_BYTES}, fitted to the disk's requests; "
        f"{AioConfig.block_size >> 20} MiB when absent"
    ),
    "queue_depth": _use(
        f"requests in flight per thread, 1 to {MAX_IO_DEPTH}; {AioConfig.queue_depth} when absent; "
        f"aiofiles: of all, at most {MAX_AIOFILES_THREADS}"
    ),
    "intra_op_parallelism": _use(
        f"threads of the file engine, 1 to {MAX_IO_THREADS}; {AioConfig.num_threads} when absent; "
        f"aiofiles takes up to {MAX_AIOFILES_THREADS} of its own"
    ),
    "thread_count": _alias("intra_op_parallelism"),
    "num_threads": _refuse(
        "DeepSpeed's tuning tool prints this key and its parser ignores it: "
        "write intra_op_parallelism (or thread_count)",
        Kind.ANY,
    ),
    "single_submit": _accept("requests are submitted in batches", _BOOL, False),
    "overlap_events": _accept("submission and completion always overlap", _BOOL),
    "use_gds": _refuse("GPUDirect Storage is not built: reads land in host memory"),
}

_ACTIVATION_CHECKPOINTING: dict[str, KeySpec] = {
    "partition_activations": _use(
        "under initialize(mpu=...) with more than one rank along tp: each of these keeps its part of the inputs of "
        "checkpointed units (offloadzero.activation_checkpoints, on any tier); elsewhere a warning says that it has no "
        f"effect; {shown(OffloadConfig.partition_activations)} when absent"
    ),
    "cpu_checkpointing": _map(
        "offloadzero.activation_checkpoints.tier, where that is absent: true is host. Without "
        '"offloadzero": {"activation_checkpoints": {}} a warning says that it has no effect: calls of '
        "deepspeed.checkpointing.checkpoint are not read here"
    ),
    "contiguous_memory_optimization": _accept(
        "activations on the device belong to torch's allocator", _BOOL, False
    ),
    "number_checkpoints": _accept(
        "the model, or offloadzero.activation_checkpoints.units, says where checkpoints are", _NUMBER
    ),
    "synchronize_checkpoint_boundary": _accept("the device is not synchronized there", _BOOL, False),
    "profile": _accept("use torch.profiler", _BOOL, False),
}

_CHECKPOINT: dict[str, KeySpec] = {
    "tag_validation": _accept(
        "rank 0 writes under its own; ranks that would load different ones load none", _TEXT
    ),
    "load_universal": _accept(
        "DeepSpeed's checkpoints are read by offloadzero convert, universal ones not", _BOOL, False
    ),
    "use_node_local_storage": _accept("checkpoints are written to save_dir", _BOOL, False),
    "checkpoint_serialization": _accept("tensors are written as safetensors", _BOOL),
    "parallel_write": _accept("one process writes, unit by unit"),
    "writer": _accept("one process writes, unit by unit"),
}

_DATA_TYPES: dict[str, KeySpec] = {
    "grad_accum_dtype": _use("fp32, bf16 or fp16; the parameter's dtype when absent"),
    "param_dtype": _use("must agree with what fp16 and bf16 say"),
    "buffer_dtype": _refuse("buffers keep their own dtype", _TEXT),
    "keep_in_fp32_modules": _accept("buffers keep their own dtype"),
}

_NO_TENSOR_PARALLELISM = "the model is not divided here"
_DIVIDED_BY_THE_SCRIPT = "the model is not divided here: divide it, and pass initialize(mpu=...)"
_TENSOR_PARALLEL: dict[str, KeySpec] = {
    "autotp_size": _refuse(f"{_DIVIDED_BY_THE_SCRIPT}; allowed 0, 1", _NUMBER, 0, 1),
    "tensor_parallel": _refuse(_DIVIDED_BY_THE_SCRIPT, Kind.ANY, {}, {"tp_size": 1}),
    "tp": _refuse(_DIVIDED_BY_THE_SCRIPT, Kind.ANY, {}, {"tp_size": 1}),
    **{
        key: _accept(_NO_TENSOR_PARALLELISM)
        for key in (
            *("dtype", "tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend"),
            *("injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host"),
            *("replace_with_kernel_inject", "kernel_inject"),
        )
    },
}

DEEPSPEED_KEYS: Mapping[str, KeyTable] = MappingProxyType(
    {
        "": _TOP,
        "optimizer": _OPTIMIZER,
        "optimizer.params": _OPTIMIZER_PARAMS,
        "scheduler": _SCHEDULER,
        "fp16": _FP16,
        "bf16": _BF16,
        "data_types": _DATA_TYPES,
        "tensor_parallel": _TENSOR_PARALLEL,
        "zero_optimization": _ZERO,
        "zero_optimization.leaf_module": _declared(LeafModuleConfig),
        "zero_optimization.offload_param": _OFFLOAD_PARAM,
        "zero_optimization.offload_optimizer": _OFFLOAD_OPTIMIZER,
        "aio": _AIO,
        "activation_checkpointing": _ACTIVATION_CHECKPOINTING,
        "checkpoint": _CHECKPOINT,
    }
)

_SEGMENTS: dict[str, KeySpec] = {
    "param": _use("home of the parameters: device, host or nvme"),
    "master": _use("home of the master weights' remainder"),
    "states": _use("home of all that the optimizer keeps, the master among it; a segment's own name wins"),
    "exp_avg": _use("home of the first moment (Adam, Lion)"),
    "exp_avg_sq": _use("home of the second moment (Adam)"),
    "sum": _use("home of the sum of squared gradients (Adagrad)"),
    "momentum_buffer": _use("home of the momentum (SGD, Muon)"),
    "scales": _use("home of the scales of state_layout compact; that of exp_avg when absent"),
    "grad": _use("home of the gradients between backward and update; the planner decides when absent"),
}


OWN_KEYS: Mapping[str, KeyTable] = MappingProxyType(
    {
        "offloadzero": _declared(OffloadConfig),
        "offloadzero.budgets": _declared(BudgetConfig),
        "offloadzero.placement": _SEGMENTS,
        "offloadzero.placement[]": {**_declared(PlacementRule), **_SEGMENTS},
        "offloadzero.units": _declared(UnitConfig),
        "offloadzero.activation_checkpoints": _declared(ActivationConfig),
        "offloadzero.update": _declared(UpdateConfig),
        "offloadzero.aio": _declared(AioConfig),
        "offloadzero.observe": _declared(ObserveConfig),
    }
)
