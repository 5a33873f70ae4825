"""Builds the native modules: plain C++17 and the kernel's own headers, nothing else.

The bindings use CPython's limited API, so one build serves every Python from 3.10 on. SIMD is chosen at
run time: no global -march or -mavx flag may appear here.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    "-g0",  # Python's own flags ask for -g, which made the modules ten times as large
    "-fvisibility=hidden",
    # Adam's arithmetic must round the same in every ISA: no silent a*b+c fusion.
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
]


# What a module has of the C++ library, of which a wheel brings its own, stays inside it.
EXPORTS = "csrc/exports.map"


def native_module(name: str, folder: str) -> Extension:
    return Extension(
        f"offloadzero.{name}",
        sources=sorted(glob(f"csrc/{folder}/*.cpp")),
        depends=sorted([*glob(f"csrc/{folder}/*.h"), *glob("csrc/common/*.h"), EXPORTS]),
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=["-pthread", f"-Wl,--version-script={EXPORTS}"],
        language="c++",
        py_limited_api=True,
    )


class build_on_all_cores(build_ext):  # noqa: N801 (commands of setuptools have such names)
    """Compiles the sources of a module at once: one after the other they take minutes."""

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                made = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in made for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()


setup(
    cmdclass={"build_ext": build_on_all_cores},
    ext_modules=[
        native_module("io._aio", "aio"),
        native_module("native._kernels", "cpu_adam"),
        native_module("native._termination", "termination"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
