"""No file is too long to be read at once, and the test files that texts name are there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
CODE = ("offloadzero", "tests", "benchmarks", "examples", "csrc")
MAX_LINES = 600
MAX_FILES = 14  # of a folder of the package
MAX_LOOSE = 6  # of its topmost folder


def code() -> list[Path]:
    files = [
        path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".cpp", ".h"}
    ]
    return sorted(files)


def test_files_have_no_more_than_600_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in code()}
    assert len(lengths) > 400
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_folders_have_no_more_than_14_files_and_few_lie_loose() -> None:
    package = ROOT / "offloadzero"
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in package.rglob("*.py"))
    assert len(sizes) > 20
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}
    assert sizes["offloadzero"] <= MAX_LOOSE


def test_files_that_are_said_to_take_long_are_there() -> None:
    assert len(set(LONG_FILES)) == len(LONG_FILES)
    assert [name for name in LONG_FILES if not (TESTS / name).exists()] == []


# `tests/io/test_aio.py`, `test_aio.py`, `io/test_aio.py::test_of_it`.
TEST = re.compile(r"(?P<file>\b(?:\w+/)*test_\w+\.py)\b(?:::(?P<test>\w+))?")
WRITTEN_BY_TESTS = {"test_forever.py", "test_hanging.py"}
PLACE = re.compile(r"(?<![\w/.-])tests/[\w/]*\w(?:\.(?:py|cpp|h|md)\b)?")


def absent(text: str) -> Iterator[str]:
    """The test files, tests, and places below `tests`, that a text names and that are not there."""
    for found in TEST.finditer(text):
        name = found["file"]
        if name in WRITTEN_BY_TESTS:
            continue
        files = [
            path for path in TESTS.rglob(Path(name).name) if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")
        ]
        if len(files) != 1:
            yield found[0]
        elif found["test"]:
            nodes = ast.walk(ast.parse(files[0].read_text()))
            if not any(isinstance(node, ast.FunctionDef) and node.name == found["test"] for node in nodes):
                yield found[0]
    for found in PLACE.finditer(text):
        if not (ROOT / found[0]).exists():
            yield found[0]


def test_what_texts_name_below_tests_is_there() -> None:
    documents = [
        path for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks", TESTS) for path in folder.glob("*.md")
    ]
    texts = [ROOT / "Makefile", *documents, *(path for path in code() if path != Path(__file__))]
    assert sum(len(TEST.findall(path.read_text())) for path in texts) > 80
    found = {str(path.relative_to(ROOT)): list(absent(path.read_text())) for path in texts}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`tests/io/test_aio.py` and test_files.py::test_files_have_no_more_than_600_lines", []),
        ("# tests/memory/test_aio.py has the rest", ["tests/memory/test_aio.py", "tests/memory/test_aio.py"]),
        ("aio: test_aio.py::test_of_another_file", ["test_aio.py::test_of_another_file"]),
        ("a device of `tests/simulation`", ["tests/simulation"]),
    ],
)
def test_names_that_are_not_there_are_found(text: str, names: list[str]) -> None:
    assert list(absent(text)) == names
