"""`initialize()`: an engine from DeepSpeed's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from offloadzero.access.dtensors import LocalParameters
from offloadzero.api.arguments import Collate, config_source, make_loader, size_of_micro_batch
from offloadzero.api.deepspeed.schedule_by_name import build_lr_scheduler, unresolved_keys
from offloadzero.api.engine import Engine
from offloadzero.api.optimizer import ConfigSource, OffloadedOptimizer
from offloadzero.api.optimizer_checks import check_optimizers, groups_of
from offloadzero.config import OffloadConfig, load_config, settle_for_initialize, with_unused_blocks
from offloadzero.config.schema import MeshConfig
from offloadzero.core import launch
from offloadzero.engine.join import config_of_rank, join_group, telling_others
from offloadzero.engine.runtime import Runtime
from offloadzero.errors import ConfigError
from offloadzero.update.specs import spec_of_type
from offloadzero.update.specs.adam import ADAM

OptimizerSource = (
    torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[Any], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
    | None
)
SchedulerSource = Any  # a torch scheduler, or a callable that makes one from the optimizer


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerSource = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerSource = None,
    distributed_port: int = launch.DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Collate | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
) -> tuple[Engine, OffloadedOptimizer | None, DataLoader[Any] | None, Any]:
    """Make a training engine of `model` from a configuration in DeepSpeed's form, with DeepSpeed's arguments.

    Args:
        args: an object whose `deepspeed_config` names the JSON, if `config` is None.
        model: the model, built as usual or under `zero.Init`.
        optimizer: Adam, AdamW, Adagrad, SGD or Muon of torch.optim, one of offloadzero.optim, a list of a Muon and an
            AdamW, or a callable that makes one from the parameters. None takes the one that the configuration names; if
            it names none, the engine only evaluates.
        model_parameters: parameters or param groups for the configuration's optimizer; None takes all trainable ones.
        training_data: a dataset for the returned DataLoader of micro batches, shuffled as in DeepSpeed.
        lr_scheduler: a scheduler, or a callable that makes one from the optimizer; None takes the configuration's.
        distributed_port: not used: the launcher sets MASTER_PORT.
        mpu: for ranks that have different parts of the model: a DeviceMesh with the axis dp, and tp and pp if the model
            is divided along them; or an object with Megatron's get_data_parallel_group(),
            get_tensor_model_parallel_rank() and, for pipelines, get_pipeline_model_parallel_rank().
        dist_init_required: True makes torch's process group even without a launcher.
        collate_fn: of the returned DataLoader.
        mesh_param: refused unless None.
        config: a dict, a path, or an OffloadConfig.
        config_params: another name for `config`; two that differ are refused.

    Returns:
        (engine, optimizer or None, dataloader or None, lr_scheduler or None).

    Raises:
        ConfigError: a mistake in the configuration or in an argument, or a model that the engine cannot train exactly.
        BudgetError: something does not fit.
        StateError: the model is offloaded already, or its engine was closed and its weights went with it.
        AioError: a file for what lives on nvme cannot be made.
    """
    rank, world_size = join_group(model)
    with telling_others():
        if mesh_param is not None:
            raise ConfigError("mesh_param", mesh_param, "None: sequence parallelism is not built")
        mesh = _find_mesh(mpu)
        rank_of_data, num_of_data = _place_in_data(mesh, rank, world_size)
        source = load_config(config_source(args, config, config_params), world_size=num_of_data)
        settings = config_of_rank(source, rank, num_of_data, mesh)
        if dist_init_required:
            launch.init_distributed(distributed_port=distributed_port, dist_init_required=True)
        return _make_engine(
            settings,
            rank_of_data,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
        )


def _find_mesh(mpu: Any) -> MeshConfig | None:
    """This rank's place beside others that have another part of the model; None where there are none."""
    if mpu is None:
        return None
    from offloadzero.ranks.mesh import find_mesh  # imported here, as it loads torch.distributed

    return find_mesh(mpu)


def _place_in_data(mesh: MeshConfig | None, rank: int, world_size: int) -> tuple[int, int]:
    """This rank's place along the data-parallel axis, and the number of ranks there."""
    if mesh is None:
        return rank, world_size
    return mesh.data_ranks.index(rank), len(mesh.data_ranks)


def _make_engine(
    settings: OffloadConfig,
    rank_of_data: int,
    *,
    model: nn.Module | None,
    optimizer: OptimizerSource,
    model_parameters: Any,
    training_data: Dataset[Any] | None,
    lr_scheduler: SchedulerSource,
    collate_fn: Collate | None,
) -> tuple[Engine, OffloadedOptimizer | None, DataLoader[Any] | None, Any]:
    """Make the four things that `initialize()` returns."""
    if model is None:
        raise ConfigError("model", None, "pass an nn.Module")
    if not any(True for _ in model.parameters()):
        raise ConfigError("model", type(model).__name__, "a module with parameters: this one has none")
    if isinstance(model_parameters, Iterator):
        model_parameters = list(model_parameters)
    settings = _settled(settings, optimizer, model_parameters, lr_scheduler)
    loader = None
    if training_data is not None:
        loader = make_loader(
            training_data,
            size_of_micro_batch(settings.batch),
            collate_fn=collate_fn,
            rank=rank_of_data,
            world_size=settings.world_size,
        )
    schedulers: list[Any] = []

    def make_scheduler(optimizer: OffloadedOptimizer) -> None:
        schedulers.append(_make_scheduler(lr_scheduler, settings, optimizer))

    local = LocalParameters(
        model, range(settings.world_size) if settings.mesh is None else settings.mesh.data_ranks
    )
    try:
        for made in _made(optimizer):
            local.exchange(made.param_groups)
        if model_parameters is not None:
            model_parameters = local.exchange(model_parameters)
        # The scheduler comes first: an error in it must not cost the model its weights.
        offloaded = _make_optimizer(
            model, optimizer, model_parameters, settings, before_take_over=make_scheduler
        )
        if offloaded is None:
            if lr_scheduler is not None:
                raise ConfigError("lr_scheduler", type(lr_scheduler).__name__, "None: there is no optimizer")
            # Without states of an optimizer there is nothing to lay out compactly.
            evaluation = replace(settings, state_layout="fp32")
            runtime = Runtime(model, evaluation, spec=ADAM, param_groups=(), current_hypers=tuple)
        else:
            runtime = offloaded.runtime
        scheduler = schedulers[0] if schedulers else None
        try:  # at once: nothing else holds the runtime yet, and an interrupt may come with any call
            engine = Engine(runtime, offloaded, scheduler, loader)
        except BaseException:
            runtime.undo()
            raise
        runtime.on_restore.append(local.remove)
        return engine, offloaded, loader, scheduler
    except BaseException:
        local.remove()
        raise


def _unresolved(
    settings: OffloadConfig, optimizer: OptimizerSource, model_parameters: Any, lr_scheduler: SchedulerSource
) -> dict[str, str]:
    """The keys of optimizer and schedule whose "auto" is not taken, with what may be given in their place."""
    found: dict[str, str] = {}
    block, schedule = settings.optimizer, settings.scheduler
    groups = model_parameters if isinstance(model_parameters, list | tuple) else ()
    have_rates = bool(groups) and all(isinstance(group, dict) and "lr" in group for group in groups)
    if optimizer is None and block is not None and block.params["lr"] is None and not have_rates:
        found["optimizer.params.lr"] = "; or pass an optimizer"
    if lr_scheduler is None and schedule is not None:
        found |= dict.fromkeys(unresolved_keys(schedule), "")
    return found


def _settled(
    settings: OffloadConfig, optimizer: OptimizerSource, model_parameters: Any, lr_scheduler: SchedulerSource
) -> OffloadConfig:
    if optimizer is None and settings.optimizer is None:
        settings = with_unused_blocks(settings, scheduler="there is no optimizer")
    else:
        settings = with_unused_blocks(
            settle_for_initialize(
                settings, unresolved=_unresolved(settings, optimizer, model_parameters, lr_scheduler)
            ),
            optimizer=None if optimizer is None else "initialize() is given an optimizer",
            scheduler=None if lr_scheduler is None else "initialize() is given a scheduler",
        )
    for warning in settings.warnings:
        warnings.warn(warning, stacklevel=4)
    return settings


def _make_optimizer(
    model: nn.Module,
    optimizer: OptimizerSource,
    model_parameters: Any,
    config: OffloadConfig,
    *,
    before_take_over: Callable[[OffloadedOptimizer], None],
) -> OffloadedOptimizer | None:
    trainable = [param for param in model.parameters() if param.requires_grad]
    is_of_all = model_parameters is None and not _made(optimizer)
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer | Sequence):
            optimizer = optimizer(model_parameters if model_parameters is not None else trainable)
        origins = check_optimizers(optimizer, config)
        return OffloadedOptimizer(
            model,
            groups_of(origins),
            config,
            origins=origins,
            before_take_over=before_take_over,
            is_of_all_trainable=is_of_all,
        )
    if config.optimizer is None:
        return None
    defaults = config.optimizer.params
    given: list[Any] = list(model_parameters) if model_parameters is not None else list(trainable)
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    names = {id(param): name for name, param in model.named_parameters()}
    groups = spec_of_type(config.optimizer.type).config_groups(groups, defaults, names)
    return OffloadedOptimizer(
        model, groups, config, before_take_over=before_take_over, is_of_all_trainable=is_of_all
    )


def _made(optimizer: OptimizerSource) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that a script has made."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return (optimizer,)
    return optimizer if isinstance(optimizer, Sequence) else ()


def _make_scheduler(source: SchedulerSource, config: OffloadConfig, optimizer: OffloadedOptimizer) -> Any:
    if source is None:
        return build_lr_scheduler(config.scheduler, optimizer) if config.scheduler is not None else None
    if not isinstance(source, torch.optim.lr_scheduler.LRScheduler) and callable(source):
        source = source(optimizer)
    if not callable(getattr(source, "step", None)):
        allowed = "a scheduler, or a callable that takes the optimizer and returns one: this has no step()"
        raise ConfigError("lr_scheduler", type(source).__name__, allowed)
    steered = getattr(getattr(source, "optimizer", None), "param_groups", optimizer.param_groups)
    if steered is not optimizer.param_groups:
        message = "it sets the rates of another optimizer: make it on the one that initialize() is given"
        raise ConfigError("lr_scheduler", type(source).__name__, f"{message}, or give a callable")
    return source
