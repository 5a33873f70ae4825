"""The documents: links lead somewhere, what they name is there, the parity table is found where it is written."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import offloadzero
from tests.repository.test_import_floors import FLOORS
from tests.support import parity

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [
        link for link in targets if "://" not in link and link and not (document.parent / link).exists()
    ]
    assert missing == []


def test_one_version_is_named_everywhere() -> None:
    version = re.escape(offloadzero.__version__)
    for name, where in {
        "pyproject.toml": rf'^version = "{version}"$',
        "CITATION.cff": rf"^version: {version}$",
        "CHANGELOG.md": rf"^## {version} ",
        "README.md": rf"offloadzero-{version}-cp310",
    }.items():
        assert re.search(where, (ROOT / name).read_text(), re.MULTILINE), name


def test_the_site_has_every_document() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {name for name in listed if "/" not in name and name.islower()} == {
        path.name for path in (ROOT / "docs").glob("*.md")
    }
    assert len(README.splitlines()) <= 120


def test_the_parity_table_is_written_between_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = parity.DOCUMENT.read_text()
    table = text.split(parity.BEGIN)[1].split(parity.END)[0].strip()
    copy = tmp_path / "parity.md"
    copy.write_text(text)
    monkeypatch.setattr(parity, "DOCUMENT", copy)
    parity.write_document(table)
    assert copy.read_text() == text
    parity.write_document("another table")
    assert copy.read_text() == text.replace(table, "another table")


def constant_parts(node: ast.AST) -> list[str]:
    """The first line of a string in the code, without what is filled in."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = re.split(r"%[-+.\d]*[sdrfg]", node.value)
    else:
        return []
    for index, part in enumerate(parts):
        if "\n" in part:
            return [*parts[:index], part.partition("\n")[0]]
    return parts


@functools.cache
def messages_of_the_package() -> set[tuple[str, ...]]:
    """The fixed parts of its strings, those with fewer than eight characters aside."""
    strings = {
        tuple(part for part in constant_parts(node) if part)
        for file in (ROOT / "offloadzero").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    }
    return {parts for parts in strings if sum(map(len, parts)) >= 8}


def fixed_places(message: str) -> Iterator[int]:
    """The characters of `message` that stand so, and in this order, in a string of the package."""
    for parts in messages_of_the_package():
        starts, end = [], 0
        for part in parts:
            start = message.find(part, end)
            if start < 0:
                break
            starts.append(start)
            end = start + len(part)
        else:
            for start, part in zip(starts, parts, strict=True):
                yield from range(start, start + len(part))


# Units and tensors, paths, units of bytes, and the reasons that the system gives.
FILLED_IN = (
    "blocks home param exp_avg KiB GiB GB bytes host nvme nvme_path mnt train offloadzero bin pread pwrite "
    "Input output error No space left on device Connection timed out of memory EPERM ENOMEM io_uring "
    "native_aio aiofiles torch _C _autograd _top_saved_tensors_default_hooks"
)
TROUBLES = code_blocks((ROOT / "docs" / "troubleshooting.md").read_text(), "text")


@pytest.mark.parametrize("message", TROUBLES, ids=lambda message: message[:40].strip())
def test_the_messages_in_troubleshooting_are_those_of_the_code(message: str) -> None:
    places = set(fixed_places(message.strip()))
    found = re.finditer(r"[A-Za-z_]{2,}", message.strip())
    invented = {word[0] for word in found if not places & set(range(*word.span()))} - set(FILLED_IN.split())
    assert invented == set()


def test_a_message_that_nobody_writes_is_found() -> None:
    message = "host: 31.20 GiB are needed, 22.87 GiB are present"
    assert max(fixed_places(message)) < message.index("present")


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
IN_CODE = re.compile(r"`([^`]+)`")


def place_of(name: str) -> Path:
    """A path of docs/architecture.md in the tree."""
    return (
        ROOT / name
        if name.startswith(("csrc/", "tests/", "docs/", "benchmarks/"))
        else ROOT / "offloadzero" / name
    )


def names_in(file: Path) -> set[str]:
    """`function`, `Class` and `Class.method` of a Python file."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef))
    return found


def table_cells(text: str) -> Iterator[list[str]]:
    """The rows of all tables, cell by cell."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_architecture_names_files_that_are_there() -> None:
    paths = {name for name in IN_CODE.findall(ARCHITECTURE) if re.fullmatch(r"[\w/*]+/[\w*]*(\.\w+)?", name)}
    assert len(paths) > 30
    assert [
        name for name in sorted(paths) if not list(ROOT.glob(str(place_of(name).relative_to(ROOT))))
    ] == []


def test_architecture_names_functions_that_are_there() -> None:
    """In a table a name in code stands beside the file that has it."""
    checked, missing = 0, []
    for cells in table_cells(ARCHITECTURE):
        files = [
            name
            for cell in cells[:2]
            for name in IN_CODE.findall(cell)
            if name.endswith(".py") and "/" in name
        ]
        if len(files) != 1:
            continue
        names = [
            n for cell in (cells[0], *cells[2:3]) for n in IN_CODE.findall(cell) if re.fullmatch(r"[\w.]+", n)
        ]
        there = names_in(place_of(files[0]))
        for name in names:
            if name[0].isupper() or name.startswith("_") or "_" in name:
                checked += 1
                missing += [] if name in there else [f"{files[0]}: {name}"]
    assert missing == []
    assert checked > 30


def test_architecture_cites_notes_that_are_there() -> None:
    notes = re.findall(r"\[Note: ([^\]]+)\]", " ".join(ARCHITECTURE.split()))
    files = [*(ROOT / "offloadzero").rglob("*.py"), *(ROOT / "csrc").rglob("*.h")]
    code = "\n".join(file.read_text() for file in files)
    written = set(re.findall(r"^(?:// )?\[Note: ([^\]]+)\]$", code, re.MULTILINE))
    assert len(notes) > 10
    assert [note for note in notes if note != "title" and note not in written] == []


def test_code_cites_notes_where_they_are_written() -> None:
    """Each that is cited is there, and in the file that is named beside it."""
    files = [file for name in ("offloadzero", "tests", "csrc") for file in (ROOT / name).rglob("*.*")]
    texts = {str(file): file.read_text() for file in files if file.suffix in (".py", ".h", ".cpp")}
    written: dict[str, list[str]] = {}
    for path, text in texts.items():
        for note in re.findall(r"^ *(?:// )?\[Note: ([^\]]+)\]$", text, re.MULTILINE):
            written.setdefault(note, []).append(path)
    cited, wrong = 0, []
    for path, text in texts.items():
        flat = " ".join(re.sub(r"\n *(?:#|//)", " ", text).split())
        for note, file in re.findall(r"\[Note: ([^\]\\]+)\](?:\)? in ([\w/]+\.\w+))?", flat):
            cited += bool(file)
            if not any(place.endswith(f"/{file}" if file else "") for place in written.get(note, ())):
                wrong.append(f"{path}: {note} in {file}")
    assert wrong == []
    assert cited > 10


def test_architecture_has_the_house_of_the_import_test() -> None:
    rows = [cells for cells in table_cells(ARCHITECTURE) if cells[0].isdigit()]
    house = {name: int(floor) for floor, rooms in rows for name in IN_CODE.findall(rooms)}
    assert house == {name: floor for name, floor in FLOORS.items() if name}
