"""Numbers that C++ and Python spell each by itself are the same: limits, enums, the compact format."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from offloadzero.core import constants
from offloadzero.native import kernels
from offloadzero.native.kernels import Isa

CSRC = Path(__file__).parents[2] / "csrc"

# File and name in C++ -> the number in Python.
NUMBERS = {
    ("aio/binding.cpp", "MIN_BLOCK_SIZE"): constants.GRID_BYTES,
    ("aio/binding.cpp", "MAX_BLOCK_SIZE"): constants.MAX_IO_BLOCK_BYTES,
    ("aio/binding.cpp", "MAX_THREAD_DEPTH"): constants.MAX_IO_DEPTH,
    ("aio/binding.cpp", "MAX_NUM_THREADS"): constants.MAX_IO_THREADS,
    ("cpu_adam/binding.cpp", "MAX_THREADS"): constants.MAX_UPDATE_THREADS,
    ("cpu_adam/cpu_adam.h", "COMPACT_BLOCK"): constants.COMPACT_BLOCK,
    ("cpu_adam/kernel_compact.h", "SMALLEST_SCALED"): constants.SMALLEST_SCALED,
    ("cpu_adam/kernel_compact.h", "SPAN_M"): constants.SPAN_M,
    ("cpu_adam/kernel_compact.h", "SPAN_S"): constants.SPAN_S,
}


def numbers_of(file: str) -> dict[str, float]:
    """The constants of a file by name; those that are no literals, or shifted ones, are left out."""
    found = {}
    for declared in re.findall(r"constexpr \w+ ([^;(]*);", (CSRC / file).read_text()):
        for name, text in re.findall(r"(\w+) = ([^,]+)", declared):
            literal = re.fullmatch(r"(?:uint64_t\{)?([0-9'xp.-]+?)[uf]?\}?(?: << (\d+))?", text)
            if literal is not None:
                digits = literal[1].replace("'", "")
                number = float.fromhex(digits) if "x" in digits else float(digits)
                found[name] = number * 2 ** int(literal[2] or 0)
    return found


@pytest.mark.parametrize(("file", "name"), NUMBERS)
def test_a_number_of_cpp_is_the_number_of_python(file: str, name: str) -> None:
    assert numbers_of(file)[name] == NUMBERS[file, name]


def enum_of(name: str) -> dict[str, int]:
    text = (CSRC / "cpu_adam/cpu_adam.h").read_text()
    body = re.search(rf"enum class {name} : int \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None
    return {entry: int(value) for entry, value in re.findall(r"(\w+) = (\d+)", body[1])}


def test_enums_of_cpp_have_the_codes_of_python() -> None:
    names = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
    assert enum_of("DType") == {names[dtype]: code for dtype, code in kernels.DTYPE_CODE.items()}
    assert enum_of("Isa") == {isa.name: kernels.isa_code(isa) for isa in Isa}
    layouts = {
        names[param] + ("" if master is None else "_SPLIT" if master == torch.int16 else "_MASTER"): code
        for (param, master), code in kernels.LAYOUT_CODE.items()
    }
    assert enum_of("Layout") == layouts
