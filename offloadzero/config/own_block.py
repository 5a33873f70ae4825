"""The `offloadzero` block: settings of this package, applied over those of the DeepSpeed keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from offloadzero.config.block import AUTO, Block, is_auto
from offloadzero.config.deepspeed import Reading
from offloadzero.config.keys import OWN_KEYS
from offloadzero.config.nvme_paths import read_nvme_paths
from offloadzero.config.parse import (
    read_bool,
    read_enum,
    read_float,
    read_int,
    read_num_bytes,
    read_path,
    read_str,
    read_str_list,
)
from offloadzero.config.schema import (
    STATE_LAYOUTS,
    ActivationConfig,
    AioBackend,
    AioConfig,
    BudgetConfig,
    ObserveConfig,
    OffloadConfig,
    PlacementConfig,
    PlacementRule,
    UnitConfig,
    UpdateConfig,
)
from offloadzero.errors import ConfigError
from offloadzero.kernel_arguments.compact import COMPACT_CHUNK_MULTIPLE
from offloadzero.limits import CHUNK_MULTIPLE, MAX_UPDATE_THREADS
from offloadzero.segments import SegmentKind, TierName

_BACKENDS = tuple(backend.value for backend in AioBackend)
MAX_CHUNKS_IN_FLIGHT = 1024
MAX_TOKENS = 1 << 40
RECORD_SEGMENTS = (SegmentKind.PARAM, SegmentKind.STATES)
_SEGMENTS = tuple(SegmentKind(name) for name in OWN_KEYS["offloadzero.placement"])

_ROOT = "offloadzero"
_TIERS = tuple(tier.value for tier in TierName)
_STEPS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?", re.ASCII)


def read_own_block(top: Block, base: OffloadConfig, *, reading: Reading) -> OffloadConfig:
    """Return `base` with the block's settings over it; nvme paths go to `reading`. Raises ConfigError."""
    own = top.sub_block(_ROOT, table=OWN_KEYS[_ROOT], notices=reading.notices)
    state_layout = own.read("state_layout", read_enum, base.state_layout, allowed=STATE_LAYOUTS)
    if state_layout == "compact" and base.precision.param_dtype == "fp16":
        raise ConfigError(own.dotted("state_layout"), state_layout, "needs bf16 parameters, fp16 is enabled")
    reading.nvme_paths.extend(own.read("nvme_path", read_nvme_paths, ()))
    return replace(
        base,
        placement=_read_placement(own, base.placement, reading),
        placement_tokens=own.read("placement_tokens", read_int, None, minimum=1, maximum=MAX_TOKENS),
        budgets=_read_budgets(_part(own, "budgets", reading)),
        state_layout=state_layout,
        units=_read_units(_part(own, "units", reading), base.units),
        activation_checkpoints=_read_activations(own, reading),
        update=_read_update(_part(own, "update", reading), base.update, state_layout=state_layout),
        aio=_read_aio(_part(own, "aio", reading), base.aio),
        observe=_read_observe(_part(own, "observe", reading)),
        device=own.read("device", _read_device, base.device),
        poison_released_leases=own.read("poison_released_leases", read_bool, base.poison_released_leases),
    )


def _part(own: Block, name: str, reading: Reading) -> Block:
    return own.sub_block(name, table=OWN_KEYS[f"{_ROOT}.{name}"], notices=reading.notices)


def _read_budgets(block: Block) -> BudgetConfig:
    return BudgetConfig(
        device=block.read("device", read_num_bytes, None),
        host=block.read("host", read_num_bytes, None),
        nvme=block.read("nvme", read_num_bytes, None),
    )


def _read_placement(own: Block, base: PlacementConfig, reading: Reading) -> PlacementConfig:
    """Read the placement. These rules come after those of the offload blocks, so they win; "auto" replaces them all."""
    if "placement" not in own:
        return base
    if own.raw("placement") == AUTO:
        if base != PlacementConfig():
            reading.notices.append(
                "zero_optimization.offload_param, offload_optimizer: device and ratio change nothing: "
                "offloadzero.placement = auto chooses every home"
            )
        return PlacementConfig(auto=True)
    rules = _read_rules(own.dotted("placement"), own.raw("placement"), reading)
    return replace(base, rules=(*base.rules, *rules))


def _read_rules(key: str, value: object, reading: Reading) -> tuple[PlacementRule, ...]:
    """Read a tier for every record segment, an object of tiers by segment, or a list of rules with globs."""
    if isinstance(value, str):
        tier = TierName(read_enum(key, value, (*_TIERS, AUTO)))
        return (PlacementRule(tiers=MappingProxyType(dict.fromkeys(RECORD_SEGMENTS, tier))),)
    if isinstance(value, (list, tuple)):
        table = OWN_KEYS[f"{_ROOT}.placement[]"]
        blocks = [
            Block(f"{key}[{index}]", rule, table=table, notices=reading.notices)
            for index, rule in enumerate(value)
        ]
        return tuple(_read_rule(block) for block in blocks)
    if isinstance(value, Mapping):
        return (_read_rule(Block(key, value, table=OWN_KEYS[f"{_ROOT}.placement"], notices=reading.notices)),)
    raise ConfigError(
        key, value, f"one of {', '.join(_TIERS)}, an object of tiers by segment, a list of rules, or {AUTO}"
    )


def _read_rule(block: Block) -> PlacementRule:
    tiers = {
        kind: TierName(read_enum(block.dotted(kind.value), block.raw(kind.value), _TIERS))
        for kind in _SEGMENTS
        if kind.value in block
    }
    if not tiers:
        segments = ", ".join(_SEGMENTS)
        raise ConfigError(block.path, block.written(), f"a rule needs at least one of {segments}")
    return PlacementRule(units=block.read("units", read_str, "*"), tiers=MappingProxyType(tiers))


def _read_units(block: Block, base: UnitConfig) -> UnitConfig:
    return UnitConfig(
        patterns=block.read("patterns", read_str_list, base.patterns),
        min_leaf_elements=block.read("min_leaf_elements", read_int, base.min_leaf_elements, minimum=0),
        prefetch_units=block.read("prefetch_units", read_int, base.prefetch_units, minimum=1),
    )


def _read_activations(own: Block, reading: Reading) -> ActivationConfig | None:
    """Read the block. Its presence, even empty, switches checkpointing on."""
    on_host = "activation_checkpointing.cpu_checkpointing"
    if "activation_checkpoints" not in own:
        if reading.inputs_on_host:
            allowed = (
                'needs "offloadzero": {"activation_checkpoints": {}}: calls of deepspeed.checkpointing.checkpoint are '
                "not read here"
            )
            raise ConfigError(on_host, True, allowed)
        return None
    block = _part(own, "activation_checkpoints", reading)
    absent = TierName.HOST if reading.inputs_on_host else TierName.DEVICE
    tier = TierName(block.read("tier", read_enum, absent.value, allowed=_TIERS))
    if reading.inputs_on_host and tier.is_device:
        raise ConfigError(
            block.dotted("tier"), tier.value, f"host or nvme, or no {on_host}: they contradict each other"
        )
    input_bytes = block.read("input_bytes", read_num_bytes, None, minimum=1)
    if input_bytes is not None and tier.is_device:
        raise ConfigError(
            block.dotted("input_bytes"),
            input_bytes,
            'left out where "tier" is device: inputs stay where they are',
        )
    return ActivationConfig(units=block.read("units", read_str_list, ()), tier=tier, input_bytes=input_bytes)


def _read_update(block: Block, base: UpdateConfig, *, state_layout: str) -> UpdateConfig:
    multiple = COMPACT_CHUNK_MULTIPLE if state_layout == "compact" else CHUNK_MULTIPLE
    inherited = -(-base.chunk_elements // multiple) * multiple
    return UpdateConfig(
        in_backward=block.read("in_backward", _read_in_backward, base.in_backward),
        on_nonfinite=block.read("on_nonfinite", read_enum, base.on_nonfinite, allowed=("error", "skip")),
        chunk_elements=block.read("chunk_elements", _read_chunk_elements, inherited, multiple=multiple),
        num_chunks_in_flight=block.read(
            "num_chunks_in_flight",
            read_int,
            base.num_chunks_in_flight,
            minimum=1,
            maximum=MAX_CHUNKS_IN_FLIGHT,
        ),
        num_threads=block.read(
            "num_threads", read_int, base.num_threads, minimum=1, maximum=MAX_UPDATE_THREADS
        ),
        cores=block.read("cores", _read_cores, base.cores),
    )


def _read_in_backward(key: str, value: object) -> bool | None:
    return None if is_auto(value) else read_bool(key, value)


def _read_cores(key: str, value: object) -> tuple[int, ...]:
    usable = os.sched_getaffinity(0)
    if not isinstance(value, list) or not value:
        raise ConfigError(key, value, "a list of CPU numbers")
    cores = {read_int(f"{key}[{index}]", core, minimum=0) for index, core in enumerate(value)}
    if not usable.issuperset(cores):
        raise ConfigError(key, value, f"some of the CPUs this process may use: {sorted(usable)}")
    return tuple(sorted(cores))


def _read_chunk_elements(key: str, value: object, *, multiple: int) -> int:
    number = read_int(key, value, minimum=CHUNK_MULTIPLE)
    if number % multiple:
        why = "" if multiple == CHUNK_MULTIPLE else " with state_layout compact"
        raise ConfigError(key, value, f"a multiple of {multiple}{why}")
    return number


def _read_aio(block: Block, base: AioConfig) -> AioConfig:
    return replace(
        base,
        backend=block.read("backend", read_enum, base.backend, allowed=_BACKENDS),
        checksums=block.read("checksums", read_bool, base.checksums),
        transfer_timeout_s=block.read("transfer_timeout_s", read_float, None, minimum=0.1, maximum=1e6),
    )


def _read_observe(block: Block) -> ObserveConfig:
    run_dir = block.read("run_dir", read_path, None)
    trace_steps: tuple[tuple[int, int], ...] = block.read("trace_steps", _read_steps, ())
    if trace_steps and run_dir is None:
        raise ConfigError(block.dotted("trace_steps"), block.raw("trace_steps"), "run_dir must be set too")
    return ObserveConfig(
        step_line=block.read("step_line", read_bool, False),
        run_dir=run_dir,
        trace_steps=trace_steps,
        nvme_shared=block.read("nvme_shared", read_bool, False),
    )


def _read_steps(key: str, value: object) -> tuple[tuple[int, int], ...]:
    """Read one step, a range such as "3-5", or a list of them."""
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_read_step_range(key, entry) for entry in entries)


def _read_step_range(key: str, value: object) -> tuple[int, int]:
    allowed = 'steps from 1 on: [3, 4], "10-12"'
    if isinstance(value, str):
        match = _STEPS.fullmatch(value)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(key, value, allowed)
        return first, last
    step = read_int(key, value, minimum=1)
    return step, step


def _read_device(key: str, value: object) -> str:
    text = read_str(key, value)
    if _DEVICE.fullmatch(text) is None:
        raise ConfigError(key, value, "allowed cpu, cuda, cuda:N")
    return text
