"""Builds the native modules in place with a C++ compiler and Python's headers alone.

setup.py lists their sources. It is run with a stand-in for setuptools: an environment that was made for another
project may have none, or one that is older than this project's pyproject.toml.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class BuildError(Exception):
    """The build failed; the message is the compiler's."""


def extensions() -> list[types.SimpleNamespace]:
    """Return the arguments of each `Extension` in setup.py."""
    found: dict[str, Any] = {}
    stand_in: Any = types.ModuleType("setuptools")
    stand_in.Extension = lambda name, **keys: types.SimpleNamespace(name=name, **keys)
    stand_in.setup = found.update
    before, directory = sys.modules.get("setuptools"), os.getcwd()
    sys.modules["setuptools"] = stand_in
    os.chdir(ROOT)  # where its globs begin
    try:
        runpy.run_path(str(ROOT / "setup.py"))
    finally:
        os.chdir(directory)
        del sys.modules["setuptools"]
        if before is not None:
            sys.modules["setuptools"] = before
    return list(found["ext_modules"])


def build(
    compiler: str,
    *,
    only: Iterable[str] = (),
    target: Path = ROOT,
    run: Callable[[list[str]], None] | None = None,
) -> list[Path]:
    """Compile and link modules older than their sources; return those that were made. Raises BuildError."""
    run = run or _run
    made = []
    for extension in extensions():
        short = extension.name.rpartition(".")[2]
        module = target / Path(*extension.name.split(".")).with_suffix(".abi3.so")
        if (only and short not in only) or _is_newer(
            module, [*extension.sources, *extension.depends, "setup.py"]
        ):
            continue
        _make(compiler, extension, module, target / "build" / "objects" / short, run)
        made.append(module)
    return made


def _make(
    compiler: str,
    extension: types.SimpleNamespace,
    module: Path,
    folder: Path,
    run: Callable[[list[str]], None],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    module.parent.mkdir(parents=True, exist_ok=True)
    macros = [f"-D{name}={value}" for name, value in extension.define_macros]
    flags = [*extension.extra_compile_args, "-DNDEBUG", "-fPIC", *macros]
    flags.append(f"-I{sysconfig.get_paths()['include']}")
    objects = [str(folder / f"{Path(source).stem}.o") for source in extension.sources]

    def compile_one(source: str, target: str) -> None:
        run([*compiler.split(), *flags, "-c", str(ROOT / source), "-o", target])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, extension.sources, objects))
    partial = module.with_suffix(".partial")
    run([*compiler.split(), "-shared", *objects, *extension.extra_link_args, "-o", str(partial)])
    partial.replace(module)


def _is_newer(module: Path, sources: Iterable[str]) -> bool:
    return module.exists() and module.stat().st_mtime > max((ROOT / s).stat().st_mtime for s in sources)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def main() -> int:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu_machine import compiler

    found = compiler()
    if found is None:
        print("missing: a C++17 compiler", file=sys.stderr)
        return 2
    try:
        for module in build(found):
            print(f"built {module.relative_to(ROOT)}")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    sys.path.insert(0, str(ROOT))
    from offloadzero.io import _aio  # noqa: F401 (it loads)
    from offloadzero.native import _kernels, _termination  # noqa: F401 (they load)

    return 0


if __name__ == "__main__":
    sys.exit(main())
