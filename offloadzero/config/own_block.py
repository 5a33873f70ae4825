"""The `offloadzero` block: settings of this package, applied over those of the DeepSpeed keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from offloadzero.config.block import Block
from offloadzero.config.deepspeed import Reading
from offloadzero.config.keys import OWN_KEYS
from offloadzero.config.readers import AUTO, TIERS, read_enum, read_int, read_nvme_paths, read_tier
from offloadzero.config.schema import (
    ActivationConfig,
    ObserveConfig,
    OffloadConfig,
    PlacementConfig,
    PlacementRule,
    UpdateConfig,
)
from offloadzero.core.constants import COMPACT_CHUNK_MULTIPLE
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import ConfigError

RECORD_SEGMENTS = (SegmentKind.PARAM, SegmentKind.STATES)
_SEGMENTS = tuple(SegmentKind(name) for name in OWN_KEYS["offloadzero.placement"])

PARTITION_KEY = "activation_checkpointing.partition_activations"
_ON_HOST_KEY = "activation_checkpointing.cpu_checkpointing"
_ROOT = "offloadzero"


def read_own_block(top: Block, base: OffloadConfig, *, reading: Reading) -> OffloadConfig:
    """Return `base` with the block's settings over it; nvme paths go to `reading`. Raises ConfigError."""
    own = top.sub_block(_ROOT, table=OWN_KEYS[_ROOT], notices=reading.notices)
    config = own.read_fields(base)
    if config.state_layout == "compact" and config.precision.param_dtype == "fp16":
        raise ConfigError(own.dotted("state_layout"), "compact", "needs bf16 parameters, fp16 is enabled")
    if config.durable and config.versions is False:
        raise ConfigError(
            own.dotted("versions"), False, "left out with durable = true: it needs the second places"
        )
    reading.nvme_paths.extend(own.read("nvme_path", read_nvme_paths, ()))
    activations = _read_activations(own, reading, divides=base.partition_activations)
    return replace(
        config,
        placement=_read_placement(own, base.placement, reading),
        budgets=_part(own, "budgets", reading).read_fields(base.budgets),
        units=_part(own, "units", reading).read_fields(base.units),
        activation_checkpoints=activations,
        partition_activations=base.partition_activations and activations is not None,
        update=_read_update(_part(own, "update", reading), base.update, state_layout=config.state_layout),
        aio=_part(own, "aio", reading).read_fields(base.aio),
        observe=_read_observe(_part(own, "observe", reading), base.observe),
    )


def _part(own: Block, name: str, reading: Reading) -> Block:
    return own.sub_block(name, table=OWN_KEYS[f"{_ROOT}.{name}"], notices=reading.notices)


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
        tier = TierName(read_enum(key, value, (*TIERS, AUTO)))
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
        key, value, f"one of {', '.join(TIERS)}, an object of tiers by segment, a list of rules, or {AUTO}"
    )


def _read_rule(block: Block) -> PlacementRule:
    tiers = {
        kind: read_tier(block.dotted(kind.value), block.raw(kind.value))
        for kind in _SEGMENTS
        if kind.value in block
    }
    if not tiers:
        segments = ", ".join(_SEGMENTS)
        raise ConfigError(block.path, block.written(), f"a rule needs at least one of {segments}")
    return block.read_fields(PlacementRule(tiers=MappingProxyType(tiers)))


def _read_activations(own: Block, reading: Reading, *, divides: bool) -> ActivationConfig | None:
    """Read the block. Its presence, even empty, switches checkpointing on; without it DeepSpeed's keys do nothing."""
    if "activation_checkpoints" not in own:
        asked = {PARTITION_KEY: divides, _ON_HOST_KEY: reading.inputs_on_host}
        reading.warnings.extend(
            f"{key} = true has no effect: it is for inputs of blocks that a configuration checkpoints, which "
            '"offloadzero": {"activation_checkpoints": {}} would switch on. In DeepSpeed it is for calls of its '
            "checkpointing.checkpoint() alone, and a model's own checkpoints keep their inputs as they do here"
            for key, is_asked in asked.items()
            if is_asked
        )
        return None
    block = _part(own, "activation_checkpoints", reading)
    base = ActivationConfig(tier=TierName.HOST) if reading.inputs_on_host else ActivationConfig()
    inputs = block.read_fields(base)
    if reading.inputs_on_host and inputs.tier.is_device:
        raise ConfigError(
            block.dotted("tier"),
            inputs.tier.value,
            f"host or nvme, or no {_ON_HOST_KEY}: they contradict each other",
        )
    if inputs.input_bytes is not None and inputs.tier.is_device:
        raise ConfigError(
            block.dotted("input_bytes"),
            inputs.input_bytes,
            'left out where "tier" is device: inputs stay where they are',
        )
    return inputs


def _read_update(block: Block, base: UpdateConfig, *, state_layout: str) -> UpdateConfig:
    if state_layout != "compact":
        return block.read_fields(base)
    # Before its own reader, whose multiple is too small here.
    if block.read("chunk_elements", read_int, 0) % COMPACT_CHUNK_MULTIPLE:
        allowed = f"a multiple of {COMPACT_CHUNK_MULTIPLE} with state_layout compact"
        raise ConfigError(block.dotted("chunk_elements"), block.raw("chunk_elements"), allowed)
    rounded = -(-base.chunk_elements // COMPACT_CHUNK_MULTIPLE) * COMPACT_CHUNK_MULTIPLE
    return block.read_fields(replace(base, chunk_elements=rounded))


def _read_observe(block: Block, base: ObserveConfig) -> ObserveConfig:
    observe = block.read_fields(base)
    if observe.trace_steps and observe.run_dir is None:
        raise ConfigError(block.dotted("trace_steps"), block.raw("trace_steps"), "run_dir must be set too")
    return observe
