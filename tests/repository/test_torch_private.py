"""torch's private names: all in one module, which names the versions; an older torch is refused at import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offloadzero.core import torch_private

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "offloadzero"


def looked_up_names() -> list[str]:
    """The dotted names of functions in the module's own source; a class cannot be taken from torch once loaded."""
    return re.findall(r'"(_C\.[\w.]*_[a-z_]+)"', (PACKAGE / "core" / "torch_private.py").read_text())


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


# Imports the module in a child for each name, from which that name is gone; torch is imported once.
WITHOUT_A_NAME = """
import json, operator, os, sys, torch
refusals = {}
for name in sys.argv[1:]:
    reading, writing = os.pipe()
    if os.fork() == 0:
        holder, _, attribute = name.rpartition(".")
        delattr(operator.attrgetter(holder)(torch), attribute)
        torch.__version__ = "2.7.1"
        try:
            import offloadzero.core.torch_private
        except ImportError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        refusals[name] = pipe.read()
    assert os.wait()[1] == 0
print(json.dumps(refusals))
"""


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    done = run_python(WITHOUT_A_NAME, *looked_up_names())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", looked_up_names())
def test_a_torch_without_the_name_is_refused_at_import(name: str, refusals: dict[str, str]) -> None:
    assert refusals[name] == (
        "offloadzero needs torch >= 2.8 (tested with 2.8, 2.9, 2.10, 2.11, 2.12, 2.13, 2.14): "
        "torch 2.7.1 has no torch." + name
    )


def test_importing_the_package_does_not_look_them_up() -> None:
    done = run_python("import offloadzero, sys; print('offloadzero.core.torch_private' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_the_names_do_what_the_comments_say() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert torch_private.top_saved_tensors_default_hooks(False) is None
    torch_private.push_saved_tensors_default_hooks(pack, pack)
    try:
        assert torch_private.top_saved_tensors_default_hooks(False) == (pack, pack)
    finally:
        torch_private.pop_saved_tensors_default_hooks()
    assert torch_private.top_saved_tensors_default_hooks(False) is None
    assert torch_private.current_autograd_node() is None
    assert torch_private.current_graph_task_id() == -1
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 2
    product.register_hook(
        lambda _: seen.append((torch_private.current_autograd_node(), torch_private.current_graph_task_id()))
    )
    product.sum().backward()
    ((node, task),) = seen
    assert node is not None
    assert task >= 0


def test_what_runs_at_the_end_of_a_backward_is_a_part_of_it() -> None:
    """What the ranks of one model send each other there comes in the order of a graph: see `DeadlockDetector.look`."""
    seen = []

    def note(when: str) -> None:
        seen.append((when, torch_private.current_graph_task_id()))

    def in_backward(_: torch.Tensor) -> None:
        note("in it")
        torch_private.queue_backward_callback(at_its_end)

    def at_its_end() -> None:
        note("at its end")
        with torch.enable_grad():
            (leaf * 3).sum().backward()  # another one inside of it
        note("at its end, behind another")

    leaf = torch.ones(1, requires_grad=True)
    product = leaf * 2
    product.register_hook(in_backward)
    product.sum().backward()
    note("behind it")
    number = seen[0][1]
    assert number != torch_private.NO_GRAPH_TASK
    assert seen == [
        ("in it", number),
        ("at its end", number),
        ("at its end, behind another", number),
        ("behind it", torch_private.NO_GRAPH_TASK),
    ]


def test_the_set_up_asks_for_the_versions_that_work() -> None:
    version = ".".join(map(str, torch_private.MINIMUM_TORCH))
    assert torch_private.TESTED_TORCH[0] == version
    assert f'"torch>={version}"' in (ROOT / "pyproject.toml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert f">= {torch_private.MINIMUM_TORCH}" in makefile
    ((installed, its_version),) = re.findall(r"^TORCH \?= (torch==(\d+\.\d+)\.\d+)$", makefile, re.MULTILINE)
    assert its_version in torch_private.TESTED_TORCH
    tested = ", ".join(torch_private.TESTED_TORCH[:-1]) + " and " + torch_private.TESTED_TORCH[-1]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"it must be {version} or later (tested with {tested})" in readme
    assert f"or install `{installed}`" in readme
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= torch_private.MINIMUM_TORCH


def private_uses(text: str) -> list[str]:
    """Names with one underscore that are taken from torch, or imported from a part of it."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)*\._[A-Za-z]\w*(\.\w+)*", name):
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(re.match("_[^_]", name) for name in names):
                found.append(ast.unparse(node))
    return found


# torch.utils._pytree has been there, under that name, in every version since 1.8.
ALLOWED = ("from torch.utils import _pytree",)


def test_private_names_are_used_through_that_module_only() -> None:
    assert private_uses("import torch\ntorch._C.x.y; torch.Tensor._z; torch.__version__") != []
    found = {
        f"{file.relative_to(PACKAGE)}: {use}"
        for file in PACKAGE.rglob("*.py")
        for use in private_uses(file.read_text())
        if file.name != "torch_private.py" and not use.startswith(ALLOWED)
    }
    assert found == set()
