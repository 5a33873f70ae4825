"""`Init`, `GatheredParameters` and the full-state accessors, with DeepSpeed's names."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from offloadzero.access.gathered import GatheredBlock
from offloadzero.api.deepspeed.z3_leaf_modules import get_z3_leaf_modules as get_z3_leaf_modules
from offloadzero.api.deepspeed.z3_leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
from offloadzero.api.deepspeed.z3_leaf_modules import unset_z3_leaf_modules as unset_z3_leaf_modules
from offloadzero.api.deepspeed.z3_leaf_modules import z3_leaf_module as z3_leaf_module
from offloadzero.api.deepspeed.z3_leaf_modules import z3_leaf_parameter as z3_leaf_parameter
from offloadzero.api.optimizer import ConfigSource
from offloadzero.config import OffloadConfig, create_nvme_directories, load_config
from offloadzero.core import launch
from offloadzero.core.interrupts import uninterrupted_throughout
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.engine.join import telling_others
from offloadzero.engine.runtime import Runtime, runtime_of
from offloadzero.errors import ConfigError, OffloadError, StateError
from offloadzero.memory.pages import FreedMemory
from offloadzero.planning.memory_plan import waits_on_nvme
from offloadzero.ranks.shard import divides_params
from offloadzero.streaming.building.waiting_parameters import (
    MOVES_MISSING,
    SpilledWeight,
    all_subclasses,
    can_spill,
    is_in_parts,
    releasing_in_order,
    releasing_loaded,
    restore,
    spill,
    spilled_weight,
)
from offloadzero.update.flat_layout import ParamSlot
from offloadzero.update.records import Record

if TYPE_CHECKING:  # imported late, as they load torch.distributed
    from offloadzero.ranks.init_parts import BuildingRanks
    from offloadzero.streaming.building.waiting_in_parts import LentParameters

# Smaller parameters stay in memory until the model is offloaded: a file each would cost more than it saves.
MIN_SPILL_ELEMENTS = 4096


class Init:
    """Build a model whose parameters leave memory as soon as their module exists.

    In `with Init(config_dict_or_path=config): model = Model(...)` a module's large parameters move to their tier when
    its constructor returns, with all their bits. So a model larger than host memory can be built, with parameters on
    NVMe. `module.apply(fn)` brings each module's parameters back for the call. `initialize()` or `offload()` then takes
    the model over, one unit at a time.

    Over several ranks, at stage 3, each rank keeps a part of every parameter, and no rank holds the model. The values
    are those of the first rank. All ranks build the same modules, and until the engine has the model they read and
    write the same parameters in the same order. If one rank fails, the others end with a RankError, and the parameters
    that were built are gone.

    An `Init` inside of another does nothing, as in DeepSpeed: the outermost one says where parameters go.

    Args:
        module: a module that exists already. Its parameters are moved at once, and no block is needed.
        data_parallel_group: the ranks that build the same part of the model, in a mesh. All ranks of the process group
            enter the block together.
        remote_device: "nvme" or "cpu"; None takes the tier that the configuration says.
        config_dict_or_path: the configuration of the training; `config` is another name for it.
        enabled: False makes a block that does nothing.
        dtype: rounds parameters to it, as DeepSpeed does; None keeps them as they are.

    Raises:
        ConfigError: a mistake in the configuration, parameters for nvme without a directory, or a
            `data_parallel_group` that is no process group or leaves ranks out.
    """

    _active: ClassVar[Init | None] = None

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,  # noqa: ARG002 (DeepSpeed's signature)
        remote_device: str | None = None,
        pin_memory: bool = False,  # noqa: ARG002
        config_dict_or_path: ConfigSource | None = None,
        config: ConfigSource | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._group = data_parallel_group
        self._enabled = enabled
        num_ranks = self._num_ranks(asks=source is not None or enabled)
        # The others may wait for this rank in their blocks. Inside of another block that one tells them.
        with telling_others() if enabled and Init._active is None else nullcontext():
            self._settings = OffloadConfig() if source is None else load_config(source, world_size=num_ranks)
            self._directories = self._spill_directories(remote_device)
        # Without a configuration it is for ZeRO's stage 3, as in DeepSpeed.
        self._divides = num_ranks > 1 and (source is None or divides_params(self._settings.zero_stage))
        self._ranks: BuildingRanks | None = None
        self._dtype = dtype  # None: a parameter keeps all its bits until the engine takes it over
        self._freed = FreedMemory()
        self._originals: list[tuple[type[nn.Module], str, Callable[..., Any]]] = []
        if module is not None and enabled:
            self._join()
            with self._telling_others():
                self._release_all(module)
            self._ranks = None

    def _num_ranks(self, *, asks: bool) -> int:
        """The number of ranks that build the same; torch's process group is made where one is asked for."""
        if self._group is not None:
            return _size_of(self._group)
        return launch.join_group()[1] if asks else 1

    def _spill_directories(self, remote_device: str | None) -> Counter[Path]:
        """The directories for spilled parameters, with the bytes in each; none when parameters wait in memory."""
        is_named = remote_device == TierName.NVME.value
        if not (is_named or (remote_device is None and waits_on_nvme(self._settings))):
            return Counter()
        if not self._settings.nvme_paths:
            raise ConfigError("nvme_path", None, "parameters are to wait on nvme: name a directory")
        create_nvme_directories(self._settings.nvme_paths)
        return Counter(dict.fromkeys(self._settings.nvme_paths, 0))

    def _next_directory(self, num_bytes: int) -> Path | None:
        """Choose the directory with the fewest bytes, so that all drives take their share, as they do of the homes."""
        if not self._directories:
            return None
        directory = min(self._directories, key=self._directories.__getitem__)
        self._directories[directory] += num_bytes
        return directory

    def __enter__(self) -> Init:
        if not self._enabled or Init._active is not None:
            return self
        self._join()
        Init._active = self
        try:
            for cls in all_subclasses(nn.Module):
                self._wrap(cls)
            setattr(nn.Module, "__init_subclass__", classmethod(_wrap_new_subclass))  # noqa: B010
            self._replace(nn.Module, "apply", _gathering_apply(nn.Module.apply))
            self._replace(nn.Module, "register_parameter", releasing_loaded(self._release))
        except BaseException as failure:  # without an entry there would be no exit
            self._unwrap_all()
            if self._ranks is not None:
                self._ranks.report(failure)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if Init._active is not self:
            return
        self._unwrap_all()
        self._freed.trim()
        ranks, self._ranks = self._ranks, None
        if ranks is not None and error is not None:
            ranks.report(error)
        elif ranks is not None:
            ranks.announce("end the block")

    def _join(self) -> None:
        """Join the ranks that build the model with this one, if it is to be divided."""
        if not self._divides:
            return
        import torch.distributed as dist

        from offloadzero.ranks.init_parts import BuildingRanks  # late, as torch.distributed

        members = None if self._group is None else sorted(dist.get_process_group_ranks(self._group))
        with telling_others():
            self._ranks = BuildingRanks(members)

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Announce the end of the block, or tell the ranks that wait for this one of its error."""
        try:
            yield
            if self._ranks is not None:
                self._ranks.announce("end the block")
        except BaseException as error:
            if self._ranks is not None:
                self._ranks.report(error)
            raise

    def _unwrap_all(self) -> None:
        for cls, name, original in self._originals:
            setattr(cls, name, original)
        self._originals = []
        if "__init_subclass__" in nn.Module.__dict__:
            del nn.Module.__init_subclass__  # object's own method shows again
        Init._active = None

    def _wrap(self, cls: type[nn.Module]) -> None:
        for name in MOVES_MISSING:
            if name in cls.__dict__:
                self._replace(cls, name, releasing_in_order(cls.__dict__[name], self._release))
        original = cls.__dict__.get("__init__")
        if original is None:
            return

        @functools.wraps(original)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            # Constructors of base classes return first; only the outermost has a finished module.
            active = Init._active
            outermost: Any = type(module).__init__
            if active is not None and outermost is init:
                active._release(module)

        self._replace(cls, "__init__", init)

    def _replace(self, cls: type[nn.Module], name: str, by: Callable[..., Any]) -> None:
        self._originals.append((cls, name, cls.__dict__[name]))
        setattr(cls, name, by)

    def _release_all(self, module: nn.Module) -> None:
        """Move all parameters away, or none: when a drive is full, say, those that have left come back.

        Of several ranks each has parts of those, and cannot bring them back where another has failed.
        """
        waited = {id(param) for param in module.parameters() if spilled_weight(param)}
        try:
            for child in module.modules():
                self._release(child)
        except BaseException:
            for param in module.parameters():
                if id(param) not in waited and not is_in_parts(param):
                    restore(param)
            raise

    def _release(self, module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            if not can_spill(param):
                continue
            num_bytes = param.nbytes
            if self._dtype is not None and param.is_floating_point():
                param.data = param.data.to(self._dtype)
            name = f"{type(module).__name__}.{name}"
            is_large = param.numel() >= MIN_SPILL_ELEMENTS
            if self._ranks is not None:
                from offloadzero.streaming.building.waiting_in_parts import spill_divided

                directory = self._next_directory(param.nbytes) if is_large else None
                spill_divided(param, name=name, directory=directory, ranks=self._ranks)
            elif is_large:
                spill(param, name=name, directory=self._next_directory(param.nbytes))
            if is_large:
                self._freed.add(num_bytes)


def _size_of(group: Any) -> int:
    """The number of ranks that share the data, where others have another part of the model."""
    if not callable(getattr(group, "size", None)):
        raise ConfigError(
            "data_parallel_group", type(group).__name__, "a process group of torch.distributed, or None"
        )
    return int(group.size())


def _wrap_new_subclass(cls: type[nn.Module], /, **kwargs: Any) -> None:
    super(nn.Module, cls).__init_subclass__(**kwargs)
    if Init._active is not None:
        Init._active._wrap(cls)


def _gathering_apply(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Make the `module.apply(fn)` that brings each module's own parameters back for its call."""

    @functools.wraps(apply)
    def gathering(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        active = Init._active

        def call(child: nn.Module) -> None:
            for param in child.parameters(recurse=False):
                restore(param)
            fn(child)
            if active is not None:
                active._release(child)

        return apply(module, call)

    return gathering


@dataclass(frozen=True, eq=False)
class _Built:
    """A gathered parameter of a model that is not offloaded yet: its value at entry, and the place it came from."""

    param: nn.Parameter
    value: torch.Tensor
    origin: SpilledWeight


class GatheredParameters:
    """Ordinary whole parameters on the device, in the block `with GatheredParameters(params, modifier_rank=0): ...`.

    Works on parameters of an offloaded model, and of a model built under `Init` that is not offloaded yet. The values
    take memory on the device beside the plan, as many bytes as the parameters have. Elements that keep their value keep
    the low bits of their fp32 master.

    Over several ranks all ranks enter and leave the block, each with the whole values.

    Args:
        params: a parameter, or several.
        modifier_rank: the rank (among those that share the data) whose edits are committed on all ranks, at the end of
            the block and when a forward inside uses them. What other ranks have written is lost. None: nobody may edit.
        enabled: False makes a block that does nothing.

    Raises:
        StateError: an edit with `modifier_rank=None`; a step inside the block, after which its values are old.
        ConfigError: a `modifier_rank` that no rank has, or other than 0 for whole parameters of a model that is not
            offloaded yet; a parameter that the block has given another shape or dtype.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,  # noqa: ARG002 (DeepSpeed's signature)
        enabled: bool = True,
    ) -> None:
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        self._params = list({id(param): param for param in params}.values())
        self._modifier_rank = modifier_rank
        self._may_edit = modifier_rank is not None
        self._enabled = enabled
        self._blocks: list[GatheredBlock] = []  # one for each engine
        self._built: list[_Built] = []
        self._lent: LentParameters | None = None  # those of which each rank keeps a part

    def __enter__(self) -> None:
        if not self._enabled:
            return
        offloaded: dict[Runtime, list[tuple[Record, ParamSlot]]] = {}
        in_parts: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for param in self._params:
            runtime = runtime_of(param)
            if runtime is not None:
                offloaded.setdefault(runtime, []).append(runtime.slots[id(param)])
            else:
                (in_parts if is_in_parts(param) else others).append(param)
        try:
            if in_parts:
                self._lend(in_parts)
            for param in others:
                self._restore(param)
            # A set of parameters has another order on each rank.
            for runtime in sorted(offloaded, key=lambda each: each.number):
                block = GatheredBlock(runtime.blocks, offloaded[runtime], modifier_rank=self._modifier_rank)
                self._blocks.append(block)  # first: an interrupt may find it entered
                block.enter()
        except BaseException:  # the parameters do not fit together: none may stay behind
            self._give_up()
            raise

    @uninterrupted_throughout
    def _give_up(self) -> None:
        """Put all parameters away that are still gathered; their changes are dropped."""
        for block in reversed(self._blocks):
            block.give_up()
        self._blocks = []
        self._spill_built()
        if self._lent is not None:
            self._lent.put_back()
            self._lent = None

    def _restore(self, param: nn.Parameter) -> None:
        """Bring back a parameter of a model that is not offloaded yet, and whole on this rank."""
        if self._modifier_rank and launch.join_group()[1] > 1:
            allowed = "0 or None: the first values are those of rank 0"
            raise ConfigError("modifier_rank", self._modifier_rank, allowed)
        spilled = restore(param)
        if spilled is not None:
            self._built.append(_Built(param, param.data.clone(), spilled))

    def _lend(self, params: Iterable[nn.Parameter]) -> None:
        from offloadzero.streaming.building.waiting_in_parts import (
            LentParameters,  # imported here: it loads torch.distributed
        )

        self._lent = LentParameters(self._modifier_rank)
        self._lent.lend(params)

    @uninterrupted_throughout
    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            changed, failure = self._leave()
            lent, self._lent = self._lent, None
            if lent is not None:
                changed += lent.take_back(after=error)
            for built in self._built:
                if not self._may_edit and not torch.equal(built.value, built.param.data):
                    changed.append(built.origin.name)
                    built.param.data = built.value
        finally:  # an interrupt in a wait for other ranks: no parameter may stay behind
            self._give_up()
        if error is not None:
            return
        if failure is not None:
            raise failure
        if changed:
            raise StateError(
                f"{', '.join(changed)} changed under GatheredParameters(modifier_rank=None), which drops the change: "
                "pass modifier_rank=0 to keep it"
            )

    def _spill_built(self) -> None:
        """Spill again what was restored in a model that is not offloaded yet."""
        for built in self._built:
            if can_spill(built.param):  # else code inside the block has spilled it
                spill(built.param, name=built.origin.name, directory=built.origin.directory)
        self._built = []

    def _leave(self) -> tuple[list[str], OffloadError | None]:
        """Put offloaded parameters away; return those that were changed without permission, and the first error.

        An error is raised where the block has none of its own: each later use of an engine that has failed raises it.
        """
        changed: list[str] = []
        failure: OffloadError | None = None
        while self._blocks:
            try:
                changed += self._blocks.pop().leave()
            except OffloadError as error:
                failure = failure or error
        return changed, failure


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter read outside its module is fetched at the read."""


def _located(param: nn.Parameter) -> tuple[Runtime, Record, ParamSlot]:
    runtime = runtime_of(param)
    if runtime is None:
        raise ConfigError("param", tuple(param.shape), "is no parameter of an offloaded model")
    return (runtime, *runtime.slots[id(param)])


def _kind(record: Record, optim_state_key: str) -> SegmentKind:
    states = record.spec.states
    if optim_state_key not in states:
        allowed = f"allowed: {', '.join(states)}"
        raise ConfigError("optim_state_key", optim_state_key, allowed, known_values=states)
    return SegmentKind(optim_state_key)


def _expect_shape(slot: ParamSlot, value: torch.Tensor) -> None:
    """Raise ConfigError unless `value` has the parameter's shape, or is all of it as a vector."""
    if value.shape not in (slot.shape, torch.Size((slot.num_elements,))):
        raise ConfigError(
            slot.name, tuple(value.shape), f"shape {tuple(slot.shape)}, or as many elements in one row"
        )


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """Return the fp32 master weight: a new host tensor in the parameter's shape.

    Raises ConfigError for a parameter of no offloaded model.
    """
    runtime, record, slot = _located(param)
    return runtime.weights.read_master(record, slot)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master weight and with it the parameter.

    Raises ConfigError for a parameter of no offloaded model, and for a value that has neither its shape nor, as a
    vector, its number of elements.
    """
    runtime, record, slot = _located(param)
    _expect_shape(slot, value)
    runtime.weights.write(record, slot, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a state such as "exp_avg": a new fp32 host tensor in the parameter's shape, or None for a frozen one.

    Raises ConfigError for a parameter of no offloaded model, and for a state that its optimizer does not have.
    """
    runtime, record, slot = _located(param)
    kind = _kind(record, optim_state_key)
    return runtime.weights.states.read(record, slot, kind) if slot.trainable else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a state such as "exp_avg".

    Raises ConfigError for a parameter that has no such state (a frozen one has none), and for a value that has neither
    its shape nor, as a vector, its number of elements.
    """
    runtime, record, slot = _located(param)
    _expect_shape(slot, value)
    runtime.weights.states.write(record, slot, _kind(record, optim_state_key), value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient accumulated since the last step: a new fp32 host tensor; None where there is none.

    Raises:
        StateError: the weights are updated in backward, and the gradient is gone.
        ConfigError: a parameter of no offloaded model.
    """
    _located(param)
    grad = param.grad
    return None if grad is None else grad.detach().clone().to("cpu", torch.float32)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient; a parameter without one gets one.

    Raises ConfigError for a parameter of no offloaded model, and for another shape; StateError where the weights are
    updated in backward, and the gradient is gone.
    """
    _, record, slot = _located(param)
    if value.shape != slot.shape:  # torch would broadcast
        raise ConfigError(f"{slot.name}.grad", tuple(value.shape), f"shape {tuple(slot.shape)}")
    if param.grad is None:
        param.grad = value.detach().to(param.device, record.dtype, copy=True)
    else:
        param.grad.copy_(value)


# The local forms: this process's part of each parameter as a vector, which with one process is all of it.


def _expect_all_is_local(param: nn.Parameter, call: str) -> None:
    runtime, _, slot = _located(param)
    if not runtime.group.is_alone:
        full = call.replace("local", "full")
        raise StateError(f"{slot.name}: {call}() over several ranks is not built: {full}() on all of them is")


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """Return the fp32 master weight as a vector: a new host tensor. Raises StateError over several ranks."""
    _expect_all_is_local(param, "safe_get_local_fp32_param")
    return safe_get_full_fp32_param(param).reshape(-1)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master weight and with it the parameter. Raises StateError over several ranks."""
    _expect_all_is_local(param, "safe_set_local_fp32_param")
    safe_set_full_fp32_param(param, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a state such as "exp_avg" as a vector: a new fp32 host tensor; None for a frozen parameter.

    Raises ConfigError for a state that the optimizer does not have, StateError over several ranks.
    """
    _expect_all_is_local(param, "safe_get_local_optimizer_state")
    state = safe_get_full_optimizer_state(param, optim_state_key)
    return None if state is None else state.reshape(-1)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a state such as "exp_avg". Raises ConfigError as the full form, StateError over several ranks."""
    _expect_all_is_local(param, "safe_set_local_optimizer_state")
    safe_set_full_optimizer_state(param, value, optim_state_key)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient accumulated since the last step as a vector: a new fp32 host tensor, or None without one.

    Raises StateError as the full form does, and over several ranks.
    """
    _expect_all_is_local(param, "safe_get_local_grad")
    grad = safe_get_full_grad(param)
    return None if grad is None else grad.reshape(-1)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient. Raises ConfigError for another number of elements, StateError over several ranks."""
    _expect_all_is_local(param, "safe_set_local_grad")
    if value.numel() != param.numel():
        _, _, slot = _located(param)
        raise ConfigError(f"{slot.name}.grad", tuple(value.shape), f"{param.numel()} elements")
    safe_set_full_grad(param, value.reshape(param.shape))
