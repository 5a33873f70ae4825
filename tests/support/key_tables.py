"""The tables of docs/config.md, made of the tables of keys and of the schedules' signatures.

`python -m tests.support.key_tables` writes them into the document; a test compares (`make docs`).
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from offloadzero.api.deepspeed.schedules import DEEPSPEED_SCHEDULES
from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS, Action, KeySpec, KeyTable, Kind
from offloadzero.config.readers import shown

DOC = Path(__file__).parents[2] / "docs" / "config.md"
TOP_LEVEL = "Top level"
_ROW = re.compile(rf"\| `[^|]+` \| ({'|'.join(Action)}) \|")


def key_table(path: str, table: KeyTable) -> list[str]:
    """The rows of one object's keys: a row for those of one sentence, with all spellings of each.

    The keys of a rule, `x[]`, that are keys of `x` too are left out.
    """
    known = OWN_KEYS[path.removesuffix("[]")] if path.endswith("[]") else {}
    rows: dict[str, list[str]] = {}
    for key, spec in table.items():
        if spec.action is not Action.ALIAS and key not in known:
            others = [other for other, alias in table.items() if _is_alias(alias, key)]
            names = " or ".join(f"`{name}`" for name in (key, *others))
            rows.setdefault(f"{spec.action.value} | {sentence(spec)}", []).append(names)
    lines = [f"| {', '.join(names)} | {said} |" for said, names in rows.items()]
    return ["| key | action | here |", "| --- | --- | --- |", *lines]


def _is_alias(spec: KeySpec, key: str) -> bool:
    return spec.action is Action.ALIAS and spec.note == key


def sentence(spec: KeySpec) -> str:
    """What the page says of a key: its note, which messages print, with links to the other pages."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", _sentence(spec))


def _sentence(spec: KeySpec) -> str:
    if spec.action is Action.REFUSE and spec.kind is Kind.SWITCHED:
        return f"{spec.note} (taken unless something in it is enabled)"
    return spec.note


def schedule_table() -> list[str]:
    """The rows of DeepSpeed's schedules, each with its parameters and their defaults."""
    rows = []
    for name, cls in DEEPSPEED_SCHEDULES.items():
        parameters = [
            f"`{parameter.name}` "
            + ("(required)" if parameter.default is parameter.empty else shown(parameter.default).lower())
            for parameter in list(inspect.signature(cls).parameters.values())[1:]
            if parameter.name != "last_batch_iteration"
        ]
        rows.append(f"| `{name}` | {', '.join(parameters)} |")
    return ["| type | parameters |", "| --- | --- |", *rows]


def with_tables(text: str) -> str:
    """The document with the table below each heading that has one written anew; no key has a row elsewhere."""
    objects = (*DEEPSPEED_KEYS.items(), *OWN_KEYS.items())
    tables = {f"`{path}`" if path else TOP_LEVEL: key_table(path, keys) for path, keys in objects}
    tables["Schedules"] = schedule_table()
    lines: list[str] = []
    due: list[str] = []  # the table of the section
    for line in text.splitlines():
        if line.startswith("#"):
            assert not due, f"no table above {line}"
            due = tables.pop(line.strip("# "), [])
        if due and line.startswith("|"):
            if lines[-1] != due[-1]:
                lines += due
            continue
        if lines and due and lines[-1] == due[-1]:
            due = []
        assert not _ROW.match(line), f"a row outside of the table of its section: {line}"
        lines.append(line)
    assert not due or lines[-1] == due[-1], "no table at the end"
    assert not tables, f"no heading for {', '.join(tables)}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text()))
