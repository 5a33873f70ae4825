"""tests/native/kernels: the optimizer kernels as a C++ program, under the sanitizers and exhaustively."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offloadzero.native.kernels import Isa, isa_supported

ROOT = Path(__file__).resolve().parents[2]
CORE = sorted(path for path in ROOT.glob("csrc/cpu_adam/*.cpp") if path.name != "binding.cpp")
SOURCES = [*CORE, ROOT / "tests/native/kernels/kernels_test.cpp"]
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread"]

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")


# Kernels that this CPU has not got are linked and do not run: sanitizers would see nothing in them.
NOT_RUN = {f"kernels_{isa.value}.cpp" for isa in Isa if not isa_supported(isa)}


def build(folder: Path, *flags: str) -> Path:
    """The program; its sources are compiled at once."""

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        own = [flag for flag in flags if source.name not in NOT_RUN or "sanitize" not in flag]
        command = [COMPILER, *FLAGS, *own, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=300)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    program = folder / "kernels_test"
    command = [COMPILER, *FLAGS, *flags, *map(str, objects), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    return program


def run(program: Path, *arguments: str) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_kernels_are_clean_under_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    run(build(tmp_path, "-Og", "-g1", *sanitizers))


@pytest.mark.slow
@pytest.mark.skipif("OFFLOADZERO_TEST_EXHAUSTIVE" not in os.environ, reason="in make campaign")
def test_compact_remainder_for_all_patterns(tmp_path: Path) -> None:
    run(build(tmp_path, "-O3"), "exhaustive")
