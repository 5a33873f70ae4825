"""No code goes by which tier something is: it asks the tier, [Note: what is asked of a tier] in memory/tiers.py."""

from __future__ import annotations

import ast
from pathlib import Path

from offloadzero.core.segments import TierName
from offloadzero.memory.nvme import NvmeTier
from offloadzero.memory.tiers import DeviceTier, HostTier

PACKAGE = Path(__file__).parents[2] / "offloadzero"
OWN_FILE = PACKAGE / "core" / "segments.py"
# The configuration's own words, before they are a tier.
STRINGS = {"zero.py": 1}


def comparisons(text: str) -> list[str]:
    """The comparisons of a tier with one that is named, by identity, by value or in a set of them."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        and all(isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)) for op in node.ops)
        and "TierName." in ast.unparse(node)
    ]


def test_no_tier_is_compared_with_a_name() -> None:
    seen = "x = [r for r in records if tier is not TierName.DEVICE] or found == {TierName.DEVICE}"
    assert len(comparisons(seen)) == 2
    files = [path for path in PACKAGE.rglob("*.py") if path != OWN_FILE]
    found = {str(path.relative_to(PACKAGE)): comparisons(path.read_text()) for path in files}
    assert {file: len(each) for file, each in found.items() if each} == STRINGS, found


def test_each_name_answers_as_its_tier_does() -> None:
    answers = {name: (name.is_device, name.is_host_memory, name.is_file) for name in TierName}
    assert answers == {
        TierName.DEVICE: (True, False, False),
        TierName.HOST: (False, True, False),
        TierName.NVME: (False, False, True),
    }
    for kind in (DeviceTier, HostTier, NvmeTier):
        tier = kind.__new__(kind)
        assert answers[tier.name][:2] == (tier.is_device, tier.is_host_memory)
