"""Builds the native modules: plain C++17 and the kernel's own headers, nothing else.

The bindings use CPython's limited API, so one build serves every Python from 3.10 on. SIMD is chosen at
run time: no global -march or -mavx flag may appear here.
"""

from glob import glob

from setuptools import Extension, setup

COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",
    # Adam's arithmetic must round the same in every ISA: no silent a*b+c fusion.
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
]


def native_module(name: str, folder: str) -> Extension:
    return Extension(
        f"offloadzero.{name}",
        sources=sorted(glob(f"csrc/{folder}/*.cpp")),
        depends=sorted([*glob(f"csrc/{folder}/*.h"), *glob("csrc/common/*.h")]),
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=["-pthread"],
        language="c++",
        py_limited_api=True,
    )


setup(
    ext_modules=[
        native_module("io._aio", "aio"),
        native_module("native._kernels", "cpu_adam"),
        native_module("native._termination", "termination"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
