"""The PyTorch-native form: `model, optimizer = offload(model, optimizer, config)`."""

from __future__ import annotations

import functools
import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import nn

from offloadzero.access.dtensors import expect_no_dtensors
from offloadzero.api.optimizer_checks import (
    HOOKS,
    check_optimizers,
    check_parameters,
    expect_rates,
    expect_whole_parameters,
    groups_of,
    warn_of_others,
)
from offloadzero.api.optimizer_loading import plan_optimizer_load
from offloadzero.api.optimizer_states import StateDict, States, read_states, refuse_states
from offloadzero.config import OffloadConfig, load_config, settle_for_offload
from offloadzero.core.fail_points import through
from offloadzero.core.interrupts import uninterrupted
from offloadzero.core.segments import TierName
from offloadzero.core.torch_private import add_param_group
from offloadzero.engine.join import config_of_rank, join_group, telling_others
from offloadzero.engine.runtime import Runtime
from offloadzero.errors import ConfigError, StateError
from offloadzero.observe.bound import StepReport
from offloadzero.observe.texts import format_bytes
from offloadzero.planning.update_rules import with_kept_gradients
from offloadzero.step.accumulation import ScaledLosses
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record
from offloadzero.update.spec import AnySpec, Hyper
from offloadzero.update.specs import spec_of, spec_of_type

log = logging.getLogger("offloadzero")

ACCELERATE_MARK = "_is_accelerate_prepared"  # what its prepare() leaves as it is

ConfigSource = Mapping[str, Any] | str | Path | OffloadConfig
Model = TypeVar("Model", bound=nn.Module)


def offload(
    model: Model,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: ConfigSource,
) -> tuple[Model, OffloadedOptimizer]:
    """Move the states of `model` and `optimizer` to the tiers that `config` says.

    The model stays the same nn.Module, and the loop stays `loss.backward(); optimizer.step(); optimizer.zero_grad()`.
    Gradients are torch's: they add up until they are dropped, and `param.grad` can be read, clipped, edited and
    assigned. `update.in_backward: true` in the configuration gives that up to save memory and time.

    Under torchrun all ranks call this. Gradients are then averaged over the ranks; do not wrap the model in
    DistributedDataParallel.

    Args:
        model: built as usual, or under `zero.Init`.
        optimizer: a new optimizer of the model's parameters; or a list of a torch.optim.Muon for the matrices and an
            AdamW for the rest.
        config: a dict, the path of a JSON file, or an OffloadConfig.

    Returns:
        The model, and the optimizer to use from now on. Its param_groups are those of `optimizer`, so that schedulers
        made on either work.

    Raises:
        ConfigError: an optimizer of a class that is not built, one that has stepped already, or one whose parameters
            are not the model's.
        BudgetError: something does not fit.
        StateError: the model is offloaded already, or its engine was closed and its weights went with it.
        AioError: a file for what lives on nvme cannot be made.
    """
    rank, world_size = join_group(model)
    with telling_others():
        settings = config_of_rank(load_config(config, world_size=world_size), rank, world_size)
        return model, _offload(model, optimizer, settle_for_offload(settings))


def _offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    settings: OffloadConfig,
) -> OffloadedOptimizer:
    for warning in settings.warnings:
        warnings.warn(warning, stacklevel=3)
    if isinstance(optimizer, OffloadedOptimizer):
        raise ConfigError("optimizer", type(optimizer).__name__, "is offloaded already: pass a new optimizer")
    expect_no_dtensors(model)
    origins = check_optimizers(optimizer, settings)
    kept = with_kept_gradients(settings)
    could_update_in_backward = kept is not settings
    offloaded = OffloadedOptimizer(model, groups_of(origins), kept, origins=origins, keeps_gradients=True)
    try:
        if could_update_in_backward:
            _log_kept_gradients(offloaded.runtime.plan.kept_grad_bytes)
        offloaded.runtime.cast_gradients()
    except BaseException:  # nothing else holds the engine yet
        offloaded.runtime.undo()
        raise
    offloaded.runtime.forget_gradients()
    offloaded.runtime.on_restore.append(warn_of_others(offloaded).remove)
    if settings.world_size > 1:
        # accelerate's prepare(), and with it the Trainer of transformers, would wrap it in DistributedDataParallel.
        model.__dict__[ACCELERATE_MARK] = _Prepared()
        offloaded.runtime.on_restore.append(partial(model.__dict__.pop, ACCELERATE_MARK, None))
    return offloaded


class _Prepared:
    """True; of a copy of the model, which is an ordinary one, False."""

    def __deepcopy__(self, _: dict[int, Any]) -> bool:
        return False

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()


def _log_kept_gradients(num_bytes: int) -> None:
    if not num_bytes:
        return
    log.info(
        "gradients are kept until they are dropped, as torch keeps them: %s. "
        '"offloadzero": {"update": {"in_backward": true}} would save that and update the weights during backward; '
        "param.grad could not be used then",
        format_bytes(num_bytes),
    )


def _refuse_step(
    successor: weakref.ref[OffloadedOptimizer], origin: torch.optim.Optimizer, *_: object
) -> None:
    """Refuse `step()` of `origin`, as its pre-hook: its states and gradients are gone. `successor` shares its hooks."""
    if successor() is None or isinstance(origin, OffloadedOptimizer):
        return
    raise StateError(
        f"the states of this {type(origin).__name__} were offloaded: call step() of the optimizer that offload() or "
        "initialize() returned"
    )


def _spec_and_defaults(
    origins: Sequence[torch.optim.Optimizer], config: OffloadConfig
) -> tuple[AnySpec, dict[str, Any]]:
    """Return the optimizer's spec and defaults. Schedulers that cycle a momentum look for its name in the defaults."""
    if origins:
        return spec_of(origins[0]), origins[0].defaults if len(origins) == 1 else {}
    if config.optimizer is None:
        raise ConfigError("optimizer", None, "pass one to initialize() or name one in the config")
    spec = spec_of_type(config.optimizer.type)
    return spec, spec.config_defaults(config.optimizer.params)


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose states live in the tiers; `offload()` and `initialize()` make it.

    A script uses it as any optimizer of torch. `param.grad` stands for the gradient wherever it lives.
    """

    _state: States

    def __init__(
        self,
        model: nn.Module,
        param_groups: list[dict[str, Any]],
        config: OffloadConfig,
        *,
        origins: Sequence[torch.optim.Optimizer] = (),
        before_take_over: Callable[[OffloadedOptimizer], None] | None = None,
        keeps_gradients: bool = False,
        is_of_all_trainable: bool = False,
    ) -> None:
        """Take over the states of `model`.

        Args:
            origins: the optimizer whose groups these are, or Muon and another; without one they are the config's.
            before_take_over: called first. It may fail: the model is then as it was.
            keeps_gradients: gradients stay until they are dropped, as in torch; else the step drops them, as in
                DeepSpeed.
            is_of_all_trainable: no script has chosen the parameters: one that is frozen now has no states, and it is an
                error when it requires gradients later.

        Raises:
            ConfigError: an option that the update would not compute, a layout of the states that the optimizer lacks,
                or a parameter that is not the model's.
            BudgetError, AioError, StateError: as `offload()` says.
        """
        self.origin = origin = origins[0] if origins else None
        self.spec, defaults = _spec_and_defaults(origins, config)
        self.spec.expect_layout(config.state_layout)
        expect_whole_parameters(self.spec, config)
        expect_rates(param_groups)
        self._state_layout = config.state_layout
        self.spec.hypers(
            param_groups, "optimizer", state_layout=config.state_layout
        )  # raises now what the first step would refuse
        check_parameters(model, param_groups)
        super().__init__(param_groups, dict(defaults))
        self.param_groups = param_groups  # the caller's own dicts: schedulers made on them stay connected
        self._members = GroupMembers(param_groups)
        self._group_specs = [self.spec.of_group(group) for group in param_groups]
        self._origins = origins
        for name in HOOKS if origin is not None else ():
            setattr(
                self, name, getattr(origin, name)
            )  # the same dicts: handles that scripts hold remove from both
        self._scaled = ScaledLosses() if config.precision.param_dtype == "fp16" else None
        self.has_stepped = False  # counts steps of this process only
        if before_take_over is not None:
            before_take_over(self)
        self.runtime = Runtime(
            model,
            config,
            spec=self.spec,
            param_groups=param_groups,
            current_hypers=self._current_hypers,
            before_backward=self._scaled.expect_backward if self._scaled is not None else None,
            keeps_after_step=keeps_gradients,
            is_of_all_trainable=is_of_all_trainable,
        )
        try:
            for each in origins:
                each.register_step_pre_hook(functools.partial(_refuse_step, weakref.ref(self)))
        except BaseException:  # nothing else holds the engine yet
            self.runtime.undo()
            raise
        for each in origins:
            each.state.clear()  # some make states before the first step: here the tiers hold them

    @property  # type: ignore[override]
    def state(self) -> States:
        """The states by parameter: items are read from the tiers, and written there. Another is refused: StateError."""
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore the dict that torch's constructor sets. Raises StateError for any other assignment."""
        if hasattr(self, "_state"):
            if value is not self._state:
                refuse_states()
            return
        self._state = States(self._states_of)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: a copy would have neither states nor gradients."""
        raise StateError(
            "an offloaded optimizer cannot be copied or pickled: its states live in their tiers, and gradients reach "
            "this one only. optimizer.state_dict() is what load_state_dict() takes, here or in torch"
        )

    def _current_hypers(self) -> list[Hyper]:
        self._members.expect_unchanged(self.param_groups, self._name_of)
        self._expect_same_specs(self.param_groups, "optimizer")
        return self.spec.hypers(self.param_groups, "optimizer", state_layout=self._state_layout)

    def _expect_same_specs(self, groups: Sequence[Mapping[str, Any]], owner: str) -> None:
        """Raise StateError where a group is another member's of the optimizer than when the model was offloaded."""
        for index, (group, before) in enumerate(zip(groups, self._group_specs, strict=True)):
            if self.spec.of_group(group) is not before:
                raise StateError(
                    f"{owner}.param_groups[{index}] was {before.name}'s when the model was offloaded, and is "
                    f"{self.spec.of_group(group).name}'s now: its parameters have the states of {before.name}"
                )

    def _name_of(self, param_id: int) -> str | None:
        place = self.runtime.slots.get(param_id)
        return None if place is None else place[1].name

    # --- the loop ---

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss for fp16: `optimizer.scale(loss).backward()`, as torch.amp.GradScaler does; else return it."""
        factor = self.runtime.coordinator.loss_scale
        scaled = loss if factor == 1.0 else loss * factor
        if self._scaled is not None:
            self._scaled.add(scaled)
        return scaled

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients. Returns before the update is done; the next forward of a unit waits for the unit's.

        Raises:
            NonFiniteError, AioError: the update of this step, or of an earlier one, failed. If that is known later, the
                next call raises it.
            StateError: the engine is closed, a backward did not finish, a parameter that was frozen is to be trained,
                the param groups hold other parameters, or options or gradients have changed since a backward that has
                updated the weights.
            ConfigError: an option of a param group that the update would not compute.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply()
        return loss

    @uninterrupted
    def _apply(self) -> None:
        self._expect_offloaded()
        durable = self.runtime.durable
        if durable is not None and not durable.is_committing:
            raise StateError("a durable run takes its steps by engine.step(), which commits them")
        through("step.step", self.runtime.coordinator.step)()
        if self._scaled is not None:
            self._scaled.end_step()
        self.has_stepped = True
        for origin in self._origins:
            # A torch scheduler that was made on `origin` asks it whether a step came before the scheduler's own.
            origin._opt_called = True  # type: ignore[attr-defined]

    def _expect_offloaded(self) -> None:
        """Raise StateError where another parameter has taken the place of an offloaded one, and has the gradient."""
        slots = self.runtime.slots
        new = [
            name
            for name, param in self.runtime.model.named_parameters()
            if id(param) not in slots and param.grad is not None
        ]
        replaced = new and [name for name in new if any(slot.name == name for _, slot in slots.values())]
        if replaced:
            raise StateError(
                f"{', '.join(replaced[:5])} ({len(replaced)} in all): replaced by another parameter after offload(), "
                "for example by PEFT's load_adapter() when the Trainer resumes, and this optimizer does not train the "
                "new one: load values into the parameters that are there, or use the Trainer of "
                "offloadzero.integrations.transformers"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or with `set_to_none=False` make them zero, also after a backward that failed.

        After a NonFiniteError of which nothing was applied this lets training go on: that step counts as skipped.

        Raises:
            StateError: a backward has already updated weights (updates run in backward), so `step()` has to come first.
            NonFiniteError: the last step failed, and no call has raised its error yet.
        """
        self.runtime.coordinator.discard_gradients(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being made; StateError afterwards, as the units are laid out once."""
        if hasattr(self, "runtime"):
            raise StateError("add_param_group() after offload(): add the group to the optimizer before")
        add_param_group(self, param_group)

    # --- what happened ---

    def grad_norm(self) -> float:
        """Global gradient norm of the last step before clipping; waits until it is known."""
        return self.runtime.coordinator.grad_norm()

    def was_step_applied(self) -> bool:
        """False when the last step was skipped for a non-finite gradient; waits until it is known."""
        return self.runtime.coordinator.was_applied()

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped for a gradient that is not finite; waits until it is known.

        (DeepSpeed's name for it.)
        """
        return not math.isfinite(self.grad_norm())

    @property
    def loss_scale(self) -> float:
        """The present loss scale (1.0 without fp16)."""
        return self.runtime.coordinator.loss_scale

    cur_scale = loss_scale  # DeepSpeed's other name for it

    def memory_table(self) -> str:
        """Bytes per tier, the files on NVMe and the file engine in use."""
        return self.runtime.memory_table()

    def reserved_bytes(self) -> dict[str, int]:
        """Bytes reserved in each tier: "device", "host", "nvme"."""
        return {tier.value: self.runtime.reserved_bytes(tier) for tier in TierName}

    def last_step_report(self) -> StepReport:
        """Seconds of the last step and what the computation lost in which wait, as `Engine.last_step_report()`."""
        return self.runtime.clock.last

    def synchronize(self) -> None:
        """Block until all updates are home; raises what failed."""
        self.runtime.synchronize()

    def close(self) -> None:
        """Finish the updates, stop the threads, remove the files. Raises the first failure."""
        self.runtime.close()

    def restore_model(self) -> None:
        """Make the model an ordinary one again, with its weights as they are now; the optimizer is closed.

        Raises StateError where it is closed already, in a block of GatheredParameters, and in the model's forward.
        """
        self.runtime.restore_model()

    # --- state dict ---

    def _numbered(self) -> Iterable[tuple[int, Record, ParamSlot]]:
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) in self.runtime.slots:
                    record, slot = self.runtime.slots[id(param)]
                    if slot.trainable:
                        yield number, record, slot
                number += 1

    def _states_of(self, param: torch.Tensor) -> dict[str, torch.Tensor] | None:
        place = self.runtime.slots.get(id(param))
        if place is None:
            raise KeyError("optimizer.state[...]: no parameter of the model that was offloaded")
        return read_states(self.runtime.weights, *place) if place[1].trainable else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch's optimizer, and in 16 bits the fp32 master weights.

        Its tensors take no memory: each is read when it is used. A change of one in place changes the state, as in
        torch. The compact layout adds its codes and scales, so that loading continues with the same bits. Raises
        StateError if the engine is closed.
        """
        caller = sys._getframe(1)
        if (caller.f_globals.get("__name__"), caller.f_code.co_name) == ("accelerate.optimizer", "__init__"):
            return _Unmoved()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        weights = self.runtime.weights
        state: dict[int, Any] = {}
        for number, record, slot in self._numbered():
            state[number] = read_states(weights, record, slot)
            if record.spec.begins_without and not weights.homes.read_step(record, slot):
                for kind in record.spec.states:
                    del state[number][kind]
        groups: list[dict[str, Any]] = []
        first = 0
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            count = len(group["params"])
            groups.append({**options, "params": list(range(first, first + count))})
            first += count
        state_dict: dict[str, Any] = StateDict(state=state, param_groups=groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dict of `state_dict()`, which sets the weights too in 16 bits, or one of torch's optimizer.

        A parameter without a state in the dict begins anew, as in torch. The compact layout takes the dict's codes if
        they belong to its moments, and otherwise rounds the fp32 moments. The fp32 layout ignores codes.

        Raises:
            ConfigError: something does not fit, or an option is refused; nothing has changed then.
            StateError: the engine is closed, or a group would be another optimizer's: `use_muon`.
        """
        if isinstance(state_dict, _Unmoved):
            return
        state_dict = dict(
            state_dict
        )  # a hook may assign items; a StateDict's own copy() would copy all tensors
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        load = plan_optimizer_load(
            state_dict,
            self.param_groups,
            self._numbered(),
            spec=self.spec,
            state_layout=self._state_layout,
            fixed_options=self.spec.fixed_options(self.origin),
        )
        options = zip(self.param_groups, load.options, strict=True)
        self._expect_same_specs([{**group, **new} for group, new in options], "state_dict")
        load.apply(self.runtime.weights, self.param_groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


class _Unmoved(dict[str, Any]):
    """What accelerate gets to move all states to the device, in which there may be no room, and gives back: none."""


# --- the groups that the optimizer had ---


class GroupMembers:
    """The parameters that each group had when the model was offloaded.

    A unit keeps the number of each parameter's group, so a group that takes, loses or trades parameters, or another
    order of the groups, would train with options that the script does not see there.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._ids = [_ids_of(group) for group in param_groups]

    def expect_unchanged(
        self, param_groups: Sequence[Mapping[str, Any]], name_of: Callable[[int], str | None]
    ) -> None:
        """Raise StateError unless each group holds its own parameters, in any order.

        Args:
            name_of: the name of a parameter of the model by its id.
        """
        if len(param_groups) != len(self._ids):
            raise StateError(
                f"optimizer.param_groups: {len(param_groups)} groups, where there were {len(self._ids)} when the model "
                f"was offloaded: {_REMEDY}"
            )
        for index, (group, ids) in enumerate(zip(param_groups, self._ids, strict=True)):
            present = _ids_of(group)
            if present != ids and set(present) != set(ids):
                raise StateError(
                    f"optimizer.param_groups[{index}]: {_difference(group, ids, name_of)}: {_REMEDY}"
                )


_REMEDY = (
    "groups keep their parameters and their order. requires_grad_(False) ends the training of a parameter; for other "
    "groups call restore_model(), then offload() with an optimizer that has them"
)


def _ids_of(group: Mapping[str, Any]) -> list[int]:
    return list(map(id, group["params"]))


def _difference(group: Mapping[str, Any], ids: Sequence[int], name_of: Callable[[int], str | None]) -> str:
    params: list[torch.Tensor] = list(group["params"])
    before, present = set(ids), set(map(id, params))
    gone = next((one for one in ids if one not in present), None)
    if gone is not None:
        return f"{name_of(gone)} was in it when the model was offloaded and is not now"
    added = next(param for param in params if id(param) not in before)
    name = name_of(id(added)) or f"a parameter of shape {tuple(added.shape)}"
    return f"{name} was not in it when the model was offloaded and is now"
