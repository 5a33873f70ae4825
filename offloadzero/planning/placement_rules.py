"""The home of each segment by the configuration's rules.

What they leave open, `"placement": "auto"`, is chosen in placement.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from offloadzero.config import OffloadConfig, PlacementRule
from offloadzero.core.segments import SegmentKind, TierName
from offloadzero.errors import ConfigError
from offloadzero.update.records import Record

# The home of each segment, by the index of its record. Records with trainable parameters have one for the gradient.
Placement = Mapping[tuple[int, SegmentKind], TierName]
_NUM_SHOWN = 8  # names of units in a message


def place(records: Sequence[Record], config: OffloadConfig) -> dict[tuple[int, SegmentKind], TierName]:
    """Return the home of every segment, gradients included (a gradient stays where its update runs).

    The scales of the compact layout live with the first state unless a rule names them.
    """
    if config.placement.auto:
        raise AssertionError('"auto" has no rules: choose_placement finds the homes')
    _expect_states(records, config.placement.rules)
    placement: dict[tuple[int, SegmentKind], TierName] = {}
    for record in records:
        homes = dict.fromkeys(record.layout, TierName.DEVICE)
        grad: TierName | None = None
        scales: TierName | None = None
        for rule in config.placement.rules:
            if _is_for(rule, record):
                homes.update({kind: tier for kind, tier in rule_homes(rule, record).items() if kind in homes})
                grad = rule.tiers.get(SegmentKind.GRAD, grad)
                scales = rule.tiers.get(SegmentKind.SCALES, scales)
        if SegmentKind.SCALES in homes:
            homes[SegmentKind.SCALES] = scales or homes[record.spec.states[0]]
        if record.resident:
            homes[SegmentKind.PARAM] = TierName.DEVICE
        placement.update({(record.index, kind): tier for kind, tier in homes.items()})
        if record.num_trainable:
            on_device = all(tier.is_device for tier in homes.values())
            default = TierName.DEVICE if on_device else TierName.HOST
            placement[record.index, SegmentKind.GRAD] = grad if grad and not on_device else default
    _move_share_to_device(records, config.placement.host_update_ratio, placement)
    return placement


def idle_rules(records: Sequence[Record], config: OffloadConfig) -> list[str]:
    """Say of each rule whose glob matches no unit that it places nothing: a misspelt one, as a rule.

    It is no error: one file may be for several models of a script, and for the parts of a pipeline.
    """
    names = list(dict.fromkeys(record.unit_name for record in records))
    shown = ", ".join(names[:_NUM_SHOWN]) + (", ..." if len(names) > _NUM_SHOWN else "")
    return [
        f"offloadzero.placement: a rule for the units {rule.units!r} places nothing: the model has no such unit, it "
        f"has {shown}"
        for rule in config.placement.rules
        if not any(_is_for(rule, record) for record in records)
    ]


def _is_for(rule: PlacementRule, record: Record) -> bool:
    """Whether a rule names the record's unit, or this one of the records that a unit has for its dtypes."""
    return any(fnmatchcase(name, rule.units) for name in (record.unit_name, record.name))


def rule_homes(rule: PlacementRule, record: Record) -> dict[SegmentKind, TierName]:
    """Return a rule's tier for each segment of a record: "states" first, then the segments that it names."""
    states = rule.tiers.get(SegmentKind.STATES)
    homes = {} if states is None else dict.fromkeys((SegmentKind.MASTER, *record.spec.states), states)
    return {**homes, **rule.tiers}


def _expect_states(records: Sequence[Record], rules: Iterable[PlacementRule]) -> None:
    """Raise ConfigError for a state that the optimizer of no record has which the rule is for."""
    for rule in rules:
        specs = {r.spec.name: r.spec for r in records if r.num_trainable and _is_for(rule, r)}
        known = {SegmentKind.STATES, *(kind for spec in specs.values() for kind in spec.kinds)}
        for kind, tier in rule.tiers.items():
            if specs and kind not in known:
                allowed = "; ".join(
                    f"states of {spec.name}: {', '.join(spec.states)}" for spec in specs.values()
                )
                raise ConfigError(f"offloadzero.placement.{kind}", tier.value, allowed)


def _move_share_to_device(
    records: Sequence[Record], host_ratio: float, placement: dict[tuple[int, SegmentKind], TierName]
) -> None:
    """Move the last records' updates to the device, as Twin-Flow (ZeRO-Offload++) does.

    Their updates are the first that backward makes possible. A record is moved while the share stays within
    1 - `host_ratio` of all trainable elements.
    """
    if host_ratio >= 1.0:
        return
    total = sum(record.num_trainable for record in records)
    allowed = (1.0 - host_ratio) * total
    for record in reversed(records):
        if record.num_trainable and record.num_trainable <= allowed:
            allowed -= record.num_trainable
            for kind in (*record.layout, SegmentKind.GRAD):
                placement[record.index, kind] = TierName.DEVICE
