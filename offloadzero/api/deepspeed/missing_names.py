"""Names of DeepSpeed that scripts may look for and that are missing here, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from offloadzero.errors import nearest

_NOT_BUILT = "not built"
_PIPELINE = "pipeline parallelism is not built: call engine(...), backward(loss) and step()"
_TIERS = "states stay in the tiers that the config names until close()"
_LOGGING = 'logging is Python\'s: logging.getLogger("offloadzero")'
_REPORT = "last_step_report() gives the seconds of a step"

# Names of the package: `offloadzero.<name>`.
PACKAGE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "DeepSpeedConfig": "load_config() reads the JSON",
        "DeepSpeedConfigError": "ConfigError says what is wrong in a configuration",
        "DeepSpeedHybridEngine": _NOT_BUILT,
        "DeepSpeedOptimizer": "OffloadedOptimizer is the class of engine.optimizer",
        "DeepSpeedTransformerConfig": _NOT_BUILT,
        "DeepSpeedTransformerLayer": _NOT_BUILT,
        "HfDeepSpeedConfig": "load the model in `with offloadzero.zero.Init(config_dict_or_path=...)`",
        "InferenceEngine": "initialize() without an optimizer gives an engine that evaluates",
        "OnDevice": "zero.Init builds a model that does not fit in memory",
        "PipelineEngine": "pipeline parallelism is not built",
        "PipelineModule": "pipeline parallelism is not built",
        "accelerator": "torch.accelerator says what there is; engine.device is where the computation runs",
        "checkpointing": '"offloadzero": {"activation_checkpoints": {}} in the config, or torch.utils.checkpoint',
        "comm": "torch.distributed has the same functions; init_distributed() is here",
        "get_accelerator": "torch.accelerator says what there is; engine.device is where the computation runs",
        "init_inference": "initialize() without an optimizer gives an engine that evaluates",
        "log_dist": _LOGGING,
        "logger": _LOGGING,
        "module_inject": "divide the model yourself, and pass initialize(mpu=...)",
        "moe": "expert parallelism is not built",
        "pipe": "pipeline parallelism is not built",
        "tp_model_init": "divide the model yourself, and pass initialize(mpu=...)",
        "utils": "offloadzero.zero has safe_get, safe_set and set_z3_leaf_modules, logging is Python's, and "
        "itertools.chain.from_iterable(itertools.repeat(loader)) repeats as RepeatingLoader does",
        "version": "__version__ is here",
    }
)

# Names of the engine.
ENGINE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "basic_optimizer": "optimizer.param_groups are the groups of the optimizer that was given",
        "checkpoint_engine": "save_checkpoint() and load_checkpoint() are the whole of it",
        "client_lr_scheduler": "lr_scheduler is the one that was given",
        "client_optimizer": "optimizer.param_groups are the groups of the optimizer that was given",
        "compression_scheduler": _NOT_BUILT,
        "curriculum_scheduler_legacy": _NOT_BUILT,
        "eigenvalue": _NOT_BUILT,
        "eval_batch": _PIPELINE,
        "flops_profiler": _REPORT,
        "monitor": '"offloadzero": {"observe": {"run_dir": ...}} records every step',
        "offload_states": _TIERS,
        "progressive_layer_drop": _NOT_BUILT,
        "quantizer": _NOT_BUILT,
        "random_ltd_scheduler": _NOT_BUILT,
        "register_compile_pass": "compile() is torch's",
        "reload_states": _TIERS,
        "set_custom_curriculum_learning_schedule": _NOT_BUILT,
        "set_data_post_process_func": "give initialize() a collate_fn",
        "set_dataiterator": _PIPELINE,
        "set_dataloader": _PIPELINE,
        "set_lr": 'set group["lr"] in optimizer.param_groups',
        "timers": _REPORT,
        "tput_timer": _REPORT,
        "train_batch": _PIPELINE,
    }
)


def no_attribute(
    owner: str, name: str, *, known: Iterable[str], reasons: Mapping[str, str], note: str = ""
) -> AttributeError:
    """An AttributeError that names the owner, and what to do instead or the nearest known name."""
    text = f"{owner} has no attribute {name!r}{note}"
    if name in reasons:
        text += f": {reasons[name]}"
    elif near := nearest(name, known, cutoff=0.6):
        text += f" (did you mean {near[0]!r}?)"
    return AttributeError(text, name=name)
