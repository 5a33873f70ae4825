"""The cut of a module into units, which does not change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offloadzero.arithmetic.remainders import MASTER_DTYPES
from offloadzero.config import OffloadConfig, UnitConfig
from offloadzero.errors import ConfigError
from offloadzero.ranks.shard import WHOLE, ShardSpec
from offloadzero.streaming.building.coded_parameters import expect_own_memory, is_coded
from offloadzero.streaming.building.leaf_modules import leaf_modules
from offloadzero.streaming.building.shared_memory import expect_memory_of_its_own
from offloadzero.update.records import Record, make_record
from offloadzero.update.spec import AnySpec

REST = "(rest)"  # no module can have this name

_Placed = tuple[str, nn.Parameter, int | None]  # name, parameter, its group; None: it is frozen


@dataclass(frozen=True)
class Site:
    """A module whose forward needs `records` on the device.

    The largest comes first: it finds a hole where the small ones may lie anywhere.
    """

    name: str
    module: nn.Module
    records: tuple[int, ...]


@dataclass(frozen=True)
class UnitCut:
    """The records of a model, the sites that need them, and the units that must be on the device together."""

    records: tuple[Record, ...]
    sites: tuple[Site, ...]
    together: tuple[tuple[int, ...], ...]  # in the order in which forwards use them
    # Modules that own parameters directly.
    owners: tuple[nn.Module, ...]


def cut_units(
    model: nn.Module,
    config: UnitConfig,
    *,
    group_of: Mapping[int, int],
    param_dtype: torch.dtype | None,
    spec: AnySpec,
    group_specs: Sequence[AnySpec] = (),
    compact: bool = False,
    shard: ShardSpec = WHOLE,
    gathers_params: bool = False,
    is_reduced: bool = False,
) -> UnitCut:
    """Cut `model` into units and lay out their records.

    A unit is each element of the outermost repeated ModuleList or Sequential, each other leaf module of at
    least `config.min_leaf_elements` elements, and, resident on the device, the small rest. A parameter that
    several modules share belongs to the unit of the first. `config.patterns` (globs of module names) replace
    the first rule. A leaf module is one unit, unless it is part of a larger one.

    Args:
        group_of: id of a parameter -> index of its optimizer group; parameters that are absent are frozen.
        param_dtype: dtype of all floating-point parameters but those of codes; None keeps each parameter's own.
        spec: the spec of the optimizer.
        group_specs: those of its groups, where they are not all that one; a record has parameters of one spec.
        compact: the compact layout for the states of bf16 parameters.
        shard: this rank's part of gradients and states.
        gathers_params: the parameters are divided in the same way, except for those of the resident unit.
        is_reduced: gradients are means over several ranks.

    Raises:
        ConfigError: the model has no parameters, has some that cannot be moved, or one that shares memory with
            another tensor of the model; a pattern matches nothing; a leaf module is the model itself, or never called;
            no trainable parameter can be compact.
    """
    _expect_movable(model)
    expect_own_memory(model)
    expect_memory_of_its_own(model, group_of=group_of)
    roots = _unit_roots(model, config)
    owned = _assign_parameters(model, roots, config.min_leaf_elements)
    _expect_called(model, config, owned)
    if not owned:
        raise ConfigError("model", type(model).__name__, "a module with parameters: this one has none")
    records: list[Record] = []
    record_of: dict[int, int] = {}
    for unit_name, params in owned.items():
        placed_params = [
            (param_name, param, group_of.get(id(param)) if param.requires_grad else None)
            for param_name, param in params
        ]
        first: tuple[torch.dtype, AnySpec] | None = None
        cut = _by_dtype_and_spec(placed_params, param_dtype, spec=spec, group_specs=group_specs)
        for (dtype, own_spec), placed in cut.items():
            first = first or (dtype, own_spec)
            name = unit_name + (f"#{_dtype_name(dtype)}" if dtype != first[0] else "")
            name += f"#{own_spec.name}" if own_spec is not first[1] else ""
            _expect_trainable(dtype, own_spec, placed)
            resident = unit_name == REST
            record = make_record(
                len(records),
                name,
                dtype,
                placed,
                spec=own_spec,
                shard=shard,
                resident=resident,
                compact=compact,
                keeps_whole_params=shard.world_size > 1 and (resident or not gathers_params),
                is_reduced=is_reduced,
            )
            records.append(record)
            record_of.update({id(param): record.index for _, param, _ in placed})
    if compact and not any(record.compact and record.num_trainable for record in records):
        raise ConfigError(
            "offloadzero.state_layout",
            "compact",
            'no trainable parameter is bf16: set "bf16": {"enabled": true}',
        )
    sites, together = _sites(model, records, record_of)
    owners = tuple(module for module in model.modules() if any(_own_parameters(module)))
    return UnitCut(tuple(records), sites, together, owners)


def checkpointed_modules(model: nn.Module, cut: UnitCut, config: OffloadConfig) -> dict[str, nn.Module]:
    """Return the modules by name whose forward is run again in backward.

    They are those of the units whose name matches one of the patterns, or of all unit roots without patterns.

    Raises:
        ConfigError: a pattern matches no unit, or a unit that is never called as a module.
    """
    if config.activation_checkpoints is None:
        return {}
    patterns = config.activation_checkpoints.units
    names = {record.unit_name for record in cut.records} - {REST}
    key = "offloadzero.activation_checkpoints.units"
    roots = [] if patterns else sorted(names & set(_unit_roots(model, config.units).values()))
    if not patterns and not roots:
        raise ConfigError(key, None, "the model has no repeated blocks: name units", known_values=names)
    chosen = {name: model.get_submodule(name) for name in roots}
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(key, pattern, f"units: {', '.join(sorted(names))}", known_values=names)
        chosen.update((name, model.get_submodule(name)) for name in matching)
    for name, module in chosen.items():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(key, name, f"a unit that is called: {name} is a {type(module).__name__}")
    return chosen


def _expect_called(model: nn.Module, config: UnitConfig, units: Container[str]) -> None:
    """Refuse a leaf module of the units that has no forward: which of its children run could differ between ranks."""
    for name in leaf_modules(model, config.leaf_modules).values():
        module = model.get_submodule(name)
        if name in units and isinstance(module, nn.ModuleList | nn.ModuleDict):
            parent = type(model.get_submodule(name.rpartition(".")[0])).__name__
            allowed = f"a module that is called, of which this is a part: {parent}"
            raise ConfigError(f"leaf module {name}", type(module).__name__, allowed)


def _expect_movable(model: nn.Module) -> None:
    """Refuse modules whose forward is not Python's, and parameters that have no memory yet."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            allowed = (
                "modules of Python: one of torch.jit takes its weights as they lie in memory, and they are to move. "
                "Offload the model as it was before torch.jit.script or torch.jit.trace"
            )
            raise ConfigError(name or "model", module.original_name, allowed)
    for name, param in model.named_parameters():
        # A variable of its own: in an `if` it would narrow the type to none.
        has_no_shape: bool = is_lazy(param)
        if has_no_shape:
            allowed = (
                "parameters with a shape: run a forward, which gives it one, before offload() or initialize()"
            )
            raise ConfigError(name, type(param).__name__, allowed)


def _expect_trainable(dtype: torch.dtype, spec: AnySpec, params: Sequence[_Placed]) -> None:
    for name, param, group_index in params:
        if group_index is None:
            continue
        spec.expect_param(name, param)
        if dtype not in MASTER_DTYPES:
            allowed = ", ".join(map(_dtype_name, MASTER_DTYPES))
            raise ConfigError(f"{name}.dtype", _dtype_name(dtype), f"trainable parameters: {allowed}")
        grad_dtype = getattr(param, "grad_dtype", param.dtype)  # older versions of torch lack it
        if grad_dtype != param.dtype:
            allowed = f"{_dtype_name(param.dtype)}: a gradient has the dtype of its parameter"
            raise ConfigError(f"{name}.grad_dtype", grad_dtype and _dtype_name(grad_dtype), allowed)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False)


def _num_elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _unit_roots(model: nn.Module, config: UnitConfig) -> dict[int, str]:
    """Return the name of each unit, by the id of its root module; of two, one in the other, the outer one is it."""
    leaves = leaf_modules(model, config.leaf_modules)
    if not config.patterns:
        return leaves | {id(module): name for name, module in _repeated(model, "")}
    roots: dict[int, str] = {}
    used: Counter[str] = Counter()
    covered: set[int] = set()
    for name, module in model.named_modules():
        matching = [pattern for pattern in config.patterns if fnmatchcase(name, pattern)]
        used.update(matching)
        if matching and id(module) not in covered:
            roots[id(module)] = name
            covered.update(map(id, module.modules()))
    for pattern in config.patterns:
        if not used[pattern]:
            names = [name for name, _ in model.named_modules() if name]
            allowed = f"matches no module of the model, whose modules are {', '.join(names[:6])}, ..."
            raise ConfigError("offloadzero.units.patterns", pattern, allowed, known_keys=names)
    return leaves | roots


def _repeated(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the elements of the outermost containers of modules of one class."""
    children = [(n, child) for n, child in module.named_children() if _num_elements(child)]
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    classes = {type(child) for _, child in children}
    if is_container and len(classes) == 1 and not issubclass(next(iter(classes)), nn.ModuleList):
        for child_name, child in children:
            yield f"{name}.{child_name}" if name else child_name, child
        return
    for child_name, child in children:
        yield from _repeated(child, f"{name}.{child_name}" if name else child_name)


def _assign_parameters(
    model: nn.Module, roots: Mapping[int, str], min_leaf_elements: int
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return the parameters of each unit, by its name, in the order of the model's modules."""
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, unit: str | None) -> None:
        unit = unit or roots.get(id(module))
        is_leaf = next(module.children(), None) is None  # a child may have a length, of 0 or of an error
        params = [(n, p) for n, p in _own_parameters(module) if id(p) not in seen]
        if params:
            seen.update(id(param) for _, param in params)
            large = is_leaf and sum(param.numel() for _, param in params) >= min_leaf_elements
            target = unit or (name if large and name else REST)
            owned.setdefault(target, []).extend(
                (f"{name}.{param_name}" if name else param_name, param) for param_name, param in params
            )
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, unit)

    visit(model, "", None)
    return owned


def _by_dtype_and_spec(
    params: Sequence[_Placed],
    param_dtype: torch.dtype | None,
    *,
    spec: AnySpec,
    group_specs: Sequence[AnySpec],
) -> dict[tuple[torch.dtype, AnySpec], list[_Placed]]:
    """Return the parameters of each record of a unit. Frozen ones are in the first of those of their dtype."""

    for name, param, _ in params:
        if param_dtype is not None and param.is_floating_point() and param.itemsize == 1:
            allowed = "a configuration without bf16 and fp16, which would cast it and its scales"
            raise ConfigError(name, str(param.dtype).removeprefix("torch."), allowed)

    def dtype_of(param: nn.Parameter) -> torch.dtype:
        cast = param_dtype is not None and param.is_floating_point() and not is_coded(param)
        return param_dtype if cast and param_dtype is not None else param.dtype

    def spec_of(group_index: int) -> AnySpec:
        return group_specs[group_index] if group_specs else spec

    with_frozen: dict[torch.dtype, AnySpec] = {}
    for _, param, group_index in params:
        if group_index is not None:
            with_frozen.setdefault(dtype_of(param), spec_of(group_index))
    records: dict[tuple[torch.dtype, AnySpec], list[_Placed]] = {}
    for placed in params:
        _, param, group_index = placed
        dtype = dtype_of(param)
        own = with_frozen.get(dtype, spec) if group_index is None else spec_of(group_index)
        records.setdefault((dtype, own), []).append(placed)
    return records


def _sites(
    model: nn.Module, records: Sequence[Record], record_of: Mapping[int, int]
) -> tuple[tuple[Site, ...], tuple[tuple[int, ...], ...]]:
    """Make the sites: a module needs the records of its own parameters and of its unit that no outer site has."""
    unit_records: dict[str, set[int]] = {}
    for record in records:
        unit_records.setdefault(record.unit_name, set()).add(record.index)
    resident = {record.index for record in records if record.resident}
    sites: list[Site] = []
    together: list[tuple[int, ...]] = []
    placed: set[int] = set()

    def visit(module: nn.Module, name: str, held: tuple[int, ...]) -> None:
        needed = {record_of[id(param)] for _, param in _own_parameters(module)} | (
            unit_records.get(name, set()) if name else resident
        )
        needed -= set(held) if name else set()
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            needed = set()  # it is never called: its children are the sites
        ordered = tuple(sorted(needed, key=lambda index: (-records[index].param_bytes, index)))
        held = tuple(dict.fromkeys((*held, *ordered)))
        if needed:  # a module that several others share is one site, and comes beside each of them
            together.append(held)
        if needed and id(module) not in placed:
            placed.add(id(module))
            sites.append(Site(name, module, ordered))
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, held)

    visit(model, "", tuple(resident))
    return tuple(sites), tuple(together)
