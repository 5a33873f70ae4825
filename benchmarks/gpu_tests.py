"""The tests as `gpu.py` runs them: file by file, several at once, within a time, and without the development extras."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_process import Deadline, run_process

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit status
TAIL_LINES = 25
MIN_FILE_S = 20.0  # with less than this left no file is begun
_NO_MODULE = re.compile(r"^E\s+ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)


@dataclass(frozen=True)
class FileResult:
    """The result of one file of tests. `status`: passed, failed, timed out, left out, not reached."""

    file: str
    status: str
    seconds: float = 0.0
    num_tests: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    output: str = ""

    def line(self) -> str:
        counts = f"{self.num_tests} tests, {self.num_failed} failed, {self.num_skipped} skipped"
        words = counts if self.num_tests else self.output if self.status == "left out" else ""
        return f"  {self.status:<11} {self.file} ({self.seconds:.0f} s) {words}".rstrip()


def cpu_test_files() -> list[str]:
    """Return all files, those with the most text first: they tend to take longest."""
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: -path.stat().st_size)
    return [str(path.relative_to(ROOT)) for path in files]


def files_with(mark: str) -> list[str]:
    """Return the files in which a test has this mark."""
    return [file for file in cpu_test_files() if f"pytest.mark.{mark}" in (ROOT / file).read_text()]


def run_files(
    files: Sequence[str], *, marker: str, num_processes: int, deadline: Deadline, log: Path
) -> list[FileResult]:
    """Run each file in a pytest of its own; a file that has not begun at the deadline is not reached."""

    def run(file: str) -> FileResult:
        if deadline.left_s() < MIN_FILE_S:
            return FileResult(file, "not reached")
        result = _run_file(file, marker=marker, deadline=deadline)
        print(result.line(), flush=True)
        if result.status in ("failed", "timed out"):
            with log.open("a") as stream:
                stream.write(f"=== {file}: {result.status}\n{result.output}\n")
        return result

    with ThreadPoolExecutor(num_processes) as pool:
        return list(pool.map(run, files))


def _run_file(file: str, *, marker: str, deadline: Deadline) -> FileResult:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, file]
    if importlib.util.find_spec("aiofiles") is None:
        command += ["-k", "not aiofiles"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if "not gpu" in marker:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # these tests have the CPU as the device
    with tempfile.TemporaryDirectory() as folder:
        counts_file = Path(folder) / "counts.xml"
        done = run_process(
            [*command, f"--junitxml={counts_file}"], deadline=deadline, environment=environment
        )
        counts = read_counts(counts_file)
    status = {0: "passed", NO_TESTS: "left out"}.get(done.status if done.status is not None else 1, "failed")
    output = "\n".join(done.output.splitlines()[-TAIL_LINES:])
    if done.timed_out:
        status = "timed out"
    elif status == "left out":
        output = f"nothing in it is marked: {marker}"
    elif status == "failed" and counts["num_tests"] == counts["num_failed"]:
        missing = _NO_MODULE.search(done.output)
        if missing is not None:
            status, output = "left out", f"needs {missing[1]}"
            counts = dict.fromkeys(counts, 0)
    return FileResult(file, status, done.seconds, output=output, **counts)


def read_counts(path: Path) -> dict[str, int]:
    """Return the counts of a JUnit file; zeros when pytest did not write it."""
    counts = {"num_tests": 0, "num_failed": 0, "num_skipped": 0}
    if path.exists():
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            counts["num_tests"] += int(suite.get("tests", 0))
            counts["num_failed"] += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            counts["num_skipped"] += int(suite.get("skipped", 0))
    return counts


def summary(results: Sequence[FileResult]) -> dict[str, Any]:
    """Return the counts, and the files that did not pass."""
    by_status: dict[str, list[str]] = {}
    for result in results:
        by_status.setdefault(result.status, []).append(result.file)
    return {
        "num_tests": sum(result.num_tests for result in results),
        "num_failed": sum(result.num_failed for result in results),
        "num_skipped": sum(result.num_skipped for result in results),
        **{f"files {status}": len(files) for status, files in by_status.items()},
        "files": [asdict(result) for result in results],
    }
