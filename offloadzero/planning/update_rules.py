"""When a record is updated: in backward, at the step, or in backward on trial."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from enum import Enum

from offloadzero.config import OffloadConfig
from offloadzero.core.segments import SegmentKind
from offloadzero.errors import ConfigError
from offloadzero.planning.placement_rules import Placement
from offloadzero.update.records import Record


def updates_in_backward(config: OffloadConfig) -> bool:
    """Whether a record may be updated before backward has ended, with the numbers of a blocking step.

    Clipping needs the global norm first, and fp16 and `on_nonfinite: skip` must know that every gradient is
    finite before any state changes. Raises ConfigError where it is asked for, and may not be.
    """
    reasons = {
        "gradient_clipping": bool(config.gradient_clipping),
        "managed_gradient_accumulation = false": not config.batch.managed,
        "fp16": config.precision.param_dtype == "fp16",
        'offloadzero.update.on_nonfinite = "skip"': config.update.on_nonfinite == "skip",
    }
    if config.is_of_several:  # all ranks' gradients must be known to be finite first
        reasons["a mesh of ranks" if config.mesh is not None else f"{config.world_size} ranks"] = True
    binding = [name for name, holds in reasons.items() if holds]
    if config.update.in_backward and binding:
        raise ConfigError(
            "offloadzero.update.in_backward",
            True,
            f"impossible with {', '.join(binding)}: all gradients must be known before the first update",
        )
    return not binding if config.update.in_backward is None else config.update.in_backward


def with_kept_gradients(config: OffloadConfig) -> OffloadConfig:
    """Return the configuration for a loop that keeps gradients, as torch's does: no update in backward by default."""
    if config.update.in_backward is not None or not updates_in_backward(config):
        return config
    return replace(config, update=replace(config.update, in_backward=False))


def keeps_gradients(config: OffloadConfig) -> bool:
    """Whether gradients have homes until the step; otherwise each is consumed as it lands."""
    return not updates_in_backward(config) or config.batch.gradient_accumulation_steps > 1


def second_places(
    records: Sequence[Record], config: OffloadConfig, placement: Placement, versioned: Collection[int]
) -> frozenset[tuple[int, SegmentKind]]:
    """The segments that have two places: all of `versioned` records, and those that a commit leaves where they are.

    Parameters it does not where frozen ones are among them, or those of other ranks: [Note: durable runs].
    """
    tried = frozenset((r.index, kind) for r in records if r.index in versioned for kind in r.layout)
    if not config.durable:
        return tried
    return tried | frozenset(
        (record.index, kind)
        for record in records
        if record.kept_trainable
        for kind in record.layout
        if placement[record.index, kind].is_file
        and (kind is not SegmentKind.PARAM or (record.is_trained_whole and not record.keeps_whole_params))
    )


class Versions(str, Enum):
    """Which records have two places: [Note: versions] in update/pipeline.py."""

    STATES_ON_NVME = "states on nvme"  # the parameters there or in host memory
    ALL_ON_NVME = "all on nvme"
    NONE = "none"


def versioned_records(
    records: Iterable[Record],
    config: OffloadConfig,
    placement: Placement,
    versions: Versions = Versions.STATES_ON_NVME,
) -> frozenset[int]:
    """The records whose updates are tried in backward, in a second place: [Note: versions] in update/pipeline.py."""
    if versions is Versions.NONE or config.versions is False or updates_in_backward(config):
        return frozenset()

    def is_served(record: Record, kind: SegmentKind) -> bool:
        home = placement[record.index, kind]
        may_be_host = kind is SegmentKind.PARAM and versions is Versions.STATES_ON_NVME
        return home.is_file or (may_be_host and home.is_host_memory)

    return frozenset(
        record.index
        for record in records
        if record.kept_trainable
        and record.is_trained_whole
        and not record.keeps_whole_params
        and any(placement[record.index, kind].is_file for kind in record.layout)
        and all(is_served(record, kind) for kind in record.layout)
        and not placement[record.index, SegmentKind.GRAD].is_device
    )
