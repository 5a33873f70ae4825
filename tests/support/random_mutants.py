"""What the tests catch: mutants of the package drawn at random, each against the tests that come to its place.

    python -m tests.support.random_mutants draw TREE [--count=150] [--seed=0] [--mutants=FILE]
    python -m tests.support.random_mutants run TREE REACHED [--seconds=90] [--only=N,N...] [PYTEST OPTIONS]

`draw` rewrites the package in TREE, a checkout that is thrown away: at each place stands a choice between what it was
and its mutant. Without OFFLOADZERO_MUTANT all is as it was; with OFFLOADZERO_REACHED=FOLDER each place that is come to
is noted there with the test. So one run of the suite there (`python -m pytest tests`) tells which tests reach what.
`run` then takes each mutant against its tests, one place after the other, and prints what killed it.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

CHOICE = '''
import os

_MUTANT, _FOLDER, _seen = os.environ.get("OFFLOADZERO_MUTANT"), os.environ.get("OFFLOADZERO_REACHED"), set()


def chosen(place):
    """Whether the mutant of this place is the one that is tried."""
    if _FOLDER:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if (place, test) not in _seen:
            _seen.add((place, test))
            with open(f"{_FOLDER}/{os.getpid()}", "a") as file:
                file.write(f"{place} {test}\\n")
    return place == _MUTANT
'''
MAX_TESTS = 60
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARED |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}
# Torch's and Triton's compilers read these, or they run before a choice could be made.
LEFT_OUT = ("triton", "_mutant.py")


def candidates(path: Path) -> Iterator[tuple[int, int, int, str, str]]:
    """(line, begin, end, new text, kind) of all mutations of one file, each on one line."""
    text = path.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg | ast.FunctionDef) and (
            note := getattr(node, "annotation", None) or getattr(node, "returns", None)
        ):
            skipped.update(ast.walk(note))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            skipped.update(x for d in node.decorator_list for x in ast.walk(d))
        if isinstance(
            node,
            ast.JoinedStr | ast.Subscript | ast.TypeAlias if sys.version_info >= (3, 12) else ast.JoinedStr,
        ):
            skipped.update(ast.walk(node))
        if isinstance(node, ast.Match):
            skipped.update(x for case in node.cases for x in ast.walk(case.pattern))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for node in {
        n for function in functions for statement in function.body for n in ast.walk(statement)
    } - skipped:
        line = getattr(node, "lineno", None)
        if line is None or node.end_lineno != line or not lines[line - 1].isascii():
            continue
        begin, end = node.col_offset, node.end_col_offset
        source = lines[line - 1][begin:end]

        def part(inner: ast.expr, line: int = line) -> str:
            return lines[line - 1][inner.col_offset : inner.end_col_offset]

        def choice(mutant: str, kind: str, source: str = source) -> tuple[int, int, int, str, str]:
            return line, begin, end, f"(({mutant}) if _chosen(@) else ({source}))", kind  # noqa: B023

        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
            yield choice(
                f"({part(node.left)}) {COMPARED[type(node.ops[0])]} ({part(node.comparators[0])})", "compare"
            )
        elif (
            isinstance(node, ast.BinOp)
            and type(node.op) in COMPUTED
            and not isinstance(node.left, ast.Constant)
        ):
            yield choice(f"({part(node.left)}) {COMPUTED[type(node.op)]} ({part(node.right)})", "compute")
        elif isinstance(node, ast.BoolOp):
            other = " or " if isinstance(node.op, ast.And) else " and "
            yield choice(other.join(f"({part(value)})" for value in node.values), "and, or")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield choice(part(node.operand), "not")
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield choice(str(not node.value), "constant")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield choice(str(node.value + 1), "constant")
        elif isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
            value = part(node.value)
            yield line, begin, end, f"return (None if _chosen(@) else ({value}))", "return"
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and source == lines[line - 1].strip()
        ):
            yield line, begin, end, f"_chosen(@) or {source}", "no call"
        elif isinstance(node, ast.Assign | ast.AugAssign) and source == lines[line - 1].strip():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(targets[0], ast.Attribute | ast.Subscript) or isinstance(node, ast.AugAssign):
                yield line, begin, end, f"if not _chosen(@): {source}", "no assignment"


def draw(tree: Path, count: int, seed: int) -> list[dict[str, object]]:
    """Draw mutants and write the choices into `tree`. Returns what each is."""
    package = tree / "offloadzero"
    files = [
        path for path in sorted(package.rglob("*.py")) if not any(name in str(path) for name in LEFT_OUT)
    ]
    every = [(path, *found) for path in files for found in sorted(candidates(path))]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    drawn: list[dict[str, object]] = []
    by_file = defaultdict(list)
    for number, (path, line, begin, end, new, kind) in enumerate(chosen):
        was = path.read_text().splitlines()[line - 1][begin:end]
        drawn.append(
            {"file": str(path.relative_to(tree)), "line": line, "kind": kind, "was": was, "new": new}
        )
        by_file[path].append((line, begin, end, new.replace("@", repr(str(number)))))
    for path, found in by_file.items():
        lines = path.read_text().splitlines()
        last = (len(lines) + 1, 0)
        for line, begin, end, new in sorted(found, reverse=True):
            if (line, end) > last:  # inside of one that is written already, or around it
                print(f"{path}:{line} is left out: two mutants at one place")
                continue
            last = (line, begin)
            lines[line - 1] = lines[line - 1][:begin] + new + lines[line - 1][end:]
        future = "from __future__ import annotations"
        at = (
            lines.index(future) if future in lines else next(i for i, x in enumerate(lines) if "import " in x)
        )
        bind = "from offloadzero._mutant import chosen as _chosen"
        lines[at] = f"{lines[at]}; {bind}" if future in lines else f"{bind}; {lines[at]}"
        path.write_text("\n".join(lines) + "\n")
        ast.parse(path.read_text())
    (package / "_mutant.py").write_text(CHOICE)
    return drawn


def reached(folder: Path) -> dict[str, list[str]]:
    """The tests that came to each place, by its number."""
    tests: dict[str, set[str]] = defaultdict(set)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            place, _, test = line.partition(" ")
            if test:
                tests[place].add(test)
    return {place: sorted(found) for place, found in tests.items()}


def verdict(tree: Path, number: str, tests: list[str], seconds: float, options: list[str]) -> str:
    """What became of one mutant: the test that failed first, "hangs", or "lives"."""
    environment = os.environ | {"OFFLOADZERO_MUTANT": number, "PYTHONPATH": str(tree)}
    environment.pop("OFFLOADZERO_REACHED", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rfE", *options, *tests]
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return "hangs"
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].split(" ", 1)[1]
    return "lives" if process.returncode == 0 else f"ends with {process.returncode}"


def chosen_tests(tests: list[str], report: Path | None) -> list[str]:
    """At most MAX_TESTS of those that passed without a mutant: the fastest of each file first, then the next ones."""
    seconds: dict[str, float] = {}
    if report is not None:
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("classname", "").replace(".", "/")
            if case.find("failure") is None and case.find("error") is None and case.find("skipped") is None:
                seconds[f"{file}|{case.get('name')}"] = float(case.get("time", 0))
    by_file: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for test in tests:
        file, _, name = test.partition("::")
        name, bracket, row = name.partition("[")
        *within, name = name.split("::")
        key = f"{'/'.join((file.removesuffix('.py'), *within))}|{name}{bracket}{row}"
        if report is None or key in seconds:
            by_file[file].append((seconds.get(key, 0.0), test))
    rows = [sorted(found) for found in by_file.values()]
    ordered = [
        row[depth] for depth in range(max(map(len, rows), default=0)) for row in rows if depth < len(row)
    ]
    return [test for _, test in sorted(ordered[:MAX_TESTS])]


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    named = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
    plain = [a for a in arguments if not a.startswith("--")]
    verb, tree = plain[0], Path(plain[1]).resolve()
    listed = tree / "mutants.json"
    if verb == "draw":
        drawn = draw(tree, int(named.get("count", 150)), int(named.get("seed", 0)))
        listed.write_text(json.dumps(drawn, indent=1))
        print(len(drawn), Counter(str(d["kind"]) for d in drawn))
        return
    report = Path(named["report"]) if "report" in named else None
    drawn, by_place = json.loads(listed.read_text()), reached(Path(plain[2]))
    only = named["only"].split(",") if "only" in named else [str(n) for n in range(len(drawn))]
    results = {}
    for number in only:
        tests = chosen_tests(by_place.get(number, []), report)
        results[number] = (
            verdict(tree, number, tests, float(named.get("seconds", 90)), []) if tests else "no test"
        )
        mutant = drawn[int(number)]
        print(
            number,
            f"{mutant['file']}:{mutant['line']}",
            repr(mutant["was"]),
            "->",
            results[number],
            flush=True,
        )
    print(Counter(r if r in ("lives", "no test", "hangs") else "killed" for r in results.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
