"""Pages of the site that lie outside of docs/: MkDocs calls these functions (`hooks` in mkdocs.yml)."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "tests/README.md", "benchmarks/*.md", "benchmarks/*/*.md")
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]+)")
OUTPUT = re.compile(r'(<div class="language-text highlight)(">.*?<code>)(.*?)(?=</code>)', re.DOTALL)
OPTION = re.compile(r"(?<=[>\s])--[a-z][\w-]{1,20}(?![\w-]|[^<>]*>)")
COLUMNS = re.compile(r"\S  +\S")
WIDE_CHARS = 80
SENTENCES = re.compile(
    r"<table>(?=\s*<thead>\s*<tr>\s*<th>(what|key|to change|you have)</th>\s*<th>[^<]*</th>\s*<th>)"
)


def on_config(config: Any) -> None:
    """Expand a folder of the navigation, `benchmarks/`, into its pages; README is the first by its name."""
    for section in config.nav:
        for title, entry in section.items():
            if isinstance(entry, list):
                section[title] = [page for item in entry for page in _expanded(item)]


def _expanded(item: dict[str, str]) -> list[Any]:
    ((title, place),) = item.items()
    if not place.endswith("/"):
        return [item]
    return [{title: sorted(path for path in _outside() if path.startswith(place))}]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/, each under its path in the repository."""
    for name in _outside():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    place = page.file.src_uri
    in_repository = place if place in _outside() else f"docs/{place}"

    def of_the_site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), found[1]))
        return f"]({posixpath.relpath(target.removeprefix('docs/'), posixpath.dirname(place) or '.')}"

    return LINK.sub(of_the_site, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark for style.css: output whose lines may wrap, options of commands, tables of sentences in three columns."""
    html = OUTPUT.sub(_marked, SENTENCES.sub(r'<table data-sentences="\1">', html))
    return OPTION.sub(r'<span class="option">\g<0></span>', html)


def _marked(found: re.Match[str]) -> str:
    """Lines in columns stay whole: `wraps` where there is none, `wraps-wide` where none of them is wide."""
    in_columns = [len(line) for line in found[3].splitlines() if COLUMNS.search(line)]
    mark = "" if max(in_columns, default=0) > WIDE_CHARS else " wraps-wide" if in_columns else " wraps"
    return f"{found[1]}{mark}{found[2]}{found[3]}"


def _outside() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for pattern in OUTSIDE for path in ROOT.glob(pattern)]
